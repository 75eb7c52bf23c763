"""The source that drafts what followed the same words in earlier answers.

An answer is indexed when it ends, with a few tokens before it. Every owner of texts (an API key of
a server) has an index, which counts how often its drafts were right by the length of their match:
one that is full of unlike texts stops drafting. Texts do not depend on it under shared noise; under
the rejection rule, where they would, nothing is remembered.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from layerskip.decoding.acceptance import CopyAcceptance
from layerskip.decoding.sources.base import Batch, Proposal, RowsState, Source, State
from layerskip.decoding.sources.lookup import NOTHING, Automaton, Cursor, Lookup
from layerskip.files.earlier_answers import AnswerFile
from layerskip.texts.vocabulary import hash_of

MOST = 100_000
"""Maximum number of remembered tokens by default; each takes about half a kilobyte."""
_CONTEXT = 32  # tokens before an answer that are indexed with it; longer matches tell no more
_LEAST = 0.2  # minimum chance of the first token of a draft
_BYTES = 450  # approximate bytes per indexed token


class AnswerIndex:
    """The earlier answers of one owner, for any number of threads.

    They stand in two automata. When the newer one has half of the tokens, the older one is dropped.

    Args:
        most: maximum number of tokens.
        file: a file where they are kept, too.

    Attributes:
        halves: the newer and the older automaton; another tuple when they change places.
        acceptance: how often drafts were right.
        lock: to be held while the automata are read.
    """

    def __init__(self, most: int, file: AnswerFile | None = None) -> None:
        self.most, self.lock, self._file = most, threading.Lock(), file
        self.acceptance = CopyAcceptance()
        self.halves = Automaton(), Automaton()
        for tokens in file.read() if file is not None else ():
            self._index(tokens)

    def __len__(self) -> int:
        """The number of tokens, with a mark after each answer."""
        return sum(len(half.tokens) for half in self.halves)

    def add(self, tokens: list[int]) -> None:
        """Index an answer, unless it occurs in newer ones."""
        with self.lock:
            if self.halves[0].holds(tokens):
                return
            tokens = self._index(tokens)
        if self._file is not None:
            try:
                self._file.add(tokens)
            except (OSError, ValueError) as error:  # the answer itself is unharmed
                warnings.warn(f"answers are no longer kept on disk: {error}", stacklevel=2)
                self._file = None

    def _index(self, tokens: list[int]) -> list[int]:
        """Index an answer, or the end of one that is too long; returns what was indexed."""
        half = self.most // 2
        tokens = tokens[1 - half :]
        if len(self.halves[0].tokens) + len(tokens) >= half:
            self.halves = Automaton(), self.halves[0]
        self.halves[0].add(tokens)
        return tokens

    def clear(self) -> None:
        """Forget all answers, also those in the file."""
        with self.lock:
            self.halves, self.acceptance = (Automaton(), Automaton()), CopyAcceptance()
        if self._file is not None:
            self._file.clear()


class EarlierAnswers(Source):
    """Drafts from earlier answers, which it remembers.

    One object may serve any number of calls, of threads too.

    Args:
        most: maximum number of tokens to remember for each owner; the oldest answers go first.
        shared: whether owners draft from each other's answers.
        file_of: makes the file of an owner, if answers are kept.
    """

    key = name = "earlier"
    words = "looked up in earlier answers"

    def __init__(
        self,
        most: int = MOST,
        *,
        shared: bool = False,
        file_of: Callable[[str], AnswerFile] | None = None,
    ) -> None:
        self.most, self.shared, self._file_of = most, shared, file_of
        self._lock, self._indexes = threading.Lock(), dict[str, AnswerIndex]()

    def of(self, owner: str = "") -> AnswerIndex:
        """The index of an owner.

        Raises:
            ValueError: its file is damaged, or belongs to another tokenizer.
        """
        owner = "" if self.shared else owner
        with self._lock:
            if owner not in self._indexes:
                file = None if self._file_of is None else self._file_of(owner)
                self._indexes[owner] = AnswerIndex(self.most, file)
            return self._indexes[owner]

    def clear(self) -> None:
        """Forget all answers, also those in files."""
        for index in self._indexes.values():
            index.clear()

    @property
    def nbytes(self) -> int:
        """The approximate size of the indexes in bytes."""
        return _BYTES * sum(map(len, self._indexes.values()))

    def open(self, batch: Batch) -> State:
        return _EarlierState(batch, self)

    def timed(self) -> Source:
        return Lookup().timed()


def earlier_answers(
    where: str | EarlierAnswers | None, most: int | None, tokenizer: Any, vocabulary: int
) -> EarlierAnswers | None:
    """The source that the options `remember` and `remember_tokens` ask for; None: none.

    Args:
        tokenizer: needed for a folder, whose token ids must be of the same vocabulary.
        vocabulary: the model's number of tokens.

    Raises:
        ValueError: a file in the folder is damaged or belongs to another tokenizer; or a folder is
            given without a tokenizer.
    """
    if isinstance(where, EarlierAnswers):
        return where
    if where in (None, "off"):
        return None
    most = MOST if most is None else most
    if where in ("memory", "shared"):
        return EarlierAnswers(most, shared=where == "shared")
    if tokenizer is None:
        raise ValueError(
            f"remember={where!r} keeps token ids in a folder, which needs the tokenizer; pass "
            "tokenizer=, or remember='memory'"
        )
    folder, mark = Path(str(where)), hash_of(tokenizer)

    def file_of(owner: str) -> AnswerFile:
        return AnswerFile(folder / owner if owner else folder, mark, vocabulary, most)

    source = EarlierAnswers(most, file_of=file_of)
    source.of()  # a damaged file is refused now
    return source


class _EarlierState(RowsState):
    def __init__(self, batch: Batch, source: EarlierAnswers) -> None:
        seats = batch.seats  # capturing the batch would form a cycle
        self._source = source

        def start(row: int) -> _EarlierRow:
            seat = seats[row]
            return _EarlierRow(source.of(seat.owner), seat.prompt[-_CONTEXT:].tolist())

        super().__init__(batch, start)

    def end(self, row: int) -> None:
        ended = self.rows[row]
        assert isinstance(ended, _EarlierRow)
        ended.end()

    @property
    def nbytes(self) -> int:
        return self._source.nbytes


class _EarlierRow:
    """A row's latest tokens, and where they occur in earlier answers."""

    def __init__(self, index: AnswerIndex, before: list[int]) -> None:
        self._index, self._tokens, self._first = index, before, len(before)
        self._halves: tuple[Automaton, ...] = ()
        self._cursors: list[Cursor] = []
        self._found = NOTHING
        self.extend(())

    def extend(self, tokens: Iterable[int]) -> None:
        tokens, found = [*tokens], self._found
        for place, (drafted, token) in enumerate(zip(found.tokens or (), tokens, strict=False)):
            self._index.acceptance.observe((found.match or 0) + place, drafted == token)
            if drafted != token:
                break
        self._tokens += tokens
        self._found = NOTHING
        with self._index.lock:
            if self._halves is not self._index.halves:  # newer answers have taken their place
                self._halves = self._index.halves
                self._cursors = [Cursor(half) for half in self._halves]
                tokens = self._tokens[-_CONTEXT:]
            for cursor in self._cursors:
                cursor.extend(tokens)

    def find(self, longest: int) -> Proposal:
        with self._index.lock:
            found = [cursor.find(longest) for cursor in self._cursors]
        self._found = max(found, key=lambda each: each.match or 0)  # the newer of equals
        match, acceptance = self._found.match or 0, self._index.acceptance
        rates = [acceptance.acceptance(match + place) for place in range(self._found.length)]
        if not rates or rates[0] < _LEAST:
            return NOTHING
        return self._found._replace(chances=[*accumulate(rates, mul)])

    def end(self) -> None:
        """Remember the answer."""
        if len(self._tokens) > self._first:
            self._index.add(self._tokens)
