"""Trees: the default controller, which also verifies second-best tokens where that may pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from layerskip.decoding.acceptance import BINS, bin_of
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.sources.base import Proposal, State

LEAST = 0.01
"""Minimum chance of a token outside the chain."""

# Priors for the tokens after the best one if that is wrong, by rank, and their weight.
_LATER_PRIOR = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02)
_LATER_WEIGHT = 6.0


@dataclass(slots=True)
class TreePosition:
    """A draft's results at a position.

    Attributes:
        confidence: of the best token.
        tokens: the best ones, in order.
        rates: the probability that each is right, if everything before the position is.
        after: by token, the draft's results after it, if known.
    """

    confidence: float
    tokens: Sequence[int]
    rates: Sequence[float]
    after: dict[int, TreePosition] = field(default_factory=dict)


class Node(NamedTuple):
    """A token to verify: its chance, its parent, and the token itself."""

    chance: float
    parent: int
    token: int


def best_first(
    most: int,
    children: Callable[[int, float, Any], Iterable[tuple[bool, float, int, Any]]],
    here: Any,
) -> list[Node]:
    """The likeliest tokens of a tree, in decreasing order, each after its parent.

    Args:
        most: maximum number of tokens.
        children: called with a node's number, chance and position; gives for each token that may
            follow: whether it ranks after all others, its chance, itself, and its position.
        here: the position of the row's last token.
    """
    nodes, chance, order = list[Node](), 1.0, count()
    waiting: list[tuple[bool, float, int, int, int, Any]] = []
    while len(nodes) < most:
        for later, likely, token, place in children(len(nodes), chance, here):
            heappush(waiting, (later, -likely, next(order), len(nodes), token, place))
        if not waiting:
            break
        _, less, _, parent, token, here = heappop(waiting)
        chance = -less
        nodes.append(Node(chance, parent, token))
    return nodes


def grown(
    root: TreePosition, most: int, *, chain: int = 0, ends: frozenset[int] = frozenset()
) -> list[Node]:
    """`best_first` on the results of a draft.

    Args:
        root: the position after the row's last token.
        chain: number of best tokens in a chain that come first, whatever their chances.
        ends: tokens that nothing follows.
    """

    def children(
        node: int, chance: float, place: TreePosition | None
    ) -> Iterator[tuple[bool, float, int, TreePosition | None]]:
        likeliest = zip(place.tokens, place.rates, strict=False) if place else ()
        for rank, (token, rate) in enumerate(likeliest):
            beside, there = rank > 0 or node >= chain, place and place.after.get(token)
            if token >= 0 and (not beside or there is not None or chance * rate >= LEAST):
                yield beside, chance * rate, token, None if token in ends else there

    return best_first(most, children, root)


class GrownTrees:
    """A controller's `trees`, which rounds use if a source takes steps.

    The controller provides the chances of tokens, and how many to verify.

    Args:
        gains: the controller, with the methods of `TreeGain`.
    """

    def __init__(self, gains: Any) -> None:
        self.gains = gains
        # By row, the results at the position after its last token.
        self.results: dict[int, TreePosition] = {}

    def begin(self, ends: Sequence[frozenset[int]], longest: int, state: State) -> None:
        """Begin a round, with the ends of text by row, and a maximum number of tokens per row."""
        self.ends, self.longest, self.everywhere = ends, longest, state.everywhere
        self.results = {}
        self._latest: dict[int, TreePosition] = {}  # by row, the last position of its chain

    def see(self, row: int, tokens: Sequence[int], confidence: float) -> None:
        """Record the best tokens of a row's next position, of which the first was drafted."""
        result = TreePosition(confidence, tokens, self.gains.rates(confidence, len(tokens)))
        if (before := self._latest.get(row)) is not None:
            followed = before.tokens if self.everywhere else before.tokens[:1]
            before.after.update(dict.fromkeys(followed, result))
        else:
            self.results[row] = result
        self._latest[row] = result

    def choose(self, chains: Mapping[int, int]) -> Mapping[int, Proposal]:
        """The tokens for rows to verify once all steps are done.

        Args:
            chains: by row, the number of tokens of its chain that are verified in any case.
        """
        trees = {
            row: grown(self.results[row], self.longest, chain=chain, ends=self.ends[row])
            for row, chain in chains.items()
            if row in self.results
        }
        if not trees:
            return {}
        width = self.gains.widen(
            {row: (chains[row], [node.chance for node in nodes]) for row, nodes in trees.items()}
        )
        tops = {row: nodes[: max(width, chains[row])] for row, nodes in trees.items()}
        return {
            row: Proposal.of([each.token for each in nodes], 0, [each.parent for each in nodes])
            for row, nodes in tops.items()
        }

    def learn(self, row: int, tokens: Sequence[int]) -> None:
        """Learn from the tokens that the target accepted for a row, and its own next one."""
        result = self.results.get(row)
        for token in tokens:
            if result is None:
                return
            rank = result.tokens.index(token) if token in result.tokens else None
            self.gains.see_rank(row, result.confidence, rank)
            if token in self.ends[row]:
                return
            result = result.after.get(token)


