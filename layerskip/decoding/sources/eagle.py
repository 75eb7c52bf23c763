"""The source that drafts with an EAGLE-3 head (see `layerskip.model.eagle_head`).

It reads the target's states at several depths for accepted tokens, and its own states for drafted
tokens.
Shapes: R rows of a pass, T tokens, H hidden width of the target, W of the head, N depths,
D tokens that it can draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.cache.library_cache import LibraryCache
from layerskip.decoding.sources.base import Batch, State
from layerskip.decoding.sources.mtp import HeadState, seen_by
from layerskip.decoding.sources.published import Published
from layerskip.families.architecture import read_bytes
from layerskip.model.eagle_head import Eagle
from layerskip.model.opened_model import OpenedModel


class EagleHead(Published):
    """Drafts with an EAGLE-3 head; arguments as for `Published`."""

    name, what = "eagle3", "an EAGLE-3 head"
    module: Eagle

    def __init__(self, target: OpenedModel, head: Eagle, *how: Any) -> None:
        super().__init__(target, head, *how)
        embedding = head.embed_tokens or target.model.get_input_embeddings()
        self.embeddings: Tensor = embedding.weight  # (V, W), without Gemma's scale

    def open(self, batch: Batch) -> State:
        return HeadState(batch, self, self.taps)

    def step_bytes(self) -> Sequence[float]:
        # `fc` is read once per round, and few rows of the embedding are read.
        return [float(read_bytes(self.module.layers, self.bits)), self.output_bytes]

    def own_bytes(self) -> float:
        layer: Any = self.module.layers[0]
        attention = layer.self_attn
        numbers = attention.k_proj.out_features + attention.v_proj.out_features
        return float(numbers * self.model.dtype.itemsize)

    def before(self, batch: Batch, places: Sequence[int], count: int, rows: range) -> Tensor:
        states = [batch.tapped(tap, places, count, before=1, rows=rows) for tap in self.taps]
        return self.module.join(torch.cat(states, -1))

    def compute(self, tokens: Tensor, states: Tensor, cache: LibraryCache) -> Tensor:
        """The head's states (R, T, W), from tokens (R, T) and the states (R, T, W) before them.

        The cache is placed for these tokens.
        """
        places, seen = seen_by(cache, self.model)
        out: Tensor = self.module(
            F.embedding(tokens, self.embeddings), states, places, seen, cache.for_library()
        )
        return out

    def logits(self, states: Tensor) -> Tensor:
        return self.spread(self.project(self.module.normed(states[:, 0])))  # (R, V)
