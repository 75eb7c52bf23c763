"""T5Gemma: Gemma 2's decoder with an encoder, and a cross attention in every layer."""

from typing import Any

import torch
from torch import Tensor

from layerskip.families.known.gemma import Gemma2


class T5Gemma(Gemma2):
    def embed(self, decoder: Any, tokens: Tensor) -> Tensor:
        hidden = super().embed(decoder, tokens)  # scaled by the decoder, not in the embedding
        return hidden * torch.tensor(decoder.config.hidden_size**0.5, dtype=hidden.dtype)


T5GEMMA = T5Gemma(
    "t5_gemma_module",
    package="t5gemma",
    norms=(
        *("pre_self_attn_layernorm", "post_self_attn_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    norm="one plus",
    windows="by type",
    softcap=True,
    encoder="t5gemma",
    modules_only="it has a cross attention",
)
