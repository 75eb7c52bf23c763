"""The source that drafts with a second model of the same vocabulary.

Callers that have the tokenizers compare the vocabularies (see `layerskip.texts.vocabulary`).
Shapes: R rows of a pass, T tokens, H hidden width, V vocabulary of the target.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.cache.rows import RowCache
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.decoding.sources.following import Following, in_chunks
from layerskip.model.opened_model import OpenedModel, Pass


class Assistant(Source):
    """A second model with the target's vocabulary, which may have another execution.

    Heads may be padded differently: tokens that only one of the models has are not drafted.

    Args:
        model: the opened model; if it is `trimmed`, only those tokens are drafted.
    """

    def __init__(self, model: OpenedModel) -> None:
        self.model = model
        self.max_positions = model.max_positions

    def open(self, batch: Batch) -> State:
        return AssistantState(self.model, batch)

    name = "assistant"

    @property
    def words(self) -> str:
        path = getattr(self.model.model, "name_or_path", "")
        return f"a second model, {path}" if path else "a second model"

    @property
    def key(self) -> Hashable:
        model = self.model
        return (weakref.ref(model.model), model.execution, model.dtype, model.weights.vocabulary)

    def step_bytes(self) -> Sequence[float]:
        return [*self.model.weight_bytes()["sublayers"], self.model.weights.head_bytes()]

    def key_bytes(self) -> Mapping[int | None, float]:
        return self.model.key_bytes()

    def own_bytes(self) -> float:
        return math.fsum(slot_bytes(self.model).values())


def slot_bytes(model: OpenedModel) -> dict[int | None, float]:
    """Bytes of keys and values per token in a model's cache, as `Architecture.key_bytes`.

    If the model runs as a whole, they are measured in a pass over one token.
    """
    if model.parts:
        return model.key_bytes(part.number for part in model.parts if part.writes)
    cache = _after_a_token(model)
    buffers = (*cache.keys.values(), *cache.values.values())
    return {None: sum(each.nbytes / each.shape[2] for each in buffers)}


def state_bytes(model: OpenedModel) -> int:
    """Bytes of a row in a model's cache apart from keys and values."""
    return _after_a_token(model).state_bytes if model.recurrent else 0


def _after_a_token(model: OpenedModel) -> RowCache:
    hidden, step = model.first_pass(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    model.run(hidden, step, range(model.num_sublayers))
    return step.cache


def common(raw: Tensor, target: OpenedModel) -> Tensor:
    """Map an assistant's raw logits (..., any) to the target's vocabulary, (..., V)."""
    missing = target.vocabulary - raw.shape[-1]
    raw = raw.to(target.device, target.dtype)
    return F.pad(raw, (0, missing), value=float("-inf")) if missing else raw


def of_assistant(tokens: Tensor, assistant: OpenedModel, target: OpenedModel) -> Tensor:
    """The target's tokens on the assistant's device, clamped to its vocabulary."""
    tokens = tokens.to(assistant.device)
    if assistant.vocabulary < target.vocabulary:
        tokens = tokens.clamp(max=assistant.vocabulary - 1)
    return tokens


class AssistantState(Following):
    """A second model's keys and values of the rows of a batch."""

    def __init__(self, model: OpenedModel, batch: Batch) -> None:
        super().__init__(batch)
        try:
            model.check_lengths(batch.prompt_lengths, batch.total)
        except ValueError as error:
            raise ValueError(f"the assistant cannot draft here: {error}") from error
        self.model = model
        self.cache = model.new_cache(len(batch.seats), batch.slots)
        self.caches = [self.cache]
        self.resized()
        self.head = model.weights.head()
        self.blocks = [*model.blocks, self.head]

    def begin(self, row: int) -> None:
        super().begin(row)
        if self.model.encoder:
            text = self.batch.model.read[row][None]  # (1, E)
            encoded = self.model.encode(text, torch.ones_like(text))
            self.cache.join(self.batch.seated.index(row), encoded)  # type: ignore[attr-defined]

    def resized(self) -> None:
        self.rotary = self.model.rotary(self.batch.slots, self.batch.total)

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        batch, model = self.batch, self.model
        count = 1 if offset else self.missing()
        if count > 1:
            return common(self._catch_up(count), batch.model)
        if not offset:
            self.see()
        fed = of_assistant(tokens, model, batch.model)[:, None]  # (R, 1)
        begun = self._feed(fed, self.places(offset), settled=self.places())
        raw = model.backend.run(*begun, self.blocks)[:, 0]
        return common(raw, batch.model)

    def _catch_up(self, count: int) -> Tensor:
        """Feed the last `count` tokens of every row; returns raw logits after them, (R, any)."""
        model = self.model
        starts, missing, tokens = self.latest(count)
        if not self.cache.partial:  # seeing tokens again changes nothing
            missing = [range(each.stop) for each in missing]

        def run(chunk: Tensor, rows: range, firsts: list[int]) -> Tensor:
            places = [starts[row] + first for row, first in zip(rows, firsts, strict=True)]
            return model.run(*self._feed(chunk, places, rows), range(model.num_sublayers))

        last = in_chunks(
            model,
            of_assistant(tokens, model, self.batch.model),
            missing,
            run,
            partial=self.cache.partial,
        )
        self.cache.prefilled = True
        return self.head(last[None], None)[0]

    def _feed(
        self,
        tokens: Tensor,
        starts: Sequence[int],
        rows: range | None = None,
        settled: Sequence[int] | None = None,
    ) -> tuple[Tensor, Pass]:
        rows = rows or range(len(starts))
        self.cache.place(starts, tokens.shape[1], rows=rows, settled=settled)
        return self.model.feed(tokens, self.cache, self.rotary)
