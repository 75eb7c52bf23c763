"""Models that run whole, with recurrent layers or an encoder, too: the tokens of `transformers`."""

import gc
import re
import weakref

import pytest
import small
import torch
from marks import slow
from models import Erratic, LowRank, prompt, ragged, tiny_model
from small import (
    BATCHES,
    COSTS,
    EIGHT,
    NEW_TOKENS,
    alone,
    decode,
    decoded,
    greedy,
    new_tokens,
    small_model,
)
from transformers import AutoConfig

import layerskip
from layerskip import LayerSkipDecoding, LowPrecision, SkipConfig, UnsupportedModelError
from layerskip.cache.recurrent import SERVED
from layerskip.model.opened_models import Sublayers, open_model, sublayers_of
from layerskip.model.whole import Whole, support
from layerskip.weights.rounded import linears

_QUICK = ("cohere2", "deepseek_v3", "gemma3n_text", "gpt_oss", "llama4_text", "phi")
_SLOW = """
    bloom codegen cohere falcon gpt2 gpt_neo gpt_neox gptj mpt nemotron olmo opt persimmon phimoe
    stablelm starcoder2
"""
FAMILIES = [*_QUICK, *slow(*_SLOW.split())]
_RECURRENT = ("falcon_h1", "lfm2", "mamba", "qwen3_5_text", "qwen3_next")
RECURRENT = [*_RECURRENT, *slow(*(kind for kind in sorted(SERVED) if kind not in _RECURRENT))]
ENCODERS = ["t5", "t5gemma", "t5gemma2", "bart", *slow("umt5", "mbart", "pegasus", "marian")]


def drafts_of(family):
    """Every draft; in 8 bits only if there are plain linears, which GPT-2 and Falcon lack."""
    model = small_model(family)
    decoder = open_model(model).decoder
    return small.every_draft(model, *([EIGHT] if [*linears(decoder)] else []))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *ENCODERS])
def test_every_draft_gives_the_tokens_of_transformers(family, batch):
    expected = greedy(family, batch)
    opened = sublayers_of(small_model(family))
    encodes = small_model(family).config.is_encoder_decoder
    assert opened.encoder if encodes else isinstance(opened, Whole) or opened.recurrent
    assert len({token for row in greedy(family, "ragged") for token in row}) > 1
    assert new_tokens(decode(family, batch, enabled=False)) == expected
    for settings in drafts_of(family):
        out = decode(family, batch, **settings)
        assert new_tokens(out) == expected
        assert out.stats.num_draft_tokens > 0 or settings == {"lookup": True}


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *ENCODERS])
def test_sampled_text_is_that_of_plain_decoding_whatever_drafts(family):
    how = {"sample": True, "seeds": (11, 12, 13)}
    expected = new_tokens(decode(family, "ragged", enabled=False, **how))
    assert len({*map(tuple, expected)}) == 3
    for settings in drafts_of(family):
        assert new_tokens(decode(family, "ragged", **how, **settings)) == expected


@pytest.mark.parametrize("family", ["codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj"])
def test_token_types_of_zeros_are_refused_where_a_model_embeds_them(family):
    how = {"token_type_ids": torch.zeros(1, 5, dtype=torch.long), "max_new_tokens": 2}
    with pytest.raises(ValueError, match="arguments token_type_ids are not supported"):
        layerskip.generate(small_model(family), prompt(5), **how)


def test_token_types_of_zeros_change_nothing_where_they_mean_none():
    model, ids = small_model("bert", is_decoder=True), prompt(5)
    how = {"token_type_ids": torch.zeros_like(ids), "max_new_tokens": 9}
    want = model.generate(ids, **how)
    assert layerskip.generate(model, ids, **how).sequences.tolist() == want.tolist()
    with pytest.raises(ValueError, match="arguments token_type_ids are not supported"):
        layerskip.generate(model, ids, **how | {"token_type_ids": torch.ones_like(ids)})


