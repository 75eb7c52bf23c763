"""Captured passes: the same tokens, few captures, and buffers that come back.

A CPU has no graphs. What was captured runs once more there, on the buffers that it was captured
with (conftest.py), so that a replay for other buffers gives wrong tokens here, too.
"""

import pytest
import torch
from engines import Script, decoder, play, request
from guesses import Guesses
from models import FAMILIES, lively_model, prompt, ragged, tiny_model

from layerskip import LayerSkipDecoding, Lookup, SkipConfig, generate
from layerskip.backends import captured, native_passes
from layerskip.backends.fused import Fused
from layerskip.bench import runner as benchmark
from layerskip.costs.speculation import CostTable
from layerskip.decoding import live_target
from layerskip.decoding.controllers import Controller
from layerskip.decoding.passes import Passes
from layerskip.model.opened_models import Sublayers

EXIT = SkipConfig.early_exit(3)
HOLES = SkipConfig(attention=(2, 4), mlp=(3,))


def decode(model, ids, skip, **settings):
    settings = {"execution": "captured", "max_new_tokens": 24, "controller": "fixed"} | settings
    return generate(
        model, ids, skip=skip, max_draft_length=3, return_dict_in_generate=True, **settings
    )


@pytest.fixture
def captures(monkeypatch):
    """The numbers of tokens of passes that were captured, in order."""
    made, real = [], captured._captured

    def spying(run, inputs, beside):
        made.append(inputs["hidden"].shape[1])
        return real(run, inputs, beside)

    monkeypatch.setattr(captured, "_captured", spying)
    return made


def test_without_a_gpu_there_is_one_notice_and_the_fused_path(monkeypatch):
    monkeypatch.setattr(captured, "DEVICES", ("cuda",))
    native_passes.warn_refusal.cache_clear()
    with pytest.warns(UserWarning, match="fused path: CUDA graphs need a GPU"):
        opened = Sublayers(tiny_model("llama"), "captured")
    assert opened.describe() == "fused: CUDA graphs need a GPU"


def test_drafts_in_few_bits_must_be_asked_for():
    words = LayerSkipDecoding(execution="captured").explain(tiny_model("llama"))
    assert "not measured on a GPU; ask for them with --low-precision 8" in words


def test_without_a_compiler_passes_take_torchs_kernels():
    class Kernels:
        @staticmethod
        def product(*_, **__):
            raise RuntimeError("Failed to find C compiler")

    with pytest.warns(UserWarning, match="torch's kernels: .*Failed to find C compiler"):
        assert not captured._compiles(Kernels, torch.device("cpu"), torch.float32)


def test_no_timed_call_captures(monkeypatch):
    """A call of the benchmark that captured something is timed again."""
    spent, calls = [0.0], []

    def call(*_):
        calls.append(len(calls))
        if len(calls) < 3:  # the second call has another shape to capture
            spent[0] += 3.0
        return calls[-1]

    monkeypatch.setattr(benchmark, "capture_seconds", lambda: spent[0])
    monkeypatch.setattr(benchmark, "_once", call)
    assert benchmark._timed(*5 * [None]) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_that_of_transformers(family, captures, sizes):
    """Past the sliding windows and buffers of several sizes, ends included."""
    sizes(spare=8)
    model = lively_model(family)
    ids = prompt(13)
    want = model.generate(ids, max_new_tokens=40, do_sample=False)
    model.generation_config.eos_token_id = eos = int(want[0, -9])
    want = model.generate(ids, max_new_tokens=40, do_sample=False)
    got = decode(model, ids, HOLES, max_new_tokens=40, eos_token_id=eos)
    assert torch.equal(got.sequences, want)
    assert got.stats.num_draft_tokens > got.stats.num_accepted_tokens > 0
    assert {*captures} == {1, 8}  # a draft step, and a verification pass of up to eight tokens


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("longest", "nodes"), [(8, 16), (70, 64)])
def test_trees_are_captured(rows, longest, nodes, captures, spied):
    """Unless they have more than 64 nodes."""
    model, ids = lively_model("gemma3"), prompt(9, rows=rows)
    want = decode(model, ids, None, enabled=False, max_new_tokens=80).sequences
    eager, controller = spied(Fused, "run", lambda _, hidden, *__: hidden.shape[1]), Controller()
    controller.needs_confidence = False
    how = {"controller": controller, "max_draft_length": longest, "max_new_tokens": 80}
    how |= {"sources": [Guesses(want[:, 9:].tolist())], "lookup": False, "execution": "captured"}
    got = generate(model, ids, return_dict_in_generate=True, **how)
    assert torch.equal(got.sequences, want)
    assert got.stats.num_accepted_tokens > 0
    assert nodes in captures
    assert {9} == {*eager} if longest < 64 else max(eager) == 71


