"""Controllers, which decide when to stop drafting and what to draft from: the protocol, and rules.

A controller serves one generate call. A round starts with `begin`. Then each row calls `limit`,
then `keep_drafting` after each drafted token below the limit, then `update`. Rows may interleave,
but a round begins for all rows before it ends for any. A drafted token is always verified: stopping
affects only the next one. A confidence is the drafted token's probability (softmax of the draft's
raw logits at temperature 1) unless the controller has a `signal`. NaN as confidence stops drafting.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from layerskip.config.registry import ADAPTIVE, CONTROLLERS, LEARNT, named, names
from layerskip.costs.speculation import Costs

AHEAD = 12  # tokens by which a row may be ahead and still count as one of the slowest


class Offer(NamedTuple):
    """The proposals of one source to all rows, as controllers see them.

    Attributes:
        lengths: maximum number of tokens for every unfinished row; 0 for none.
        matches: `Proposal.match` by row; None if the source drafts in steps.
        chances: `Proposal.chances` by row, for rows that have any.
    """

    lengths: Mapping[int, int]
    matches: Mapping[int, int] | None
    chances: Mapping[int, Sequence[float]] = MappingProxyType({})


Choice = int | None | Mapping[int, int | None]
"""The source of a round, or of each row."""


class Controller:
    """Decides how many tokens each row of a batch drafts in its next round.

    To write a controller, inherit from this class and override some methods. This one drafts as
    many tokens as allowed in every round.
    """

    needs_confidence: bool = True  # if False, the engine may draft `limit` tokens at once
    trees: Any = None  # chooses trees to verify, if set (see `layerskip/research/trees.py`)

    def reset(self, rows: int) -> None:
        """Start a call with `rows` rows, and forget everything learned before."""

    def begin(self, context: int, rows: int) -> None:
        """Start a round of `rows` rows; `context` is the mean number of tokens before it."""

    def limit(self, row: int, allowed: int) -> int:
        """Maximum number of tokens for the row to draft, in 0..allowed; 0 means a plain step."""
        return allowed

    def keep_drafting(self, row: int, confidence: float) -> bool:
        """Whether to draft another token, given the confidence of the one just drafted."""
        return not math.isnan(confidence)

    def draft_together(self, rows: Sequence[int]) -> bool:
        """Whether the batch takes another draft step for those of its rows that may draft on.

        Called before every step of a round: rows draft in lockstep, so all of them wait for it.
        """
        return True

    def update(self, row: int, drafted: int, accepted: int) -> None:
        """Report the result of the row's round, once, even if drafted is 0."""

    def forget(self, row: int) -> None:
        """Forget the row: another text takes its place. Only if rows join and leave."""


SIGNALS = ("probability", "margin")


@runtime_checkable
class Chooser(Protocol):
    """Further methods of a controller that chooses among sources; else the first offer is used."""

    def choose(self, offers: Sequence[Offer]) -> Choice:
        """Return the number of the source from which the batch drafts next; None: a plain step.

        Or return a source for each row. At most one of them may take steps: all rows take them
        together. Called before `limit`, with the offer of each source.
        """

    def learn(self, draft: int, row: int, shown: int, right: int) -> None:
        """Report how good a looked-up draft was, used or not, before the row's `update`.

        Args:
            shown: how many of its first tokens the round has shown to be right or wrong.
            right: how many of these the row has emitted, up to the first wrong one.
        """


def first_offer(offers: Sequence[Offer]) -> int | None:
    """The first source with an offer for any row; a lookup needs a match of two tokens."""
    for number, offer in enumerate(offers):
        for row, length in offer.lengths.items():
            if length and (offer.matches is None or offer.matches[row] >= 2):
                return number
    return None


def completed(value: Any) -> Controller:
    """Complete an object that has some parts of a `Controller` with the defaults.

    Raises:
        TypeError: it has none of the parts.
        ValueError: its signal is unknown.
    """
    if isinstance(value, type):
        raise TypeError(f"a controller must be an object, got a class: write {value.__name__}()")
    controller: Controller = value
    if not isinstance(value, Controller):
        parts = [name for name in vars(Controller) if not name.startswith("_")]
        if not any(hasattr(value, name) for name in parts):
            raise TypeError(
                f"a controller must have some of {', '.join(parts)}; got a "
                f"{type(value).__name__} without any: inherit from "
                "layerskip.decoding.controllers.Controller, or name one of "
                f"{', '.join(CONTROLLERS)}"
            )
        controller = Controller()
        names = (name for name in dir(value) if not name.startswith("_"))
        vars(controller).update({name: getattr(value, name) for name in names})
    if signal_of(controller) not in SIGNALS:
        raise ValueError(
            f"a controller's signal must be one of {', '.join(SIGNALS)}; "
            f"{type(value).__name__} has {signal_of(controller)!r}"
        )
    return controller


def signal_of(controller: Controller) -> str:
    """The kind of confidence that a controller receives: its `signal`, by default "probability".

    "margin" is 1 - exp(-m), where m is the margin between the two best scores of the token's draw,
    including noise if it is shared. Under the rejection rule it is the probability.
    """
    return getattr(controller, "signal", "probability")


