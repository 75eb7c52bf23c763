"""Costs that heal: what rounds take corrects what was measured in another moment.

A measurement may meet other work on the machine; a table that says half or twice the truth would
then choose bad drafts for as long as the process lives. So rounds are timed, too. Of every kind of
work (a plain step, a draft step of a source, a pass over 2, 3 to 4, 5 to 8, 9 or more tokens) the
last times are kept, over those expected and over the pace of the machine at that moment. What is
off by more than a plain step is, is corrected by as much.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median

from layerskip.costs.speculation import Costs, CostTable

_KEPT = 15  # times of a kind
_FEW = 5  # fewer only tell that a kind is cheaper: other work on the machine adds to times
_PACE = 4  # times of any kind that tell how fast the machine is
_MOVED = 0.03  # by which logarithm a correction has to change, so that tables are made anew
_OLD = 256  # times of other kinds after which a kind's own are forgotten
SPARE = 0.005
"""Target steps a round that may be spent on kinds of work of which nothing is known."""
MOST_SPARE = 2.0
"""Of these, how many are spent at once, at most."""
_WIDEST = 4  # the size of passes over 9 tokens or more

Kind = tuple[int, int | None, int]  # rows, source (None: a plain step), size; size 0: a draft step


class Observed:
    """What rounds on one model have taken; serves several threads.

    Attributes:
        version: changes with the corrections.
        spare: target steps that may be spent now to see what was not seen before.
    """

    def __init__(self) -> None:
        self.version = 0
        self.spare = MOST_SPARE
        self._off: dict[Kind, deque[float]] = {}  # logarithms of times over expected ones, and pace
        self._last: dict[Kind, int] = {}
        self._by: dict[Kind, float] = {}  # what is typical among them
        # what that leaves of the last times of any kind
        self._pace = deque([0.0] * _PACE, maxlen=_PACE)
        self._seen = 0
        self._lock = threading.Lock()

    def see(self, kind: Kind, ratio: float) -> None:
        """Note a time over the expected one."""
        plain = kind[0], None, 1
        with self._lock:
            self._seen += 1
            self._last[kind] = self._seen
            own, before = self._off.setdefault(kind, deque(maxlen=_KEPT)), self._by.get(kind, 0.0)
            # of a plain step over the pace, of others over a plain step
            over = math.log(ratio) - (0.0 if kind == plain else self._by.get(plain, 0.0))
            own.append(over - median(self._pace))
            if len(own) > _FEW:
                self._pace.append(over - before)
            by = min(own) if kind == plain and len(own) < _FEW else median(own)
            if abs(by - before) > _MOVED or len(own) == _FEW:
                self._by[kind] = by
                self.version += 1
            if self._seen % _OLD == 0:
                for old in [k for k, last in self._last.items() if last <= self._seen - _OLD]:
                    del self._off[old], self._last[old]
                    self._by.pop(old, None)
                    self.version += 1

    def knows(self, kind: Kind) -> bool:
        """Whether there are times of a kind."""
        return kind in self._off

    def needs_plain(self, rows: int) -> bool:
        """Whether to see another plain step, by which all else is judged."""
        kind = rows, None, 1
        old = self._seen - self._last.get(kind, 0) > _OLD // 4
        return old or len(self._off.get(kind, ())) < _FEW

    def factor(self, kind: Kind) -> float:
        """By what to multiply the cost of a kind of work, in target steps; 1 if it is not known."""
        by = self._by.get(kind, 0.0)
        return math.exp(by if len(self._off.get(kind, ())) >= _FEW else min(0.0, by))


class HealingCosts:
    """The costs of a source, corrected by what rounds take.

    Args:
        costs: what was measured, or is expected.
        observed: shared by the sources of a model.
        number: of the source among them.
    """

    def __init__(self, costs: Costs, observed: Observed, number: int) -> None:
        self.costs, self.observed, self.number = costs, observed, number
        self._made: dict[int, tuple[CostTable, int, CostTable]] = {}

    def at(self, context: int, rows: int = 1) -> CostTable:
        """The table there, as of `ContextCosts`; another object once corrections change."""
        table, version = self.costs.at(context, rows), self.observed.version
        made = self._made.get(rows)
        if made is None or made[0] is not table or made[1] != version:
            made = self._made[rows] = table, version, self._healed(table, rows)
        return made[2]

    @property
    def used(self) -> bool:
        """As of `ContextCosts`."""
        return self.costs.used

    def see(self, context: int, rows: int, tokens: int, seconds: float) -> None:
        """Report what a pass over so many tokens of every row took; 0: a draft step."""
        table = self.costs.at(context, rows)
        expected = table.step * (table.verify_cost(tokens) if tokens else table.draft)
        if seconds > 0.0 and expected > 0.0:
            self.observed.see(self._kind(rows, tokens), seconds / expected)

    def knows(self, rows: int, tokens: int) -> bool:
        """Whether such a pass was seen of late."""
        return self.observed.knows(self._kind(rows, tokens))

    def _kind(self, rows: int, tokens: int) -> Kind:
        if tokens == 1:
            return rows, None, 1
        return rows, self.number, min(_WIDEST, (tokens - 1).bit_length()) if tokens else 0

    def _healed(self, table: CostTable, rows: int) -> CostTable:
        factor, knows = self.observed.factor, self.observed.knows
        kinds = [self._kind(rows, tokens) for tokens in range(2, len(table.verify) + 1)]
        costs = [each * factor(k) for each, k in zip(table.verify[1:], kinds, strict=True)]
        most = math.inf  # a pass costs no more than longer ones that were seen
        for i in reversed(range(len(costs))):
            if knows(kinds[i]):
                most = min(most, costs[i])
            costs[i] = min(most, costs[i])
        verify = (1.0, *accumulate([max(1.0, each) for each in costs], max))
        return replace(table, draft=table.draft * factor(self._kind(rows, 0)), verify=verify)


class LaterCosts:
    """`HealingCosts` that are made when they are first asked for.

    Args:
        make: makes those of all sources, at the first call of it.
        number: of the source among them.
    """

    def __init__(self, make: Callable[[], Sequence[HealingCosts]], number: int) -> None:
        self._make, self._number = make, number
        self.used = False

    @property
    def found(self) -> HealingCosts:
        """They."""
        self.used = True
        return self._make()[self._number]

    def at(self, context: int, rows: int = 1) -> CostTable:
        """As of `HealingCosts`."""
        return self.found.at(context, rows)


def healing(costs: Iterable[Costs]) -> list[HealingCosts]:
    """The costs of a model's sources, which rounds correct."""
    observed = Observed()
    return [HealingCosts(each, observed, number) for number, each in enumerate(costs)]
