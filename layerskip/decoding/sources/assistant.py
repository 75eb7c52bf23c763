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
from layerskip.decoding.sources.base import Batch, Following, Source, State
from layerskip.model.opened_model import OpenedModel, Pass


class SecondModel(Source):
    """A source that drafts with a model of its own, which may have another execution.

    Attributes:
        what: what the model is, in words.
    """

    name = "assistant"
    what = "a second model"
    model: OpenedModel

    @property
    def words(self) -> str:
        return f"{self.what}, {getattr(self.model.model, 'name_or_path', '')}".removesuffix(", ")

    @property
    def key(self) -> Hashable:
        model, size = self.model, self.model.weights.vocabulary
        return (self.name, weakref.ref(model.model), model.execution, model.dtype, size)


class Assistant(SecondModel):
    """A second model with the target's vocabulary.

    Heads may be padded differently: tokens that only one of the models has are not drafted.

    Args:
        model: the opened model; if it is `trimmed`, only those tokens are drafted.
    """

    def __init__(self, model: OpenedModel) -> None:
        self.model = model
        self.max_positions = model.max_positions

    def open(self, batch: Batch) -> State:
        return AssistantState(self.model, batch)

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


class AssistantState(Following):
    """A second model's keys and values of the rows of a batch."""

    def __init__(self, model: OpenedModel, batch: Batch) -> None:
        try:
            model.check_lengths(batch.prompt_lengths, batch.total)
        except ValueError as error:
            raise ValueError(f"the assistant cannot draft here: {error}") from error
        super().__init__(batch, model, model.new_cache(len(batch.seats), batch.slots))
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
        if not offset and self.missing() > 1:
            raw = self.head(self.catch_up()[None], None)[0]
        else:
            if not offset:
                self.see()
            begun = self._begin(tokens[:, None], self.places(offset), settled=self.places())
            raw = self.model.backend.run(*begun, self.blocks)[:, 0]
        target = self.batch.model
        missing = target.vocabulary - raw.shape[-1]
        raw = raw.to(target.device, target.dtype)  # (R, any)
        return F.pad(raw, (0, missing), value=float("-inf")) if missing else raw  # (R, V)

    def feed(self, tokens: Tensor, places: Sequence[int], rows: range) -> Tensor:
        begun = self._begin(tokens, places, rows)
        return self.model.run(*begun, range(self.model.num_sublayers))

    def _begin(
        self,
        tokens: Tensor,
        starts: Sequence[int],
        rows: range | None = None,
        settled: Sequence[int] | None = None,
    ) -> tuple[Tensor, Pass]:
        model = self.model
        tokens = tokens.to(model.device)
        if model.vocabulary < self.batch.model.vocabulary:
            tokens = tokens.clamp(max=model.vocabulary - 1)
        self.cache.place(starts, tokens.shape[1], rows=rows, settled=settled)
        return model.feed(tokens, self.cache, self.rotary)
