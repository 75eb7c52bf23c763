"""The "modules" backend: sublayers as calls of the library's own modules.

The modules are never copied or patched. So quantised, adapted, hooked and offloaded modules work,
and models spread over devices: hidden states move to a layer's device before the residual, and
logits back to the embedding's.
Letters: B rows, T tokens of a pass, H hidden width, S slots, R rotary width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.model.backend import Backend, Block, Step, Tables, in_turn, softcap
from layerskip.model.cache import RowCache
from layerskip.model.draft_head import TrimmedHead
from layerskip.model.families import Architecture, device_of
from layerskip.model.healed import Deltas, healed
from layerskip.model.products import Function, plain
from layerskip.model.rounded import copies_of, linears

LinearOf = Callable[[nn.Linear], Function]
"""Makes the product that replaces a linear's."""


class ModuleRotary:
    """Cosines and sines of all positions of a call, by layer type, to be sliced."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def at(self, cache: RowCache) -> Tables:
        """The tables at the positions of the pass the cache is placed for, (B or 1, T, R)."""
        if cache.in_step:
            window = slice(cache.start, cache.end)
            return {k: (cos[:, window], sin[:, window]) for k, (cos, sin) in self.tables.items()}
        return {
            k: (cos[0][cache.placed(cos.device)], sin[0][cache.placed(sin.device)])
            for k, (cos, sin) in self.tables.items()
        }


class Modules(Backend):
    """The library's modules."""

    name = "modules"

    def __init__(self, model: Architecture) -> None:
        self.model = model
        self.bool_masks = not model.eager  # the library's eager attention adds its mask
        self.copies = copies_of(model.model)
        self.layers = list(model.each_layer())
        self.blocks = tuple(self.block(sublayer) for sublayer in range(model.num_sublayers))

    def low(self, sublayer: int, bits: int, deltas: Deltas | None = None) -> Block:
        return self.block(sublayer, self._low(bits, deltas))

    def _low(self, bits: int, deltas: Deltas | None = None) -> LinearOf:
        def linear(module: nn.Linear) -> Function:
            weight = module.weight
            product = self.copies.of(weight, bits, deltas=deltas).linear(module.bias)
            return healed(product, None if deltas is None else deltas.added_to(weight, bits))

        return linear

    def extra_layer(
        self, layer: Any, window: int | None, kind: str, bits: int | None = None
    ) -> tuple[Block, Block]:
        attend, mlp = layer.self_attn, layer.mlp
        if bits is not None:
            attend, mlp = (twin(each, self._low(bits), "a trained layer") for each in (attend, mlp))
        return self._attention(layer, attend, window, kind), self._mlp(layer, mlp)

    def product(self, module: nn.Linear, bits: int) -> Function:
        return self._low(bits)(module)

    def head(self, rows: TrimmedHead | None = None, bits: int | None = None) -> Block:
        norm, whole = self.model.decoder.norm, self.model.model.lm_head
        project, scatter = whole, None
        if rows is not None and bits is not None:
            project, scatter = self.copies.of(rows.weight, bits).linear(rows.bias), rows.spread
        elif rows is not None:
            project, scatter = plain(rows.weight, rows.bias), rows.spread
        elif bits is not None:
            project = twin(whole, self._low(bits), "lm_head")
        chain = [norm, project, softcap(self.model.softcap), scatter]
        if self.model.spread:
            chain[0] = _on(device_of(norm), norm)
            chain[1] = _on(device_of(whole), project)
            chain.append(_on(self.model.device))
        return in_turn(*chain)

    def rotary(self, tables: Tables) -> ModuleRotary:
        return ModuleRotary(tables)

    def block(self, sublayer: int, linear: LinearOf | None = None) -> Block:
        """A sublayer, its linears as they are or replaced."""
        number = sublayer // 2
        layer, window, kind = self.layers[number]
        name = "mlp" if sublayer % 2 else "self_attn"
        module = getattr(layer, name)
        if linear is not None:
            module = twin(module, linear, f"layer {number} {name}")
        if sublayer % 2:
            return self._mlp(layer, module)
        return self._attention(layer, module, window, kind)

    def _attention(self, layer: Any, attend: Any, window: int | None, kind: str) -> Block:
        before = layer.input_layernorm
        after = layer.post_attention_layernorm if self.model.family.sandwich else None
        device = device_of(before) if self.model.spread else None
        bool_masks = self.bool_masks

        def block(hidden: Tensor, step: Step) -> Tensor:
            mask, rope = step.masks[window], step.rope[kind]
            if device is not None:
                hidden, rope = hidden.to(device), tuple(each.to(device) for each in rope)
            if mask is not None:  # an additive one in the layer's own dtype
                mask = mask.to(hidden.device, torch.bool if bool_masks else hidden.dtype)
            out: Tensor = attend(
                hidden_states=before(hidden),
                position_embeddings=rope,
                attention_mask=mask,
                past_key_values=step.cache,
            )[0]  # (B, T, H)
            return hidden + (out if after is None else after(out))  # (B, T, H)

        return block

    def _mlp(self, layer: Any, mlp: Any) -> Block:
        sandwich = self.model.family.sandwich
        before = layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
        after = layer.post_feedforward_layernorm if sandwich else None
        device = device_of(before) if self.model.spread else None

        def block(hidden: Tensor, _: Step) -> Tensor:
            if device is not None:
                hidden = hidden.to(device)
            out: Tensor = mlp(before(hidden))  # (B, T, H)
            return hidden + (out if after is None else after(out))  # (B, T, H)

        return block


def _on(device: torch.device, function: Function | None = None) -> Function:
    """A function that moves its input to a device first."""
    return lambda x: x.to(device) if function is None else function(x.to(device))


def twin(module: Any, linear: LinearOf, name: str) -> Any:
    """A shallow copy of a module whose linears take other products.

    Replacing them in the module itself would change what other threads compute.
    """
    chosen = {id(linear) for _, linear in linears(module)}

    def copied(each: Any, path: str) -> Any:
        low = id(each) in chosen
        parts = {key: copied(part, f"{path}.{key}") for key, part in each._modules.items()}
        if not low and all(part is parts[key] for key, part in each._modules.items()):
            return each
        if "forward" in vars(each):
            raise ValueError(
                f"low precision cannot serve this model: {path} has a forward of its own, which "
                "accelerate or a patch has put there; leave low precision out"
            )
        made = copy(each)
        made._modules = parts
        if low:
            made.forward = linear(each)
        return made

    return copied(module, name)
