"""The Optuna study that keeps a search's trials: its storage, going on with it, sharing it.

A search is a function of skip configs, `evaluate`, and a study that holds every config tried, what
proposed it and what it was worth. Whatever ends a process, finished trials stay; the next process
fails the trials that it left running and goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import socket
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import optuna
from optuna import Study
from optuna.exceptions import (
    ExperimentalWarning,
    StorageInternalError,
    UpdateFinishedTrialError,
)
from optuna.storages import (
    BaseStorage,
    GrpcStorageProxy,
    InMemoryStorage,
    JournalStorage,
    RDBStorage,
)
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial, TrialState

from layerskip.config import SkipConfig
from layerskip.files.records import redacted

from .sampler import SublayerSampler, finished_sets, read_history, value_of
from .space import Space

LOCK_SECONDS = 5
"""After so long a lock on a journal is that of a process that was killed while it wrote."""
OWN_ATTRIBUTES = frozenset({"worker", "beat", "origin", "skipped"})
"""Attributes that say where a trial comes from; others say what its config is worth."""
BEAT_SECONDS = 20.0
"""So often does a worker say that its trial goes on."""
SILENT_SECONDS = 120.0
"""Who has not said so for so long is gone, and another worker takes the trial up."""
WAIT_SECONDS = 0.5
"""Between looks at the trials of others, where there is nothing else to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one skip config is worth; must be a function of the config alone."""

    value: float
    """To maximise: a ratio to plain decoding on the same machine, which other machines share."""
    guide: float | None = None
    """In the units of `value`, for where that is flat because drafting turned itself off: what the
    config would be worth if it had to draft."""
    acceptance: float | None = None
    """Probability that a drafted token is accepted."""
    draft_cost: float | None = None
    """c, one draft step in target steps."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """More to keep with the trial: JSON values by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a study stands after a trial."""

    finished: int
    trials: int
    best: float
    best_origin: str


class OutOfTime(Exception):
    """Ends a trial that would end too late; the next process takes it up."""


def check_storage(storage: str | os.PathLike[str]) -> None:
    """Refuse a storage that cannot be opened, before anything slow is done for it.

    Raises:
        ValueError: it cannot be opened, or is none; in one line, without passwords.
    """
    with quiet(), _readable_errors(f"cannot open the storage {storage}"):
        optuna.get_all_study_names(_open_storage(storage))


def open_study(
    space: Space,
    *,
    storage: str | os.PathLike[str] | None = None,
    name: str = "layerskip",
    identity: Mapping[str, Any] | None = None,
) -> Study:
    """The study called `name` in `storage`, made if it is not there.

    `storage` is a database URL (`sqlite:///file.db`, `postgresql://...`), that of Optuna's proxy
    (`grpc://host:port`), a path of a journal file, or None for this process's memory. `identity`
    holds JSON values that say what the study's values depend on (model, prompts, law): a study made
    with others is refused, as is one made with another space.

    Raises:
        ValueError: the storage cannot be opened, or holds another search under that name.
    """
    made_with = {"space": space.to_dict(), **(identity or {})}
    with quiet(), _readable_errors(f"cannot open the study {name!r} in {storage}"):
        study = optuna.create_study(
            storage=_open_storage(storage),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )
        if not study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr("layerskip", made_with)
        found = study.user_attrs.get("layerskip", {})
    differing = [k for k in {**made_with, **found} if found.get(k) != made_with.get(k)]
    if differing:
        raise ValueError(
            f"the study {name!r} was made with another {' and '.join(differing)}: "
            + "; ".join(f"{k} {found.get(k)!r} then, {made_with.get(k)!r} now" for k in differing)
            + ". Choose another study name or storage"
        )
    return study


def run(
    study: Study,
    space: Space,
    evaluate: Callable[[SkipConfig], Evaluation],
    *,
    trials: int,
    warm_starts: Mapping[str, int],
    seed: int = 0,
    timeout: float | None = None,
    on_trial: Callable[[Standing], None] = lambda _: None,
) -> None:
    """Evaluate configs until the study has `trials` finished ones, or the space has no more.

    What other workers run is waited for, and taken up where they are gone (see `fail_stale`), so
    that all of them see the same trials in the end. `timeout` is in seconds; the trial that runs
    when they are over is finished first, or left by OutOfTime. A config that some trial finished is
    never evaluated again: a trial that repeats it (claimed at the same moment by two workers) takes
    its value over and says so in its attribute `copy_of`.

    Raises:
        ValueError: `trials` or `timeout` is not positive, `evaluate` returned a value that is not
            finite, or the storage went away.
    """
    if trials < 1:
        raise ValueError(f"trials must be 1 or more, got {trials}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout}")
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    study.sampler = SublayerSampler(space, warm_starts=warm_starts, seed=seed)
    heard: dict[int, tuple[int, float]] = {}
    with quiet():
        try:
            while time.monotonic() < deadline:
                fail_stale(study, heard)
                if _left(study, space, trials):
                    with contextlib.suppress(UpdateFinishedTrialError):  # taken for stale
                        _run_trial(study, space, evaluate)
                elif _running(study):
                    time.sleep(WAIT_SECONDS)
                else:
                    break
                on_trial(_standing(study, trials))
        except OutOfTime:
            pass
        except _storage_errors() as error:
            raise ValueError(
                redacted(f"the study's storage failed: {_first_line(error)}")
            ) from None
        finally:
            with contextlib.suppress(*_storage_errors()):  # it has said so above
                fail_stale(study, heard)  # what Ctrl-C or time ended


def fail_stale(study: Study, heard: dict[int, tuple[int, float]]) -> int:
    """Fail the running trials that nobody runs any more, and say how many.

    Those are the trials of this process, which runs none while it calls this, those of processes of
    this machine that are gone, and those whose worker has been silent for SILENT_SECONDS. A trial
    whose process was killed before it said its name counts for nothing.

    Args:
        heard: by trial, its worker's last beat and when this process saw it first, by its own
            clock: clocks of machines differ. Filled in.
    """
    stale = [trial for trial in _running(study) if _is_stale(trial, heard)]
    for trial in stale:
        with contextlib.suppress(UpdateFinishedTrialError, ValueError):  # another worker was first
            study.tell(trial.number, state=TrialState.FAIL)
    return len(stale)


def _running(study: Study) -> list[FrozenTrial]:
    """The trials that run, but for those of nobody."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [trial for trial in running if "worker" in trial.user_attrs]


