"""Effects of the text so far on its next token: stop strings, and penalties for repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.texts.tokens import decode_text


class Penalties:
    """Lowers the scores of tokens that the text, without its prompt, already has."""

    layerskip_pure = True

    def __init__(self, width: int, frequency: float, presence: float) -> None:
        self._width, self._frequency, self._presence = width, frequency, presence

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """Adjust scores (B, V) that follow the tokens so far (B, n)."""
        new = history[:, self._width :]  # (B, n - prompt)
        times = torch.zeros_like(scores).scatter_add_(
            1, new, torch.ones_like(new, dtype=scores.dtype)
        )
        return scores - self._frequency * times - self._presence * (times > 0)


class StopStrings:
    """Whether the last token of a text completes one of some strings."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], width: int) -> None:
        self._tokenizer, self._strings, self._width = tokenizer, strings, width
        # A token has at least one byte, except special ones: allow a few of those.
        self._most = max(len(each.encode()) for each in strings) + 8

    def __call__(self, row: int, history: Tensor) -> bool:
        """Called after each token with all tokens so far, (1, n)."""
        begin = max(self._width, history.shape[1] - self._most)
        text = decode_text(self._tokenizer, history[0, begin:].tolist())
        return any(each in text for each in self._strings)
