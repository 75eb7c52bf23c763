"""Benchmarks by length of context: how prompts are joined or cut, and what is recorded."""

from dataclasses import replace

import pytest
import torch
from checkpoints import tiny_tokenizer
from models import WINDOW, lively_model, ragged

from layerskip.bench.bandwidth import bytes_read
from layerskip.bench.batches import PromptBatch, long_prompts, make_batches
from layerskip.bench.methods import Decoded, Engine, Peer, Task
from layerskip.bench.runner import benchmark
from layerskip.config.skips import SkipConfig
from layerskip.decoding.rounds import Round
from layerskip.model.opened_models import Sublayers
from layerskip.texts.prompts import Prompt

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for m in messages %}w90 {{ m['role'] }} {{ m['content'] }} w91 {% endfor %}"
    "{% if add_generation_prompt %}w92 w93{% endif %}"
)


def prompts(*lengths):
    """Prompts of these numbers of words: w2 ..., w12 ..., w22 ..."""
    texts = [
        " ".join(f"w{10 * i + 2 + j % 10}" for j in range(length))
        for i, length in enumerate(lengths)
    ]
    return [Prompt(id=f"p{i}", text=text) for i, text in enumerate(texts)]


def made(texts, contexts, tokenizer=None, **limits):
    long, again = long_prompts(tokenizer or tiny_tokenizer(), texts, contexts, CPU, **limits)
    return [(each.name, each.ids[0].tolist()) for each in long], again


def test_prompts_are_joined_in_order_and_cut_in_the_middle():
    joined, again = made(prompts(4, 3, 3, 4, 9), [6])
    assert joined == [
        ("6-1", [2, 3, 4, 12, 13, 14]),
        ("6-2", [22, 23, 24, 33, 34, 35]),
        ("6-3", [42, 43, 44, 48, 49, 50]),
    ]
    assert again is None
    assert made(prompts(4, 3, 3, 4, 9), [6], most=1) == (joined[:1], None)


def test_prompts_that_do_not_suffice_are_repeated():
    joined, again = made(prompts(4, 3), [20, 6, 6], least=2)
    assert [name for name, _ in joined] == ["6-1", "6-2", "20-1", "20-2"]
    assert [len(ids) for _, ids in joined] == [6, 6, 20, 20]
    assert joined[1][1] == [2, 3, 4, 12, 13, 14]  # starts again with the first prompt
    assert joined[2][1][:9] == [2, 3, 4, 5, 12, 13, 14, 2, 3]
    assert again == 6
    assert made(prompts(4, 3), [6, 20])[1] == 20


def test_the_templates_ends_stay():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chats = [each.as_chat() for each in prompts(4, 3, 8)]
    for context, last in ((10, 14), (16, 29)):
        ((_, ids), *_), _ = made(chats, [context], tokenizer)
        assert len(ids) == context
        assert ids[:3] == [90, 1, 2]  # the start of a turn and of the first prompt
        assert ids.count(90) == 1
        assert ids[-4:] == [last, 91, 92, 93]
    with pytest.raises(ValueError, match="--context must be at least 10 for this model, got 9"):
        made(chats, [9], tokenizer)
    with pytest.raises(ValueError, match="has no chat template"):
        made(chats, [16])


def test_every_method_answers_at_a_context():
    model = lively_model("llama")
    long, _ = long_prompts(tiny_tokenizer(), prompts(9, 9, 9, 9), [8, 16], CPU, least=2)
    batches, words = make_batches(long, [1, 2], 0)
    assert words == []
    task = Task(4)
    skip = SkipConfig.early_exit(3)
    methods = [
        Engine(model, task),
        Engine(model, task, "self", skip, controller="fixed", max_draft_length=2),
        Peer(model, task),
        Peer(model, task, "generate-prompt-lookup", options={"prompt_lookup_num_tokens": 3}),
    ]
    records = []
    benchmark(model, task, methods, batches, repeats=1, warmup=0, write=records.append)
    assert {(r["context"], r["batch_size"]) for r in records} == {(8, 1), (8, 2), (16, 1), (16, 2)}
    for record in records:
        assert set(record["prompt_tokens"]) == {record["context"]}
        assert record["category"] == f"{record['context']} tokens"
        assert record["equal"] == [True] * record["batch_size"]
        assert (record["bytes_read"] is None) == (record["method"] == "generate-prompt-lookup")


# ---- Bytes that passes read ----


def read_by(model, layers=6):
    """Bytes of a token's keys and values in one layer, and of `layers` layers with the head."""
    config, decoder = model.config, model.model
    modules = [*decoder.layers[:layers], decoder.norm, model.lm_head]
    weights = sum(weight.nbytes for module in modules for weight in module.parameters())
    return 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize, weights


def test_a_pass_reads_weights_and_what_its_tokens_see():
    """Rows of 3 and 9 tokens generate two and one after their first; some layers see 8 tokens."""
    model = lively_model("gemma2")
    windows = [WINDOW if "sliding" in kind else None for kind in model.config.layer_types]
    assert {*windows} == {WINDOW, None}
    slot, whole = read_by(model)
    batch = PromptBatch(("a", "b"), (0, 1), None, *ragged((3, 9)))
    decoded = Decoded([[5, 6, 7], [5, 6]], 0.0, [1, 1])
    read = bytes_read(Sublayers(model), Peer(model, Task(3)), batch, decoded)
    seen = [min(length, w or length) for w in windows for length in (4, 10, 5)]
    assert read == 2 * whole + slot * sum(seen)


def test_a_round_reads_its_drafts_and_the_whole_model():
    """Three of six layers draft two tokens, of which one is accepted; then a plain step."""
    model = lively_model("llama")
    (slot, whole), (_, draft) = read_by(model), read_by(model, 3)
    batch = PromptBatch(("a",), (0,), None, *ragged((7,)))
    rounds = [
        Round(number, ((5,) * new,), (drafted,), (new - 1,), ((),), (False,), source, steps=steps)
        for number, (drafted, steps, new, source) in enumerate(
            [(0, 0, 1, None), (2, 2, 2, 0), (0, 0, 1, None)]
        )
    ]
    decoded = Decoded([[5] * 4], 0.0, [1], rounds)
    own = Engine(model, Task(4), "self", SkipConfig.early_exit(3))
    read = bytes_read(Sublayers(model), own, batch, decoded)
    assert read == 2 * draft + 2 * whole + slot * (3 * (8 + 9) + 6 * (10 + 10))
    tree = replace(rounds[1], drafted=(3,))  # a tree of three tokens in two steps
    read = bytes_read(Sublayers(model), own, batch, replace(decoded, rounds=[rounds[0], tree]))
    assert read == 2 * draft + whole + slot * (3 * (8 + 9) + 6 * 11)
    looked_up = Engine(model, Task(4), "self", lookup=True)
    decoded = replace(decoded, rounds=[replace(each, steps=0) for each in rounds])
    read = bytes_read(Sublayers(model), looked_up, batch, decoded)
    assert read == 2 * whole + slot * 6 * (10 + 10)
    peer = Peer(model, Task(4), "generate-prompt-lookup")
    assert bytes_read(Sublayers(model), peer, batch, Decoded([[5] * 4], 0.0, [1])) is None