def test_rows_of_any_lengths_reach_the_last_position():
    """Learned positions end there, and shorter rows are padded after it."""
    ids, mask = ragged((116, 97, 3), seed=5)
    for family in ("opt", "gpt2"):
        model = small_model(family)
        want = alone(model, ids, mask)
        for settings in ({"lookup": True}, {"assistant": model, "controller": Erratic()}):
            out = decoded(model, (ids, mask), max_draft_length=9, **settings)
            assert new_tokens(out) == want


def test_a_long_prompt_is_read_in_parts_and_the_head_only_where_it_is_read():
    model = small_model("phi", max_position_embeddings=2048)
    ids = prompt(1100)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    read = []
    hook = model.lm_head.register_forward_hook(lambda _, x, y: read.append(y.shape[1]))
    out = layerskip.generate(model, ids, max_new_tokens=8, costs=COSTS)
    hook.remove()
    assert out.sequences.tolist() == expected.tolist()
    assert read[0] == 1  # after the prompt
    assert sum(read) == 1 + sum(round_.drafted[0] + 1 for round_ in out.rounds[1:])


@pytest.mark.parametrize("target", ["phi", "llama"])
@pytest.mark.parametrize("assistant", ["phi", "llama"])
def test_target_and_assistant_may_each_be_whole_or_opened(target, assistant):
    target, assistant = (
        tiny_model(each) if each == "llama" else small_model(each) for each in (target, assistant)
    )
    ids, mask = ragged((13, 5, 9), seed=3)
    how = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = target.generate(ids, **how)
    decoding = LayerSkipDecoding(
        lookup=False, assistant=assistant, controller=Erratic(), max_draft_length=4
    )
    got = target.generate(ids, custom_generate=decoding, **how)
    assert got.tolist() == expected.tolist()


def test_by_default_a_whole_model_looks_drafts_up_and_measures_what_they_cost():
    decoding = LayerSkipDecoding()
    ids = prompt(12).repeat(1, 2)
    out = small_model("phi").generate(
        ids, custom_generate=decoding, max_new_tokens=8, return_dict_in_generate=True
    )
    assert out.sequences.tolist() == small_model("phi").generate(ids, max_new_tokens=8).tolist()
    assert out.costs.source in ("measured", "analytic")
    words = decoding.explain(small_model("phi"))
    assert "passes: whole: the sublayers of 'phi' are not known" in words
    assert "drafts: looked up" in words
    assert "no drafts by the model in 8 bits: 8-bit products are fast in native" in words


def test_a_draft_with_a_rounded_head_alone_goes_on_from_the_exact_states():
    head = SkipConfig(low=LowPrecision(attention=(), mlp=()))
    out = decode("phi", "ragged", skip=head, controller="fixed", max_draft_length=3)
    assert new_tokens(out) == greedy("phi", "ragged")
    assert out.stats.acceptance_rate > 0.5


def test_training_mode_is_refused():
    model = small_model("olmo").train()
    try:
        with pytest.raises(ValueError, match=r"call model.eval\(\)"):
            open_model(model)
    finally:
        model.eval()


def test_a_draft_vocabulary_has_no_effect_and_says_so():
    with pytest.warns(UserWarning, match="draft_vocabulary has no effect"):
        out = decode("phi", "one", skip=EIGHT, draft_vocabulary=range(40))
    assert new_tokens(out) == greedy("phi", "one")


def test_hooks_on_what_is_called_run_and_others_are_refused():
    model = small_model("phi", seed=2)
    seen = []
    hook = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    layerskip.generate(model, prompt(5), max_new_tokens=3, enabled=False)
    hook.remove()
    assert len(seen) == 3
    hook = model.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="forward hooks"):
        sublayers_of(model)
    hook.remove()
    model.forward = model.forward
    with pytest.raises(UnsupportedModelError, match="a custom forward"):
        sublayers_of(model)
    del model.forward
    assert isinstance(sublayers_of(model), Whole)
    model.__class__ = type(
        "Own", (type(model),), {"forward": lambda _, tokens, own=3, **more: None}
    )
    with pytest.raises(UnsupportedModelError, match="names no cache among its arguments"):
        sublayers_of(model)