class TreeGain(ExpectedGain):
    """`ExpectedGain` that also verifies tokens outside of chains.

    Each is chosen by its chance, and by the cost of another token in a pass.
    """

    def _start(self) -> None:
        super()._start()
        self.trees = GrownTrees(self)
        self._later = [LaterAcceptance() for _ in self._sources]  # for tokens after the best one

    def rates(self, confidence: float, count: int) -> Sequence[float]:
        """P(right) of the `count` best tokens at a position, if everything before it is right."""
        confidence_bin = bin_of(confidence)
        best = self._drafting.acceptance.given_confidence[confidence_bin]
        later = self._later[self._round.source or 0].given_wrong(confidence_bin, count - 1)
        return best, *((1.0 - best) * rate for rate in later)

    def widen(self, rows: Mapping[int, tuple[int, Sequence[float]]]) -> int:
        """The maximum number of tokens of a row to verify, after the round's last step.

        Args:
            rows: by row, how many are verified in any case, and the chances of all: first of these,
                then of the others, likeliest first.
        """
        round_, source = self._round, self._drafting
        width = max(round_.looked_up, *(chain for chain, _ in rows.values()))
        longest = max(len(chances) for _, chances in rows.values())
        judged = [chances for row, (_, chances) in rows.items() if row in round_.judges]
        gain = best = 0.0
        for wider in range(width + 1, min(longest, source.most) + 1):
            gain += sum(chances[wider - 1] for chances in judged if len(chances) >= wider)
            gain -= len(round_.judges) * self.rate * source.verify_costs[wider - 1]
            if gain > best:
                best, round_.looked_up = gain, wider
        return max(width, round_.looked_up)

    def see_rank(self, row: int, confidence: float, rank: int | None) -> None:
        """Report which token was right at a drafted position, before `update`: 0 for the best one.

        None: it was none of the best ones.
        """
        confidence_bin = bin_of(confidence)
        self._ranked.add(row)
        self._drafting.acceptance.observe(confidence_bin, rank == 0)
        if rank != 0:
            self._later[self._round.source or 0].observe(confidence_bin, rank)

    def _learn_steps(self, row: int, drafted: int, accepted: int) -> None:
        if row not in self._ranked:  # otherwise `see_rank` has counted its positions
            super()._learn_steps(row, drafted, accepted)

    def _count(self, row: int, drafted: int) -> None:
        if row not in self._ranked:  # otherwise `widen` has counted
            super()._count(row, drafted)

    def _end_round(self) -> None:
        super()._end_round()
        self._ranked: set[int] = set()  # rows for which `see_rank` was called in this round


class LaterAcceptance:
    """Estimates how often each token after the best one is right if that is wrong.

    By the best one's confidence, as in `Acceptance`, and by rank, 1 for the second-best.
    """

    def __init__(self) -> None:
        self._won = [[0.0] * len(_LATER_PRIOR) for _ in range(BINS)]
        self._seen = [0.0] * BINS
        self._all, self._places = [_LATER_WEIGHT * prior for prior in _LATER_PRIOR], _LATER_WEIGHT

    def given_wrong(self, confidence_bin: int, count: int = 1) -> list[float]:
        """The chances of the next `count` tokens, starting with the second-best."""
        here, seen = self._won[confidence_bin], self._seen[confidence_bin] + _LATER_WEIGHT
        prior = _LATER_WEIGHT / self._places
        return [
            (won + prior * every) / seen
            for won, every in zip(here[:count], self._all, strict=False)
        ]

    def observe(self, confidence_bin: int, rank: int | None) -> None:
        """Count the rank of the actual token, None for none of them."""
        self._seen[confidence_bin] += 1.0
        self._places += 1.0
        if rank is not None and rank <= len(_LATER_PRIOR):
            self._won[confidence_bin][rank - 1] += 1.0
            self._all[rank - 1] += 1.0
