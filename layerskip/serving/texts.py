"""A task on its way: its law and draws, its history, what it may draft, and what is told of it.

Letters: S slots, N positions, n emitted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from transformers import MinPLogitsWarper

from layerskip.decoding.draws import DraftedTokens, Drawn, Draws, VerifiedTokens
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.passes import Position
from layerskip.decoding.planning import Plan
from layerskip.decoding.sources.base import Proposal
from layerskip.decoding.sources.forced import ForcedRow
from layerskip.decoding.sources.lookup import NOTHING, Lookup, LookupRow
from layerskip.requests import check_tokens, end_tokens
from layerskip.serving.tasks import Counts, Reason, Task, in_a_line
from layerskip.settings import law_of

# Numbers of sources: 0 is what is forced, and behind what is looked up is the model's own draft.
PREDICTED, LOOKED_UP = 1, 2
_BEGIN = 2**31 - 1  # stands before a prediction, which the text begins with; no token is so large
_BELIEVED = 8  # such marks: a match of so many tokens


class Text:
    """A task in a batch.

    Attributes:
        slots: that it needs at most.
        same: tokens of its prompt that were known, though perhaps not where it can go on.
        rows: what it has forced, predicted and looked up, by number of the source.
        plan: of this round.
        news, logprobs: tokens since it was last told, see `Piece`.
        reason: why it has ended; None while it goes on.
    """

    def __init__(self, task: Task, law: Law, eos: frozenset[int], slots: int) -> None:
        self.task, self.law, self.eos, self.slots = task, law, eos, slots
        self.counts = Counts()
        self.seat = -1
        self.same = 0
        self.weights: object = None  # that its keys and values are of
        self.rows: list[ForcedRow | LookupRow | None] = []
        self.plan = Plan()
        self.news: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.reason: Reason | None = None
        self.error: str | None = None

    @classmethod
    def of(cls, task: Task, model: Any, most: int, longest: int) -> Text:
        """A checked task.

        Args:
            model: the library's.
            most: tokens of its prompt and its text, at most.
            longest: tokens of a draft, at most.

        Raises:
            ValueError: nothing that can be decoded, with the reason.
        """
        if not task.prompt:
            raise ValueError("a prompt is empty; it needs at least one token")
        check_tokens(model, torch.tensor([*task.prompt, *task.predicted]))
        if task.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {task.max_new_tokens}")
        total = len(task.prompt) + task.max_new_tokens
        if total > most:
            raise ValueError(
                f"prompt plus new tokens must be at most {most}, got {len(task.prompt)} + "
                f"{task.max_new_tokens}; shorten one of them"
            )
        sampling = {"temperature": task.temperature, "top_k": task.top_k, "top_p": task.top_p}
        law = law_of(model, 1, task.processors, do_sample=task.do_sample, **sampling)
        if task.do_sample and task.min_p is not None:
            warper: Any = MinPLogitsWarper(task.min_p)
            law = Law([*law.processors, warper], do_sample=True, rows=1)
        eos = end_tokens(model) if task.eos is None else task.eos
        return cls(task, law, eos, total + longest + 1)

    def open(self, seat: int, emitted: list[int], device: Any, native: Any) -> None:
        """Take a seat."""
        prompt = list(self.task.prompt)
        self.seat, self.emitted = seat, emitted
        self.history = torch.zeros(1, self.slots, dtype=torch.long, device=device)  # (1, S)
        self.history[0, : len(prompt)] = torch.tensor(prompt, device=device)
        self.draws = Draws(
            self.law,
            [stream_key(self.task.seed, 0)],
            rejection=False,
            history=self.history,
            width=len(prompt),
            prompt_lengths=[len(prompt)],
            emitted=[emitted],
            native=native,
        )

    @cached_property
    def unwarped(self) -> Law:
        """Its law before temperature and the others."""
        return Law(self.task.processors, do_sample=False, rows=1)

    @property
    def length(self) -> int:
        """Tokens of prompt and text."""
        return len(self.task.prompt) + len(self.emitted)

    def write(self, offset: int, token: int) -> None:
        """Write a token into the history, so many places behind the text."""
        self.history[0, self.length + offset] = token

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What its processors and stop raise ends this text only."""
        try:
            yield
        except Exception as error:
            self.reason, self.error = "error", in_a_line(error)

    def begin(self, lookups: Sequence[Lookup], vocabulary: int) -> None:
        """Behind its prompt: make the rows of what may be drafted without a step."""
        stateful, task, marks = self.law.stateful, self.task, [_BEGIN] * _BELIEVED
        predicted = LookupRow(Lookup([marks + list(task.predicted)]), own=False)
        predicted.extend(marks)
        self.rows = [
            ForcedRow(stateful, vocabulary) if stateful else None,
            predicted if task.predicted else None,
            *(lookup.row(task.prompt) for lookup in lookups),
        ]

    def emit(self, tokens: Sequence[int]) -> list[int]:
        """Emit what the target has drawn, up to what ends it."""
        emitted = list[int]()
        with self.alone():
            for token in tokens:
                if token < 0:
                    raise ValueError(
                        f"no token to draw after {len(self.emitted)} new tokens: the scores are "
                        "NaN or all -inf; check the processors and the model"
                    )
                self.write(0, token)
                self.emitted.append(token)
                emitted.append(token)
                if self.task.stop is not None and self.task.stop(0, self.history[:, : self.length]):
                    self.reason = "stop"
                if token in self.eos:
                    self.reason = "stop"
                elif self.reason is None and len(self.emitted) >= self.task.max_new_tokens:
                    self.reason = "length"
                if self.reason is not None:
                    break
            self.draws.forget(0, finished=False)
            for row in self.rows:
                if row is not None:
                    row.extend(emitted)
        self.news += emitted
        return emitted

    def tell_logprobs(self, raw: Tensor, emitted: Sequence[int]) -> None:
        """Of tokens just emitted, its own log-probability and the largest, from logits (n, V)."""
        lengths = range(self.length - len(emitted), self.length)
        width, rows = len(self.task.prompt), [0] * len(emitted)
        with self.alone():
            scores = self.unwarped.scores(raw, self.history, rows, lengths, width=width)  # (n, V)
            for token, row in zip(emitted, scores.log_softmax(-1), strict=True):  # (V,)
                top = row.topk(min(self.task.top_logprobs or 0, len(row)))
                each = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
                self.logprobs.append({token: float(row[token])} | each)


