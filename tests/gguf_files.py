"""Small GGUF files of random weights, and the models that they contain."""

import math

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16")
HALVES = {  # the 16-bit numbers of a block
    **{name: (0,) for name in ("Q8_0", "Q4_0", "Q5_0")},
    **{name: (0, 2) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")},
    "Q6_K": (208,),
}
SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
}
MODELS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen3moe": "qwen3_moe"}
MODELS |= {"hunyuan-dense": "hunyuan_v1_dense", "mistral3": "ministral3", "chatglm": "glm"}
MODELS |= {"qwen35": "qwen3_5_text", "exaone": "llama"}
FILES = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2"}
TURNED = ("arcee", "granite", "llama", "mistral3", "smollm3")  # halves of heads are interleaved
SHIFTED = ("gemma", "gemma2", "gemma3", "qwen35")  # and these hold the weights of norms plus one
_ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
_MIXED = {"num_experts_per_tok": 2, "intermediate_size": 256}
_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OWN = {  # values of a configuration
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "arcee": {"pad_token_id": None},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 4},
    "gemma2": {"sliding_window": 8},
    "gemma3": {"sliding_window": 8},
    "gemma4": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "global_head_dim": 128,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 300,
        "final_logit_softcapping": 30.0,
        "eos_token_id": None,
    },
    "chatglm": {"partial_rotary_factor": 0.5, "pad_token_id": None},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5, "pad_token_id": None},
    "granite": {
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "mistral": {"sliding_window": None},
    "mistral3": {
        "rope_parameters": {
            **{"rope_theta": 1e6, "llama_4_scaling_beta": 0.125, **YARN},
            **{"mscale": 1.0, "mscale_all_dim": 0.5},
        },
    },
    "mixtral": {"num_local_experts": 4, **_MIXED},
    "olmo3": {
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_theta": 1e4, **YARN},
        },
    },
    "phi3": {
        "pad_token_id": None,
        "sliding_window": 8,
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1 + n / 8 for n in range(24)],
            "long_factor": [4 + n / 8 for n in range(24)],
        },
    },
    "qwen3moe": {
        "num_experts": 4,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
    },
    "qwen35": {
        **{"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 32, "partial_rotary_factor": 0.25},
    },
    "smollm3": {"num_hidden_layers": 4, "pad_token_id": None},
}
LARGE_GEMMA_4 = {  # without keys of other layers, but with a mixture
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "moe_intermediate_size": 256,
    **_MOE,
}


def raw(rng, form, rows, columns):
    """Random bytes (rows, bytes) of a weight (rows, columns) in a format: small finite numbers."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[form]]
    if form in ("F16", "BF16", "F32"):
        made = torch.from_numpy(rng.normal(0, 0.05, (rows, columns)))
        kind = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[form]
        return made.to(kind).view(torch.uint8).numpy()
    blocks = rng.integers(0, 256, (rows * columns // numbers, nbytes), dtype=np.uint8)
    scale = 2.0 ** -(14 if "K" in form else 8 if form == "Q8_0" else 5)
    for at in HALVES[form]:
        halves = (scale * rng.normal(0, 1, len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def numbers(data, form):
    """The numbers that the bytes stand for, by the reference implementation."""
    return torch.from_numpy(gguf.dequantize(data, GGMLQuantizationType[form]))


def write(path, kind="llama", forms=FORMATS, seed=0, tied=True, **overrides):
    """Write a file whose matrices use some formats in turn; returns the model that it contains.

    Names of tensors and keys are those of the `gguf` package, which llama.cpp writes files with.

    Args:
        kind: the architecture, or a model that llama.cpp writes under another name.
        overrides: values of the configuration.
    """
    rng, file = np.random.default_rng(seed), FILES.get(kind, kind)
    shape = SHAPE | OWN.get(kind, {}) | overrides
    shape |= {"query_pre_attn_scalar": shape["head_dim"]} if kind in ("gemma2", "gemma3") else {}
    config = AutoConfig.for_model(MODELS.get(kind, kind), **shape, tie_word_embeddings=tied)
    config._attn_implementation = "eager" if kind == "gemma2" else "sdpa"
    config._experts_implementation = "eager"  # the others do not support float64
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    writer = gguf.GGUFWriter(path, file)
    _describe(writer, kind, config, shape)
    turn, names = 0, gguf.get_tensor_name_map(_ARCHITECTURES[file], config.num_hidden_layers)
    held = {id(each): name for name, each in reversed(model.state_dict(keep_vars=True).items())}
    for name, weight in model.state_dict(keep_vars=True).items():
        own = ".linear_attn." not in name
        if held[id(weight)] != name:  # tied
            continue
        known = names.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        if ".act_fn." in name:  # in the metadata
            weight.data.copy_(torch.as_tensor(rng.normal(weight.data, 0.2)))
            continue
        if weight.dim() == 1:
            made = torch.from_numpy(rng.normal(1.0, 0.2, weight.shape).astype(np.float32))
            writer.add_tensor(_scale(name, known), (-made if "A_log" in name else made).numpy())
            made = made.log() if "A_log" in name else made
            made = made - 1 if file in SHIFTED and "norm" in name and own else made
        else:
            turned = [forms[(turn + n) % len(forms)] for n in range(len(forms))]
            form = next(each for each in turned if weight.shape[-1] % _block(each) == 0)
            turn += 1
            data = raw(rng, form, weight.numel() // weight.shape[-1], weight.shape[-1])
            made = numbers(data, form).view(weight.shape)
            if file in TURNED and ("q_proj" in name or "k_proj" in name):
                data = _turned(data, config.head_dim)
            data = data.reshape(*weight.squeeze(1).shape[:-1], -1)
            for part, rows in _parts(name, known, data):
                writer.add_tensor(part, rows, raw_dtype=GGMLQuantizationType[form])
        weight.data.copy_(made if own else _grouped(name, made, config))
    for each in ("alpha_n", "alpha_p", "beta", "eps") if kind == "apertus" else ():
        acts = [layer.mlp.act_fn for layer in model.model.layers]
        getattr(writer, f"add_xielu_{each}")([getattr(act, each).item() for act in acts])
    for name, factors in _factors(kind, config).items():
        writer.add_tensor(name, np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.generation_config.eos_token_id = None
    return model


def _block(form):
    return gguf.GGML_QUANT_SIZES[GGMLQuantizationType[form]][0]


def _scale(name, known):
    """The name of a vector; those of Gemma 4's mixture belong to other tensors."""
    layer = name.split(".")[2]
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    return f"{known}.weight" if name.endswith("layer_scalar") else known


