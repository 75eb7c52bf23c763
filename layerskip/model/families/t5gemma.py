"""T5Gemma: Gemma 2's decoder with an encoder, and a cross attention in every layer."""

from layerskip.model.families.gemma import Gemma2

T5GEMMA = Gemma2(
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
