"""The Optuna study that keeps a search's trials, and the loop that runs them.

Whatever ends a process, finished trials stay; the next fails those it left running and goes on.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna import Study
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages._heartbeat import get_heartbeat_thread
from optuna.trial import FrozenTrial, TrialState

from layerskip.config import SkipConfig

from .sampler import SublayerSampler, finished_sets, read_history, value_of
from .space import Space
from .storage import open_storage, quiet, readable_errors

OWN_ATTRIBUTES = frozenset({"worker", "origin", "skipped"})
"""Attributes that say where a trial comes from; others say what its config is worth."""
WAIT_SECONDS = 0.5
"""Between looks at the trials of others, where there is nothing else to do."""
PATIENCE = 600.0
"""How long a trial of another machine may run in a journal, which knows no heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one skip config is worth; must be a function of the config alone."""

    value: float
    """To maximise: a ratio to plain decoding on the same machine, which other machines share."""
    guide: float | None = None
    """In the units of `value`: what the config would be worth if it had to draft. It guides the
    search where `value` is flat because drafting turned itself off."""
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


def open_study(
    space: Space,
    *,
    storage: str | os.PathLike[str] | None = None,
    name: str = "layerskip",
    identity: Mapping[str, Any] | None = None,
) -> Study:
    """The study called `name` in `storage`, made if it is not there.

    Args:
        storage: a database URL (`sqlite:///file.db`, `postgresql://...`), the path of a journal
            file, or None for this process's memory.
        identity: JSON values that say what the study's values depend on (model, prompts, law). A
            study made with others is refused, as is one made with another space.

    Raises:
        ValueError: the storage cannot be opened, or holds another search under that name.
    """
    made_with = {"space": space.to_dict(), **(identity or {})}
    with quiet(), readable_errors(f"cannot open the study {name!r} in {storage}"):
        study = optuna.create_study(
            storage=open_storage(storage),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )
        if not study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr("layerskip", made_with)
        stored = study.user_attrs.get("layerskip", {})
    differing = [k for k in {**made_with, **stored} if stored.get(k) != made_with.get(k)]
    if differing:
        raise ValueError(
            f"the study {name!r} was made with another {' and '.join(differing)}: "
            + "; ".join(f"{k} {stored.get(k)!r} then, {made_with.get(k)!r} now" for k in differing)
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

    The trials of other workers are waited for, so that all workers see the same trials in the end;
    those of workers that are gone are failed and taken up. A config that some trial finished is
    never evaluated again: a trial that repeats it (two workers claimed it at the same moment) takes
    the value over and says so in its attribute `copy_of`.

    Args:
        timeout: seconds; the trial that then runs is finished first, or left by OutOfTime.

    Raises:
        ValueError: `trials` or `timeout` is not positive, a value not finite, or the storage gone.
    """
    if trials < 1:
        raise ValueError(f"trials must be 1 or more, got {trials}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout}")
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    study.sampler = SublayerSampler(space, warm_starts=warm_starts, seed=seed)
    first_seen: dict[int, float] = {}

    with quiet(), readable_errors("the study's storage failed", StorageInternalError):
        try:
            while time.monotonic() < deadline:
                fail_abandoned(study, first_seen)
                if _left(study, space, trials):
                    with suppress(UpdateFinishedTrialError):  # another worker has failed the trial
                        _run_trial(study, space, evaluate)
                elif _running(study):
                    time.sleep(WAIT_SECONDS)
                else:
                    break
                on_trial(_standing(study, trials))
        except OutOfTime:
            pass
        finally:
            with suppress(StorageInternalError):  # it has been said
                fail_abandoned(study, first_seen)  # the trial that Ctrl-C or time ended


def _run_trial(study: Study, space: Space, evaluate: Callable[[SkipConfig], Evaluation]) -> None:
    trial = study.ask()
    with get_heartbeat_thread(trial._trial_id, study._storage):
        mask = space.suggest(trial)
        same = finished_sets(study.get_trials(deepcopy=False)).get(mask)
        if same is not None:
            attributes = {k: v for k, v in same.user_attrs.items() if k not in OWN_ATTRIBUTES}
            value, attributes["copy_of"] = value_of(same), same.number
        else:
            evaluation = evaluate(space.skip_config(mask))
            value = evaluation.value
            attributes = {
                "guide": evaluation.guide,
                "acceptance": evaluation.acceptance,
                "draft_cost": evaluation.draft_cost,
                **evaluation.attributes,
            }
    if not math.isfinite(value):
        trial.set_user_attr("error", f"value {value}")
        study.tell(trial, state=TrialState.FAIL)
        raise ValueError(f"{space.skip_config(mask)} must have a finite value, got {value}")
    for name, attribute in attributes.items():
        if attribute is not None:
            trial.set_user_attr(name, attribute)
    study.tell(trial, value)


def fail_abandoned(study: Study, first_seen: dict[int, float]) -> None:
    """Fail the running trials whose workers are gone.

    On this machine those are the trials of processes that have ended, and of this process, which
    runs none while it calls this. In databases Optuna's heartbeats tell of other machines; in
    journals, which have none, a trial of another machine is given up after PATIENCE.

    Args:
        first_seen: by number of a trial, when this process saw it first. Filled in.
    """
    optuna.storages.fail_stale_trials(study)
    for trial in _running(study):
        host, process = trial.user_attrs["worker"].split(":")[:2]
        if host == socket.gethostname():
            gone = int(process) == os.getpid() or not _is_running(int(process))
        else:
            now = time.monotonic()
            waited = now - first_seen.setdefault(trial.number, now)
            gone = isinstance(study._storage, JournalStorage) and waited > PATIENCE
        if gone:
            with suppress(UpdateFinishedTrialError, ValueError):  # another worker was first
                study.tell(trial.number, state=TrialState.FAIL)


def _running(study: Study) -> list[FrozenTrial]:
    """The trials that run; one whose process was killed before it said its name runs nowhere."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [trial for trial in running if "worker" in trial.user_attrs]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, but there
        return True
    return True


def _left(study: Study, space: Space, trials: int) -> bool:
    """Whether another trial is to be begun."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(finished) + len(_running(study)) >= trials:
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
