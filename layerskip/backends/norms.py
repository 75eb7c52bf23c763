"""Norms and rotary angles in few kernels, for the fused blocks.

Shapes: B rows, T tokens of a pass, N heads, K key-value heads, S slots, D head width, R rotary
width (R <= D).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.backends.base import Tables
from layerskip.cache.rows import RowCache
from layerskip.weights.rounded import Function


def weight_and_epsilon(module: Any) -> tuple[Tensor | None, float]:
    """The weight of an RMSNorm module, or None if it has none, and its epsilon."""
    attributes = vars(module)  # the library's classes have two names for it
    epsilon: float = attributes.get("variance_epsilon", attributes.get("eps"))
    return module._parameters.get("weight"), epsilon


def rms_norm(module: Any, style: str, device: torch.device | None = None) -> Function:
    """The function of an RMSNorm module. It computes in float32, whatever the model's dtype.

    Args:
        style: see `Family.norm`.
        device: where to compute if the norm has no weight (it then only normalises).
    """
    weight, number = weight_and_epsilon(module)
    epsilon = torch.tensor(number, device=device if weight is None else weight.device)
    vector_norm, addcmul, whole = torch.linalg.vector_norm, torch.addcmul, F.rms_norm
    gpu = epsilon.device.type == "cuda"

    # x / sqrt(mean(x^2) + epsilon): one kernel on a GPU, four on a CPU, where F.rms_norm takes six
    def normalised(x: Tensor) -> Tensor:
        if gpu:
            return whole(x, x.shape[-1:], None, number)
        norm = vector_norm(x, 2, -1, True)  # (..., 1)
        return x * addcmul(epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()

    def bare(x: Tensor) -> Tensor:
        if gpu and x.dtype is not torch.float64:
            return normalised(x)  # the kernel computes in float32
        return normalised(x.float()).to(x.dtype)

    if weight is None:
        return bare

    def llama(x: Tensor) -> Tensor:
        return normalised(x).mul_(weight)

    def llama_cast(x: Tensor) -> Tensor:
        return bare(x).mul_(weight)

    def one_plus(x: Tensor) -> Tensor:
        out = normalised(x.float())
        return addcmul(out, out, weight.float()).to(x.dtype)

    def wide(x: Tensor) -> Tensor:
        return normalised(x.float()).mul_(weight.float()).to(x.dtype)

    if style == "llama":
        return llama if weight.dtype is torch.float32 else llama_cast
    return one_plus if style == "one plus" else wide


class TableRotary:
    """Cosines and sines of all positions of a call, by layer type, (1, S, R) each."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def at(self, cache: RowCache) -> Tables:
        """The tables at the positions for which the cache is placed, (B or 1, T, R)."""
        if not cache.in_step:
            device = next(iter(self.tables.values()))[0].device
            return gathered(self.tables, cache.positions(device))
        window = slice(cache.firsts[0], cache.end)
        return {k: (cos[:, window], sin[:, window]) for k, (cos, sin) in self.tables.items()}


class FusedRotary(TableRotary):
    """Rotary tables for the fused blocks: the sines include the sign of `rotate_half`.

    Args:
        tables: each half of a table is the same.
        pairs: see `Family.pairs`.
    """

    def __init__(self, tables: Tables, pairs: bool = False) -> None:
        made = {kind: (cos, _signed(sin)) for kind, (cos, sin) in tables.items()}
        if pairs:
            made = {kind: (_woven(cos), _woven(sin)) for kind, (cos, sin) in made.items()}
        super().__init__(made)

    def at(self, cache: RowCache) -> Tables:
        """The tables at the positions of a pass for all heads, (B or 1, 1, T, R)."""
        return for_heads(super().at(cache))


def _signed(sin: Tensor) -> Tensor:
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)


def _woven(table: Tensor) -> Tensor:
    """A table (1, S, R) with the numbers of both halves in turn."""
    both: Tensor = table.unflatten(-1, (2, -1))  # (1, S, 2, R / 2)
    return both.transpose(-2, -1).flatten(-2)


def gathered(tables: Tables, slots: Tensor) -> Tables:
    """Select entries of tables (1, S, R) at slots (B, T): (B, T, R)."""
    return {kind: (cos[0, slots], sin[0, slots]) for kind, (cos, sin) in tables.items()}


def for_heads(tables: Tables) -> Tables:
    """Add a head dimension to tables (B, T, R): (B, 1, T, R)."""
    return {kind: (cos[:, None], sin[:, None]) for kind, (cos, sin) in tables.items()}


def rotated(x: Tensor, angles: tuple[Tensor, Tensor], pairs: bool = False) -> Tensor:
    """Rotate queries or keys (B, N or K, T, D) by cosines and signed sines (B or 1, 1, T, R)."""
    cos, sin = angles
    if cos.dtype is not x.dtype:  # OLMo's angles are float32
        return rotated(x.to(cos.dtype), angles, pairs).to(x.dtype)
    rotary = cos.shape[-1]
    if rotary < x.shape[-1]:
        return torch.cat((rotated(x[..., :rotary], angles, pairs), x[..., rotary:]), -1)
    other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if pairs else x.roll(rotary // 2, -1)
    return (x * cos).add_(other.mul_(sin))
