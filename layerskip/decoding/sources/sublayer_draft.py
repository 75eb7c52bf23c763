"""The source that drafts with the model's own sublayers, skipping or rounding some of them.

Shapes: R rows of a pass, H hidden width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from layerskip.config.skips import SkipConfig
from layerskip.decoding.acceptance import PRIOR, PRIOR_ROUNDED
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.model.opened_model import OpenedModel, Pass


class SublayerDraft(Source):
    """The sublayers that a resolved skip config keeps, and the head that drafts read.

    Raises:
        ValueError: the skip config does not fit the model.
    """

    skip: SkipConfig

    def __init__(self, model: OpenedModel, skip: SkipConfig) -> None:
        self.model, self.skip, self.blocks = model, skip, model.weights.blocks(skip)
        self.prefix = model.weights.shared_prefix(skip)
        # Rounding to 8 bits alone hardly changes the model's output.
        rounded = skip.low is not None and skip.low.bits == 8 and not skip.skipped()
        self.prior = PRIOR_ROUNDED if rounded else PRIOR

    name = "sublayers"

    @property
    def key(self) -> Hashable:
        return key_of(self.skip)

    def step_bytes(self) -> Sequence[float]:
        return self.model.weights.read_by(self.skip)

    def key_bytes(self) -> Mapping[int | None, float]:
        layers = (index // 2 for index in self.skip.kept() if index % 2 == 0)
        return self.model.key_bytes(layers, self.skip.window)

    def open(self, batch: Batch) -> State:
        return _SublayerState(batch, self)


def key_of(skip: SkipConfig) -> str:
    """A key for the drafts of one model."""
    values = skip.to_dict()
    chosen = ("attention", "mlp", "low", "trained", "experts", "window")
    return json.dumps({k: values[k] for k in chosen if k in values})


class _SublayerState(State):
    def __init__(self, batch: Batch, source: SublayerDraft) -> None:
        super().__init__(batch)
        self.prefix, self.blocks = source.prefix, source.blocks

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        return self.batch.model.backend.run(hidden, step, self.blocks)[:, 0]
