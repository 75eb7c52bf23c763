"""The source that drafts what followed the same words in earlier answers.

An answer is indexed when it ends, with a few tokens before it. Every owner of texts (an API key of
a server) has an index, which counts how often its drafts were right by the length of their match:
one that is full of unlike texts stops drafting. Texts do not depend on it under shared noise; under
the rejection rule, where they would, nothing is remembered.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import replace
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
_BYTES = 450  # approximate bytes per indexed token
# By the length of a match, as `CopyAcceptance` takes them: that of matches with unlike texts.
_PRIOR = (0.05, 0.06, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
_CONTEXT = 32  # tokens before an answer that are indexed with it; longer matches tell no more
_LEAST = 0.2  # minimum chance of the first token of a draft


class AnswerIndex:
    """The earlier answers of one owner, for any number of threads.

    They stand in two automata. When the newer one has half of the tokens, the older one is dropped.

    Args:
        most: maximum number of tokens, with a mark after each answer.
        file: a file where they are kept, too.

    Attributes:
        halves: the newer and the older automaton; another tuple when they change places.
        acceptance: how often drafts were right.
        lock: to be held while the automata are read.
    """

    def __init__(self, most: int, file: AnswerFile | None = None) -> None:
        self._half, self._file, self.lock = most // 2, file, threading.Lock()
        self.halves, self.acceptance = (Automaton(), Automaton()), CopyAcceptance(_PRIOR)
        for tokens in file.read() if file is not None else ():
            self._index(tokens)

    def __len__(self) -> int:
        return sum(len(half.tokens) for half in self.halves)

    def add(self, tokens: list[int]) -> None:
        """Remember an answer, or the end of one that is too long."""
        tokens = tokens[1 - self._half :]
        with self.lock:
            self._index(tokens)
        if self._file is not None:
            try:
                self._file.add(tokens)
            except (OSError, ValueError) as error:  # the answer itself is unharmed
                warnings.warn(f"answers are no longer kept on disk: {error}", stacklevel=2)
                self._file = None

    def _index(self, tokens: list[int]) -> None:
        if len(self.halves[0].tokens) + len(tokens) >= self._half:
            self.halves = Automaton(), self.halves[0]
        self.halves[0].add(tokens[1 - self._half :])

    def clear(self) -> None:
        with self.lock:
            self.halves, self.acceptance = (Automaton(), Automaton()), CopyAcceptance(_PRIOR)
        if self._file is not None:
            self._file.clear()


class EarlierAnswers(Source):
    """Drafts from earlier answers, which it remembers for any number of calls and threads.

    Args:
        most: maximum number of tokens to remember for each owner; the oldest answers go first.
        shared: whether owners draft from each other's answers.
        file: where answers are kept, those of a named owner in a folder beside it.
    """

    key, name = Lookup.key, "earlier"  # passes over its drafts cost what those of lookups do
    words = "looked up in earlier answers"
    remembers = True

    def __init__(
        self, most: int = MOST, *, shared: bool = False, file: AnswerFile | None = None
    ) -> None:
        self.most, self.shared, self._file = most, shared, file
        self._lock, self.indexes = threading.Lock(), dict[str, AnswerIndex]()

    def of(self, owner: str = "") -> AnswerIndex:
        """The index of an owner.

        Raises:
            ValueError: its file is damaged, or belongs to another tokenizer.
        """
        owner, file = "" if self.shared else owner, self._file
        with self._lock:
            if owner not in self.indexes:
                if file is not None:
                    file = replace(file, folder=file.folder / owner)
                self.indexes[owner] = AnswerIndex(self.most, file)
            return self.indexes[owner]

    def clear(self) -> None:
        """Forget all answers, also those in files."""
        for index in self.indexes.values():
            index.clear()

    def open(self, batch: Batch) -> State:
        return _EarlierState(batch, self)


def earlier_answers(
    where: str | None, most: int | None, tokenizer: Any, vocabulary: int
) -> list[EarlierAnswers]:
    """The source that the options `remember` and `remember_tokens` ask for, if they do.

    Args:
        tokenizer: needed for a folder, whose token ids must be of the same vocabulary.
        vocabulary: the model's number of tokens.

    Raises:
        ValueError: a folder's file is damaged or belongs to another tokenizer, or there is none.
    """
    if where in (None, "off"):
        return []
    most = most or MOST
    if where in ("memory", "shared"):
        return [EarlierAnswers(most, shared=where == "shared")]
    if tokenizer is None:
        raise ValueError(
            f"remember={where!r} keeps token ids in a folder, which needs the tokenizer; pass "
            "tokenizer=, or remember='memory'"
        )
    file = AnswerFile(Path(where), hash_of(tokenizer), vocabulary, most)
    source = EarlierAnswers(most, file=file)
    source.of()  # a damaged file is refused now
    return [source]


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
        return _BYTES * sum(map(len, self._source.indexes.values()))


class _EarlierRow:
    """A row's latest tokens, and where they occur in earlier answers."""

    def __init__(self, index: AnswerIndex, before: list[int]) -> None:
        self._index, self._tokens, self._first = index, before, len(before)
        self._halves: tuple[Automaton, ...] = ()
        self._found = NOTHING
        self.extend(())

    def extend(self, tokens: Iterable[int]) -> None:
        tokens, found, self._found = [*tokens], self._found, NOTHING
        for place, (drafted, token) in enumerate(zip(found.tokens or (), tokens, strict=False)):
            self._index.acceptance.observe((found.match or 0) + place, drafted == token)
            if drafted != token:
                break
        self._tokens += tokens
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
        """Remember the answer, unless newer ones hold all of it."""
        size = len(self._tokens)
        if size > self._first and size > self._cursors[0].match:
            self._index.add(self._tokens)
