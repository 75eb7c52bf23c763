"""Sources that skip configs describe: the model's own sublayers, and trained modules.

Sublayers may be left out or rounded. A trained block after an early exit reads the target's states
there, which are exact for every accepted token. Other modules read its last states, which do not
exist for the tokens that they draft.
Shapes: R rows of a pass, K heads, H hidden width, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from layerskip.backends.base import Block
from layerskip.config.registry import named
from layerskip.config.skips import SkipConfig
from layerskip.decoding.acceptance import PRIOR, PRIOR_MODULE, PRIOR_ROUNDED
from layerskip.decoding.sources.base import AtOnce, Batch, Source, State
from layerskip.families.architecture import read_bytes
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


BEST = 8  # candidates per position, since the first choice is wrong more often than not


class TrainedDraft(Source):
    """The trained module that a resolved skip config names.

    Attributes:
        step_blocks: the blocks that a step runs in the module's cache: its layer, if any, and the
            draft's head.

    Raises:
        ValueError: it does not belong to this model, or does not fit its skip config.
    """

    prior = PRIOR_MODULE
    prefix = 0
    skip: SkipConfig

    def __init__(self, model: OpenedModel, skip: SkipConfig) -> None:
        self.model, self.skip = model, skip
        block, sublayers, _ = model.weights.module(skip)
        self.block: Any = block
        self.step_blocks: list[Block] = [*sublayers, model.weights.head(skip)]
        self.max_positions, self.longest = model.max_positions, block.count
        self.per_step = block.count or 1
        assert skip.trained is not None
        self._state: Any = named("state", skip.trained.kind)
        if block.behind_exit:
            self.prefix = skip.shared_prefix()
            if len(skip.kept()) > self.prefix:
                raise ValueError(
                    "an exit block follows an early exit: its skip config must have an "
                    "exit_layer, and leave out or round nothing before it"
                )

    name = "sublayers"

    @property
    def key(self) -> Hashable:
        return key_of(self.skip)

    def open(self, batch: Batch) -> State:
        state: State = self._state(batch, self)
        return state

    def step_bytes(self) -> Sequence[float]:
        module = float(read_bytes(self.block, self.skip.module_bits))
        before = self.model.weight_bytes()["sublayers"][: self.prefix]
        return [*before, module, self.model.weights.head_bytes(self.skip)]

    def key_bytes(self) -> Mapping[int | None, float]:
        nbytes = self.model.key_bytes(range(self.prefix // 2))
        if each := self.own_bytes():
            window = self.block.layer.window
            nbytes[window] = nbytes.get(window, 0.0) + each
        return nbytes

    def own_bytes(self) -> float:
        layer = getattr(self.block, "layer", None)
        heads = None if layer is None else layer.parts.heads
        return 0.0 if heads is None else 2.0 * math.prod(heads) * self.model.dtype.itemsize


class HeadsState(AtOnce):
    """Drafts all tokens in one pass, since no head depends on drafted tokens."""

    def __init__(self, batch: Batch, draft: TrainedDraft) -> None:
        super().__init__(batch)
        self.best, self.block = BEST, draft.block
        (self.project,) = draft.step_blocks
        self.tap: int = batch.model.num_sublayers

    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        features = self.batch.tapped(self.tap, self.places(), 1, before=1)  # (R, 1, H)
        return self.project(self.block(features, hidden)[:, 0], None)
