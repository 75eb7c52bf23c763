"""The source that drafts with an EAGLE-3 head (see `layerskip.model.eagle_head`).

It reads the target's states at several depths for accepted tokens, and its own states for drafted
tokens.
Shapes: R rows of a pass, T tokens, H hidden width of the target, W of the head, N depths,
D tokens that it can draft, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.cache.library_cache import LibraryCache
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.decoding.sources.mtp import HeadState, seen_by
from layerskip.decoding.sources.official import device_mismatch, target_mismatch
from layerskip.families.architecture import read_bytes
from layerskip.model.eagle_head import Eagle
from layerskip.model.opened_model import OpenedModel
from layerskip.model.published_head import PublishedHead
from layerskip.model.whole import Whole
from layerskip.weights.draft_head import spread


class EagleHead(Source):
    """A head that was trained for a target, by others or by `layerskip train`.

    Args:
        tokens: the only tokens to draft; None: all that it can.

    Raises:
        ValueError: it belongs to another model, or its dtype or device differs.
    """

    def __init__(
        self, target: OpenedModel, module: Eagle, tokens: Iterable[int] | None = None
    ) -> None:
        if reason := _misfit(target, module):
            raise ValueError(
                f"the EAGLE-3 head cannot draft for this model: {reason}; give one made for it"
            )
        self.model, self.module = target, module
        embedding = module.embed_tokens or target.model.get_input_embeddings()
        self.embeddings: Tensor = embedding.weight  # (V, W), without Gemma's scale
        self.weight, self.tokens = outputs_of(target, module, tokens)  # (D, W), (D,) or None
        self.taps = [2 * depth for depth in module.depths_in(target.num_layers)]

    name = "eagle3"

    @property
    def words(self) -> str:
        return f"an EAGLE-3 head, {getattr(self.module, 'name_or_path', '')}".removesuffix(", ")

    @property
    def key(self) -> Hashable:
        return (weakref.ref(self.module), self.model.dtype, len(self.weight))

    def open(self, batch: Batch) -> State:
        return HeadState(batch, self, self.taps)

    def step_bytes(self) -> Sequence[float]:
        # `fc` is read once per round, and few rows of the embedding are read.
        layers = float(read_bytes(self.module.layers, None))
        return [layers, float(self.weight.nbytes)]

    def own_bytes(self) -> float:
        layer: Any = self.module.layers[0]
        attention = layer.self_attn
        numbers = attention.k_proj.out_features + attention.v_proj.out_features
        return float(numbers * self.model.dtype.itemsize)

    def before(self, batch: Batch, places: Sequence[int], count: int, rows: range) -> Tensor:
        states = [batch.tapped(tap, places, count, before=1, rows=rows) for tap in self.taps]
        return self.module.join(torch.cat(states, -1))

    def compute(self, tokens: Tensor, states: Tensor, cache: LibraryCache) -> Tensor:
        """The head's states (R, T, W), from tokens (R, T) and the states (R, T, W) before them.

        The cache is placed for these tokens.
        """
        places, seen = seen_by(cache, self.model)
        out: Tensor = self.module(
            F.embedding(tokens, self.embeddings), states, places, seen, cache.for_library()
        )
        return out

    def logits(self, states: Tensor) -> Tensor:
        raw = F.linear(self.module.normed(states[:, 0]), self.weight)  # (R, D)
        return raw if self.tokens is None else spread(raw, self.tokens, self.model.vocabulary)


def _misfit(target: OpenedModel, module: Eagle) -> str | None:
    """Why a head cannot draft for a model, or None if it can."""
    depths = module.depths_in(target.num_layers)
    if reason := taps_misfit(target, module, depths):
        return reason
    width, vocabulary = module.shape.hidden_size, module.shape.vocab_size
    pairs = [("hidden states of {} numbers", module.target_width, target.config.hidden_size)]
    pairs.append(("{} tokens", vocabulary, target.vocabulary))
    if module.embed_tokens is None or module.lm_head is None:
        pairs.append(("embeddings of {} numbers", width, target.config.hidden_size))
    return target_mismatch(pairs)


def outputs_of(
    target: OpenedModel, module: PublishedHead, tokens: Iterable[int] | None
) -> tuple[Tensor, Tensor | None]:
    """The rows of a head's output layer, (D, W), and their tokens, (D,); None: all, in order.

    Args:
        tokens: the only tokens to draft; None: all that it can.
    """
    weight = (module.lm_head or target.unembedding).weight
    every = len(weight) == target.vocabulary
    of_rows = torch.arange(len(weight), device=target.device) if every else module.tokens
    if tokens is None:
        return weight, None if every else of_rows
    kept = torch.isin(of_rows, torch.tensor([*tokens], device=target.device))
    return weight[kept], of_rows[kept]


def taps_misfit(target: OpenedModel, module: PublishedHead, depths: Sequence[int]) -> str | None:
    """Why a head cannot read a model's states after some layers, or None if it can."""
    if isinstance(target, Whole):
        return f"it reads states from inside the model, which runs as a whole: {target.reason}"
    if reason := device_mismatch(target, module):
        return reason
    if not all(0 < depth <= target.num_layers for depth in depths):
        read = ", ".join(map(str, depths))
        return f"it reads states after layers {read} of {target.num_layers}"
    return None