def _parts(name, known, data):
    """Names and rows of the tensors of one weight. Most files have two for gates of experts."""
    if data.ndim == 2:
        return [(known, data)]
    if known is not None:
        return [(f"{known}.weight", data)]
    layer, half = name.split(".")[2], data.shape[1] // 2
    halves = {"gate": data[:, :half], "up": data[:, half:]}
    return [
        (f"blk.{layer}.ffn_{each}_exps.weight", np.ascontiguousarray(rows))
        for each, rows in reversed(halves.items())
    ]


def _factors(kind, config):
    if kind == "phi3":
        rope = config.rope_parameters
        return {f"rope_factors_{each}.weight": rope[f"{each}_factor"] for each in ("long", "short")}
    return {"rope_freqs.weight": [1.0] * 16 + [1e30] * 48} if kind == "gemma4" else {}


def _grouped(name, made, config):
    """Weights of Qwen 3.5 in the library's order: heads of values that share keys side by side."""
    if name.endswith("norm.weight"):
        return made
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    width = 1 if name.endswith(("_a.weight", "_b.weight", "log", "bias")) else 32
    order = torch.arange(heads * width).view(keys, -1, width).transpose(0, 1).flatten()
    if name.endswith(("qkv.weight", "conv1d.weight")):
        order = torch.cat((torch.arange(64), order + 64))
    grouped = torch.empty_like(made)
    if "out_proj" in name:
        grouped[:, order] = made
    else:
        grouped[order] = made
    return grouped


def _turned(rows, width):
    """Rows in the order of Llama files, which interleave both halves of each head."""
    heads = rows.reshape(-1, 2, width // 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def _describe(writer, kind, config, shape):
    layers = config.num_hidden_layers
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if kind != "gemma4":
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
    if kind not in ("gemma4", "phi3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if (window := getattr(config, "sliding_window", None)) is not None:
        writer.add_sliding_window(window)
    if kind in ("exaone4", "gemma4", "olmo3"):
        slides = [each == "sliding_attention" for each in config.layer_types]
        writer.add_sliding_window_pattern(slides)
    if kind in ("mixtral", "qwen3moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "qwen35":
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if kind in ("chatglm", "glm4", "phi3", "qwen35"):
        writer.add_rope_dimension_count(int(config.head_dim * shape["partial_rotary_factor"]))
    if kind == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(2) / math.log(128)))
    if kind == "gemma4":
        _describe_gemma4(writer, shape)
    spelled = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(161, 300) if c != 173]
    words = [*spelled, "ab", *(f"<{n}>" for n in range(config.vocab_size))][: config.vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b"])


def _describe_gemma4(writer, shape):
    layers, shared = shape["num_hidden_layers"], shape["num_kv_shared_layers"]
    wide = [1 + (shape["use_double_wide_mlp"] and n >= layers - shared) for n in range(layers)]
    widths = [shape["intermediate_size"] * each for each in wide]
    writer.add_feed_forward_length(widths if max(wide) > 1 else widths[0])
    heads = shape["num_key_value_heads"]
    full = shape.get("num_global_key_value_heads")
    writer.add_head_count_kv([heads, full] * (layers // 2) if full else heads)
    writer.add_key_length(shape["global_head_dim"])
    writer.add_value_length(shape["global_head_dim"])
    writer.add_key_length_swa(shape["head_dim"])
    writer.add_value_length_swa(shape["head_dim"])
    writer.add_rope_dimension_count(shape["global_head_dim"])
    writer.add_rope_dimension_count_swa(shape["head_dim"])
    writer.add_rope_freq_base_swa(1e4)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(shape["hidden_size_per_layer_input"])
    writer.add_final_logit_softcapping(shape["final_logit_softcapping"])
    if "num_experts" in shape:
        writer.add_expert_count(shape["num_experts"])
        writer.add_expert_used_count(shape["top_k_experts"])
        writer.add_expert_feed_forward_length(shape["moe_intermediate_size"])
