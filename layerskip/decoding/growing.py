"""What a round verifies: the most promising tokens of what a draft says, and of what is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from layerskip.decoding.sources.base import Proposal

LEAST = 0.02
"""The least chance of a token, but of those that are drafted on."""


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


class Node(NamedTuple):
    """A token to verify: its chance, what it follows, and itself."""

    chance: float
    parent: int
    token: int


class Joined(NamedTuple):
    """A proposal that joins what a draft says.

    Attributes:
        rates: how likely each of its tokens is to be right if what it follows is.
        instead: that likely is one that is not the draft's best where that is wrong.
    """

    proposal: Proposal
    rates: Sequence[float]
    instead: float

    def behind(self, node: int) -> list[int]:
        """The nodes that follow one."""
        parents = self.proposal.parents
        if parents is None:
            return [node + 1] if node < self.proposal.length else []
        return [each for each, parent in enumerate(parents, 1) if parent == node]

    def token(self, node: int) -> int:
        return (self.proposal.tokens or ())[node - 1]


def conditional(proposal: Proposal) -> list[float]:
    """How likely each of a proposal's tokens is to be right if what it follows is, if it tells."""
    chances, parents = proposal.chances or (), proposal.parents or range(proposal.length)
    before = [1.0, *chances]
    return [own / before[parent] for own, parent in zip(chances, parents, strict=False)]


def grown(
    root: Place,
    most: int,
    joined: Sequence[Joined] = (),
    *,
    chain: int = 0,
    ends: frozenset[int] = frozenset(),
) -> list[Node]:
    """The most promising tokens, the most likely ones first, each behind what it follows.

    Args:
        root: the place behind the row's last token.
        most: how many.
        joined: what others propose.
        chain: so many best tokens, one behind the other, come first, whatever their chances.
        ends: tokens behind which nothing follows.
    """
    found: list[Node] = []
    order = count()
    # not of the chain, -chance, order, parent, token, the place behind it, where the joined have it
    waiting: list[
        tuple[bool, float, int, int, int, Place | None, Sequence[tuple[Joined, int]]]
    ] = []
    place: Place | None = root
    here: Sequence[tuple[Joined, int]] = [(each, 0) for each in joined]
    node, chance = 0, 1.0
    while True:
        rates: dict[int, float] = {}
        at: dict[int, list[tuple[Joined, int]]] = {}
        best = -1
        if place is not None:
            rates.update(zip(place.tokens, place.rates, strict=False))
            best = place.tokens[0]
        for each, own in here:
            for child in each.behind(own):
                token, rate = each.token(child), each.rates[child - 1]
                at.setdefault(token, []).append((each, child))
                if place is not None:
                    rate = (1.0 - place.rates[0]) * each.instead
                if token != best:
                    rates[token] = max(rate, rates.get(token, 0.0))
        for token, rate in rates.items():
            beside = token != best or node != len(found) or node >= chain
            behind = None if place is None else place.behind.get(token)
            if token >= 0 and (not beside or behind is not None or chance * rate >= LEAST):
                key = beside, -chance * rate, next(order)
                heappush(waiting, (*key, node, token, behind, at.get(token, ())))
        if not waiting or len(found) == most:
            return found
        _, less, _, parent, token, place, here = heappop(waiting)
        chance = -less
        found.append(Node(chance, parent, token))
        node = len(found)
        if token in ends:
            place, here = None, ()
