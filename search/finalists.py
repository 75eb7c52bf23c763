"""The best few drafts of a study: replayed in full, given a controller, and timed.

They are timed in turn with plain decoding and the default drafts; the fastest wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from optuna import Study
from torch import Tensor

from layerskip.bench.methods import Engine, Task
from layerskip.bench.runner import timed_drafts, within
from layerskip.config.skips import DecodingOptions, SkipConfig
from layerskip.costs.ratios import Totals, measured_speedup
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import make_controller
from layerskip.decoding.sources.lookup import Lookup
from layerskip.replay.replayed_drafts import Replay, replay
from layerskip.replay.simulation import cost_of, simulate
from layerskip.search.objective import Objective
from layerskip.search.study import finished_sets, value_of

THRESHOLDS = (0.4, 0.6, 0.8)
"""Thresholds for the `confidence` and `adaptive-threshold` controllers."""
TUNED = {"alpha": (0.5, 0.7), "epsilon": (0.05, 0.2), "beta1": (0.0, 0.8), "beta2": (0.0, 0.5)}
"""Values to try for `adaptive-threshold`, besides its published parameters."""
TOLERANCE = 1.01
"""`expected-gain`, safe on other texts too, is used if none is better by more than this."""
DEFAULT = "default"
"""The name of the method that drafts like `generate` with default settings."""

Progress = Callable[[str, float], None]
"""Called with a description of the current activity, and the completed share."""


def silent(_what: str, _share: float) -> None:
    """Ignore the progress of a search."""


class OptionsChoice(NamedTuple):
    """How to decode with a draft, and the tokens of the texts with their cost in plain steps."""

    decoding: DecodingOptions
    texts: Totals

    @property
    def speedup(self) -> float:
        """Expected over plain decoding."""
        return self.texts.rate


LookedUp = tuple[Replay, CostTable]
"""Looked-up drafts along the texts, and the costs of their rounds."""


@dataclass(slots=True)
class Finalist:
    """A config that is worth timing.

    Attributes:
        name: name of the method when it is timed.
        trial: number of its trial in the study.
        skip: resolved, with decoding options and costs.
        drafts: its replay along the traced prompts.
        predicted: speedup over plain decoding of full replays, on the traced prompts.
        low, high: the ends of its 95% interval by prompts, widened by the spread of the costs; None
            with one prompt.
        confirmed: the timings, as a block of a search file.
    """

    name: str
    trial: int
    skip: SkipConfig
    drafts: Replay
    costs: CostTable
    predicted: float
    low: float | None = None
    high: float | None = None
    confirmed: dict[str, Any] | None = None

    @property
    def decoding(self) -> DecodingOptions:
        assert self.skip.decoding is not None
        return self.skip.decoding

    @property
    def alpha(self) -> float:
        """Probability that the first token of a draft is accepted, on the traced prompts."""
        return self.drafts.survival[0]


def controllers(longest: int) -> list[DecodingOptions]:
    """The controllers to choose from, with `expected-gain` last."""
    fixed = [
        DecodingOptions(controller="fixed", max_draft_length=length)
        for length in range(1, longest + 1)
    ]
    stopping = [
        DecodingOptions(controller=name, max_draft_length=length, threshold=threshold)
        for name, length, threshold in product(
            ("confidence", "adaptive-threshold"), sorted({min(4, longest), longest}), THRESHOLDS
        )
    ]
    return [*fixed, *stopping, DecodingOptions(controller="expected-gain")]


def choices(
    drafts: Replay, costs: CostTable, looked_up: LookedUp | None, *, all_controllers: bool = True
) -> list[OptionsChoice]:
    """Ways to decode with a draft, with their speedups along its replay; `expected-gain` last.

    Args:
        looked_up: None: nothing is looked up in addition to the draft.
        all_controllers: False: only `expected-gain` is considered.
    """

    def tried(how: DecodingOptions) -> OptionsChoice:
        return OptionsChoice(how, simulated(drafts, costs, how, looked_up))

    options = controllers(drafts.draft_length)
    options = options if all_controllers else options[-1:]
    if looked_up is not None:
        options.append(replace(options[-1], lookup=True))
    ways = [*map(tried, options)]
    adaptive = [each for each in ways if each.decoding.controller == "adaptive-threshold"]
    if not adaptive:
        return ways
    best = fastest(adaptive)
    for name, values in TUNED.items():  # one parameter after the other
        rules = [{**(best.decoding.adaptive or {}), name: each} for each in values]
        best = fastest([best, *(tried(replace(best.decoding, adaptive=rule)) for rule in rules)])
    return [best, *ways]


def fastest(ways: Sequence[OptionsChoice]) -> OptionsChoice:
    return max(ways, key=lambda way: way.speedup)


def simulated(
    drafts: Replay, costs: CostTable, how: DecodingOptions, looked_up: LookedUp | None = None
) -> Totals:
    """The tokens of each of the replay's texts, and their cost in plain steps."""
    length = how.max_draft_length or drafts.draft_length
    sources, paid, expected = [drafts], [costs], [costs]
    if how.lookup:
        assert looked_up is not None
        lookups, passes = looked_up
        sources, paid = [lookups, drafts], [passes, costs]
        expected.insert(0, replace(costs, draft=0.0))  # as in the costs of a skip config
    controller = make_controller(
        how.controller or "expected-gain",
        max_draft_length=length,
        threshold=how.threshold,
        adaptive=how.adaptive,
        costs=expected,
        priors=[each.source.prior for each in sources],
        sampling=drafts.trace.law.do_sample,
        reads_confidence=not drafts.trace.model.backend.ahead,
    )
    steps = [
        cost_of(simulate(sources, controller, [text], max_draft_length=length), paid)
        for text in range(len(drafts.texts))
    ]
    tokens = np.array([text.starts for text in drafts.trace.texts], dtype=float)  # (texts,)
    return Totals(tokens, np.array(steps))


