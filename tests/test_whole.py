"""Models whose sublayers are not known: the same tokens as `transformers`, and what is refused."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from typing import Any

import pytest
import torch
import transformers
from models import VOCABULARY, Erratic, LowRank, prompt, ragged, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

import layerskip
from layerskip import LayerSkipDecoding, SkipConfig
from layerskip.config import LowPrecision
from layerskip.costs.speculation import CostTable
from layerskip.model.opening import open_model, sublayers_of
from layerskip.model.rounded import linears
from layerskip.model.sublayers import Sublayers
from layerskip.model.whole import Whole, level
from layerskip.model.wrappers import UnsupportedModelError

COSTS = CostTable(0.1, (1.0, 1.01, 1.02))  # drafting pays; no clock decides anything here
NEW_TOKENS = 12
EIGHT = SkipConfig.low_precision(8)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_TYPES = ["sliding_attention"] * 3 + ["full_attention"]
_WINDOWS = {"sliding_window": 8, "layer_types": _TYPES}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {  # keys and values of different widths
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128}

# family -> (configuration class, what it adds to the common shape)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", {"n_layer": 4, "n_head": 4}),
    "codegen": ("CodeGenConfig", {**_GPT, "rotary_dim": 4}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", _WINDOWS),
    "deepseek_v3": ("DeepseekV3Config", {**_EXPERTS, **_LATENT, "first_k_dense_replace": 1}),
    "ernie4_5": ("Ernie4_5Config", {}),
    "exaone4": ("Exaone4Config", {**_WINDOWS, "sliding_window_pattern": "LLLG"}),
    "falcon": ("FalconConfig", {"alibi": True, "new_decoder_architecture": False}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": [_TYPES[i] for i in (0, 0, 3, 0, 3)],
            "num_kv_shared_layers": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0],
        },
    ),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "glm4_moe": ("Glm4MoeConfig", {**_EXPERTS, "head_dim": 8}),
    "gpt2": ("GPT2Config", _GPT),
    "gpt_neo": (
        "GPTNeoConfig",
        {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]}
        | {"window_size": 8},
    ),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_oss": (
        "GptOssConfig",
        {**_EXPERTS, **_WINDOWS, "head_dim": 8}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gptj": ("GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "granitemoe": ("GraniteMoeConfig", _EXPERTS),
    "helium": ("HeliumConfig", {"head_dim": 8}),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "floor_scale": 4,  # temperatures change every four tokens
        },
    ),
    "mpt": (
        "MptConfig",
        {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 128, "expansion_ratio": 2}
        | {"use_cache": True},
    ),
    "nemotron": ("NemotronConfig", {}),
    "olmo": ("OlmoConfig", {}),
    "olmoe": ("OlmoeConfig", _EXPERTS),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "persimmon": ("PersimmonConfig", {}),
    "roberta": ("RobertaConfig", {"is_decoder": True}),
    "phi": (
        "PhiConfig",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "phimoe": ("PhimoeConfig", _EXPERTS),
    "qwen2_moe": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 24}),
    "stablelm": ("StableLmConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 8}),
}
# Where the library's own text of a padded prompt is not the one of the prompt alone: ALiBi is
# rounded, Llama 4 takes its temperature from the padded length.
_PADDED_OTHERWISE = ("bloom", "mpt", "falcon", "llama4")
_QUICK = ("cohere2", "deepseek_v3", "gemma3n", "gpt_oss", "llama4", "phi")
FAMILIES = [
    family if family in _QUICK else pytest.param(family, marks=pytest.mark.slow)
    for family in _FAMILIES
]
BATCHES = {"one": (13,), "ragged": (13, 5, 9)}


@functools.cache
def model_of(family: str, seed: int = 0, **more: Any) -> Any:
    """A seeded random model, in float64, whose weights are large, so that its text varies."""
    name, values = _FAMILIES[family]
    config = getattr(transformers, name)(**{**_SHAPE, **values, **more})
    config._experts_implementation = "eager"  # the others have no float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                shift = torch.randn_like(weight)
                weight.copy_(0.15 * shift) if weight.dim() > 1 else weight.add_(0.1 * shift)
    model = model.double().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@functools.cache
def reference(family: str, batch: str) -> list[list[int]]:
    """New tokens of the library's own greedy decoding, of every prompt alone."""
    ids, mask = ragged(BATCHES[batch], seed=3)
    model, new = model_of(family), []
    for row, real in zip(ids, mask.bool(), strict=True):
        out = model.generate(row[real][None], max_new_tokens=NEW_TOKENS, do_sample=False)
        new.append(out[0, -NEW_TOKENS:].tolist())
    return new


