"""Modules trained to draft for a frozen model: `Heads`, and how to open any kind from its file.

A module turns the model's hidden states into hidden states for its own final norm and head.
Shapes: B rows, T tokens, H hidden width, K heads.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from layerskip.backends.base import Backend, Block, Variant
from layerskip.config.registry import named
from layerskip.config.skips import Trained
from layerskip.families.architecture import Architecture
from layerskip.files.reading import errors_of, read_file
from layerskip.files.writing import replacing
from layerskip.weights.fingerprint import fingerprint

AHEAD = 4
"""Number of tokens that a module predicts at once."""
_EPSILON = 1e-6


class DraftModule(nn.Module, ABC):
    """A module that is added to a model.

    Attributes:
        count: number of tokens that it predicts at once; None: one, and it may be repeated.
        behind_exit: whether it follows an early exit.
    """

    count: int | None = None
    behind_exit = False

    @classmethod
    @abstractmethod
    def like(cls, model: Architecture, weights: dict[str, Tensor]) -> Self:
        """Make an untrained module with the shape of these weights."""

    def sublayers(self, backend: Backend, bits: int | None = None) -> tuple[Block, ...]:
        """The sublayers of its layer, if it has one."""
        return ()


class Heads(DraftModule):
    """Predicts K tokens at once from a token and the last hidden state of the one before it."""

    def __init__(self, model: Architecture, count: int = AHEAD) -> None:
        super().__init__()
        heads = [linear_of(model, 2, 1) for _ in range(count)]
        for head in heads:
            nn.init.zeros_(head.weight)  # at first, each head predicts the same as the model
        self.heads, self.count = nn.ModuleList(heads), count

    @classmethod
    def like(cls, model: Architecture, weights: dict[str, Tensor]) -> Self:
        return cls(model, max(1, len(weights)))

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Predict from any positions, (B, T, H) each, to (B, T, K, H).

        Position t has token t: its embedding, and the last hidden state of token t - 1 (zeros
        before the first). Head k (from 0) predicts token t + 1 + k.
        """
        pair, scale = scaled(features, embedded)
        each = torch.stack([head(pair) for head in self.heads], dim=-2)  # (B, T, K, H)
        out: Tensor = features[..., None, :] + F.silu(each) * scale[..., None, :]
        return out


class OpenBlock(NamedTuple):
    """A module, the sublayers of its layer if it has one, and the only tokens it may draft."""

    block: DraftModule
    sublayers: tuple[Block, ...]
    tokens: tuple[int, ...] | None


def open_block(
    model: Architecture, backend: Backend, trained: Trained, bits: int | None = None
) -> OpenBlock:
    """Load the module that a skip config names, with weights in the model's dtype.

    Raises:
        ValueError: the file does not belong to this model, or has no such module.
    """
    weights = trained_weights(model.model, trained)
    tokens = weights.pop(TOKENS, None)
    block: DraftModule = named("module", trained.kind).like(model, weights)
    expected = {name: (value.shape, value.dtype) for name, value in block.state_dict().items()}
    wrong = sorted(
        name
        for name in expected.keys() | weights.keys()
        if name not in expected or name not in weights or expected[name][0] != weights[name].shape
    )
    if wrong:
        raise ValueError(
            f"the trained draft {trained.weights} holds no {trained.kind} for this model: "
            f"{len(wrong)} tensors are missing, unknown or of another shape, {wrong[0]} first"
        )
    block.load_state_dict({name: weights[name].to(expected[name][1]) for name in expected})
    block.requires_grad_(False)
    drawn: tuple[int, ...] | None = None
    if tokens is not None:
        drawn = tuple(sorted(set(tokens.flatten().tolist())))
        if not drawn or not 0 <= drawn[0] <= drawn[-1] < model.vocabulary:
            raise ValueError(
                f"the trained draft {trained.weights} drafts tokens that this model lacks: it has "
                f"0..{model.vocabulary - 1}; train one for this model, `layerskip train --draft`"
            )
    if bits is not None:
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("layer."):
                module.forward = backend.product(module.weight, module.bias, Variant(bits))  # type: ignore[assignment]
    return OpenBlock(block, block.sublayers(backend, bits), drawn)


def linear_of(model: Architecture, inputs: int, outputs: int) -> nn.Linear:
    width = model.config.hidden_size
    how = {"dtype": model.dtype, "device": model.device}
    return nn.Linear(inputs * width, outputs * width, bias=False, **how)


def scaled(features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Both, concatenated and scaled to unit size, (..., 2 H), and the features' scale, (..., 1)."""
    two = torch.stack([features, embedded], -2)  # (..., 2, H)
    scales = _scale(two)  # (..., 2, 1)
    return (two / scales).flatten(-2), scales[..., 0, :]


def _scale(states: Tensor) -> Tensor:
    """The root mean square of hidden states (..., H), (..., 1)."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return wide.square().mean(-1, keepdim=True).add(_EPSILON).sqrt().to(states.dtype)


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
