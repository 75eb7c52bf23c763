"""A text in the tokens of two tokenizers, re-encoded as it grows, and drafts of it encoded back.

Only the end of a text is encoded again, from a word on at which both begin a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from layerskip.texts.tokens import common_prefix, token_bytes

_AGAIN = 16  # last tokens that later ones may change; they are always encoded again
_WORDLESS = 128  # number of tokens from which on a text is parted inside words, too


class Spelling:
    """A tokenizer between tokens and bytes.

    Attributes:
        begin: the token that begins every text, if there is one.
        end: the token that ends a text, if there is one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._known = tokenizer, dict[int, bytes]()
        self.begin: list[int] = tokenizer("")["input_ids"][:1]
        self.end: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._spaces = False
        self._spaces = self.text(self.encode(b"a")) == b" a"  # as SentencePiece does

    def text(self, tokens: Iterable[int]) -> bytes:
        tokens = [*tokens]
        for token in {*tokens} - self._known.keys():
            self._known[token] = token_bytes(self._tokenizer, token)
        return b"".join(self._known[token] for token in tokens)

    def places(self, tokens: Iterable[int]) -> Iterable[int]:
        """The byte at which each token begins, and the end of the last."""
        return accumulate((len(self.text([token])) for token in tokens), initial=0)

    def encode(self, text: bytes) -> list[int]:
        """Encode a text without parts of characters, and without tokens that begin every text."""
        words = text.decode(errors="ignore")
        words = words.removeprefix(" ") if self._spaces else words
        tokens: list[int] = self._tokenizer(words, add_special_tokens=False)["input_ids"]
        return tokens


class Retokenized:
    """One text in a target's tokens and in an assistant's.

    Attributes:
        tokens: the text in the assistant's tokens, at least one.
        drafted: tokens that the assistant has drafted after it.
        offered: what they add to the text in the target's tokens.
        ended: whether nothing follows what is offered.
    """

    def __init__(self, ours: Spelling, theirs: Spelling) -> None:
        self.ours, self.theirs = ours, theirs
        self.tokens, self.drafted, self.offered = [*theirs.begin], list[int](), list[int]()
        self.ended = False
        self._from = 0, len(theirs.begin)  # what is encoded again, in tokens of both

    def follow(self, text: Sequence[int]) -> int:
        """Encode what a text (T,) has become, and drop what is drafted.

        Returns:
            How many of the tokens before, drafted ones included, are still the text's.
        """
        first, kept = self._from
        before = [*self.tokens[kept:], *self.drafted]
        begun = not first and [*text[:1]] == self.ours.begin
        self._tail = [*text[first + begun :]]
        self._spelled = self.ours.text(self._tail)
        new = self.theirs.encode(self._spelled)
        self.tokens = [*self.tokens[:kept], *new] or [0]
        self.drafted, self.offered, self.ended = [], [], False
        most = len(self._tail) - _AGAIN
        starts = {place: i for i, place in enumerate(self.ours.places(self._tail)) if i <= most}
        for i, place in enumerate(self.theirs.places(new) if most > _AGAIN else ()):
            word = self._spelled[place : place + 1] == b" " or most > _WORDLESS
            if word and place in starts:
                self._from = first + begun + starts[place], kept + i
        return kept + common_prefix(before, new)

    def draft(self, token: int) -> None:
        """Append a token that the assistant has drafted."""
        self.drafted.append(token)
        if self.ended or token in self.theirs.end:
            self.offered += [] if self.ended else self.ours.end
            self.ended = True
            return
        new = self.theirs.text(self.drafted)
        whole, count = self.ours.encode(self._spelled + new), len(self._tail)
        agreed = whole[:count] == self._tail
        self.offered = whole[count:] if agreed else self.ours.encode(new)

    def settled(self, place: int) -> bool:
        """Whether there is an offered token that nothing drafted later will change.

        That is, others follow, or both have it as a token.
        """
        if self.ended or len(self.offered) != place + 1:
            return self.ended or len(self.offered) > place
        return self.ours.text(self.offered[-1:]) == self.theirs.text(self.drafted[-1:])