def _is_stale(trial: FrozenTrial, heard: dict[int, tuple[int, float]]) -> bool:
    host, process, _ = trial.user_attrs["worker"].rsplit(":", 2)
    here = host == socket.gethostname()
    if here and (int(process) == os.getpid() or not _is_running(int(process))):
        return True
    beat, now = trial.user_attrs.get("beat", 0), time.monotonic()
    if trial.number not in heard or heard[trial.number][0] != beat:
        heard[trial.number] = beat, now
    return now - heard[trial.number][1] > SILENT_SECONDS


@contextlib.contextmanager
def _beating(trial: Trial) -> Iterator[None]:
    """Meanwhile, say now and then that a trial goes on.

    Optuna's own heartbeats are of its own loop, and of databases only; these are of every storage.
    """
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(Exception):  # the trial's own thread meets it, and says so
            for number in itertools.count(1):
                if done.wait(BEAT_SECONDS):
                    break
                trial.set_user_attr("beat", number)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, but there
        return True
    return True


def _run_trial(study: Study, space: Space, evaluate: Callable[[SkipConfig], Evaluation]) -> None:
    trial = study.ask(space.distributions)
    # Not `params`: where the space has none, only this asks the sampler.
    mask = space.from_params(trial.relative_params)
    same = finished_sets(study.get_trials(deepcopy=False)).get(mask)
    if same is not None:
        known = {k: v for k, v in same.user_attrs.items() if k not in OWN_ATTRIBUTES}
        value, known["copy_of"] = value_of(same), same.number
    else:
        with _beating(trial):
            found = evaluate(space.skip_config(mask))
        value = found.value
        if not math.isfinite(value):
            trial.set_user_attr("error", f"value {value}")
            study.tell(trial, state=TrialState.FAIL)
            raise ValueError(f"{space.skip_config(mask)} must have a finite value, got {value}")
        known = {"guide": found.guide, "acceptance": found.acceptance}
        known |= {"draft_cost": found.draft_cost, **found.attributes}
    for name, attribute in known.items():
        if attribute is not None:
            trial.set_user_attr(name, attribute)
    study.tell(trial, value)


