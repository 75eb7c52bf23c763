"""The search's strategy as an Optuna sampler.

What a stopped or killed worker left first, warm starts, then every switch alone (flipped on the
best warm start, where that pays well), then the ranked path, then local moves near the best sets in
turn with Optuna's own TPE. What comes next follows from the study's trials, the seed and the
trial's number alone, so that a resumed study goes on as it would have.
Each trial says in `origin` what proposed it, and in `skipped` which set it claims for itself.
"""

from __future__ import annotations

import math
import os
import random
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from optuna import Study, create_study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from . import proposals
from .proposals import History
from .space import Space

BAYESIAN_EVERY = 8
"""Of so many trials after the ranked path TPE samples one; the others are local moves."""
ELITES = 5
"""Every second local move is from one of so many good sets that are far from each other."""
FEW = 32
"""Sets left in a space from which on they are simply tried."""
CLAIM_ATTEMPTS = 8
"""Proposals before a trial keeps a set that another one claimed at the same moment."""


def claimed(trial: FrozenTrial) -> int | None:
    """The mask of the set that a trial is about; None where it has not said yet."""
    mask = trial.user_attrs.get("skipped")
    return None if mask is None else int(mask, 16)


def value_of(trial: FrozenTrial) -> float:
    assert trial.value is not None  # a complete trial of one objective has one
    return trial.value


def finished_sets(trials: Iterable[FrozenTrial]) -> dict[int, FrozenTrial]:
    """The finished trials by their sets, in order; of those with equal sets the first."""
    sets: dict[int, FrozenTrial] = {}
    for trial in trials:
        mask = claimed(trial)
        if mask is not None and trial.state is TrialState.COMPLETE:
            sets.setdefault(mask, trial)
    return sets


def read_history(study: Study, *, without: int | None = None) -> History:
    """What the study's trials say, the one numbered `without` left out.

    Where the objective is flat because drafting turned itself off (at or under the value of
    skipping nothing), a trial's `guide` is its score instead of its value.
    """
    history = History()
    trials = [t for t in study.get_trials(deepcopy=False) if t.number != without]
    finished = finished_sets(trials)
    nothing = finished.get(0)
    floor = -math.inf if nothing is None else value_of(nothing)
    whole = 1.0 if nothing is None else nothing.user_attrs.get("draft_cost", 1.0)
    for mask, trial in finished.items():
        worth, value = trial.user_attrs, value_of(trial)
        history.scores[mask] = min(value, worth.get("guide", value)) if value <= floor else value
        if {"acceptance", "draft_cost"} <= worth.keys():
            saved = whole - worth["draft_cost"]
            history.losses[mask] = proposals.acceptance_loss(worth["acceptance"], saved)
    for trial in trials:
        mine = claimed(trial)
        active = trial.state in (TrialState.COMPLETE, TrialState.RUNNING)
        if mine is not None and (active or "error" in trial.user_attrs):
            history.taken.add(mine)
        elif mine is not None:
            history.left[mine] = trial.user_attrs.get("origin", "")
    return history


class SublayerSampler(BaseSampler):
    """Proposes sets of a space for a study that maximises: first `warm_starts`, masks by name.

    Of finished trials it reads `acceptance`, `draft_cost` and `guide`, as `Evaluation` has them.
    """

    def __init__(self, space: Space, *, warm_starts: Mapping[str, int], seed: int = 0) -> None:
        self.space, self.warm_starts, self.seed = space, dict(warm_starts), seed

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        _set(study, trial, "worker", f"{socket.gethostname()}:{os.getpid()}")

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self.space.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} {trial.number}")
        for attempt in range(CLAIM_ATTEMPTS):
            history = read_history(study, without=trial.number)
            mask, origin = self._propose(trial, history, draw)
            _set(study, trial, "origin", origin)
            _set(study, trial, "skipped", f"{mask:#x}")
            # Of two workers that chose at the same moment, one at least sees the other here; where
            # both do, both choose again, and waits of unequal lengths part them.
            if mask not in read_history(study, without=trial.number).taken:
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
        for mask, origin in history.left.items():
            if history.free(space, mask):
                return mask, origin
        for name, mask in self.warm_starts.items():
            if history.free(space, mask):
                return mask, f"seed:{name}"
        base = proposals.base(history, self.warm_starts.values())
        single = proposals.next_single(space, history, base)
        if single is not None:
            return single, "single"
        ranked = proposals.next_on_path(space, history, base)
        if ranked is not None:
            return ranked, "ranked"
        turn = trial.number % BAYESIAN_EVERY
        if turn:
            far = draw.randrange(ELITES) if turn % 2 else 0
            local = proposals.next_local(space, history, far, base)
            if local is not None:
                return local, "local"
        if space.size - len(history.taken) <= FEW:
            sampled, origin = 0, "remaining"
        else:
            sampled, origin = self._tpe(history, draw.getrandbits(31)), "tpe"
        free = proposals.unseen(space, history, sampled, draw)
        return (0, "exhausted") if free is None else (free, origin)

    def _tpe(self, history: History, seed: int) -> int:
        """What Optuna's sampler, shown the scores instead of the values, proposes, free or not."""
        space = self.space
        sampler = TPESampler(seed=seed, n_startup_trials=1)
        shown = create_study(direction="maximize", sampler=sampler)
        for mask, score in history.scores.items():
            trial = create_trial(
                params=space.params(mask), distributions=space.distributions, value=score
            )
            shown.add_trial(trial)
        return space.from_params(shown.ask(space.distributions).params)


def _set(study: Study, trial: FrozenTrial, name: str, value: Any) -> None:
    study._storage.set_trial_user_attr(trial._trial_id, name, value)
