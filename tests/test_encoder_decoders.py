"""Encoder-decoders: the tokens of `transformers`, with drafts looked up in the encoder's text."""

import copy
import json
import random
from types import SimpleNamespace

import httpx
import pytest
import torch
from checkpoints import save_checkpoint, tiny_tokenizer
from commands import PROMPT, document, refused, run
from marks import thorough
from models import VOCABULARY, Erratic, prompt, pure, ragged, tiny_model
from servers import running
from small import (
    BATCHES,
    COSTS,
    EIGHT,
    NEW_TOKENS,
    alone,
    decode,
    decoded,
    every_draft,
    greedy,
    inputs,
    new_tokens,
    small_model,
)
from talks import drain, said
from transformers import AutoConfig

import layerskip
from layerskip import LayerSkipDecoding, Lookup, SkipConfig
from layerskip.api.arguments import read_text
from layerskip.api.loading import load
from layerskip.config.skips import LowPrecision
from layerskip.decoding.seats import Seat
from layerskip.families.wrappers import UnsupportedModelError
from layerskip.model.opened_models import sublayers_of
from layerskip.model.whole import support
from layerskip.replay.trace import take_trace
from layerskip.serving.http import make_app
from layerskip.serving.openai_api import Served
from layerskip.serving.requests import TextRequest
from layerskip.serving.scheduler import Serving


@pytest.mark.parametrize("family", ["m2m_100", "seamless_m4t_v2"])
def test_pads_in_a_text_are_counted_as_one_by_one(family):
    """Positions in a pass leave out its pads, but count those of earlier passes."""

    @pure
    def often(input_ids, scores):
        scores = scores.clone()
        scores[:, 0] += 9 * (input_ids.shape[1] % 3 == 0)
        return scores

    model, (ids, mask) = small_model(family), inputs(family, "ragged")
    how = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "logits_processor": [often]}
    want = model.generate(ids, **how)
    assert (want == 0).sum() >= 3
    for settings in ({"enabled": False}, *every_draft(model, EIGHT)):
        out = model.generate(ids, custom_generate=LayerSkipDecoding(costs=COSTS, **settings), **how)
        assert out.tolist() == want.tolist()


DECODERS = ("bart", "bigbird_pegasus", "marian", "trocr", "whisper")
LIKE_BART = ("blenderbot", "blenderbot-small", "mbart", "mvp", "pegasus", "plbart")


@pytest.mark.parametrize("family", [*DECODERS, *thorough(*LIKE_BART)])
def test_a_decoder_alone_gives_the_tokens_of_transformers(family):
    """Its class has a wrapper around the decoder, whose forward names no arguments."""
    model = small_model(family, is_encoder_decoder=False, tie_word_embeddings=False)
    inputs = ragged(BATCHES["ragged"], seed=3)
    expected, law = alone(model, *inputs), {"sample": True, "seeds": (11, 12, 13)}
    sampled = new_tokens(decoded(model, inputs, enabled=False, **law))
    assert len({token for row in expected for token in row}) > 4
    for settings in ({"enabled": False}, *every_draft(model, EIGHT)):
        assert new_tokens(decoded(model, inputs, **settings)) == expected
        assert new_tokens(decoded(model, inputs, **law, **settings)) == sampled


def test_drafts_are_looked_up_in_what_the_encoder_read():
    read = [torch.tensor([7, 8, 9, 10, 11]), torch.tensor([5, 6])]
    emitted = [[], []]
    batch = type("Batch", (), {"seats": [Seat(torch.zeros(1, dtype=torch.long))] * 2})()
    batch.model = SimpleNamespace(read=read, vocabulary=20)
    state = Lookup().open(batch)
    for row in range(2):
        emitted[row] += [20, 8]
        state.commit(row, emitted[row], 0)
    assert state.offer(0, 2).tokens == [9, 10]
    assert state.offer(1, 2).tokens == []
    assert new_tokens(decode("t5", "one", lookup=Lookup())) == greedy("t5", "one")


def test_rows_end_and_leave_with_what_their_encoder_read():
    """When a finished row is dropped, so is its row of the encoder's states."""
    ids, mask = inputs("t5", "ragged")
    model, expected = small_model("t5"), greedy("t5", "ragged")
    ends = sorted({tokens[2] for tokens in expected[:2]})
    how = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "eos_token_id": ends}
    want = model.generate(ids, **how)
    for settings in ({"enabled": False}, {"assistant": model, "controller": Erratic()}):
        decoding = LayerSkipDecoding(costs=COSTS, **settings)
        out = model.generate(ids, custom_generate=decoding, return_dict_in_generate=True, **how)
        assert out.sequences.tolist() == want[:, : out.sequences.shape[1]].tolist()
        assert out.stats.num_compactions > 0


