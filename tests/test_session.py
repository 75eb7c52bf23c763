"""Sessions: calls that start from known keys give the texts of calls that do not."""

from types import SimpleNamespace

import pytest
import torch
from kinds import draft_of
from models import WINDOW, lively_model, prompt, ragged, side_by_side
from pictured import conditional, inputs_of
from small import small_model

import layerskip
from layerskip import Session, SkipConfig
from layerskip.costs.speculation import CostTable

COSTS = CostTable(0.3, (1.0, 1.05, 1.1, 1.2, 1.3))
LARGE = 1 << 24
TURNS = 6


@pytest.fixture(autouse=True)
def _trims_often(sizes):
    """Layers with windows drop unneeded slots as soon as they can."""
    sizes(spare=1)


def how(**more):
    fixed = {"skip": SkipConfig.early_exit(3), "costs": COSTS, "do_sample": False}
    return {**fixed, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, **more}


def sampled(**more):
    return how(do_sample=True, temperature=0.9, top_k=0, **more)


def alike(session, ids, **settings):
    """A session's output, which must equal that of a call without it."""
    # without a mask, the library would treat a pad token in the prompt as padding
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    out = session.generate(inputs, **settings)
    alone = layerskip.generate(session.model, inputs, **settings)
    assert out.sequences.tolist() == alone.sequences.tolist()
    assert alone.stats.num_known_tokens == 0
    assert session.nbytes <= session.memory
    return out


def model_of(family, execution):
    dtype = torch.float32 if execution == "native" else torch.float64
    return lively_model(family, dtype=dtype, num_hidden_layers=5 if family == "gemma4" else 4)


CASES = [
    *[(family, "native") for family in ("llama", "gemma3", "gemma4")],
    *[(family, how) for family in ("llama", "gemma2", "gemma3") for how in ("fused", "modules")],
    ("gemma3", "captured"),
]
RAGGED = [
    *[(family, "native") for family in ("llama", "gemma3", "gemma4")],
    *[("llama", "modules"), ("gemma3", "fused"), ("gemma4", "modules")],
]


@pytest.mark.parametrize(("family", "execution"), CASES)
def test_a_chat_of_six_turns(family, execution, built):
    """Every turn starts from all keys of the last turn."""
    session = Session(model_of(family, execution), memory=LARGE, execution=execution)
    ids = prompt(3 * WINDOW)
    for turn in range(TURNS):
        settings = (sampled if turn % 2 else how)(seed=turn or None, execution=execution)
        out = alike(session, ids, **settings)
        assert out.stats.num_known_tokens == (ids.shape[1] - 6 if turn else 0)
        ids = torch.cat([out.sequences, prompt(5, seed=turn)], 1)
    assert session.num_texts == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_native_numbers_are_the_same_bit_by_bit(family, dtype, built, sizes):
    """However prompts are split."""
    model = lively_model(family, dtype=dtype)
    session = Session(model, memory=LARGE)
    sizes(chunk=lambda *_: 64)
    ids = prompt(150)
    for turn in range(3):
        settings = how(output_logits=True)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        out = session.generate(inputs, **settings)
        alone = layerskip.generate(model, inputs, **settings)
        assert (out.stats.num_known_tokens > 0) is (turn > 0)
        for ours, theirs in zip(out.logits, alone.logits, strict=True):
            assert torch.equal(ours, theirs)
        ids = torch.cat([out.sequences, prompt(3, seed=turn)], 1)


@pytest.mark.parametrize(("family", "execution"), RAGGED)
def test_samples_of_a_prompt_carry_its_last_token_only(family, execution, built):
    """Even if answers are longer than what layers with windows hold."""
    session = Session(model_of(family, execution), memory=LARGE, execution=execution)
    ids = prompt(5 * WINDOW)
    for seed in range(2):
        out = alike(
            session, ids, **sampled(seed=seed, execution=execution, max_new_tokens=4 * WINDOW)
        )
        assert out.stats.num_known_tokens == (ids.shape[1] - 1 if seed else 0)
    assert session.num_texts == 2


@pytest.mark.parametrize(("family", "known"), [("llama", (0, 40, 40)), ("gemma3", (0, 0, 40))])
def test_documents_with_the_same_instructions(family, known, sizes):
    """When the second text comes, the windows at the point where the texts part are kept."""
    sizes(chunk=lambda *_: 16)
    session = Session(model_of(family, "fused"), memory=LARGE)
    instructions = prompt(40)
    for number, expected in enumerate(known):
        document = prompt(50, seed=number + 1)
        document[0, 0] = 2 + number  # the documents differ from their first token on
        out = alike(session, torch.cat([instructions, document], 1), **how())
        assert out.stats.num_known_tokens == expected