def _left(study: Study, space: Space, trials: int) -> bool:
    known = study.get_trials(deepcopy=False)
    finished = sum(trial.state is TrialState.COMPLETE for trial in known)
    if finished + len(_running(study)) >= trials:
        return False
    return len(read_history(study).taken) < space.size


def _standing(study: Study, trials: int) -> Standing:
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    best = max(finished, key=value_of, default=None)
    return Standing(
        finished=len(finished),
        trials=trials,
        best=-math.inf if best is None else value_of(best),
        best_origin="" if best is None else best.user_attrs["origin"],
    )


class _Journal(JournalFileBackend):
    """Optuna's journal, for writers that may be killed at any moment.

    Half a line that a killed process left is cut off before the next is written (Optuna's own
    reader gives up at it). Only what finishes a trial is waited for until the disk has it: a
    killed process loses nothing that it wrote, and a trial has dozens of parameters.
    """

    def __init__(self, path: str) -> None:
        lock = JournalFileSymlinkLock(path, grace_period=LOCK_SECONDS)
        super().__init__(path, lock_obj=lock)
        self.path, self.lock = path, lock

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self.lock.acquire()
        try:
            _cut_half_line(self.path)
            with open(self.path, "ab") as journal:
                journal.write(lines.encode())
                journal.flush()
                if any(log.get("values") for log in logs):
                    os.fsync(journal.fileno())
        finally:
            self.lock.release()


def _cut_half_line(path: str) -> None:
    with open(path, "r+b") as journal:
        size = journal.seek(0, os.SEEK_END)
        journal.seek(max(0, size - 1))
        if size and journal.read(1) != b"\n":
            journal.seek(0)
            journal.truncate(journal.read().rfind(b"\n") + 1)


class _SqliteConnection(sqlite3.Connection):
    """Without a wait for the disk at each of a trial's dozens of parameters, and as safe."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA journal_mode=WAL")
        self.execute("PRAGMA synchronous=NORMAL")


def _open_storage(storage: str | os.PathLike[str] | None) -> BaseStorage:
    if storage is None:
        return InMemoryStorage()
    text = os.fspath(storage)
    if text.startswith("grpc://"):
        server = urlsplit(text)
        return GrpcStorageProxy(host=server.hostname or "localhost", port=server.port or 13000)
    if "://" in text:
        options: dict[str, Any] = {"pool_pre_ping": True}  # servers close what is idle for long
        if text.startswith("sqlite"):
            options = {"connect_args": {"timeout": 60, "factory": _SqliteConnection}}
        text = re.sub("^postgres(ql)?://", "postgresql+psycopg://", text)  # the extra's driver
        return optuna.storages.get_storage(RDBStorage(text, engine_kwargs=options))
    Path(text).parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(_Journal(text))


@contextlib.contextmanager
def _readable_errors(what: str) -> Iterator[None]:
    """Whatever a storage raises as a ValueError of one line, without passwords."""
    try:
        yield
    except Exception as error:
        # Not chained: the driver's own message may hold the password.
        raise ValueError(redacted(f"{what}: {_first_line(error)}")) from None


def _storage_errors() -> tuple[type[Exception], ...]:
    """What a storage raises that went away; gRPC is imported where a storage needs it."""
    grpc = sys.modules.get("grpc")
    return (StorageInternalError,) if grpc is None else (StorageInternalError, grpc.RpcError)


def _first_line(error: Exception) -> str:
    text = error.details() if hasattr(error, "details") else str(error)  # an RpcError's own words
    return (text.strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Optuna's own log and its warnings about young features are silent, as they were after."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
