"""Whether the modules of a model are plain, so that other code may compute with their weights.

Hooks, adapters, quantised weights and patched forwards are found by class and by code. What is not
plain is called as it is (the "modules" backend).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from layerskip.model.architecture import Architecture, foreign_hooks

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def refusal(model: Architecture) -> str | None:
    """Why a model must keep the module path, or None where this path computes the same.

    Hooks and weights are looked at now: open the model again after changing its modules.
    """
    if _global_hooks():
        return "global module hooks are registered"
    if model.family.positions:
        return "queries are scaled by their positions"
    for name, module, home, expected in _involved(model):
        if reason := _not_plain(module, home, expected):
            return f"{name} {reason}"
    norm = model.decoder.norm.weight
    if torch.is_autocast_enabled(norm.device.type):
        return "autocast is on, whose rules follow the library's own calls"
    parameters = [p for layer in model.layers for p in layer.parameters()]
    places = {(p.device, p.dtype) for p in [*parameters, norm]}
    if len(places) > 1 or model.spread:
        return f"weights lie on several devices or in several dtypes: {sorted(map(str, places))}"
    if norm.dtype not in _DTYPES:
        return f"dtype {norm.dtype} is not among {', '.join(map(str, _DTYPES))}"
    capped = getattr(model.layers[0].self_attn, "attn_logit_softcapping", None) is not None
    if model.family.prefix == "Gemma2" and capped and not model.eager:
        return "softcapped attention needs attn_implementation='eager'"
    return None


def head_refusal(head: Any) -> str | None:
    """Why a head must be called whole, or None where its rows are those of a plain weight."""
    if _global_hooks():
        return "global module hooks are registered"
    return _not_plain(head, *_LINEAR)


_LINEAR = ("torch.nn.modules.linear", "Linear")


def _global_hooks() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _involved(model: Architecture) -> Iterator[tuple[str, Any, str, str]]:
    """Every module whose call this path replaces, and the module and name of its expected class.

    Classes are compared by name, as the library's own class may have been replaced.
    """
    home, prefix = model.family.home, model.family.prefix
    inner = prefix + model.family.inner
    yield "model.norm", model.decoder.norm, home, f"{prefix}RMSNorm"
    yield "lm_head", model.unembedding, *_LINEAR
    if model.inputs_width:
        decoder = model.decoder
        yield "the layers' inputs", decoder.per_layer_model_projection, *_LINEAR
        yield "their norm", decoder.per_layer_projection_norm, home, f"{prefix}RMSNorm"
    for index, layer in enumerate(model.layers):
        for name, module in layer.named_modules():
            where = f"layer {index} {name}"
            if name == "self_attn":
                yield where, module, home, f"{inner}Attention"
            elif name == "mlp":
                sparse = hasattr(module, "experts")
                yield where, module, home, f"{inner}{'SparseMoeBlock' if sparse else 'MLP'}"
            elif name == "mlp.gate":
                yield where, module, home, f"{inner}TopKRouter"
            elif name == "router":
                yield where, module, home, f"{inner}Router"
            elif name in ("experts", "mlp.experts"):
                yield where, module, home, f"{inner}Experts"
            elif name.rstrip("_12").endswith("norm"):
                yield where, module, home, f"{prefix}RMSNorm"
            elif name.endswith(("_proj", "_gate", "_projection", "router.proj")):
                yield where, module, *_LINEAR
            elif name and name.startswith(("self_attn.", "mlp.", "act_fn", "experts.")):
                # an activation: any function of one tensor will do, so any class
                yield where, module, type(module).__module__, type(module).__qualname__


def _not_plain(module: Any, home: str, expected: str) -> str | None:
    found = type(module)
    if (found.__module__, found.__qualname__) != (home, expected):
        return f"is a {found.__name__} of {found.__module__}, not a plain {expected}"
    if module.training:
        return "is in training mode"
    if foreign_hooks(module):
        return "has forward hooks"
    if hasattr(module, "_hf_hook") or getattr(module, "_is_hooked", False):
        return "is hooked by accelerate"
    owner: Any = next(each for each in found.__mro__ if "forward" in vars(each))
    own = _written_in(owner.forward, owner.__module__, f"{owner.__qualname__}.forward")
    if "forward" in vars(module) or not own:
        return "has a patched forward"
    for name, weight in module.named_parameters(recurse=False):
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
            return f"has a {name} of class {type(weight).__name__}, not a plain parameter"
        if weight.is_meta:
            return f"has its {name} offloaded"
    return None


@cache
def _written_in(function: Any, module: str, name: str) -> bool:
    """Whether a method is the one of that name in a module's source.

    Its package may have decorated it. `functools.wraps` copies `__module__` to a patch, so that
    proves nothing: the globals and the code are compared.
    """
    package, home = module.partition(".")[0], sys.modules.get(module)
    while hasattr(function, "__wrapped__"):
        decorator = getattr(function, "__globals__", {}).get("__name__", "")
        if decorator.partition(".")[0] != package:
            return False
        function = function.__wrapped__
    if home is None or getattr(function, "__globals__", None) is not vars(home):
        return False
    return bool(function.__code__.co_qualname == name)
