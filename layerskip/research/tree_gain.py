"""The default controller with trees, in which tokens beside the likeliest may pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerskip.decoding.acceptance import BINS, bin_of
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.research.trees import GrownTrees

# Of the tokens behind the best one, where that is wrong: their priors by rank, and weight.
_LATER_PRIOR = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02)
_LATER_WEIGHT = 6.0


class TreeGain(ExpectedGain):
    """`ExpectedGain` that also has tokens verified beside those of chains.

    Each is taken by its chance and by what another token in a pass costs.
    """

    def _start(self) -> None:
        super()._start()
        self.trees = GrownTrees(self)
        self._later = [LaterAcceptance() for _ in self._sources]  # behind the best token

    def rates(self, confidence: float, count: int) -> Sequence[float]:
        """P(right) of the `count` best tokens of a place, if what is before the place is right."""
        confidence_bin = bin_of(confidence)
        best = self._drafting.acceptance.given_confidence[confidence_bin]
        later = self._later[self._round.source or 0].given_wrong(confidence_bin, count - 1)
        return best, *((1.0 - best) * rate for rate in later)

    def widen(self, rows: Mapping[int, tuple[int, Sequence[float]]]) -> int:
        """How many tokens to verify of a row, at most, once the round's last step is done.

        Args:
            rows: by row, how many are verified in any case, and the chances of all: of these first,
                then of the others, the likeliest first.
        """
        round_, source = self._round, self._drafting
        width = max(round_.looked_up, *(chain for chain, _ in rows.values()))
        longest = max(len(chances) for _, chances in rows.values())
        judged = [chances for row, (_, chances) in rows.items() if row in round_.judges]
        gain = best = 0.0
        for wider in range(width + 1, min(longest, source.most) + 1):
            gain += sum(chances[wider - 1] for chances in judged if len(chances) >= wider)
            cost = source.step_costs[wider - 1] - source.step
            gain -= len(round_.judges) * self.rate * cost
            if gain > best:
                best, round_.looked_up = gain, wider
        return max(width, round_.looked_up)

    def see_rank(self, row: int, confidence: float, rank: int | None) -> None:
        """Reports which token was right at a drafted place, before `update`: 0 for the best one.

        None: it was none of the best ones.
        """
        confidence_bin = bin_of(confidence)
        self._told.add(row)
        self._drafting.acceptance.observe(confidence_bin, rank == 0)
        if rank != 0:
            self._later[self._round.source or 0].observe(confidence_bin, rank)

    def _learn_steps(self, row: int, drafted: int, accepted: int) -> None:
        if row not in self._told:  # else `see_rank` has counted its places
            super()._learn_steps(row, drafted, accepted)

    def _count(self, row: int, drafted: int) -> None:
        if row not in self._told:  # else `widen` has counted
            super()._count(row, drafted)

    def _end_round(self) -> None:
        super()._end_round()
        self._told: set[int] = set()  # rows of which `see_rank` was called in this round


class LaterAcceptance:
    """Estimates of how often each token behind the best one is right where that is wrong.

    By the best one's confidence, as in `Acceptance`, and by rank, 1 for the second-best.
    """

    def __init__(self) -> None:
        self._won = [[0.0] * len(_LATER_PRIOR) for _ in range(BINS)]
        self._seen = [0.0] * BINS
        self._all, self._places = [_LATER_WEIGHT * prior for prior in _LATER_PRIOR], _LATER_WEIGHT

    def given_wrong(self, confidence_bin: int, count: int = 1) -> list[float]:
        """The chances of so many tokens there, the second-best's first."""
        here, seen = self._won[confidence_bin], self._seen[confidence_bin] + _LATER_WEIGHT
        prior = _LATER_WEIGHT / self._places
        return [
            (won + prior * every) / seen
            for won, every in zip(here[:count], self._all, strict=False)
        ]

    def observe(self, confidence_bin: int, rank: int | None) -> None:
        """Count the rank of the token that came, None for none of them."""
        self._seen[confidence_bin] += 1.0
        self._places += 1.0
        if rank is not None and rank <= len(_LATER_PRIOR):
            self._won[confidence_bin][rank - 1] += 1.0
            self._all[rank - 1] += 1.0
