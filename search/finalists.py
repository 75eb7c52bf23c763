"""The best few of a study, looked at closely: replayed whole, then timed beside plain decoding.

What a search found on calibration prompts is promised here for held-out ones, and confirmed on
them by the clock; the winner is the clock's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from layerskip.bench.batches import Batch
from layerskip.bench.methods import Engine, Task
from layerskip.bench.runner import Judge, device_clock, interleaved
from layerskip.config import SkipConfig
from layerskip.costs.ratios import ratio_of_totals
from layerskip.costs.speculation import CostTable
from layerskip.replay.drafts import replay
from layerskip.replay.trace import Trace
from layerskip.search.objective import Choice, Objective, best_choice, choices, speedup
from layerskip.search.sampler import claim
from layerskip.search.space import Space

CANDIDATES = 2
"""So many configs are replayed whole for each finalist wanted."""

Progress = Callable[[str, float], None]


@dataclass(slots=True)
class Finalist:
    """A config that is worth timing.

    Attributes:
        name: of the method that it is timed as.
        trial: number of its trial in the study.
        skip: resolved, with decoding options and costs.
        alpha: probability that the first token of a draft is accepted, on the traced prompts.
        predicted: speedup over plain decoding of whole replays, on the traced prompts.
        predicted_held_out: the same of the same options on held-out prompts, where there are any.
        confirmed: what the clock said, where it was asked: the block of a search file.
    """

    name: str
    trial: int
    skip: SkipConfig
    alpha: float
    choice: Choice
    costs: CostTable
    predicted_held_out: float | None = None
    confirmed: dict[str, Any] | None = field(default=None)

    @property
    def predicted(self) -> float:
        return self.choice.speedup

    @property
    def price(self) -> float:
        """The speedup predicted on held-out prompts, or, where there are none, on the traced."""
        return self.predicted if self.predicted_held_out is None else self.predicted_held_out


def choose(
    study: Study,
    space: Space,
    objective: Objective,
    count: int,
    progress: Progress = lambda _what, _share: None,
) -> list[Finalist]:
    """The configs of the highest predicted speedup by whole replays, best first.

    The best early exit of the study is among them, as one more where it is none of the best.
    Configs that skip nothing are not: plain decoding is timed anyway.
    """
    plain = 1.0 / objective.step_seconds

    def score(trial: FrozenTrial) -> float:
        assert trial.value is not None
        return trial.value if trial.value > plain else trial.user_attrs.get("guide", trial.value)

    trials: dict[int, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        mask = claim(trial, space)
        if mask:
            trials.setdefault(mask, trial)
    exits = {space.exit_mask(layer) for layer in range(1, space.num_layers)} & trials.keys()
    ranked = sorted(trials, key=lambda mask: -score(trials[mask]))
    looked_at = ranked[: CANDIDATES * count]
    looked_at += [mask for mask in ranked if mask in exits][:2]
    found = []
    for number, mask in enumerate(dict.fromkeys(looked_at)):
        progress("the best drafts, replayed whole", number / len(looked_at))
        found.append((mask, _closely(trials[mask], space, mask, objective)))
    found.sort(key=lambda pair: -pair[1].predicted)
    kept = found[:count]
    best_exit = next((pair for pair in found if pair[0] in exits), None)
    if best_exit is not None and best_exit not in kept:
        kept.append(best_exit)
    return [finalist for _, finalist in kept]


def _closely(trial: FrozenTrial, space: Space, mask: int, objective: Objective) -> Finalist:
    skip = space.skip_config(mask)
    size = trial.user_attrs.get("draft_vocabulary")
    costs = objective.costs(skip, size)
    drafts = replay(objective.trace, skip, allowed=objective.allowed(size))
    ways = [way for way in choices(drafts, costs) if way.controller is not None]
    choice = best_choice(ways)
    tokens = None if size is None else objective.vocabulary(size)
    where = {"batch_size": 1, "draft_vocabulary": size or objective.trace.model.vocabulary}
    depth = next((e for e in range(1, space.num_layers) if space.exit_mask(e) == mask), None)
    return Finalist(
        name=f"trial-{trial.number}" if depth is None else f"exit-{depth}",
        trial=trial.number,
        skip=replace(
            skip,
            decoding=replace(choice.decoding, draft_vocabulary=tokens),
            costs={**costs.to_dict(), **objective.cost.get("place", {}), **where},
        ),
        alpha=drafts.survival[0],
        choice=choice,
        costs=costs,
    )


def predict(finalist: Finalist, trace: Trace) -> float:
    """Speedup over plain decoding that a finalist's options are expected to bring on a trace."""
    skip, choice, allowed = finalist.skip, finalist.choice, None
    if skip.draft_vocabulary is not None:
        allowed = torch.zeros(len(trace.texts), trace.model.vocabulary, dtype=torch.bool)
        allowed[:, skip.draft_vocabulary] = True
    drafts = replay(trace, skip, allowed=allowed)
    controller, length = choice.controller, choice.max_draft_length
    assert controller is not None  # a finalist drafts
    assert length is not None
    return speedup(drafts, finalist.costs, controller, length, choice.threshold)