def test_a_second_call_captures_nothing(captures):
    """Nor do other prompts and lengths in buffers of the same size, and other values of weights."""
    model, skip = lively_model("llama", num_hidden_layers=2), SkipConfig.early_exit(1)
    for again in range(2):  # what a call sees once is captured in a later one
        before = len(captures)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.05)
        for length, tokens in ((9, 24), (5, 40), (20, 30), (1, 20)):
            ids = prompt(length)
            got = decode(model, ids, skip, max_new_tokens=tokens)
            assert got.stats.num_accepted_tokens > 0
            want = model.generate(ids, max_new_tokens=tokens, do_sample=False)
            assert torch.equal(got.sequences, want)
        assert (len(captures) > before) is (again == 0)
    for _ in range(3):
        before = len(captures)
        decode(model, prompt(9, rows=2), skip, draft_vocabulary=range(60))
    assert len(captures) == before


def test_two_decodings_at_once_have_buffers_of_their_own():
    """Both are handed out again when they end."""
    model = lively_model("llama", num_hidden_layers=2)
    opened = Sublayers(model, "captured")
    zeros = opened.backend.zeros

    def made(count):
        caches = [opened.new_cache(1, 40) for _ in range(count)]
        for cache in caches:
            cache.place([0], 1)
            cache.buffers(0, (2, 16), (2, 16), torch.zeros(1))
        return {cache.keys[0].data_ptr() for cache in caches}

    (first,), both = made(1), made(2)
    assert first in both
    assert len(both) == 2
    assert made(2) == both
    for length in range(20):  # other shapes are not kept for ever
        zeros((length,), torch.zeros(1))
    assert sum(map(len, zeros.__self__._held.values())) < 10


def test_graphs_of_other_blocks_share_what_they_compute_in(captures):
    """Drafts by one source, looked-up ones, and a trimmed head, in turn."""
    model = lively_model("gemma2")
    want = decode(model, prompt(9), EXIT).sequences
    text = want[0].tolist()
    more = {"lookup": Lookup([[*text[8:20], 1, *text[18:26], 2]])}
    for how in ({}, more, {"draft_vocabulary": list(range(5, 60))}, more, {}):
        got = decode(model, prompt(9), EXIT, **how)
        assert torch.equal(got.sequences, want)
        assert got.stats.num_draft_tokens > got.stats.num_accepted_tokens > 0
    assert captures


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("sample", [False, True])
def test_plain_passes_begin_before_their_tokens_are_read(family, sample, monkeypatch):
    """Those in vain, before a draft or an end, change nothing."""
    passes, real = [], Passes.verify

    def verify(self, tokens, positions, parents=None, ahead=0):
        passes.append(ahead)
        return real(self, tokens, positions, parents, ahead)

    monkeypatch.setattr(Passes, "verify", verify)
    model = lively_model(family)
    for lengths in ((9,), (9, 3, 6)):
        asked = request(lengths, sample=sample)
        want = decoder(model, asked, longest=0, execution="fused")
        rounds = len(play(want))
        passes.clear()
        plain = decoder(model, asked, longest=0, execution="captured")
        play(plain)
        assert plain.emitted == want.emitted
        assert passes == [0] + [1] * (rounds - 2)  # the first follows the prefill
        passes.clear()
        drafting = decoder(model, asked, controller=Script(0, 0, 3, 0), execution="captured")
        drafted = [max(each.drafted) for each in play(drafting)][1:]
        assert drafting.emitted == want.emitted
        assert 0 < sum(passes) <= drafted.count(0)
        assert passes.count(0) < len(drafted) < len(passes)  # some were used, some in vain
        asked = request(lengths, sample=sample, eos=frozenset({want.emitted[0][5]}))
        ended = decoder(model, asked, longest=0, execution="captured")
        play(ended)
        cut = [
            text[: text.index(eos) + 1] if eos in text else text
            for text in want.emitted
            for eos in asked.eos
        ]
        assert ended.emitted == cut


@pytest.mark.parametrize("sample", [False, True])
def test_the_host_reads_once_a_round_however_many_steps_draft(sample, spied):
    """Without a device that runs ahead, it reads the confidence of every step, too."""
    model, (ids, mask) = lively_model("llama"), ragged((9, 4))
    how = {"attention_mask": mask, "do_sample": sample, "seed": 1 if sample else None}
    want = decode(model, ids, None, enabled=False, **how).sequences
    reads = spied(live_target, "on_host", lambda *values: len(values))
    counts = {}
    for execution in ("captured", "fused"):
        reads.clear()
        how |= {"execution": execution, "controller": "expected-gain", "lookup": False}
        out = decode(model, ids, EXIT, costs=CostTable(0.1, (1.0,) * 8), **how)
        assert torch.equal(out.sequences, want)
        assert max(max(each.drafted) for each in out.rounds) == 3
        counts[execution] = len(reads), len(out.rounds)
    assert counts["captured"][0] == counts["captured"][1]
    assert counts["fused"][0] > counts["fused"][1]
