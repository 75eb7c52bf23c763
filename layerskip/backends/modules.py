"""The "modules" backend: sublayers as calls of the library's own modules.

The modules are never copied or patched. So quantised, adapted, hooked and offloaded modules work,
and so do models spread over devices: hidden states move to a layer's device before the residual,
and logits back to the embedding's.
Shapes: B rows, T tokens of a pass, H hidden width, S slots, R rotary width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerskip.backends import base as backend
from layerskip.backends.base import EXACT, Block, LayerBackend, Step, Tables, Variant, rounded
from layerskip.backends.norms import TableRotary
from layerskip.cache.rows import RowCache
from layerskip.families.architecture import Architecture, device_of
from layerskip.families.experts import (
    Mixture,
    mixture_function,
    rounded_products,
    smaller_router,
    sum_of_experts,
)
from layerskip.families.family import LayerParts
from layerskip.library import cache_name
from layerskip.weights.rounded import Function, TrimmedHead


class Modules(LayerBackend):
    """The library's modules."""

    name = "modules"

    def __init__(self, model: Architecture) -> None:
        super().__init__(model)
        self.bool_masks = not model.eager  # the library's eager attention adds its mask

    def norm_of(self, module: Any) -> Any:
        return module

    linear_of = activation_of = norm_of

    def layer_inputs(self, hidden: Tensor, rows: Tensor) -> Tensor:
        made: Tensor = self.model.decoder.project_per_layer_inputs(hidden, rows)  # (B, T, L, P)
        return made

    def head(self, rows: TrimmedHead | None = None, bits: int | None = None) -> Block:
        norm, whole = self.model.decoder.norm, self.model.unembedding
        variant, scatter = Variant(bits), None
        if rows is None:
            project = rounded(self, whole, variant, "lm_head")
        else:
            project, scatter = self.linear(variant)(rows.weight, rows.bias), rows.spread
        chain = [norm, project, backend.logit_transform(self.model), scatter]
        if self.model.spread:
            chain[0] = _on(device_of(norm), norm)
            chain[1] = _on(device_of(whole), project)
            chain.append(_on(self.model.device))
        return backend.composed(*chain)

    def rotary_of(self, tables: Tables) -> TableRotary:
        return TableRotary(tables)

    def mlp(self, part: LayerParts, variant: Variant) -> Block:
        mixture, name = part.mixture, f"layer {part.number} mlp"
        if mixture is None or (variant == EXACT and mixture.dense is None):
            # the model's own MLP module contains its experts
            return self.mlp_block(part, rounded(self, part.mlp, variant, name))
        mixed = self._mixed(mixture, variant)
        if part.dense is None:
            assert mixed is not None
            return self.mlp_block(part, mixed)
        run = rounded(self, part.dense, variant, name)
        return self.mlp_block(part, run, mixed, mixture.shared_gate)

    def _mixed(self, mixture: Mixture, variant: Variant) -> Function | None:
        """Experts beside a dense MLP, or as a draft runs them; None if no expert runs."""
        bits, top, weights = variant.bits, mixture.taken(variant.experts), mixture.weights
        if not top:
            return None
        router = mixture.router if top == mixture.top else smaller_router(mixture.router, top)
        experts_sum: Any = mixture.experts
        if bits is not None and weights:
            expand, shrink = (
                rounded_products(self.copies.of(each, bits), len(each)) for each in weights
            )
            experts_sum = sum_of_experts(expand, shrink, mixture.experts.act_fn)
        return mixture_function(router, experts_sum, mixture.before, mixture.after)

    def attention(self, part: LayerParts, variant: Variant) -> Block:
        attend = rounded(self, part.attention, variant, f"layer {part.number} self_attn")
        before, kind, window, sink = part.before, part.kind, part.window, part.sink
        add = backend.residual_add(part, part.after)
        device = device_of(before or part.after) if self.model.spread else None
        bool_masks, positions = self.bool_masks, self.model.family.positions
        shares = self.model.family.shares_keys
        name = cache_name(attend)
        assert name is not None

        def block(hidden: Tensor, step: Step) -> Tensor:
            mask, rope = step.mask(window, sink), step.rope[kind]
            if device is not None:
                hidden, rope = hidden.to(device), tuple(each.to(device) for each in rope)
            if mask is not None:  # an additive mask in the layer's own dtype
                mask = mask.to(hidden.device, torch.bool if bool_masks else hidden.dtype)
            # Blocks are trained without a cache.
            cache = None if step.cache is None else _Narrowed(step.cache, window, sink)
            more: dict[str, Any] = {name: cache}
            if positions:
                places = step.slots if cache is None else step.cache.positions(hidden.device)
                more["position_ids"] = places
            if shares:  # layers without their own keys and values read them here
                read = {}
                if not part.writes and cache is not None:
                    read[attend.layer_type] = cache.read(part.keys)
                more["shared_kv_states"] = read
            out: Tensor = attend(
                hidden_states=hidden if before is None else before(hidden),
                position_embeddings=rope,
                attention_mask=mask,
                **more,
            )[0]  # (B, T, H)
            return add(hidden, out)

        if not part.cross:
            return block
        cross, *norms = part.cross
        cross = rounded(self, cross, variant, f"layer {part.number} cross_attn")
        return _with_cross(block, cross, *norms)


def _with_cross(block: Block, attend: Any, before: Any, after: Any) -> Block:
    """Combine a self attention and the cross attention after it into one block."""
    name = cache_name(attend)
    assert name is not None

    def with_cross(hidden: Tensor, step: Step) -> Tensor:
        hidden = block(hidden, step)
        states, mask, cache = step.cross
        out: Tensor = attend(
            hidden_states=before(hidden),
            encoder_hidden_states=states,
            attention_mask=mask,
            **{name: cache},
        )[0]  # (B, T, H)
        out = hidden + after(out)  # (B, T, H)
        return out

    return with_cross


class _Narrowed(NamedTuple):
    """A cache for a layer that sees slots up to a window and a sink (see `cache.causal`)."""

    cache: RowCache
    window: int | None
    sink: int

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """`RowCache.update` with the library's signature."""
        self.cache.update(keys, values, layer_idx)
        return self.read(layer_idx)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.read(layer, self.window, self.sink)


def _on(device: torch.device, function: Function | None = None) -> Function:
    """Make a function that first moves its input to a device."""
    return lambda x: x.to(device) if function is None else function(x.to(device))
