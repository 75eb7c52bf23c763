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
        others: where it is to take steps, the number of each other source that knows tokens, and
            these.
    """

    source: int | None = None
    limit: int = 0
    tokens: Sequence[int] | None = None
    parents: Sequence[int] | None = None
    others: Sequence[tuple[int, Proposal]] = ()


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
            if found.tokens is None:
                others = [(i, each[row]) for i, each in enumerate(proposals) if each[row].tokens]
                plans[row] = Plan(source, limit, others=others)
            else:
                plans[row] = Plan(source, limit, found.tokens[:limit], found.parents)
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


class Joined(NamedTuple):
    """A proposal that joins a chain.

    Attributes:
        rates: how likely each of its tokens is to be right where what it follows is.
        instead: that likely is one where the chain's token is another one, and wrong.
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


def beside(
    places: Sequence[Sequence[tuple[int, float]]],
    most: int,
    joined: Sequence[Joined] = (),
    *,
    everywhere: bool = False,
    ends: frozenset[int] = frozenset(),
) -> list[Node]:
    """The most promising tokens beside a chain and behind it, best first, numbered on behind it.

    Args:
        places: of the chain, from the root on, the best tokens and the chances of each if what is
            before the place is right; the chain's own comes first.
        joined: what others propose.
        everywhere: whether a place's tokens are the same behind any, not only behind the chain's.
        ends: tokens behind which nothing follows.
    """
    found: list[Node] = []
    waiting: list[tuple[float, int, int, int, int]] = []  # -chance, order, parent, token, depth
    order = count()
    # by what they follow and themselves, where tokens are in the joined proposals
    stand: dict[tuple[int, int], list[tuple[Joined, int]]] = {}

    def grow(
        node: int, chance: float, depth: int, here: Sequence[tuple[Joined, int]], own: bool
    ) -> list[tuple[Joined, int]]:
        """Let what may follow a node wait; for those of the chain, where it goes on in the joined.

        Args:
            here: where the node is in the joined.
            own: whether the place's own tokens may follow.
        """
        (next_one, sure), *others = places[depth] if own else [(-1, 0.0)]
        rates = dict(others)
        on_chain = own and node == depth
        if own and not on_chain:
            rates[next_one] = sure
        for each, at in here:
            for child in each.behind(at):
                token, rate = each.token(child), each.rates[child - 1]
                stand.setdefault((node, token), []).append((each, child))
                if on_chain:
                    rate = (1.0 - sure) * each.instead
                if not on_chain or token != next_one:
                    rates[token] = max(rate, rates.get(token, 0.0))
        for token, rate in rates.items():
            if token >= 0 and chance * rate >= _LEAST:
                heappush(waiting, (-chance * rate, next(order), node, token, depth + 1))
        return stand.get((node, next_one), [])

    chance, here = 1.0, [(each, 0) for each in joined]
    for depth, ((_, rate), *_) in enumerate(places):
        here = grow(depth, chance, depth, here, own=True)
        chance *= rate
    grow(len(places), chance, len(places), here, own=False)
    while waiting and len(found) < most:
        less, _, parent, token, depth = heappop(waiting)
        found.append(Node(-less, parent, token))
        if token not in ends:
            own = everywhere and depth < len(places)
            here = stand.get((parent, token), [])
            grow(len(places) + len(found), -less, depth, here, own)
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