def decoded(
    model: Any, inputs: tuple[torch.Tensor, torch.Tensor], *, sample: bool = False, **settings: Any
) -> Any:
    return model.generate(
        inputs[0],
        attention_mask=inputs[1],
        custom_generate=LayerSkipDecoding(costs=COSTS, **settings),
        max_new_tokens=NEW_TOKENS,
        do_sample=sample,
        return_dict_in_generate=True,
    )


def decode(family: str, batch: str, **settings: Any) -> Any:
    return decoded(model_of(family), ragged(BATCHES[batch], seed=3), **settings)


def new_tokens(out: Any) -> list[list[int]]:
    return out.sequences[:, -NEW_TOKENS:].tolist()  # type: ignore[no-any-return]


def every_draft(model: Any, *own: SkipConfig) -> list[dict[str, Any]]:
    """Settings of every kind of draft."""
    erratic = {"max_draft_length": 5, "lookup": False}
    return [
        {"lookup": True},
        {**erratic, "controller": Erratic(), "assistant": model},
        *({**erratic, "controller": Erratic(1), "skip": each} for each in own),
    ]


def drafts_of(family: str) -> list[dict[str, Any]]:
    """Products of GPT-2's and Falcon's own classes stay exact."""
    return every_draft(model_of(family), *([] if family in ("gpt2", "falcon") else [EIGHT]))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_draft_gives_the_tokens_of_transformers(family: str, batch: str) -> None:
    expected = reference(family, batch)
    assert isinstance(sublayers_of(model_of(family)), Whole)
    assert new_tokens(decode(family, batch, enabled=False)) == expected
    for settings in drafts_of(family):
        out = decode(family, batch, **settings)
        assert new_tokens(out) == expected
        assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_prompts_give_the_tokens_of_transformers(family: str) -> None:
    ids, mask = ragged(BATCHES["ragged"], seed=3)
    out = model_of(family).generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    same = out[:, -NEW_TOKENS:].tolist() == reference(family, "ragged")
    assert same or family in _PADDED_OTHERWISE


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_text_is_that_of_plain_decoding_whatever_drafts(family: str) -> None:
    how: dict[str, Any] = {"sample": True, "seeds": (11, 12, 13)}
    expected = new_tokens(decode(family, "ragged", enabled=False, **how))
    assert len({*map(tuple, expected)}) == 3
    for settings in drafts_of(family):
        assert new_tokens(decode(family, "ragged", **how, **settings)) == expected


def test_rows_of_one_length_run_together_where_places_are_no_arguments() -> None:
    assert not sublayers_of(model_of("llama4")).together  # type: ignore[attr-defined]
    assert not sublayers_of(model_of("bloom")).together  # type: ignore[attr-defined]
    assert sublayers_of(model_of("phi")).together  # type: ignore[attr-defined]
    assert sublayers_of(model_of("cohere2")).together  # type: ignore[attr-defined]


def test_rows_of_any_lengths_reach_the_last_position() -> None:
    """Learned positions end there, and rows that are shorter are padded behind it."""
    ids, mask = ragged((112, 97, 3), seed=5)
    model = model_of("opt")
    for family in ("opt", "gpt2"):
        model = model_of(family)
        want = [
            model.generate(row[real][None], max_new_tokens=16, do_sample=False)[0, -16:].tolist()
            for row, real in zip(ids, mask.bool(), strict=True)
        ]
        for settings in ({"lookup": True}, {"assistant": model, "controller": Erratic()}):
            decoding = LayerSkipDecoding(costs=COSTS, max_draft_length=9, **settings)
            how = {"attention_mask": mask, "custom_generate": decoding, "do_sample": False}
            out = model.generate(ids, max_new_tokens=16, **how)
            assert out[:, -16:].tolist() == want


