"""The source that drafts with the model's own sublayers, some left out or in low precision.

Letters: B groups of chains, G chains of a group, P places of all texts, R rows of a pass, H hidden
width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.acceptance import PRIOR, PRIOR_ROUNDED
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.decoding.sources.steps import Steps, Texts
from layerskip.model.backend import Block
from layerskip.model.sublayers import Pass, Sublayers


class SublayerDraft(Source):
    """The sublayers that a resolved skip config keeps, and the head that drafts read."""

    skip: SkipConfig

    def __init__(self, model: Sublayers, skip: SkipConfig) -> None:
        self.model, self.skip = model, skip
        self.prefix = skip.shared_prefix()
        # rounding to 8 bits alone hardly changes what a model says
        rounded = skip.low is not None and skip.low.bits == 8 and not skip.skipped()
        self.prior = PRIOR_ROUNDED if rounded else PRIOR
        whole = self.prefix == len(skip.kept()) and self.prefix % 2 == 0
        if whole and skip.low is None and skip.trained is None and skip.experts is None:
            self.exit_layer = self.prefix // 2

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
        return _State(batch, self, self.model.weights.blocks(self.skip))

    def steps(self, texts: Texts, *, follow: bool) -> Steps:
        return SharedSteps(texts, self.prefix, self.model.weights.blocks(self.skip), follow=follow)


def key_of(skip: SkipConfig) -> str:
    """A key for the drafts of one model."""
    values = skip.to_dict()
    chosen = ("attention", "mlp", "low", "trained", "experts", "window")
    return json.dumps({k: values[k] for k in chosen if k in values})


class _State(State):
    def __init__(self, batch: Batch, source: SublayerDraft, blocks: Sequence[Block]) -> None:
        super().__init__(batch)
        self.prefix, self.blocks = source.prefix, blocks

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        return self.batch.model.backend.run(hidden, step, self.blocks)[:, 0]


class SharedSteps(Steps):
    """Steps through a prefix that is shared with the target, then through some blocks.

    Args:
        follow: whether chains follow their texts: then the texts' states replace those of the
            prefix's whole layers.
    """

    def __init__(self, texts: Texts, prefix: int, behind: Sequence[Block], *, follow: bool) -> None:
        super().__init__(texts, texts.model, texts.cache)
        # whole ones, whose states the texts have, up to the first whose keys others read
        layers = min([prefix // 2, *texts.model.read_layers])
        self.blocks = [*texts.model.blocks[2 * layers if follow else 0 : prefix], *behind]
        self.before: Tensor | None = None
        if follow and layers:
            states = [text.states[layers - 1] for text in texts.texts]
            self.before = torch.cat(states)  # (P, H)

    def compute(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        inputs = None
        if self.before is None or self.model.inputs_width:
            hidden = self.model.embed(tokens)  # (B, G, H)
            inputs = self.model.inputs(tokens, hidden)
        if self.before is not None:
            hidden = self.before[rows]
        # (B, G, H), or logits
        return self.run(hidden, self.blocks, inputs=inputs) if self.blocks else hidden