def test_the_model_is_left_as_it_was_and_weak():
    model = small_model.__wrapped__("phi", seed=3)
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


def test_adapters_stay_exact_and_their_bases_are_rounded():
    model = small_model.__wrapped__("phi", seed=4)
    attention = model.model.layers[0].self_attn
    attention.q_proj = LowRank(attention.q_proj)
    names = {each: name for name, each in model.model.named_modules()}
    rounded = {names[each] for each in linears(model.model)}
    assert "layers.0.self_attn.q_proj.base_layer" in rounded
    assert not any(name.endswith((".up", ".down")) for name in rounded)
    expected = model.generate(prompt(9), max_new_tokens=NEW_TOKENS, do_sample=False)
    out = layerskip.generate(
        model, prompt(9), max_new_tokens=NEW_TOKENS, skip=EIGHT, controller="fixed", lookup=False
    )
    assert out.sequences.tolist() == expected.tolist()
    assert out.stats.acceptance_rate > 0.5


def test_bytes_of_a_draft_are_those_of_its_copies():
    model = small_model("phi", seed=5)
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
    assert sum(opened.weights.read_by(EIGHT.resolve(2))) < 0.2 * inside


_REFUSED = {
    "bert": "bidirectional attention",
    "deepseek_v32": r"cache \(DynamicIndexedLayer\) cannot be rolled back",
    "kimi_linear": "recurrent state of a kind that is not kept here",
    "openai-gpt": "names no cache among its arguments",
    "recurrent_gemma": "recurrent state in its modules, so for one text",
    "rwkv": "recurrent state of a kind that is not kept here",
    "xlm": "a mask token",
    "xlnet": "names no cache among its arguments",
}


@pytest.mark.parametrize("family", _REFUSED)
def test_models_that_cannot_be_served_are_refused_by_name(family):
    how, why = support(AutoConfig.for_model(family))
    assert how == "refused"
    assert re.search(f"architecture '{family}' is not supported: it.*{_REFUSED[family]}", why)


def test_experts_that_see_all_tokens_of_a_pass_are_refused():
    model, ids = small_model("doge", is_moe=True), prompt(9)
    after = model(ids).logits[:, :4], model(ids[:, :4]).logits
    assert not torch.allclose(*after)  # a token's scores depend on later ones
    with pytest.raises(UnsupportedModelError, match=r"its experts do .* on all tokens of a pass"):
        sublayers_of(model)
    assert (
        support(small_model("doge"))[0] == support(AutoConfig.for_model("nllb-moe"))[0] == "whole"
    )
    dropping = AutoConfig.for_model("nllb-moe", moe_eval_capacity_token_fraction=0.5)
    assert support(dropping)[0] == "refused"


def test_refused_models_raise_and_others_are_opened_or_whole():
    model = small_model("minimax")
    with pytest.raises(UnsupportedModelError, match="'minimax' is not supported: its cache"):
        sublayers_of(model)
    assert support(tiny_model("llama")) == ("opened", "its sublayers are known")
    assert isinstance(sublayers_of(tiny_model("llama")), Sublayers)
    assert support(small_model("phi")) == support(small_model("phi").config)
    assert support(small_model("phi")) == ("whole", "the sublayers of 'phi' are not known")


def test_groups_of_experts_and_clipped_attentions_are_not_opened():
    for kind, more in (("glm4_moe", {"n_group": 2}), ("olmoe", {"clip_qkv": 8.0})):
        assert support(AutoConfig.for_model(kind))[0] == "opened"
        assert support(AutoConfig.for_model(kind, **more))[0] == "whole"
