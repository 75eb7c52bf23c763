"""The protocol of controllers, which decide when to stop drafting and what to draft from.

A controller serves one generate call. A round starts with `begin`. Then for each row `limit` is
called, then `keep_drafting` after each drafted token below the limit, then `update`. Rows may
interleave, but a round begins for all rows before it ends for any. A drafted token is always
verified: stopping only concerns the next one. A confidence is the probability of the drafted token
under the softmax of the draft's raw logits at temperature 1, unless the controller has a `signal`
(see `signal_of`). A confidence of NaN stops drafting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from layerskip.registry import CONTROLLERS


class Offer(NamedTuple):
    """The proposals of one source to all rows, as controllers see them.

    Attributes:
        lengths: the most tokens of every row that is not finished; 0 for none.
        matches: `Proposal.match` by row; None if its tokens take steps.
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

    needs_confidence: bool = True  # else the engine may draft `limit` tokens at once
    trees: Any = None  # what has trees verified, if anything (see `layerskip/research/trees.py`)

    def reset(self, rows: int) -> None:
        """Starts a call with `rows` rows and forgets everything learned before."""

    def begin(self, context: int, rows: int) -> None:
        """Called at the start of a round with the mean number of tokens before it, and of rows."""

    def limit(self, row: int, allowed: int) -> int:
        """The most tokens to draft in the row's round, in 0..allowed; 0 is a plain step."""
        return allowed

    def keep_drafting(self, row: int, confidence: float) -> bool:
        """Whether to draft another token, given the confidence of the one just drafted."""
        return not math.isnan(confidence)

    def draft_together(self, rows: Sequence[int]) -> bool:
        """Whether the batch takes another draft step, for those of its rows that may draft on.

        Asked before every step of a round: rows draft in lockstep, so that all wait for it.
        """
        return True

    def update(self, row: int, drafted: int, accepted: int) -> None:
        """Reports the row's round, once, also where drafted is 0."""

    def forget(self, row: int) -> None:
        """Another text takes the row between two rounds; called only where rows join and leave."""


SIGNALS = ("probability", "margin")


@runtime_checkable
class Chooser(Protocol):
    """Further methods of a controller that chooses among sources; else the first offer is taken."""

    def choose(self, offers: Sequence[Offer]) -> Choice:
        """The number of the source that the batch drafts from next; None: a plain step.

        Or the source of each row, of which one at most takes steps: all rows take them together.
        Called before `limit`, with the offer of each source.
        """

    def learn(self, draft: int, row: int, shown: int, right: int) -> None:
        """Reports how good a looked-up draft was, used or not, before the row's `update`.

        Args:
            shown: how many of its first tokens the round has shown to be right or wrong.
            right: how many of these, up to the first wrong one, the row has emitted.
        """


@runtime_checkable
class Observer(Protocol):
    """Further methods of a controller that reads distributions, not only the drawn tokens.

    They are the softmax of raw logits at temperature 1; entropies are in nats.
    """

    def see_draft(self, row: int, confidence: float, entropy: float) -> None:
        """Reports a drafted token and the entropy of the distribution that it was drawn from.

        Called for every token, before `keep_drafting`, where the controller needs confidences.
        """

    def see_target(self, row: int, probability: float, entropy: float) -> None:
        """Reports the largest probability and the entropy of the target's last distribution.

        Called after the `update` of a round behind which the row goes on, not after the prefill.
        """


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
    """The kind of confidence that a controller gets: its `signal`, by default "probability".

    "margin" is 1 - exp(-m) for the margin m between the two best scores that the token was drawn
    by, noise included if shared. Under the rejection rule every controller gets the probability.
    """
    return getattr(controller, "signal", "probability")
