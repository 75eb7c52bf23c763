"""A `transformers` decoder as 2L residual sublayers.

Sublayer 2i is the attention of layer i, sublayer 2i+1 its MLP, each with its norms and residual
add. The model is not changed: a backend computes with its weights or calls its modules.
Shapes: B rows, T tokens of a pass, H hidden width, S slots, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from layerskip.backends import captured, native_passes
from layerskip.backends.base import Backend, Block, Rotary
from layerskip.backends.fused import Fused
from layerskip.backends.modules import Modules
from layerskip.cache.library_cache import EncoderStates, LibraryCache
from layerskip.cache.rows import RowCache, additive
from layerskip.costs.speculation import keys_read
from layerskip.families import plain
from layerskip.families.architecture import Architecture
from layerskip.model.draft_weights import DraftWeights
from layerskip.model.picture_features import Pictures, seen_ahead
from layerskip.native import extension
from layerskip.weights.stored import stored_weights

EXECUTIONS = ("auto", "modules", "fused", "native", "captured")
ASKED = "as asked for"
FEW = 2  # rows for which kernels of our own are faster than a GPU's library


class Pass:
    """The data that all sublayers of one forward pass share: the cache, angles and masks.

    Args:
        cache: placed for the pass.
        inputs: the layers' own inputs, (B, T, L, P), if they have any (`Sublayers.inputs`).
        blocks: by slot, the picture whose tokens see each other (see `Pictures`), (B, W).
    """

    def __init__(
        self,
        model: Sublayers,
        cache: RowCache,
        rotary: Rotary,
        inputs: Tensor | None = None,
        blocks: Tensor | None = None,
    ) -> None:
        self.model, self.cache, self.rotary, self.inputs = model, cache, rotary, inputs
        self.blocks = blocks
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    @cached_property
    def rope(self) -> Mapping[str, Any]:
        """By layer type, the angles of the pass."""
        return self.rotary.at(self.cache)

    def mask(self, window: int | None, sink: int = 0) -> Tensor | None:
        """The mask of layers with this window and sink, or None if they need none."""
        if (window, sink) not in self._masks:
            self._masks[window, sink] = self._mask(window, sink)
        return self._masks[window, sink]

    def _mask(self, window: int | None, sink: int) -> Tensor | None:
        model, cache, more = self.model, self.cache, None
        if self.blocks is not None and model.wrapper is not None:
            more = seen_ahead(model.wrapper, self.blocks, self.slots, cache.end, window)
        # The eager kernel always needs a mask; sdpa is causal without one.
        if more is None and not (model.eager and cache.count > 1) and not cache.needs_mask(window):
            return None
        seen = cache.seen(window, model.device, sink)  # (B or 1, 1, T, slots)
        if more is not None:
            seen = seen | more[..., cache.first(window, sink) :]
        # One mask for all layers: sdpa takes bool, whatever a layer's dtype.
        return seen if model.backend.bool_masks else additive(seen, model.dtype)

    @cached_property
    def cross(self) -> tuple[Tensor, Tensor, Any]:
        """An encoder's output for the rows, (B, E, H), its mask, (B, 1, 1, E), and the cache."""
        encoded = self.cache.encoded_of()  # type: ignore[attr-defined]
        mask = encoded.mask.bool()[:, None, None]
        mask = additive(mask, self.model.dtype) if self.model.eager else mask
        return encoded.states, mask, self.cache.for_library()  # type: ignore[attr-defined]

    @property
    def few(self) -> bool:
        """Whether tokens of few rows are decoded (see `captured`)."""
        return self.cache.prefilled and len(self.cache.firsts) <= FEW

    @cached_property
    def slots(self) -> Tensor:
        """The slots that the pass writes, (B, T)."""
        return self.cache.placed(self.model.device)