class Fixed(Controller):
    """Drafts the same number of tokens in every round."""

    needs_confidence = False

    def __init__(self, max_draft_length: int = 5) -> None:
        self.max_draft_length = max_draft_length

    def limit(self, row: int, allowed: int) -> int:
        return min(self.max_draft_length, allowed)


class Confidence(Fixed):
    """Stops after a token whose confidence is below a threshold.

    Defaults of Kangaroo (Liu et al. 2024, arXiv 2404.18911), 0.6 and at most 6 tokens, because its
    draft is also an early exit of the target. `transformers` uses 0.4 and 20 for a separate small
    model, whose drafts cost less.
    """

    needs_confidence = True

    def __init__(self, threshold: float = 0.6, max_draft_length: int = 6) -> None:
        super().__init__(max_draft_length)
        self.threshold = threshold

    def keep_drafting(self, row: int, confidence: float) -> bool:
        return confidence >= self.threshold


class AdaptiveThreshold(Controller):
    """Draft & Verify's rule: a confidence threshold that steers the acceptance rate to `alpha`.

    Zhang et al. 2024, arXiv 2309.08168, by default with the published code's parameters. After
    every round the mean acceptance rate, initially 0, is updated with decay `beta1`. If it is below
    `alpha`, the threshold's target rises by `epsilon`; otherwise it falls by `epsilon`, unless the
    round drafted as many tokens as allowed. The threshold then moves towards its target with decay
    `beta2`. It starts at 0.8 for greedy decoding and at 0.5 for sampling.
    """

    def __init__(
        self,
        threshold: float = 0.8,
        max_draft_length: int = 8,
        *,
        alpha: float = ADAPTIVE["alpha"],
        epsilon: float = ADAPTIVE["epsilon"],
        beta1: float = ADAPTIVE["beta1"],
        beta2: float = ADAPTIVE["beta2"],
    ) -> None:
        self.initial_threshold = threshold
        self.max_draft_length = max_draft_length
        self.alpha, self.epsilon, self.beta1, self.beta2 = alpha, epsilon, beta1, beta2
        self.reset(1)

    def reset(self, rows: int) -> None:
        self.thresholds = [self.initial_threshold] * rows
        self.acceptance_rates = [0.0] * rows

    def forget(self, row: int) -> None:
        self.thresholds[row], self.acceptance_rates[row] = self.initial_threshold, 0.0

    def limit(self, row: int, allowed: int) -> int:
        return min(self.max_draft_length, allowed)

    def keep_drafting(self, row: int, confidence: float) -> bool:
        return confidence >= self.thresholds[row]

    def update(self, row: int, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        rate = self.beta1 * self.acceptance_rates[row] + (1 - self.beta1) * accepted / drafted
        threshold = aim = self.thresholds[row]
        if rate < self.alpha:
            aim += self.epsilon
        elif drafted < self.max_draft_length:
            aim -= self.epsilon
        self.acceptance_rates[row] = rate
        self.thresholds[row] = self.beta2 * threshold + (1 - self.beta2) * aim


def make_controller(
    name: str,
    *,
    max_draft_length: int | None = None,
    threshold: float | None = None,
    adaptive: Mapping[str, float] | None = None,
    classifier: str | None = None,
    costs: Costs | Sequence[Costs],
    priors: Sequence[float] | None = None,
    sampling: bool = False,
    ahead: float = AHEAD,
    branches: bool = False,
    now: Callable[[], float] | None = None,
    reads_confidence: bool = True,
) -> Controller:
    """Make the controller of that name; None stands for its own default.

    `threshold` is the confidence below which `confidence` stops, and the start value of
    `adaptive-threshold` (whose default depends on `sampling`); `adaptive` holds further settings of
    the latter. For other settings see the classes and `DecodingOptions`. A controller is given
    those that its signature names; `costs` and `priors` are one per source. Raises ValueError for
    an unknown name; warns about a setting without effect.
    """
    # What packages add is asked for last, since that reads files.
    if name not in CONTROLLERS + LEARNT and name not in (known := names("controller")):
        raise ValueError(f"controller must be one of {', '.join(known)}, got {name!r}")
    trees = branches and name == "expected-gain"
    kind = named("controller", "expected-gain-trees" if trees else name)
    takes = signature(kind).parameters
    values: dict[str, Any] = dict(adaptive or {})
    idle = {
        "threshold": threshold is not None and "threshold" not in takes,
        "adaptive": not values.keys() <= takes.keys(),
        "classifier": classifier is not None and "classifier" not in takes,
        "branches": branches and not trees,
    }
    for setting in (each for each, without_effect in idle.items() if without_effect):
        warnings.warn(f"{setting} has no effect on the controller {name!r}", stacklevel=2)
    if name == "adaptive-threshold" and threshold is None:
        threshold = 0.5 if sampling else 0.8
    values |= {"max_draft_length": max_draft_length, "threshold": threshold}
    values["classifier"] = classifier
    values |= {"costs": costs, "priors": priors, "ahead": ahead, "now": now}
    values["reads_confidence"] = reads_confidence or trees
    how = {each: x for each, x in values.items() if each in takes and x is not None}
    made: Controller = kind(**how)
    return made
