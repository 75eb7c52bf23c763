"""What GGUF files of llama.cpp's architectures say, and which models they contain.

To add an architecture, add it to `ARCHITECTURES`; nothing else names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.gate_up_proj"),
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GEMMA_NAMES = {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4_NAMES = {
    **_GEMMA_NAMES,
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    **{f"ffn_{each}_exps": "experts.gate_up_proj" for each in ("gate", "up", "gate_up")},
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
        change: maps the name of a tensor in a layer, its numbers as the file has them, and the
            configuration to the library's numbers. Of packed rows it changes only the order.
        scalars: arrays in the metadata with a number for each layer: their weights in a layer.
        tensors: names of tensors that are no weights.
        more: maps the values by key with the numbers of `tensors`, those of the configuration so
            far, and the names of all tensors to further values of the configuration.
    """

    model: str
    numbers: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    reads: Collection[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[str, Tensor, Any], Tensor] = lambda _, numbers, __: numbers
    scalars: Mapping[str, str] = field(default_factory=dict)
    tensors: Collection[str] = (FACTORS,)
    more: Callable[[Values, Values, Collection[str]], Values] = lambda *_: {}

    def name(self, layer: str, part: str, end: str) -> str | None:
        """The name of a weight; None if there is none. `end` is ".weight", ".bias" or ".scale"."""
        names = _NAMES | dict(self.names)
        name = names.get(f"{part}{end}")
        if name is None and part in names:
            name = names[part] if part.endswith("_exps") else f"{names[part]}{end}"
        return name if name is None or not layer else f"model.layers.{int(layer)}.{name}"


def _plain(base: float) -> Values:
    return {"rope_type": "default", "rope_theta": base}


def _layer_types(given: Values, values: Values) -> list[str]:
    slides, layers = given.get(_PATTERN), values["num_hidden_layers"]
    if not isinstance(slides, list) or len(slides) != layers:
        raise ValueError(f"{_PATTERN} must say for each of {layers} layers whether it slides")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _halves(part: str, rows: Tensor, config: Any) -> Tensor:
    """Rows of queries and keys: in a file, those of both halves of a head take turns."""
    if part not in ("attn_q", "attn_k"):
        return rows
    heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _shifted(part: str, numbers: Tensor, _: Any) -> Tensor:
    """Norms, which multiply by one more than the library's weights."""
    return numbers - 1 if part.endswith("norm") else numbers


def _gemma(given: Values, values: Values, _: Collection[str], largest: int) -> Values:
    """A file does not say how scores are scaled, which is otherwise in the model of 27B."""
    layers, head = values["num_hidden_layers"], values["head_dim"]
    if layers == largest:
        head = values["hidden_size"] // values["num_attention_heads"]
    return {"query_pre_attn_scalar": head}


def _gemma3(given: Values, values: Values, names: Collection[str]) -> Values:
    slid = _plain(values.pop("rope_local_base_freq", 10_000.0))
    rope = {"sliding_attention": slid, "full_attention": values["rope_parameters"]}
    full = {"layer_types": ["full_attention"] * values["num_hidden_layers"]}
    made = _gemma(given, values, names, 62) | ({} if "sliding_window" in values else full)
    return made | {"rope_parameters": rope}


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
    full, slid = values["rope_parameters"], _plain(values.pop("rope_local_base_freq", 10_000.0))
    if full["rope_type"] != "default":
        raise ValueError("its rotary positions cannot be scaled")
    full |= {"rope_type": "proportional", "partial_rotary_factor": factors.count(1) / frequencies}
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
    full = values["rope_parameters"]  # only these layers are scaled
    return {
        "model_type": "olmo3",
        "layer_types": _layer_types(given, values),
        "rope_parameters": {
            "sliding_attention": _plain(full["rope_theta"]),
            "full_attention": full,
        },
    }


def _exaone4(given: Values, values: Values, _: Collection[str]) -> Values:
    full = {"layer_types": ["full_attention"] * values["num_hidden_layers"], "sliding_window": None}
    return {"layer_types": _layer_types(given, values)} if "sliding_window" in values else full


def _mistral3(_: Values, values: Values, __: Collection[str]) -> Values:
    scales, rope = "llama_4_scaling_beta" in values, values["rope_parameters"]
    for name in {"llama_4_scaling_beta", "mscale_all_dim"} & values.keys():
        rope |= {"mscale": 1.0, name: values.pop(name)}
    return {"model_type": "ministral3"} if scales else {}


