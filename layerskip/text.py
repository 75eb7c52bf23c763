"""From tokens to text: whole, or as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

NONE: AbstractSet[int] = frozenset()


def decode_text(tokenizer: Any, tokens: Sequence[int], keep: AbstractSet[int] = NONE) -> str:
    """The text of tokens, without special ones.

    Args:
        keep: special tokens whose text is told, as marks of tool calls.
    """
    if keep.isdisjoint(tokens):
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text
    special = _special(tokenizer)
    shown = [token for token in tokens if token in keep or token not in special]
    text = tokenizer.decode(shown, skip_special_tokens=False)
    return text


@lru_cache(maxsize=4)  # there may be thousands
def _special(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(id_ for id_, token in added if token.special)


class Detokenizer:
    """The text of tokens as they come; a character waits for the last of its bytes.

    Only the last few tokens are decoded, behind the few before them, which may decide how the
    text goes on (a space, say).

    Args:
        keep: as of `decode_text`.
    """

    def __init__(self, tokenizer: Any, keep: AbstractSet[int] = NONE) -> None:
        self._tokenizer, self._keep = tokenizer, keep
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
        told = decode_text(self._tokenizer, self._tokens[: self._told], self._keep)
        return decode_text(self._tokenizer, self._tokens, self._keep)[len(told) :]
