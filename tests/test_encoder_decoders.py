"""Encoder-decoders: the same tokens as `transformers`, with drafts from what the encoder read."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from models import VOCABULARY, Erratic, prompt, ragged, tiny_model
from test_whole import BATCHES, COSTS, EIGHT, NEW_TOKENS, decoded, every_draft
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import layerskip
from layerskip import LayerSkipDecoding, Lookup, SkipConfig
from layerskip.config import LowPrecision
from layerskip.model.opening import sublayers_of
from layerskip.model.whole import Whole, level
from layerskip.model.wrappers import UnsupportedModelError
from layerskip.replay.trace import take_trace

_GEMMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
    "vision_use_head": False,
}
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,  # so that distances beyond are told apart by their log
    "relative_attention_max_distance": 16,
}
_BART: dict[str, Any] = {
    "d_model": 32,
    "decoder_layers": 3,
    "encoder_layers": 1,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
}
_ENDS: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
_IMAGE = {"image_token_index": 95, "eoi_token_index": 94}


def _config(family: str) -> Any:
    more: dict[str, Any]
    encoder: Any
    if family == "t5gemma":
        decoder = transformers.T5GemmaModuleConfig(**_GEMMA, **_CAPS)
        # eager attention in float64 makes NaN of pads that see no token
        encoder = transformers.T5GemmaModuleConfig(**{**_GEMMA, "sliding_window": 32}, **_CAPS)
        more = {"encoder": encoder, "decoder": decoder, "decoder_start_token_id": 2}
    elif family == "t5gemma2":
        encoder = {"text_config": _GEMMA, "vision_config": _VISION, "mm_tokens_per_image": 4}
        encoder |= {"boi_token_index": 93, **_IMAGE}
        more = {"encoder": encoder, "decoder": _GEMMA, "decoder_start_token_id": 2, **_IMAGE}
    else:
        more = {**(_T5 if "t5" in family else _BART)}
        if family == "t5":
            more["feed_forward_proj"] = "gated-gelu"
    more["tie_word_embeddings"] = False  # tied heads tend to repeat the last token
    return AutoConfig.for_model(family, vocab_size=VOCABULARY, **more, **_ENDS)


@functools.cache
def model_of(family: str) -> Any:
    """A seeded random model in float64 whose text varies."""
    config = _config(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSeq2SeqLM.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                shift = torch.randn_like(weight)
                table = "embed" in name or "shared" in name
                size = 1.0 if table else 0.15
                if family in ("t5", "umt5"):  # whose head is tied in any case
                    size = 0.5
                weight.copy_(size * shift) if weight.dim() > 1 else weight.add_(0.1 * shift)
    model = model.double().eval()
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, decoder_start_token_id=config.decoder_start_token_id
    )
    return model


_SLOW = ("umt5", "mbart", "pegasus", "marian")
FAMILIES: list[Any] = ["t5", "t5gemma", "t5gemma2", "bart"]
FAMILIES += [pytest.param(family, marks=pytest.mark.slow) for family in _SLOW]


def texts(batch: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What encoders read, padded on the right, as their tokenizers pad."""
    ids, mask = ragged(BATCHES[batch], seed=3)
    lengths = mask.sum(-1).tolist()
    for row, length in enumerate(lengths):
        ids[row] = ids[row].roll(length)
        mask[row] = mask[row].roll(length)
    return ids, mask


@functools.cache
def reference(family: str, batch: str) -> list[list[int]]:
    """New tokens of the library's own greedy decoding."""
    ids, mask = texts(batch)
    how = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model_of(family).generate(ids, **how)[:, 1:].tolist()  # type: ignore[no-any-return]


def decode(family: str, batch: str, **settings: Any) -> Any:
    return decoded(model_of(family), texts(batch), **settings)


