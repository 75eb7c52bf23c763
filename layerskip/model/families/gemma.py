"""Gemma 1 to 3: scaled embeddings, norms times (1 + weight), on both sides from Gemma 2 on."""

from typing import Any

import torch
from torch import Tensor

from layerskip.model.family import Conditional, Family

AROUND = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


class Gemma(Family):
    def embed(self, decoder: Any, tokens: Tensor) -> Tensor:
        hidden = super().embed(decoder, tokens)
        # Early releases of transformers 5 scale in the decoder, later ones in the embedding.
        if hasattr(decoder.embed_tokens, "embed_scale"):
            return hidden
        return hidden * torch.tensor(decoder.config.hidden_size**0.5, dtype=hidden.dtype)


class Gemma2(Gemma):
    def score_cap(self, attention: Any) -> float | None:
        cap: float | None = attention.attn_logit_softcapping
        return cap


class Gemma3Pictures(Conditional):
    def two_way(self, text: Any) -> bool:
        return True


GEMMA = Gemma("gemma", norm="one plus")
GEMMA2 = Gemma2("gemma2", norms=AROUND, norm="one plus", windows="by type", softcap=True)
GEMMA3 = Gemma(
    "gemma3_text", package="gemma3", norms=AROUND, norm="one plus", windows="by type", softcap=True
)
GEMMA3_PICTURES = Gemma3Pictures("gemma3", softcap=False, types="token_type_ids")
