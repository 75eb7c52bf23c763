"""What a round verifies: the most promising tokens of what a draft says, and of what is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from itertools import count
from typing import NamedTuple

from layerskip.decoding.controller import Grower
from layerskip.decoding.sources.base import Proposal
from layerskip.model.branches import ROOT, along

LEAST = 0.01
"""The least chance of a token, but of those that are drafted on."""

WIDEST = 8
"""The most tokens of a row that a draft step takes."""


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
        """Let another place be behind the best token; everywhere: behind each."""
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


class Fed(NamedTuple):
    """A token that a draft step takes.

    Attributes:
        less: its chance, less than 0, so that the likeliest come first.
        parent: the number of what it follows among all that the row was fed, fillers included.
        path: the drafted tokens up to it; () for the row's last token.
        onto: what was said of its place.
    """

    less: float
    order: int
    parent: int
    path: tuple[int, ...]
    onto: Place | None


class Spread:
    """Trees that draft steps grow: each takes the likeliest tokens that none has taken.

    Args:
        limits: of each row, how many tokens it may draft one behind the other.
        ends: of each row, tokens behind which nothing is drafted.
        most: how many tokens of a row steps take, its last one included.

    Attributes:
        front: by row, what the next step takes; rows with fewer tokens than `size` are filled up.
        fed: how many tokens of each row steps have taken, fillers included.
        steps, wide: how many steps there were, and the tokens of a row they took beyond one each.
        said: by row, the place behind its last token, once it is known.
    """

    def __init__(
        self,
        grower: Grower,
        limits: Mapping[int, int],
        ends: Sequence[frozenset[int]],
        most: int,
    ) -> None:
        self.grower, self.limits, self.ends, self.most = grower, limits, ends, most
        self.front = {row: [Fed(-1.0, 0, ROOT, (), None)] for row in limits}
        self.fed = self.steps = self.wide = 0
        self.said: dict[int, Place] = {}
        self._waiting: dict[int, list[Fed]] = {row: [] for row in limits}
        self._order = count()

    @property
    def size(self) -> int:
        """How many tokens of a row the next step takes, at most."""
        return max(map(len, self.front.values()))

    def hear(self, row: int, number: int, best: Sequence[int], confidence: float) -> bool:
        """What is said behind one of the front: the best tokens, in order; whether it counts.

        Args:
            number: of the one, among its row's.
        """
        if best[0] < 0 or math.isnan(confidence):
            return False
        each = self.front[row][number]
        said = Place(confidence, best, self.grower.rates(confidence, len(best)))
        if each.onto is None:
            self.said[row] = said
        else:
            each.onto.behind[each.path[-1]] = said
        for after, rate in zip(said.tokens, said.rates, strict=True):
            path = (*each.path, after)
            if after >= 0 and after not in self.ends[row] and len(path) < self.limits[row]:
                less, node = each.less * rate, self.fed + number
                heappush(self._waiting[row], Fed(less, next(self._order), node, path, said))
        return True

    def go_on(self) -> bool:
        """Choose what another step takes; whether there is one."""
        self.steps += 1
        self.fed += self.size
        left = self.most - self.fed
        likely = {
            row: [-each.less for each in nsmallest(WIDEST, own)]
            for row, own in self._waiting.items()
        }
        size = min(self.grower.expand(likely), left)
        self.front = {
            row: [heappop(own) for _ in range(min(size, len(own)))]
            for row, own in self._waiting.items()
        }
        self.wide += max(0, self.size - 1)
        return self.size > 0


Others = Sequence[tuple[int, Proposal]]
"""The numbers of other sources that know tokens, and these."""


def chosen(
    grower: Grower,
    said: Mapping[int, Place],
    others: Mapping[int, Others],
    chains: Mapping[int, int],
    ends: Sequence[frozenset[int]],
    most: int,
) -> dict[int, list[Node]]:
    """What to verify of rows: the best of what steps said, and of what other sources know.

    Args:
        chains: of each row, how many of the best tokens are verified in any case.
        ends: of each row, tokens behind which nothing follows.
        most: how many tokens of a row.
    """
    trees: dict[int, list[Node]] = {}
    for row, chain in chains.items():
        if row in said:
            joined = [
                Joined(
                    each, conditional(each) or grower.copied(number, row), grower.instead(number)
                )
                for number, each in others[row]
            ]
            trees[row] = grown(said[row], most, joined, chain=chain, ends=ends[row])
    if not trees:
        return {}
    width = grower.widen(
        {row: (chains[row], [node.chance for node in nodes]) for row, nodes in trees.items()}
    )
    return {row: nodes[: max(width, chains[row])] for row, nodes in trees.items()}


def learn(
    grower: Grower,
    row: int,
    said: Place | None,
    others: Others,
    tokens: Sequence[int],
    ends: frozenset[int],
) -> None:
    """Tell a grower how good was what a draft said, and what others knew, along a row's new tokens.

    Args:
        said: of the place behind the row's last token.
        ends: tokens behind which nothing is known.
    """
    for depth, token in enumerate(tokens):
        if said is None:
            return
        rank = said.tokens.index(token) if token in said.tokens else None
        grower.see_rank(row, said.confidence, rank)
        for number, each in others if rank != 0 else ():
            known, parents = each.tokens or (), each.parents or range(each.length)
            path = along(parents, known, tokens[:depth])
            at = path[-1] if path else 0
            here = [one for one, own in zip(known, parents, strict=True) if own == at]
            if len(path) == depth and here and said.tokens[0] not in here:
                grower.see_instead(number, token in here)
        if token in ends:
            return
        said = said.behind.get(token)
