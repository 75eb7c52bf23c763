"""Products with plain weights."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Linear = Callable[[Tensor, Tensor | None], Function]
"""Makes a function of inputs from a weight and a bias."""


def plain(weight: Tensor, bias: Tensor | None) -> Function:
    """The ordinary linear layer."""
    linear = F.linear
    return lambda x: linear(x, weight, bias)
