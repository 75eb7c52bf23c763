"""Deltas of low rank that heal products with rounded weights; knows no rounding and no file.

A draft's rounded weight is off by what rounding lost. A trained delta B A is added to what comes
out, W x + B (A x): at rank 16 a twentieth of the weight's numbers, which training spends where the
draft's law gains most.
Letters: R rows and C columns of a weight, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from layerskip.model.products import Function

Delta = tuple[Tensor, Tensor]
"""Inner (r, C) and outer (R, r)."""
Deltas = Mapping[int, Delta]
"""By the id of the weight."""


def paired(found: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[int, Delta]:
    """The deltas of a file, `name.a` (r, C) and `name.b` (R, r), in their weight's dtype and place.

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
    return made


def healed(product: Function, delta: Delta | None) -> Function:
    """A product of inputs (..., C), (..., R), with what the delta adds."""
    if delta is None:
        return product
    inner, outer = delta
    return lambda x: product(x) + F.linear(F.linear(x, inner), outer)
