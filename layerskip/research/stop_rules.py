"""Published rules for when to stop drafting: those of `transformers`, SVIP, DISCO, and a gate.

Rules that use distributions receive them through `Observer`. Each row is independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from layerskip.decoding.controller import Controller


class Heuristic(Controller):
    """The "heuristic" schedule of `transformers`: 2 more after a fully accepted draft, else 1 less.

    Starts at 20 tokens, the library's default `num_assistant_tokens`, and never goes below 1. The
    library has no upper limit; here `max_draft_length`, if given, caps the schedule.
    """

    needs_confidence = False

    def __init__(self, max_draft_length: int | None = None) -> None:
        self._most = math.inf if max_draft_length is None else max_draft_length
        self.reset(1)

    def reset(self, rows: int) -> None:
        self._lengths = [min(20, self._most)] * rows

    def forget(self, row: int) -> None:
        self._lengths[row] = min(20, self._most)

    def limit(self, row: int, allowed: int) -> int:
        return int(min(self._lengths[row], allowed))

    def update(self, row: int, drafted: int, accepted: int) -> None:
        if drafted == 0:  # without a draft there is nothing to learn
            return
        length = self._lengths[row]
        self._lengths[row] = min(
            length + 2 if accepted == drafted else max(1, length - 1), self._most
        )


class _Observer(Controller):
    """Common parts of the other rules: a threshold, and a maximum number of tokens per round."""

    def __init__(self, threshold: float, max_draft_length: int) -> None:
        self.threshold, self.max_draft_length = threshold, max_draft_length
        self.reset(1)

    def reset(self, rows: int) -> None:
        for row in range(rows):
            self.forget(row)

    def limit(self, row: int, allowed: int) -> int:
        return min(self.max_draft_length, allowed)

    def see_draft(self, row: int, confidence: float, entropy: float) -> None:
        """Ignored: some rules use only the target."""

    def see_target(self, row: int, probability: float, entropy: float) -> None:
        """Ignored: some rules use only the draft."""


class Entropy(_Observer):
    """SVIP: stops after a token from a distribution of high entropy.

    Zhang et al. 2024, arXiv 2411.18462: a token is accepted with at least 1 - sqrt(c H), where H is
    the draft's entropy; drafting stops when sqrt(c H) exceeds a threshold. The published code has
    c = .15, threshold .3 and at most 40 tokens. The token's probability is not used.
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


class Classifier(_Observer):
    """DISCO: stops after a token that a learned classifier expects to be rejected.

    Mamou et al. 2024, arXiv 2405.04304: C_i = FFN(Concat(TopK(y_i), Ent(y_i), i)) of the draft's
    distribution y_i at place i, trained on recorded drafts, decides when to stop. Here it is a
    logistic regression on the token's confidence, the entropy, and the place. It learns during
    decoding, from every draft up to its first rejected token.

    Args:
        threshold: the probability of acceptance below which it stops.
    """

    def __init__(self, threshold: float = 0.5, max_draft_length: int = 20) -> None:
        self._learned: dict[int, _Regression] = {}
        self._seen: dict[int, list[tuple[float, ...]]] = {}
        super().__init__(threshold, max_draft_length)

    def forget(self, row: int) -> None:
        # Initially three of four tokens are accepted, whatever their features.
        self._learned[row] = _Regression((1.1, 0.0, 0.0, 0.0), (4.0, 16.0, 1.0, 0.1))
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
        return not seen or self._learned[row].predict(seen[-1]) >= self.threshold

    def update(self, row: int, drafted: int, accepted: int) -> None:
        for place, features in enumerate(self._seen[row][: accepted + 1]):
            self._learned[row].observe(features, place < accepted)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


class _Regression:
    """Logistic regression, learned one outcome at a time.

    Every outcome takes one Newton step with the curvature of all so far (an extended Kalman
    filter), so there is no learning rate to choose.
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


class TargetConfidence(_Observer):
    """Drafts if the target was sure of the last token; otherwise takes a plain step.

    A gate in front of a fixed length (ccs96307's notes on speculative decoding, 22 November 2024):
    after a verification the target decodes on by itself while its largest probability is below a
    threshold. That distribution has been computed anyway.
    """

    needs_confidence = False

    def __init__(self, threshold: float = 0.5, max_draft_length: int = 5) -> None:
        self._sure: dict[int, float] = {}
        super().__init__(threshold, max_draft_length)

    def forget(self, row: int) -> None:
        self._sure[row] = 1.0

    def see_target(self, row: int, probability: float, entropy: float) -> None:
        self._sure[row] = probability

    def limit(self, row: int, allowed: int) -> int:
        return super().limit(row, allowed) if self._sure[row] >= self.threshold else 0
