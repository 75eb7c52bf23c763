"""Costs and acceptance of one source of drafts, as the default controller knows them."""

from __future__ import annotations

from itertools import accumulate, pairwise

from layerskip.costs import speculation
from layerskip.costs.correction import CorrectedCosts
from layerskip.decoding.acceptance import Acceptance, CopyAcceptance
from layerskip.decoding.controller import Offer

_PROBE_INTERVAL = 10.0  # plain steps per target step that a one-token draft adds to a round
_HOPE, _LEAST_GAIN = 0.9, 1.05  # optimistic acceptance, and the speedup that it must give


class SourceGain:
    """One source: its costs, its acceptance so far, and when it is due for a probe.

    Attributes:
        most: maximum number of tokens drafted in a round.
        longest: maximum number of tokens that may pay in a round; 0 if none would at rate 0.9.
        round_costs: the cost of a round, by number of drafted tokens.
        step_costs: the cost of one more token, by number of drafted tokens.
        verify_costs: the part of it that verification costs.
        unused: rounds since the last one that drafted from it.
    """

    def __init__(self, costs: speculation.Costs, most: int, prior: float) -> None:
        self.all_costs, self.most, self.prior = costs, most, prior
        self.corrected = costs if isinstance(costs, CorrectedCosts) else None
        self.costs: speculation.CostTable | None = None

    def begin(self, context: int, rows: int) -> None:
        """Set the costs of a round for `rows` rows and the number of tokens before it."""
        costs = self.all_costs.at(context, rows)
        if costs is self.costs:
            return
        self.costs = costs
        self.round_costs = [costs.round_cost(drafted) for drafted in range(self.most + 1)]
        self.step_costs = [after - before for before, after in pairwise(self.round_costs)]
        passes = [costs.round_cost(drafted, 0) for drafted in range(self.most + 1)]
        self.verify_costs = [after - before for before, after in pairwise(passes)]
        self.step = costs.draft
        length = speculation.optimal_draft_length(_HOPE, costs, self.most)
        hope = speculation.expected_tokens(_HOPE, length) / costs.round_cost(length)
        self.longest = self.most if hope >= _LEAST_GAIN else 0

    def reset(self, others: float) -> None:
        """Forget everything; `others` is the share of a batch that belongs to other rows."""
        self.acceptance, self.copies = Acceptance(self.prior), CopyAcceptance()
        self.first_interval = max(2.0, _PROBE_INTERVAL * (1.0 + others) * self.step_costs[0])
        # A probe is due at once, since only the prior could rule out the first draft.
        self.probe_interval = self.first_interval
        self.unused = self.first_interval

    def first_rate(self) -> tuple[float, float]:
        """Tokens and target steps of a round of the best length, if the prior is right."""
        assert self.costs is not None
        length = speculation.optimal_draft_length(self.prior, self.costs, self.most)
        return speculation.expected_tokens(self.prior, length), self.round_costs[length]

    def passes(self, steps: int) -> int:
        """The number of the source's passes in which as many steps draft."""
        assert self.costs is not None
        return -(-steps // self.costs.per_step)

    def cost(self, steps: int, looked_up: int) -> float:
        """The cost of a round of `steps` steps in which other rows verify `looked_up` tokens."""
        assert self.costs is not None
        return self.costs.round_cost(max(steps, looked_up), steps)

    def expected(self, offer: Offer, row: int, longest: int | None = None) -> list[float]:
        """Expected number of accepted tokens of a row that drafts 0, 1, 2, ... tokens."""
        most = min(offer.lengths[row], self.longest if longest is None else longest)
        if row in offer.chances:
            return [0.0, *accumulate(offer.chances[row][:most])]
        survival, expected = 1.0, [0.0]
        for drafted in range(most):
            if offer.matches is None:
                survival *= self.acceptance.next
            else:
                survival *= self.copies.acceptance(offer.matches[row] + drafted)
            expected.append(expected[-1] + survival)
        return expected

    def used(self, *, probing: bool, paid: bool) -> None:
        """Count a round that drafted from this source: whether it was a probe, whether it paid."""
        self.acceptance.estimate()
        self.unused = 0.0
        if not probing:
            self.probe_interval = self.first_interval
        elif paid:
            self.unused = self.probe_interval  # probe again at once
        else:
            self.probe_interval *= 2
