"""The scale study: published sizes, a dial that sets acceptance, a report that says so."""

import math
import re
from itertools import pairwise

import pytest
import scale_study
import torch
from models import prompt
from random_models import PERPLEXITY, SHAPES, Dial, configuration, random_model
from transformers import AutoConfig, AutoModelForCausalLM

import layerskip
from layerskip import SkipConfig
from layerskip.analysis import report
from layerskip.analysis.runs import Round, load_runs
from layerskip.analysis.tables import acceptance_of, losslessness

PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "gemma-2-2b": 2_614_341_888,
}


@pytest.mark.parametrize(("shape", "parameters"), PUBLISHED.items())
def test_shapes_have_the_published_numbers_of_parameters(shape, parameters):
    config = configuration(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert set(SHAPES) == {*PUBLISHED, "tiny"}


def small(family, **changes):
    """The tiny shape's configuration, as another family's."""
    _, sizes = SHAPES["tiny"]
    changes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(family, **{**sizes, **changes})


CONFIGS = {
    "tied": small("llama"),
    "untied": small("llama", tie_word_embeddings=False),
    "gemma2": small("gemma2", query_pre_attn_scalar=16),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return random_model(CONFIGS[request.param], torch.float32, CPU, seed=0)


def test_weights_follow_from_the_seed_in_the_dtype_asked_for():
    one, same, other = (
        random_model(configuration("tiny"), torch.bfloat16, CPU, seed) for seed in (0, 0, 1)
    )
    head = one.lm_head.weight
    assert head.dtype == torch.bfloat16
    assert head is one.model.embed_tokens.weight
    assert torch.equal(head, same.lm_head.weight)
    assert not torch.equal(head, other.lm_head.weight)


def test_laws_are_like_those_of_a_language_model(model):
    ids = prompt(256)
    with torch.no_grad():
        law = model(ids).logits[0].log_softmax(-1)  # (T, V)
    perplexity = math.exp(-(law.exp() * law).sum(-1).mean())
    assert PERPLEXITY / 3 < perplexity < 3 * PERPLEXITY  # a small vocabulary is far from the limit
    repeated = law.gather(-1, ids[0, :, None]).exp().mean()
    assert repeated < 0.1  # 0.02 would be the share of a token drawn from a law like these


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_laws_can_be_held_to_a_few_tokens(config):
    some = random_model(config, torch.float32, CPU, 0, likely=200)
    ids = prompt(256)
    with torch.no_grad():
        law = some(ids).logits[0].softmax(-1)  # (T, V)
    share = law[:, :200].sum(-1).mean()
    assert law.shape[-1] == 512
    assert share > 0.75
    with torch.no_grad():
        whole = random_model(config, torch.float32, CPU, 0)(ids).logits[0].softmax(-1)
    assert whole[:, :200].sum(-1).mean() < 0.6


@pytest.mark.parametrize("greedy", [False, True])
def test_the_dial_sets_acceptance_monotonically(model, greedy):
    dial = Dial(model, 1, greedy=greedy, seed=0)
    counted = [dial.acceptance(2.0**power) for power in range(-6, 7)]
    assert all(b < a + 0.05 for a, b in pairwise(counted))
    assert counted[0] > 0.95
    assert counted[-1] < 0.5
    found = [dial.find(asked) for asked in (0.6, 0.8, 0.9)]
    assert found == sorted(found, reverse=True)
    for asked, strength in zip((0.6, 0.8, 0.9), found, strict=True):
        assert dial.acceptance(strength) == pytest.approx(asked, abs=0.05)


@pytest.mark.parametrize("asked", [0.6, 0.9])
def test_decoding_accepts_as_often_as_the_dial_says_at_every_exit(model, asked):
    dial = Dial(model, 1, greedy=False, seed=0)
    dial.set(dial.find(asked))

    def decoded(layer):
        rounds = layerskip.generate(
            model,
            prompt(8, rows=8),
            skip=SkipConfig.early_exit(layer),
            controller="fixed",
            max_draft_length=4,
            max_new_tokens=50,
            do_sample=True,
            top_k=0,
            seed=0,
        ).rounds
        return [
            Round(*counts)
            for r in rounds[1:]
            for counts in zip(r.drafted, r.accepted, map(len, r.tokens), strict=True)
        ]

    alphas = [acceptance_of(decoded(layer))["alpha"] for layer in (1, 2, 4)]
    # three standard deviations of some 300 draft tokens, and as much of the dial's 256 draws
    assert alphas == pytest.approx([asked] * 3, abs=0.12)
    assert max(alphas) - min(alphas) < 0.03  # the same noise, and nearly the same states


def test_what_the_dial_cannot_do_is_refused(model):
    with pytest.raises(ValueError, match=r"acceptance must be in 0\.\d+\.\.\S+ here, got 0"):
        Dial(model, 1, greedy=False, seed=0).find(0.0)
    with pytest.raises(ValueError, match=r"exits must be in 1\.\.7, got 8"):
        Dial(model, 8, greedy=False, seed=0)


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """A whole study of the tiny shape: its run file."""
    folder = tmp_path_factory.mktemp("study")
    words = "--shape tiny --dtype float32 --acceptance 0.6 0.9 --batch-size 1 2 --prompts 2"
    words += " --new-tokens 12 --prompt-tokens 6 --draft-length 4 --cost-seconds 0.1"
    argv = [*words.split(), "--output", str(folder / "run.jsonl")]
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_study, "BUFFER", 2**20)
        scale_study.main([*argv, "--threads", "1"])
    torch.set_num_threads(threads)
    return folder


def test_the_run_file_holds_every_pair(studied):
    (run,) = load_runs([studied / "run.jsonl"])
    assert run.measured == ["plain", "generate", "exit-1", "exit-2", "exit-4"]
    assert run.batch_sizes == [1, 2]
    assert run.categories == ["acceptance 0.6", "acceptance 0.9"]
    assert len(run.records) == 5 * 2 * 2 * 2
    assert [len(run.cost_table("exit-2", size).verify) for size in run.batch_sizes] == [13, 13]
    assert losslessness(run)["faults"].sum() == 0
    rounds = {
        name: [
            round_
            for record, rounds in run.rounds("exit-1", 1)
            for round_ in rounds
            if record["category"] == name
        ]
        for name in run.categories
    }
    assert all(acceptance_of(each)["rounds"] for each in rounds.values())


def test_the_summary_shows_bytes_and_costs(studied):
    (run,) = load_runs([studied / "run.jsonl"])
    lines = scale_study.summary(run, [2e9, 1e9]).splitlines()
    assert lines[0] == "a sum reads 2.0, 1.0 GB/s (before, after); batches of [1, 2]:"
    assert [line.partition(":")[0] for line in lines[1:]] == [
        f"{name} x{size}"
        for size in (1, 2)
        for name in ("plain", "generate", "exit-1", "exit-2", "exit-4")
    ]
    assert re.match(r"exit-2 x1: c \d\.\d{3}, v\(2\) \d\.\d\d, ", lines[4])
    rate, speed, share = re.search(
        r": ([\d.]+) .*, ([\d.e-]+) GB/s, ([\d.]+)% of the first", lines[1]
    ).groups()
    bytes_read = 4 * run.header["model"]["parameters"]  # of a tied head
    assert float(speed) * 1e9 == pytest.approx(bytes_read * float(rate), rel=0.01)
    assert float(share) == pytest.approx(100 * float(speed) / 2, rel=0.1, abs=0.1)


def test_the_report_says_that_acceptance_was_set(studied, monkeypatch):
    monkeypatch.setattr(report.plots, "run_plots", lambda run: [])
    words = report.write_report([studied / "run.jsonl"], studied / "report")
    assert words.startswith("Synthetic acceptance (random weights, exits from layer 1 on accepted")
    assert "Try --exit-layer" not in words
    assert "Add --trace" not in words
    page = (studied / "report" / "index.html").read_text()
    assert "tiny shape, sampled at T=1, synthetic acceptance" in page
    assert page.count("random weights, exits from layer 1 on accepted about 0.6, 0.9") == 2


def test_drafts_of_a_study_can_have_few_tokens(tmp_path):
    words = "--shape tiny --dtype float32 --acceptance 0.9 --prompts 1 --new-tokens 12"
    words += " --prompt-tokens 6 --draft-length 4 --cost-seconds 0.1 --exit-layer 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_study, "BUFFER", 2**20)
        argv = [*words.split(), "--output", str(tmp_path / "run.jsonl")]
        scale_study.main([*argv, "--draft-vocabulary", "200"])
    (run,) = load_runs([tmp_path / "run.jsonl"])
    assert run.methods["exit-2"]["draft_vocabulary"] == 200
    assert "200 of 512 tokens likely" in run.header["synthetic"]
    assert losslessness(run)["faults"].sum() == 0
