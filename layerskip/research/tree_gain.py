"""The default controller for drafts that are trees, where tokens beside the likeliest may pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerskip.decoding.acceptance import BINS, bin_of
from layerskip.decoding.expected_gain import ExpectedGain, Progress
from layerskip.decoding.source_gain import SourceGain
from layerskip.research.trees import GrownTrees

_LEAST_BESIDE = 0.02  # the least chance of a token that a step takes beside the likeliest


# Of the tokens behind the best one, where that is wrong: their priors by rank, and weight.
_LATER_PRIOR = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02)
_LATER_WEIGHT = 6.0


class TreeGain(ExpectedGain):
    """`ExpectedGain` that also drafts and verifies tokens beside the likeliest (see `Grower`).

    Each is taken by its chance and by what another token in a pass costs.
    """

    branches = True

    def _start(self) -> None:
        super()._start()
        self.trees = GrownTrees(self)
        # by source, of the tokens behind the best one, and of tokens looked up in its place
        self._later = [LaterAcceptance() for _ in self._sources]
        self._instead = [LaterAcceptance() for _ in self._sources]  # whatever the confidence
        self._begin_tree()

    def _begin_tree(self) -> None:
        self._wide = 0  # tokens of a row that the round's steps took, beyond one each
        self._told: set[int] = set()  # rows of which `see_rank` was called in this round

    @property
    def _wider(self) -> float:
        """What another token in a step costs; it is taken to cost what it does in a target pass."""
        costs = self._drafting.costs
        assert costs is not None
        return costs.verify_cost(2) - 1.0

    def rates(self, confidence: float, count: int) -> Sequence[float]:
        confidence_bin = bin_of(confidence)
        best = self._drafting.acceptance.given_confidence[confidence_bin]
        later = self._later[self._round.source or 0].given_wrong(confidence_bin, count - 1)
        return best, *((1.0 - best) * rate for rate in later)

    def expand(self, rows: Mapping[int, Sequence[float]]) -> int:
        round_, source = self._round, self._drafting
        judged = [rows[row] for row in round_.judges if row in rows]
        price = len(round_.judges) * self.rate
        right = source.acceptance.next
        beside = (1.0 - right) * self._later[round_.source or 0].mean
        likely = sum(chances[0] for chances in judged if chances)
        wider = source.step * self._wider
        width, gain, alive = 1, 0.0, likely
        for width in range(1, max(map(len, judged), default=0) + 1):
            more = right * sum(chances[width] for chances in judged if len(chances) > width)
            nodes = min(round_.steps + self._wide + width, source.most) - 1
            least = price * (wider + source.step_costs[nodes] - source.step)
            # it takes the place of the last token on the likeliest path that fits
            last = likely * right ** (source.most - nodes)
            if more <= max(least, last, _LEAST_BESIDE * len(judged)):
                break
            gain += more - price * wider
        for steps in range(round_.steps, source.most):
            cost = source.step_costs[min(steps + self._wide, source.most - 1)]
            gain += alive * right - price * cost
            gain += max(0.0, alive * beside - price * (cost - source.step))
            alive *= right
            if gain > 0.0:
                round_.steps += 1
                self._wide += width - 1
                return width
        return 0

    def copied(self, draft: int, row: int) -> Sequence[float]:
        offer, copies = (self._round.offers or ())[draft], self._sources[draft].copies
        match = (offer.matches or {})[row]
        return [copies.acceptance(match + depth) for depth in range(offer.lengths[row])]

    def instead(self, draft: int) -> float:
        return self._instead[draft].mean

    def widen(self, rows: Mapping[int, tuple[int, Sequence[float]]]) -> int:
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
        confidence_bin = bin_of(confidence)
        self._told.add(row)
        self._drafting.acceptance.observe(confidence_bin, rank == 0)
        if rank != 0:
            self._later[self._round.source or 0].observe(confidence_bin, rank)

    def see_instead(self, draft: int, right: bool) -> None:
        self._instead[draft].observe(0, 1 if right else None)

    def _count(self, row: int, drafted: int) -> None:
        if row not in self._told:  # else `expand` and `widen` have counted
            super()._count(row, drafted)

    def _cost(self) -> float:
        return super()._cost() + self._wide * self._drafting.step * self._wider

    def _learn_steps(self, row: int, drafted: int, accepted: int) -> None:
        if row not in self._told:  # else `see_rank` has counted its places
            super()._learn_steps(row, drafted, accepted)

    def _report_times(self, round_: Progress, source: SourceGain) -> None:
        if not self._wide:  # what a step of several tokens costs is not learnt
            super()._report_times(round_, source)

    def _end_round(self) -> None:
        super()._end_round()
        self._begin_tree()


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
        own, seen = self._won[confidence_bin], self._seen[confidence_bin] + _LATER_WEIGHT
        prior = _LATER_WEIGHT / self._places
        return [
            (won + prior * every) / seen for won, every in zip(own[:count], self._all, strict=False)
        ]

    @property
    def mean(self) -> float:
        """The chance of the second-best at any place."""
        return self._all[0] / self._places

    def observe(self, confidence_bin: int, rank: int | None) -> None:
        """Count the rank of the token that came, None for none of them."""
        self._seen[confidence_bin] += 1.0
        self._places += 1.0
        if rank is not None and rank <= len(_LATER_PRIOR):
            self._won[confidence_bin][rank - 1] += 1.0
            self._all[rank - 1] += 1.0
