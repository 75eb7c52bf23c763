"""Judges methods' texts: whose each must equal, and whether a difference is a near-tie.

Letters: T tokens of a prompt, W width of padded prompts, n tokens of a text, N positions,
V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from layerskip.bench.batches import PromptBatch
from layerskip.bench.comparison import (
    Along,
    Comparison,
    Difference,
    Scores,
    along,
    differences,
    first_difference,
    resolutions,
)
from layerskip.bench.methods import Method, Task
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import gumbel_noise, stream_key
from layerskip.model.opening import open_model
from layerskip.model.sublayers import Sublayers
from layerskip.requests import end_tokens


class Judge:
    """Tells whether texts are as promised: near-ties from faults (see `bench.comparison`).

    Self-speculation must give the text of plain decoding. Greedy text of every other method must be
    that of transformers' `generate()`, or of plain decoding where that is not measured. Samples of
    other kinds follow the law, which no text can show. Where top-k or top-p are about to cut a
    token or not, a difference counts as a fault: rounding may explain it, no score shows.
    """

    def __init__(self, model: Any, task: Task, methods: Sequence[Method]) -> None:
        self.model = model
        self.task = task
        kinds = {method.kind: method for method in reversed(methods)}
        self.plain = kinds["plain"]
        self.greedy = self.plain if task.do_sample else kinds.get("generate", self.plain)
        self._batch: PromptBatch | None = None
        self._expected: dict[str, list[list[int]]] = {}
        self._scored: dict[Hashable, Along] = {}  # texts repeat

    @cached_property
    def opened(self) -> Sublayers:
        return open_model(self.model, self.task.execution)

    def promised(self, method: Method) -> bool:
        """Whether the method's text must be the reference's."""
        coupled = self.task.acceptance == "coupled" and method.kind in ("plain", "self")
        return coupled or not self.task.do_sample

    def reference(self, method: Method) -> Method:
        """Whose text a method must give."""
        return self.plain if method.kind == "self" else self.greedy

    def prepare(self, batch: PromptBatch) -> None:
        """Have the references' texts of the batch at hand, before anything is timed on it."""
        for reference in (self.plain, self.greedy):
            self.expected(reference, batch)

    def expected(self, reference: Method, batch: PromptBatch) -> list[list[int]]:
        """The reference's texts, decoded once for a batch."""
        if batch is not self._batch:
            self._batch, self._expected = batch, {}
        if reference.kind not in self._expected:
            again = reference.decode(batch, 0, time.perf_counter)
            self._expected[reference.kind] = again.tokens
        return self._expected[reference.kind]

    def compare(
        self,
        method: Method,
        decoded: Sequence[tuple[PromptBatch, Sequence[list[int]]]],
        reference: Method | None = None,
        *,
        measure: bool = False,
    ) -> Comparison | None:
        """A method's texts of batches against the reference's; None: nothing is promised.

        Args:
            reference: another one than usual.
            measure: tell the resolution also where no text differs.
        """
        if not self.promised(method):
            return None
        reference = reference or self.reference(method)
        bitwise = {reference.kind, method.kind} <= {"plain", "self"} and self.opened.exact
        cases = [
            (batch, row, expected, got)
            for batch, texts in decoded
            for row, (expected, got) in enumerate(
                zip(self.expected(reference, batch), texts, strict=True)
            )
        ]
        scored = [
            number
            for number, (_, _, expected, got) in enumerate(cases)
            if expected != got or (measure and not bitwise)
        ]
        found = [self._along(*cases[number]) for number in scored]
        resolved = resolutions(found) if found else []
        differing: list[Difference] = []
        for number, along_it, resolution in zip(scored, found, resolved, strict=True):
            _, _, expected, got = cases[number]
            longest = self._longest(got)
            differing += differences(
                number, expected, got, along_it, resolution, bitwise=bitwise, longest=longest
            )
        median = float(torch.cat(resolved).median()) if resolved else None
        tokens = sum(len(got) for _, _, _, got in cases)
        return Comparison(len(cases), tokens, tuple(differing), 0.0 if bitwise else median)

    def _longest(self, text: Sequence[int]) -> int:
        """How long a text may get: up to its first token that ends it, or the limit."""
        limit, ends = self.task.max_new_tokens, end_tokens(self.model)
        return next((i + 1 for i, token in enumerate(text[:limit]) if token in ends), limit)

    def _along(self, batch: PromptBatch, row: int, expected: list[int], got: list[int]) -> Along:
        """What the library says along a text, and at its end if that comes too soon."""
        longest = self._longest(got)
        text = got[:longest] if len(got) >= longest else [*got, 0]  # what is last is not fed
        others = [*text]
        first = first_difference(expected, got)
        if first is not None and first < min(len(expected), len(text)):
            others[first] = expected[first]
        key = batch.names, row, tuple(text), tuple(others)
        if key not in self._scored:
            prompt = batch.input_ids[row][batch.attention_mask[row].bool()][None]  # (1, T)
            scores = self._scores(batch, row, text)
            self._scored[key] = along(self.model, prompt, text, others, scores)
        return self._scored[key]

    def _scores(self, batch: PromptBatch, row: int, text: Sequence[int]) -> Scores:
        """What tokens of a text are chosen by: processed scores, and the noise of their places."""
        ids, mask = (part[row : row + 1] for part in (batch.input_ids, batch.attention_mask))
        width, length = ids.shape[1], int(mask.sum())
        processors = self.model.generate(  # the library makes them, and decodes nothing
            input_ids=ids,
            attention_mask=mask,
            custom_generate=lambda _model, _ids, logits_processor, **_rest: logits_processor,
            **self.task.arguments(),
        )
        law = Law(processors, do_sample=self.task.do_sample, rows=1)
        history = torch.cat([ids, ids.new_tensor([text])], dim=1)  # (1, W + n)
        key = stream_key(self.task.seed + batch.numbers[row], 0)

        def scores(logits: Tensor, first: int) -> Tensor:
            numbers = range(first, first + len(logits))
            seen = [width + number for number in numbers]
            found = law.scores(logits, history.to(logits.device), [0] * len(seen), seen)  # (N, V)
            if not self.task.do_sample:
                return found
            places = [length + number for number in numbers]
            keys = [key] * len(places)
            return found + gumbel_noise(keys, places, found.shape[-1], device=found.device)

        return scores