@pytest.mark.parametrize(("family", "execution"), RAGGED)
def test_every_row_of_a_batch_has_its_own_beginning(family, execution, built):
    session = Session(model_of(family, execution), memory=LARGE, execution=execution)
    ids, mask = ragged((30, 4, 70, 11))
    settings = sampled(execution=execution, seeds=[3, 4, 5, 6])
    first = session.generate({"input_ids": ids, "attention_mask": mask}, **settings)
    assert first.stats.num_known_tokens == 0
    texts = [row[row_mask.bool()] for row, row_mask in zip(ids, mask, strict=True)]
    answers = first.sequences[:, 70:]
    texts[0] = torch.cat([texts[0], answers[0], prompt(9)[0]])  # its next turn
    texts[1] = prompt(25, seed=8)[0]  # a new text
    texts[1][0] = 2 + (int(texts[1][0]) == 2)
    texts[3] = torch.cat([texts[3], answers[3, :5], prompt(30)[0]])  # differs within its answer
    width = max(map(len, texts))
    pads = [width - len(text) for text in texts]
    both = {
        "input_ids": torch.stack(
            [torch.nn.functional.pad(text, (n, 0)) for text, n in zip(texts, pads, strict=True)]
        ),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in pads]),
    }
    out = session.generate(both, **settings)
    alone = layerskip.generate(session.model, both, **settings)
    assert out.sequences.tolist() == alone.sequences.tolist()
    assert out.stats.num_known_tokens >= 30 + 19 + 69  # rows 0 and 2; perhaps 3


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_slots_that_a_window_left_out_are_not_stored(family, sizes):
    """Beside a row without a known beginning, a known row's buffers begin before its own slots."""
    sizes(spare=16)
    model = lively_model(family)
    session = Session(model)
    text = session.generate(prompt(2), max_new_tokens=60).sequences
    other = prompt(60, seed=1)
    session.generate(torch.cat([text[:, :60], other]), max_new_tokens=2)
    for count in (4, 9, 20):
        ids = torch.cat([text[:, :count], other[:, :9]], 1)
        got = session.generate(ids, max_new_tokens=2, output_logits=True)
        want = layerskip.generate(model, ids, max_new_tokens=2, output_logits=True)
        torch.testing.assert_close(got.logits[0], want.logits[0], rtol=0, atol=1e-4)


def test_rows_of_one_prompt_are_held_once():
    session = Session(lively_model("llama"), memory=LARGE)
    session.generate(prompt(40), **how(max_new_tokens=1))
    once = session.nbytes
    session.generate(prompt(40).repeat(3, 1), **how(max_new_tokens=1))
    assert session.nbytes == once == 40 * 6 * 2 * 2 * 8 * 8  # layers, both, heads, width, bytes


def test_what_was_used_least_recently_is_dropped_first():
    model = lively_model("llama")
    token = 6 * 2 * 2 * 8 * 8
    session = Session(model, memory=100 * token, **how(max_new_tokens=1))
    texts = [prompt(30, seed=seed) for seed in range(4)]
    for number, text in enumerate(texts):
        text[0, 0] = 2 + number
    for text in (*texts[:3], texts[0], texts[3]):
        session.generate(text)
    assert (session.num_texts, session.nbytes) == (3, 90 * token)
    known = [session.generate(text).stats.num_known_tokens for text in texts]
    assert known[:2] == [29, 0]
    session.generate(prompt(101))  # too long to be kept
    assert session.nbytes <= session.memory
    assert session.generate(prompt(101)).stats.num_known_tokens == 0
    session.clear()
    assert (session.num_texts, session.nbytes) == (0, 0)


def _in_place(model):
    model.model.layers[2].mlp.down_proj.weight.mul_(1.5)


def _behind_its_back(model):
    model.lm_head.weight.data *= 1.5


def _one_number(model):
    model.model.layers[2].self_attn.v_proj.weight.data[3, 5] *= -30


def _signs_of_a_row(model):
    model.model.layers[2].self_attn.v_proj.weight.data[3] *= -1


def _another_weight(model):
    own = model.model.layers[1].self_attn.q_proj
    own.weight = torch.nn.Parameter(own.weight * 1.5)


def _another_dtype(model):
    model.double() if model.dtype is torch.float32 else model.float()


def _another_adapter(model):
    module = model.model.layers[1].mlp
    module.active_adapters, module.disable_adapters = ["second"], False


CHANGES = [
    _in_place,
    _behind_its_back,
    _one_number,
    _signs_of_a_row,
    _another_weight,
    _another_dtype,
    _another_adapter,
]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_nothing_of_other_weights_is_continued(change):
    model = lively_model("llama")
    model.model.layers[1].mlp.active_adapters = ["first"]
    model.model.layers[1].mlp.disable_adapters = False
    session = Session(model, memory=LARGE)
    for expected in (0, 29):
        assert alike(session, prompt(30), **how()).stats.num_known_tokens == expected
    change(model)
    for expected in (0, 29):
        assert alike(session, prompt(30), **how()).stats.num_known_tokens == expected


@torch.no_grad()
def test_a_text_begun_with_other_weights_is_not_kept():
    model = lively_model("llama")
    session = Session(model, memory=LARGE)
    asked = {"skip": SkipConfig.early_exit(3), "costs": COSTS, "max_new_tokens": 9}
    rounds = session.decode(prompt(30), **asked)
    next(rounds)
    _in_place(model)
    session.generate(prompt(12, seed=1), **how())
    rounds.close()
    assert session.generate(prompt(30), **how()).stats.num_known_tokens == 0


