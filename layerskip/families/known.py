"""Families of models whose sublayers are known, and the classes around their decoders.

To add a family, add it to `_FAMILIES`; nothing else names it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from layerskip.families.experts import Mixture
from layerskip.families.family import AssistantFamily, Conditional, Family, part_named


def _mixture(layer: Any, shared: str = "shared_expert", **more: Any) -> Mixture | None:
    gate = part_named(layer.mlp, "gate")
    if gate is None:  # this layer's MLP is dense
        return None
    return Mixture(
        gate,
        layer.mlp.experts,
        gate.weight,
        gate.top_k,
        normalised=getattr(gate, "norm_topk_prob", True),
        shared=part_named(layer.mlp, shared),
        shared_gate=part_named(layer.mlp, "shared_expert_gate"),
        **more,
    )


def _sigmoid(layer: Any) -> Mixture | None:
    found = _mixture(layer, "shared_experts", sigmoid=True, wide=True, cast=False)
    if found is None:
        return None
    bias, factor = found.router.e_score_correction_bias, found.router.routed_scaling_factor
    return replace(found, bias=bias, factor=factor)


def _ernie(layer: Any) -> Mixture | None:
    found = _mixture(layer, "shared_experts", wide=True)
    if found is None:
        return None
    return replace(found, bias=found.router.moe_statics.e_score_correction_bias[0])


def _hunyuan(layer: Any) -> Mixture:
    mlp, weight = layer.mlp, layer.mlp.gate.wg.weight
    wide = weight.dtype == torch.float32  # as the library loads it, whatever the other weights are
    how = {"shared": mlp.shared_mlp, "wide": wide, "cast": not wide}
    return Mixture(mlp.gate, mlp.experts, weight, mlp.gate.top_k, **how)


def _granite(layer: Any) -> Mixture:
    router = layer.block_sparse_moe.router
    return Mixture(router, layer.block_sparse_moe.experts, router.weight, router.top_k)


def _gemma4(layer: Any) -> Mixture | None:
    router = part_named(layer, "router")
    if router is None:
        return None
    return Mixture(
        router,
        layer.experts,
        router.proj.weight,
        router.config.top_k_experts,
        norm=router.norm,
        scale=router.scale,
        number=router.scalar_root_size,
        factors=router.per_expert_scale,
        cast=False,
        shared=layer.mlp,
        before=layer.pre_feedforward_layernorm_2,
        after=layer.post_feedforward_layernorm_2,
        dense=layer.post_feedforward_layernorm_1,
    )


def _t5gemma_embed(decoder: Any, tokens: Tensor) -> Tensor:
    hidden: Tensor = decoder.embed_tokens(tokens)  # scaled by the decoder, not in the embedding
    return hidden * torch.tensor(decoder.config.hidden_size**0.5, dtype=hidden.dtype)


def _base_of_layer(attention: Any) -> float:
    return float(attention.config.layer_rope_theta[attention.layer_idx])


def _in_windows(attention: Any) -> bool:
    """Whether it rotates: layers with windows do, or all if none has one."""
    return attention.sliding_window is None or attention.is_sliding


def _granite_angles(decoder: Any, kind: str) -> Any:
    bases = (float(each.config.rope_parameters["rope_theta"]) for each in decoder.rotary_embs)
    made = dict(zip(map(str, bases), decoder.rotary_embs, strict=True))
    return made.get(kind, decoder.rotary_emb)  # of which "nope" takes the shape only


_MLP_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_AROUND = ("input_layernorm", "post_attention_layernorm", *_MLP_NORMS)
_AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_HUNYUAN: dict[str, Any] = {
    "head_norms": ("query_layernorm", "key_layernorm", ""),
    "late_norms": True,
}
_QWEN_HYBRID: dict[str, Any] = {"norm": "one plus", "gate": "q_proj", "recurrent": "linear_attn"}
_IN_ONE: dict[str, Any] = {"expansions": ("gate_up_proj",), "activation": "activation_fn"}
_UNGATED: dict[str, Any] = {"expansions": ("up_proj",), "gated": False}
_GRANITE: dict[str, Any] = {
    "embed": lambda decoder, tokens: decoder.embed_tokens(tokens) * decoder.embedding_multiplier,
    "residual": "residual_multiplier",
}
# Gemma 2 and 3: norms times (1 + weight) on both sides of a sublayer, and some sliding windows.
_GEMMA2: dict[str, Any] = {"norm": "one plus", "windows": "by type", "softcap": True}
# Gemma 4: upper layers that read the keys of lower ones, and a mixture in some models.
_GEMMA4: dict[str, Any] = {
    "norms": _AROUND,
    "norm": "wide",
    "windows": "by type",
    "shares_keys": True,
    "softcap": True,
    "mixture": _gemma4,
    "tail": True,
}
_FAMILIES = (
    Family("llama"),
    Family("gemma", norm="one plus"),
    Family("gemma2", norms=_AROUND, score_cap="attn_logit_softcapping", **_GEMMA2),
    Family("gemma3_text", package="gemma3", norms=_AROUND, **_GEMMA2),
    Family("gemma4_text", package="gemma4", inputs=True, **_GEMMA4),
    Family("gemma4_unified_text", package="gemma4_unified", **_GEMMA4),
    Family("granite", divisor="logits_scaling", **_GRANITE),
    # A slot without a value beside those that attention reads, and angles of several bases.
    Family(
        "granite_swa",
        windows="by type",
        rotates=_base_of_layer,
        rotary=_granite_angles,
        divisor="logits_scaling",
        **_GRANITE,
    ),
    Family("mistral", windows="all"),
    Family("ministral", windows="by type"),
    Family(
        "ministral3",
        windows="all",
        positions=True,
        modules_only="queries are scaled by their positions",
    ),
    Family("mixtral", windows="all", mixture=partial(_mixture, cast=False)),
    # Norms after the sublayers, and over all heads of queries and of keys.
    Family("olmo2", norms=_AFTER, norm="wide"),
    Family("olmo3", norms=_AFTER, norm="wide", windows="by type"),
    # One linear layer for queries, keys and values, and one for gate and MLP.
    Family("phi3", windows="all", projections=("qkv_proj",), **_IN_ONE),
    Family("qwen2", windows="by type"),
    Family("qwen3", windows="by type"),
    Family("qwen2_moe", windows="by type", mixture=_mixture),
    Family("qwen3_moe", windows="all", mixture=_mixture),
    # Three of four layers have a recurrent state, which the library computes.
    Family("qwen3_5_text", package="qwen3_5", **_QWEN_HYBRID),
    Family("qwen3_5_moe_text", package="qwen3_5_moe", mixture=_mixture, **_QWEN_HYBRID),
    Family("qwen3_next", mixture=_mixture, **_QWEN_HYBRID),
    Family("olmoe", mixture=_mixture),
    Family("flex_olmo", norms=_AFTER, norm="wide", mixture=_mixture),
    Family("mellum", windows="by type", mixture=_mixture),
    Family(
        "granitemoe",
        mlp="block_sparse_moe",
        mixture=_granite,
        divisor="logits_scaling",
        **_GRANITE,
    ),
    # Routers with sigmoids, and an expert for all tokens.
    Family("glm4_moe", mixture=_sigmoid),
    Family("sarvam_moe", package="glm4_moe", mixture=_sigmoid),
    Family("dots1", windows="by type", mixture=_sigmoid),
    Family("exaone_moe", windows="by type", rotates=_in_windows, mixture=_sigmoid),
    Family("solar_open", mixture=_sigmoid),
    Family("ernie4_5_moe", pairs=True, mixture=_ernie),
    Family("hunyuan_v1_moe", mixture=_hunyuan, **_HUNYUAN),
    # Some layers do not rotate queries and keys by their positions.
    Family("smollm3", windows="by type", rotates=lambda attention: bool(attention.use_rope)),
    # A gate on what attention reads, norms without weights of its queries and keys, no rotation in
    # layers with full attention, and a norm behind the embedding, in its class.
    Family(
        "muse_glimmer_text",
        package="muse_glimmer",
        norms=_AROUND,
        last_norm="wide",
        gate="gate_proj",
        head_norms=("qk_norm", "qk_norm", ""),
        query_factor="qk_scale_factor",
        rotates=lambda attention: _base_of_layer(attention) != 0,
        multiplier="output_multiplier",
        **_GEMMA2,
    ),
    # Llama's own classes.
    *(Family(name, package="llama") for name in ("exaone", "internlm3", "iquestcoder")),
    # Llama with other biases, or with windows.
    Family("seed_oss"),
    Family("cwm", windows="by type"),
    # Gemma 2 without norms after its sublayers.
    Family(
        "vaultgemma",
        norms=("input_layernorm", "", "pre_feedforward_layernorm", ""),
        score_cap="attn_logit_softcapping",
        **_GEMMA2,
    ),
    # Rotations of neighbouring numbers.
    Family("ernie4_5", pairs=True),
    Family("helium", norm="wide", pairs=True),
    Family("glm", pairs=True, **_IN_ONE),
    Family(
        "glm4",
        norms=(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        pairs=True,
        **_IN_ONE,
    ),
    # MLPs without a gate.
    Family("arcee", **_UNGATED),
    Family("apertus", norms=("attention_layernorm", "", "feedforward_layernorm", ""), **_UNGATED),
    Family("hunyuan_v1_dense", **_HUNYUAN),
    Family("exaone4", norms=_AFTER, windows="by type", rotates=_in_windows),
    Family(
        "hyperclovax",
        norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        multiplier="logits_scaling",
        **_GRANITE,
    ),
    # Gemma 2's decoder with an encoder, and a cross attention in every layer.
    Family(
        "t5_gemma_module",
        package="t5gemma",
        norms=("pre_self_attn_layernorm", "post_self_attn_layernorm", *_MLP_NORMS),
        score_cap="attn_logit_softcapping",
        embed=_t5gemma_embed,
        encoder="t5gemma",
        modules_only="it has a cross attention",
        **_GEMMA2,
    ),
)
_GEMMA4_PICTURES: dict[str, Any] = {
    "placeholders": ("image_token_id", "video_token_id", "audio_token_id"),
    "two_way": lambda text: text.use_bidirectional_attention == "vision",
}
_CONDITIONAL = (
    Conditional("gemma3", softcap=False, types="token_type_ids", two_way=lambda text: True),
    Conditional("gemma4", in_full=False, **_GEMMA4_PICTURES),
    Conditional("gemma4_unified", past_windows=True, **_GEMMA4_PICTURES),
    *map(Conditional, ("llava", "llava_next", "mistral3")),
    Conditional("muse_glimmer", placeholders=("image_token_id", "video_token_id"), blank=0),
)
_ASSISTANTS = (
    AssistantFamily("gemma4_assistant", "gemma4", "Gemma4"),
    AssistantFamily("gemma4_unified_assistant", "gemma4_unified", "Gemma4Unified"),
)

FAMILIES = {each.name: each for each in _FAMILIES}
"""Families by the `model_type` of the text decoder."""
CONDITIONAL = {each.name: each for each in _CONDITIONAL}
"""Classes around such decoders that also take pictures, by `model_type`."""
ASSISTANTS = {each.name: each for each in _ASSISTANTS}
"""Decoders that draft from another model's keys and values, by `model_type`."""


def unopened(config: Any) -> str | None:
    """Why a model with this configuration is not opened into sublayers, or None."""
    if not isinstance(config, PretrainedConfig):
        return f"{type(config).__name__} is not a transformers model"
    kind = config.model_type
    text = config.get_text_config(decoder=True)
    family = FAMILIES.get(text.model_type)
    around = {*CONDITIONAL, *ASSISTANTS, family and family.encoder}
    if family is None or (text is not config and kind not in around):
        decoders = sorted(name for name, family in FAMILIES.items() if not family.encoder)
        return (
            f"the sublayers of architecture {kind!r} are not known; known are those of the causal "
            f"language models {', '.join(decoders)}, and of {', '.join(CONDITIONAL)} around them"
        )
    if getattr(text, "clip_qkv", None) is not None or getattr(text, "n_group", 1) != 1:
        return f"{kind!r} is not supported with clip_qkv, or with groups of experts (n_group)"
    if two_way(text):
        return "bidirectional attention is not supported; decoders only"
    return None


def two_way(text: Any) -> bool:
    """Whether a configuration's text decoder has bidirectional attention."""
    # Only some of the library's configurations have this attribute.
    return getattr(text, "use_bidirectional_attention", None) in (True, "all")
