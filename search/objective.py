"""What a skip config is worth: its speedup along a trace, priced by a cost table.

What is random is in the trace, and what is noisy in the cost record: a value is a function of the
config alone. A ratio to plain decoding on the same machine, it means the same on a slower one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.pricing import cost_table, passes_table, step_seconds
from layerskip.costs.speculation import CostTable
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.sources.lookup import Lookup
from layerskip.replay.chains import Survival
from layerskip.replay.drafts import Replay, follow, replay
from layerskip.replay.drawing import NOTHING
from layerskip.replay.simulation import count_rounds, simulate, tokens_per_step
from layerskip.replay.trace import Trace
from layerskip.search.study import Evaluation, OutOfTime
from layerskip.vocabulary import ranked

THRESHOLDS = (0.4, 0.6, 0.8)
"""Of the `confidence` controller, tried beside all fixed draft lengths and `expected-gain`."""
MARGIN = 1.1
"""By how much the best controller may exceed the best fixed length; where even that would not help,
longer drafts are not looked at."""
TOLERANCE = 1.01
"""`expected-gain`, safe on other texts too, is taken if none is better by more than this."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How to decode with a draft, and the speedup over plain decoding that is expected of it."""

    decoding: DecodingOptions
    speedup: float


class LookedUp(NamedTuple):
    """What is looked up along the texts, and what rounds of it cost."""

    replay: Replay
    costs: CostTable


def choices(replay: Replay, costs: CostTable, looked_up: LookedUp | None = None) -> list[Choice]:
    """Every way to decode that is considered, with its speedup along the replay's texts.

    All of them draft but the first; the last is `expected-gain`, which may turn itself off, and
    which may look drafts up, too.
    """
    longest = replay.draft_length
    ways = [
        DecodingOptions(controller="fixed", max_draft_length=length)
        for length in range(1, longest + 1)
    ]
    ways += [
        DecodingOptions(controller="confidence", max_draft_length=length, threshold=threshold)
        for length in sorted({2, 4, longest} - {1})
        if length <= longest
        for threshold in THRESHOLDS
    ]
    ways.append(DecodingOptions(controller="expected-gain", max_draft_length=longest))
    if looked_up is not None:
        ways.append(replace(ways[-1], lookup=True))
    drafting = [Choice(how, speedup(replay, costs, how, looked_up)) for how in ways]
    return [Choice(DecodingOptions(enabled=False), 1.0), *drafting]


def speedup(
    replay: Replay, costs: CostTable, how: DecodingOptions, looked_up: LookedUp | None = None
) -> float:
    """Over plain decoding, of one way to decode the replay's texts, each alone."""
    length = how.max_draft_length or replay.draft_length
    if how.controller != "expected-gain":
        counts = count_rounds(replay, length, how.threshold or 0.0)
        return replay.trace.starts / sum(n * costs.round_cost(d) for d, n in enumerate(counts))
    drafts, paid, expected = [replay], [costs], [costs]
    if how.lookup:
        assert looked_up is not None
        drafts.insert(0, looked_up.replay)
        paid.insert(0, looked_up.costs)
        expected.insert(0, replace(costs, draft=0.0))  # what a skip config's costs say of lookups
    priors = [each.source.prior for each in drafts]
    adaptive = ExpectedGain(expected, length, priors=priors)
    rounds = chain.from_iterable(
        simulate(drafts, adaptive, [text], max_draft_length=length)
        for text in range(len(replay.texts))
    )
    return tokens_per_step(rounds, paid)


def best_choice(ways: Sequence[Choice]) -> Choice:
    """The fastest; `expected-gain` in place of another draft that is better within TOLERANCE.

    With lookups for preference: they may do nothing for these texts, and much for others.
    """
    best = max(ways, key=lambda choice: choice.speedup)
    if best.decoding.enabled is False:
        return best
    adaptive = (each for each in reversed(ways) if each.decoding.controller == "expected-gain")
    return next((each for each in adaptive if each.speedup * TOLERANCE >= best.speedup), best)