def best_choice(ways: Sequence[OptionsChoice]) -> OptionsChoice:
    """The fastest; but `expected-gain` instead of another that is better only within TOLERANCE.

    Lookups are preferred: they may do nothing for these texts, and much for others.
    """
    best = fastest(ways)
    adaptive = (each for each in reversed(ways) if each.decoding.controller == "expected-gain")
    return next((each for each in adaptive if each.speedup * TOLERANCE >= best.speedup), best)


def choose(
    study: Study,
    objective: Objective,
    count: int,
    parts: frozenset[str],
    progress: Progress = silent,
    until: float = math.inf,
) -> list[Finalist]:
    """The sets with the highest values, replayed in full, highest prediction first.

    The best early exit of the study is included, additionally if it is not among the best. The set
    that skips nothing is not included, since plain decoding is timed anyway. Except for the first,
    none is replayed that would end after `until` (of `time.monotonic`).

    Args:
        parts: parts of the search: whether `lookup` is added, and a `controller` is chosen.
    """
    space, trace = objective.space, objective.trace
    trials = finished_sets(study, space)
    trials.pop(0, None)
    ranked = sorted(
        (mask for mask, trial in trials.items() if not trial.user_attrs.get("ended_early")),
        key=lambda mask: -value_of(trials[mask]),
    )
    depths = {space.exit_mask(layer): layer for layer in range(1, space.num_layers)}
    exit_set = next((mask for mask in ranked if mask in depths), None)
    chosen = [mask for n, mask in enumerate(ranked) if n < count or mask == exit_set]
    looked_up = None
    if "lookup" in parts:
        looked_up = replay(trace, Lookup()), objective.prices.passes
    finalists = []
    for number, mask in enumerate(within(chosen, until)):
        progress("replaying the best drafts in full", number / len(chosen))
        trial, size = trials[mask], space.number("vocabulary", mask)
        skip, costs = space.skip_config(mask), objective.prices.table(mask)
        drafts = replay(trace, skip, allowed=objective.allowed(size))
        ways = choices(drafts, costs, looked_up, all_controllers="controller" in parts)
        decoding, texts = best_choice(ways)
        predicted, *ends = measured_speedup(texts, Totals(texts.tokens, texts.tokens))
        spread = objective.cost.get("spread", 0.0)
        wide = [end * by for end, by in zip(ends, (1 - spread, 1 + spread), strict=True)]
        low, high = (None if math.isnan(end) else end for end in wide)
        tokens = None if size is None else objective.vocabulary(size)
        where = {"batch_size": 1, "draft_vocabulary": size or trace.model.vocabulary}
        origin = str(trial.user_attrs.get("origin"))
        name = f"trial-{trial.number}"
        if mask in depths:
            name = f"exit-{depths[mask]}"
        elif origin.startswith("first:"):
            name = origin.removeprefix("first:")
        skip = replace(
            skip,
            # Lookups as they are timed: without a word about them, they would be on.
            decoding=replace(decoding, draft_vocabulary=tokens, lookup=bool(decoding.lookup)),
            costs={**costs.to_dict(), **objective.cost.get("place", {}), **where},
        )
        finalists.append(Finalist(name, trial.number, skip, drafts, costs, predicted, low, high))
    return sorted(finalists, key=lambda finalist: -finalist.predicted)