def test_several_texts_may_be_drawn_for_what_was_read_once():
    ids, mask = inputs("t5", "ragged")
    how = {"attention_mask": mask, "do_sample": True, "num_return_sequences": 2}
    decoding = LayerSkipDecoding(costs=COSTS, seed=5)
    out = small_model("t5").generate(ids, custom_generate=decoding, max_new_tokens=8, **how)
    assert len(out) == 6
    plain = LayerSkipDecoding(enabled=False, seed=5)
    assert (
        small_model("t5").generate(ids, custom_generate=plain, max_new_tokens=8, **how).tolist()
        == out.tolist()
    )


def test_a_decoder_may_begin_with_tokens_of_the_callers():
    ids, mask = inputs("t5", "ragged")
    begin = torch.tensor([[1, 11, 12]]).repeat(3, 1)
    how = {"attention_mask": mask, "decoder_input_ids": begin, "max_new_tokens": 8}
    expected = small_model("bart").generate(ids, **how)
    decoding = LayerSkipDecoding(costs=COSTS)
    assert small_model("bart").generate(ids, custom_generate=decoding, **how).tolist() == (
        expected.tolist()
    )


def test_what_an_encoder_decoder_needs_is_said():
    model = small_model("t5")
    assert (
        support(model) == support(model.config) == ("whole", "the sublayers of 't5' are not known")
    )
    with pytest.raises(ValueError, match="an encoder-decoder reads a text before it decodes"):
        next(layerskip.decode(model, prompt(5), max_new_tokens=4))
    decoding = LayerSkipDecoding(assistant=model, lookup=False)
    with pytest.raises(ValueError, match="an encoder-decoder can only draft for another one"):
        tiny_model("llama").generate(prompt(5), custom_generate=decoding, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"runs as a whole.*cannot leave sublayers out"):
        decode("t5", "one", skip=SkipConfig.early_exit(1))
    reasons = {"switch_transformers": "routers", "whisper": "reads something other than text"}
    for kind, reason in reasons.items():
        how, why = support(AutoConfig.for_model(kind))
        assert how == "refused"
        assert reason in why


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
def test_a_t5gemma_drafts_with_its_decoders_sublayers(draft, batch):
    few = {"draft_vocabulary": range(2, 70)} if draft == "few of the head" else {}
    settings = {"skip": SKIPS[draft], "controller": Erratic(), "max_draft_length": 5, **few}
    out = decode("t5gemma", batch, **settings)
    assert new_tokens(out) == greedy("t5gemma", batch)
    assert out.stats.num_draft_tokens > 0


def test_a_t5gemma_is_opened_and_counts_its_cross_attention():
    model = small_model("t5gemma")
    assert support(model) == ("opened", "its sublayers are known")
    opened = sublayers_of(model)
    assert opened.describe() == "modules: it has a cross attention"
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
    with pytest.raises(UnsupportedModelError, match=r"T5GemmaDecoderLayer.* hooks"):
        sublayers_of(model)
    hook.remove()
    with pytest.raises(ValueError, match="encoder-decoders are not supported here"):
        take_trace(model, [prompt(9)], max_new_tokens=4)


def test_a_decoder_alone_may_draft_for_an_encoder_decoder():
    decoding = {
        "assistant": tiny_model("llama", bos_token_id=1, eos_token_id=3),
        "lookup": False,
        "controller": Erratic(),
    }
    out = decode("t5", "ragged", max_draft_length=4, **decoding)
    assert new_tokens(out) == greedy("t5", "ragged")
    assert out.stats.num_draft_tokens > 0


