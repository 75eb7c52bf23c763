"""The text of a row so far, and the conditions that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

Reason = Literal["stop", "length", "cancelled", "error"]
Stop = Callable[[int, Tensor], bool]
_NOTHING = torch.empty(0)


@dataclass(eq=False)
class Seat:
    """The text of one row, as decoded by `generate()`, servers and replays.

    Attributes:
        prompt_length: number of prompt tokens, without pads.
        limit: maximum number of tokens to emit, at least 1.
        number: its row among those with the same law.
        history: pads, prompt, emitted and drafted tokens of rows with that law, (B, W + slack).
        width: W.
        remembers: whether anything reads the history.
        stop: called after every token with (number, that row's history (1, n)); True ends it.
        reason: why the text has ended; None while it continues.
    """

    emitted: list[int]
    prompt_length: int
    limit: int
    _: KW_ONLY
    key: int = 0
    number: int = 0
    history: Tensor = _NOTHING
    width: int = 0
    remembers: bool = True
    eos: frozenset[int] = frozenset()
    stop: Stop | None = None
    reason: Reason | None = None

    @property
    def finished(self) -> bool:
        return self.reason is not None

    @property
    def left(self) -> int:
        """The number of tokens that the row may still emit."""
        return self.limit - len(self.emitted)

    def remember(self, offset: int, token: int) -> None:
        """Write a token into the history, `offset` places after the emitted ones."""
        if self.remembers:
            self.history[self.number, self.width + len(self.emitted) + offset] = token

    def emit(self, tokens: Sequence[int]) -> list[int]:
        """Emit the tokens drawn by the target up to the end of the text, and return them.

        Raises:
            ValueError: there is no token to draw.
        """
        begin = len(self.emitted)
        for token in tokens:
            if token < 0:
                raise ValueError(
                    f"row {self.number} has no token to draw after {len(self.emitted)} new tokens: "
                    "its scores are NaN or all -inf; check the checkpoint and dtype for NaN "
                    "logits, or the logits processors for forbidding every token"
                )
            self.remember(0, token)
            self.emitted.append(token)
            self.reason = self.end(token)
            if self.reason is not None:
                break
        return self.emitted[begin:]

    def end(self, token: int) -> Reason | None:
        """Why the text ends with the token just emitted; None if it continues."""
        stopped = token in self.eos
        if self.stop is not None:
            # Call it even if the text ends anyway: criteria may count the tokens they have seen.
            number = self.number
            seen = self.history[number : number + 1, : self.width + len(self.emitted)]
            stopped = self.stop(number, seen) or stopped  # (1, W + emitted)
        full = len(self.emitted) >= self.limit
        return "stop" if stopped else "length" if full else None