def test_a_long_prompt_is_read_in_parts_and_the_head_only_where_it_is_read() -> None:
    model = model_of("phi", max_position_embeddings=2048)
    ids = prompt(1100)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    read: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda _, x, y: read.append(y.shape[1]))
    out: Any = layerskip.generate(model, ids, max_new_tokens=8, costs=COSTS)
    hook.remove()
    assert out.sequences.tolist() == expected.tolist()
    assert read[0] == 1  # after the prompt
    assert sum(read) == 1 + sum(round_.drafted[0] + 1 for round_ in out.rounds[1:])


@pytest.mark.parametrize("target", ["phi", "llama"])
@pytest.mark.parametrize("assistant", ["phi", "llama"])
def test_target_and_assistant_may_each_be_whole_or_opened(target: str, assistant: str) -> None:
    target, assistant = (
        tiny_model(each) if each == "llama" else model_of(each) for each in (target, assistant)
    )
    ids, mask = ragged((13, 5, 9), seed=3)
    how = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = target.generate(ids, **how)  # type: ignore[attr-defined]
    decoding = LayerSkipDecoding(
        lookup=False, assistant=assistant, controller=Erratic(), max_draft_length=4
    )
    got = target.generate(ids, custom_generate=decoding, **how)  # type: ignore[attr-defined]
    assert got.tolist() == expected.tolist()


def test_by_default_a_whole_model_looks_drafts_up_and_measures_what_they_cost() -> None:
    decoding = LayerSkipDecoding()
    ids = prompt(12).repeat(1, 2)
    out = model_of("phi").generate(
        ids, custom_generate=decoding, max_new_tokens=8, return_dict_in_generate=True
    )
    assert out.sequences.tolist() == model_of("phi").generate(ids, max_new_tokens=8).tolist()
    assert out.costs.source in ("measured", "analytic")
    words = decoding.explain(model_of("phi"))
    assert "passes: whole: the sublayers of 'phi' are not known" in words
    assert "drafts: looked up" in words
    assert "no drafts by the model in 8 bits: products with 8 bits are fast in native" in words


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (SkipConfig.early_exit(2), "cannot leave sublayers out or exit early"),
        (SkipConfig(attention=(1,)), "cannot leave sublayers out or exit early"),
        (SkipConfig(experts=1), "cannot take fewer experts"),
        (SkipConfig(low=LowPrecision(attention=(1,))), "cannot round some sublayers"),
    ],
)
def test_drafts_that_need_sublayers_are_refused(draft: SkipConfig, reason: str) -> None:
    with pytest.raises(ValueError, match=f"served whole.*{reason}.*lookups, a second model"):
        decode("phi", "one", skip=draft)


def test_models_without_ordinary_linears_say_so() -> None:
    with pytest.raises(ValueError, match="none of its linears is an ordinary one"):
        decode("gpt2", "one", skip=EIGHT)


def test_a_draft_with_a_rounded_head_alone_goes_on_from_the_exact_states() -> None:
    head = SkipConfig(low=LowPrecision(attention=(), mlp=()))
    out = decode("phi", "ragged", skip=head, controller="fixed", max_draft_length=3)
    assert new_tokens(out) == reference("phi", "ragged")
    assert out.stats.acceptance_rate > 0.5


def test_other_executions_and_training_mode_are_refused() -> None:
    with pytest.raises(ValueError, match="'fused' cannot serve this model, which is served whole"):
        open_model(model_of("phi"), "fused")
    model = model_of("olmo").train()
    try:
        with pytest.raises(ValueError, match=r"call model.eval\(\)"):
            open_model(model)
    finally:
        model.eval()


def test_searches_and_trained_drafts_are_refused() -> None:
    from layerskip.replay.trace import take_trace
    from layerskip.timing.sublayers import measure

    with pytest.raises(ValueError, match=r"served whole.*no states between sublayers"):
        take_trace(model_of("phi"), [prompt(9)], max_new_tokens=4)
    with pytest.raises(ValueError, match="served whole"):
        measure(model_of("phi"), [prompt(9)], contexts=[8], counts=[1, 2])


def test_a_draft_vocabulary_has_no_effect_and_says_so() -> None:
    with pytest.warns(UserWarning, match="draft_vocabulary has no effect"):
        out = decode("phi", "one", skip=EIGHT, draft_vocabulary=range(40))
    assert new_tokens(out) == reference("phi", "one")


