"""The protocol of controllers, which decide when to stop drafting and what to draft from.

A controller serves one generate call. A round starts with `begin`. Then each row calls `limit`,
then `keep_drafting` after each drafted token below the limit, then `update`. Rows may interleave,
but a round begins for all rows before it ends for any. A drafted token is always verified: stopping
affects only the next one. A confidence is the drafted token's probability (softmax of the draft's
raw logits at temperature 1) unless the controller has a `signal`. NaN as confidence stops drafting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from layerskip.config.registry import CONTROLLERS


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
