"""The interface of backends: ways to compute a model's sublayers and head.

Each has its own file: `modules.py`, `fused.py`, `native_passes.py`, `captured.py`.
Shapes: B rows, T tokens of a pass, H hidden width, S slots, R rotary width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from layerskip.families.architecture import Architecture, ModelFacts, device_of
from layerskip.families.family import LayerParts, part_named
from layerskip.library import cache_name
from layerskip.weights.rounded import Function, Linear, TrimmedHead, copies_of, linears, plain

Tables = dict[str, tuple[Tensor, Tensor]]
"""By layer type, (cos, sin) of every position in a call, each (1, S, R)."""


class Rotary(Protocol):
    """Rotary tables of a call, in the layout that a backend needs."""

    def at(self, cache: Any) -> Mapping[str, Any]:
        """By layer type, the angles at the positions for which the cache is placed."""
        ...


Step = Any
"""An `opened_model.Pass`, with the cache and the rotary tables that a backend needs."""

Block = Callable[[Tensor, Any], Tensor]
"""A sublayer or head: maps hidden states (B, T, H) and the `Step` to hidden states or logits."""

Draw = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Variant:
    """How a draft runs a sublayer. Equal variants of a sublayer share one block.

    Attributes:
        bits: 8 or 4 bits for its weights (see `rounded`); None: exact.
        experts: number of a mixture's experts per token; None: as many as in the model.
        window: number of slots that an attention sees (`SkipConfig.window`); None: the model's.
        draft: whether a recurrent layer runs for a draft, whose states are kept apart.
    """

    bits: int | None = None
    experts: int | None = None
    window: int | None = None
    draft: bool = False


EXACT = Variant()
"""A sublayer exactly as the model runs it."""


class Backend(ABC):
    """One way to compute a model: the blocks of a pass, and its head.

    Attributes:
        blocks: the model's 2L sublayers, or its decoder as the only one.
        bool_masks: whether attention masks are bool, not additive.
        packed: whether rounded weights have the layout that native products read.
        trims: whether layers with a sliding window need not keep every slot (see `RowCache`).
        long_lived: set by a caller that will make many passes, so that moving weights to where they
            are read faster is worthwhile.
        zeros: makes the buffers of caches, as `Pages.zeros`; None: each uses pages of its own.
        ahead: whether a pass may begin before the host has read its tokens.
        drawn: the native call that draws tokens, or None. From logits (N, V), the numbers of a
            `laws.Warp` and the starts of N noise streams (or none), it returns the token with the
            largest score plus noise, (N,), -1 for none; its negative margin over the second-best,
            (N,); and the second-best token, (N,), -1 for none.
    """

    name: str
    bool_masks = False
    packed = False
    trims = True
    long_lived = False
    ahead = False
    drawn: Draw | None = None
    zeros: Callable[..., Tensor] | None = None

    def __init__(self, model: Any) -> None:
        self.model = model
        self.copies = copies_of(model.model)

    @cached_property
    def blocks(self) -> Sequence[Block]:
        return tuple(map(self.sublayer, range(self.model.num_sublayers)))

    @abstractmethod
    def sublayer(self, number: int, variant: Variant | None = EXACT) -> Block:
        """Return a block of the model, as the model or a draft runs it.

        Args:
            variant: None for what follows an MLP that a draft skips (see `LayerParts.tail`).

        Raises:
            ValueError: its weights could only be rounded by changing the model's modules, or it has
                fewer experts than requested.
        """

    def linear(self, variant: Variant) -> Linear:
        """Return what makes linear layers of exact or rounded weights."""
        return plain if variant.bits is None else partial(self.product, variant=variant)

    def product(self, weight: Tensor, bias: Tensor | None, variant: Variant) -> Function:
        """A linear layer with rounded weights: inputs (..., C) to (..., R)."""
        assert variant.bits is not None
        return self.copies.of(weight, variant.bits, packed=self.packed).linear(bias)

    @abstractmethod
    def head(self, rows: TrimmedHead | None = None, bits: int | None = None) -> Block:
        """Final norm, head and softcap: (B, T, H) to raw logits (B, T, V).

        The logits are on the embedding's device. The block ignores its step.

        Args:
            rows: the only rows of the head to compute; other logits are -inf.
            bits: bits to which the head is rounded; None: exact.
        """

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """The hidden states before the first block, (B, T, H), of token ids (B, T)."""

    @abstractmethod
    def inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        """The layers' own inputs (Gemma 4), from tokens (B, T) and their `embed`, (B, T, L, P)."""

    @abstractmethod
    def rotary(self, slots: int, total: int, first: int = 0) -> Rotary:
        """Rotary tables for `slots` positions; those after `total - 1` repeat the last real one.

        Args:
            first: the position of slot 0.
        """

    def capacity(self, slots: int) -> int:
        """The number of slots and angles to allocate if `slots` are requested."""
        return slots

    def disturbed(self) -> AbstractContextManager[None]:
        return nullcontext()  # see `OpenedModel.disturbed`

    def run(self, hidden: Tensor, step: Step, blocks: Sequence[Block]) -> Tensor:
        """Pass hidden states (B, T, H) through blocks, in order."""
        for block in blocks:
            hidden = block(hidden, step)
        return hidden


