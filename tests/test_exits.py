"""Training of early exits: the recipe, continuing after a kill, and the checkpoint."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from letters import Letters
from marks import slow
from models import lively_model, prompt, tiny_model
from safetensors.torch import load_file
from small import small_model
from transformers import AutoModelForCausalLM

from layerskip.config.skips import SkipConfig
from layerskip.files.trainings import rise
from layerskip.training import exit_training, judging, loop, stages
from layerskip.training.exit_model import (
    ExitModel,
    drop_rates,
    enabled,
    exit_table,
    exit_weights,
    kept_layers,
    random_model,
)
from layerskip.training.exit_results import best_exit, card
from layerskip.training.exit_training import ExitRecipe, ExitTraining
from layerskip.weights.stored import store_halves


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma2", "gemma4"])
def test_exits_are_read_through_the_models_own_norm_and_head(family):
    model, ids = tiny_model(family), prompt(20, rows=2)  # longer than Gemma 2's window
    with torch.no_grad():
        logits = ExitModel(model)(ids, (2, 6))
        assert not any(layer._forward_hooks for layer in model.model.layers)
        whole = model(ids, output_hidden_states=True)
        head = model.lm_head(model.model.norm(whole.hidden_states[2])).float()
    torch.testing.assert_close(logits[6], whole.logits.float())
    cap = getattr(model.config, "final_logit_softcapping", None)
    torch.testing.assert_close(logits[2], head if cap is None else cap * torch.tanh(head / cap))


@torch.no_grad()
def test_a_dropped_layer_passes_its_input_on():
    model, other, ids = tiny_model("llama"), tiny_model("llama"), prompt(9, rows=2)
    kept = torch.ones(6, 2, dtype=torch.bool)
    kept[3, 1] = False  # in the second window only
    logits = ExitModel(model)(ids, (6,), kept)[6]
    whole = other(ids).logits.float()
    del other.model.layers[3]
    other.config.num_hidden_layers = 5
    torch.testing.assert_close(logits[0], whole[0])
    torch.testing.assert_close(logits[1], other(ids, use_cache=False).logits[1].float())


def test_the_recipe_is_the_papers():
    rates = drop_rates(5, 0.2)
    assert rates == pytest.approx([0.2 * (math.exp(n * math.log(2) / 4) - 1) for n in range(5)])
    drawn = torch.stack([kept_layers(5, 0.2, 4, 0, step) for step in range(4000)])
    assert drawn.float().mean((0, 2)).tolist() == pytest.approx([1 - r for r in rates], abs=0.02)
    assert torch.equal(kept_layers(5, 0.2, 4, 0, 7), drawn[7])
    exits = [*range(1, 12)]
    turns = [enabled(exits, "rotational", step, 0.0) for step in range(8)]
    assert turns[:4] == [[1, 9], [2, 10], [3, 11], [4]]
    assert sorted(itertools.chain(*turns)) == exits
    assert enabled([4, 8], "rotational", 3, 0.0) == [8]
    shares = (0.0, 0.2, 0.49, 1.0)
    assert [len(enabled(exits, "gradual", 0, share)) for share in shares] == [1, 5, 11, 11]
    assert enabled(exits, "gradual", 0, 0.1) == [9, 10, 11]
    weights = exit_weights([1, 2, 4], 6, final=True)
    raw = {each: 0.1 * sum(range(each)) for each in (2, 4)}
    raw |= {1: raw[2], 6: 5 + 0.1 * sum(range(5))}
    assert weights == pytest.approx({n: each / sum(raw.values()) for n, each in raw.items()})
    assert sum(exit_weights([2, 4], 6, final=False).values()) == pytest.approx(1)


def test_the_table_tells_what_exits_are_worth():
    """The accepted share equals the known agreement of two Gumbel maxima with shared noise."""
    model, windows = lively_model("gemma2"), prompt(64, rows=12)
    rows = exit_table(ExitModel(model), windows, range(1, 7), 0.8)
    assert rows[-1]["agreement"] == rows[-1]["accepted"] == 1
    assert rows[-1]["loss"] == pytest.approx(model(windows, labels=windows).loss.item(), rel=1e-4)
    with torch.no_grad():
        logits = ExitModel(model)(windows[:, :-1], (5, 6))
    q, p = (logits[each].div(0.8).softmax(-1).flatten(0, 1) for each in (5, 6))
    larger = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
    assert rows[4]["accepted"] == pytest.approx(
        (1 / larger.sum(-1)).sum(-1).mean().item(), abs=0.06
    )
    assert rows[4]["overlap"] == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("count", [9, 11])
def test_shares_of_any_number_of_windows_are_shares(count):
    """A sum of ninths of 1 may exceed 1, which the record of a training does not allow."""
    [_, last] = exit_table(ExitModel(tiny_model("llama")), prompt(5, rows=count), (3, 6), 0.8)
    assert (last["agreement"], last["accepted"]) == (1, 1)


# ---- A training in a folder ----


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [{"text": f"{n} times {n} is {n * n}; " * 4} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


TIMES = {"speedup": 1.5, "low": 1.2, "high": 1.6, "tokens_per_second": 9.0}
FASTER = {"trained": TIMES | {"over_default": TIMES}}


@pytest.fixture(autouse=True)
def _timed(monkeypatch, request):
    """Replace timing, except in the test of the clock."""
    if "clock" not in request.node.name:
        monkeypatch.setattr(exit_training, "clock", lambda *_, **__: FASTER)


HOW = {"window": 16, "rows": 2, "exits": (2, 4), "rate": 3e-3, "steps": 12}


class Stopped(Exception):
    pass


def training(folder, texts, stop="never", model=None, **changes):
    def progress(what, _):
        if what.startswith(stop):
            raise Stopped

    torch.set_num_threads(1)
    model = lively_model("llama", dtype=torch.float32) if model is None else model
    recipe = ExitRecipe(**HOW | changes)
    given = stages.Texts(Letters(), None, texts)
    return ExitTraining(model, given, recipe, folder, progress=progress)


FIVE = (*(f"training: {step * 32} tokens" for step in (1, 4, 5, 9)), "judging exits after")


@pytest.mark.parametrize("kills", [FIVE[2:3], *slow((FIVE,))])
def test_a_killed_training_gives_the_same_weights(kills, tmp_path, texts, monkeypatch):
    whole = training(tmp_path / "whole", texts).run()
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    for kill in kills:
        with pytest.raises(Stopped):
            training(tmp_path / "parts", texts, stop=kill).run()
        assert not (tmp_path / "parts" / "config.json").exists()
    again = training(tmp_path / "parts", texts).run()
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert again | {"seconds": None} == whole | {"seconds": None}
    assert [file.name for file in (tmp_path / "parts" / "work").iterdir()] == ["recipe.json"]
    assert training(tmp_path / "parts", texts).run() == again  # nothing is done again
    with pytest.raises(ValueError, match=r"another steps \(12, now 13\); name another folder"):
        training(tmp_path / "parts", texts, steps=13)


def test_weights_that_do_not_change_are_worth_the_same_after_training(tmp_path, texts, monkeypatch):
    """Also in bfloat16: weights are rounded to it, rotary frequencies are not."""
    monkeypatch.setattr(stages, "bfloat16_is_fast", lambda _: False)
    lively_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.bfloat16)
    record = training(tmp_path / "out", texts, model=model, rate=0.0, steps=1).run()
    assert record["after"] == record["before"]


def test_training_makes_exits_right_more_often_and_keeps_the_model(tmp_path, texts):
    record = training(tmp_path / "out", texts, steps=60, curriculum="all").run()
    before, after = record["before"], record["after"]
    for place in (1, 3):
        assert after[place]["accepted"] > before[place]["accepted"] + 0.05
    assert rise(record) < 0.05
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    skip = SkipConfig.load(tmp_path / "out" / "layerskip.json")
    assert skip.exit_layer == record["best"] == best_exit(after)[0]
    assert (tmp_path / "out" / "README.md").read_text() == card(record)
    assert model.config.num_hidden_layers == 6


def test_the_clock_decides_what_drafts(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(exit_training, "TIMED", 1)
    monkeypatch.setattr(judging, "REPEATS", 1)
    monkeypatch.setattr(judging, "_pays", lambda _: False)
    record = training(tmp_path / "out", texts, steps=1).run()
    assert {*record["timed"]} <= {"trained", "before"}
    assert record["timed"]["trained"]["compared"] == 1
    assert record["timed"]["trained"]["faults"] == 0
    assert SkipConfig.load(tmp_path / "out" / "layerskip.json").exit_layer is None


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses an old name of the library
def test_adapters_are_merged(tmp_path, texts):
    pytest.importorskip("peft")
    record = training(tmp_path / "out", texts, lora=4, rate=1e-2, steps=20).run()
    assert record["after"][3]["loss"] < record["before"][3]["loss"]
    model = lively_model("llama", dtype=torch.float32)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() <= model.state_dict().keys()


THE_OTHER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_exits
from layerskip.training import exit_training, loop, processes, stages
exit_training.clock = lambda *_, **__: test_exits.FASTER
loop.SAVE_SECONDS = 0.0
stages.bfloat16_is_fast = lambda _: False
with processes.process_group():
    try:
        test_exits.training(Path(sys.argv[2]), Path(sys.argv[3]), stop=sys.argv[4]).run()
    except test_exits.Stopped:
        os._exit(7)
"""


