"""Texts as token ids: decoded all at once or as they come, and compared; and numbers in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

NO_TOKENS: AbstractSet[int] = frozenset()
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(b for b in range(256) if b not in _PRINTED)}
"""How byte-level vocabularies spell each byte."""


def decode_text(tokenizer: Any, tokens: Sequence[int], keep: AbstractSet[int] = NO_TOKENS) -> str:
    """Decode tokens to text without special tokens.

    Args:
        keep: special tokens whose text is kept, such as marks of tool calls.
    """
    if keep.isdisjoint(tokens):
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text
    special = _special(tokenizer)
    shown = [token for token in tokens if token in keep or token not in special]
    text = tokenizer.decode(shown, skip_special_tokens=False)
    return text


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The text of a token in UTF-8; a token of a byte-level or byte-fallback vocabulary may hold
    only part of a character."""
    spelled: str = tokenizer.convert_ids_to_tokens(token) or ""  # None: of a padded head
    text: str = tokenizer.decode([token])
    steps = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    if "ByteLevel" in steps and "\ufffd" in text and {*spelled} <= _BYTES.keys():
        return bytes(_BYTES[letter] for letter in spelled)
    if "ByteFallback" in steps and re.fullmatch("<0x[0-9A-F]{2}>", spelled):
        return bytes([int(spelled[3:5], 16)])
    stripped = spelled.startswith("▁") and not text.startswith(" ")  # as at the start of a text
    return (" " * stripped + text).encode()


@lru_cache(maxsize=4)  # a tokenizer may have thousands of added tokens
def _special(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(id_ for id_, token in added if token.special)


def plural(number: int, noun: str) -> str:
    """A number with its noun: `1 draft`, `2,048 drafts`."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix of two texts, in tokens."""
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)


class Detokenizer:
    """Decodes tokens to text as they come. A character is held back until all its bytes are there.

    Only the last few tokens are decoded, together with a few before them, which may affect how the
    text continues (a space, for instance).

    Args:
        keep: as for `decode_text`.
    """

    def __init__(self, tokenizer: Any, keep: AbstractSet[int] = NO_TOKENS) -> None:
        self._tokenizer, self._keep = tokenizer, keep
        self._tokens: list[int] = []  # from the last complete characters on
        self._returned = 0  # number of these tokens whose text has been returned

    def put(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens add, up to the last complete character."""
        self._tokens += tokens
        new = self._new()
        if not new or new.endswith("\ufffd"):
            return ""
        self._tokens = self._tokens[self._returned :]
        self._returned = len(self._tokens)
        return new

    def end(self) -> str:
        """Return the text that was held back."""
        new = self._new()
        self._tokens, self._returned = [], 0
        return new

    def _new(self) -> str:
        before = decode_text(self._tokenizer, self._tokens[: self._returned], self._keep)
        return decode_text(self._tokenizer, self._tokens, self._keep)[len(before) :]
