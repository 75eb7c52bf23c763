"""Reads, checks and writes the files of trained draft weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from layerskip.config.skips import Trained
from layerskip.files.reading import errors_of, read_file
from layerskip.files.writing import replacing
from layerskip.weights.fingerprint import fingerprint

Weights = dict[str, Tensor]

TOKENS = "tokens"
"""In a module's file: the tokens on which it was trained, (n,) int32; all tokens if missing. Other
tokens' probabilities are untrained: on SmolLM2 they sum to an eighth. The rest are weights."""
_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def trained_weights(model: nn.Module, trained: Trained) -> Weights:
    """Read and check the tensors of a file, by name.

    Raises:
        ValueError: the model's weights differ from those in training, or the file is missing,
            damaged or another one; says which in one line.
    """
    base = fingerprint(model)
    if base != trained.base:
        raise ValueError(
            f"the trained draft {trained.weights} belongs to a model with other weights "
            f"({trained.base}, got {base}); train one for this model with `layerskip train --draft`"
        )
    with errors_of(f"the trained draft {trained.weights}"):
        data = read_file(trained.weights, _largest(model))
    digest = hashlib.sha256(data).hexdigest()
    if digest != trained.hash:
        raise ValueError(
            f"the trained draft {trained.weights} is not the file that its skip config names: it "
            f"is cut off or changed (SHA-256 {trained.hash[:12]}..., got {digest[:12]}...)"
        )
    try:
        found_weights = load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch lacks
        raise ValueError(
            f"the trained draft {trained.weights} is not a safetensors file: {error}"
        ) from error
    _check_numbers(found_weights, trained)
    return found_weights


def _largest(model: nn.Module) -> int:
    """Maximum bytes of a trained draft: twice the model in float32, more for tiny models."""
    return 8 * sum(weight.numel() for weight in model.parameters()) + (64 << 20)


def _check_numbers(tensors: Weights, trained: Trained) -> None:
    for name, value in tensors.items():
        if name == TOKENS and value.dtype in _INTEGERS:
            continue
        if value.dtype not in _FLOATS:
            wrong = f"of dtype {str(value.dtype).removeprefix('torch.')}"
        elif not value.isfinite().all():
            wrong = "not finite"
        else:
            continue
        raise ValueError(
            f"the trained draft {trained.weights} is damaged: {name} is {wrong}, it must hold "
            "finite numbers; train it again with `layerskip train --draft`"
        )


def save_trained(path: Path, weights: Weights, kind: str, model: nn.Module) -> Trained:
    """Write tensors to a file atomically, and return its description for this model.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    data = save({name: tensor.contiguous() for name, tensor in weights.items()})
    with replacing(path) as partial:
        partial.write_bytes(data)
    return Trained(
        kind=kind,  # type: ignore[arg-type]
        weights=str(path.absolute()),
        hash=hashlib.sha256(data).hexdigest(),
        base=fingerprint(model),
    )