class Together(Draws):
    """The draws of a batch's texts, by seat. One that raises an error ends, and has no tokens.

    Attributes:
        texts: by seat.
    """

    reads_history = True  # perhaps
    rejection = False

    def __init__(self, emitted: Sequence[Sequence[int]]) -> None:
        self.emitted = emitted
        self.texts: dict[int, Text] = {}

    @property
    def apart(self) -> bool:
        return any(text.draws.apart for text in self.texts.values())

    def remember(self, row: int, offset: int, token: int) -> None:
        self.texts[row].write(offset, token)

    def offer(self, number: int, row: int, most: int) -> Proposal:
        """What one of a text's own rows offers it."""
        text, proposal = self.texts[row], NOTHING
        if most and (own := text.rows[number]) is not None:
            with text.alone():
                proposal = own.find(most)
        return proposal

    def allowed(self, row: int, tokens: Sequence[int], vocabulary: int) -> int:
        count = 0
        with self.texts[row].alone():
            count = self.texts[row].draws.allowed(0, tokens, vocabulary)
        return count

    def few(
        self, row: int, offset: int, tokens: Sequence[int], raw: Sequence[float]
    ) -> Sequence[float]:
        return self.texts[row].draws.few(0, offset, tokens, raw)

    def draft(
        self,
        raw: Tensor,
        positions: Sequence[Position],
        signal: str | None = None,
        *,
        best: int = 1,
    ) -> Drawn:
        found = []
        for own, (row, offset) in zip(raw.split(1), positions, strict=True):  # (1, V)
            text = self.texts[row]
            nothing = torch.full((1, max(1, best - 1)), -1, device=raw.device)
            drawn = Drawn(nothing[:, 0], nothing[:, 0].float(), nothing, [])
            with text.alone():
                drawn = text.draws.draft(own, [(0, offset)], signal, best=best)
            found.append(drawn)
        tokens, sure, others, _ = zip(*found, strict=True)
        return Drawn(
            torch.cat(tokens),
            torch.cat(sure) if signal else None,
            torch.cat(others) if best > 1 else None,
            [],
        )

    def judge(
        self,
        raw: Tensor,
        positions: Sequence[Position],
        drafts: DraftedTokens | None = None,
        *,
        keep: bool = False,
    ) -> VerifiedTokens:
        drawn = torch.full((len(raw),), -1, device=raw.device)  # (N,)
        first = 0
        for row, own in groupby(positions, itemgetter(0)):
            text, places = self.texts[row], [(0, offset) for _, offset in own]
            some = slice(first, first := first + len(places))
            if text.reason is None:
                with text.alone():
                    drafted = None if drafts is None else drafts.alone(row)
                    drawn[some] = text.draws.judge(raw[some], places, drafted).drawn
        return VerifiedTokens(None, drawn, None)
