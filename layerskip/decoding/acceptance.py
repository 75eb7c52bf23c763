"""Estimates how often drafted tokens are accepted, and what a source gains by them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from layerskip.costs import speculation
from layerskip.costs.correction import CorrectedCosts
from layerskip.decoding.controllers import Offer

_BIN_EDGES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.96)
_BIN_CENTRES = (0.05, 0.18, 0.33, 0.48, 0.63, 0.75, 0.85, 0.93, 0.98)
BINS = len(_BIN_CENTRES)

# The prior and its weight in tokens. Drafts agree with their target more often than a low
# confidence suggests (the target may choose the same token for the same weak reasons), and less
# often than a high one suggests. The constants were tuned on simulated texts (see the tests) and on
# development prompts of the shipped models, where none of them matters much.
PRIOR = 0.75
PRIOR_ROUNDED = 0.93  # for the whole model in 8 bits: 0.93 to 0.98 on real checkpoints
PRIOR_MODULE = 0.35  # for a trained module: 0.19 to 0.33 after an hour of training on two cores
_PRIOR_WEIGHT = 12.0
_PRIOR_BY_BIN = tuple(0.3 + 0.65 * centre for centre in _BIN_CENTRES)
_BIN_WEIGHT = 10.0
_EVIDENCE_START = 1.0  # log odds
_EVIDENCE_LIMIT = 6.0

# For looked-up tokens: upper bin edges of the number of tokens in common, priors and their weight.
_COPY_EDGES = (2, 3, 4, 7, 10, 15, 25)
_COPY_PRIOR = (0.25, 0.4, 0.55, 0.6, 0.65, 0.8, 0.9, 0.97)
_COPY_WEIGHT = 6.0
_COPY_DECAY = 0.95  # per observed token

_PROBE_INTERVAL = 10.0  # plain steps per target step that a one-token draft adds to a round
_HOPE, _LEAST_GAIN = 0.9, 1.05  # optimistic acceptance, and the speedup that it must give


def bin_of(confidence: float) -> int:
    """The bin in which `Acceptance` counts a token with this confidence."""
    return bisect_right(_BIN_EDGES, confidence)


class Acceptance:
    """Beta-binomial estimates of the acceptance of drafted tokens, shared by the rows of a call.

    `given_confidence[bin]` is for a token with known confidence. Its prior is a mixture of two
    models of the draft, weighted by how well each has predicted so far: either confidences are
    informative (the prior line, with its odds scaled so that its level matches the observations),
    or they are not (the same probability for all). `next` is for a token not drafted yet: the
    overall mean, since on real texts the tokens before it, its place in the draft and the last
    round's outcome predicted nothing more. Callers observe tokens up to the first rejection only.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._bin_seen = [0.0] * BINS
        self._bin_accepted = [0.0] * BINS
        self._seen = self._accepted = 0.0  # all tokens
        self._rated = self._rated_accepted = self._rated_expected = 0.0  # tokens with a confidence
        self._evidence = _EVIDENCE_START  # log odds that confidences are informative
        self.estimate()

    def estimate(self) -> None:
        """Update `given_confidence` and `next`."""
        weight, prior = _PRIOR_WEIGHT, self._prior
        lost = self._rated - self._rated_accepted + weight * (1.0 - prior)
        # The line belongs to a draft with the usual acceptance.
        expected_lost = self._rated - self._rated_expected + weight * (1.0 - PRIOR)
        won = self._rated_accepted + weight * prior
        expected_won = self._rated_expected + weight * PRIOR
        shift = (won / lost) / (expected_won / expected_lost)
        self._level = won / (self._rated + weight)
        self._line = [p * shift / (1.0 - p + p * shift) for p in _PRIOR_BY_BIN]
        trust = 1.0 / (1.0 + math.exp(-self._evidence))
        self.given_confidence = [
            (accepted + _BIN_WEIGHT * (trust * line + (1.0 - trust) * self._level))
            / (seen + _BIN_WEIGHT)
            for accepted, seen, line in zip(
                self._bin_accepted, self._bin_seen, self._line, strict=True
            )
        ]
        self.next = (self._accepted + weight * prior) / (self._seen + weight)

    def observe(self, confidence_bin: int | None, accepted: bool) -> None:
        """Count one verified token. It takes effect at the next `estimate`."""
        self._seen += 1
        self._accepted += accepted
        if confidence_bin is None:
            return
        line, level = self._line[confidence_bin], self._level
        ratio = line / level if accepted else (1.0 - line) / (1.0 - level)
        evidence = self._evidence + math.log(ratio)
        self._evidence = max(-_EVIDENCE_LIMIT, min(_EVIDENCE_LIMIT, evidence))
        self._bin_seen[confidence_bin] += 1
        self._bin_accepted[confidence_bin] += accepted
        self._rated += 1
        self._rated_accepted += accepted
        self._rated_expected += _PRIOR_BY_BIN[confidence_bin]


class CopyAcceptance:
    """Estimates of the acceptance of looked-up tokens, shared by the rows of a call.

    They depend on the number of tokens that the history and the looked-up text have in common
    before a token: the match plus the draft so far. Old counts decay, as copying habits change.

    Args:
        prior: by the bin of that number, which begin at 0, 2, 3, 4, 7, 10, 15 and 25.
    """

    def __init__(self, prior: Sequence[float] = _COPY_PRIOR) -> None:
        self._prior = prior
        self._won = [_COPY_WEIGHT * each for each in prior]
        self._seen = [_COPY_WEIGHT for _ in prior]

    def acceptance(self, common: int) -> float:
        """The acceptance of a token after `common` common ones, given that those are accepted."""
        number = bisect_right(_COPY_EDGES, common)
        return self._won[number] / self._seen[number]

    def observe(self, common: int, accepted: bool) -> None:
        number = bisect_right(_COPY_EDGES, common)
        rest = _COPY_WEIGHT * (1.0 - _COPY_DECAY)  # keeps the weight of the prior constant
        self._won[number] = _COPY_DECAY * self._won[number] + rest * self._prior[number] + accepted
        self._seen[number] = _COPY_DECAY * self._seen[number] + rest + 1.0


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
