"""Deltas of low rank that heal products with rounded weights; knows no rounding and no file.

A draft's weight is off by what rounding lost, and by what the sublayers lack that it leaves out. A
trained delta B A mends that, at rank 16 with a twentieth of the weight's numbers. In 4 bits it is
added to what comes out, W x + B (A x): rounding would lose it. Rounding to 8 bits keeps it, so that
W + B A is what is rounded, and healing costs nothing when decoding.
Letters: R rows and C columns of a weight, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from layerskip.model.products import Function

MERGED = 8
"""Bits that keep what a delta adds to a weight."""
Delta = tuple[Tensor, Tensor]
"""Inner (r, C) and outer (R, r)."""


@dataclass(frozen=True)
class Deltas:
    """Those of a model's weights.

    Attributes:
        hash: tells them from others.
        by_weight: by the id of the weight.
    """

    hash: str
    by_weight: Mapping[int, Delta]

    def merged_into(self, weight: Tensor, bits: int) -> Delta | None:
        """What a weight is healed with before it is rounded to so many bits."""
        return self.by_weight.get(id(weight)) if bits == MERGED else None

    def added_to(self, weight: Tensor, bits: int) -> Delta | None:
        """What its products are healed with."""
        return None if bits == MERGED else self.by_weight.get(id(weight))


def paired(found: Mapping[str, Tensor], weights: Mapping[str, Tensor], hash: str) -> Deltas:
    """The deltas of a file, `name.a` (r, C) and `name.b` (R, r), in their weight's dtype and place.

    Args:
        hash: the file's.

    Raises:
        ValueError: a tensor belongs to no weight or does not fit it.
    """
    names = {name.rpartition(".")[0] for name in found}
    if unknown := sorted(names - weights.keys()):
        raise ValueError(f"trained deltas are for a weight {unknown[0]!r} that this model lacks")
    made = {}
    for name in names:
        weight, inner, outer = weights[name], found.get(f"{name}.a"), found.get(f"{name}.b")
        rows, columns = weight.shape
        if inner is None or outer is None or (*outer.shape, columns) != (rows, *inner.shape):
            raise ValueError(f"trained deltas of {name} do not fit a weight ({rows}, {columns})")
        made[id(weight)] = inner.to(weight), outer.to(weight)
    return Deltas(hash, made)


def healed(product: Function, delta: Delta | None) -> Function:
    """A product of inputs (..., C), (..., R), with what the delta adds."""
    if delta is None:
        return product
    inner, outer = delta
    return lambda x: product(x) + F.linear(F.linear(x, inner), outer)
