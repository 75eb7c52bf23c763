"""Prompts with pictures: the library's text, whatever drafts; and conditional models."""

import pytest
import tokenizers
import torch
import transformers
from kinds import weights_of
from marks import slow
from models import VOCABULARY, Erratic, lively_model, near, prompt
from official import assistant_of
from pictured import COSTS, KINDS, LARGE, NEW_TOKENS, PLACEHOLDER, TWO_WAY, conditional, inputs_of

from layerskip import LayerSkipDecoding, SkipConfig, generate, load
from layerskip.model.opened_models import Sublayers


def run(model, inputs, decoding=None, **how):
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(
        **inputs, custom_generate=decoding, max_new_tokens=NEW_TOKENS, **(settings | how)
    )


def drafting(skip, controller="fixed", **settings):
    return LayerSkipDecoding(
        skip, controller=controller, costs=COSTS, max_draft_length=4, **settings
    )


DRAFTS = {
    "exit": (SkipConfig.early_exit(4), {}),
    "scattered": (SkipConfig(attention=(0, 3), mlp=(2, 5)), {"execution": "modules"}),
    "8 bits": (SkipConfig.low_precision(8), {"lookup": True, "controller": "expected-gain"}),
    "mixture": (SkipConfig(mlp=(1, 4)), {"lookup": True, "controller": Erratic()}),
}


# ---- The same text ----


@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, 4) for kind in KINDS), *((kind, LARGE) for kind in TWO_WAY)]
)
def test_greedy_text_equals_the_librarys(kind, size):
    """Rows with one picture, none and two, at different places, within windows and beyond."""
    model = conditional(kind, size)
    inputs = inputs_of(model, kind, (24, 18, 60), ((3,), (), (0, 30)), size)
    want = run(model, inputs)
    plain = run(model, inputs, LayerSkipDecoding(enabled=False))
    assert plain.sequences.tolist() == want.sequences.tolist()
    accepted = 0
    for skip, settings in DRAFTS.values():
        got = run(model, inputs, drafting(skip, **settings))
        assert got.sequences.tolist() == want.sequences.tolist()
        torch.testing.assert_close(got.logits[0], want.logits[0].float(), rtol=1e-4, atol=1e-4)
        assert got.stats.num_draft_tokens > 0
        accepted += got.stats.num_accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize("kind", ["gemma4", *slow(*(kind for kind in KINDS if kind != "gemma4"))])
def test_a_picture_alone_and_at_the_end_of_a_prompt(kind):
    """Like the library, we run layers that only read keys for the last token alone."""
    model = conditional(kind)
    tokens = 10 if kind == "llava next" else 4
    for lengths, place in (((16,), 4), ((tokens,), 0), ((18,), 18 - tokens)):
        inputs = inputs_of(model, kind, lengths, ((place,),))
        got = generate(
            model, inputs, skip=DRAFTS["exit"][0], costs=COSTS, max_new_tokens=NEW_TOKENS
        )
        assert got.sequences.tolist() == run(model, inputs).sequences.tolist()


@pytest.mark.parametrize("kind", ["gemma3", *slow("gemma4", "llava")])
def test_sampled_rows_equal_themselves_alone(kind):
    model = conditional(kind)
    how = {"do_sample": True, "temperature": 0.8}
    lengths, places = (24, 18, 40), ((3,), (), (0, 19))
    inputs = inputs_of(model, kind, lengths, places)
    skip, own = DRAFTS["mixture"]
    want = run(model, inputs, LayerSkipDecoding(enabled=False, seeds=[5, 6, 7]), **how)
    got = run(model, inputs, drafting(skip, **own, seeds=[5, 6, 7]), **how)
    assert got.sequences.tolist() == want.sequences.tolist()
    assert got.stats.num_accepted_tokens > 0
    first = 0
    for row, (length, begins) in enumerate(zip(lengths, places, strict=True)):
        alone = {name: value[row : row + 1, -length:] for name, value in inputs.items()}
        for name in ("pixel_values", "image_position_ids"):
            alone.pop(name, None)
            if name in inputs and begins:
                alone[name] = inputs[name][first : first + len(begins)]
        first += len(begins)
        by_itself = run(model, alone, drafting(skip, **own, seeds=[5 + row]), **how)
        assert by_itself.sequences[0, length:].tolist() == want.sequences[row, 40:].tolist()


