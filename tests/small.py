"""Small random models of any type of the library, and decoding with every kind of draft."""

import copy
import functools

import torch
from models import VOCABULARY, Erratic, generated, ragged, require
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from layerskip import SkipConfig
from layerskip.costs.speculation import CostTable

COSTS = CostTable(0.1, (1.0, 1.01, 1.02))  # with these, drafting pays; no test depends on a clock
NEW_TOKENS = 12
EIGHT = SkipConfig.low_precision(8)
BATCHES = {"one": (13,), "ragged": (13, 5, 9)}
_SIZES = {  # the names that configurations use for sizes
    32: "hidden_size n_embd d_model embed_dim embedding_size",
    48: "intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
    "intermediate_size_mlp",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_key_value_heads num_experts_per_tok moe_topk zero_expert_num linear_num_key_heads",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads floor_scale "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts rotary_dim "
    "linear_num_value_heads",
    128: "max_position_embeddings n_positions max_seq_len max_target_positions",
    16: "moe_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank "
    "relative_attention_max_distance",
    8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim sliding_window window_size "
    "attention_chunk_size query_pre_attn_scalar relative_attention_num_buckets d_kv chunk_size "
    "mamba_chunk_size linear_key_head_dim linear_value_head_dim",
    1: "first_k_dense_replace n_group topk_group n_shared_experts decoder_start_token_id "
    "bos_token_id",
    0: "pad_token_id",
    3: "eos_token_id",
    VOCABULARY: "vocab_size",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
_MORE = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v3": {"v_head_dim": 12, "num_key_value_heads": 4},  # values are narrower than keys
    "gemma3n_text": {
        **_TYPES,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 3,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "bamba": {"attn_layer_indices": [1], **_MAMBA2, "attn_rotary_emb": 8},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2, "state_size": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention", "moe"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    # eager attention in float64 gives NaN for pads that see no token
    "t5gemma": {"encoder": {"sliding_window": 32, **_CAPS}, "decoder": _CAPS},
}
_TRIES = (  # sizes to leave at their defaults, because some follow from others
    *(set(), {"head_dim"}, {"num_key_value_heads"}, {"head_dim", "num_key_value_heads"}),
    *({"qk_rope_head_dim", "head_dim"}, {"layer_types"}),
)


def _values(config):
    """Arguments that make a configuration of this class, and its parts, tiny."""
    values = {}
    for name, value in config.to_dict().items():
        part = getattr(config, name, None)
        if hasattr(part, "to_dict") and isinstance(value, dict) and "model_type" in value:
            values[name] = _values(part)
        elif name == "sliding_window" and value is None:
            continue  # the model has no window
        elif name in SMALL and name not in config.attribute_map:
            values[name] = SMALL[name]
        elif name == "layer_types" and value:
            values[name] = (list(dict.fromkeys(value)) * 2)[:2]
    return values


@functools.cache
def small_model(kind, seed=0, **more):
    """A two-layer model of a type in float64. Its weights are large, so that its text varies.

    It uses the first entry of `_TRIES` that the configuration accepts.
    """
    require(kind)
    made = CONFIG_MAPPING[kind]
    values = _values(made())
    for name, value in _MORE.get(kind, {}).items():
        values[name] = {**values[name], **value} if name in ("encoder", "decoder") else value
    errors = []
    for left_out in _TRIES:
        some = {name: value for name, value in values.items() if name not in left_out}
        try:
            return _built(made(**some | more), seed)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            errors.append(error)
    raise errors[0]


def _built(config, seed):
    config._experts_implementation = "eager"  # the others do not support float64
    encoder = config.is_encoder_decoder
    classes = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if encoder else MODEL_FOR_CAUSAL_LM_MAPPING
    if encoder:
        config.tie_word_embeddings = False  # a tied head tends to repeat the last token
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = classes[type(config)](config).double().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                size = 1.0 if encoder and ("embed" in name or "shared" in name) else 0.15
                if config.model_type in ("t5", "umt5"):  # their heads are always tied
                    size = 0.5
                noise = torch.randn_like(weight)
                weight.copy_(size * noise) if weight.dim() > 1 else weight.add_(0.1 * noise)
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        model(ids, **({"decoder_input_ids": ids} if encoder else {}))
    how = {"eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    model.generation_config.update(**how)
    if encoder:
        model.generation_config.decoder_start_token_id = 1
    return model


def alone(model, ids, mask):
    """New tokens of every row, decoded alone by the library's own greedy decoding."""
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    rows = [row[real][None] for row, real in zip(ids, mask.bool(), strict=True)]
    texts = [model.generate(row, attention_mask=torch.ones_like(row), **how) for row in rows]
    return [text[0, -NEW_TOKENS:].tolist() for text in texts]


def decoded(model, inputs, *, sample=False, **how):
    """The output of `generate()` for prompts and their mask."""
    law = {"max_new_tokens": NEW_TOKENS, "do_sample": sample}
    return generated(model, inputs, {"costs": COSTS, **how}, **law)


def inputs(kind, batch):
    """Prompts and their mask, (B, W) each: on the left, or, for an encoder, on the right."""
    ids, mask = ragged(BATCHES[batch], seed=3)
    if small_model(kind).config.is_encoder_decoder:
        for row, length in enumerate(mask.sum(-1).tolist()):
            ids[row], mask[row] = ids[row].roll(length), mask[row].roll(length)
    return ids, mask


@functools.cache
def greedy(kind, batch):
    """New tokens of the library's own greedy decoding, of prompts that no encoder reads alone."""
    model, (ids, mask) = small_model(kind), inputs(kind, batch)
    if not model.config.is_encoder_decoder:
        return alone(model, ids, mask)
    how = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(ids, **how)[:, 1:].tolist()


def decode(kind, batch, **settings):
    return decoded(small_model(kind), inputs(kind, batch), **settings)


def every_draft(model, *own):
    """Settings for every kind of draft."""
    erratic = {"max_draft_length": 5, "lookup": False}
    return [
        {"lookup": True},
        {**erratic, "controller": Erratic(), "assistant": model},
        *({**erratic, "controller": Erratic(1), "skip": each} for each in own),
    ]


def new_tokens(out):
    """The new tokens of every row."""
    return out.sequences[:, -NEW_TOKENS:].tolist()


def check_texts(model, inputs, name, dtypes=(torch.float64,), **how):
    """Check texts of rows with drafts of one source, greedy and by both accept rules."""
    out, greedy = decoded(model, inputs, **how), alone(model, *inputs)
    assert new_tokens(out) == greedy
    assert [(each.name, each.num_draft_tokens > 0) for each in out.stats.sources] == [(name, True)]
    drawn = {"sample": True, "seeds": [*range(len(greedy))]}
    for dtype in dtypes:
        own = copy.deepcopy(model).to(dtype)
        want = new_tokens(decoded(own, inputs, enabled=False, **drawn))
        assert new_tokens(decoded(own, inputs, **drawn, **how)) == want
    drawn |= {"acceptance": "rejection"}  # whose texts depend on drafts
    once, again = (new_tokens(decoded(model, inputs, **drawn, **how)) for _ in range(2))
    assert once == again