def test_decodings_that_are_given_up_keep_what_they_have():
    session = Session(lively_model("llama"), memory=LARGE)
    asked = {"skip": SkipConfig.early_exit(3), "costs": COSTS, "max_new_tokens": 40}
    rounds = session.decode(prompt(30), eos_token_id=[], **asked)
    emitted = [token for _ in range(4) for token in next(rounds).tokens[0]]
    assert session.num_texts == 0
    rounds.close()
    ids = torch.cat([prompt(30), torch.tensor([emitted]), prompt(4)], 1)
    assert alike(session, ids, **how()).stats.num_known_tokens == 30 + len(emitted) - 1


def test_an_error_leaves_a_session_as_good_as_before():
    session = Session(lively_model("llama"), memory=LARGE)
    session.generate(prompt(30), **how())

    def fails(ids, _):
        if ids.shape[1] > 36:
            raise RuntimeError("a criterion's own")
        return False

    with pytest.raises(RuntimeError, match="a criterion's own"):
        session.generate(prompt(30), **how(stopping_criteria=[fails]))
    assert alike(session, prompt(30), **how()).stats.num_known_tokens == 29


@pytest.mark.parametrize("kind", ["exit-block", "heads", "streams"])
def test_drafts_that_read_the_targets_states_of_prompts(kind, tmp_path):
    model = lively_model("llama")
    skip = draft_of(kind, model, tmp_path)
    session = Session(model, memory=LARGE)
    ids = prompt(20)
    for turn in range(3):
        out = alike(session, ids, **how(skip=skip, controller="fixed", max_draft_length=3))
        assert out.stats.num_drafts > 0
        assert out.stats.num_known_tokens == (ids.shape[1] - 4 if turn else 0)
        ids = torch.cat([out.sequences, prompt(3, seed=turn)], 1)
    # and if no such states were kept
    plain = Session(model, memory=LARGE)
    plain.generate(ids, **how(enabled=False))
    out = alike(plain, ids, **how(skip=skip, controller="fixed", max_draft_length=3))
    assert out.stats.num_known_tokens == 0
    out = alike(plain, ids, **how(skip=skip, controller="fixed", max_draft_length=3))
    assert out.stats.num_known_tokens == ids.shape[1] - 1


@pytest.mark.parametrize("family", ["gpt2", "falcon"])
def test_models_that_are_served_whole(family):
    session = Session(small_model(family), memory=LARGE)
    ids = prompt(9)
    for turn in range(3):
        out = alike(session, ids, **how(skip=None, lookup=True, costs=COSTS, max_new_tokens=6))
        assert (out.stats.num_known_tokens > 0) is (turn > 0)
        ids = torch.cat([out.sequences, prompt(2, seed=turn)], 1)


def test_several_prompts_with_pictures_leave_nothing_and_one_its_keys():
    model = conditional("gemma3")
    session = Session(model, memory=LARGE)
    both = inputs_of(model, "gemma3", (24, 18), ((3,), ()))
    one = inputs_of(model, "gemma3", (24,), ((3,),))
    for inputs, known in ((both, 0), (one, 0), (one, 23), (both, 0)):
        out = session.generate(inputs, **how())
        alone = layerskip.generate(model, inputs, **how())
        assert out.sequences.tolist() == alone.sequences.tolist()
        assert out.stats.num_known_tokens == known
    assert session.num_texts == 1


def test_several_threads_share_a_session():
    model = lively_model("gemma3", num_hidden_layers=4)
    session = Session(model, memory=20 * 1000)  # never enough for all
    wanted = [layerskip.generate(model, prompt(40, seed=s), **how()).sequences for s in range(3)]
    found = {0: [], 1: [], 2: []}

    def calls(number):
        for turn in range(3):
            seed = (number + turn) % 3
            found[seed].append(session.generate(prompt(40, seed=seed), **how()).sequences)

    side_by_side(*(lambda number=number: calls(number) for number in range(3)))
    for seed, outs in found.items():
        assert len(outs) == 3
        assert all(torch.equal(out, wanted[seed]) for out in outs)
    assert session.nbytes == sum(each.nbytes for each in session._cached._all())
    assert session.nbytes <= session.memory


def test_progress_tells_what_is_read(sizes):
    sizes(chunk=lambda *_: 20)
    session = Session(lively_model("llama"), memory=LARGE)
    told = []
    session.generate(prompt(50), **how(progress=lambda *each: told.append(each)))
    assert told == [(20, 50), (40, 50), (50, 50)]
    told.clear()
    session.generate(prompt(50), **how(progress=lambda *each: told.append(each)))
    assert told == [(50, 50)]


def test_the_default_memory_is_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr("layerskip.api.session.free_memory", lambda: 4000)
    assert Session(lively_model("llama")).memory == 1000
    monkeypatch.setattr("layerskip.api.session.free_memory", lambda: None)
    assert Session(lively_model("llama")).memory == 1 << 30
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (800, 1000))
    assert layerskip.api.session.share(gpu) == 200
