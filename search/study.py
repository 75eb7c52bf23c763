"""The Optuna study with a search's trials, and the loop that runs them.

However a process ends, finished trials are kept, and the next process continues from them.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import optuna
from optuna import Study, Trial
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError, TrialPruned
from optuna.pruners import WilcoxonPruner
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, TrialState

from layerskip.files.searches import GUIDED
from layerskip.search.objective import Evaluation, Losing, OutOfTime
from layerskip.search.space import Space
from layerskip.search.storage import open_storage, quiet, readable_errors
from layerskip.search.warm_starts import WARM_STARTS
from layerskip.timing.threads import cpu_threads

SamplerName = Literal["gp", "tpe", "random"]
STARTUP = 4
"""Finished trials from which on the Gaussian process proposes."""
MODELLED = 100
"""Trials that the Gaussian process knows, the best: its time grows faster than their number."""
CHANGES = 1000
"""Maximum number of random changes to a set that was tried before."""
LOSES = 0.1
"""A trial ends early if the probability that its loss is due to chance is below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of a study after a trial."""

    finished: int
    trials: int | None
    guided: int
    """Finished trials that were proposed by a model of the others."""
    best: float
    best_origin: str


def open_study(
    space: Space,
    *,
    storage: str | os.PathLike[str] | None = None,
    name: str = "layerskip",
    identity: Mapping[str, Any] | None = None,
) -> Study:
    """Open the study called `name` in `storage`, or create it.

    Args:
        storage: a database URL (`sqlite:///file.db`, `postgresql://...`), the path of a journal
            file, or None for this process's memory.
        identity: JSON values that determine the study's values (model, prompts, law). A study with
            other values, or with another space, is rejected.

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
            pruner=WilcoxonPruner(p_threshold=LOSES, n_startup_steps=2),
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


def fail_abandoned(study: Study) -> None:
    """Fail trials that a killed process left running in a journal; called by its first process.

    Databases use Optuna's heartbeats instead.
    """
    if isinstance(study._storage, JournalStorage):
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)


def finished_sets(study: Study, space: Space) -> dict[int, FrozenTrial]:
    """The finished trials by their sets, in order; the first of those with equal sets."""
    sets: dict[int, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        sets.setdefault(space.from_params(trial.params), trial)
    return sets


def value_of(trial: FrozenTrial) -> float:
    assert trial.value is not None  # a complete trial of one objective has one
    return trial.value


class Sampler(BaseSampler):
    """Proposes sets by one of Optuna's samplers, none a second time.

    A proposal depends only on the finished trials, the seed and the trial's number, so that a
    resumed study continues as it would have. A set that was tried before, or in which nothing
    runs, is changed at random until it is new.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, name: SamplerName, space: Space, seed: int) -> None:
        if name not in get_args(SamplerName):
            names = ", ".join(get_args(SamplerName))
            raise ValueError(f"sampler must be one of {names}, got {name!r}")
        self.name, self.space, self.seed = name, space, seed

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {} if "fixed_params" in trial.system_attrs else self.space.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not search_space:
            return {}
        space, finished = self.space, finished_sets(study, self.space)
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        taken = {0, *finished} | {
            space.from_params(each.params)
            for each in running
            if each.number != trial.number and each.params.keys() == space.switches.keys()
        }
        draw = random.Random(f"{self.seed} {trial.number}")
        proposed = self._asked([*finished.values()], draw.getrandbits(32))
        for _ in range(CHANGES):
            mask = space.from_params(proposed)
            if mask in space and mask not in taken:
                break
            name = draw.choice([*space.switches])
            proposed[name] = draw.choice([*space.switches[name]])
        return proposed

    def _asked(self, finished: list[FrozenTrial], seed: int) -> dict[str, Any]:
        """What Optuna proposes after some trials, which a study aside holds."""
        sampler: BaseSampler = RandomSampler(seed=seed)
        if self.name == "gp":
            finished = sorted(finished, key=value_of)[-MODELLED:]
            sampler = GPSampler(seed=seed, n_startup_trials=STARTUP, deterministic_objective=True)
        elif self.name == "tpe":
            sampler = TPESampler(seed=seed, n_startup_trials=WARM_STARTS)
        aside = optuna.create_study(sampler=sampler, direction="maximize")
        aside.add_trials(finished)
        with cpu_threads(1):  # the process computes with small tensors
            return aside.ask(self.space.distributions).params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        raise ValueError(f"{param_name} is not a parameter of {self.space}")


def run(
    study: Study,
    space: Space,
    evaluate: Callable[[int, Losing], Evaluation],
    *,
    sampler: Sampler,
    trials: int | None = None,
    warm_starts: Mapping[str, int],
    timeout: float | None = None,
    on_trial: Callable[[Standing], None] = lambda _: None,
) -> None:
    """Evaluate sets until the study has `trials` finished ones, or the space has no more.

    Args:
        timeout: seconds; the trial then running is finished first, or dropped by OutOfTime.

    Raises:
        ValueError: `trials` or `timeout` is not positive, or the storage is gone.
    """
    if trials is not None and trials < 1:
        raise ValueError(f"trials must be 1 or more, got {trials}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout}")

    def objective(trial: Trial) -> float:
        choices = ((name, tuple(each)) for name, each in space.switches.items())
        mask = space.from_params({n: trial.suggest_categorical(n, each) for n, each in choices})
        if mask not in space:
            raise TrialPruned  # nothing would run
        if "origin" not in trial.user_attrs:
            trial.set_user_attr("origin", sampler.name)  # warm starts have their own names

        def losing(value: float, pieces: Mapping[int, float]) -> bool:
            for number, piece in pieces.items():
                trial.report(piece, number)
            loses = value < standing(study).best and trial.should_prune()
            if loses:
                trial.set_user_attr("ended_early", True)
            return loses

        try:
            evaluation = evaluate(mask, losing)
        except OutOfTime as error:
            study.stop()
            raise TrialPruned from error  # it has no value, but did not fail
        trial.set_user_attr("worth", asdict(evaluation))
        return evaluation.value

    def complete(at: Standing) -> bool:
        every = len(finished_sets(study, space)) >= space.size - 1  # all except the whole model
        return every or (trials is not None and at.finished >= trials)

    def after(study: Study, _: FrozenTrial) -> None:
        at = standing(study, trials)
        on_trial(at)
        if complete(at):
            study.stop()

    study.sampler = sampler
    with quiet(), readable_errors("the study's storage failed", StorageInternalError):
        states = (TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE)
        there = [
            trial.params or trial.system_attrs.get("fixed_params")
            for trial in study.get_trials(deepcopy=False, states=states)
        ]
        for origin, mask in warm_starts.items():
            if space.params(mask) not in there:
                study.enqueue_trial(space.params(mask), user_attrs={"origin": f"first:{origin}"})
        if not complete(standing(study)):
            study.optimize(objective, timeout=timeout, callbacks=[after])


def standing(study: Study, trials: int | None = None) -> Standing:
    """The present state of a study."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    best = max(finished, key=value_of, default=None)
    origins = [trial.user_attrs.get("origin", "") for trial in finished]
    return Standing(
        finished=len(finished),
        trials=trials,
        guided=sum(origin in GUIDED for origin in origins),
        best=-math.inf if best is None else value_of(best),
        best_origin="" if best is None else best.user_attrs["origin"],
    )
