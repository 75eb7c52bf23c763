"""The search's strategy as an Optuna sampler; knows trials of a study, and not what they are worth.

Seeds first, then every switch alone (flipped on the best seed, where that pays well), then the
ranked path, then moves near the best sets in turn with Optuna's own TPE. What comes
next follows from the study's trials, the seed and the trial's number, and from nothing that this
process remembers: a study that is resumed, on this machine or another, goes on as it would have.
Each trial says in its attribute `origin` what proposed it, and in `skipped` which set it claims; no
set that another trial claims is proposed.
"""

from __future__ import annotations

import math
import os
import random
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

from optuna import Study, create_study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from . import moves
from .moves import History
from .space import Space

BAYESIAN_EVERY = 8
"""Of so many trials after the ranked path TPE samples one; the others are local moves."""
ELITES = 5
"""Every second local move is from one of so many good sets that are far from each other."""
FEW = 32
"""Sets left in a space from which on they are simply tried."""
CLAIM_ATTEMPTS = 8
"""Proposals before a trial keeps a set that another one claimed at the same moment."""
_TOKEN = uuid.uuid4().hex[:8]


def worker() -> str:
    """Who runs a trial, for its attribute `worker`: host, process, and a name no other has."""
    return f"{socket.gethostname()}:{os.getpid()}:{_TOKEN}"


def read_history(study: Study, space: Space, *, besides: int | None = None) -> History:
    """What the study's trials say, the one numbered `besides` left out.

    Where the objective is flat because drafting turned itself off (at or under the value of
    skipping nothing), a trial's `guide` is its score instead of its value.
    """
    history = History()
    trials = [t for t in study.get_trials(deepcopy=False) if t.number != besides]
    claimed = [(trial, claim(trial, space)) for trial in trials]
    finished = {
        mask: trial
        for trial, mask in reversed(claimed)  # the first of equals
        if mask is not None and trial.state is TrialState.COMPLETE
    }
    nothing = finished.get(0)
    floor = -math.inf if nothing is None or nothing.value is None else nothing.value
    whole = 1.0 if nothing is None else nothing.user_attrs.get("draft_cost", 1.0)
    for mask, trial in sorted(finished.items(), key=lambda item: item[1].number):
        assert trial.value is not None
        known = trial.user_attrs
        flat = trial.value <= floor
        guide = known.get("guide", trial.value)
        history.scores[mask] = min(trial.value, guide) if flat else trial.value
        if {"acceptance", "draft_cost"} <= known.keys():
            saved = whole - known["draft_cost"]
            history.losses[mask] = moves.acceptance_loss(known["acceptance"], saved)
    active = (TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
    history.taken = {
        mask
        for trial, mask in claimed
        if mask is not None and (trial.state in active or "error" in trial.user_attrs)
    }
    return history


def claim(trial: FrozenTrial, space: Space) -> int | None:
    """The set that a trial is about; None where it has not said yet."""
    if "skipped" in trial.user_attrs:
        return int(trial.user_attrs["skipped"], 16)
    fixed = trial.system_attrs.get("fixed_params", {})  # enqueued, and waiting
    complete = space.distributions.keys() <= fixed.keys()
    return space.from_params(fixed) if complete else None


class SublayerSampler(BaseSampler):
    """Proposes sets of a space for a study that maximises, with this module's strategy.

    `seeds` are names and masks to try before all else, as from `layerskip.search.seeds`. A trial's
    attributes `acceptance`, `draft_cost` and `guide`, where set before it is told, are used:
    see `layerskip.search.study.Evaluation`.
    """

    def __init__(self, space: Space, *, seeds: Mapping[str, int], seed: int = 0) -> None:
        self.space = space
        self.seeds = dict(seeds)
        if space.kind == "exit":  # few enough to try all
            self.seeds |= {
                _exit_name(space, mask): mask
                for mask in space.enumerate()
                if mask not in self.seeds.values()
            }
        self.seed = seed

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        _set(study, trial, "began", time.time())
        _set(study, trial, "worker", worker())

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self.space.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        fixed = trial.system_attrs.get("fixed_params")
        if fixed:  # enqueued by a person
            params: dict[str, Any] = {**self.space.params(0), **fixed}
            self._claim(study, trial, self.space.from_params(params), "enqueued")
            return params
        draw = random.Random(f"{self.seed} {trial.number}")
        for attempt in range(CLAIM_ATTEMPTS):
            history = read_history(study, self.space, besides=trial.number)
            mask, origin = self._propose(trial, history, draw)
            self._claim(study, trial, mask, origin)
            # Of two workers that chose at the same moment, one at least sees the other here; where
            # both do, both choose again, and waits of unequal lengths part them.
            if mask not in read_history(study, self.space, besides=trial.number).taken:
                break
            time.sleep(draw.uniform(0, 0.02 * 2**attempt))
        return self.space.params(mask)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        raise ValueError(f"{param_name} is not a parameter of {self.space}")

    def _propose(
        self, trial: FrozenTrial, history: History, draw: random.Random
    ) -> tuple[int, str]:
        """A free set and what proposed it; any set at all where none is free."""
        space = self.space
        for name, mask in self.seeds.items():
            if history.free(space, mask):
                return mask, f"seed:{name}"
        base = moves.base(history, self.seeds.values())
        single = moves.next_single(space, history, base)
        if single is not None:
            return single, "single"
        ranked = moves.next_on_path(space, history, base)
        if ranked is not None:
            return ranked, "ranked"
        turn = trial.number % BAYESIAN_EVERY
        if turn:
            far = draw.randrange(ELITES) if turn % 2 else 0
            local = moves.next_local(space, history, far, base)
            if local is not None:
                return local, "local"
        if space.size - len(history.taken) <= FEW:
            sampled, origin = 0, "remaining"
        else:
            sampled, origin = self._tpe(history, draw.getrandbits(31)), "tpe"
        free = moves.unseen(space, history, sampled, draw)
        return (0, "exhausted") if free is None else (free, origin)

    def _tpe(self, history: History, seed: int) -> int:
        """What Optuna's sampler proposes, free or not.

        It is shown the scores, not the values, which are flat where drafting turned itself off.
        """
        space = self.space
        sampler = TPESampler(seed=seed, n_startup_trials=1)
        shown = create_study(direction="maximize", sampler=sampler)
        for mask, score in history.scores.items():
            trial = create_trial(
                params=space.params(mask), distributions=space.distributions, value=score
            )
            shown.add_trial(trial)
        return space.from_params(shown.ask(space.distributions).params)

    def _claim(self, study: Study, trial: FrozenTrial, mask: int, origin: str) -> None:
        _set(study, trial, "origin", origin)
        _set(study, trial, "skipped", f"{mask:#x}")


def _exit_name(space: Space, mask: int) -> str:
    chosen = space.params(mask)
    name = f"exit-{chosen['exit']}"
    return f"{space.bits}-bits-{name}" if chosen.get("low") else name


def _set(study: Study, trial: FrozenTrial, name: str, value: Any) -> None:
    study._storage.set_trial_user_attr(trial._trial_id, name, value)