@pytest.mark.parametrize("execution", ["auto", *slow("modules")])
@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4 two-way", "mistral3"])
def test_prompts_longer_than_a_pass(kind, execution, spied, sizes):
    """A prefill pass never ends inside a picture whose tokens see each other."""
    model = conditional(kind, LARGE)
    inputs = inputs_of(model, kind, (44, 20, 60), ((3, 20), (1,), (0, 30)), LARGE)
    want = run(model, inputs)
    sizes(chunk=lambda *_: 15)  # five tokens of each row
    passes = spied(Sublayers, "feed", lambda _, tokens, *__: tokens.shape[1])
    got = run(model, inputs, drafting(DRAFTS["exit"][0], execution=execution))
    assert got.sequences.tolist() == want.sequences.tolist()
    assert (max(passes) > LARGE) is (kind in TWO_WAY)


@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_native_passes(kind):
    """Passes are native, except over pictures whose tokens see each other."""
    model = conditional(kind).float()
    inputs = inputs_of(model, kind)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    want = run(model, inputs, LayerSkipDecoding(enabled=False, execution="modules"))
    got = run(model, inputs, drafting(*DRAFTS["8 bits"][:1], execution="native", lookup=True))
    torch.testing.assert_close(got.logits[0], want.logits[0], rtol=1e-3, atol=1e-3)
    assert got.sequences.tolist() == want.sequences.tolist()
    short = {name: value[:1, -24:] for name, value in inputs.items() if "pixel" not in name}
    short["pixel_values"] = inputs["pixel_values"][:1]
    want = run(model, short, LayerSkipDecoding(enabled=False, execution="modules"))
    got = run(model, short, LayerSkipDecoding(enabled=False, execution="native"))
    torch.testing.assert_close(got.logits[0], want.logits[0], rtol=1e-3, atol=1e-3)


def test_several_texts_of_a_prompt():
    model = conditional("gemma3")
    inputs = inputs_of(model, "gemma3")
    how = {"do_sample": True, "num_return_sequences": 2}
    plain = run(model, inputs, LayerSkipDecoding(enabled=False, seed=3), **how)
    got = run(model, inputs, drafting(DRAFTS["exit"][0], seed=3), **how)
    assert got.sequences.shape[0] == 6
    assert got.sequences.tolist() == plain.sequences.tolist()


def test_a_second_model_drafts_without_the_pictures():
    model = conditional("gemma3")
    inputs = inputs_of(model, "gemma3")
    second = near(lively_model("gemma3"), 0.05)
    for assistant in (second, lively_model("llama")):
        got = run(model, inputs, drafting(SkipConfig(), assistant=assistant, lookup=True))
        assert got.sequences.tolist() == run(model, inputs).sequences.tolist()
        assert got.stats.num_draft_tokens > 0


@pytest.mark.parametrize("block", ["streams", *slow("exit-block", "heads")])
def test_trained_modules_draft_behind_pictures(block, tmp_path):
    model = conditional("gemma3")
    inputs = inputs_of(model, "gemma3")
    exit_layer = 4 if block == "exit-block" else None
    skip = SkipConfig(exit_layer=exit_layer, trained=weights_of(block, model, tmp_path))
    got = run(model, inputs, drafting(skip, controller=Erratic(), lookup=True))
    assert got.sequences.tolist() == run(model, inputs).sequences.tolist()
    assert got.stats.sources[-1].num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["gemma4", "gemma4 two-way"])
