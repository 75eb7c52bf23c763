"""The closed formulas of speculative decoding: expected tokens, speedups, costs of a round.

Words used throughout: `alpha` is the probability that one draft token is accepted (independent of
the others), `draft_length` the tokens drafted in a round, `draft_cost` (c) the cost of one draft
step in target steps, v(n) the cost of a verify pass over n positions in target steps. The
acceptance rate r = accepted / drafted tokens is another number than alpha.

Pure Python: the controllers, the search's simulator and the analysis all call these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from layerskip.files.schema import POSITIVE, has, items, text

SOURCES = ("measured", "analytic", "given")
_UNIT = 64  # tokens of context that share a table, at least; longer ones by sixteenths


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
    """What no draft can exceed, whatever its acceptance: 1 / c."""
    _check_positive("draft_cost", draft_cost)
    return 1.0 / draft_cost


def optimal_draft_length(alpha: float, costs: CostTable, longest: int = 64) -> int:
    """The draft length in 0..longest of the highest expected speedup; the shortest one of equals.

    With a verify cost of 1 this is the rule "draft one more iff a^g / c > S(g - 1)"; a general
    table may have several local optima, so that every length is tried.
    """
    _check_length(longest)
    return max(range(longest + 1), key=lambda g: speedup(alpha, g, costs.draft, costs.verify_cost))


def round_sublayer_tokens(
    drafted: int, kept: int, prefix: int, sublayers: int, steps: int | None = None
) -> int:
    """Sublayer evaluations of one row's round, in tokens: d n_kept + (d + 1) (2L - k) + k.

    `drafted` tokens (d) each run the `kept` sublayers (n_kept) of the draft; verification runs the
    `sublayers` (2L) minus the shared `prefix` (k) over d + 1 positions, and carries the last
    position through the prefix. A plain step (d = 0) costs 2L. Padding is not counted.

    Args:
        steps: the tokens that draft steps were fed, where not all verified ones were.
    """
    steps = drafted if steps is None else steps
    if drafted < 0 or not 0 <= prefix <= kept <= sublayers:
        raise ValueError(
            "drafted must be at least 0 and 0 <= prefix <= kept <= sublayers, "
            f"got drafted={drafted}, kept={kept}, prefix={prefix}, sublayers={sublayers}"
        )
    anew = max(0, drafted + 1 - steps)
    return steps * kept + (drafted + 1) * (sublayers - prefix) + anew * prefix


def draft_limit(asked: int, tokens_left: int, free_slots: int) -> int:
    """The most tokens a round may draft, never negative.

    A round with d drafts emits up to d + 1 tokens, of which `tokens_left` may still be emitted, and
    writes d + 1 positions into the cache, which has `free_slots`.
    """
    return max(0, min(asked, tokens_left - 1, free_slots - 1))


def remaining(rows: int, going: int) -> int:
    """The rows of a pass once only `going` of them are not finished.

    Finished rows are dropped if the others fit into half of the rows, or fewer: a power of two
    stays, so that passes have few shapes.
    """
    size = 1 << (going - 1).bit_length()
    return size if 2 * size <= rows else rows


def rising(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall (isotonic regression, pooling adjacent violators)."""
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

    draft: float
    """c: one draft step; 0 where drafts are looked up."""
    verify: tuple[float, ...]
    """verify[n - 1] = v(n): one verify pass over n positions. Longer passes are extrapolated."""
    source: str = "given"
    """Where the numbers come from: "measured", "analytic" or "given"."""
    step: float = field(default=1.0, compare=False, repr=False)
    """What a target step takes, in seconds, about."""

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
        """v(n) in target steps; beyond the table the line through its last two, never falling."""
        if n < 1:
            raise ValueError(f"a verify pass covers at least 1 position, got {n}")
        known = len(self.verify)
        if n <= known:
            return self.verify[n - 1]
        slope = max(0.0, self.verify[-1] - self.verify[-2]) if known > 1 else 0.0
        return self.verify[-1] + slope * (n - known)

    def round_cost(self, drafted: int, steps: int | None = None, wide: int = 0) -> float:
        """d c + v(d + 1) in target steps; a round without drafts is a plain step and costs 1.

        Args:
            steps: draft steps, where they are others: tokens were known, or in trees.
            wide: the tokens of a row that steps took beyond one each; such a one is taken to cost
                what a second one does in a pass of the target.
        """
        _check_length(drafted)
        if drafted == 0:
            return 1.0
        steps = drafted if steps is None else steps
        draft = self.draft * (steps + wide * (self.verify_cost(2) - 1.0)) if steps else 0.0
        return draft + self.verify_cost(drafted + 1)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_dict` reads back equal."""
        return {"draft": self.draft, "verify": list(self.verify), "source": self.source}

    @classmethod
    def from_dict(cls, data: Any) -> CostTable:
        """The table in `to_dict`'s form; ValueError or TypeError where it is not one."""
        has(draft=POSITIVE, verify=items(POSITIVE, least=1), source=text)(data, "costs")
        return cls(float(data["draft"]), tuple(map(float, data["verify"])), data["source"])

    @classmethod
    def analytic(
        cls, draft: Iterable[float], target: Iterable[float], verify: Iterable[float] = (1.0,)
    ) -> CostTable:
        """The table of a machine limited by reading weights, for where no clock may decide.

        `draft` holds what a draft step reads (say, in bytes) of each sublayer that it runs and of
        its head, `target` what a target step reads. A verify pass reads every weight once whatever
        its length and whatever prefix it shares, so that v(n) = 1; but for mixtures of experts,
        whose `verify` is given.
        """
        return cls(math.fsum(draft) / math.fsum(target), tuple(verify), "analytic")

    def at(self, context: int, rows: int = 1) -> CostTable:
        """This table, whatever the context and the rows are (see `ContextCosts.at`)."""
        return self

    @property
    def used(self) -> bool:
        """As of `ContextCosts`."""
        return True


class ContextCosts:
    """The costs at any length of context, in batches of any size.

    Args:
        table: makes the table for tokens of context and rows; called once for similar contexts.
    """

    def __init__(self, table: Callable[[int, int], CostTable]) -> None:
        self._table = table
        self._made: dict[tuple[int, int], CostTable] = {}

    def at(self, context: int, rows: int = 1) -> CostTable:
        """The table for that many tokens before a pass, in each of so many rows.

        The same object for similar contexts, so that callers see cheaply whether it changes.
        """
        unit = max(_UNIT, 1 << max(0, context.bit_length() - 4))
        key = context // unit * unit + unit // 2, rows
        if key not in self._made:
            self._made[key] = self._table(*key)
        return self._made[key]

    @property
    def used(self) -> bool:
        """Whether any table has been asked for."""
        return bool(self._made)


class Costs(Protocol):
    """The costs of a source: a table, or tables by context and rows."""

    def at(self, context: int, rows: int = 1) -> CostTable:
        """The table for that many tokens before a pass, in each of so many rows."""

    @property
    def used(self) -> bool:
        """Whether any table has been asked for."""


def keys_read(per_token: Mapping[int | None, float], context: int) -> float:
    """Bytes of keys and values that a pass reads for one row, of so many tokens before it.

    Args:
        per_token: bytes of a token, by how many tokens the layers see at most; None: all of them.
    """
    return math.fsum(
        each * (context if seen is None else min(context, seen)) for seen, each in per_token.items()
    )
