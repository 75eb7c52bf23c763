"""Corrects costs by the measured times of rounds.

A calibration may coincide with other work on the machine, and no cost model is right everywhere.
For every kind of work (a plain step, a draft step of a source, a pass over 2, 3 to 4, 5 to 8, 9 or
more tokens) recent times are kept, divided by the expected ones and by the machine's pace at that
moment. A kind that is further off than a plain step is corrected by the difference.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from itertools import accumulate
from statistics import median

from layerskip.costs.speculation import Costs, CostTable

_KEPT = 15  # times per kind
_FEW = 5  # with fewer, costs are only corrected downwards: other work adds to times
_PACE = 4  # most recent times of any kind that determine the machine's pace
_MOVED = 0.03  # minimum change of a correction's logarithm for which tables are renewed
_OLD = 256  # number of other kinds' times after which a kind's times are forgotten
SPARE = 0.005
"""Target steps per round that may be spent on kinds of work that were never timed."""
MOST_SPARE = 2.0  # maximum of these at once
_WIDEST = 4  # the size of passes over 9 tokens or more

Work = tuple[int, Hashable | None, int]
"""Rows, the source's key (None: a plain step), and the size; size 0 is a draft step."""


class Corrections:
    """Factors by which rounds on one model exceed their expected costs; thread-safe.

    Attributes:
        version: changes whenever the corrections change.
        spare: target steps that may be spent now on work that was never timed.
    """

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything, because the expected costs have changed."""
        self.version += 1
        self.spare = MOST_SPARE
        self._ratios: dict[Work, deque[float]] = {}  # logarithms, over the pace
        self._last: dict[Work, int] = {}  # number of the last time of each
        self._typical: dict[Work, float] = {}
        # The last times of any kind, divided by the typical ratios.
        self._pace = deque([0.0] * _PACE, maxlen=_PACE)
        self._seen = 0

    def see(self, work: Work, ratio: float) -> None:
        """Record the factor by which a time exceeds the expected one."""
        plain = work[0], None, 1
        with self._lock:
            self._seen += 1
            self._last[work] = self._seen
            ratios = self._ratios.setdefault(work, deque(maxlen=_KEPT))
            before = self._typical.get(work, 0.0)
            # A plain step relative to the pace, others relative to a plain step.
            over = math.log(ratio) - (0.0 if work == plain else self._typical.get(plain, 0.0))
            ratios.append(over - median(self._pace))
            if len(ratios) > _FEW:
                self._pace.append(over - before)
            new = min(ratios) if work == plain and len(ratios) < _FEW else median(ratios)
            if abs(new - before) > _MOVED or len(ratios) == _FEW:
                self._typical[work] = new
                self.version += work != plain  # costs are in plain steps
            if self._seen % _OLD == 0:
                for old in [k for k, last in self._last.items() if last <= self._seen - _OLD]:
                    del self._ratios[old], self._last[old]
                    self._typical.pop(old, None)
                    self.version += 1

    def has_times(self, work: Work) -> bool:
        """Whether there are times of a kind of work."""
        return work in self._ratios

    def needs_plain(self, rows: int) -> bool:
        """Whether to time another plain step, by which everything else is judged."""
        work = rows, None, 1
        old = self._seen - self._last.get(work, 0) > _OLD // 4
        return old or len(self._ratios.get(work, ())) < _FEW

    def factor(self, work: Work) -> float:
        """The factor for a cost in target steps; 1 if nothing was timed."""
        typical = self._typical.get(work, 0.0)
        enough = len(self._ratios.get(work, ())) >= _FEW
        return math.exp(typical if enough else min(0.0, typical))


class CorrectedCosts:
    """A source's costs, corrected by times of rounds. A model's sources share corrections."""

    def __init__(self, costs: Costs, corrections: Corrections, source: Hashable) -> None:
        self.costs, self.corrections, self.source = costs, corrections, source
        self._made: dict[int, tuple[CostTable, int, CostTable]] = {}

    def at(self, context: int, rows: int = 1) -> CostTable:
        """As for `ContextCosts`; a new object whenever corrections change."""
        table, version = self.costs.at(context, rows), self.corrections.version
        made = self._made.get(rows)
        if made is None or made[0] is not table or made[1] != version:
            made = self._made[rows] = table, version, self._corrected(table, rows)
        return made[2]

    def see(self, context: int, rows: int, tokens: int, seconds: float) -> None:
        """Report the time of a pass over `tokens` tokens of every row; 0: a draft step."""
        table = self.costs.at(context, rows)
        expected = table.step * (table.verify_cost(tokens) if tokens else table.draft)
        if seconds > 0.0 and expected > 0.0:
            self.corrections.see(self._work(rows, tokens), seconds / expected)

    def has_times(self, rows: int, tokens: int) -> bool:
        """Whether there are times of such a pass."""
        return self.corrections.has_times(self._work(rows, tokens))

    def _work(self, rows: int, tokens: int) -> Work:
        if tokens == 1:
            return rows, None, 1
        return rows, self.source, min(_WIDEST, (tokens - 1).bit_length()) if tokens else 0

    def _corrected(self, table: CostTable, rows: int) -> CostTable:
        verify, most = list[float](), math.inf  # no pass costs more than a longer timed one
        for tokens in range(max(len(table.verify), 1 << _WIDEST), 1, -1):  # flat tables are short
            work = self._work(rows, tokens)
            cost = table.verify_cost(tokens) * self.corrections.factor(work)
            if self.corrections.has_times(work):
                most = min(most, cost)
            verify.append(min(most, cost))
        rising = accumulate([1.0, *reversed(verify)], max)
        draft = table.draft * self.corrections.factor(self._work(rows, 0))
        return replace(table, draft=draft, verify=tuple(rising))
