"""Sources that draft with trained modules, which read hidden states of the target.

A block after an early exit reads the states there, which are exact for every accepted token. The
other modules read the target's last states, which do not exist for the tokens that they draft.
Shapes: R rows of a pass, K heads, H hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from layerskip.backends.base import Block
from layerskip.config.registry import named
from layerskip.config.skips import SkipConfig
from layerskip.decoding.acceptance import PRIOR_MODULE
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.decoding.sources.sublayer_draft import key_of
from layerskip.families.architecture import read_bytes
from layerskip.model.opened_model import OpenedModel, Pass

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


class HeadsState(State):
    """Drafts all tokens in one pass."""

    everywhere = True

    def __init__(self, batch: Batch, draft: TrainedDraft) -> None:
        super().__init__(batch)
        self.best, self.block, self.longest = BEST, draft.block, draft.longest
        (self.project,) = draft.step_blocks
        self.tap: int = batch.model.num_sublayers

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        if not offset:
            features = self.batch.tapped(self.tap, self.places(), 1, before=1)  # (R, 1, H)
            # No head depends on drafted tokens, so one pass is enough for all.
            self.raw = self.project(self.block(features, hidden)[:, 0], None)  # (R, K, V)
        # A round's last step may follow the last draft.
        return self.raw[:, min(offset, self.raw.shape[1] - 1)]
