"""Drafting with trained blocks, by states that have their own keys and values.

A block after an exit reads the target's states there, which are exact for every accepted token.
Streams read the target's last states, which do not exist for the tokens that they draft.
Shapes: R rows of a pass, T tokens, K streams, H hidden width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.backends.base import Block
from layerskip.cache.rows import RowCache
from layerskip.decoding.sources.base import Batch
from layerskip.decoding.sources.following import Following, in_chunks
from layerskip.decoding.sources.trained import BEST, TrainedDraft
from layerskip.model.opened_model import Pass

TOGETHER = 64  # maximum number of tokens that streams see in the pass that drafts


class _LayerState(Following):
    """A module with a decoder layer, whose keys and values are in a separate cache."""

    def __init__(self, batch: Batch, draft: TrainedDraft) -> None:
        super().__init__(batch)
        self.block = draft.block
        slots = batch.model.backend.capacity(batch.slots)
        self.cache = RowCache(len(batch.seats), slots, (self.block.layer.window,))
        self.caches = [self.cache]
        self.step_blocks = draft.step_blocks
        *self.blocks, self.head = draft.step_blocks

    @abstractmethod
    def inputs(self, starts: Sequence[int], tokens: Tensor, rows: range | None = None) -> Tensor:
        """The layer's inputs for tokens (R, T) from those places on, (R, T, H).

        Args:
            rows: rows of a pass, if only some are needed.
        """

    def catch_up(self) -> Tensor:
        """Feed all tokens not seen yet; returns the states after the last ones, (R, H)."""
        starts, missing, tokens = self.latest(self.missing())

        def run(chunk: Tensor, rows: range, firsts: list[int]) -> Tensor:
            places = [starts[row] + first for row, first in zip(rows, firsts, strict=True)]
            return self.advance(self.inputs(places, chunk, rows), places, self.blocks, rows)

        last = in_chunks(self.batch.model, tokens, missing, run)  # (R, H)
        self.cache.prefilled = True
        return last

    def advance(
        self,
        inputs: Tensor,
        starts: Sequence[int],
        blocks: Sequence[Block],
        rows: range | None = None,
    ) -> Tensor:
        """Run inputs (R, T, H) of tokens from those places on through blocks."""
        batch, rows = self.batch, rows or range(len(starts))
        self.cache.place(starts, inputs.shape[1], rows=rows)
        step = Pass(batch.model, self.cache, batch.rotary)
        return batch.model.backend.run(inputs, step, blocks)


class ExitState(_LayerState):
    """Drafts from the states after an exit."""

    def __init__(self, batch: Batch, draft: TrainedDraft) -> None:
        super().__init__(batch, draft)
        self.prefix = self.tap = draft.prefix

    def inputs(self, starts: Sequence[int], tokens: Tensor, rows: range | None = None) -> Tensor:
        return self.batch.tapped(self.prefix, starts, tokens.shape[1], rows=rows)

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        if not offset:
            if self.missing() > 1:
                return self.head(self.catch_up()[None], None)[0]
            self.see()
        return self.advance(hidden, self.places(offset), self.step_blocks)[:, 0]


class StreamsState(_LayerState):
    """Drafts all tokens in one pass of its layer, from the target's last states."""

    everywhere = True

    def __init__(self, batch: Batch, draft: TrainedDraft) -> None:
        super().__init__(batch, draft)
        self.tap: int = batch.model.num_sublayers
        self.best = BEST
        # Places after the longest draft have no slots, and are not needed.
        self.longest = self.count = min(self.block.count, batch.slots - batch.total - 1)

    def inputs(self, starts: Sequence[int], tokens: Tensor, rows: range | None = None) -> Tensor:
        features = self.batch.tapped(self.tap, starts, tokens.shape[1], before=1, rows=rows)
        inputs: Tensor = self.block.join(features, self.batch.model.embed(tokens))
        return inputs

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        if not offset:
            shortest = min(self.places(1))
            if not self.cache.prefilled or self.missing() > min(shortest, TOGETHER):
                self.catch_up()
            starts, _, tokens = self.latest(self.missing())
            features = self.batch.tapped(self.tap, self.places(), 1, before=1)  # (R, 1, H)
            ahead = self.block.streams(features, hidden)[:, 0, : self.count - 1]
            inputs = torch.cat([self.inputs(starts, tokens), ahead], 1)
            out = self.advance(inputs, starts, self.blocks)
            self.raw = self.head(out[:, -self.count :], None)  # (R, up to K, V)
        # A round's last step may follow the last draft.
        return self.raw[:, min(offset, self.count - 1)]

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        super().commit(row, emitted, min(steps, 1))  # what streams leave are not the tokens' keys
