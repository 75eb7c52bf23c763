"""Small GGUF files of random weights, and the models that they contain."""

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
KINDS = {"gemma3": "gemma3_text"}
GEMMA = ("gemma2", "gemma3")
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
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


def _name(name, gemma):
    path, _, kind = name.rpartition(".")
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if path in ends:
        return f"{ends[path]}.{kind}"
    _, _, layer, part = path.split(".", 3)
    parts = _PARTS | {"post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm"}
    parts |= {"pre_feedforward_layernorm": "ffn_norm"}
    parts |= {"post_feedforward_layernorm": "post_ffw_norm"}
    return f"blk.{layer}.{parts[part]}.{kind}"


def write(path, kind="llama", forms=FORMATS, seed=0, tied=True, **overrides):
    """Write a file whose matrices use some formats in turn; returns the model that it contains.

    Args:
        kind: the architecture.
        overrides: values of the configuration.
    """
    rng = np.random.default_rng(seed)
    shape = SHAPE | ({"sliding_window": 8} if kind in GEMMA else {}) | overrides
    shape |= {"query_pre_attn_scalar": shape["head_dim"]} if kind in GEMMA else {}
    config = AutoConfig.for_model(KINDS.get(kind, kind), **shape, tie_word_embeddings=tied)
    config._attn_implementation = "eager" if kind == "gemma2" else "sdpa"
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    writer = gguf.GGUFWriter(path, kind)
    _describe(writer, kind, config)
    turn = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            made = torch.from_numpy(rng.normal(1.0, 0.2, parameter.shape).astype(np.float32))
            writer.add_tensor(_name(name, kind in GEMMA), made.numpy())
            made = made - 1 if kind in GEMMA and "norm" in name else made
        else:
            form = forms[turn % len(forms)]
            turn += 1
            data = raw(rng, form, *parameter.shape)
            made = numbers(data, form).view(parameter.shape)
            if kind == "llama" and ("q_proj" in name or "k_proj" in name):
                data = _turned(data, config.head_dim)
            kept = GGMLQuantizationType[form]
            writer.add_tensor(_name(name, kind in GEMMA), data, raw_dtype=kept)
        parameter.data.copy_(made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.generation_config.eos_token_id = None
    return model


def _turned(rows, width):
    """Rows in the order of Llama files, which interleave both halves of each head."""
    heads = rows.reshape(-1, 2, width // 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def _describe(writer, kind, config):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if kind in GEMMA:
        writer.add_sliding_window(config.sliding_window)
    spelled = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(161, 300) if c != 173]
    words = [*spelled, "ab", *(f"<{n}>" for n in range(config.vocab_size))][: config.vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b"])
