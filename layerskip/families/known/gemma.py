"""Gemma 1 to 3: scaled embeddings, norms times (1 + weight), on both sides from Gemma 2 on."""

from typing import Any

from layerskip.families.family import Conditional, Family

AROUND = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


class Gemma2(Family):
    def score_cap(self, attention: Any) -> float | None:
        cap: float | None = attention.attn_logit_softcapping
        return cap


class Gemma3Pictures(Conditional):
    def two_way(self, text: Any) -> bool:
        return True


GEMMA = Family("gemma", norm="one plus")
GEMMA2 = Gemma2("gemma2", norms=AROUND, norm="one plus", windows="by type", softcap=True)
GEMMA3 = Family(
    "gemma3_text", package="gemma3", norms=AROUND, norm="one plus", windows="by type", softcap=True
)
GEMMA3_PICTURES = Gemma3Pictures("gemma3", softcap=False, types="token_type_ids")