class LayerBackend(Backend):
    """A way to compute the sublayers of a model whose layers are known, and of layers like them."""

    model: Architecture

    def sublayer(self, number: int, variant: Variant | None = EXACT) -> Block:
        """Return a sublayer with norms, residual add and tail."""
        if variant is None:
            return self.tail(self.model.parts[number // 2])
        part = self.model.parts[number // 2].narrowed(variant.window)
        if part.recurrent is not None and not number % 2:
            return self.recurrent(part, variant)
        return self.mlp(part, variant) if number % 2 else self.attention(part, variant)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.family.embed(self.model.decoder, self._embedded_as(tokens))

    def inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        if not self.model.inputs_width:
            return None
        rows = self.model.decoder.embed_tokens_per_layer(self._embedded_as(tokens))  # (B, T, L P)
        return self.layer_inputs(hidden, rows.unflatten(-1, (self.model.num_layers, -1)))

    def _embedded_as(self, tokens: Tensor) -> Tensor:
        """Replace placeholders by the token whose embedding they have."""
        model = self.model
        if not model.placeholders:
            return tokens
        empty = torch.isin(tokens, torch.tensor(model.placeholders, device=tokens.device))
        return tokens.masked_fill(empty, model.blank)

    def rotary(self, slots: int, total: int, first: int = 0) -> Rotary:
        model, slots = self.model, self.capacity(slots)
        positions = torch.arange(first, first + slots, device=model.device)
        positions = positions.clamp_(max=total - 1)[None]  # (1, S)
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        tables: Tables = {}
        for kind, (cos, sin) in model.angles(like, positions).items():
            wide = torch.promote_types(cos.dtype, model.dtype)  # OLMo's stay float32
            cos, sin = cos.to(wide), sin.to(wide)  # (1, S, R) each
            still = kind == "nope"
            tables[kind] = (torch.ones_like(cos), torch.zeros_like(sin)) if still else (cos, sin)
        return self.rotary_of(tables)

    def recurrent(self, part: LayerParts, variant: Variant) -> Block:
        """Make the recurrent sublayer of a layer: the library's module, with kept states."""
        module = rounded(self, part.recurrent, variant, f"layer {part.number}")
        before, add, name = self.norm_of(part.before), residual_add(part, None), cache_name(module)
        device = device_of(part.before) if self.model.spread else None
        assert before is not None
        assert name is not None

        def mix(x: Tensor, past: Any) -> Tensor:
            return module(hidden_states=x, **{name: past})  # type: ignore[no-any-return]

        def block(hidden: Tensor, step: Step) -> Tensor:
            if device is not None:
                hidden = hidden.to(device)
            cache, number = step.cache, part.number
            return add(hidden, cache.run_layer(number, before(hidden), mix, draft=variant.draft))

        return block

    @abstractmethod
    def attention(self, part: LayerParts, variant: Variant) -> Block:
        """Make the attention sublayer of one of the model's layers, or of one built like them."""

    @abstractmethod
    def mlp(self, part: LayerParts, variant: Variant) -> Block:
        """Make the MLP sublayer of such a layer, with its tail."""

    @abstractmethod
    def norm_of(self, module: Any) -> Function | None:
        """Return a norm as a function, or None for None."""

    @abstractmethod
    def linear_of(self, module: Any) -> Function: ...

    @abstractmethod
    def activation_of(self, module: Any) -> Function: ...

    def mlp_block(
        self, part: LayerParts, run: Function, mixed: Function | None = None, gate: Any = None
    ) -> Block:
        """Make the MLP sublayer of a layer, with its tail.

        Args:
            run: the dense MLP, or the experts if they replace it.
            mixed: the experts in parallel with a dense MLP, or None.
            gate: `Mixture.shared_gate`, for the output of that MLP.
        """
        before, add = self.norm_of(part.pre), residual_add(part, self.norm_of(part.post))
        mixture, tail = part.mixture, self.tail(part) if part.tail else None
        after_dense = None if mixture is None else self.norm_of(mixture.dense)
        opened = None if gate is None else self.linear_of(gate)
        device = device_of(part.pre or part.post) if self.model.spread else None

        def block(hidden: Tensor, step: Step) -> Tensor:
            if device is not None:
                hidden = hidden.to(device)
            inputs = hidden if before is None else before(hidden)
            out = run(inputs)  # (B, T, H)
            if opened is not None:
                out = torch.sigmoid(opened(inputs)) * out
            if after_dense is not None:
                inputs, out = hidden, after_dense(out)
            if mixed is not None:
                out = out + mixed(inputs)
            hidden = add(hidden, out)  # (B, T, H)
            return hidden if tail is None else tail(hidden, step)

        return block

    def tail(self, part: LayerParts) -> Block:
        """Return what follows a layer's MLP: its own input, if it has one, and its scalar.

        Its linear layers stay exact in drafts, since they are small.
        """
        layer, number, scalar = part.module, part.number, part.module.layer_scalar
        if part_named(layer, "per_layer_input_gate") is None:
            return lambda hidden, _: hidden * scalar.to(hidden.device)
        gate = self.linear_of(layer.per_layer_input_gate)
        project = self.linear_of(layer.per_layer_projection)
        norm = self.norm_of(layer.post_per_layer_input_norm)
        activate = self.activation_of(layer.act_fn)

        def block(hidden: Tensor, step: Step) -> Tensor:
            assert step.inputs is not None
            assert norm is not None
            added = step.inputs[:, :, number].to(hidden.device)  # (B, T, P)
            out: Tensor = hidden + norm(project(activate(gate(hidden)) * added))  # (B, T, H)
            out = out * scalar.to(hidden.device)
            return out

        return block

    @abstractmethod
    def layer_inputs(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """`inputs`, (B, T, L, P), from embedded tokens (B, T, H).

        `rows` contains the embeddings of their ids for every layer, (B, T, L, P).
        """

    @abstractmethod
    def rotary_of(self, tables: Tables) -> Rotary:
        """Rotary tables in the layout of this backend."""


def composed(*functions: Callable[[Tensor], Tensor] | None) -> Block:
    """Make a block that applies functions one after the other, leaving out None."""
    chain = tuple(function for function in functions if function is not None)

    def block(hidden: Tensor, _: Step | None) -> Tensor:
        for function in chain:
            hidden = function(hidden)
        return hidden

    return block


def residual_add(part: LayerParts, after: Function | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The residual add of a sublayer, including the norm after it: (B, T, H) both."""
    residual = part.residual
    if residual != 1:
        return lambda hidden, out: hidden + (out if after is None else after(out)) * residual
    return torch.add if after is None else lambda hidden, out: hidden + after(out)


def logit_transform(model: ModelFacts) -> Callable[[Tensor], Tensor] | None:
    """The function between an unembedding and the logits, or None."""
    cap, divisor, factor = model.softcap, model.logits_divisor, model.logits_factor
    if cap is None and divisor == factor == 1:
        return None

    # Order of operations and dtype as in the library.
    def transform(logits: Tensor) -> Tensor:
        logits = logits if divisor == 1 else logits / divisor
        logits = logits if factor == 1 else logits * factor
        return logits if cap is None else (logits / cap).tanh() * cap

    return transform


def rounded(backend: Backend, module: Any, variant: Variant, name: str) -> Any:
    """A module with its linear layers rounded, if the variant says so; `name` is for errors."""
    if variant.bits is None:
        return module
    return with_products(module, lambda x: backend.product(x.weight, x.bias, variant), name)


def with_products(module: Any, linear: Callable[[nn.Linear], Function], name: str) -> Any:
    """A shallow copy of a module whose linear layers use other products.

    Replacing them in the module itself would change what other threads compute.
    """
    chosen = {id(linear) for linear in linears(module)}

    def copied(each: Any, path: str) -> Any:
        if each is None:  # a part that a module lacks
            return None
        low = id(each) in chosen
        parts = {key: copied(part, f"{path}.{key}") for key, part in each._modules.items()}
        if not low and all(part is parts[key] for key, part in each._modules.items()):
            return each
        if "forward" in vars(each):
            raise ValueError(
                f"low precision cannot serve this model: {path} has a custom forward, which "
                "accelerate or a patch has put there; leave low precision out"
            )
        made = copy(each)
        made._modules = parts
        if low:
            made.forward = linear(each)
        return made

    return copied(module, name)
