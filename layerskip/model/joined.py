"""Weights that read the same input, stored together so that one product replaces several.

Projections of the same input (query, key and value; gate and up) are joined: their rows lie in one
storage, and the modules' parameters become views of it. Values, `state_dict()`, memory and the
parameters' identities stay the same. One product replaces several, which saves a small model much
of its decoding time. Only plain linears are joined, not those that are adapted, quantised, hooked,
offloaded or share their storage with something else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass
class _Held:
    """How many callers want a model's weights joined, and which are views: (module, name)."""

    holders: int = 0
    views: list[tuple[nn.Module, str]] = field(default_factory=list)


_held: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def joined(model: nn.Module) -> Iterator[None]:
    """Keep a model's query, key and value weights, and its gate and up weights, joined.

    For commands and servers that decode with one model for long; contexts may be nested, also from
    several threads. Enter before the threads that decode start and leave when they are done: both
    move weights. Inside, training, changes in place, `state_dict()`, `save_pretrained`,
    `torch.save` and `copy.deepcopy` work as outside, and a weight may be replaced or quantised; but
    `pickle` writes what lies together once for every view of it, and
    `safetensors.torch.save_model` refuses views: leave before these.
    """
    join(model)
    try:
        yield
    finally:
        part(model)


def join(model: nn.Module) -> None:
    """Join a model's weights until `part` is called as many times."""
    with _lock, _ordinary():
        held = _held.setdefault(model, _Held())
        held.holders += 1
        for group in groups(model):
            for name in ("weight", "bias"):
                held.views += _join(group, name)


def part(model: nn.Module) -> None:
    """Undo one `join`: after the last one every parameter has a storage of its own again."""
    with _lock, _ordinary():
        held = _held.get(model)
        if held is None:
            raise ValueError("the model's weights are not joined: more calls of part than of join")
        held.holders -= 1
        if held.holders:
            return
        del _held[model]
        for module, name in held.views:
            parameter: Any = getattr(module, name, None)  # since then it may have been replaced
            if is_plain(parameter) and parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()


def together(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor of all rows of parts that follow each other in one storage, else None."""
    first = parts[0]
    if first is None:
        return None
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for each in parts:
        if (
            each is None
            or each.untyped_storage().data_ptr() != storage
            or each.storage_offset() != end
            or not each.is_contiguous()
            or each.shape[1:] != first.shape[1:]
        ):
            return None
        end += each.numel()
    rows = sum(each.shape[0] for each in parts if each is not None)
    shape = (rows, *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def groups(model: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    """Plain linears that read the same input."""
    for module in model.modules():
        for names in _GROUPS:
            linears: list[Any] = [getattr(module, name, None) for name in names]
            if all(map(_is_plain_linear, linears)):
                yield tuple(linears)


def _is_plain_linear(module: Any) -> bool:
    hooked = hasattr(module, "_hf_hook")  # accelerate's, which may move the weight
    return type(module) is nn.Linear and is_plain(module.weight) and not hooked


def is_plain(weight: Any) -> bool:
    """Whether a weight is an ordinary parameter: not a subclass, and its numbers can be read."""
    return (
        type(weight) is nn.Parameter
        and type(weight.data) is Tensor
        and not weight.is_meta
        and not weight.is_inference()
    )


@contextmanager
def _ordinary() -> Iterator[None]:
    """Tensors made inside can be trained, even if the caller is in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _join(group: Sequence[nn.Linear], name: str) -> list[tuple[nn.Module, str]]:
    """Join the linears' parameters of a name if possible; returns those that are views now."""
    parts: list[Any] = [getattr(linear, name) for linear in group]
    if not all(map(is_plain, parts)) or len({(each.dtype, each.device) for each in parts}) > 1:
        return []
    # what shares its storage with something else is left as it is
    alone = all(each.untyped_storage().nbytes() == each.nbytes for each in parts)
    if not alone or len({each.untyped_storage().data_ptr() for each in parts}) < len(parts):
        return []
    whole = torch.cat([each.data for each in parts])  # (sum of rows, ...)
    for each, view in zip(parts, whole.split([len(each) for each in parts]), strict=True):
        each.data = view
    return [(linear, name) for linear in group]
