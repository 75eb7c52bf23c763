"""Norms and rotary angles in few kernels, as the fused blocks need them.

Letters: B rows, T tokens of a pass, N heads, K key-value heads, S slots, D head width, R rotary
width (R <= D).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.model.backend import Tables
from layerskip.model.cache import RowCache
from layerskip.model.products import Function


def weight_and_epsilon(module: Any) -> tuple[Tensor | None, float]:
    """The weight of an RMSNorm module, None where it has none, and its epsilon."""
    attributes = vars(module)  # the library's classes call it by two names
    epsilon: float = attributes.get("variance_epsilon", attributes.get("eps"))
    return module._parameters.get("weight"), epsilon


def rms_norm(module: Any, style: str, device: torch.device | None = None) -> Function:
    """The function of an RMSNorm module; it computes in float32, whatever the model's dtype.

    Args:
        style: see `Family.norm`.
        device: where it computes, if it has no weight (then it only normalises).
    """
    weight, number = weight_and_epsilon(module)
    epsilon = torch.tensor(number, device=device if weight is None else weight.device)
    vector_norm, addcmul = torch.linalg.vector_norm, torch.addcmul

    # x / sqrt(mean(x^2) + epsilon) in four small kernels, where F.rms_norm has six on a CPU
    def normalised(x: Tensor) -> Tensor:
        norm = vector_norm(x, 2, -1, True)  # (..., 1)
        return x * addcmul(epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()

    def bare(x: Tensor) -> Tensor:
        return normalised(x.float()).to(x.dtype)

    if weight is None:
        return bare

    def llama(x: Tensor) -> Tensor:
        return normalised(x).mul_(weight)

    def llama_cast(x: Tensor) -> Tensor:
        return normalised(x.float()).to(x.dtype).mul_(weight)

    def one_plus(x: Tensor) -> Tensor:
        out = normalised(x.float())
        return addcmul(out, out, weight.float()).to(x.dtype)

    def wide(x: Tensor) -> Tensor:
        return normalised(x.float()).mul_(weight.float()).to(x.dtype)

    if style == "llama":
        return llama if weight.dtype is torch.float32 else llama_cast
    return one_plus if style == "one plus" else wide


class Angles(NamedTuple):
    """Rotary angles of one pass.

    Attributes:
        cos: (B or 1, 1, T, R); for a single position it may be the whole rotation, (D, D).
        sin: with the sign of `rotate_half` in it, (B or 1, 1, T, R); None if cos is (D, D).
    """

    cos: Tensor
    sin: Tensor | None


class FusedRotary:
    """Rotary tables of a call in the layout of this path.

    Args:
        tables: layer type -> (cos, sin) of every position, each (1, S, R).
        widths: layer type -> head width D.
    """

    def __init__(self, tables: Tables, widths: Mapping[str, int]) -> None:
        self.tables = {kind: self._signed(*table) for kind, table in tables.items()}
        cos = next(iter(self.tables.values()))[0]
        # One matrix product rotates faster than four kernels; below float32 it would round
        # once where the library rounds three times, and on a GPU it might run in TF32.
        self._as_matrix = cos.device.type == "cpu" and cos.dtype in (torch.float32, torch.float64)
        # by kind (S, D) each, and the exchange of halves and the identity, (D, D) each
        self._wide = (
            {kind: _as_matrix(*table, widths[kind]) for kind, table in self.tables.items()}
            if self._as_matrix
            else {}
        )

    @staticmethod
    def _signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = sin.shape[-1] // 2
        return cos[:, None], torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, None]

    def at(self, cache: RowCache) -> dict[str, Angles]:
        """The angles at the positions of the pass the cache is placed for."""
        if not cache.in_step:
            device = next(iter(self.tables.values()))[0].device
            return gathered(self.tables, cache.positions(device))
        if self._as_matrix and cache.count == 1:
            return {
                kind: Angles(torch.addcmul(eye * cos[cache.start], swap, sin[cache.start]), None)
                for kind, (cos, sin, swap, eye) in self._wide.items()
            }
        window = slice(cache.start, cache.end)
        return {
            kind: Angles(cos[:, :, window], sin[:, :, window])
            for kind, (cos, sin) in self.tables.items()
        }


def _as_matrix(cos: Tensor, sin: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What makes the rotation (D, D) of a place, from angles (1, 1, S, R)."""
    rotary = cos.shape[-1]
    places, rest = torch.arange(rotary), width - rotary  # dimensions that do not turn
    swap = torch.zeros(width, width, dtype=cos.dtype)  # (D, D)
    swap[places.roll(rotary // 2), places] = 1
    eye = torch.eye(width, dtype=cos.dtype)  # (D, D)
    return F.pad(cos[0, 0], (0, rest), value=1.0), F.pad(sin[0, 0], (0, rest)), swap, eye


def gathered(tables: Tables, slots: Tensor) -> dict[str, Angles]:
    """The angles at slots (B, T), (B, 1, T, R), from tables of all positions, (1, 1, S, R)."""
    return {
        kind: Angles(cos[0, 0, slots][:, None], sin[0, 0, slots][:, None])
        for kind, (cos, sin) in tables.items()
    }


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """Rotate queries or keys (B, N or K, T, D)."""
    cos, sin = angles
    if cos.dtype is not x.dtype:  # OLMo's angles are float32
        return rotated(x.to(cos.dtype), angles).to(x.dtype)
    if sin is None:
        return x @ cos
    rotary = cos.shape[-1]
    if rotary == x.shape[-1]:
        return (x * cos).add_(x.roll(rotary // 2, -1).mul_(sin))
    turned = x[..., :rotary]
    turned = (turned * cos).add_(turned.roll(rotary // 2, -1).mul_(sin))
    return torch.cat((turned, x[..., rotary:]), -1)
