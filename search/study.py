"""The Optuna study that keeps a search's trials: its storage, going on with it, sharing it.

A search is a function of skip configs, `evaluate`, and a study that holds every config tried, what
proposed it and what it was worth. Whatever ends a process, finished trials stay; the next process
fails the trials that it left running and goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna import Study
from optuna.exceptions import (
    ExperimentalWarning,
    StorageInternalError,
    UpdateFinishedTrialError,
)
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from layerskip.config import SkipConfig
from layerskip.files.records import redacted

from .sampler import SublayerSampler, finished_sets, read_history, value_of
from .space import Space

LOCK_SECONDS = 5
"""After so long a lock on a journal is that of a process that was killed while it wrote."""
OWN_ATTRIBUTES = frozenset({"worker", "began", "origin", "skipped"})
"""Attributes that say where a trial comes from; others say what its config is worth."""
SILENT_SECONDS = 600.0
"""At least so long, and ten times the slowest trial, may a trial of another machine take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one skip config is worth; must be a function of the config alone."""

    value: float
    """To maximise: expected tokens per second, or per target step."""
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

    `storage` is a database URL (`sqlite:///file.db`, `postgresql://...`), a path of a journal file,
    or None for this process's memory. `identity` holds JSON values that say what the study's values
    depend on (model, prompts, cost table): a study made with others is refused, as is one made with
    another space.

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

    Trials that other workers run count as finished. `timeout` is in seconds; the trial that runs
    when they are over is finished first. A config that some trial finished is never evaluated
    again: a trial that repeats it (claimed at the same moment by two workers) takes its value over
    and says so in its attribute `copy_of`.

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
    with quiet():
        fail_stale(study)
        try:
            while time.monotonic() < deadline and _left(study, space, trials):
                with contextlib.suppress(UpdateFinishedTrialError):  # taken for stale, and failed
                    _run_trial(study, space, evaluate)
                on_trial(_standing(study, trials))
        except StorageInternalError as error:
            raise ValueError(
                redacted(f"the study's storage failed: {_first_line(error)}")
            ) from None
        finally:
            with contextlib.suppress(StorageInternalError):  # it has said so above
                fail_stale(study)  # what Ctrl-C ended, and what killed workers left meanwhile


def fail_stale(study: Study) -> int:
    """Fail the running trials that nobody runs any more, and say how many.

    Those are the trials of this process, which runs none while it calls this, those of processes of
    this machine that are gone, and those of other machines that run for longer than a trial could:
    see SILENT_SECONDS. A trial whose process was killed before it said its name counts for nothing.
    """
    trials = study.get_trials(deepcopy=False)
    finished = [t for t in trials if t.state is TrialState.COMPLETE]
    durations = [t.duration.total_seconds() for t in finished if t.duration is not None]
    longest = max(SILENT_SECONDS, 10 * max(durations, default=0.0))
    running = [t for t in trials if t.state is TrialState.RUNNING]
    stale = [trial for trial in running if _is_stale(trial, longest)]
    for trial in stale:
        with contextlib.suppress(UpdateFinishedTrialError, ValueError):  # another worker was first
            study.tell(trial.number, state=TrialState.FAIL)
    return len(stale)


def _is_stale(trial: FrozenTrial, longest: float) -> bool:
    owner = trial.user_attrs.get("worker")
    if owner is None:
        return False
    host, process, _ = owner.rsplit(":", 2)
    if host != socket.gethostname():
        # Optuna's own times are local ones, of machines that may be in other time zones.
        return time.time() - float(trial.user_attrs["began"]) > longest
    return int(process) == os.getpid() or not _is_running(int(process))


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
    running = sum(t.state is TrialState.RUNNING and "worker" in t.user_attrs for t in known)
    if running + sum(t.state is TrialState.COMPLETE for t in known) >= trials:
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
    if "://" in text:
        sqlite = {"connect_args": {"timeout": 60, "factory": _SqliteConnection}}
        options = sqlite if text.startswith("sqlite") else {}
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
