"""Folders of DFlash drafters with random weights, in every format."""

import json

import torch
from models import WINDOW
from safetensors.torch import save_file

from layerskip.model.block_drafter import LIBRARY, BlockDrafter

HEAD, BLOCK, MASK, KINDS = 8, 5, 3, ("sliding_attention", "full_attention")
_OF_LIBRARY = {f"{name}.weight": f"encoder.{name}.weight" for name in ("fc", "output_norm_enc")}
_ENDS = ("embed_tokens.weight", "lm_head.weight", "d2t")


def forms_for(width, tokens, layers):
    """Configs for a target with so many numbers in a state, tokens and layers."""
    shape = {
        **{"hidden_size": width, "intermediate_size": 48, "head_dim": HEAD, "rms_norm_eps": 1e-5},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"rope_theta": 500.0, "max_position_embeddings": 256},
    }
    depths = [0, (layers - 1) // 2, layers - 2]
    sliding = {"layer_types": [*KINDS], "sliding_window": WINDOW}
    authors = shape | {
        **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": tokens},
        **{"block_size": BLOCK, "num_target_layers": layers, "sliding_window": None},
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": depths},
    }
    library = {"model_type": LIBRARY, "block_size": BLOCK, "mask_token_id": MASK}
    speculators = {
        **{"speculators_model_type": "dflash", "block_size": BLOCK, "mask_token_id": MASK},
        "draft_vocab_size": (3 * tokens + 1) // 4,
        "aux_hidden_state_layer_ids": [depth + 1 for depth in depths],
        **{"sliding_window_non_causal": True, "sample_from_anchor": True},
        **{"target_hidden_size": width},
        "transformer_layer_config": shape | sliding | {"hidden_size": 24, "vocab_size": tokens},
    }
    return {
        "library": shape | sliding | library | {"target_layer_ids": depths},
        **{"authors": authors, "authors, sliding": authors | sliding, "speculators": speculators},
    }


def weights_of(config, seed=1):
    """Random tensors of a drafter, with the names of its authors."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, like in BlockDrafter(config).state_dict().items():
        name = name.removeprefix("network.").removeprefix("encoder.")
        noise = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        noise = 1 + 0.1 * noise if noise.dim() == 1 else noise * like.shape[-1] ** -0.5
        of_library = config.get("model_type") == LIBRARY
        made[name if of_library else name.replace("output_norm_enc", "hidden_norm")] = noise
    if drafted := config.get("draft_vocab_size"):
        return made | {"d2t": torch.arange(drafted) // 3}  # of 9 tokens: 0, 1, 2, 4, 5, 6 and 8
    return {name: each for name, each in made.items() if name not in _ENDS}


def written(folder, config, weights=None):
    folder.mkdir(exist_ok=True)
    weights = weights or weights_of(config)
    if config.get("model_type") == LIBRARY:
        weights = {_OF_LIBRARY.get(name, name): each for name, each in weights.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
