"""Models of packed checkpoint folders, with their weights as the files store them.

Each format has a file that extracts the codes of its matrices (`codes.py`). All other tensors are
read unchanged. Tensors that do not belong to the model are ignored, as in the library.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from layerskip.texts.tokens import plural
from layerskip.weights.formats.awq import awq
from layerskip.weights.formats.building import put, unfilled
from layerskip.weights.formats.codes import Read
from layerskip.weights.formats.compressed import compressed
from layerskip.weights.formats.gptq import gptq
from layerskip.weights.formats.one_byte import fp8, torchao
from layerskip.weights.formats.tensors import FLOATS, Tensors
from layerskip.weights.stored import UNIT, Stored

_READERS: dict[str, Callable[[dict[str, Any]], Read]] = {
    "compressed-tensors": compressed,
    "gptq": gptq,
    "awq": awq,
    "fp8": fp8,
    "torchao": torchao,
}
_HALVES = {torch.float16: "F16", torch.bfloat16: "BF16"}


def is_packed(config: Any) -> bool:
    """Whether a configuration describes a packed checkpoint in a supported format."""
    how = getattr(config, "quantization_config", None)
    experts = any(getattr(config, f"num_{each}experts", None) for each in ("", "local_"))
    return isinstance(how, dict) and how.get("quant_method") in _READERS and not experts


def ignored_rounding(config: Any) -> str | None:
    """What a packed checkpoint rounds apart from weights, and is ignored here; None if nothing."""
    how = config.quantization_config
    groups = (how.get("config_groups") or {}).values()
    rounded = how["quant_method"] == "fp8" or "Activation" in str(how.get("quant_type"))
    rounded = rounded or any(each.get("input_activations") for each in groups)
    words = ["activations"] * rounded + ["keys and values"] * bool(how.get("kv_cache_scheme"))
    return " and ".join(words) or None


def reader(how: dict[str, Any]) -> Read:
    """Return a function that reads matrices of checkpoints with that `quantization_config`.

    Raises:
        ValueError: the format is not supported.
    """
    return _READERS[how["quant_method"]](how)


def folder_model(folder: Path, config: Any, dtype: torch.dtype, *, packed: bool) -> nn.Module:
    """Load the causal language model of a packed checkpoint on the CPU.

    Args:
        config: the folder's configuration, for which `is_packed` is true.
        dtype: of activations, and of weights that are unpacked.
        packed: keep weights as the files store them.

    Raises:
        ValueError: a format or tensor is not supported, or the checkpoint is not complete.
    """
    read = reader(config.quantization_config)
    config = copy(config)
    del config.quantization_config
    model = unfilled(config, dtype)
    tensors, lacking, seen = Tensors(folder), [], set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in seen:  # shared
            continue
        seen.add(id(value))
        path, _, last = name.rpartition(".")
        codes = None
        if last == "weight" and type(model.get_submodule(path)) is nn.Linear:
            codes = _of(path, read, tensors, path, *value.shape)
        if codes is not None:
            weight = _of(path, codes.weight, dtype, packed=packed)
        elif name in tensors:
            weight = _plain(tensors, name, value, dtype, packed)
        else:
            lacking.append(name)
            continue
        put(model, name, weight)
    if lacking:
        raise ValueError(f"{plural(len(lacking), 'weight')} missing, {lacking[0]} first")
    model.tie_weights()
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()  # type: ignore[no-any-return]


def _of(path: str, make: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """Call `make` for a matrix, and name the matrix in errors."""
    try:
        return make(*given, **how)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _plain(tensors: Tensors, name: str, like: Tensor, dtype: torch.dtype, packed: bool) -> Tensor:
    """A tensor that is not packed, as data of a parameter."""
    tensor = tensors.take(name, tuple(like.shape), *FLOATS)
    matrix = packed and tensor.dim() == 2 and tensor.shape[1] % UNIT == 0
    if matrix and tensor.dtype in _HALVES and tensor.dtype != dtype:
        data = tensor.view(torch.uint8)
        return Stored(data, _HALVES[tensor.dtype], tensor.shape[1], dtype)
    return tensor.to(dtype)
