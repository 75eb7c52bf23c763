"""What GGUF files of llama.cpp's architectures say, and which models they contain.

To add an architecture, add it to `ARCHITECTURES`; nothing else names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

FACTORS = "rope_freqs.weight"
"""Numbers by which rotary frequencies are divided."""
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_PATTERN = "attention.sliding_window_pattern"
NUMBERS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.scale_linear": "rope_scaling",  # the old name of the next
    "rope.scaling.factor": "rope_scaling",
}
"""Positive numbers by key, in every architecture: their names in a configuration."""
_WINDOW = {"attention.sliding_window": "sliding_window"}
_GEMMA_NUMBERS = {
    **_WINDOW,
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GEMMA_NAMES = {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4_NAMES = {
    **_GEMMA_NAMES,
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.gate_up_proj",
    "ffn_up_exps": "experts.gate_up_proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


Values = dict[str, Any]


@dataclass(frozen=True)
class FileArchitecture:
    """What the files of an architecture say.

    Attributes:
        model: the `model_type`.
        numbers: positive numbers by key, besides `NUMBERS`: their names in a configuration.
        counts: numbers by key that may also be 0, which means none.
        reads: other keys, which `more` reads.
        names: names of weights that differ from those in other architectures.
        interleaved: whether the rows of both halves of a head of queries and keys take turns.
        shifted: whether the weights of norms are stored plus one.
        tensors: names of tensors that are no weights.
        more: maps the values by key with the numbers of `tensors`, those of the configuration so
            far, and the names of all tensors to further values of the configuration.
    """

    model: str
    numbers: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    reads: Collection[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    shifted: bool = False
    tensors: Collection[str] = ()
    more: Callable[[Values, Values, Collection[str]], Values] = lambda *_: {}

    def name(self, layer: str | None, part: str, end: str) -> str | None:
        """The name of a weight; None if there is none. `end` is "weight", "bias" or "scale"."""
        names = _NAMES | dict(self.names)
        name = names.get(f"{part}.{end}")
        if name is None and part in names:
            name = names[part] if part.endswith("_exps") else f"{names[part]}.{end}"
        return name if name is None or layer is None else f"model.layers.{int(layer)}.{name}"


def _layer_types(given: Values, values: Values) -> list[str]:
    slides, layers = given.get(_PATTERN), values["num_hidden_layers"]
    if not isinstance(slides, list) or len(slides) != layers:
        raise ValueError(f"{_PATTERN} must say for each of {layers} layers whether it slides")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _gemma(given: Values, values: Values, _: Collection[str], largest: int) -> Values:
    """A file does not say how scores are scaled, which is otherwise in the model of 27B."""
    layers, head = values["num_hidden_layers"], values["head_dim"]
    if layers == largest:
        head = values["hidden_size"] // values["num_attention_heads"]
    return {"query_pre_attn_scalar": head}


def _gemma3(given: Values, values: Values, names: Collection[str]) -> Values:
    full = {"layer_types": ["full_attention"] * values["num_hidden_layers"]}
    return _gemma(given, values, names, 62) | ({} if "sliding_window" in values else full)


def _gemma4(given: Values, values: Values, names: Collection[str]) -> Values:
    kinds, frequencies = _layer_types(given, values), values["global_head_dim"] // 2
    heads, widths = (
        each if isinstance(each, list) else [each] * len(kinds)
        for each in (given.get("attention.head_count_kv"), given.get("feed_forward_length"))
    )
    by_kind = dict(zip(kinds, heads, strict=True))
    factors = given.pop(FACTORS, [])
    if len(factors) != frequencies or not all(each == 1 or each > 1e20 for each in factors):
        raise ValueError(f"{FACTORS} must say which of {frequencies} frequencies turn")
    slid = {"rope_type": "default", "rope_theta": values.pop("rope_local_base_freq", 10_000.0)}
    full = {"rope_type": "proportional", "rope_theta": values.pop("rope_theta")}
    full["partial_rotary_factor"] = factors.count(1) / frequencies
    return {
        "layer_types": kinds,
        "num_key_value_heads": by_kind["sliding_attention"],
        "num_global_key_value_heads": by_kind["full_attention"],
        "attention_k_eq_v": f"blk.{kinds.index('full_attention')}.attn_v.weight" not in names,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": values.get("hidden_size_per_layer_input", 0),
        "vocab_size_per_layer_input": values["vocab_size"],
        "enable_moe_block": "num_experts" in values,
        "rope_parameters": {"sliding_attention": slid, "full_attention": full},
    }


def _granite(given: Values, values: Values, _: Collection[str]) -> Values:
    if not given.get("rope.scaling.finetuned", True):
        raise ValueError("rope.scaling.finetuned = False is not supported")
    return {"attention_multiplier": values.get("attention_multiplier", values["head_dim"] ** -0.5)}


def _olmo2(given: Values, values: Values, _: Collection[str]) -> Values:
    if "sliding_window" not in values:
        return {}
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    return {
        "model_type": "olmo3",
        "layer_types": _layer_types(given, values),
        "rope_parameters": {"sliding_attention": dict(rope), "full_attention": dict(rope)},
    }


def _exaone4(given: Values, values: Values, _: Collection[str]) -> Values:
    full = {"layer_types": ["full_attention"] * values["num_hidden_layers"], "sliding_window": None}
    return {"layer_types": _layer_types(given, values)} if "sliding_window" in values else full


def _glm4(given: Values, values: Values, names: Collection[str]) -> Values:
    width, biases = values["head_dim"], "blk.0.attn_q.bias" in names
    turned = given.get("rope.dimension_count", width)
    return {"partial_rotary_factor": turned / width, "attention_bias": biases}


def _phi3(given: Values, values: Values, names: Collection[str]) -> Values:
    width = values["head_dim"]
    made: Values = {"partial_rotary_factor": given.get("rope.dimension_count", width) / width}
    if _LONG in names:
        made["original_max_position_embeddings"] = given["rope.scaling.original_context_length"]
        made["rope_scaling"] = {
            "rope_type": "longrope",
            "attention_factor": given.get("rope.scaling.attn_factor", 1.0),
            "short_factor": given[_SHORT],
            "long_factor": given[_LONG],
        }
    return made


_QWEN3_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
ARCHITECTURES = {
    "llama": FileArchitecture(
        "llama",
        counts={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        interleaved=True,
        tensors=(FACTORS,),
        more=lambda _, values, __: (
            {"model_type": "mixtral"} if "num_local_experts" in values else {}
        ),
    ),
    "qwen2": FileArchitecture("qwen2"),
    "qwen3": FileArchitecture("qwen3"),
    "qwen3moe": FileArchitecture(
        "qwen3_moe", numbers=_QWEN3_MOE, more=lambda *_: {"norm_topk_prob": True}
    ),
    "gemma": FileArchitecture("gemma", shifted=True),
    "gemma2": FileArchitecture(
        "gemma2",
        numbers=_GEMMA_NUMBERS,
        names=_GEMMA_NAMES,
        shifted=True,
        more=partial(_gemma, largest=46),
    ),
    "gemma3": FileArchitecture(
        "gemma3_text",
        numbers=_GEMMA_NUMBERS | {"rope.freq_base_swa": "rope_local_base_freq"},
        names=_GEMMA_NAMES,
        shifted=True,
        more=_gemma3,
    ),
    "gemma4": FileArchitecture(
        "gemma4_text",
        numbers={
            **_WINDOW,
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        counts={
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        reads=(
            *("attention.head_count_kv", "feed_forward_length", "rope.dimension_count"),
            *("attention.value_length", "attention.value_length_swa", "rope.dimension_count_swa"),
            _PATTERN,
        ),
        names=_GEMMA4_NAMES,
        tensors=(FACTORS,),
        more=_gemma4,
    ),
    "granite": FileArchitecture(
        "granite",
        numbers={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        interleaved=True,
        tensors=(FACTORS,),
        more=_granite,
    ),
    "arcee": FileArchitecture("arcee", interleaved=True, tensors=(FACTORS,)),
    "ernie4_5": FileArchitecture("ernie4_5"),
    "hunyuan-dense": FileArchitecture(
        "hunyuan_v1_dense",
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "seed_oss": FileArchitecture("seed_oss"),
    "exaone4": FileArchitecture(
        "exaone4", counts=_WINDOW, reads=(_PATTERN,), tensors=(FACTORS,), more=_exaone4
    ),
    "glm4": FileArchitecture(
        "glm4",
        reads=("rope.dimension_count",),
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        tensors=(FACTORS,),
        more=_glm4,
    ),
    "olmo2": FileArchitecture("olmo2", counts=_WINDOW, reads=(_PATTERN,), more=_olmo2),
    "phi3": FileArchitecture(
        "phi3",
        counts=_WINDOW,
        reads=("rope.dimension_count", "rope.scaling.attn_factor"),
        names={"ffn_up": "mlp.gate_up_proj"},
        tensors=(_SHORT, _LONG),
        more=_phi3,
    ),
    "smollm3": FileArchitecture("smollm3", interleaved=True, tensors=(FACTORS,)),
}
"""The architectures that are read, by `general.architecture`."""
