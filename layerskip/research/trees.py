"""Trees of tokens to verify: the likeliest ones of what draft steps and other sources say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from layerskip.decoding.planning import Plan
from layerskip.decoding.sources.base import Proposal, State
from layerskip.model.branches import along

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


class Joined(NamedTuple):
    """A proposal that joins what a draft says.

    Attributes:
        rates: how likely each of its tokens is to be right if what it follows is.
        instead: P(one of its tokens is right, given that the draft's top token there is wrong).
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
    """P(right) of each token of a proposal with chances, given that what it follows is right."""
    chances, parents = proposal.chances or (), proposal.parents or range(proposal.length)
    before = [1.0, *chances]
    return [chance / before[parent] for chance, parent in zip(chances, parents, strict=False)]


def grown(
    root: Place,
    most: int,
    joined: Sequence[Joined] = (),
    *,
    chain: int = 0,
    ends: frozenset[int] = frozenset(),
) -> list[Node]:
    """The likeliest tokens of a tree, in falling order, each behind its parent.

    Args:
        root: the place behind the row's last token.
        most: how many.
        joined: what others propose.
        chain: so many best tokens, one behind the other, come first, whatever their chances.
        ends: tokens behind which nothing follows.
    """
    nodes: list[Node] = []
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
        for each, start in here:
            for child in each.behind(start):
                token, rate = each.token(child), each.rates[child - 1]
                at.setdefault(token, []).append((each, child))
                if place is not None:
                    rate = (1.0 - place.rates[0]) * each.instead
                if token != best:
                    rates[token] = max(rate, rates.get(token, 0.0))
        for token, rate in rates.items():
            beside = token != best or node != len(nodes) or node >= chain
            behind = None if place is None else place.behind.get(token)
            if token >= 0 and (not beside or behind is not None or chance * rate >= LEAST):
                key = beside, -chance * rate, next(order)
                heappush(waiting, (*key, node, token, behind, at.get(token, ())))
        if not waiting or len(nodes) == most:
            return nodes
        _, less, _, parent, token, place, here = heappop(waiting)
        chance = -less
        nodes.append(Node(chance, parent, token))
        node = len(nodes)
        if token in ends:
            place, here = None, ()


class GrownTrees:
    """The `Trees` of a controller that tells chances of tokens, and how many to verify.

    Args:
        gains: the controller, with the methods of `TreeGain`.
    """

    def __init__(self, gains: Any) -> None:
        self.gains = gains

    def begin(
        self, plans: Mapping[int, Plan], ends: Sequence[frozenset[int]], longest: int, state: State
    ) -> None:
        self.plans, self.ends, self.longest = plans, ends, longest
        self.everywhere = state.everywhere
        self.said: dict[int, Place] = {}  # by row, of the place behind its last token
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
        """The best of what steps said, and of what other sources propose."""
        trees: dict[int, list[Node]] = {}
        for row, chain in chains.items():
            if row in self.said:
                joined = [
                    Joined(
                        each,
                        conditional(each) or self.gains.copied(number, row),
                        self.gains.instead(number),
                    )
                    for number, each in self.plans[row].others
                ]
                trees[row] = grown(
                    self.said[row], self.longest, joined, chain=chain, ends=self.ends[row]
                )
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
        """Tell the controller how good was what steps said, and what others proposed."""
        said, others = self.said.get(row), self.plans[row].others
        for depth, token in enumerate(tokens):
            if said is None:
                return
            rank = said.tokens.index(token) if token in said.tokens else None
            self.gains.see_rank(row, said.confidence, rank)
            for number, each in others if rank != 0 else ():
                proposed, parents = each.tokens or (), each.parents or range(each.length)
                path = along(parents, proposed, tokens[:depth])
                at = path[-1] if path else 0
                here = [one for one, before in zip(proposed, parents, strict=True) if before == at]
                if len(path) == depth and here and said.tokens[0] not in here:
                    self.gains.see_instead(number, token in here)
            if token in self.ends[row]:
                return
            said = said.behind.get(token)
