"""The module that trains a healed draft: deltas of low rank on rounded linears; knows no files.

The forward pass is the draft's own, sublayer by sublayer through the library's modules, over whole
windows: every place sees the draft's keys and values before it, where decoding has the target's.
Letters: B windows, T tokens of one, H hidden width, R rows and C columns of a weight, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.config import SkipConfig
from layerskip.model.modules import Modules
from layerskip.model.rounded import rounded
from layerskip.model.sublayers import Pass, Sublayers
from layerskip.training.laws import Batch, Made, Student

RANK = 16


class Healing(Student):
    """What a skip config's draft computes, with deltas to train.

    Args:
        model: opened with "modules"; its own weights are left as they are, and get no gradients as
            long as nobody asks for them.
        skip: resolved, with `low`; what it names healed weights for begins with them.
        dtype: of the rounded weights here.

    Attributes:
        inner, outer: (r, C) and (R, r) of every rounded linear, by name.
    """

    def __init__(
        self, model: Sublayers, skip: SkipConfig, *, rank: int = RANK, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        assert isinstance(model.backend, Modules)
        assert skip.low is not None
        self.opened = [model]  # in a list, so that its weights are not this module's
        self.bits = skip.low.bits
        known = {} if skip.trained is None else model.weights.deltas(skip.trained).by_weight
        generator = torch.Generator().manual_seed(seed)
        self.inner, self.outer = nn.ParameterDict(), nn.ParameterDict()
        self._names: dict[int, str] = {}
        self._weights: dict[str, Tensor] = {}
        for name, linear in model.weights.linears(skip.rounded()):
            rows, columns = linear.weight.shape
            key = name.replace(".", "/")
            bound = 1 / math.sqrt(columns)
            new = torch.empty(rank, columns).uniform_(-bound, bound, generator=generator)
            inner, outer = known.get(id(linear.weight), (new, torch.zeros(rows, rank)))
            self.inner[key] = nn.Parameter(inner.float().clone())
            self.outer[key] = nn.Parameter(outer.float().clone())
            self._names[id(linear.weight)] = key
            self._weights[key] = rounded(linear.weight, self.bits).widened(dtype)
        low = set(skip.rounded())
        self.blocks = [
            model.backend.block(index, self._linear if index in low else None)
            for index in skip.kept()
        ]

    def _linear(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        key, bias = self._names[id(module.weight)], module.bias

        def apply(x: Tensor) -> Tensor:
            out = F.linear(x.to(self._weights[key]), self._weights[key])
            healed = F.linear(F.linear(x, self.inner[key]), self.outer[key])
            total = (out + healed).to(x)
            return total if bias is None else total + bias

        return apply

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states behind the draft's sublayers, before the final norm, (B, T, H)."""
        model = self.opened[0]
        rows, count = ids.shape
        cache = model.new_cache(rows, count)
        cache.place([0] * rows, count)
        step = Pass(model, cache, model.rotary(count, count))
        hidden = model.embed(ids)
        for block in self.blocks:
            hidden = block(hidden, step)
        return hidden

    def made(self, batch: Batch) -> Made:
        return [(self(batch.ids), 0)]

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for key, inner in self.inner.items():
            name = key.replace("/", ".")
            found[f"{name}.a"] = inner.detach().half()
            found[f"{name}.b"] = self.outer[key].detach().half()
        return found
