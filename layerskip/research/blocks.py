"""Trained blocks from papers, and their drafts.

- `ExitBlock`: a decoder layer after an early exit (Kangaroo, Liu et al. 2024, arXiv 2404.18911);
- `Streams`: several tokens in one pass of a decoder layer over the model's last hidden state and
  the token that followed it, in which learned streams after the last token attend to the text (the
  n-stream attention of ProphetNet, Qi et al. 2020, arXiv 2001.04063).
In drafts, their states have keys and values of their own.
Shapes: B or R rows, T tokens, H hidden width, K streams, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from layerskip.backends.base import Backend, Block, Variant
from layerskip.backends.modules import Modules
from layerskip.cache.rows import RowCache, additive, causal
from layerskip.decoding.sources.base import AtOnce, Batch, Following
from layerskip.decoding.sources.sublayer_draft import BEST, TrainedDraft
from layerskip.families.architecture import Architecture
from layerskip.model.draft_modules import AHEAD, DraftModule, linear_of, scaled
from layerskip.model.opened_model import Pass
from layerskip.weights.stored import unpacked_copy


class _WholeTexts:
    """A pass over whole texts from their first token on, without a cache, for training.

    Args:
        hidden: the inputs, (B, T K, H).
        streams: K. Every token has its own place and K - 1 places ahead of it, the streams. These
            see the text up to the token and each other; other tokens do not see them.

    Attributes:
        rope, slots: as in `Step`.
    """

    cache = blocks = None

    def __init__(self, model: Architecture, hidden: Tensor, streams: int = 1) -> None:
        count, device = hidden.shape[1] // streams, hidden.device
        every = torch.arange(count * streams, device=device)
        tokens, ahead = every // streams, every % streams  # (T K,) each
        places = tokens + ahead
        self.slots = places[None]  # (1, T K)
        self.rope = model.angles(hidden, places[None])
        text = (ahead == 0) & (tokens <= tokens[:, None])  # (T K, T K)
        same = tokens == tokens[:, None]
        seen = {w: causal(places[None], places, w) & (text | same) for w in {*model.windows}}
        self._masks: dict[int | None, Tensor | None] = {
            window: additive(mask, hidden.dtype) if model.eager else mask  # (1, 1, T K, T K)
            for window, mask in seen.items()
        }
        if not model.eager and streams == 1:
            for window in self._masks:  # the kernel is causal, and faster, without a mask
                if window is None or window >= count:
                    self._masks[window] = None

    def mask(self, window: int | None, sink: int = 0) -> Tensor | None:
        """As in `Step`; trained layers have no sink."""
        return self._masks[window]


class Layer(nn.Module):
    """An additional decoder layer, built like one of a model's.

    It attends like the model's layers with full attention, if there are any, and begins with the
    weights of the last of these.
    """

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.architecture = model
        # A layer with its own keys and values, with full attention if there are such layers.
        writing = [part for part in model.parts if part.writes]
        full = [part for part in writing if part.kind == "full_attention"]
        part = (full or [each for each in writing if each.kind == writing[-1].kind])[-1]
        built: Any = unpacked_copy(part.module)
        for name, parameter in [*built.named_parameters()]:
            # Separate storage, since a tensor of the model may contain several weights.
            owner = built.get_submodule(name.rpartition(".")[0])
            value = nn.Parameter(parameter.detach().clone(), parameter.dtype.is_floating_point)
            setattr(owner, name.rpartition(".")[2], value)
        built.self_attn.layer_idx = 0  # in a separate cache
        self.built = built.eval()
        self.parts = model.parts_of(0, built, part.window, part.kind)
        self.kind, self.window = part.kind, part.window

    def sublayers(self, backend: Any, bits: int | None = None) -> tuple[Block, Block]:
        """Its attention and its MLP, as a backend computes them, rounded or exact."""
        variant = Variant(bits)
        return backend.attention(self.parts, variant), backend.mlp(self.parts, variant)

    def forward(self, hidden: Tensor, streams: int = 1) -> Tensor:
        """Map hidden states (B, T, H) of whole texts; tokens see those before them.

        With streams (B, T K, H), as for `_WholeTexts`.
        """
        step: Any = _WholeTexts(self.architecture, hidden, streams)
        for block in self._differentiable:
            hidden = block(hidden, step)
        return hidden

    @cached_property
    def _differentiable(self) -> tuple[Block, Block]:
        return self.sublayers(Modules(self.architecture))


class _LayerModule(DraftModule):
    """A module with a decoder layer.

    Attributes:
        layer: the decoder layer.
    """

    layer: Layer

    @classmethod
    def like(cls, model: Architecture, weights: dict[str, Tensor]) -> Self:
        return cls(model)

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.layer = Layer(model)

    def sublayers(self, backend: Backend, bits: int | None = None) -> tuple[Block, ...]:
        return self.layer.sublayers(backend, bits)


class ExitBlock(_LayerModule):
    """A decoder layer after an early exit, with its own keys and values."""

    behind_exit = True

    def forward(self, hidden: Tensor) -> Tensor:
        """For training: map states of whole texts at the exit, (B, T, H), to states for the head.

        Position t has seen tokens 0 to t and predicts token t + 1.
        """
        out: Tensor = self.layer(hidden)
        return out


class Streams(_LayerModule):
    """Predicts K tokens in one pass of a decoder layer, by K - 1 streams after the last token.

    The layer runs over a token and the last hidden state of the token before it. A stream gets the
    same inputs, combined with its own weights. Its position is further on. It sees the text and the
    streams before it, and predicts the token after its position. The outputs of the layer's
    attention and MLP begin as zeros, so that at first it passes the state on unchanged.

    Args:
        count: K.
    """

    def __init__(self, model: Architecture, count: int = AHEAD) -> None:
        super().__init__(model)
        self.fuse = linear_of(model, 2, 1)
        with torch.no_grad():
            self.fuse.weight.copy_(torch.eye(*self.fuse.weight.shape))
            for name, parameter in self.layer.built.named_parameters():
                if "o_proj" in name or "down_proj" in name:  # including those of experts
                    parameter.zero_()
        self.ahead = linear_of(model, 2, count - 1)
        nn.init.zeros_(self.ahead.weight)  # as copies they would pull the token's weights away
        self.count = count

    @classmethod
    def like(cls, model: Architecture, weights: dict[str, Tensor]) -> Self:
        further = len(weights.get("ahead.weight", ())) // model.config.hidden_size
        return cls(model, 1 + max(1, further))

    def join(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Combine both to the layer's inputs, in the scale of the features, (..., H) each."""
        pair, scale = scaled(features, embedded)
        out: Tensor = self.fuse(pair) * scale
        return out

    def streams(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The inputs of the streams ahead of a token, (..., H) each to (..., K - 1, H)."""
        pair, scale = scaled(features, embedded)
        each = self.ahead(pair).unflatten(-1, (-1, features.shape[-1]))  # (..., K - 1, H)
        out: Tensor = each * scale[..., None, :]
        return out

    def fed(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The inputs of a token and its streams, (..., H) each to (..., K, H)."""
        first = self.join(features, embedded)[..., None, :]  # (..., 1, H)
        return torch.cat([first, self.streams(features, embedded)], -2)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """For training on whole texts: (B, T, H) each to (B, T, K, H).

        Position t has token t: its embedding, and the last hidden state of token t - 1 (zeros
        before the first). Its stream k (from 0) predicts token t + 1 + k.
        """
        fed = self.fed(features, embedded)  # (B, T, K, H)
        out: Tensor = self.layer(fed.flatten(1, 2), self.count).view_as(fed)
        return out


TOGETHER = 64  # maximum number of tokens that streams see in the pass that drafts


class _LayerState(Following):
    """A module with a decoder layer, whose keys and values are in a separate cache."""

    def __init__(self, batch: Batch, draft: TrainedDraft) -> None:
        self.block = draft.block
        slots = batch.model.backend.capacity(batch.slots)
        cache = RowCache(len(batch.seats), slots, (self.block.layer.window,))
        super().__init__(batch, batch.model, cache)
        self.step_blocks = draft.step_blocks
        *self.blocks, self.head = draft.step_blocks

    @abstractmethod
    def inputs(self, starts: Sequence[int], tokens: Tensor, rows: range | None = None) -> Tensor:
        """The layer's inputs for tokens (R, T) from those places on, (R, T, H).

        Args:
            rows: rows of a pass, if only some are needed.
        """

    def feed(self, tokens: Tensor, places: Sequence[int], rows: range) -> Tensor:
        return self.advance(self.inputs(places, tokens, rows), places, self.blocks, rows)

    def advance(
        self,
        inputs: Tensor,
        starts: Sequence[int],
        blocks: Sequence[Block],
        rows: range | None = None,
    ) -> Tensor:
        """Run inputs (R, T, H) of tokens from those places on through blocks."""
        self.cache.place(starts, inputs.shape[1], rows=rows)
        step = Pass(self.model, self.cache, self.batch.rotary)
        return self.model.backend.run(inputs, step, blocks)


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


class StreamsState(AtOnce, _LayerState):
    """Drafts all tokens in one pass of its layer, from the target's last states."""

    def __init__(self, batch: Batch, draft: TrainedDraft) -> None:
        super().__init__(batch, draft)
        self.tap: int = batch.model.num_sublayers
        self.best = BEST
        # Places after the longest draft have no slots, and are not needed.
        self.count = min(self.block.count, batch.slots - batch.total - 1)

    def inputs(self, starts: Sequence[int], tokens: Tensor, rows: range | None = None) -> Tensor:
        features = self.batch.tapped(self.tap, starts, tokens.shape[1], before=1, rows=rows)
        inputs: Tensor = self.block.join(features, self.batch.model.embed(tokens))
        return inputs

    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        shortest = min(self.places(1))
        if not self.cache.prefilled or self.missing() > min(shortest, TOGETHER):
            self.catch_up()
        starts, _, tokens = self.latest(self.missing())
        features = self.batch.tapped(self.tap, self.places(), 1, before=1)  # (R, 1, H)
        ahead = self.block.streams(features, hidden)[:, 0, : self.count - 1]
        inputs = torch.cat([self.inputs(starts, tokens), ahead], 1)
        out = self.advance(inputs, starts, self.blocks)
        return self.head(out[:, -self.count :], None)

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        super().commit(row, emitted, min(steps, 1))  # what streams leave are not the tokens' keys