def new_tokens(out: Any) -> list[list[int]]:
    return out.sequences[:, 1:].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_draft_gives_the_tokens_of_transformers(family: str, batch: str) -> None:
    expected = reference(family, batch)
    assert isinstance(sublayers_of(model_of(family)), Whole)
    assert len({token for row in reference(family, "ragged") for token in row}) > 2
    assert new_tokens(decode(family, batch, enabled=False)) == expected
    for settings in every_draft(model_of(family), EIGHT):
        out = decode(family, batch, **settings)
        assert new_tokens(out) == expected
        assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_text_is_that_of_plain_decoding_whatever_drafts(family: str) -> None:
    how: dict[str, Any] = {"sample": True, "seeds": (11, 12, 13)}
    expected = new_tokens(decode(family, "ragged", enabled=False, **how))
    assert len({*map(tuple, expected)}) == 3
    for settings in every_draft(model_of(family), EIGHT):
        assert new_tokens(decode(family, "ragged", **how, **settings)) == expected


def test_drafts_are_looked_up_in_what_the_encoder_read() -> None:
    read = [torch.tensor([7, 8, 9, 10, 11]), torch.tensor([5, 6])]
    emitted: list[list[int]] = [[], []]
    batch: Any = type("Batch", (), {"prompts": torch.zeros(2, 1, dtype=torch.long)})()
    batch.model = SimpleNamespace(read=read, vocabulary=20)
    state = Lookup().open(batch)
    for row in range(2):
        emitted[row] += [20, 8]
        state.commit(row, emitted[row], 0)
    assert state.offer(0, 2).tokens == [9, 10]
    assert state.offer(1, 2).tokens == []
    assert new_tokens(decode("t5", "one", lookup=Lookup())) == reference("t5", "one")


def test_rows_end_and_leave_with_what_their_encoder_read() -> None:
    """Rows that have ended are dropped, and with them their row of the encoder's states."""
    ids, mask = texts("ragged")
    model, expected = model_of("t5"), reference("t5", "ragged")
    ends = sorted({tokens[3] for tokens in expected[:2]})
    how = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "eos_token_id": ends}
    want = model.generate(ids, **how)
    for settings in ({"enabled": False}, {"assistant": model, "controller": Erratic()}):
        decoding = LayerSkipDecoding(costs=COSTS, **settings)
        out = model.generate(ids, custom_generate=decoding, return_dict_in_generate=True, **how)
        assert out.sequences.tolist() == want[:, : out.sequences.shape[1]].tolist()
        assert out.stats.num_compactions > 0


def test_several_texts_may_be_drawn_for_what_was_read_once() -> None:
    ids, mask = texts("ragged")
    how = {"attention_mask": mask, "do_sample": True, "num_return_sequences": 2}
    decoding = LayerSkipDecoding(costs=COSTS, seed=5)
    out = model_of("t5").generate(ids, custom_generate=decoding, max_new_tokens=8, **how)
    assert len(out) == 6
    plain = LayerSkipDecoding(enabled=False, seed=5)
    assert (
        model_of("t5").generate(ids, custom_generate=plain, max_new_tokens=8, **how).tolist()
        == out.tolist()
    )


def test_a_decoder_may_begin_with_tokens_of_the_callers() -> None:
    ids, mask = texts("ragged")
    begin = torch.tensor([[2, 11, 12]]).repeat(3, 1)
    how = {"attention_mask": mask, "decoder_input_ids": begin, "max_new_tokens": 8}
    expected = model_of("bart").generate(ids, **how)
    decoding = LayerSkipDecoding(costs=COSTS)
    assert model_of("bart").generate(ids, custom_generate=decoding, **how).tolist() == (
        expected.tolist()
    )


