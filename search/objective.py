"""What a skip config is worth: its drafts along a trace, a controller, and a cost table; no clock.

Everything random is in the trace and everything noisy in the cost record, so that a value is a
function of the config alone, and two configs differ by what they are and not by when they ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from layerskip.config import DecodingOptions, SkipConfig
from layerskip.controllers import ExpectedGain
from layerskip.pricing import cost_table, step_seconds
from layerskip.search.following import follow
from layerskip.search.replay import Replay
from layerskip.search.simulation import count_rounds, simulate, tokens_per_step
from layerskip.search.study import Evaluation
from layerskip.search.trace import Trace
from layerskip.speculation import CostTable

THRESHOLDS = (0.4, 0.6, 0.8)
"""Of the `confidence` controller, tried beside all fixed draft lengths and `expected-gain`."""
MARGIN = 1.1
"""By how much the best controller may exceed the best fixed length; where even that would not help,
longer drafts are not looked at."""
TOLERANCE = 1.01
"""`expected-gain`, safe on other texts too, is taken if none is better by more than this."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How to decode with a draft, and the speedup over plain decoding that this is expected to be.

    `controller` None means not to draft at all.
    """

    controller: str | None
    max_draft_length: int | None
    threshold: float | None
    speedup: float

    @property
    def decoding(self) -> DecodingOptions:
        """For a skip config."""
        if self.controller is None:
            return DecodingOptions(enabled=False)
        return DecodingOptions(
            controller=self.controller,
            max_draft_length=self.max_draft_length,
            threshold=self.threshold,
        )


def choices(replay: Replay, costs: CostTable) -> list[Choice]:
    """Every way to decode that is considered, with its speedup along the replay's texts.

    All of them draft but the first; the last is `expected-gain`, which may turn itself off.
    """
    longest = replay.draft_length
    found = [Choice(None, None, None, 1.0)]
    lengths = [(length, 0.0) for length in range(1, longest + 1)]
    lengths += [(length, t) for length in sorted({2, 4, longest} - {1}) for t in THRESHOLDS]
    for length, threshold in lengths:
        if length <= longest:
            controller = "confidence" if threshold else "fixed"
            cost = sum(
                rounds * costs.round_cost(drafted)
                for drafted, rounds in enumerate(count_rounds(replay, length, threshold))
            )
            speedup = replay.trace.starts / cost
            found.append(Choice(controller, length, threshold or None, speedup))
    found.append(Choice("expected-gain", longest, None, gain(replay, costs, longest)))
    return found


def gain(replay: Replay, costs: CostTable, longest: int) -> float:
    """Speedup over plain decoding of `expected-gain` along the texts, each decoded alone."""
    controller = ExpectedGain(costs, longest)
    rounds = chain.from_iterable(
        simulate(replay, controller, [text], max_draft_length=longest)
        for text in range(len(replay.texts))
    )
    return tokens_per_step(rounds, costs)


def best_choice(found: Sequence[Choice]) -> Choice:
    """The fastest; `expected-gain` in place of another draft that is better within TOLERANCE."""
    best = max(found, key=lambda choice: choice.speedup)
    adaptive = found[-1]
    if best.controller is None or adaptive.speedup * TOLERANCE < best.speedup:
        return best
    return adaptive


class Objective:
    """Expected tokens per second of a skip config, remembered by config.

    Args:
        trace: of the target on calibration prompts.
        cost: what `layerskip.search.cost.measure` returned.
    """

    def __init__(self, trace: Trace, cost: Mapping[str, Any]) -> None:
        self.trace = trace
        self.cost = cost
        self.step_seconds = step_seconds(cost, trace.context)
        self._known: dict[SkipConfig, Evaluation] = {}

    def costs(self, skip: SkipConfig) -> CostTable:
        """c and v of a config at the trace's typical context."""
        return cost_table(self.cost, skip, self.trace.context)

    def __call__(self, skip: SkipConfig) -> Evaluation:
        """The value is never below plain decoding's: a draft that does not pay is turned off."""
        skip = skip.resolve(self.trace.model.num_layers)
        if skip not in self._known:
            self._known[skip] = self._evaluate(skip)
        return self._known[skip]

    def _evaluate(self, skip: SkipConfig) -> Evaluation:
        costs = self.costs(skip)
        if not skip.skipped():  # plain decoding by another name, whatever the clock says
            plain = 1.0 / self.step_seconds
            return Evaluation(value=plain, guide=plain, acceptance=1.0, draft_cost=costs.draft)
        limit = _Limit(costs, self.trace.draft_length)
        followed = follow(self.trace, skip, limit.longest, enough=limit)
        found = choices(followed, costs)
        best = best_choice(found)
        forced = max(choice.speedup for choice in found[1:-1])
        return Evaluation(
            value=max(choice.speedup for choice in found) / self.step_seconds,
            guide=forced / self.step_seconds,
            acceptance=followed.survival[0],
            draft_cost=costs.draft,
            attributes={
                "controller": best.controller,
                "max_draft_length": best.max_draft_length,
                "threshold": best.threshold,
            },
        )


class _Limit:
    """Says how far drafts are worth following.

    A fixed length g emits 1 + s(1) + ... + s(g) tokens a round, where s(j) is the share of starts
    whose first j drafted tokens are right. That is known as far as was followed; behind it, s can
    only fall. Where no longer draft could be faster than plain decoding or the best shorter one,
    whatever controller stops it, following ends.
    """

    def __init__(self, costs: CostTable, longest: int) -> None:
        self.costs = costs
        self.most = longest
        perfect = [(g + 1) / costs.round_cost(g) for g in range(1, longest + 1)]
        # where drafts that are always right lose to plain decoding, one step tells enough
        self.longest = longest if max(perfect) > 1.0 else 1

    def __call__(self, survival: Sequence[float]) -> bool:
        tokens, best = 1.0, 1.0
        for length, share in enumerate(survival, 1):
            tokens += share
            best = max(best, tokens / self.costs.round_cost(length))
        known, last = len(survival), survival[-1]
        possible = (
            (tokens + (length - known) * last) / self.costs.round_cost(length)
            for length in range(known + 1, self.most + 1)
        )
        return MARGIN * max(possible, default=0.0) <= best