def confirm(
    model: Any,
    task: Task,
    finalists: Sequence[Finalist],
    prompts: Sequence[Tensor],
    *,
    repeats: int,
    until: float = math.inf,
    progress: Progress = silent,
) -> tuple[float, dict[str, Any]]:
    """Time finalists, the default and plain decoding in turn; sets `confirmed`.

    Decoding is timed from the first new token on, since no draft changes the cost of a prompt.

    Args:
        until: time (of `time.monotonic`) to end at, after whole repeats, at least one.

    Returns:
        Plain decoding's tokens per second, and the default's times.
    """
    chosen: dict[str, Any] = {"lookup": None, "draft_memory": None}  # as by default
    engines = [Engine(model, task, DEFAULT, **chosen)]
    for each in finalists:
        lookup = each.decoding.lookup is True
        engines.append(Engine(model, task, each.name, each.skip, lookup=lookup))
    plain, timed = timed_drafts(
        engines,
        prompts,
        repeats=repeats,
        until=until,
        note=lambda what, share: progress(f"timing prompt {what}", share),
    )
    if not timed:
        raise ValueError(
            "every held-out text ends with its first token; repeat with --no-confirm, or give "
            "other prompts"
        )
    for finalist in finalists:
        finalist.confirmed = timed[finalist.name]
    return plain, timed[DEFAULT]


def winner(finalists: Sequence[Finalist]) -> Finalist | None:
    """The fastest finalist that gains, by timing or else by prediction; None: plain decoding."""
    return max(
        filter(gains, finalists),
        key=lambda each: each.confirmed["speedup"] if each.confirmed else each.predicted,
        default=None,
    )


def gains(finalist: Finalist) -> bool:
    """Whether a draft is considered faster than plain decoding.

    Prediction and timing must both say so, or the timing's interval exclude 1: among several drafts
    that gain nothing, noise makes one look faster. Without a timing, the prediction decides.
    """
    foreseen, timed = finalist.predicted > 1.0, finalist.confirmed
    if timed is None:
        return foreseen
    sure = timed["low"] is not None and timed["low"] > 1.0
    return sure or (foreseen and timed["speedup"] > 1.0)


def keeps_default(best: Finalist | None, default: Mapping[str, Any] | None) -> bool:
    """Whether the fastest draft exceeds the default by no more than prompts differ.

    If nothing else gains, the default is kept if it does.
    """
    if default is None or best is None or best.confirmed is None:
        return best is None and default is not None and default["speedup"] > 1
    low = best.confirmed["over_default"]["low"]
    return low is None or low <= 1
