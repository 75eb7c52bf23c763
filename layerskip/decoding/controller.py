"""The protocol of controllers, which decide when to stop drafting and what to draft from.

A controller serves one generate call. A round starts with `begin`. Then for each row `limit` is
called, then `keep_drafting` after each drafted token below the limit, then `update`. Rows may
interleave, but a round begins for all rows before it ends for any. A drafted token is always
verified: stopping only concerns the next one. Rows draft in lockstep, so that a row that drafts on
makes the others wait; `draft_together` decides about this before every step of the batch. A
confidence is the probability of the drafted token under the softmax of the draft's raw logits at
temperature 1, unless the controller has a `signal` (see `signal_of`). A confidence of NaN stops
drafting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

ControllerName = Literal[
    "fixed",
    "confidence",
    "adaptive-threshold",
    "heuristic",
    "entropy",
    "classifier",
    "target-confidence",
    "expected-gain",
]
CONTROLLERS: tuple[str, ...] = get_args(ControllerName)


class Offer(NamedTuple):
    """The proposals of one source to all rows, as controllers see them.

    Attributes:
        lengths: the most tokens of every row that is not finished; 0 for none.
        matches: `Proposal.match` by row; None if tokens are not known before they are drawn.
        chances: `Proposal.chances` by row, of rows that have any.
    """

    lengths: Mapping[int, int]
    matches: Mapping[int, int] | None
    chances: Mapping[int, Sequence[float]] = MappingProxyType({})


Choice = int | None | Mapping[int, int | None]
"""The source of a round, or by row that of each."""


class Controller:
    """Decides how many tokens each row of a batch drafts in its next round.

    A controller of your own inherits from this class and overrides some methods. This one drafts as
    many tokens as it may in every round.
    """

    needs_confidence: bool = True
    """False: the engine may draft `limit` tokens without reading anything back."""

    def reset(self, rows: int) -> None:
        """Starts a call with `rows` rows and forgets everything learned before."""

    def begin(self, context: int, rows: int) -> None:
        """Told at the start of a round: tokens before it, on average, and the rows of a pass.

        Both change what drafts cost. Rows that are finished may still take part in passes.
        """

    def limit(self, row: int, allowed: int) -> int:
        """The most tokens to draft in the row's round, in 0..allowed; 0 is a plain step."""
        return allowed

    def keep_drafting(self, row: int, confidence: float) -> bool:
        """Whether to draft another token, given the confidence of the one just drafted."""
        return not math.isnan(confidence)

    def draft_together(self, rows: Sequence[int]) -> bool:
        """Whether the batch takes another draft step, for those of its rows that may draft on.

        Asked before every draft step of a round, the first one included, while there are such rows.
        """
        return True

    def update(self, row: int, drafted: int, accepted: int) -> None:
        """Reports the row's round, once, also where drafted is 0."""

    def forget(self, row: int) -> None:
        """Another text takes the row, between two rounds; only where rows join and leave."""


_PARTS = (
    "needs_confidence",
    "reset",
    "begin",
    "limit",
    "keep_drafting",
    "draft_together",
    "update",
    "forget",
)


SIGNALS = ("probability", "margin")


@runtime_checkable
class Chooser(Protocol):
    """Further methods of a controller that chooses among several sources.

    Without them, a round takes the first source that has anything to offer.
    """

    def choose(self, offers: Sequence[Offer]) -> Choice:
        """The number of the source that the batch drafts from next; None: a plain step.

        Or those of each row, of which one at most has tokens that are not known beforehand: all
        rows take its steps together. Called at the start of a round, before `limit`, with the offer
        of each source.
        """

    def learn(self, draft: int, row: int, known: int, right: int) -> None:
        """Reports how good a looked-up draft was, whether it was used or not.

        Called once for every row and lookup that had an offer, before the row's `update`.

        Args:
            known: how many of its first tokens the round has shown to be right or wrong.
            right: how many of those, up to the first wrong one, are the row's own next tokens.
        """


