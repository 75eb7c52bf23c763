"""Mistral's models: sliding windows, position-scaled queries, and a mixture of experts."""

from typing import Any

from layerskip.families.experts import Mixture
from layerskip.families.family import Conditional, Family


class Mixtral(Family):
    def mixture(self, layer: Any) -> Mixture:
        gate = layer.mlp.gate
        return Mixture(gate, layer.mlp.experts, gate.weight, gate.top_k, cast=False)


MISTRAL = Family("mistral", windows="all")
MINISTRAL = Family("ministral", windows="by type")
MINISTRAL3 = Family(
    "ministral3",
    windows="all",
    positions=True,
    modules_only="queries are scaled by their positions",
)
MIXTRAL = Mixtral("mixtral", windows="all")
MISTRAL3 = Conditional("mistral3")
