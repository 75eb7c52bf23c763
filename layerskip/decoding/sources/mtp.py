"""The source that drafts with the head of the model's own checkpoint (see `layerskip.model.mtp`).

A step reads a token and the state of the token before: the model's own for accepted tokens, the
head's last one for those that it drafts.
Letters: R rows of a pass, T tokens, H hidden width, V vocabulary, S slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.decoding.sources.following import Following, in_chunks
from layerskip.model.architecture import read_bytes
from layerskip.model.cache import additive
from layerskip.model.library_cache import LibraryCache
from layerskip.model.mtp import Head
from layerskip.model.sublayers import Pass
from layerskip.model.whole import Whole


class CheckpointHead(Source):
    """A head for the token after the next, of the model's own checkpoint.

    Args:
        head: with its weights.
    """

    def __init__(self, model: Whole, head: Head) -> None:
        self.model, self.module = model, head
        self.head = model.weights.head()
        cache = LibraryCache(1, 1, (None,))
        cache.place([0], 1)
        nothing = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        with torch.no_grad():
            embedded = model.model.get_input_embeddings()(nothing)
            self.compute(nothing, torch.zeros_like(embedded), cache)
        buffers = (*cache.keys.values(), *cache.values.values())
        self._slot_bytes = sum(each.nbytes / each.shape[2] for each in buffers)

    name = "mtp"
    words = "the checkpoint's own head for the token after the next"

    @property
    def key(self) -> Hashable:
        return weakref.ref(self.module)

    def open(self, batch: Batch) -> State:
        return _State(batch, self)

    def step_bytes(self) -> Sequence[float]:
        return [float(read_bytes(self.module, None)), self.model.weights.head_bytes()]

    def own_bytes(self) -> float:
        return self._slot_bytes

    def compute(self, tokens: Tensor, states: Tensor, cache: LibraryCache) -> Tensor:
        """The head's states (R, T, H), of tokens (R, T) and of states (R, T, H) before them.

        The cache's pass holds these tokens. A text's first token has no state before it: nothing
        sees it.
        """
        model = self.model
        embedded = model.model.get_input_embeddings()(tokens)  # (R, T, H)
        places = cache.placed(model.device)  # (R, T)
        slots = torch.arange(cache.end, device=model.device)  # (S,)
        seen = cache.seen(None, model.device)  # (R or 1, 1, T, S)
        seen = seen & ((slots > 0) | (places == 0)[:, None, :, None])
        places = places.clamp(max=model.max_positions - 1)  # of pads
        out: Tensor = self.module(
            embedded,
            states,
            attention_mask=additive(seen, model.dtype) if model.eager else seen,
            position_embeddings=model.base.rotary_emb(embedded, places),
            position_ids=places,
            past_key_values=cache.for_library(),
        )
        return out


class _State(Following):
    def __init__(self, batch: Batch, source: CheckpointHead) -> None:
        super().__init__(batch)
        self.source = source
        self.tap: int = batch.model.num_sublayers
        self.cache = LibraryCache(len(batch.prompts), batch.slots, (None,))
        self.caches = [self.cache]
        self.carried: Tensor  # its state of the token that was fed last, (R, 1, H)

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        source, batch = self.source, self.batch
        if offset:
            places = [batch.lengths[row] + offset for row in batch.rows]
            self.cache.place(places, 1, rows=range(len(places)))
            self.carried = source.compute(tokens[:, None], self.carried, self.cache)
        else:
            self.carried = self._catch_up()[:, None]
        return source.head(self.carried.transpose(0, 1), None)[0]

    def _catch_up(self) -> Tensor:
        """Feed all tokens that were not seen yet; states of the last ones, (R, H)."""
        batch = self.batch
        starts, missing, tokens = self.latest(self.missing())

        def run(chunk: Tensor, rows: range, firsts: list[int]) -> Tensor:
            places = [starts[row] + first for row, first in zip(rows, firsts, strict=True)]
            states = batch.tapped(self.tap, places, chunk.shape[1], before=1, rows=rows)
            self.cache.place(places, chunk.shape[1], rows=rows)
            return self.source.compute(chunk, states, self.cache)

        return in_chunks(batch.model, tokens, missing, run)

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        # its own drafts were fed with its own states, not with the model's
        super().commit(row, emitted, min(steps, 1))