class Sublayers(Architecture):
    """A causal language model opened up into its sublayers.

    Args:
        model: a causal language model of a family in `families.FAMILIES`, or PEFT's wrapper of one.
        execution: "modules" calls the library's modules, "fused" takes the fused path for plain
            weights, "native" does the same in one call per pass on a CPU, "captured" replays it as
            CUDA graphs on a GPU (either falls back to the fused path with a warning if it is not
            available), "auto" takes the fastest one that supports the model as it is now.

    Attributes:
        execution: the one in use: modules, fused, native or captured.
        reason: why it is not a faster one; None if it is the fastest.
        blocks: the sublayers.
        head: final norm, head and softcap.
        encoded: an encoder's output for the texts of a batch, if the model has an encoder.
        read: token ids of the texts that an encoder has read for a batch, one row each, if any.
        drawn: draws tokens in one native call, or None (see `Backend`).
        weights: the weights that drafts compute with.

    Raises:
        UnsupportedModelError: names what is not supported, and what is.
        ValueError: "fused", "native" or "captured" is requested but the model's modules must be
            called; or the model is in training mode.
    """

    encoded: EncoderStates | None = None
    recurrent = False  # whether it has layers whose state cannot be rolled back
    read: Sequence[Tensor] = ()

    def __init__(self, model: nn.Module, execution: str = "auto") -> None:
        super().__init__(model)
        self._compute_with(*_backend(self, execution), DraftWeights)

    def _compute_with(
        self, backend: Backend, reason: str | None, weights: type[DraftWeights]
    ) -> None:
        self.backend, self.reason, self.execution = backend, reason, backend.name
        self.blocks, self.drawn = backend.blocks, backend.drawn
        self.head: Block = backend.head()
        self.weights = weights(self, backend, self.head)

    @property
    def exact(self) -> bool:
        """Whether a token's numbers are the same bit for bit, whatever tokens are verified with it.

        In other backends, library kernels may sum in another order for other pass sizes.
        """
        return self.execution == "native"

    @property
    def branches(self) -> bool:
        """Whether a pass may run a tree of tokens."""
        return not self.encoder

    def weak(self) -> Sublayers:
        """The same opened model, without keeping the model itself alive."""
        self._held = None
        return self

    def strong(self) -> Sublayers:
        """The same opened model, keeping the model itself alive."""
        other = copy(self)
        other._held = self.model
        return other

    def describe(self) -> str:
        """How passes are computed here and why not faster, in words."""
        words = self.execution
        if words == "native":
            vectors = torch.backends.cpu.get_cpu_capability()
            words += f" ({vectors}, {self.threads} thread{'s' if self.threads != 1 else ''})"
        return words if self.reason is None else f"{words}: {self.reason}"

    @property
    def threads(self) -> int | None:
        """The number of CPU threads that passes use, torch's own number; None on other devices.

        Passes of few tokens use fewer for a while if other processes need the cores (`disturbed`).
        """
        if self.device.type != "cpu":
            return None
        return native_passes.normal_threads() or torch.get_num_threads()

    @property
    def limited(self) -> bool:
        """Whether passes use fewer threads at the moment, inside a context of `disturbed`."""
        return native_passes.normal_threads() is not None

    def disturbed(self) -> AbstractContextManager[None]:
        """A context for a round: torch takes one thread there if other processes need the cores."""
        return self.backend.disturbed()

    def new_cache(self, rows: int, slots: int) -> RowCache:
        """An empty cache for a batch; in an encoder-decoder, for the first rows that it has read.

        Raises:
            ValueError: the model has no keys of its own, or an encoder-decoder has read nothing.
        """
        if self.encoder and self.encoded is None:
            raise ValueError(
                "an encoder-decoder reads a text before it decodes: call layerskip.generate or "
                "model.generate(..., custom_generate=), or encode the text (see Sublayers.encode)"
            )
        if self.encoded is not None:
            return LibraryCache(rows, slots, self.windows, self.encoded.of(slice(rows)))
        if not any(part.writes for part in self.parts):
            raise ValueError(
                "this model has no keys and values of its own: it drafts for another model; give "
                "that one as the model, and this one as its assistant"
            )
        slots = self.backend.capacity(slots)
        trims, zeros = self.backend.trims, self.backend.zeros
        return RowCache(rows, slots, self.windows, trims=trims, zeros=zeros)

    def encode(self, tokens: Tensor, mask: Tensor) -> EncoderStates:
        """Encode texts (B, E), padded where the mask (B, E) is 0."""
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        states = self.model.get_encoder()(input_ids=tokens, attention_mask=mask)[0]  # (B, E, H)
        return EncoderStates(states, mask, tokens)

    def reading(self, encoded: EncoderStates) -> Self:
        """The same model for a batch whose texts an encoder has read."""
        other = copy(self)
        other.encoded = encoded
        if encoded.tokens is not None:
            pairs = zip(encoded.tokens, encoded.mask.bool(), strict=True)
            other.read = [tokens[real] for tokens, real in pairs]
        return other

    def reading_of(self, target: Sublayers) -> Self:
        """The same model for the texts that another model's encoder has read.

        Raises:
            ValueError: those texts are not known as tokens.
        """
        encoded = target.encoded
        if encoded is None or encoded.tokens is None:
            raise ValueError(
                "an encoder-decoder can only draft for another one whose encoder was given tokens"
            )
        return self.reading(self.encode(encoded.tokens, encoded.mask))

    def cache_bytes(self, tokens: int) -> float:
        """Bytes of keys and values for a text of `tokens` tokens; 0 if unknown."""
        per_token = self.key_bytes(part.number for part in self.parts if part.writes)
        if not self.backend.trims:  # windows are masked
            per_token = {None: math.fsum(per_token.values())}
        return keys_read(per_token, tokens)

    def first_pass(self, tokens: Tensor) -> tuple[Tensor, Pass]:
        """Begin a pass over whole texts (B, T) with a new cache, like `feed`."""
        rows, count = tokens.shape
        cache = self.new_cache(rows, count)
        cache.place([0] * rows, count)
        return self.feed(tokens, cache, self.rotary(count, count))

    def feed(
        self, tokens: Tensor, cache: RowCache, rotary: Rotary, pictures: Pictures | None = None
    ) -> tuple[Tensor, Pass]:
        """Begin a pass: embed tokens (B, T) as hidden states (B, T, H), and make its `Pass`."""
        hidden, blocks = self.embed(tokens), None  # (B, T, H)
        if pictures is not None:
            slots = cache.placed(self.device)  # (B, T)
            hidden = pictures.over(hidden, slots)
            blocks = pictures.blocks_of(slots) if cache.count > 1 else None  # (B, W)
        return hidden, Pass(self, cache, rotary, self.inputs(tokens, hidden), blocks)

    def rotary(self, slots: int, total: int, first: int = 0) -> Rotary:
        """Rotary tables for `slots` positions (see `Backend.rotary`)."""
        return self.backend.rotary(slots, total, first)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids (B, T): the hidden states before sublayer 0, (B, T, H)."""
        return self.backend.embed(tokens)

    def inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        """The layers' own inputs (Gemma 4), from tokens (B, T) and their `embed`, (B, T, L, P)."""
        return self.backend.inputs(tokens, hidden)

    def run(self, hidden: Tensor, step: Pass, sublayers: Iterable[int]) -> Tensor:
        """Pass hidden states (B, T, H) through the given sublayers, in order."""
        return self.backend.run(hidden, step, [self.blocks[index] for index in sublayers])

    def finish(self, hidden: Tensor, step: Pass, sublayers: Iterable[int]) -> Tensor:
        """`run`, then `logits` of the result: (B, T, H) to (B, T, V)."""
        return self.backend.run(hidden, step, [*(self.blocks[i] for i in sublayers), self.head])

    def logits(self, hidden: Tensor, step: Pass | None = None) -> Tensor:
        """Final norm, head and softcap: (B, T, H) to raw logits (B, T, V).

        Give `step` if a pass verifies or decodes: all such passes use the same arithmetic.
        """
        return self.head(hidden, step)

    def trimmed(self, tokens: Sequence[int]) -> Sublayers:
        """The same opened model, with `DraftWeights.trimmed`."""
        weights = self.weights.trimmed(tokens)
        if weights is self.weights:
            return self
        other = copy(self)
        other.weights = weights
        return other


