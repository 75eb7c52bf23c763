"""What rows draft in a round: sources propose tokens, the controller chooses among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from layerskip.decoding.controller import Chooser, Controller, Offer, first_offer
from layerskip.decoding.laws import Law
from layerskip.decoding.sources.base import Proposal
from layerskip.model.branches import along, trunk

_LEAST = 0.02  # the least chance of a token beside a chain


class Plan(NamedTuple):
    """What a row drafts in a round.

    Attributes:
        source: the number of its source, if any.
        limit: the most tokens.
        tokens: up to so many, if they are known without a step.
        parents: what each one follows, where tokens have branches (see `Proposal.parents`).
    """

    source: int | None = None
    limit: int = 0
    tokens: Sequence[int] | None = None
    parents: Sequence[int] | None = None


class Planner:
    """Plans rounds, and tells the controller how good proposals of known tokens were."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._chooser = controller if isinstance(controller, Chooser) else None
        self._proposals: Sequence[Mapping[int, Proposal]] = ()

    def plan(
        self,
        rows: Iterable[int],
        proposals: Sequence[Mapping[int, Proposal]],
        *,
        context: int,
        size: int,
    ) -> dict[int, Plan]:
        """The plan of every row.

        Args:
            proposals: of every source, by row.
            context, size: tokens before the round, on average, and rows of a pass.
        """
        self.controller.begin(context, size)
        self._proposals = proposals
        offers = [_offer(each) for each in proposals]
        chosen = (self._chooser.choose if self._chooser else first_offer)(offers)
        plans = {}
        for row in rows:
            source = chosen.get(row) if isinstance(chosen, Mapping) else chosen
            most = 0 if source is None else offers[source].lengths[row]
            limit = min(self.controller.limit(row, most), most)
            if source is None or not limit:
                plans[row] = Plan(source, limit)
                continue
            found = proposals[source][row]
            if found.parents is not None:
                found = trunk_first(found.some(range(1, limit + 1)))
            tokens = None if found.tokens is None else found.tokens[:limit]
            plans[row] = Plan(source, limit, tokens, found.parents)
        if any(each.limit and each.tokens is None for each in plans.values()):
            # steps feed the other rows' known tokens one after the other, as a chain
            plans = {row: _chained(each) for row, each in plans.items()}
        return plans

    def learn(self, row: int, emitted: Sequence[int]) -> None:
        """Tell a controller that chooses how good known tokens were, drafted or not."""
        for number, proposals in enumerate(self._proposals if self._chooser else ()):
            found = proposals[row]
            if self._chooser and (tokens := found.tokens):
                if found.parents is None:
                    right = in_common(tokens, emitted)
                else:
                    right = len(along(found.parents, tokens, emitted))
                known = min(len(tokens), len(emitted))
                self._chooser.learn(number, row, min(right + 1, known), right)


def _chained(plan: Plan) -> Plan:
    """A plan without branches: the trunk, which comes first."""
    if plan.parents is None or plan.tokens is None:
        return plan
    size = len(trunk(plan.parents))
    return Plan(plan.source, size, plan.tokens[:size])


def _offer(proposals: Mapping[int, Proposal]) -> Offer:
    matches = {row: each.match for row, each in proposals.items() if each.match is not None}
    chances = {row: each.chances for row, each in proposals.items() if each.chances is not None}
    return Offer({row: each.length for row, each in proposals.items()}, matches or None, chances)


def usable(
    proposal: Proposal,
    *,
    law: Law,
    row: int,
    emitted: Sequence[int],
    eos: frozenset[int],
    vocabulary: int,
    branches: bool = False,
) -> Proposal:
    """A proposal, cut off behind an end of text, and where a grammar forbids it.

    Args:
        row: of the law; `emitted` are its tokens so far.
        branches: whether it may have any; else those of its first tokens are left.
    """
    tokens, parents = proposal.tokens, proposal.parents
    if not tokens:
        return proposal
    if parents is not None and not branches:
        chain = proposal.some(trunk(parents))
        return usable(chain, law=law, row=row, emitted=emitted, eos=eos, vocabulary=vocabulary)
    follows = range(len(tokens)) if parents is None else parents
    kept = {0}
    for node, parent in enumerate(follows, 1):
        if parent in kept and not (parent and tokens[parent - 1] in eos):
            kept.add(node)
    if parents is None:
        allowed = law.allowed(row, emitted, tokens[: len(kept) - 1], vocabulary)
        kept &= {*range(allowed + 1)}
    return proposal.some(sorted(kept)[1:])


class Node(NamedTuple):
    """A token that may be verified beside a chain: its chance, what it follows, and itself."""

    chance: float
    parent: int
    token: int


def beside(
    places: Sequence[Sequence[tuple[int, float]]],
    most: int,
    *,
    everywhere: bool = False,
    ends: frozenset[int] = frozenset(),
) -> list[Node]:
    """The most promising tokens beside a chain, best first, numbered on behind it.

    Args:
        places: of the chain, from the root on, the best tokens and the chances of each if what is
            before the place is right; the chain's own comes first.
        everywhere: whether a place's tokens are the same behind any, not only behind the chain's.
        ends: tokens behind which nothing follows.
    """
    found: list[Node] = []
    waiting: list[tuple[float, int, int, int, int]] = []  # -chance, order, parent, token, depth
    order = count()

    def grow(node: int, chance: float, depth: int, some: Sequence[tuple[int, float]]) -> None:
        for token, rate in some:
            if token >= 0 and chance * rate >= _LEAST:
                heappush(waiting, (-chance * rate, next(order), node, token, depth + 1))

    chance = 1.0
    for depth, ((_, rate), *others) in enumerate(places):
        grow(depth, chance, depth, others)
        chance *= rate
    while waiting and len(found) < most:
        less, _, parent, token, depth = heappop(waiting)
        found.append(Node(-less, parent, token))
        if everywhere and depth < len(places) and token not in ends:
            grow(len(places) + len(found), -less, depth, places[depth])
    return found


def trunk_first(proposal: Proposal) -> Proposal:
    """The same tree, its trunk before all else: where that is accepted nothing has to be moved."""
    if proposal.parents is None:
        return proposal
    first = trunk(proposal.parents)
    return proposal.some([*first, *sorted({*range(1, proposal.length + 1)} - {*first})])


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
