"""What the sources that draft with heads that others trained have in common.

Shapes: W hidden width of a head, D tokens that it can draft, V vocabulary of the target.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from layerskip.backends.base import Variant, rounded
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.official import device_mismatch, target_mismatch
from layerskip.model.opened_model import OpenedModel
from layerskip.model.published_head import PublishedHead
from layerskip.model.whole import Whole
from layerskip.weights.rounded import rounded_bytes, spread


class Published(Source):
    """Drafts with a head that was trained for a target, by others or by `layerskip train`.

    Args:
        tokens: the only tokens to draft; None: all that it can.
        bits: bits to which its weights are rounded; None: they are exact.

    Attributes:
        module: the head, with these weights.
        project: its output layer, (..., W) to (..., D).
        output_bytes: the size of that layer.
        tokens: the target's tokens of its outputs, (D,); None: all, in order.
        taps: the numbers of the target's sublayers after which it reads states.

    Raises:
        ValueError: it belongs to another model, or its dtype or device differs.
    """

    def __init__(
        self,
        target: OpenedModel,
        head: PublishedHead,
        tokens: Iterable[int] | None = None,
        bits: int | None = None,
    ) -> None:
        if reason := self.misfit(target, head):
            raise ValueError(
                f"the {head.kind} cannot draft for this model: {reason}; give one made for it"
            )
        self.model, self.head, self.bits = target, head, bits
        backend, variant = target.backend, Variant(bits)
        self.module: Any = rounded(backend, head, variant, head.kind)
        weight, self.tokens = _outputs_of(target, head, tokens)
        self.project = backend.linear(variant)(weight, None)
        self.output_bytes = float(rounded_bytes(weight, bits) if bits else weight.nbytes)
        self.taps = [2 * depth for depth in head.depths_in(target.num_layers)]

    @property
    def words(self) -> str:
        rounding = f" in {self.bits} bits" if self.bits else ""
        return f"{self.what}{rounding}, {self.head.name_or_path}".removesuffix(", ")

    @property
    def what(self) -> str:
        """What drafts, in words."""
        raise NotImplementedError

    @property
    def key(self) -> Hashable:
        return (weakref.ref(self.head), self.model.dtype, self.output_bytes, self.bits)

    def misfit(self, target: OpenedModel, head: Any) -> str | None:
        """Why a head cannot draft for a model, or None if it can."""
        if isinstance(target, Whole):
            return f"it reads states from inside the model, which runs as a whole: {target.reason}"
        if reason := device_mismatch(target, head):
            return reason
        width, layers = target.config.hidden_size, target.num_layers
        depths = head.depths_in(layers)
        if not all(0 < depth <= layers for depth in depths):
            return f"it reads states after layers {', '.join(map(str, depths))} of {layers}"
        pairs = [
            ("hidden states of {} numbers", head.target_width, width),
            ("{} tokens", head.vocabulary or target.vocabulary, target.vocabulary),
            ("{} layers", head.num_layers or layers, layers),
        ]
        if head.embed_tokens is None or head.lm_head is None:
            pairs.append(("embeddings of {} numbers", head.shape.hidden_size, width))
        return target_mismatch(pairs)

    def spread(self, raw: Tensor) -> Tensor:
        """Logits of all tokens, (..., V), from those of its outputs, (..., D)."""
        return raw if self.tokens is None else spread(raw, self.tokens, self.model.vocabulary)


def _outputs_of(
    target: OpenedModel, head: PublishedHead, tokens: Iterable[int] | None
) -> tuple[Tensor, Tensor | None]:
    """The rows of a head's output layer, (D, W), and their tokens, as for `Published`."""
    weight = (head.lm_head or target.unembedding).weight
    every = len(weight) == target.vocabulary
    of_rows = torch.arange(len(weight), device=target.device) if every else head.tokens
    if tokens is None:
        return weight, None if every else of_rows
    kept = torch.isin(of_rows, torch.tensor([*tokens], device=target.device))
    return weight[kept], of_rows[kept]
