"""What rows draft in a round: sources propose tokens, the controller chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from layerskip.decoding.controller import Chooser, Controller, Offer, first_offer
from layerskip.decoding.sources.base import Proposal
from layerskip.model.branches import along, trunk


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
    allowed: Callable[[Sequence[int]], int],
    *,
    eos: frozenset[int],
    branches: bool = False,
) -> Proposal:
    """A proposal, cut off behind an end of text, and where a grammar forbids it.

    Args:
        allowed: how many of a chain's tokens grammars allow.
        branches: whether it may have any; else those of its first tokens are left.
    """
    tokens, parents = proposal.tokens, proposal.parents
    if not tokens:
        return proposal
    if parents is not None and not branches:
        return usable(proposal.some(trunk(parents)), allowed, eos=eos)
    if parents is None:
        end = next((i for i, token in enumerate(tokens, 1) if token in eos), len(tokens))
        end = min(end, allowed(tokens[:end]))
        return proposal if end == len(tokens) else proposal.some(range(1, end + 1))
    kept = {0}
    for node, parent in enumerate(parents, 1):
        if parent in kept and not (parent and tokens[parent - 1] in eos):
            kept.add(node)
    return proposal.some(sorted(kept)[1:])


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
