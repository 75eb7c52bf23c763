"""What a round verifies: the most promising tokens of what a draft says, and of what is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from itertools import count
from typing import Any, NamedTuple, Protocol

from layerskip.decoding.planning import Plan
from layerskip.decoding.sources.base import Proposal
from layerskip.decoding.speculator import Turn
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


class Grower(Protocol):
    """Methods of a controller that has other tokens verified beside those drafted in steps.

    Attributes:
        branches: whether it does.
    """

    branches: bool

    def rates(self, confidence: float, count: int) -> Sequence[float]:
        """How likely each of the best tokens of a place, so many, is to be right.

        Given that what is before the place is right, and the confidence of the best one.
        """

    def expand(self, rows: Mapping[int, Sequence[float]]) -> int:
        """How many tokens of each row the next draft step takes; for steps of several.

        Args:
            rows: by row, the chances of the likeliest tokens to draft on, up to `WIDEST`.
        """

    def copied(self, draft: int, row: int) -> Sequence[float]:
        """How likely each token that a source knows is to be right if the one before it is."""

    def instead(self, draft: int) -> float:
        """How likely a token that a source knows is right where a chain has a wrong one instead."""

    def widen(self, rows: Mapping[int, tuple[int, Sequence[float]]]) -> int:
        """How many tokens to verify of a row, at most, once the round's last step is done.

        Args:
            rows: by row, how many are verified in any case, and the chances of all, these first,
                then the most likely.
        """

    def see_rank(self, row: int, confidence: float, rank: int | None) -> None:
        """Reports which token was right at a place that steps have drafted, before `update`.

        Args:
            rank: 0 for the best one, 1 for the second-best, ..., None for none of the best ones.
        """

    def see_instead(self, draft: int, right: bool) -> None:
        """Reports whether a token that a source knew was right where the chain's was wrong."""


class GrownTrees:
    """The `Trees` of a controller that is a `Grower`."""

    def __init__(self, grower: Grower) -> None:
        self.grower = grower
        self._plans: Mapping[int, Plan] = {}  # of the round in progress
        self.said: dict[int, Place] = {}  # by row, of the place behind its last token
        self._ends: dict[int, Place] = {}  # by row, what was said last along its chain

    def _begin(self, turn: Turn) -> None:
        if turn.plans is not self._plans:
            self._plans, self.said, self._ends = turn.plans, {}, {}

    def spread(self, turn: Turn) -> bool:
        """Draft trees: every step takes the likeliest tokens that have not been drafted on."""
        self._begin(turn)
        limits = {row: turn.plans[row].limit for row in turn.rows}
        spread = Spread(self.grower, limits, turn.eos, turn.longest + 1)
        controller: Any = self.grower
        going = controller.draft_together(turn.rows)
        while going:
            said = turn.step(spread.front)
            asked = [(row, i) for row, own in spread.front.items() for i in range(len(own))]
            for (row, i), tokens, sure in zip(asked, said.tokens, said.confidences, strict=True):
                spread.hear(row, i, tokens, sure)
            going = spread.go_on()
        self.said = spread.said
        return True

    def see(self, turn: Turn, row: int, tokens: Sequence[int], confidence: float) -> None:
        self._begin(turn)
        said = Place(confidence, tokens, self.grower.rates(confidence, len(tokens)))
        if row in self._ends:
            self._ends[row].precede(said, everywhere=turn.state.everywhere)
        else:
            self.said[row] = said
        self._ends[row] = said

    def choose(
        self, turn: Turn, chains: Mapping[int, int]
    ) -> Mapping[int, tuple[Sequence[int], Sequence[int]]]:
        """The best of what steps said, and of what other sources propose."""
        self._begin(turn)
        trees: dict[int, list[Node]] = {}
        for row, chain in chains.items():
            if row in self.said:
                joined = [
                    Joined(
                        each,
                        conditional(each) or self.grower.copied(number, row),
                        self.grower.instead(number),
                    )
                    for number, each in turn.plans[row].others
                ]
                trees[row] = grown(
                    self.said[row], turn.longest, joined, chain=chain, ends=turn.eos[row]
                )
        if not trees:
            return {}
        width = self.grower.widen(
            {row: (chains[row], [node.chance for node in nodes]) for row, nodes in trees.items()}
        )
        tops = {row: nodes[: max(width, chains[row])] for row, nodes in trees.items()}
        return {
            row: ([node.token for node in nodes], [node.parent for node in nodes])
            for row, nodes in tops.items()
        }

    def learn(self, row: int, tokens: Sequence[int], eos: frozenset[int]) -> None:
        """Tell the grower how good was what steps said, and what others proposed."""
        said, others = self.said.get(row), self._plans[row].others
        for depth, token in enumerate(tokens):
            if said is None:
                return
            rank = said.tokens.index(token) if token in said.tokens else None
            self.grower.see_rank(row, said.confidence, rank)
            for number, each in others if rank != 0 else ():
                proposed, parents = each.tokens or (), each.parents or range(each.length)
                path = along(parents, proposed, tokens[:depth])
                at = path[-1] if path else 0
                here = [one for one, before in zip(proposed, parents, strict=True) if before == at]
                if len(path) == depth and here and said.tokens[0] not in here:
                    self.grower.see_instead(number, token in here)
            if token in eos:
                return
            said = said.behind.get(token)
