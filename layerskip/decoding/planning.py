"""Plans what rows draft in a round: sources propose tokens, and the controller chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from layerskip.decoding.controller import Offer
from layerskip.decoding.sources.base import Proposal
from layerskip.model.branches import trunk


class Plan(NamedTuple):
    """What a row drafts in a round: given tokens, or a maximum number of steps."""

    source: int | None = None
    limit: int = 0
    tokens: Sequence[int] | None = None
    parents: Sequence[int] | None = None


def chained(plan: Plan) -> Plan:
    """Reduce a plan to its trunk, which comes first, without branches."""
    if plan.parents is None or plan.tokens is None:
        return plan
    size = len(trunk(plan.parents))
    return Plan(plan.source, size, plan.tokens[:size])


def offer_of(proposals: Mapping[int, Proposal]) -> Offer:
    """Combine one source's proposals to all rows, as controllers see them."""
    matches = {row: each.match for row, each in proposals.items() if each.match is not None}
    chances = {row: each.chances for row, each in proposals.items() if each.chances is not None}
    return Offer({row: each.length for row, each in proposals.items()}, matches or None, chances)


def usable(
    proposal: Proposal, allowed: Callable[[Sequence[int]], int], *, eos: frozenset[int]
) -> Proposal:
    """Cut proposed tokens at an end of text, and before the first one that a grammar forbids."""
    tokens, parents = proposal.tokens or (), proposal.parents
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
    """Reorder a tree with its trunk first. If the trunk is accepted, no cache entry moves."""
    if proposal.parents is None:
        return proposal
    first = trunk(proposal.parents)
    return proposal.some([*first, *sorted({*range(1, proposal.length + 1)} - {*first})])
