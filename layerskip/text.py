"""From tokens to text: whole, or as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decode_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without special ones."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text


class Detokenizer:
    """The text of tokens as they come; a character waits for the last of its bytes.

    Only the last few tokens are decoded, behind the few before them, which may decide how the
    text goes on (a space, say).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # from the whole characters before the last ones on
        self._told = 0  # of these tokens, those whose text is told

    def put(self, tokens: Sequence[int]) -> str:
        """What these tokens add to the text, as far as its characters are whole."""
        self._tokens += tokens
        new = self._new()
        if not new or new.endswith("\ufffd"):
            return ""
        self._tokens = self._tokens[self._told :]
        self._told = len(self._tokens)
        return new

    def end(self) -> str:
        """What was held back."""
        new = self._new()
        self._tokens, self._told = [], 0
        return new

    def _new(self) -> str:
        told = decode_text(self._tokenizer, self._tokens[: self._told])
        return decode_text(self._tokenizer, self._tokens)[len(told) :]