def _backend(model: Architecture, execution: str) -> tuple[Backend, str | None]:
    """The requested backend, or the best one for "auto", and why there is no faster one."""
    if execution not in EXECUTIONS:
        raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}, got {execution!r}")
    gpu = model.device.type == "cuda"
    if execution == "modules":
        return Modules(model), ASKED
    reason = plain.refusal(model)
    if reason is not None:
        if execution == "auto":
            return Modules(model), reason
        raise ValueError(
            f"execution {execution!r} cannot serve this model: {reason}; "
            "use execution='auto' or 'modules'"
        )
    stored = bool(stored_weights(model.model))
    if execution in ("fused", "captured") and stored:
        raise ValueError(
            f"execution {execution!r} cannot serve this model: its weights are read as their file "
            "stores them, by native passes; load it with packed=False, or use execution='auto'"
        )
    if execution == "fused":
        return Fused(model), ASKED
    if execution == "captured" or (execution == "auto" and gpu and not stored):
        reason = captured.refusal(model)
        if reason is None:
            return captured.Captured(model), None
        if execution == "captured":
            native_passes.warn_refusal(reason)
        return Fused(model), reason
    reason = native_passes.refusal(model)
    if reason is None:
        reason = extension.refusal()
    elif execution == "auto" and not stored:
        return Fused(model), reason
    if reason is None:
        return native_passes.Native(model), None
    native_passes.warn_refusal(reason)
    return Modules(model) if stored else Fused(model), reason
