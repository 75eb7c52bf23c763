"""Trees of tokens to verify: the likeliest ones of those that draft steps rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from layerskip.decoding.sources.base import State

LEAST = 0.01
"""The least chance of a token outside of the chain."""


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

    def precede(self, said: Place, *, everywhere: bool) -> None:
        """Attach the next place behind the best token; with `everywhere`, behind each token."""
        self.behind.update(dict.fromkeys(self.tokens if everywhere else self.tokens[:1], said))


class Node(NamedTuple):
    """A token to verify: its chance, what it follows, and itself."""

    chance: float
    parent: int
    token: int


def grown(
    root: Place, most: int, *, chain: int = 0, ends: frozenset[int] = frozenset()
) -> list[Node]:
    """The likeliest tokens of a tree, in falling order, each behind its parent.

    Args:
        root: the place behind the row's last token.
        most: how many.
        chain: so many best tokens, one behind the other, come first, whatever their chances.
        ends: tokens behind which nothing follows.
    """
    nodes: list[Node] = []
    order = count()
    # whether outside of the chain, -chance, order, parent, token, the place behind it
    waiting: list[tuple[bool, float, int, int, int, Place | None]] = []
    place: Place | None = root
    chance = 1.0
    while True:
        pairs = () if place is None else zip(place.tokens, place.rates, strict=False)
        for rank, (token, rate) in enumerate(pairs):
            beside = rank > 0 or len(nodes) >= chain
            behind = None if place is None else place.behind.get(token)
            if token >= 0 and (not beside or behind is not None or chance * rate >= LEAST):
                key = beside, -chance * rate, next(order)
                heappush(waiting, (*key, len(nodes), token, behind))
        if not waiting or len(nodes) == most:
            return nodes
        _, less, _, parent, token, place = heappop(waiting)
        chance = -less
        nodes.append(Node(chance, parent, token))
        if token in ends:
            place = None


class GrownTrees:
    """The `Trees` of a controller that tells chances of tokens, and how many to verify.

    Args:
        gains: the controller, with the methods of `TreeGain`.
    """

    def __init__(self, gains: Any) -> None:
        self.gains = gains
        self.said: dict[int, Place] = {}  # by row, of the place behind its last token

    def begin(self, ends: Sequence[frozenset[int]], longest: int, state: State) -> None:
        self.ends, self.longest, self.everywhere = ends, longest, state.everywhere
        self.said = {}
        self._latest: dict[int, Place] = {}  # by row, of the last place of its chain

    def see(self, row: int, tokens: Sequence[int], confidence: float) -> None:
        said = Place(confidence, tokens, self.gains.rates(confidence, len(tokens)))
        if row in self._latest:
            self._latest[row].precede(said, everywhere=self.everywhere)
        else:
            self.said[row] = said
        self._latest[row] = said

    def choose(
        self, chains: Mapping[int, int]
    ) -> Mapping[int, tuple[Sequence[int], Sequence[int]]]:
        """The likeliest of the tokens that steps have ranked."""
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
        """Tell the controller which of the best tokens were right."""
        said = self.said.get(row)
        for token in tokens:
            if said is None:
                return
            rank = said.tokens.index(token) if token in said.tokens else None
            self.gains.see_rank(row, said.confidence, rank)
            if token in self.ends[row]:
                return
            said = said.behind.get(token)
