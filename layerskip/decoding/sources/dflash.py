"""The source that drafts whole blocks with a DFlash drafter (see `layerskip.model.block_drafter`).

It reads the target's states at several depths for accepted tokens only, so rejected drafts leave
nothing behind. The first step of a round drafts the block; the others return what it said.
Shapes: R rows of a pass, T tokens, K tokens of a block, N depths, H hidden width of the target,
W of the drafter, D tokens that it can draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.backends.base import logit_transform
from layerskip.cache.library_cache import LibraryCache
from layerskip.decoding.sources.base import AtOnce, Batch, Following, State
from layerskip.decoding.sources.published import Published
from layerskip.families.architecture import read_bytes
from layerskip.model.block_drafter import BlockDrafter
from layerskip.model.opened_model import OpenedModel


class DFlash(Published):
    """Drafts with a DFlash drafter; arguments as for `Published`."""

    name = "dflash"
    module: BlockDrafter

    def __init__(self, target: OpenedModel, head: BlockDrafter, *how: Any) -> None:
        super().__init__(target, head, *how)
        self.finish = logit_transform(target)
        self.longest = self.per_step = head.block - head.first

    @property
    def what(self) -> str:
        return f"a DFlash drafter of {self.longest} tokens at once"

    def misfit(self, target: OpenedModel, head: BlockDrafter) -> str | None:
        reason = super().misfit(target, head)
        if reason is None and not 0 <= head.mask < target.vocabulary:
            return f"its mask token is {head.mask}, the model has {target.vocabulary} tokens"
        return reason

    def open(self, batch: Batch) -> State:
        return _BlockState(batch, self)

    def step_bytes(self) -> Sequence[float]:
        return [float(read_bytes(self.module.network, self.bits)), self.output_bytes]

    def key_bytes(self) -> Mapping[int | None, float]:
        nbytes: dict[int | None, float] = {}
        for layer in self.module.network.layers:
            attention = layer.self_attn
            numbers = attention.k_proj.out_features + attention.v_proj.out_features
            window = attention.sliding_window if attention.is_sliding else None
            nbytes[window] = nbytes.get(window, 0.0) + numbers * self.model.dtype.itemsize
        return nbytes

    def own_bytes(self) -> float:
        return sum(self.key_bytes().values())

    def logits(self, lasts: Tensor, lengths: Sequence[int], cache: LibraryCache) -> Tensor:
        """Raw logits of blocks, (R, longest, V), that begin with each row's last token (R,).

        Args:
            lengths: as for `BlockDrafter.forward`.
        """
        module = self.module
        tokens = F.pad(lasts[:, None], (0, module.block - 1), value=module.mask)  # (R, K)
        embedding = module.embed_tokens or self.model.model.get_input_embeddings()
        if module.scaled and not hasattr(embedding, "embed_norm"):
            embedded = embedding(tokens)  # (R, K, W)
        else:  # without Gemma's scale, or Muse Glimmer's norm
            embedded = F.embedding(tokens, embedding.weight)
        states = module(embedded, lengths, cache)[:, module.first :]  # (R, longest, W)
        raw = self.project(states)  # (R, longest, D)
        return self.spread(raw if self.finish is None else self.finish(raw))


class _BlockState(AtOnce, Following):
    cache: LibraryCache

    def __init__(self, batch: Batch, source: DFlash) -> None:
        layers = len(source.module.network.layers)
        cache = LibraryCache(len(batch.seats), batch.slots, (None,) * layers)
        super().__init__(batch, batch.model, cache)
        self.source, self.taps = source, source.taps

    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        self._catch_up()
        return self.source.logits(tokens, self.places(), self.cache)

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        """Nothing was fed that may be rejected."""

    def _catch_up(self) -> None:
        """Make keys of the states of all tokens before the last ones."""
        batch, ends = self.batch, self.places()
        missing = [range(self.seen[row], end) for row, end in zip(batch.rows, ends, strict=True)]

        def run(chunk: Tensor, rows: range, firsts: list[int]) -> Tensor:
            count = chunk.shape[1]
            states = [batch.tapped(tap, firsts, count, rows=rows) for tap in self.taps]
            self.cache.place(firsts, count, rows=rows)
            return self.source.module.remember(torch.cat(states, -1), self.cache)

        places = torch.zeros(len(ends), max(ends), dtype=torch.long)  # (R, T), which nothing reads
        self.model.in_chunks(places, missing, run)
        for row, end in zip(batch.rows, ends, strict=True):
            self.seen[row] = end
