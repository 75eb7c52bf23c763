"""Granite: constant factors on the embedding and the residual adds, a divisor of the logits."""

from typing import Any

from torch import Tensor

from layerskip.families.family import Family


class Granite(Family):
    def embed(self, decoder: Any, tokens: Tensor) -> Tensor:
        return super().embed(decoder, tokens) * decoder.embedding_multiplier  # type: ignore[no-any-return]

    def residual(self, layer: Any) -> float:
        return float(layer.residual_multiplier)

    def divisor(self, config: Any) -> float:
        return float(config.logits_scaling)


GRANITE = Granite("granite")
