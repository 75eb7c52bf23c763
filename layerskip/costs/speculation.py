"""Closed formulas of speculative decoding: expected tokens, speedups, costs of a round.

`alpha` is the probability that a draft token is accepted (independently of the others; the share of
accepted tokens among drafted ones is another number), `draft_cost` (c) the cost of one draft step
in target steps, v(n) that of a verify pass over n positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import Any, Protocol

from layerskip.files.schema import cost_table

SOURCES = ("measured", "analytic", "given")  # origins of the numbers in a cost table
_UNIT = 64  # minimum tokens of context that share a table; sixteenths of longer contexts


def _check_length(draft_length: int) -> None:
    if draft_length < 0:
        raise ValueError(f"draft_length must be at least 0, got {draft_length}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{name} must be finite and positive, got {value}")


def expected_tokens(alpha: float, draft_length: int) -> float:
    """Expected tokens per verify pass, bonus included: (1 - a^(g+1)) / (1 - a).

    Leviathan et al. 2023, arXiv 2211.17192, eq. 1; g + 1 at alpha = 1.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    _check_length(draft_length)
    # The sum of the series is exact at and near alpha = 1, where the quotient is 0 / 0.
    return math.fsum(alpha**position for position in range(draft_length + 1))


def speedup(
    alpha: float,
    draft_length: int,
    draft_cost: float,
    verify_cost: Callable[[int], float] | None = None,
) -> float:
    """Expected walltime speedup over plain decoding: E[tokens] / (g c + v(g + 1)).

    Leviathan et al. 2023, theorem 3.8, which has v = 1 (the default here). Draft length 0 is a
    plain step, speedup 1.
    """
    tokens = expected_tokens(alpha, draft_length)
    if draft_length == 0:
        return 1.0
    verify = 1.0 if verify_cost is None else verify_cost(draft_length + 1)
    return tokens / (draft_length * draft_cost + verify)


def speedup_bound(draft_cost: float) -> float:
    """The upper bound of the speedup at any acceptance: 1 / c."""
    _check_positive("draft_cost", draft_cost)
    return 1.0 / draft_cost


def optimal_draft_length(alpha: float, costs: CostTable, longest: int = 64) -> int:
    """The draft length in 0..longest with the highest expected speedup; the shortest of equals.

    With a verify cost of 1 this is the rule "draft one more iff a^g / c > S(g - 1)". A general
    table may have several local optima, so every length is tried.
    """
    _check_length(longest)
    return max(range(longest + 1), key=lambda g: expected_tokens(alpha, g) / costs.round_cost(g))


def best_length(survival: Sequence[float], costs: CostTable) -> tuple[float, int]:
    """Speedup of the best fixed draft length, and that length; every start is equally likely.

    A fixed length g emits 1 + s(1) + ... + s(g) tokens per round.

    Args:
        survival: s(j), the share of starts whose first j drafted tokens are right.
    """
    emitted = list(accumulate(survival, initial=1.0))
    return max((emitted[g] / costs.round_cost(g), g) for g in range(1, len(emitted)))


def draft_limit(asked: int, tokens_left: int, free_slots: int) -> int:
    """Maximum number of tokens to draft: a round emits and caches up to one token more."""
    return max(0, min(asked, tokens_left - 1, free_slots - 1))


def remaining(rows: int, going: int) -> int:
    """The number of rows in a pass when only `going` of them are unfinished.

    Finished rows are dropped when the others fit into half of the rows, or fewer. A power of two
    remains, so that passes have few shapes.
    """
    size = 1 << (going - 1).bit_length()
    return size if 2 * size <= rows else rows


def isotonic(values: Sequence[float]) -> list[float]:
    """The nearest non-decreasing values (isotonic regression, pooling adjacent violators)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [fmean(pool) for pool in pools for _ in pool]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs of draft steps and verify passes in units of one target step (a plain decode step)."""

    draft: float  # c: one draft step; 0 if drafts are looked up
    verify: tuple[float, ...]  # verify[n - 1] = v(n); longer passes are extrapolated
    source: str = "given"  # one of `SOURCES`
    step: float = field(default=1.0, compare=False, repr=False)  # its approximate seconds
    per_step: int = 1  # tokens drafted by the first of as many steps; the others cost nothing

    def __post_init__(self) -> None:
        if self.draft != 0.0:
            _check_positive("draft", self.draft)
        if not self.verify:
            raise ValueError("verify must hold at least v(1), got an empty table")
        for n, cost in enumerate(self.verify, start=1):
            _check_positive(f"verify[{n - 1}]", cost)
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {self.source!r}")

    def verify_cost(self, n: int) -> float:
        """v(n); beyond the table along the line through its last two entries, non-decreasing."""
        if n < 1:
            raise ValueError(f"a verify pass covers at least 1 position, got {n}")
        longest = len(self.verify)
        if n <= longest:
            return self.verify[n - 1]
        slope = max(0.0, self.verify[-1] - self.verify[-2]) if longest > 1 else 0.0
        return self.verify[-1] + slope * (n - longest)

    def round_cost(self, drafted: int, steps: int | None = None) -> float:
        """d c + v(d + 1); a round without a draft is a plain step and costs 1.

        If a step drafts several tokens, d is the number of such steps.

        Args:
            steps: number of draft steps, if fewer than tokens: looked-up tokens, or trees.
        """
        _check_length(drafted)
        if drafted == 0:
            return 1.0
        steps = drafted if steps is None else steps
        return self.draft * -(-steps // self.per_step) + self.verify_cost(drafted + 1)

    def cost_of(self, counts: Sequence[int]) -> float:
        """The cost of several rounds: `counts[d]` of them drafted d tokens."""
        return sum(number * self.round_cost(drafted) for drafted, number in enumerate(counts))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_dict` turns back into an equal table."""
        more = {"per_step": self.per_step} if self.per_step > 1 else {}
        return {"draft": self.draft, "verify": list(self.verify), "source": self.source, **more}

    @classmethod
    def from_dict(cls, data: Any) -> CostTable:
        """Read the form of `to_dict`; raises ValueError or TypeError if it is not a table."""
        cost_table(data, "costs")
        verify, per_step = tuple(map(float, data["verify"])), data.get("per_step", 1)
        return cls(float(data["draft"]), verify, data["source"], per_step=per_step)

    def at(self, context: int, rows: int = 1) -> CostTable:
        """This table, for any context and number of rows."""
        return self


class ContextCosts:
    """Costs by context and rows, from a function that is called once for similar contexts."""

    def __init__(self, table: Callable[[int, int], CostTable]) -> None:
        self._table = table
        self._made: dict[tuple[int, int], CostTable] = {}

    def at(self, context: int, rows: int = 1) -> CostTable:
        """The same object for similar contexts, so that changes are cheap to detect."""
        unit = max(_UNIT, 1 << max(0, context.bit_length() - 4))
        key = context // unit * unit + unit // 2, rows
        if key not in self._made:
            self._made[key] = self._table(*key)
        return self._made[key]


class Costs(Protocol):
    """The costs of a source: a table, or tables by context and rows."""

    def at(self, context: int, rows: int = 1) -> CostTable:
        """The table for `context` tokens before a pass, in each of `rows` rows."""


def keys_read(per_token: Mapping[int | None, float], context: int) -> float:
    """Bytes of keys and values that a pass reads for one row with `context` tokens before it.

    Args:
        per_token: bytes per token, by the maximum number of tokens that layers see; None: all.
    """
    return math.fsum(
        each * (context if seen is None else min(context, seen)) for seen, each in per_token.items()
    )
