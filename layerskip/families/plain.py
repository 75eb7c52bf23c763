"""Checks whether a model's modules are plain, so that other code may compute with their weights.

Hooks, adapters, quantised weights and patched forwards are found by class and by code. A module
that is not plain is called unchanged (the "modules" backend).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from layerskip.families.architecture import Architecture, foreign_hooks
from layerskip.weights.stored import Stored

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def refusal(model: Architecture) -> str | None:
    """Why a model must use the module path, or None if the fused path computes the same.

    Hooks and weights are checked now: open the model again after changing its modules.
    """
    if _global_hooks():
        return "global module hooks are registered"
    if model.family.modules_only:
        return model.family.modules_only
    for name, module in _involved(model):
        if reason := _not_plain(module, model.family.home, name):
            return f"{name} {reason}"
    norm = model.decoder.norm.weight
    if torch.is_autocast_enabled(norm.device.type):
        return "autocast is on, whose rules follow the library's own calls"
    weights = [weight for part in model.parts for weight in part.weights]
    places = {(weight.device, weight.dtype) for weight in [*weights, norm]}
    if len(places) > 1 or model.spread:
        return f"weights lie on several devices or in several dtypes: {sorted(map(str, places))}"
    if norm.dtype not in _DTYPES:
        return f"dtype {norm.dtype} is not among {', '.join(map(str, _DTYPES))}"
    if model.parts[0].score_cap is not None and not model.eager:
        return "softcapped attention needs attn_implementation='eager'"
    return None


def head_refusal(head: Any) -> str | None:
    """Why a head must be called as a whole, or None if its rows are those of a plain weight."""
    if _global_hooks():
        return "global module hooks are registered"
    return _not_plain(head, nn.Linear.__module__, "lm_head")


def _global_hooks() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _involved(model: Architecture) -> Iterator[tuple[str, Any]]:
    """Yield every module whose call this path replaces, and its name for messages."""
    decoder = model.decoder
    yield "model.norm", decoder.norm
    yield "lm_head", model.unembedding
    if model.inputs_width:
        yield "the layers' inputs", decoder.per_layer_model_projection
        yield "their norm", decoder.per_layer_projection_norm
    for part in model.parts:
        for name, module in part.modules:
            if name:
                yield f"layer {part.number} {name}", module


def _not_plain(module: Any, home: str, name: str) -> str | None:
    """Why a module differs from the one that the library's `home` module defines, or None."""
    kind = type(module)
    # Compare by module, since a patch may have replaced the library's own class there.
    ours = kind in (nn.Linear, nn.Dropout, nn.Identity) or kind.__module__ == home
    # An activation may be any function of one tensor.
    if not ours and not name.endswith(("act_fn", "activation_fn")):
        return f"is a {kind.__name__} of {kind.__module__}, not one of {home}"
    if module.training:
        return "is in training mode"
    if foreign_hooks(module):
        return "has forward hooks"
    if {"_hf_hook", "_is_hooked"} & vars(module).keys():
        return "is hooked by accelerate"
    owner: Any = next(each for each in kind.__mro__ if "forward" in vars(each))
    original = _written_in(owner.forward, owner.__module__, f"{owner.__qualname__}.forward")
    if "forward" in vars(module) or not original:
        return "has a patched forward"
    for name, weight in module.named_parameters(recurse=False):
        if isinstance(weight, Stored) and kind is nn.Linear:
            continue
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
            return f"has a {name} of class {type(weight).__name__}, not a plain parameter"
        if weight.is_meta:
            return f"has its {name} offloaded"
    return None


@cache
def _written_in(function: Any, module: str, name: str) -> bool:
    """Whether a method is the one of that name in a module's source.

    Its package may have decorated it. `functools.wraps` copies `__module__` to a patch, so that
    proves nothing; the globals and the code are compared instead.
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
