"""Models made of their configuration alone, whose weights are put in one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Unfilled(TorchFunctionMode):
    """Weights of modules that are made inside take no memory; their buffers are filled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def attention(config: Any) -> str:
    """The implementation of attention that the library would take."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"


def put(model: nn.Module, name: str, weight: Tensor) -> None:
    """Give a model's parameter or buffer its data."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    kept = weight if last in module._buffers else nn.Parameter(weight, requires_grad=False)
    setattr(module, last, kept)
