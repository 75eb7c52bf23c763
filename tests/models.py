"""Tiny random models, one per supported family; knows transformers, nothing of this library."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 97
WINDOW = 8

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # laws that are neither flat nor one-hot
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 8}
_GEMMA = {**_HEAD, "tie_word_embeddings": True}
_BY_TYPE = ["sliding_attention", "full_attention"] * 3

# family -> (configuration class, model class, what its configuration adds to the common shape)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _HEAD),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _GEMMA),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "sliding_window": WINDOW,
            "layer_types": _BY_TYPE,
            "query_pre_attn_scalar": 8,
            # low caps, so that they bend the numbers of a tiny model
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_HEAD, "sliding_window": WINDOW}),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _BY_TYPE},
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**_HEAD, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _BY_TYPE},
    ),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    ),
}
FAMILIES = tuple(_FAMILIES)


def tiny_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float64,
    attention: str | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """A seeded random model of a family: 6 layers, width 32, 4 heads, 2 key-value heads of 8.

    Args:
        family: one of `FAMILIES`.
        dtype: of the weights.
        attention: attention implementation; None lets transformers choose (Gemma 2: eager).
        seed: of the weights; the default generator is left as it was.
        overrides: configuration values that replace the common ones.
    """
    config_class, model_class, values = _FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_SHAPE, **values, **overrides})
    if attention is not None:
        config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
        # norm weights and biases start constant, which would hide how they enter
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:
                    weight.add_(torch.randn_like(weight) * 0.2)
    model = model.to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(length: int, *, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Seeded random token ids (rows, length), none of them the pad token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, length), generator=generator)
