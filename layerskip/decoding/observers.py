"""The published stop rules that look at laws: of the draft (SVIP, DISCO), and of the target.

See `Observer` for what they are told. Each knows its row only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from layerskip.decoding.controller import Controller

Features = tuple[float, float, float, float]
"""Of a drafted token: 1, its confidence, the entropy of its law in nats, its place from 0."""


class _Observer(Controller):
    """What the rules have in common: a threshold, and the most tokens of a round."""

    def __init__(self, threshold: float, max_draft_length: int) -> None:
        self.threshold, self.max_draft_length = threshold, max_draft_length
        self.reset(1)

    def reset(self, rows: int) -> None:
        for row in range(rows):
            self.forget(row)

    def limit(self, row: int, allowed: int) -> int:
        return min(self.max_draft_length, allowed)

    def see_draft(self, row: int, confidence: float, entropy: float) -> None:
        """Nothing: some rules look at the target only."""

    def see_target(self, row: int, probability: float, entropy: float) -> None:
        """Nothing: some rules look at the draft only."""


class Entropy(_Observer):
    """SVIP: stops after a token from a law of high entropy.

    Zhang et al. 2024, arXiv 2411.18462: a token is accepted with at least 1 - sqrt(c H), H the
    draft's entropy; drafting stops where sqrt(c H) exceeds a threshold. The published code has
    c = .15, the threshold .3 and at most 40 tokens. It asks for no probability of the token.
    """

    _SCALE = 0.15

    def __init__(self, threshold: float = 0.3, max_draft_length: int = 40) -> None:
        self._entropies: dict[int, float] = {}
        super().__init__(threshold, max_draft_length)

    def forget(self, row: int) -> None:
        self._entropies[row] = 0.0

    def see_draft(self, row: int, confidence: float, entropy: float) -> None:
        self._entropies[row] = entropy

    def keep_drafting(self, row: int, confidence: float) -> bool:
        doubt = math.sqrt(self._SCALE * self._entropies[row])
        return doubt <= self.threshold and not math.isnan(confidence)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


class Regression:
    """Logistic regression, learnt one outcome at a time.

    Every outcome takes one Newton step with the curvature of all so far (an extended Kalman
    filter), so that there is no learning rate to choose.
    """

    def __init__(self, weights: Sequence[float], variances: Sequence[float]) -> None:
        self.weights = list(weights)
        self._covariance = [
            [variance if i == j else 0.0 for j in range(len(variances))]
            for i, variance in enumerate(variances)
        ]

    def predict(self, features: Sequence[float]) -> float:
        """The probability of success."""
        score = _dot(self.weights, features)
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, score))))

    def observe(self, features: Sequence[float], success: bool) -> None:
        chance = self.predict(features)
        spread = [_dot(row, features) for row in self._covariance]
        curvature = chance * (1.0 - chance)
        size = 1.0 + curvature * _dot(spread, features)
        for i, (own, row) in enumerate(zip(spread, self._covariance, strict=True)):
            self.weights[i] += own * (success - chance) / size
            for j, other in enumerate(spread):
                row[j] -= own * other * curvature / size


class Classifier(_Observer):
    """DISCO: stops after a token that a learnt classifier expects to be rejected.

    Mamou et al. 2024, arXiv 2405.04304: C_i = FFN(Concat(TopK(y_i), Ent(y_i), i)) of the draft's
    law y_i at place i, trained on recorded drafts; drafting stops where C_i says so. Here a
    logistic regression on the token's confidence, the entropy, and the place. It learns while
    decoding, from every draft up to its first rejected token, or else has weights of a trace.

    Args:
        threshold: the probability of acceptance below which it stops.
        weights: as of `Features`; with them it does not learn.
    """

    _PRIOR = (1.1, 0.0, 0.0, 0.0)  # three tokens of four are accepted
    _VARIANCES = (4.0, 16.0, 1.0, 0.1)

    def __init__(
        self,
        threshold: float = 0.5,
        max_draft_length: int = 20,
        *,
        weights: Features | None = None,
    ) -> None:
        self._learns = weights is None
        self._first = self._PRIOR if weights is None else weights
        self._learnt: dict[int, Regression] = {}
        self._seen: dict[int, list[Features]] = {}
        super().__init__(threshold, max_draft_length)

    @classmethod
    def regression(cls) -> Regression:
        """One that knows nothing yet, to be shown the tokens of a trace."""
        return Regression(cls._PRIOR, cls._VARIANCES)

    def forget(self, row: int) -> None:
        self._learnt[row] = Regression(self._first, self._VARIANCES)
        self._seen[row] = []

    def limit(self, row: int, allowed: int) -> int:
        self._seen[row] = []
        return super().limit(row, allowed)

    def see_draft(self, row: int, confidence: float, entropy: float) -> None:
        seen = self._seen[row]
        seen.append((1.0, confidence, entropy, float(len(seen))))

    def keep_drafting(self, row: int, confidence: float) -> bool:
        if math.isnan(confidence):
            return False
        seen = self._seen[row]
        return not seen or self._learnt[row].predict(seen[-1]) >= self.threshold

    def update(self, row: int, drafted: int, accepted: int) -> None:
        if self._learns:
            for place, features in enumerate(self._seen[row][: accepted + 1]):
                self._learnt[row].observe(features, place < accepted)


class TargetConfidence(_Observer):
    """Drafts where the target was sure of the last token, and else takes a plain step.

    A gate in front of a fixed length (ccs96307's notes on speculative decoding, 22 November 2024):
    after a verification the target decodes on by itself while its largest probability is below
    one half. The law has been computed anyway.

    Args:
        threshold: the target's largest probability, below which nothing is drafted.
        odds: draft as many tokens as are accepted on average if each is with that probability t,
            t / (1 - t) rounded down, instead of always `max_draft_length`.
    """

    needs_confidence = False

    def __init__(
        self, threshold: float = 0.5, max_draft_length: int = 5, *, odds: bool = False
    ) -> None:
        self._odds = odds
        self._sure: dict[int, float] = {}
        super().__init__(threshold, max_draft_length)

    def forget(self, row: int) -> None:
        self._sure[row] = 1.0

    def see_target(self, row: int, probability: float, entropy: float) -> None:
        self._sure[row] = probability

    def limit(self, row: int, allowed: int) -> int:
        sure, most = self._sure[row], super().limit(row, allowed)
        if not sure >= self.threshold:
            return 0
        return most if not self._odds or sure == 1.0 else min(most, int(sure / (1.0 - sure)))
