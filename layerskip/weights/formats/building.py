"""Builds models from their configuration alone; their weights are set one by one later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM


class _Unfilled(TorchFunctionMode):
    """Weights of modules made in this context take no memory; buffers are filled as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def unfilled(config: Any, dtype: torch.dtype) -> Any:
    """A causal language model without weights, with the attention that the library would choose."""
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    with _Unfilled():
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def put(model: nn.Module, name: str, weight: Tensor) -> None:
    """Set the data of a model's parameter or buffer."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    kept = weight if last in module._buffers else nn.Parameter(weight, requires_grad=False)
    setattr(module, last, kept)
