"""A text in its seat: what it is, how far it has come, and the conditions that end it.

Shapes: B rows, W width of the padded prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from layerskip.cache.library_cache import EncoderStates
from layerskip.model.picture_features import Pictures

if TYPE_CHECKING:
    from layerskip.decoding.draws import Draws

Reason = Literal["stop", "length", "cancelled", "error"]
Stop = Callable[[int, Tensor], bool]
_NOTHING = torch.empty(0)


@dataclass(eq=False)
class Seat:
    """The text of one row, as decoded by `generate()`, servers and replays.

    Attributes:
        prompt: its prompt without pads, (length,).
        limit: maximum number of tokens to emit, at least 1.
        emitted: the tokens that it has emitted.
        length: number of its tokens with exact keys and values.
        whole: the first slot from which on window layers hold what belongs to it.
        store_points: numbers of prompt tokens after which it will be stored for later texts.
        row: its row in the batch.
        draws: draws its tokens; None if they are given.
        key: of its noise stream.
        number: its row among those with the same law and pictures.
        history: pads, prompt, emitted and drafted tokens of rows with that law, (B, W + slack).
        width: W.
        remembers: whether anything reads the history.
        encoded: the output of an encoder for it, if it joins a batch of such texts.
        owner: whose text it is, in servers that tell clients apart.
        stop: called after every token with (number, that row's history (1, n)); True ends it.
        reason: why the text has ended; None while it continues.
    """

    prompt: Tensor
    limit: int = 1
    emitted: list[int] = field(default_factory=list)
    _: KW_ONLY
    length: int = 0
    whole: int = 0
    store_points: set[int] = field(default_factory=set)
    row: int = 0
    draws: Draws = None  # type: ignore[assignment]
    key: int = 0
    number: int = 0
    history: Tensor = _NOTHING
    width: int = 0
    remembers: bool = False
    pictures: Pictures | None = None
    encoded: EncoderStates | None = None
    owner: str = ""
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

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def place(self) -> int:
        """The position of the next token, counted without pads."""
        return len(self.prompt) + len(self.emitted)

    def to(self, device: torch.device) -> None:
        """Move its prompt to a device."""
        self.prompt = self.prompt.to(device)
        if self.pictures is not None:
            self.pictures = self.pictures.to(device)

    def alone(self) -> AbstractContextManager[None]:
        """A context for calls of its processors and functions, whose error may end only it."""
        return nullcontext()

    def allowed(self, tokens: Sequence[int], vocabulary: int) -> int:
        """How many of these tokens its grammars allow next."""
        count = 0
        with self.alone():
            count = self.draws.law.allowed(self.number, self.emitted, tokens, vocabulary)
        return count

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