@pytest.mark.thorough
def test_two_processes_share_the_weights_and_train_what_one_does(tmp_path, texts, monkeypatch):
    """They are killed once and continue. In float32, only rounding differs from one process."""
    monkeypatch.setattr(stages, "bfloat16_is_fast", lambda _: False)
    script = tmp_path / "other.py"
    script.write_text(THE_OTHER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    command += [str(Path(__file__).parent), str(tmp_path / "two"), str(texts)]
    for stop, code in ((FIVE[2], 1), ("never", 0)):
        done = subprocess.run([*command, stop], capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        assert (tmp_path / "two" / "work" / "checkpoint.pt").is_dir() == (stop != "never")
    training(tmp_path / "one", texts).run()
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    begun = lively_model("llama", dtype=torch.float32).state_dict()
    off, moved = (
        max((one[name] - other[name]).abs().max().item() for name in one) for other in (two, begun)
    )
    assert off < 1e-3 * moved


def test_random_weights_learn_the_text(tmp_path, texts):
    config = tiny_model("llama").config
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path)
    model = random_model(tmp_path / "config.json", lively_model("llama"), 0)
    how = {"init": "random", "loss": "ce", "keep": 0.0, "exits": (), "steps": 40}
    recipe = ExitRecipe(**HOW | how | {"rate": 1e-2})
    given = stages.Texts(Letters(), None, texts)
    record = ExitTraining(model, given, recipe, tmp_path / "out").run()
    assert rise(record) < -0.5
    assert record["recipe"]["exits"] == [1]
    assert random_model(None, tiny_model("llama").to("meta"), 0).device.type == "meta"
    config.vocab_size += 1
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the tokenizer of this model has"):
        random_model(tmp_path / "config.json", lively_model("llama"), 0)


# ---- What is refused ----


def test_a_model_that_runs_whole_is_refused(tmp_path, texts):
    model = small_model("gpt2").float()
    with pytest.raises(ValueError, match="sublayers of architecture 'gpt2' are not known"):
        training(tmp_path / "out", texts, model=model)
    assert not (tmp_path / "out").exists()


def test_packed_weights_are_refused(tmp_path, texts):
    model = tiny_model("llama", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96).float()
    assert store_halves(model)
    with pytest.raises(ValueError, match="trains plain weights; name the checkpoint"):
        training(tmp_path / "out", texts, model=model)
    assert not (tmp_path / "out").exists()
