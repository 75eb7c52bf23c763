"""Compiled passes: the same tokens, few compilations, and a machine without a compiler."""

import gc
import warnings
from weakref import ref

import pytest
import torch
from models import FAMILIES, lively_model, prompt, tiny_model
from torch._dynamo.utils import counters

from layerskip import Lookup, SkipConfig
from layerskip.bench import runner as benchmark
from layerskip.decoding.passes import Passes
from layerskip.environment import _compiler
from layerskip.generation import generate
from layerskip.model import compiled
from layerskip.model.sublayers import Sublayers

EXIT = SkipConfig.early_exit(3)
HOLES = SkipConfig(attention=(2, 4), mlp=(3,))


def graphs():
    """How many graphs have been compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def decode(model, ids, skip, **settings):
    settings = {"execution": "compiled", "max_new_tokens": 24, "controller": "fixed"} | settings
    return generate(
        model, ids, skip=skip, max_draft_length=3, return_dict_in_generate=True, **settings
    )


@pytest.fixture
def no_compiler(monkeypatch):
    """`torch.compile` as on a machine without a compiler."""

    def fail(*_, **__):
        raise RuntimeError("no C++ compiler found\nand a long story")

    monkeypatch.setattr(torch, "compile", fail)
    compiled.refusal.cache_clear()
    compiled.warn_refusal.cache_clear()
    yield
    compiled.refusal.cache_clear()
    compiled.warn_refusal.cache_clear()


def test_without_a_compiler_there_is_one_notice_and_the_lean_path(no_compiler):
    model, ids = tiny_model("llama"), prompt(9)
    assert Sublayers(model, "auto").execution == "fused"  # which never compiles
    want = decode(model, ids, EXIT, execution="fused").sequences
    with pytest.warns(UserWarning, match="path: RuntimeError no C.. compiler found and a long"):
        assert Sublayers(model, "compiled").execution == "fused"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(decode(model, ids, EXIT).sequences, want)


def test_what_is_not_plain_is_refused():
    model = tiny_model("llama")
    model.model.layers[2].mlp.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(ValueError, match="'compiled' cannot serve this model: layer 2 mlp has"):
        Sublayers(model, "compiled")


def small_model(**changes):
    return lively_model("llama", num_hidden_layers=2, **changes)


def test_no_timed_call_compiles(monkeypatch):
    """A call of the benchmark that compiled something is timed again."""
    spent, calls = [0.0], []

    def call(*_):
        calls.append(len(calls))
        if len(calls) < 3:  # the second call has another shape to compile
            spent[0] += 3.0
        return calls[-1]

    monkeypatch.setattr(benchmark, "compile_seconds", lambda: spent[0])
    monkeypatch.setattr(benchmark, "_once", call)
    assert benchmark._timed(*5 * [None]) == 2


@pytest.mark.thorough
@pytest.mark.skipif(_compiler() is None, reason="no C++ compiler on this machine")
def test_one_compiled_layer_gives_the_text_of_transformers():
    """The smallest model that compiled passes have something to do for; others are slow."""
    model = lively_model("llama", num_hidden_layers=1)
    before, ids = graphs(), prompt(9)
    want = model.generate(ids, max_new_tokens=24, do_sample=False)
    text = want[0].tolist()
    # two functions are compiled: of a token, and of several
    got = decode(model, ids, None, lookup=Lookup([[*text[8:20], 1, *text[18:26], 2]]))
    assert torch.equal(got.sequences, want)
    assert graphs() > before
    assert got.stats.num_draft_tokens > got.stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_a_second_call_compiles_nothing():
    """Nor do other prompts, lengths, draft lengths or places of the weights; other rows do."""
    model, skip = small_model(), SkipConfig.early_exit(1)
    decode(model, prompt(9), skip)
    decode(model, prompt(9), skip, max_new_tokens=2)  # a round without a draft
    before = graphs()
    for length, tokens in ((9, 24), (5, 100), (70, 30), (1, 20)):
        ids = prompt(length)
        got = decode(model, ids, skip, max_new_tokens=tokens)
        assert got.stats.num_accepted_tokens > 0
        want = model.generate(ids, max_new_tokens=tokens, do_sample=False)
        assert torch.equal(got.sequences, want)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.05)
    want = model.generate(prompt(9), max_new_tokens=24, do_sample=False)
    assert torch.equal(decode(model, prompt(9), skip).sequences, want)
    assert graphs() == before
    decode(model, prompt(9, rows=2), skip)
    assert graphs() > before


@pytest.mark.slow
def test_a_model_is_let_go():
    model = small_model()
    decode(model, prompt(9), SkipConfig.early_exit(1))
    gone = ref(model)
    weight = ref(model.model.layers[0].mlp.down_proj.weight)
    del model
    gc.collect()
    assert gone() is None
    assert weight() is None


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_that_of_transformers(family):
    """Past the sliding windows and the first 64 slots, ends included."""
    model = lively_model(family)
    ids = prompt(13)
    want = model.generate(ids, max_new_tokens=64, do_sample=False)
    model.generation_config.eos_token_id = eos = int(want[0, -9])
    want = model.generate(ids, max_new_tokens=64, do_sample=False)
    got = decode(model, ids, HOLES, max_new_tokens=64, eos_token_id=eos)
    assert torch.equal(got.sequences, want)
    assert got.stats.num_draft_tokens > got.stats.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_the_lean_path(dtype):
    """Within what its own passes of other lengths differ by."""
    model = tiny_model("llama", dtype=dtype, num_hidden_layers=2)
    found = {}
    with torch.no_grad():
        for execution in ("fused", "compiled"):
            passes = Passes(
                Sublayers(model, execution),
                [SkipConfig.early_exit(1)],
                [prompt(12)[0]],
                max_new_tokens=20,
                max_draft_length=4,
            )
            passes.prefill()
            verified = [(0, offset) for offset in range(4)]
            steps = [passes.draft_step(torch.tensor([token]), token) for token in range(3)]
            found[execution] = torch.cat([*steps, passes.verify(torch.tensor([[3]]), verified)])
    bound = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-8}[dtype]
    want = found["fused"]
    assert (found["compiled"] - want).abs().max() <= bound * want.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_trimmed_head_costs_a_function_of_its_own_and_no_more(family):
    model = lively_model(family)
    want = decode(model, prompt(9), EXIT).sequences
    decode(model, prompt(9), EXIT, max_new_tokens=2)  # a round without a draft
    before = graphs()
    got = decode(model, prompt(9), EXIT, draft_vocabulary=list(range(5, 60)))
    assert torch.equal(got.sequences, want)
    assert got.stats.num_draft_tokens > got.stats.num_accepted_tokens > 0
    assert graphs() == before + 1
    decode(model, prompt(9), EXIT, draft_vocabulary=list(range(5, 60)))
    assert graphs() == before + 1
