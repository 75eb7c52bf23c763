"""The cost model: the time of a pass, from the bytes it reads and a few numbers of the machine.

A pass reads the weights once, and the keys and values of every row's text. More tokens also cost
arithmetic: a pass over n tokens takes `growth(n)` times as long. This is a short table of factors,
since there is no sharp bend between the two limits (v(2) of 1.2, v(8) of 1.55 and v(16) of 3.3 were
measured on one machine, 1.05, 1.1 and 1.8 on another). Other time of a pass is spread over its
bytes; other time of an additional row is a constant.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from layerskip.costs.speculation import CostTable, isotonic, keys_read

READ = 2e10  # assumed bytes per second for reading weights, if nothing has been timed
USUAL = {1: 1.0, 16: 2.0}  # assumed growth, if nothing has been timed
_TOKENS = 16  # maximum number of tokens per row in tables


class TimingPoint(NamedTuple):
    """Where passes are timed: the number of rows, and of tokens before each."""

    rows: int
    context: int


Work = tuple[Hashable | None, int]
"""What is timed: (None, n), a pass over n tokens of every row; (source's key, 0), its step."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that passes of a model, and steps of a source, read.

    Attributes:
        weights: of a pass, by its number of tokens; several entries for mixtures of experts.
        keys: keys and values per token of each row (see `keys_read`).
        draft, draft_keys: the same for a step of the source; 0 if tokens are looked up.
        prefix: weights of the sublayers that steps have already run for their tokens.
        per_step: as in `CostTable`; a step's pass covers as many tokens.
    """

    weights: Sequence[float]
    keys: Mapping[int | None, float]
    draft: float = 0.0
    draft_keys: Mapping[int | None, float] = field(default_factory=dict)
    prefix: float = 0.0
    per_step: int = 1

    def of(self, tokens: int) -> float:
        """Bytes of the weights that a pass over `tokens` tokens in total reads."""
        return self.weights[min(tokens, len(self.weights)) - 1]


N = TypeVar("N", int, float)


def interpolated(points: Mapping[N, float], place: float) -> float:
    """Linear interpolation between points: constant before the first, last slope at the end."""
    places = sorted(points)
    if len(places) == 1 or place <= places[0]:
        return points[places[0]]
    high = min(bisect_left(places, place), len(places) - 1)
    low, end = places[high - 1], places[high]
    return points[low] + (points[end] - points[low]) * (place - low) / (end - low)


@dataclass(frozen=True)
class Rates:
    """The numbers of a machine, for one model, dtype and number of threads.

    Attributes:
        byte, key_byte: seconds per byte of weights in a pass over one token, and of keys.
        row: additional seconds per further row, besides its tokens.
        growth: by tokens of all rows, the factor of time for weights relative to one token.
        key_growth: the same for keys, by tokens of a row.
        steps: by source and rows, the factor of its steps' time relative to their bytes.
    """

    byte: float = 1 / READ
    key_byte: float = 1 / READ
    row: float = 0.0
    growth: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    key_growth: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    steps: Mapping[Hashable, Mapping[int, float]] = field(default_factory=dict)
    timed: bool = False

    def seconds(
        self, traffic: Traffic, tokens: int, rows: int, context: int, prefix: float = 0.0
    ) -> float:
        """Seconds of a pass over `tokens` tokens of every row, after `context` tokens each.

        Args:
            prefix: bytes of the weights that the pass runs for only one of a row's tokens.
        """
        count = rows * tokens
        weights = (traffic.of(count) - prefix) * interpolated(self.growth, count)
        weights += prefix * interpolated(self.growth, rows)
        keys = rows * keys_read(traffic.keys, context) * interpolated(self.key_growth, tokens)
        of_rows = self.row * (rows - 1)
        return max(self.byte * weights + of_rows, self.byte * traffic.of(1)) + self.key_byte * keys

    def step(self, traffic: Traffic, source: Hashable, rows: int, context: int) -> float:
        """Seconds of a draft step; 0 if the source takes none."""
        factors = self.steps.get(source, {rows: 1.0})
        near = min(factors, key=lambda timed: abs(math.log(timed / rows)))
        growth = interpolated(self.growth, rows * traffic.per_step)
        weights = traffic.draft * growth * factors[near]
        keys = rows * keys_read(traffic.draft_keys, context)
        return self.byte * weights + self.key_byte * keys

    def table(self, traffic: Traffic, source: Hashable, context: int, rows: int) -> CostTable:
        """The costs of a source's rounds; a longer pass is never cheaper."""
        plain = self.seconds(traffic, 1, rows, context)
        flat = len(self.growth) == len(traffic.weights) == 1
        verify = [1.0]
        for tokens in range(2, 2 if flat else _TOKENS + 1):
            seconds = self.seconds(traffic, tokens, rows, context, traffic.prefix)
            verify.append(max(verify[-1], seconds / plain))
        draft = self.step(traffic, source, rows, context) / plain
        how = "measured" if self.timed else "analytic"
        return CostTable(draft, tuple(verify), how, plain, traffic.per_step)


def fitted(
    seconds: Mapping[TimingPoint, Mapping[Work, float]], traffic: Mapping[Hashable, Traffic]
) -> Rates:
    """Fit rates to timed seconds, which must include a plain pass at the first place."""
    first, *others = sorted(seconds)
    whole = next(iter(traffic.values()))
    byte = seconds[first][None, 1] / whole.of(1)

    def passes(place: TimingPoint) -> dict[int, float]:
        return dict(sorted((n, each) for (_, n), each in seconds[place].items() if n))

    def grown(times: Mapping[int, float], rows: int, of_rows: float = 0.0) -> dict[int, float]:
        """By total number of tokens; a longer pass is never cheaper, except by noise."""
        values = [(each - of_rows) / (byte * whole.of(rows * n)) for n, each in times.items()]
        return dict(zip((rows * n for n in times), isotonic(values), strict=True))

    growth = grown(passes(first), 1)
    growth = {n: each / growth[1] for n, each in growth.items()}
    row, key_byte, key_growth = 0.0, byte, {1: 1.0}
    for place in others:
        rows, times = place.rows, passes(place)
        if 1 not in times:
            continue
        if place.context == first.context:
            expected = byte * whole.of(rows) * interpolated(growth, rows)
            row = (times[1] - expected) / (rows - 1)
            longest = max(growth)
            more = grown(times, rows, row * (rows - 1))
            growth |= {n: max(each, growth[longest]) for n, each in more.items() if n > longest}
        elif TimingPoint(rows, first.context) in seconds:
            near = passes(TimingPoint(rows, first.context))
            more = {n: each - near[n] for n, each in times.items() if n in near}
            spread = keys_read(whole.keys, place.context) - keys_read(whole.keys, first.context)
            if more.get(1, 0.0) > 0.0 and spread > 0.0:
                key_byte = more[1] / (rows * spread)
                values = isotonic([each / more[1] for each in more.values()])
                key_growth = {n: max(1.0, each) for n, each in zip(more, values, strict=True)}
    steps: dict[Hashable, dict[int, float]] = {}
    for place, times_of in seconds.items():
        for (source, tokens), each in times_of.items():
            if not tokens and source in traffic and place.context == first.context:
                of_source = traffic[source]
                grows = interpolated(growth, place.rows * of_source.per_step)
                usual = byte * of_source.draft * grows
                steps.setdefault(source, {})[place.rows] = each / usual
    growth |= {n: max(each, *growth.values()) for n, each in USUAL.items() if n > max(growth)}
    return Rates(byte, key_byte, row, growth, key_growth, steps, timed=True)