def test_official_assistants_read_pictures_keys(kind):
    model = conditional(kind)
    inputs = inputs_of(model, kind)
    assistant = assistant_of(KINDS[kind][1], tokens=VOCABULARY)
    got = run(model, inputs, drafting(SkipConfig(), assistant=assistant, lookup=False))
    assert got.sequences.tolist() == run(model, inputs).sequences.tolist()
    assert got.stats.sources[0].num_accepted_tokens > 0


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4 two-way", "llava"])
def test_placeholders_without_pictures(kind):
    """They are embedded as in the library, in the prompt and when drafted or drawn."""
    model = conditional(kind)
    ids = prompt(12, rows=2).clamp(max=89)
    ids[0, 3:6] = ids[1, 7:9] = PLACEHOLDER
    with torch.no_grad():  # so that it is drawn often
        model.lm_head.weight[PLACEHOLDER] = model.lm_head.weight[[7, 30, 60]].sum(0)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    types = {"gemma3": "token_type_ids", "llava": None}.get(kind, "mm_token_type_ids")
    for own in ({}, {types: (ids == PLACEHOLDER).long()} if types else {}):
        want = run(model, inputs | own)
        got = run(model, inputs | own, drafting(DRAFTS["mixture"][0], lookup=True))
        assert got.sequences.tolist() == want.sequences.tolist()
        assert PLACEHOLDER in want.sequences[:, 12:-1]


# ---- What pictures change ----


def test_pictures_and_their_types_change_the_text():
    model = conditional("gemma3")
    inputs = inputs_of(model, "gemma3")
    plain = LayerSkipDecoding(enabled=False)
    first = run(model, inputs, plain).logits[0]  # (B, V)
    others = inputs | {"pixel_values": inputs["pixel_values"].flip(0)}
    changed = (run(model, others, plain).logits[0] - first).abs().amax(-1)
    assert (changed > 1e-3).tolist() == [True, False, True]
    causal = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    got, want = run(model, causal, plain), run(model, causal)
    assert got.sequences.tolist() == want.sequences.tolist()
    changed = (got.logits[0] - first).abs().amax(-1)
    assert (changed > 1e-3).tolist() == [True, False, True]


# ---- What is refused ----


def test_refusals_name_what_is_wrong():
    model = conditional("gemma4")
    inputs = inputs_of(model, "gemma4")
    decoding = LayerSkipDecoding(enabled=False)
    placed = inputs["input_ids"] == PLACEHOLDER
    fewer = inputs | {"input_ids": inputs["input_ids"].clone()}
    fewer["input_ids"][0, -2:] = PLACEHOLDER
    with pytest.raises(ValueError, match=r"14 placeholders .* for 12 features"):
        run(model, fewer, decoding)
    with pytest.raises(ValueError, match=r"prefill_chunk_size .* with pictures"):
        run(model, inputs, decoding, prefill_chunk_size=8)
    frames = {
        "pixel_values_videos": inputs["pixel_values"][:1],
        "video_position_ids": inputs["image_position_ids"][:1],
        "num_frames_per_video": torch.tensor([1]),
    }
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(ValueError, match=r"video \(video\) is not supported"):
        run(model, text | frames, decoding)
    with pytest.raises(ValueError, match=r"audio \(input_features\) is not supported"):
        run(model, text | {"input_features": torch.zeros(1, 8, 4)}, decoding)
    model.config.image_token_id = VOCABULARY
    beyond = inputs | {"input_ids": inputs["input_ids"].masked_fill(placed, VOCABULARY)}
    with pytest.raises(ValueError, match="must be one of 97 tokens, it is 97"):
        run(model, beyond, decoding)
    model = conditional("llava")
    embedded = model.get_input_embeddings()(text["input_ids"])
    with pytest.raises(ValueError, match="inputs_embeds is not supported"):
        run(model, {"inputs_embeds": embedded}, decoding)


# ---- Conditional checkpoints ----


@pytest.mark.parametrize("kind", ["gemma3", "llava", *slow("gemma4", "gemma4 unified", "mistral3")])
def test_checkpoints_load_by_name(kind, tmp_path):
    model = conditional(kind).float()
    model.save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    loaded = load(str(tmp_path), dtype="float64")
    assert type(loaded.model) is type(model)
    inputs = inputs_of(loaded.model, kind)
    want = run(loaded.model, inputs)
    got = generate(
        loaded.model, inputs, skip=DRAFTS["exit"][0], costs=COSTS, max_new_tokens=NEW_TOKENS
    )
    assert got.sequences.tolist() == want.sequences.tolist()
