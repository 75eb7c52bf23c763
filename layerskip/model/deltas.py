"""Low-rank deltas that correct products with rounded weights.

A draft has errors from rounding and from skipped sublayers. A trained delta B A reduces them; at
rank 16 it has a twentieth of the weight's numbers. In 4 bits it is added to the product,
W x + B (A x), since rounding would lose it. In 8 bits it survives rounding, so W + B A is rounded,
and the delta costs nothing during decoding.
Shapes: R rows and C columns of a weight, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from layerskip.model.products import Function

MERGED = 8
"""Bits that suffice to preserve a delta that is added to a weight."""
Delta = tuple[Tensor, Tensor]
"""Inner (r, C) and outer (R, r)."""


@dataclass(frozen=True)
class Deltas:
    """The deltas of a model's weights.

    Attributes:
        hash: hash of their file, which defines equality.
        by_weight: by the id of the weight.
    """

    hash: str
    by_weight: Mapping[int, Delta] = field(compare=False)

    def merged_into(self, weight: Tensor, bits: int) -> Delta | None:
        """The delta to add to a weight before it is rounded to this many bits, or None."""
        return self.by_weight.get(id(weight)) if bits == MERGED else None

    def corrected(self, product: Function, weight: Tensor, bits: int) -> Function:
        """Add the delta's product to one of inputs (..., C) with a rounded weight, (..., R)."""
        delta = self.added_to(weight, bits)
        if delta is None:
            return product
        inner, outer = delta
        return lambda x: product(x) + F.linear(F.linear(x, inner), outer)

    def added_to(self, weight: Tensor, bits: int) -> Delta | None:
        """The delta to add to a weight's products, or None."""
        return None if bits == MERGED else self.by_weight.get(id(weight))


def paired(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], hash: str) -> Deltas:
    """Match a file's deltas, `name.a` (r, C) and `name.b` (R, r), to weights in dtype and device.

    Args:
        hash: the file's hash.

    Raises:
        ValueError: a tensor belongs to no weight, or does not fit it.
    """
    names = {name.rpartition(".")[0] for name in tensors}
    if unknown := sorted(names - weights.keys()):
        raise ValueError(f"trained deltas are for a weight {unknown[0]!r} that this model lacks")
    made = {}
    for name in names:
        weight, inner, outer = weights[name], tensors.get(f"{name}.a"), tensors.get(f"{name}.b")
        rows, columns = weight.shape
        if inner is None or outer is None or not inner.dim() == outer.dim() == 2:
            raise ValueError(f"trained deltas of {name} must be two matrices")
        if (*outer.shape, columns) != (rows, *inner.shape):
            raise ValueError(f"trained deltas of {name} do not fit a weight ({rows}, {columns})")
        made[id(weight)] = inner.to(weight), outer.to(weight)
    return Deltas(hash, made)
