"""Drafts with the head of the model's own checkpoint (see `layerskip.model.mtp_head`).

A step reads a token and the state of the token before it: the model's own state for accepted
tokens, the head's last one for drafted tokens.
Shapes: R rows of a pass, T tokens, H hidden width, V vocabulary, S slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.backends.base import composed
from layerskip.cache.library_cache import LibraryCache
from layerskip.cache.rows import additive
from layerskip.decoding.sources.base import Batch, Following, Source, State
from layerskip.families.architecture import read_bytes
from layerskip.model.mtp_head import Head
from layerskip.model.opened_model import OpenedModel, Pass
from layerskip.model.whole import Whole


class CheckpointHead(Source):
    """A checkpoint's own head that predicts the token after the next one.

    Args:
        head: the head with its weights.
    """

    def __init__(self, model: OpenedModel, head: Head) -> None:
        self.model, self.module = model, head
        # That of an opened model also applies the model's own norm.
        whole = isinstance(model, Whole)
        self.head = model.weights.head() if whole else composed(model.unembedding)

    name = "mtp"
    words = "the checkpoint's own head for the token after the next"

    @property
    def key(self) -> Hashable:
        return weakref.ref(self.module)

    def open(self, batch: Batch) -> State:
        return HeadState(batch, self, (self.model.num_sublayers,))

    def step_bytes(self) -> Sequence[float]:
        return [float(read_bytes(self.module, None)), self.model.weights.head_bytes()]

    def own_bytes(self) -> float:
        # Measured, because it is not known what the library's attention keeps.
        cache = LibraryCache(1, 1, (None,))
        cache.place([0], 1)
        nothing = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        with torch.no_grad():
            embedded = self.model.model.get_input_embeddings()(nothing)
            self.compute(nothing, torch.zeros_like(embedded), cache)
        buffers = (*cache.keys.values(), *cache.values.values())
        return sum(each.nbytes / each.shape[2] for each in buffers)

    def before(self, batch: Batch, places: Sequence[int], count: int, rows: range) -> Tensor:
        """The states (R, count, H) before each row's tokens from those places on."""
        states = batch.tapped(self.model.num_sublayers, places, count, before=1, rows=rows)
        return self.model.normed(states)

    def compute(self, tokens: Tensor, states: Tensor, cache: LibraryCache) -> Tensor:
        """The head's states (R, T, H), from tokens (R, T) and the states (R, T, H) before them.

        The cache is placed for these tokens.
        """
        model = self.model
        embedded = model.model.get_input_embeddings()(tokens)  # (R, T, H)
        places, seen = seen_by(cache, model)
        out: Tensor = self.module(
            embedded,
            states,
            attention_mask=additive(seen, model.dtype) if model.eager else seen,
            position_embeddings=model.decoder.rotary_emb(embedded, places),
            position_ids=places,
            cache=cache.for_library(),
        )
        return out

    def logits(self, states: Tensor) -> Tensor:
        """Raw logits (R, V) of its states (R, 1, H)."""
        return self.head(states.transpose(0, 1), None)[0]


def seen_by(cache: LibraryCache, model: OpenedModel) -> tuple[Tensor, Tensor]:
    """The positions of a pass's tokens, (R, T), and the slots that they see, (R or 1, 1, T, S).

    A text's first token has no state before it, so no other token sees it.
    """
    places = cache.placed(model.device)  # (R, T)
    slots = torch.arange(cache.end, device=model.device)  # (S,)
    seen = cache.seen(None, model.device)
    seen = seen & ((slots > 0) | (places == 0)[:, None, :, None])
    return places.clamp(max=model.max_positions - 1), seen  # the clamp affects pads only


class HeadState(Following):
    """Drafts with a head that reads a token and the state of the token before it.

    Args:
        source: like `CheckpointHead`, with `before`, `compute` and `logits`.
        taps: where the target's states are read.
    """

    def __init__(self, batch: Batch, source: Any, taps: Sequence[int]) -> None:
        cache = LibraryCache(len(batch.seats), batch.slots, (None,))
        super().__init__(batch, batch.model, cache)
        self.source, self.taps = source, taps
        self.carried: Tensor  # the head's state of the token fed last, (R, 1, H)

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        source = self.source
        if offset:
            self.cache.place(self.places(offset), 1)
            self.carried = source.compute(tokens[:, None], self.carried, self.cache)
        else:
            self.carried = self.catch_up()[:, None]
        raw: Tensor = source.logits(self.carried)
        return raw

    def feed(self, tokens: Tensor, places: Sequence[int], rows: range) -> Tensor:
        states = self.source.before(self.batch, places, tokens.shape[1], rows)
        self.cache.place(places, tokens.shape[1], rows=rows)
        out: Tensor = self.source.compute(tokens, states, self.cache)
        return out

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        # Its own drafts were fed with its own states, not with the model's.
        super().commit(row, emitted, min(steps, 1))
