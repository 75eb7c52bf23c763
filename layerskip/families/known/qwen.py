"""Qwen 2 and 3, and Qwen 3 with experts in some of its layers."""

from typing import Any

from layerskip.families.experts import Mixture
from layerskip.families.family import Family, part_named


class Qwen3Moe(Family):
    def mixture(self, layer: Any) -> Mixture | None:
        gate = part_named(layer.mlp, "gate")
        if gate is None:  # this layer's MLP is dense
            return None
        return Mixture(
            gate, layer.mlp.experts, gate.weight, gate.top_k, normalised=gate.norm_topk_prob
        )


QWEN2 = Family("qwen2", windows="by type")
QWEN3 = Family("qwen3", windows="by type")
QWEN3_MOE = Qwen3Moe("qwen3_moe", windows="all")
