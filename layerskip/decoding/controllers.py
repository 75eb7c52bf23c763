"""Knows when to stop drafting; refuses to know models, tokens and clocks.

A controller serves one generate call. Each row of the batch is named by its index and its rounds
run `limit`, then `keep_drafting` after a drafted token while fewer than the limit are drafted, then
`update`. Rows may interleave, but a round begins for all of them before it ends for any. A drafted
token is always verified: a stop decides about the next one only. Rows draft in lockstep, so that
one that drafts on lets all others wait: `draft_together` weighs this before every step of the
batch. Confidence is the probability of the drafted token under the softmax of the draft's raw
logits at temperature 1, unless the controller has a `signal` (see `signal_of`); a confidence that
is not a number stops drafting.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from layerskip.costs.speculation import CostTable
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.lookup import Offer


@runtime_checkable
class Controller(Protocol):
    """Decides how many tokens each row of a batch drafts in its next round.

    A class that inherits from this one lets a batch draft on for as long as any row does.
    """

    needs_confidence: bool
    """False: the engine may draft `limit` tokens without reading anything back."""

    def reset(self, rows: int) -> None:
        """Starts a call with `rows` rows and forgets everything learned before."""

    def limit(self, row: int, allowed: int) -> int:
        """The most tokens to draft in the row's round, in 0..allowed; 0 is a plain step."""

    def keep_drafting(self, row: int, confidence: float) -> bool:
        """Whether to draft another token, given the confidence of the one just drafted."""

    def draft_together(self, rows: Sequence[int]) -> bool:
        """Whether the batch takes another draft step, for those of its rows that may draft on.

        Asked before every draft step of a round, the first one included, while there are such rows.
        """
        return True

    def update(self, row: int, drafted: int, accepted: int) -> None:
        """Reports the row's round, once, also where drafted is 0."""


SIGNALS = ("probability", "margin")


@runtime_checkable
class Chooser(Protocol):
    """What a controller has, too, that chooses among several drafts.

    For one without, a round takes the first that has anything to offer.
    """

    def choose(self, offers: Sequence[Offer]) -> int | None:
        """Which draft the batch takes in its next round; None: a plain step.

        Asked at the start of a round, before `limit`, with what each of the drafts offers.
        """

    def learn(self, draft: int, row: int, known: int, right: int) -> None:
        """Tells how good a looked-up draft was that a row was offered, taken or not.

        Told once for every row and lookup that had an offer, before the row's `update`.

        Args:
            known: how many of its tokens the round has shown to be right or wrong, from the first.
            right: how many of those are what the row goes on with, up to the first that is not.
        """


def first_offer(offers: Sequence[Offer]) -> int | None:
    """The first draft that has something to offer to any row; a lookup, a match of two tokens."""
    for number, offer in enumerate(offers):
        for row, length in offer.lengths.items():
            if length and (offer.matches is None or offer.matches[row] >= 2):
                return number
    return None


def require_controller(value: Any) -> None:
    """Raise TypeError where an object is no `Controller`, naming what it lacks.

    And ValueError where its signal is unknown.
    """
    if not isinstance(value, Controller):
        names = ("needs_confidence", "reset", "limit", "keep_drafting", "draft_together", "update")
        lacking = ", ".join(name for name in names if not hasattr(value, name))
        raise TypeError(
            f"a controller must have {', '.join(names)}; {type(value).__name__} lacks {lacking}: "
            "inherit from layerskip.decoding.controllers.Controller, which has a draft_together"
        )
    if signal_of(value) not in SIGNALS:
        raise ValueError(
            f"a controller's signal must be one of {', '.join(SIGNALS)}; "
            f"{type(value).__name__} has {signal_of(value)!r}"
        )


def signal_of(controller: Controller) -> str:
    """What a controller's confidences are of: its `signal`, by default "probability".

    "margin": of 1 - exp(-m), m the margin between the two best scores that the token was drawn by,
    noise included where draft and target share it. Under the rejection rule it, too, is told the
    probability.
    """
    return getattr(controller, "signal", "probability")


class Fixed(Controller):
    """Drafts the same number of tokens in every round."""

    needs_confidence = False

    def __init__(self, max_draft_length: int = 5) -> None:
        self.max_draft_length = max_draft_length

    def reset(self, rows: int) -> None:
        pass

    def limit(self, row: int, allowed: int) -> int:
        return min(self.max_draft_length, allowed)

    def keep_drafting(self, row: int, confidence: float) -> bool:
        return not math.isnan(confidence)

    def update(self, row: int, drafted: int, accepted: int) -> None:
        pass


