"""Every language model of the library: that it is served as the table says, and decodes alike."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

import layerskip
from layerskip.config import SkipConfig
from layerskip.environment import environment, render
from layerskip.model.architectures import DRAFTS, SERVED, TABLE, TRANSFORMERS
from layerskip.model.opening import open_model
from layerskip.model.rounded import linears

ROOT = Path(__file__).parents[1]
VOCABULARY = 64
_SIZES = {  # what configurations call their sizes
    32: "hidden_size n_embd d_model embed_dim embedding_size",
    48: "intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_key_value_heads num_experts_per_tok moe_topk zero_expert_num",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts rotary_dim",
    128: "max_position_embeddings n_positions max_seq_len max_target_positions",
    16: "moe_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank",
    8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim sliding_window",
    1: "first_k_dense_replace n_group topk_group n_shared_experts decoder_start_token_id "
    "bos_token_id",
    0: "pad_token_id",
    3: "eos_token_id",
    VOCABULARY: "vocab_size",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
_MORE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        **_TYPES,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 3,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
_TRIES: tuple[set[str], ...] = (  # sizes left at their defaults: some follow from others
    *(set(), {"head_dim"}, {"num_key_value_heads"}, {"head_dim", "num_key_value_heads"}),
    *({"qk_rope_head_dim", "head_dim"}, {"layer_types"}),
)
UNBUILT = {  # in a size that can be tried
    "emu3": "of another configuration than its text's",
    "gemma3n": "needs timm; gemma3n_text is the same",
    "llama4": "of another configuration than its text's; llama4_text is the same",
    "xglm": "the library's forward has no float64",
}
QUICK = {"gpt2", "gpt_neox", "opt", "qwen2_moe", "starcoder2"}
WHOLE = sorted({kind for kind, how in SERVED.items() if how.startswith("whole")} - {*UNBUILT})


def test_the_table_is_what_the_installed_library_is() -> None:
    """A model that is new, gone or served otherwise is named; scripts/architectures.py writes."""
    found = architectures.served()
    changed = [
        f"{kind}: {SERVED.get(kind, 'not listed')} -> {found.get(kind, 'gone')}"
        for kind in sorted({*found} | {*SERVED})
        if found.get(kind) != SERVED.get(kind)
    ]
    if transformers.__version__ != TRANSFORMERS:
        pytest.skip(f"transformers {transformers.__version__}: {'; '.join(changed) or 'the same'}")
    assert changed == []


def test_the_table_is_of_the_pinned_version() -> None:
    assert f"transformers=={TRANSFORMERS}" in (ROOT / "constraints.txt").read_text().splitlines()
    levels = {how for how in SERVED.values() if not how.startswith("refused: ")}
    assert levels == {*DRAFTS}


def test_the_readme_says_what_the_table_says() -> None:
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    groups = {how: [kind for kind, own in SERVED.items() if own == how] for how in DRAFTS}
    refused = sum(how.startswith("refused: ") for how in SERVED.values())
    assert f"transformers {TRANSFORMERS}" in page
    opened, pictures = (" ".join(groups[how]) for how in ("opened", "opened, with pictures"))
    assert f"left out): {opened}; with pictures {pictures}; with an encoder t5gemma. - " in page
    assert groups["opened, with an encoder"] == ["t5gemma"]
    assert f"if asked): {len(groups['whole'])} others, such as " in page
    assert f"with an encoder {len(groups['whole, with an encoder'])}, such as " in page
    assert f"**Refused**: {refused}, for " in page


def test_the_table_fits_any_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = render(environment())
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((60, 24)))
    lines = render(environment() | {"architectures": TABLE}).removeprefix(before).splitlines()
    assert max(map(len, lines[1:])) <= 60
    said = " ".join(lines).split()
    assert all(said.count(kind) >= 1 for kind in SERVED)


def small(config: Any) -> dict[str, Any]:
    """Arguments that make a configuration of this class tiny, and those of its parts."""
    found: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        part = getattr(config, name, None)
        if hasattr(part, "to_dict") and isinstance(value, dict) and "model_type" in value:
            found[name] = small(part)
        elif name == "sliding_window" and value is None:
            continue  # it has none
        elif name in SMALL and name not in config.attribute_map:
            found[name] = SMALL[name]
        elif name == "layer_types" and value:
            found[name] = (list(dict.fromkeys(value)) * 2)[:2]
    return found


def tiny(kind: str) -> Any:
    """A model of this type with random weights, in float64; the first try that makes one."""
    values, made = small(CONFIG_MAPPING[kind]()), CONFIG_MAPPING[kind]
    errors: list[Exception] = []
    for left_out in _TRIES:
        few = {name: value for name, value in values.items() if name not in left_out}
        try:
            config = made(**{**few, **_MORE.get(kind, {})})
            config._experts_implementation = "eager"  # others have no float64
            both = config.is_encoder_decoder
            known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if both else MODEL_FOR_CAUSAL_LM_MAPPING
            model = known[type(config)](config).double().eval()
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in model.parameters():  # else texts repeat one token
                    noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                    weight.copy_(0.15 * noise) if weight.dim() > 1 else weight.add_(0.1 * noise)
                ids = torch.ones(1, 4, dtype=torch.long)
                model(ids, **({"decoder_input_ids": ids} if both else {}))
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            errors.append(error)
        else:
            return model
    raise errors[0]


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in WHOLE],
)
def test_a_whole_model_decodes_as_generate_does(kind: str) -> None:
    model = tiny(kind)
    assert open_model(model).execution == "whole"
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (2, 11), generator=generator)  # (B, W)
    ids[:, 6:] = ids[:, 1:6]  # so that something is looked up
    mask = torch.ones_like(ids)
    ids[0, :4] = mask[0, :4] = 0
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    how |= {"pad_token_id": 0, "use_cache": True}
    if model.config.is_encoder_decoder:  # the encoder is the library's, pads and all
        how["decoder_start_token_id"] = 1
        want = model.generate(ids, attention_mask=mask, **how)[:, -20:].tolist()
    else:
        alone = [row[seen][None] for row, seen in zip(ids, mask.bool(), strict=True)]
        texts = (model.generate(x, attention_mask=torch.ones_like(x), **how) for x in alone)
        want = [text[0, -20:].tolist() for text in texts]
    low = SkipConfig.low_precision(8)
    drafts: list[dict[str, Any]] = [{}]
    if [*linears(open_model(model).base)]:
        drafts.append({"skip": low, "lookup": False})
    for draft in drafts:
        fixed = {"controller": "fixed", "max_draft_length": 4, **draft}
        out = layerskip.generate(model, ids, attention_mask=mask, **fixed, **how)
        assert out.sequences[:, -20:].tolist() == want
        assert out.stats.num_draft_tokens > 0