def test_what_an_encoder_decoder_needs_is_said() -> None:
    model = model_of("t5")
    assert level(model) == level(model.config) == ("whole", "the sublayers of 't5' are not known")
    with pytest.raises(ValueError, match="an encoder-decoder reads a text before it decodes"):
        next(layerskip.decode(model, prompt(5), max_new_tokens=4))
    decoding = LayerSkipDecoding(assistant=model, lookup=False)
    with pytest.raises(ValueError, match="an encoder-decoder can draft for another one only"):
        tiny_model("llama").generate(prompt(5), custom_generate=decoding, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"served whole.*cannot leave sublayers out"):
        decode("t5", "one", skip=SkipConfig.early_exit(1))
    how, why = level(AutoConfig.for_model("switch_transformers"))
    assert how == "refused"
    assert "routers" in why
    small: dict[str, Any] = {**_BART, "vocab_size": VOCABULARY, "max_target_positions": 16, **_ENDS}
    speech = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**small))
    with pytest.raises(UnsupportedModelError, match="reads something other than text"):
        sublayers_of(speech.eval())


SKIPS = {
    "early exit": SkipConfig.early_exit(1),
    "attention": SkipConfig(attention=(1,)),
    "mlp": SkipConfig(mlp=(0,)),
    "in 4 bits": SkipConfig(low=LowPrecision(bits=4)),
    "one attention in 8 bits": SkipConfig(low=LowPrecision(attention=(1,), mlp=())),
    "few of the head": SkipConfig.early_exit(1),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("draft", SKIPS)
def test_a_t5gemma_drafts_with_its_decoders_sublayers(draft: str, batch: str) -> None:
    few = {"draft_vocabulary": range(2, 70)} if draft == "few of the head" else {}
    settings: dict[str, Any] = {
        "skip": SKIPS[draft],
        "controller": Erratic(),
        "max_draft_length": 5,
        **few,
    }
    out = decode("t5gemma", batch, **settings)
    assert new_tokens(out) == reference("t5gemma", batch)
    assert out.stats.num_draft_tokens > 0


def test_a_t5gemma_is_opened_and_counts_its_cross_attention() -> None:
    model = model_of("t5gemma")
    assert level(model) == ("opened", "its decoder's sublayers are known")
    opened = sublayers_of(model)
    assert opened.describe() == "modules: its decoder's sublayers are known"
    found = opened.weight_bytes()
    layer = model.model.decoder.layers[0]
    parts = (
        *(layer.self_attn, layer.pre_self_attn_layernorm, layer.post_self_attn_layernorm),
        *(layer.cross_attn, layer.pre_cross_attn_layernorm, layer.post_cross_attn_layernorm),
    )
    assert found["sublayers"][0] == sum(w.nbytes for part in parts for w in part.parameters())
    assert sum(found["sublayers"][:2]) == sum(w.nbytes for w in layer.parameters())
    every = [*model.model.decoder.parameters(), *model.lm_head.parameters()]
    table = model.model.decoder.embed_tokens.weight
    assert sum(found["sublayers"]) + found["head"] == sum(w.nbytes for w in every) - table.nbytes
    layerskip.release(model)
    decode("t5gemma", "one", skip=EIGHT)
    assert layerskip.release(model) == opened.weights.nbytes(EIGHT)
    hook = layer.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="T5GemmaDecoderLayer has forward hooks"):
        sublayers_of(model)
    hook.remove()
    with pytest.raises(ValueError, match="this is an encoder-decoder: it has no states"):
        take_trace(model, [prompt(9)], max_new_tokens=4)


def test_a_decoder_alone_may_draft_for_an_encoder_decoder() -> None:
    decoding = {
        "assistant": tiny_model("llama", bos_token_id=2, eos_token_id=1),
        "lookup": False,
        "controller": Erratic(),
    }
    out = decode("t5", "ragged", max_draft_length=4, **decoding)
    assert new_tokens(out) == reference("t5", "ragged")
    assert out.stats.num_draft_tokens > 0


def test_costs_are_measured_with_what_the_first_row_read() -> None:
    ids, mask = texts("ragged")
    how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8}
    expected = model_of("t5").generate(ids, **how)
    out: Any = layerskip.generate(model_of("t5"), {"input_ids": ids}, **how)
    assert out.sequences.tolist() == expected.tolist()
    assert out.costs.source in ("measured", "analytic")
