"""Published rules for when to stop drafting, and a factory for every controller by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from layerskip.config.registry import ADAPTIVE, CONTROLLERS, LEARNT, named, names
from layerskip.costs.speculation import Costs
from layerskip.decoding.controller import Controller
from layerskip.decoding.expected_gain import AHEAD

__all__ = ["Controller", "make_controller"]


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
    how = {each: x for each, x in values.items() if each in takes and x is not None}
    made: Controller = kind(**how)
    return made