def confirm(
    model: Any,
    task: Task,
    finalists: Sequence[Finalist],
    batches: Sequence[Batch],
    *,
    repeats: int,
    progress: Progress = lambda _what, _share: None,
) -> float:
    """Time finalists and plain decoding in turn on the same prompts; fills in `confirmed`.

    Times are of decoding, from the first new token on: no draft changes what a prompt costs.

    Returns:
        Plain decoding's tokens per second.
    """
    methods = [Engine(model, task)]
    methods += [Engine(model, task, finalist.name, finalist.skip) for finalist in finalists]
    judge = Judge(model, task, methods)
    seconds: dict[str, dict[tuple[str, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    tokens: dict[tuple[str, ...], int] = {}
    drafted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    texts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # compared, near-ties, faults
    now = device_clock(batches[0].input_ids.device)
    for timed in interleaved(methods, batches, repeats=repeats, warmup=1, now=now, note=progress):
        judge.prepare(timed.batch)
        if timed.repeat < 0:
            continue
        name, names = timed.method.name, timed.batch.names
        after = sum(map(len, timed.decoded.tokens)) - sum(timed.decoded.first_tokens)
        if after < 1:
            continue  # the text ended with its first token: nothing was decoded
        seconds[name][names].append((timed.seconds - timed.first) / after)
        tokens[names] = after
        for round_ in (timed.decoded.rounds or [])[1:]:
            drafted[name][0] += sum(round_.drafted)
            drafted[name][1] += sum(round_.accepted)
        if timed.repeat == 0:
            differences = judge.differences(timed.method, timed.batch, timed.decoded.tokens)
            if differences is None:
                continue
            near = sum(difference.near_tie for difference in differences)
            for place, number in enumerate((timed.batch.rows, near, len(differences) - near)):
                texts[name][place] += number
    if not tokens:
        raise ValueError("every held-out text ends with its first token; give other prompts")
    typical = {  # seconds per token, by method and prompt; the median of the repeats
        name: np.array([np.median(seconds[name][names]) for names in tokens]) for name in seconds
    }
    plain = typical["plain"]
    for finalist in finalists:
        own = typical[finalist.name]
        faster, low, high = ratio_of_totals(plain, own)
        compared, near, faults = texts[finalist.name]
        proposed, accepted = drafted[finalist.name]
        finalist.confirmed = {
            "speedup": faster,
            "low": None if np.isnan(low) else low,
            "high": None if np.isnan(high) else high,
            "tokens_per_second": float(len(own) / own.sum()),
            "prompts": len(tokens),
            "repeats": repeats,
            "acceptance_rate": accepted / proposed if proposed else None,
            "compared": compared,
            "equal": compared - near - faults,
            "near_ties": near,
            "faults": faults,
        }
    return float(len(plain) / plain.sum())


def winner(finalists: Sequence[Finalist]) -> Finalist | None:
    """The fastest that gains, on the clock or, where none was timed, by its price; None: plain."""
    gaining = [finalist for finalist in finalists if gains(finalist)]
    return max(
        gaining,
        key=lambda each: each.confirmed["speedup"] if each.confirmed else each.price,
        default=None,
    )


def gains(finalist: Finalist) -> bool:
    """Whether a draft is taken to be faster than plain decoding.

    Price and clock must both say so, or the clock's interval exclude 1: of several drafts that gain
    nothing, noise makes one look faster. What was not timed is believed its price.
    """
    price, timed = finalist.price > 1.0, finalist.confirmed
    if timed is None:
        return price
    sure = timed["low"] is not None and timed["low"] > 1.0
    return sure or (price and timed["speedup"] > 1.0)
