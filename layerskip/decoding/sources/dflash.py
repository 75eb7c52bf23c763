"""The source that drafts whole blocks with a DFlash drafter (see `layerskip.model.block_drafter`).

It reads the target's states at several depths for accepted tokens only, so rejected drafts leave
nothing behind. The first step of a round drafts the block; the others return what it said.
Shapes: R rows of a pass, T tokens, K tokens of a block, N depths, H hidden width of the target,
W of the drafter, D tokens that it can draft, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.backends.base import logit_transform
from layerskip.cache.library_cache import LibraryCache
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.decoding.sources.eagle import outputs_of, taps_misfit
from layerskip.decoding.sources.following import Following, in_chunks
from layerskip.decoding.sources.official import target_mismatch
from layerskip.families.architecture import read_bytes
from layerskip.model.block_drafter import BlockDrafter
from layerskip.model.opened_model import OpenedModel, Pass
from layerskip.weights.draft_head import spread


class DFlash(Source):
    """A drafter that others trained for a target.

    Args:
        tokens: the only tokens to draft; None: all that it can.

    Raises:
        ValueError: it belongs to another model, or its dtype or device differs.
    """

    name = "dflash"

    def __init__(
        self, target: OpenedModel, module: BlockDrafter, tokens: Iterable[int] | None = None
    ) -> None:
        if reason := _misfit(target, module):
            raise ValueError(
                f"the DFlash drafter cannot draft for this model: {reason}; give one made for it"
            )
        self.model, self.module = target, module
        self.weight, self.tokens = outputs_of(target, module, tokens)  # (D, W), (D,) or None
        self.finish = logit_transform(target)
        self.taps = [2 * depth for depth in module.depths]
        self.longest = self.per_step = module.block - module.first

    @property
    def words(self) -> str:
        path = self.module.name_or_path
        return f"a DFlash drafter of {self.longest} tokens at once, {path}".removesuffix(", ")

    @property
    def key(self) -> Hashable:
        return (weakref.ref(self.module), self.model.dtype, len(self.weight))

    def open(self, batch: Batch) -> State:
        return _BlockState(batch, self)

    def step_bytes(self) -> Sequence[float]:
        return [float(read_bytes(self.module.network, None)), float(self.weight.nbytes)]

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
        raw = F.linear(states, self.weight)  # (R, longest, D)
        raw = raw if self.finish is None else self.finish(raw)
        return raw if self.tokens is None else spread(raw, self.tokens, self.model.vocabulary)


class _BlockState(Following):
    everywhere = True

    def __init__(self, batch: Batch, source: DFlash) -> None:
        super().__init__(batch)
        self.source, self.taps, self.longest = source, source.taps, source.longest
        layers = len(source.module.network.layers)
        self.cache = LibraryCache(len(batch.seats), batch.slots, (None,) * layers)
        self.caches = [self.cache]
        self.raw: Tensor  # of the round's block, (R, longest, V)

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        if not offset:
            self._catch_up()
            self.raw = self.source.logits(tokens, self.places(), self.cache)
        # A round's last step may follow the last draft.
        return self.raw[:, min(offset, self.raw.shape[1] - 1)]

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
        in_chunks(batch.model, places, missing, run)
        for row, end in zip(batch.rows, ends, strict=True):
            self.seen[row] = end


def _misfit(target: OpenedModel, module: BlockDrafter) -> str | None:
    """Why a drafter cannot draft for a model, or None if it can."""
    if reason := taps_misfit(target, module, module.depths):
        return reason
    width, layers = target.config.hidden_size, target.num_layers
    pairs = [
        ("hidden states of {} numbers", module.target_width, width),
        ("{} tokens", module.vocabulary or target.vocabulary, target.vocabulary),
        ("{} layers", module.num_layers or layers, layers),
    ]
    if module.embed_tokens is None or module.lm_head is None:
        pairs.append(("embeddings of {} numbers", module.shape.hidden_size, width))
    if reason := target_mismatch(pairs):
        return reason
    if not 0 <= module.mask < target.vocabulary:
        return f"its mask token is {module.mask}, the model has {target.vocabulary} tokens"
    return None
