"""Trees: the default controller with tokens beside the likeliest verified, where these may pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from layerskip.decoding.acceptance import BINS, bin_of
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.sources.base import State

LEAST = 0.01
"""The least chance of a token outside of the chain."""

# Of the tokens behind the best one, where that is wrong: their priors by rank, and weight.
_LATER_PRIOR = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02)
_LATER_WEIGHT = 6.0


@dataclass(slots=True)
class Place:
    """What a draft says of a place.

    Attributes:
        confidence: of the best token.
        tokens: the best ones, in order.
        rates: how likely each is to be right if what is before the place is.
        behind: by token what the draft says behind it, where it was asked.
    """

    confidence: float
    tokens: Sequence[int]
    rates: Sequence[float]
    behind: dict[int, Place] = field(default_factory=dict)

    @property
    def pairs(self) -> Iterable[tuple[int, float]]:
        return zip(self.tokens, self.rates, strict=False)

    def precede(self, said: Place, *, everywhere: bool) -> None:
        """Attach the next place behind the best token; with `everywhere`, behind each token."""
        self.behind.update(dict.fromkeys(self.tokens if everywhere else self.tokens[:1], said))


class Node(NamedTuple):
    """A token to verify: its chance, what it follows, and itself."""

    chance: float
    parent: int
    token: int


def best_first(
    most: int,
    behind: Callable[[int, float, Any], Iterable[tuple[bool, float, int, Any]]],
    here: Any,
) -> list[Node]:
    """The likeliest tokens of a tree, in falling order, each behind its parent.

    Args:
        most: how many.
        behind: what may follow a node, told its number, its chance, and its place. Of each token:
            whether those without it come first, its chance, itself, and its place.
        here: the place of the row's last token.
    """
    nodes, chance, order = list[Node](), 1.0, count()
    waiting: list[tuple[bool, float, int, int, int, Any]] = []
    while len(nodes) < most:
        for later, likely, token, place in behind(len(nodes), chance, here):
            heappush(waiting, (later, -likely, next(order), len(nodes), token, place))
        if not waiting:
            break
        _, less, _, parent, token, here = heappop(waiting)
        chance = -less
        nodes.append(Node(chance, parent, token))
    return nodes


def grown(
    root: Place, most: int, *, chain: int = 0, ends: frozenset[int] = frozenset()
) -> list[Node]:
    """`best_first` of what a draft has said.

    Args:
        root: the place behind the row's last token.
        chain: so many best tokens, one behind the other, come first, whatever their chances.
        ends: tokens behind which nothing follows.
    """

    def behind(
        node: int, chance: float, place: Place | None
    ) -> Iterator[tuple[bool, float, int, Place | None]]:
        for rank, (token, rate) in enumerate(place.pairs if place else ()):
            beside, there = rank > 0 or node >= chain, place and place.behind.get(token)
            if token >= 0 and (not beside or there is not None or chance * rate >= LEAST):
                yield beside, chance * rate, token, None if token in ends else there

    return best_first(most, behind, root)


class GrownTrees:
    """A controller's `trees`, whose rounds ask it where a source takes steps.

    The controller tells chances of tokens, and how many to verify.

    Args:
        gains: the controller, with the methods of `TreeGain`.
    """

    def __init__(self, gains: Any) -> None:
        self.gains = gains
        self.said: dict[int, Place] = {}  # by row, of the place behind its last token

    def begin(self, ends: Sequence[frozenset[int]], longest: int, state: State) -> None:
        """A round begins, with the ends of text by row, and the most tokens of a row verified."""
        self.ends, self.longest, self.everywhere = ends, longest, state.everywhere
        self.said = {}
        self._latest: dict[int, Place] = {}  # by row, of the last place of its chain

    def see(self, row: int, tokens: Sequence[int], confidence: float) -> None:
        """Told the best tokens of a row's next place, the first of which it has drafted."""
        said = Place(confidence, tokens, self.gains.rates(confidence, len(tokens)))
        if row in self._latest:
            self._latest[row].precede(said, everywhere=self.everywhere)
        else:
            self.said[row] = said
        self._latest[row] = said

    def choose(
        self, chains: Mapping[int, int]
    ) -> Mapping[int, tuple[Sequence[int], Sequence[int]]]:
        """What rows verify once all steps are done: tokens, and what each one follows.

        Args:
            chains: by row, how many tokens of its chain are verified in any case.
        """
        trees = {
            row: grown(self.said[row], self.longest, chain=chain, ends=self.ends[row])
            for row, chain in chains.items()
            if row in self.said
        }
        if not trees:
            return {}
        width = self.gains.widen(
            {row: (chains[row], [node.chance for node in nodes]) for row, nodes in trees.items()}
        )
        tops = {row: nodes[: max(width, chains[row])] for row, nodes in trees.items()}
        return {
            row: ([node.token for node in nodes], [node.parent for node in nodes])
            for row, nodes in tops.items()
        }

    def learn(self, row: int, tokens: Sequence[int]) -> None:
        """Told the tokens that the target has accepted of a row, and its own next one."""
        said = self.said.get(row)
        for token in tokens:
            if said is None:
                return
            rank = said.tokens.index(token) if token in said.tokens else None
            self.gains.see_rank(row, said.confidence, rank)
            if token in self.ends[row]:
                return
            said = said.behind.get(token)


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