class Confidence(Fixed):
    """Stops after a token whose confidence is below a threshold.

    Defaults of Kangaroo (Liu et al. 2024, arXiv 2404.18911), .6 and at most 6 tokens, because its
    draft, too, is an early exit of the target. `transformers` has .4 and 20 for a separate small
    model, whose drafts cost less.
    """

    needs_confidence = True

    def __init__(self, threshold: float = 0.6, max_draft_length: int = 6) -> None:
        super().__init__(max_draft_length)
        self.threshold = threshold

    def keep_drafting(self, row: int, confidence: float) -> bool:
        return confidence >= self.threshold


class AdaptiveThreshold(Controller):
    """Draft & Verify's rule: a confidence threshold that steers the acceptance rate to .9.

    Zhang et al. 2024, arXiv 2309.08168, with the published code's parameters [1, .5, .9, .01, .9]:
    after every round the acceptance rate is averaged by halves, from 0; below .9 the threshold aims
    .01 higher, otherwise .01 lower unless the round drafted as many tokens as it may; the threshold
    goes a tenth of the way. It starts at .8 for greedy decoding and at .5 for sampling.
    """

    needs_confidence = True

    def __init__(self, threshold: float = 0.8, max_draft_length: int = 8) -> None:
        self.initial_threshold = threshold
        self.max_draft_length = max_draft_length
        self.reset(1)

    def reset(self, rows: int) -> None:
        self.thresholds = [self.initial_threshold] * rows
        self.acceptance_rates = [0.0] * rows

    def limit(self, row: int, allowed: int) -> int:
        return min(self.max_draft_length, allowed)

    def keep_drafting(self, row: int, confidence: float) -> bool:
        return confidence >= self.thresholds[row]

    def update(self, row: int, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        rate = 0.5 * self.acceptance_rates[row] + 0.5 * accepted / drafted
        threshold = aim = self.thresholds[row]
        if rate < 0.9:
            aim += 0.01
        elif drafted < self.max_draft_length:
            aim -= 0.01
        self.acceptance_rates[row] = rate
        self.thresholds[row] = 0.9 * threshold + 0.1 * aim


class Heuristic(Controller):
    """The "heuristic" schedule of `transformers`: 2 more after a fully accepted draft, else 1 less.

    Starts at 20 tokens, the library's default `num_assistant_tokens`, and never goes below 1. The
    library knows no upper end; here `max_draft_length`, where given, caps the schedule itself.
    """

    needs_confidence = False

    def __init__(self, max_draft_length: int | None = None) -> None:
        self.max_draft_length = max_draft_length
        self.reset(1)

    def reset(self, rows: int) -> None:
        self.lengths = [self._capped(20)] * rows

    def limit(self, row: int, allowed: int) -> int:
        return min(self.lengths[row], allowed)

    def keep_drafting(self, row: int, confidence: float) -> bool:
        return not math.isnan(confidence)

    def update(self, row: int, drafted: int, accepted: int) -> None:
        if drafted == 0:  # nothing was drafted, so nothing was learned about drafting
            return
        length = self.lengths[row]
        self.lengths[row] = self._capped(length + 2 if accepted == drafted else max(1, length - 1))

    def _capped(self, length: int) -> int:
        return length if self.max_draft_length is None else min(length, self.max_draft_length)


CONTROLLERS = ("fixed", "confidence", "adaptive-threshold", "heuristic", "expected-gain")


def make_controller(
    name: str,
    *,
    max_draft_length: int | None = None,
    threshold: float | None = None,
    costs: CostTable | Sequence[CostTable],
    priors: Sequence[float] | None = None,
    sampling: bool = False,
) -> Controller:
    """The controller of that name, one of `CONTROLLERS`; settings left None take its own defaults.

    `threshold` is the confidence below which `confidence` stops, and where `adaptive-threshold`
    starts (whose default depends on `sampling`). Only `expected-gain` reads `costs` and `priors`
    (see `acceptance.prior_acceptance`), those of each draft. Raises ValueError for an unknown name
    and for settings out of range; warns where one has no effect.
    """
    if name not in CONTROLLERS:
        raise ValueError(f"controller must be one of {', '.join(CONTROLLERS)}, got {name!r}")
    if max_draft_length is not None and max_draft_length < 1:
        raise ValueError(
            f"max_draft_length must be at least 1, got {max_draft_length}; "
            "to decode without drafts, turn drafting off"
        )
    if threshold is not None and not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold must be in [0, 1], got {threshold}")
    if threshold is not None and name not in ("confidence", "adaptive-threshold"):
        warnings.warn(f"threshold has no effect on the controller {name!r}", stacklevel=2)
    length = {} if max_draft_length is None else {"max_draft_length": max_draft_length}
    match name:
        case "fixed":
            return Fixed(**length)
        case "confidence":
            return Confidence(**length) if threshold is None else Confidence(threshold, **length)
        case "adaptive-threshold":
            start = threshold if threshold is not None else 0.5 if sampling else 0.8
            return AdaptiveThreshold(start, **length)
        case "heuristic":
            return Heuristic(**length)
        case _:
            return ExpectedGain(costs, priors=priors, **length)