class Objective:
    """Expected speedup over plain decoding of a skip config, remembered by config.

    Args:
        cost: what `layerskip.timing.sublayers.measure` returned.

    Attributes:
        sizes: of draft vocabularies that `cost` has prices for; None is the whole one.
        until: of `time.monotonic`, after which no draft is followed further.
    """

    def __init__(self, trace: Trace, cost: Mapping[str, Any]) -> None:
        self.trace = trace
        self.cost = cost
        self.step_seconds = step_seconds(cost, trace.context)
        self.sizes: list[int | None] = [None, *cost.get("head_sizes", ())]
        self.until = math.inf
        self._known: dict[SkipConfig, Evaluation] = {}

    def costs(self, skip: SkipConfig, size: int | None = None) -> CostTable:
        """c and v of a config at the trace's typical context, with a draft vocabulary of a size."""
        return cost_table(self.cost, skip, self.trace.context, draft_vocabulary=size)

    def vocabulary(self, size: int) -> tuple[int, ...]:
        """The most frequent tokens of all texts, for other texts."""
        tokens = [text.tokens for text in self.trace.texts]
        return tuple(self._ranked(tokens)[:size].tolist())

    def allowed(self, size: int | None) -> Tensor | None:
        """What a draft can draw on each text, (texts, V) bool; None: all tokens.

        These are the tokens that the other texts rank first: by itself, a text lacks none.
        """
        if size is None:
            return None
        return self._ranks < size

    @cached_property
    def looked_up(self) -> LookedUp:
        """What a lookup drafts along the texts, at the price of passes over so many tokens."""
        record, context = self.cost, self.trace.context
        return LookedUp(replay(self.trace, Lookup()), passes_table(record, context))

    @cached_property
    def _ceilings(self) -> list[Survival]:
        """For each size, the share of starts whose next j tokens it has, j = 1, 2, ..."""
        ceilings: list[Survival] = []
        for size in self.sizes:
            allowed = self.allowed(size)
            if allowed is None:
                ceilings.append([1.0] * self.trace.draft_length)
                continue
            kept = []
            for text, drawable in zip(self.trace.texts, allowed, strict=True):
                following = F.pad(text.following, (0, self.trace.draft_length), value=NOTHING)
                there = drawable[following.clamp_min(0)] & (following != NOTHING)  # (places,)
                windows = there.unfold(0, self.trace.draft_length, 1)  # (starts, J)
                kept.append(windows[: text.starts].long().cumprod(1).double())
            ceilings.append(torch.cat(kept).mean(0).tolist())
        return ceilings

    @cached_property
    def _ranks(self) -> Tensor:
        """Rank of every token by the other texts than each, (texts, V)."""
        tokens = [text.tokens for text in self.trace.texts]
        orders = [
            self._ranked([*tokens[:number], *tokens[number + 1 :]]) for number in range(len(tokens))
        ]
        return torch.stack(orders).argsort(1)

    def _ranked(self, tokens: Sequence[Tensor]) -> Tensor:
        return ranked(tokens, self.trace.model.vocabulary, ends=self.trace.eos)

    def __call__(self, skip: SkipConfig) -> Evaluation:
        """The value is never below 1: a draft that does not pay is turned off.

        Raises:
            OutOfTime: it is too late.
        """
        skip = skip.resolve(self.trace.model.num_layers)
        if skip not in self._known:
            self._known[skip] = self._evaluate(skip)
        return self._known[skip]

    def _evaluate(self, skip: SkipConfig) -> Evaluation:
        costs = self.costs(skip)
        # plain decoding by another name, whatever the clock says
        if skip.bare() == SkipConfig().resolve(self.trace.model.num_layers).bare():
            return Evaluation(value=1.0, guide=1.0, acceptance=1.0, draft_cost=costs.draft)
        limits = [
            _Limit(self.costs(skip, size), self.trace.draft_length, ceiling)
            for size, ceiling in zip(self.sizes, self._ceilings, strict=True)
        ]

        def promises(survivals: Iterable[Survival]) -> list[float]:
            pairs = zip(survivals, limits, strict=True)
            return [_promise(survival, limit.costs) for survival, limit in pairs]

        def enough(survivals: Sequence[Survival]) -> list[bool]:
            if time.monotonic() > self.until:
                raise OutOfTime
            best = max(promises(survivals))
            return [limit(each, best) for each, limit in zip(survivals, limits, strict=True)]

        each = follow(
            self.trace,
            skip,
            [self.allowed(size) for size in self.sizes],
            max(limit.longest for limit in limits),
            enough=enough,
        )
        # which size: by the best fixed length, that any controller's is near
        promised = promises(drafts.survival for drafts in each)
        number = promised.index(max(promised))
        size, followed, costs = self.sizes[number], each[number], limits[number].costs
        ways = choices(followed, costs)
        best = best_choice(ways)
        forced = max(choice.speedup for choice in ways[1:-1])
        return Evaluation(
            value=max(choice.speedup for choice in ways),
            guide=forced,
            acceptance=followed.survival[0],
            draft_cost=costs.draft,
            attributes={
                "controller": best.decoding.controller,
                "max_draft_length": best.decoding.max_draft_length,
                "threshold": best.decoding.threshold,
                "draft_vocabulary": size,
            },
        )


def _promise(survival: Survival, costs: CostTable) -> float:
    """Speedup of the best fixed draft length, were all starts of a trace equally likely.

    A fixed length g emits 1 + s(1) + ... + s(g) tokens a round, where s(j) is the share of starts
    whose first j drafted tokens are right.
    """
    emitted = accumulate(survival, initial=1.0)
    return max(tokens / costs.round_cost(g) for g, tokens in enumerate(emitted) if g)


class _Limit:
    """Says how far drafts are worth following.

    Beyond what was followed, survival can only fall, and stays under its `ceiling`. Following ends
    where no longer draft could be faster than plain decoding or the best known one.
    """

    def __init__(self, costs: CostTable, longest: int, ceiling: Survival) -> None:
        self.costs, self.most, self.ceiling = costs, longest, ceiling
        # where the best of drafts would lose to plain decoding, one step tells enough
        self.longest = longest if _promise(self.ceiling, costs) > 1.0 else 1

    def __call__(self, survival: Survival, best: float = 0.0) -> bool:
        """Whether it is enough; `best` is the promise of the best of other drafts."""
        best = max(1.0, best, _promise(survival, self.costs))
        possible = [min(each, survival[-1]) for each in self.ceiling[len(survival) : self.most]]
        tokens = list(accumulate(possible, initial=1.0 + sum(survival)))[1:]
        promises = (
            emitted / self.costs.round_cost(len(survival) + further)
            for further, emitted in enumerate(tokens, 1)
        )
        return MARGIN * max(promises, default=0.0) <= best