def test_hooks_on_what_is_called_run_and_others_are_refused() -> None:
    model = model_of("phi", seed=2)
    seen: list[int] = []
    hook = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    layerskip.generate(model, prompt(5), max_new_tokens=3, enabled=False)
    hook.remove()
    assert len(seen) == 3
    hook = model.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="forward hooks"):
        sublayers_of(model)
    hook.remove()
    model.forward = model.forward
    with pytest.raises(UnsupportedModelError, match="a forward of its own"):
        sublayers_of(model)
    del model.forward
    assert isinstance(sublayers_of(model), Whole)


def test_the_model_is_left_as_it_was_and_let_go() -> None:
    model = model_of("phi", seed=3)
    model_of.cache_clear()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    modules = list(model.modules())
    layerskip.generate(model, prompt(5), max_new_tokens=3, skip=EIGHT, controller="fixed")
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert layerskip.release(model) > 0
    layerskip.generate(model, prompt(5), max_new_tokens=3, skip=EIGHT, controller="fixed")
    gone = weakref.ref(model)
    del model, modules
    gc.collect()
    assert gone() is None


def test_adapters_stay_exact_and_their_bases_are_rounded() -> None:
    model = model_of("phi", seed=4)
    model_of.cache_clear()
    attention = model.model.layers[0].self_attn
    attention.q_proj = LowRank(attention.q_proj)
    names = [name for name, _ in linears(model.model)]
    assert "layers.0.self_attn.q_proj.base_layer" in names
    assert not any(name.endswith((".up", ".down")) for name in names)
    expected = model.generate(prompt(9), max_new_tokens=NEW_TOKENS, do_sample=False)
    out: Any = layerskip.generate(
        model, prompt(9), max_new_tokens=NEW_TOKENS, skip=EIGHT, controller="fixed", lookup=False
    )
    assert out.sequences.tolist() == expected.tolist()
    assert out.stats.acceptance_rate > 0.5


def test_bytes_of_a_draft_are_those_of_its_copies() -> None:
    model = model_of("phi", seed=5)
    opened = sublayers_of(model)
    nbytes = opened.weights.nbytes(EIGHT)
    layerskip.generate(model, prompt(5), max_new_tokens=3, skip=EIGHT, controller="fixed")
    assert layerskip.release(model) == nbytes
    whole = opened.weight_bytes()
    inside = sum(weight.nbytes for weight in model.parameters())
    assert (
        sum(whole["sublayers"]) + whole["head"]
        == inside - model.get_input_embeddings().weight.nbytes
    )
    assert sum(opened.weights.read_by(EIGHT.resolve(4))) < 0.2 * inside


_REFUSED = {
    "bert": "reads text in both directions",
    "deepseek_v32": r"cache \(DynamicIndexedLayer\) cannot be rolled back",
    "falcon_h1": "recurrent state",
    "jamba": "recurrent state",
    "lfm3": r"cache \(LinearAttentionLayer\) cannot be rolled back",
    "mamba": "recurrent state",
    "openai-gpt": "no past_key_values",
    "qwen3_next": "recurrent state",
    "recurrent_gemma": "recurrent state",
    "rwkv": "recurrent state",
    "xlnet": "no past_key_values",
}


@pytest.mark.parametrize("family", _REFUSED)
def test_models_that_cannot_be_served_are_refused_by_name(family: str) -> None:
    how, why = level(AutoConfig.for_model(family))
    assert how == "refused"
    assert re.search(f"architecture '{family}' is not supported: it.*{_REFUSED[family]}", why)


def test_refused_models_raise_and_others_are_opened_or_whole() -> None:
    values = {**_SHAPE, "layer_types": ["conv", "full_attention"] * 2}
    model = AutoModelForCausalLM.from_config(transformers.Lfm2Config(**values)).eval()
    with pytest.raises(UnsupportedModelError, match="'lfm2' is not supported: its cache"):
        sublayers_of(model)
    assert level(tiny_model("llama")) == ("opened", "its sublayers are known")
    assert isinstance(sublayers_of(tiny_model("llama")), Sublayers)
    assert level(model_of("phi")) == level(model_of("phi").config)
    assert level(model_of("phi")) == ("whole", "the sublayers of 'phi' are not known")