@runtime_checkable
class Observer(Protocol):
    """Further methods of a controller that looks at laws, not only at what is drawn from them.

    Laws are the softmax of raw logits at temperature 1; entropies are in nats.
    """

    def see_draft(self, row: int, confidence: float, entropy: float) -> None:
        """Reports a drafted token and the entropy of the draft's law there.

        Called for every token, before `keep_drafting`, where the controller needs confidences.
        """

    def see_target(self, row: int, probability: float, entropy: float) -> None:
        """Reports the law of the row's last token: the target's largest probability, its entropy.

        Called after the `update` of a round behind which the row goes on, not after the prefill.
        """


@runtime_checkable
class Grower(Protocol):
    """Further methods of a controller that has other tokens verified beside those drafted in steps.

    Attributes:
        branches: whether it does.
    """

    branches: bool

    def rates(self, confidence: float, count: int) -> Sequence[float]:
        """How likely each of the best tokens of a place, so many, is to be right.

        Given that what is before the place is right, and the confidence of the best one.
        """

    def expand(self, rows: Mapping[int, Sequence[float]]) -> int:
        """How many tokens of each row the next draft step takes; for steps of several.

        Args:
            rows: by row, the chances of the likeliest tokens to draft on, up to `growing.WIDEST`.
        """

    def copied(self, draft: int, row: int) -> Sequence[float]:
        """How likely each token that a source knows is to be right if the one before it is."""

    def instead(self, draft: int) -> float:
        """How likely a token that a source knows is right where a chain has a wrong one instead."""

    def widen(self, rows: Mapping[int, tuple[int, Sequence[float]]]) -> int:
        """How many tokens to verify of a row, at most, once the round's last step is done.

        Args:
            rows: by row, how many are verified in any case, and the chances of all, these first,
                then the most likely.
        """

    def see_rank(self, row: int, confidence: float, rank: int | None) -> None:
        """Reports which token was right at a place that steps have drafted, before `update`.

        Args:
            rank: 0 for the best one, 1 for the second-best, ..., None for none of the best ones.
        """

    def see_instead(self, draft: int, right: bool) -> None:
        """Reports whether a token that a source knew was right where the chain's was wrong."""


def first_offer(offers: Sequence[Offer]) -> int | None:
    """The first source with an offer for any row; a lookup needs a match of two tokens."""
    for number, offer in enumerate(offers):
        for row, length in offer.lengths.items():
            if length and (offer.matches is None or offer.matches[row] >= 2):
                return number
    return None


def completed(value: Any) -> Controller:
    """An object with some parts of a `Controller`, completed by its defaults.

    Raises:
        TypeError: it has none of them.
        ValueError: its signal is unknown.
    """
    found: Controller = value
    if not isinstance(value, Controller):
        own = {name: getattr(value, name) for name in _PARTS if hasattr(value, name)}
        if not own:
            raise TypeError(
                f"a controller must have some of {', '.join(_PARTS)}; got a "
                f"{type(value).__name__} without any: inherit from "
                "layerskip.decoding.controllers.Controller, or name one of "
                f"{', '.join(CONTROLLERS)}"
            )
        more = ["signal", "choose", "learn", "see_draft", "see_target"]
        more += [
            "branches",
            "rates",
            "expand",
            "copied",
            "instead",
            "widen",
            "see_rank",
            "see_instead",
        ]
        found = Controller()
        vars(found).update(own | {n: getattr(value, n) for n in more if hasattr(value, n)})
    if signal_of(found) not in SIGNALS:
        raise ValueError(
            f"a controller's signal must be one of {', '.join(SIGNALS)}; "
            f"{type(value).__name__} has {signal_of(found)!r}"
        )
    return found


def signal_of(controller: Controller) -> str:
    """The kind of confidence that a controller gets: its `signal`, by default "probability".

    "margin" is 1 - exp(-m) for the margin m between the two best scores that the token was drawn
    by, noise included if draft and target share it. Under the rejection rule every controller gets
    the probability.
    """
    return getattr(controller, "signal", "probability")
