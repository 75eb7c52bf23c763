"""A request in progress: its law and draws, its history, its drafts, and what is reported.

Shapes: S slots, n emitted tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from layerskip.api.arguments import end_tokens, law_of, sampling_of
from layerskip.decoding.decoding_loop import Outcome
from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.base import Batch, Proposal, RowsState, Source, State
from layerskip.decoding.sources.forced import ForcedRow
from layerskip.decoding.sources.lookup import NOTHING, Automaton, Cursor
from layerskip.serving.requests import Counts, Piece, TextRequest
from layerskip.texts.grammars import GrammarLimit

Tell = Callable[[Piece], None]
_BEGIN = 2**31 - 1  # precedes a prediction, which begins the text; larger than any token
_BELIEVED = 8  # number of such marks, which count as a match of that many tokens


class Text(Seat):
    """The text of a request whose tokens are checked.

    Args:
        most: maximum number of tokens of its prompt and its text.
        longest: maximum number of tokens of a draft.
        tell: called with its pieces.

    Attributes:
        row: its seat; -1 if it has none.
        index: the index of the request's prediction.
        piece: what will be reported next.
        submitted: time of the submission, by `time.perf_counter`.
        cancelled: whether its client no longer wants it.
    """

    def __init__(
        self, request: TextRequest, model: Any, most: int, longest: int, tell: Tell
    ) -> None:
        prompt, limit = len(request.prompt), request.max_new_tokens
        if not prompt:
            raise ValueError("a prompt is empty; it needs at least one token")
        if limit < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {limit}")
        if prompt + limit > most:
            raise ValueError(
                f"prompt plus new tokens must be at most {most}, got {prompt} + {limit}; shorten "
                "one of them"
            )
        eos = end_tokens(model) if request.eos is None else request.eos
        key = stream_key(request.seed, 0)
        tokens = torch.tensor([*request.prompt])  # (length,)
        super().__init__(tokens, limit, key=key, eos=eos, stop=request.stop, remembers=True)
        self.pictures, self.encoded, self.width = request.pictures, request.encoded, prompt
        self.owner = request.owner
        law = sampling_of(model, request.temperature, request.top_k, request.top_p)
        law |= {"do_sample": request.do_sample, "min_p": request.min_p}
        self.law = law_of(law, processors=request.processors)
        self.request, self.slots, self.tell = request, prompt + limit + longest + 1, tell
        self.submitted, self.cancelled = time.perf_counter(), False
        self.counts = Counts()
        self.index: Automaton | None = None
        self.row = -1
        self.piece = Piece()

    def open(self, row: int, model: Any) -> None:
        """Take a seat."""
        self.row, self.vocabulary = row, model.vocabulary
        self.history = torch.zeros(1, self.slots, dtype=torch.long, device=model.device)  # (1, S)
        self.history[0, : self.width] = self.prompt
        self.draws = Draws(self.law, native=model.drawn)

    def fail(self, error: BaseException) -> None:
        """End only this text because of an error in its processors or stop function."""
        self.reason = "error"
        self.piece.error = f"{type(error).__name__}: {error}".split("\n")[0]
        self.piece.refused = isinstance(error, GrammarLimit)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which an error ends only this text."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def emit(self, tokens: Sequence[int]) -> list[int]:
        begin = len(self.emitted)
        with self.alone():
            super().emit(tokens)
        self.piece.tokens += self.emitted[begin:]
        return self.emitted[begin:]

    def count(self, outcome: Outcome, predicted: int) -> None:
        """Count a round.

        Args:
            predicted: the number of the source of predictions.
        """
        counts, row = self.counts, self.row
        drafted, accepted = len(outcome.drafts.tokens[row]), outcome.accepted[row]
        counts.rounds += 1
        counts.drafted += drafted
        counts.accepted += accepted
        if drafted:
            counts.accepted_of[accepted] = counts.accepted_of.get(accepted, 0) + 1
            counts.longest = max(counts.longest, drafted)
        if outcome.source(row) == predicted:
            counts.predicted += drafted
            counts.predicted_accepted += accepted

    @cached_property
    def _unwarped(self) -> Law:
        return Law(self.request.processors, do_sample=False, rows=1)

    def tell_logprobs(self, raw: Tensor, emitted: Sequence[int]) -> None:
        """Report emitted tokens' own and the largest log-probabilities, from logits (n, V)."""
        if self.request.top_logprobs is None:
            return
        length = self.width + len(self.emitted)
        lengths, rows = range(length - len(emitted), length), [0] * len(emitted)
        with self.alone():
            scores = self._unwarped.scores(raw, self.history, rows, lengths, width=self.width)
            self.piece.logprobs += self._largest(scores, emitted)

    def tell_prompt(self, raw: Tensor, first: int) -> None:
        """Report those of prompt tokens from `first` on, from logits (n, V) that precede them."""
        with self.alone():
            tokens = self.request.prompt[first : first + len(raw)]
            self.piece.prompt_logprobs += self._largest(raw[: len(tokens)], tokens)

    def _largest(self, scores: Tensor, tokens: Sequence[int]) -> list[dict[int, float]]:
        reported, dtype = [], torch.promote_types(scores.dtype, torch.float32)
        for token, row in zip(tokens, scores.log_softmax(-1, dtype=dtype), strict=True):  # (V,)
            top = row.topk(min(self.request.top_logprobs or 0, len(row)))
            each = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            reported.append({token: float(row[token])} | each)
        return reported

    def forced(self) -> ForcedRow | None:
        stateful = self.law.stateful
        return ForcedRow(stateful, self.vocabulary) if stateful else None

    def predicted(self) -> Cursor | None:
        """Drafts from the request's prediction, or None."""
        if self.index is None:
            return None
        cursor = Cursor(self.index)
        cursor.extend([_BEGIN] * _BELIEVED)
        return cursor


def index_of(predicted: Sequence[int]) -> Automaton:
    """Index a prediction for any number of texts."""
    index = Automaton()
    index.add([_BEGIN] * _BELIEVED + list(predicted))
    return index


class OfTexts(Source):
    """Drafts that texts bring with them; an error in one ends only that text."""

    def __init__(
        self, key: str, texts: Sequence[Any], begin: Callable[[Text], ForcedRow | Cursor | None]
    ) -> None:
        self._key, self.texts, self.begin = key, texts, begin

    @property
    def key(self) -> str:
        return self._key

    def open(self, batch: Batch) -> State:
        return RowsState(batch, lambda row: _Drafts(self.texts[row], self.begin))


class _Drafts:
    """What one text brings; nothing while its seat is empty."""

    def __init__(self, text: Any, begin: Callable[[Text], ForcedRow | Cursor | None]) -> None:
        self.text, self.drafts = text, None
        if isinstance(text, Text):
            with text.alone():
                self.drafts = begin(text)

    def find(self, longest: int) -> Proposal:
        proposal = NOTHING
        if longest and self.drafts is not None:
            with self.text.alone():
                proposal = self.drafts.find(longest)
        return proposal

    def extend(self, tokens: Iterable[int]) -> None:
        if self.drafts is not None:
            with self.text.alone():
                self.drafts.extend(tokens)