def test_costs_are_measured_with_what_the_first_row_read():
    ids, mask = inputs("t5", "ragged")
    how = {"attention_mask": mask, "max_new_tokens": 8}
    expected = small_model("t5").generate(ids, **how)
    out = layerskip.generate(small_model("t5"), {"input_ids": ids}, **how)
    assert out.sequences.tolist() == expected.tolist()
    assert out.costs.source in ("measured", "analytic")


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("family", ["t5", "t5gemma", *thorough("bart", "t5gemma2")])
def test_texts_that_join_and_leave_a_batch_are_those_of_generate(family, number):
    """They join others with longer and shorter encoder texts, greedy and sampled."""
    model, draw = small_model(family), random.Random(1)
    texts = [[draw.randrange(4, VOCABULARY) for _ in range(n)] for n in (9, 3, 17, 5, 12, 2, 7)]
    laws = [{"do_sample": number % 2 == 1, "seed": number} for number in range(len(texts))]
    want = []
    for text, law in zip(texts, laws, strict=True):
        how = {"max_new_tokens": NEW_TOKENS, "execution": "auto", "enabled": False, **law}
        out = layerskip.generate(model, torch.tensor([text]), top_k=0, **how)
        want.append(out.sequences[0, 1:].tolist())
        if not law["do_sample"]:
            plain = model.generate(torch.tensor([text]), max_new_tokens=NEW_TOKENS)
            assert want[-1] == plain[0, 1:].tolist()
    drafts = {"enabled": False}, {"lookup": True}, {"assistant": model}, {"skip": EIGHT}
    serving = Serving(model, max_rows=3, controller=Erratic(number), **drafts[number])
    told = [[] for _ in texts]
    for text, law, pieces in zip(texts, laws, told, strict=True):
        prompt, encoded, processors = read_text(model, text, NEW_TOKENS)
        more = {"processors": processors, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        task = TextRequest(prompt, NEW_TOKENS, encoded=encoded, **law, **more)
        serving.submit(task, pieces.append)
        for _ in range(draw.randint(0, 4)):
            serving.step()
    drain(serving)
    assert [said(pieces) for pieces in told] == want
    drafted = sum(pieces[-1].counts.drafted for pieces in told)
    assert (drafted > 0) is (number > 0) or number == 1  # lookups may find no repetition
    assert not serving._batch.passes.cache.unread
    with pytest.raises(ValueError, match="needs encoder states"):
        serving.submit(TextRequest([1], 3), print)


@pytest.mark.parametrize("family", [*thorough("t5"), "t5gemma"])
def test_commands_take_them_or_refuse_by_name(family, tmp_path):
    model = copy.deepcopy(small_model(family)).float()
    folder = save_checkpoint(tmp_path, model)
    (tmp_path / "asked.txt").write_text(f"{PROMPT}\nw8 w8 w9\n")
    want = []
    for text in (PROMPT, "w8 w8 w9"):
        ids = torch.tensor([tiny_tokenizer()(text)["input_ids"]])
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        want.append(out[0, 1:].tolist())
    flags = ("--prompts", tmp_path / "asked.txt", "--max-new-tokens", NEW_TOKENS, "--json")
    own = ("--exit-layer", 1) if family == "t5gemma" else ()
    for how in (("--controller", "fixed", *own), ("--no-draft",)):
        got = document(run("generate", folder, *flags, *how))["results"]
        assert [each["token_ids"] for each in got] == want
        assert (sum(each["num_draft_tokens"] for each in got) > 0) is ("--no-draft" not in how)
    answers = tmp_path / "answers.jsonl"
    given = ("run", folder, tmp_path / "asked.txt", "--output", answers, *own)
    result = run(*given, "--max-new-tokens", NEW_TOKENS, "--controller", "fixed")
    assert result.exit_code == 0, result.output
    rows = sorted(map(json.loads, answers.read_text().splitlines()), key=lambda row: row["id"])
    assert [row["token_ids"] for row in rows] == want
    assert [row["prompt_tokens"] for row in rows] == [4, 3]
    assert sum(row["drafted"] for row in rows) > 0
    loaded = load(str(folder), reads=True)
    served = Served(loaded, "reads", context=64)
    with running(make_app(Serving(loaded.model, enabled=False), served)) as url:
        body = {"model": "reads", "prompt": [PROMPT, "w8 w8 w9"], "temperature": 0}
        body["max_tokens"] = NEW_TOKENS
        got = httpx.post(f"{url}/v1/completions", json=body).json()
        texts = [loaded.tokenizer.decode(each, skip_special_tokens=True) for each in want]
        assert [choice["text"] for choice in got["choices"]] == texts
        assert got["usage"]["prompt_tokens"] == 7
        for wrong, words in (
            ({"echo": True, "logprobs": 1}, "gives no log-probabilities"),
            ({"prompt": "w5 " * 65}, "have at most 64 tokens; the prompt has 65"),
        ):
            got = httpx.post(f"{url}/v1/completions", json=body | wrong)
            assert (got.status_code, words in got.json()["error"]["message"]) == (400, True)
    for command in ("chat", "check"):
        words = refused(command, folder)
        assert words.endswith(
            "is an encoder-decoder: only layerskip generate, run and serve take it"
        )