def _phi3(given: Values, values: Values, names: Collection[str]) -> Values:
    if _LONG not in names:
        return {}
    factors = {"short_factor": given[_SHORT], "long_factor": given[_LONG]}
    scale = given.get("rope.scaling.attn_factor", 1.0)
    values["rope_parameters"] |= {"rope_type": "longrope", "attention_factor": scale, **factors}
    return {"original_max_position_embeddings": given["rope.scaling.original_context_length"]}


def _qwen35(part: str, numbers: Tensor, config: Any) -> Tensor:
    """Decays as logarithms, and heads of values in the order of the heads of keys that they share.

    In a file, the heads of values that share keys lie as far apart as there are heads of keys.
    """
    if part == "ssm_norm":
        return numbers
    if not part.startswith("ssm_") and part not in ("attn_qkv", "attn_gate"):
        return _shifted(part, numbers, config)
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    width = 1 if part in ("ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt") else width
    order = torch.arange(config.linear_num_value_heads * width)
    order = order.view(-1, keys, width).transpose(0, 1).flatten()
    if part in ("attn_qkv", "ssm_conv1d"):  # queries and keys come first
        first = 2 * keys * config.linear_key_head_dim
        order = torch.cat((torch.arange(first), order + first))
    if part == "ssm_out":
        return numbers[:, order]
    return (-numbers[order]).log() if part == "ssm_a" else numbers[order]


_QWEN3_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
ARCHITECTURES = {
    "llama": FileArchitecture(
        "llama",
        counts={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        change=_halves,
        more=lambda _, values, __: (
            {"model_type": "mixtral"} if "num_local_experts" in values else {}
        ),
    ),
    "qwen2": FileArchitecture("qwen2"),
    "qwen3": FileArchitecture("qwen3"),
    "qwen3moe": FileArchitecture(
        "qwen3_moe", numbers=_QWEN3_MOE, more=lambda *_: {"norm_topk_prob": True}
    ),
    "qwen35": FileArchitecture(
        "qwen3_5_text",
        numbers={
            "full_attention_interval": "full_attention_interval",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.time_step_rank": "linear_num_value_heads",
        },
        counts={"nextn_predict_layers": "mtp_num_hidden_layers"},
        reads=("rope.dimension_count", "rope.dimension_sections", "ssm.inner_size"),
        names={
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_a": "linear_attn.A_log",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_dt.bias": "linear_attn.dt_bias",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
        },
        change=_qwen35,
        more=lambda given, values, _: {
            "linear_value_head_dim": given["ssm.inner_size"] // values["linear_num_value_heads"]
        },
    ),
    "gemma": FileArchitecture("gemma", change=_shifted),
    "gemma2": FileArchitecture(
        "gemma2",
        numbers=_GEMMA_NUMBERS,
        names=_GEMMA_NAMES,
        change=_shifted,
        more=partial(_gemma, largest=46),
    ),
    "gemma3": FileArchitecture(
        "gemma3_text",
        numbers=_GEMMA_NUMBERS | {"rope.freq_base_swa": "rope_local_base_freq"},
        names=_GEMMA_NAMES,
        change=_shifted,
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
        change=_halves,
        more=_granite,
    ),
    "apertus": FileArchitecture(
        "apertus",
        names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        scalars={
            f"xielu.{each}": f"mlp.act_fn.{each}" for each in ("alpha_n", "alpha_p", "beta", "eps")
        },
    ),
    "arcee": FileArchitecture("arcee", change=_halves),
    "chatglm": FileArchitecture(
        "glm", reads=("rope.dimension_count",), names={"ffn_up": "mlp.gate_up_proj"}
    ),
    "ernie4_5": FileArchitecture("ernie4_5"),
    "hunyuan-dense": FileArchitecture(
        "hunyuan_v1_dense",
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "seed_oss": FileArchitecture("seed_oss"),
    "exaone": FileArchitecture("llama"),
    "exaone4": FileArchitecture("exaone4", counts=_WINDOW, reads=(_PATTERN,), more=_exaone4),
    "glm4": FileArchitecture(
        "glm4",
        reads=("rope.dimension_count",),
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "mistral3": FileArchitecture(
        "llama",
        counts={
            "attention.temperature_scale": "llama_4_scaling_beta",
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        },
        change=_halves,
        more=_mistral3,
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
    "smollm3": FileArchitecture("smollm3", change=_halves),
}
"""The architectures that are read, by `general.architecture`."""
