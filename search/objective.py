"""The value of a skip config: its speedup along a trace, with costs from a cost record.

All randomness is in the trace, and all noise in the cost record: a value is a function of the
config alone. As a ratio to plain decoding on the same machine, it is comparable across machines.
A draft is followed for one token from every start, and for two from the first parts of them. Later
tokens are assumed to be right as often as the second one is if the first is. Starts are processed
in parts, and a draft that loses on the first ones is not followed further.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from layerskip.config.skips import SkipConfig
from layerskip.costs.speculation import best_length
from layerskip.errors import LayerskipError
from layerskip.replay.replayed_drafts import all_starts, follow
from layerskip.replay.trace import Trace
from layerskip.search.prices import LONGEST, Prices
from layerskip.search.space import Space
from layerskip.texts.vocabulary import ranked

PARTS, SECONDS = (0.1, 0.2, 0.4, 0.7, 1.0), 3
"""Shares of the starts after which a trial may end; and the number of parts in which a second token
is followed."""
PIECES, FEWER = 14, 8
"""Pieces of each part, whose values are compared with those of the best trial; FEWER for a short
part. With fewer than 14 values the rank test draws permutations, which takes longer than drafts."""

Losing = Callable[[float, Mapping[int, float]], bool]
"""Given the value so far and those of further pieces by number: whether it loses to the best."""


class OutOfTime(LayerskipError):
    """The time of a search is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The value of one set."""

    value: float
    """Expected speedup over plain decoding with the best fixed draft length."""
    acceptance: float
    """Probability that the first token of a draft is accepted."""
    draft_cost: float
    """c: one draft step in target steps."""
    draft_length: int
    positions: int
    """Number of starts from which it was followed."""


def extended(first: float, rate: float) -> list[float]:
    """Share of drafts that are right up to each of LONGEST tokens.

    Args:
        first: share whose first token is right.
        rate: share of these whose next token is right.
    """
    return [first * rate**token for token in range(LONGEST)]


class Objective:
    """Expected speedup over plain decoding for the sets of a space, stored by mask.

    Args:
        cost: the result of `layerskip.timing.sublayer_costs.measure`.
        positions: maximum number of starts.

    Attributes:
        until: time (of `time.monotonic`) after which no draft is followed further.
    """

    def __init__(
        self, trace: Trace, space: Space, cost: Mapping[str, Any], positions: int | None = None
    ) -> None:
        self.trace, self.space, self.cost = trace, space, cost
        self.prices = Prices(space, cost, trace.context)
        self.until = math.inf
        starts = all_starts(trace)
        random.Random(0).shuffle(starts)
        starts = starts[:positions]
        ends = [math.ceil(share * len(starts)) for share in PARTS]
        parts = [starts[first:end] for first, end in zip([0, *ends], ends, strict=False)]
        # Adjacent starts of one text share its keys and values.
        self.parts = [sorted(each, key=lambda s: (s[0].number, s[1])) for each in parts]
        self._evaluated: dict[int, Evaluation] = {}

    def vocabulary(self, size: int) -> tuple[int, ...]:
        """The most frequent tokens of all texts, for other texts."""
        tokens = [text.tokens for text in self.trace.texts]
        return tuple(self._ranked(tokens)[:size].tolist())

    def allowed(self, size: int | None) -> Tensor | None:
        """The tokens that a draft can draw on each text, (texts, V) bool; None: all.

        These are the tokens that the other texts rank first: by itself, a text would lack none.
        """
        return None if size is None else self._ranks < size

    @cached_property
    def _ranks(self) -> Tensor:
        """Rank of every token by the texts other than each, (texts, V)."""
        tokens = [text.tokens for text in self.trace.texts]
        orders = [
            self._ranked([*tokens[:number], *tokens[number + 1 :]]) for number in range(len(tokens))
        ]
        return torch.stack(orders).argsort(1)

    def _ranked(self, tokens: Sequence[Tensor]) -> Tensor:
        return ranked(tokens, self.trace.model.vocabulary, ends=self.trace.eos)

    def __call__(self, mask: int, losing: Losing = lambda *_: False) -> Evaluation:
        """Follow a set's drafts from all starts, or from fewer if it is `losing`.

        Raises:
            OutOfTime: the time is over.
        """
        if mask not in self._evaluated:
            self._evaluated[mask] = self._evaluate(mask, losing)
        return self._evaluated[mask]

    def _evaluate(self, mask: int, losing: Losing) -> Evaluation:
        costs = self.prices.table(mask)
        if not mask:  # equals plain decoding, whatever the clock says
            return Evaluation(
                value=1.0, acceptance=1.0, draft_cost=costs.draft, draft_length=1, positions=0
            )
        skip: SkipConfig = self.space.skip_config(mask)
        allowed = self.allowed(self.space.number("vocabulary", mask))
        right, twice, once = torch.zeros(0), 0.0, 0.0  # (N,)
        for number, starts in enumerate(self.parts):
            if time.monotonic() > self.until:
                raise OutOfTime("the time was over during a trial")
            steps = 2 if number < SECONDS else 1
            more = follow(self.trace, skip, steps, starts, allowed=allowed).float()  # (n, steps)
            right = torch.cat([right, more[:, 0]])
            if steps == 2:
                twice, once = twice + float(more[:, 1].sum()), once + float(more[:, 0].sum())
            rate = twice / once if once else 0.0
            value, length = best_length(extended(float(right.mean()), rate), costs)
            pieces = [
                sum(extended(float(piece.mean()), rate)[:length], 1.0) / costs.round_cost(length)
                for piece in more[:, 0].tensor_split(PIECES if len(more) >= PIECES else FEWER)
                if len(piece)
            ]
            last = number + 1 == len(self.parts)
            if not last and losing(value, dict(enumerate(pieces, number * PIECES))):
                break
        return Evaluation(
            value=value,
            acceptance=float(right.mean()),
            draft_cost=costs.draft,
            draft_length=length,
            positions=len(right),
        )
