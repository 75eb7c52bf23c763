"""Training drafts: losses, stages that continue after a kill, and what training achieves."""

import json
import math
import os
import socket
import subprocess
import sys
from datetime import timedelta
from itertools import islice
from pathlib import Path

import pytest
import torch
from letters import Letters
from marks import thorough
from models import assistant_config, lively_model, tiny_model
from official import build_assistant
from safetensors.torch import load_file

from layerskip import SkipConfig, generate
from layerskip.config.registry import named
from layerskip.costs.speculation import CostTable
from layerskip.model.assistants import load_assistant
from layerskip.model.draft_modules import Heads
from layerskip.model.opened_models import Sublayers
from layerskip.replay.replayed_drafts import replay
from layerskip.research.blocks import ExitBlock, Streams
from layerskip.texts.prompts import Prompt
from layerskip.training import (
    assistant_training,
    data,
    judging,
    processes,
    students,
    token_files,
)
from layerskip.training.assistant_training import AssistantTraining
from layerskip.training.draft_training import Recipe, Training
from layerskip.training.loop import schedule
from layerskip.training.losses import ETA, divergences, overlap
from layerskip.training.stages import Texts

BEGIN = {"exit-block": ExitBlock, "heads": Heads, "streams": Streams}
BLOCKS = tuple(BEGIN)
HOW = {"kind": "exit-block", "window": 16, "rows": 2, "vocabulary": 60}


# ---- Losses ----


def laws():
    """Logits of a draft and a target, (2, 3, 7), and the next tokens, of which one is unknown."""
    generator = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(2, 3, 7, generator=generator, dtype=torch.float64) for _ in "qp")
    return logits, target, torch.tensor([[0, 3, -1], [6, 2, 2]])


def by_formula(name, logits, target, following, t):
    q, p = (logits / t).softmax(-1), (target / t).softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1).mean()
    tv = 0.5 * (p - q).abs().sum(-1).mean()
    if name == "ce":
        known = following >= 0
        return -q[known, following[known]].log().mean()
    lk = torch.exp(-3.0 * torch.minimum(p, q).sum(-1).mean())
    weight = {"kl": 1.0, "lk": lk}[name]
    return weight * kl + (1 - weight) * tv


@pytest.mark.parametrize("name", ["lk", "kl", "ce"])
def test_losses_are_their_formulas(name):
    assert ETA == 3.0
    logits, target, following = laws()
    for t in (1.0, 0.8):
        found = named("loss", name)(logits, target, following, t)
        torch.testing.assert_close(found, by_formula(name, logits, target, following, t))


def test_total_variation_and_its_normalised_kin_pull_the_same_way():
    logits, target, following = laws()
    logits.requires_grad_()
    q, p = logits.softmax(-1), target.softmax(-1)
    reward = (p > q).to(q.dtype)
    # by definition: the policy gradient of an expectation over q, with standardised advantage
    mean = (q * reward).sum(-1, keepdim=True)
    spread = ((q * (reward - mean).square()).sum(-1, keepdim=True)).sqrt() + 1e-5
    want = -(q.detach() * ((reward - mean) / spread).detach() * q.log()).sum(-1).mean()
    (of_formula,) = torch.autograd.grad(want, logits, retain_graph=True)
    (of_loss,) = torch.autograd.grad(named("loss", "tvd++")(logits, target, following, 1.0), logits)
    torch.testing.assert_close(of_loss, of_formula)
    tv = divergences(logits, target, 1.0)[1]
    (of_tv,) = torch.autograd.grad(tv, logits)
    for one, other in zip(of_loss.flatten(0, 1), of_tv.flatten(0, 1), strict=True):
        torch.testing.assert_close(one / one.norm(), other / other.norm())  # row by row, rescaled
    torch.testing.assert_close(overlap(logits, target, 1.0), torch.minimum(p, q).sum(-1).mean())


def test_the_rate_rises_and_falls_with_the_share_of_the_budget():
    assert [schedule(step, 0.0) for step in (0, 9, 19, 500)] == [1 / 20, 10 / 20, 1.0, 1.0]
    assert schedule(500, 0.5) == pytest.approx(0.5)
    assert schedule(500, 1.0) == pytest.approx(0.0)


# ---- Stages ----


def prompts(count=9):
    return [Prompt(id=str(i), text=f"question {i}, and {7 * i}") for i in range(count)]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small()
    monkeypatch.setattr(data, "BATCH", 4)
    monkeypatch.setattr(data, "LONGEST_ANSWER", 20)
    monkeypatch.setattr(judging, "NEW_TOKENS", 24)


def small():
    torch.set_num_threads(1)


def source(model, **given):
    return data.Corpus(model, Letters(), given.pop("given", prompts()), **given)


def training(folder, model=None, **changes):
    model = lively_model("llama", dtype=torch.float32) if model is None else model
    told = {key: changes.pop(key) for key in ("progress", "started") if key in changes}
    opened = Sublayers(model, changes.pop("execution", "fused"))
    recipe = Recipe(**({"tokens": 640} | HOW | changes))
    return Training(opened, Texts(Letters(), source(model)), recipe, folder, **told)


def weights(folder):
    return (folder / "draft.safetensors").read_bytes()


class Stopped(Exception):
    pass


def stop_at(words, share):
    def progress(what, done):
        if what.startswith(words) and done >= share:
            raise Stopped

    return progress


@pytest.mark.parametrize(
    ("kind", "stage", "share"),
    [("heads", "texts", 0.0), ("streams", "training", 0.5), ("exit-block", "training", 0.5)],
)
def test_a_second_start_goes_on_where_the_first_was(kind, stage, share, tmp_path, monkeypatch):
    """Once for each kind of file that a stage leaves."""
    how = {"kind": kind}
    whole = training(tmp_path / "whole", **how)
    whole.run()
    monkeypatch.setattr("layerskip.training.loop.SAVE_SECONDS", 0.0)
    with pytest.raises(Stopped):
        training(tmp_path / "parts", progress=stop_at(stage, share), **how).run()
    assert not (tmp_path / "parts" / "draft.safetensors").exists()
    told = []
    again = training(tmp_path / "parts", progress=lambda what, _: told.append(what), **how)
    skip = again.run()
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    steps = sum(what.startswith("training") for what in told)
    assert (steps < 20) == (stage == "training")  # finished steps are not repeated
    for finished in (again, training(tmp_path / "parts", **how)):
        assert finished.run() == skip
        for fact in ("tokens", "text_tokens", "covered", "parameters", "curve"):
            assert finished.facts[fact] == whole.facts[fact]
    assert whole.facts["tokens"] == 640
    assert [point["tokens"] for point in whole.curve][::4] == [0, 320, 640]
    assert len(whole.curve[0]["overlap"]) == (1 if kind == "exit-block" else 4)


THE_OTHER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from layerskip.training import data, stages
import test_train
test_train.small()
data.BATCH, data.LONGEST_ANSWER = 4, 20
stages.bfloat16_is_fast = lambda _: False
test_train.together(Path(sys.argv[1]))
"""
LARGE = {"tokens": 160, "rows": 4, "rate": 0.1}  # large enough to be seen in float16
TOGETHER = (
    LARGE | {"kind": "heads", "loss": "ce"},
    LARGE | {"kind": "exit-block", "loss": "lk"},
)


def together(folder):
    """Take part as one of the processes that train."""
    with processes.process_group():
        for how in TOGETHER:
            training(folder / how["kind"], **how).run()


def apart(*folders):
    """The squared distance between the results of two trainings."""
    one, two = (load_file(folder / "draft.safetensors") for folder in folders)
    return sum((one[name].float() - two[name].float()).square().sum().item() for name in one)


@pytest.mark.thorough
def test_two_processes_train_what_one_does(tmp_path, monkeypatch):
    """Up to rounding; the negative control trains on half of the rows."""
    monkeypatch.setattr("layerskip.training.stages.bfloat16_is_fast", lambda _: False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", THE_OTHER, str(tmp_path / "two"), str(Path(__file__).parent)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    monkeypatch.setattr(processes, "_PATIENCE", timedelta(seconds=120))  # if the other one dies
    with subprocess.Popen(command, env=os.environ | where | {"RANK": "1"}) as other:
        try:
            with monkeypatch.context() as first:
                for name, value in (where | {"RANK": "0"}).items():
                    first.setenv(name, value)
                together(tmp_path / "two")
            assert other.wait(120) == 0
        finally:
            other.kill()
    for how in TOGETHER:
        kind = how["kind"]
        one, two = (training(tmp_path / n / kind, **how) for n in ("one", "two"))
        half = training(tmp_path / "half" / kind, **how | {"rows": 2, "tokens": 80})
        one.run()
        half.run()
        off = apart(one.folder, two.folder)
        assert off < 1e-3 * apart(one.folder, half.folder)
        two.run()  # it is finished
        for mine, theirs in zip(one.curve, two.curve, strict=True):
            assert mine == {**theirs, **{n: pytest.approx(theirs[n], 1e-3) for n in theirs}}


@pytest.mark.parametrize("execution", ["fused", "native", "modules"])
def test_a_step_reads_the_targets_own_states_and_logits(execution):
    """An exit block has those at its exit; the others read the text before a token."""
    model = lively_model("gemma2", dtype=torch.float32)
    opened, ids = Sublayers(model, execution), torch.tensor([[*range(2, 18)], [5] * 16])
    tokens = torch.arange(3, 80, 2)
    with torch.no_grad():
        whole = model(ids, output_hidden_states=True)
        for kind, tap in (("exit-block", 4), ("heads", opened.num_sublayers)):
            student = students.Student(opened, kind, tap, tokens)
            read = student._read(ids)
            if kind == "exit-block":
                torch.testing.assert_close(read[:, 0], whole.hidden_states[2], rtol=1e-4, atol=1e-4)
            assert read.shape[1] == (2 if kind == "exit-block" else 1)
            wanted = opened.logits(read[:, -1])
            torch.testing.assert_close(wanted, whole.logits, rtol=1e-4, atol=1e-4)
            for ahead, (drafted, asked, following) in enumerate(student.steps(ids)):
                assert drafted.shape == asked.shape == (2, 16 - ahead, len(tokens))
                of_model = whole.logits[:, ahead:, tokens]
                torch.testing.assert_close(asked, of_model, rtol=1e-4, atol=1e-4)
                known = following[0] >= 0
                right = [t for t in ids[0, 1 + ahead :].tolist() if t % 2 and t > 2]
                assert tokens[following[0][known]].tolist() == right
            student.target = None  # is not asked a second time
            assert torch.equal(student._read(ids.flip(0)), read.flip(0))


def test_given_texts_are_read_only_as_far_as_needed(tmp_path, monkeypatch):
    """They may be far longer than the tokens to train on; windows of others are held out."""
    file = tmp_path / "texts.jsonl"
    lines = [{"text": f"text {n} is all there is to read"} for n in range(200)]
    file.write_text("\n".join(map(json.dumps, lines)))
    model = lively_model("llama", dtype=torch.float32)
    recipe = Recipe(**HOW | {"tokens": 320, "kind": "heads"})
    few = Training(Sublayers(model), Texts(Letters(), None, file), recipe, tmp_path / "few")
    few.run()
    assert 160 <= few.facts["text_tokens"] < 160 + 40
    train, held = (token_files.windows(few.work / name, 16) for name in ("train.bin", "apart.bin"))
    assert len(train) * 16 == few.facts["text_tokens"]
    assert not any((window == held[0]).all() for window in train)

    def judged(_, prompts, **__):
        raise Stopped(prompts)

    monkeypatch.setattr(judging, "take_trace", judged)
    with pytest.raises(Stopped) as stopped:
        judging.judge(few, SkipConfig())
    ((prompt,),) = stopped.value.args
    assert torch.equal(prompt, held[:1, :-1].long())


@pytest.mark.parametrize("kind", ["exit-block", *thorough(*BLOCKS[1:])])
def test_training_makes_a_draft_right_more_often(kind, tmp_path, monkeypatch):
    """On held-out windows, and along answers to unseen prompts."""
    monkeypatch.setattr(judging, "NEW_TOKENS", 64)
    model = lively_model("llama", dtype=torch.float32)
    unseen = [torch.tensor([[1, 2 + 5 * i, 90 - 5 * i]]) for i in range(16)]
    trace = judging.answers(Sublayers(model, "fused"), unseen, 0.8)
    untrained = training(tmp_path / "untrained", model, tokens=64, rate=0.0, kind=kind).run()
    trained = training(tmp_path / "trained", model, tokens=1600, rate=2e-2, kind=kind)
    before, after = (sum(replay(trace, each).survival) for each in (untrained, trained.run()))
    assert after > before + 0.1
    assert trained.curve[-1]["overlap"][0] > trained.curve[0]["overlap"][0] + 0.03
    # without training, it is what it began with
    opened, found = Sublayers(model), load_file(tmp_path / "untrained" / "draft.safetensors")
    for name, weight in BEGIN[kind](opened).state_dict().items():
        assert torch.equal(found[name], weight.half())


@pytest.mark.parametrize("execution", ["native", "fused"])
def test_a_block_reads_the_head_in_8_bits_where_that_is_fast(execution, tmp_path):
    skip = training(tmp_path, execution=execution, tokens=64).run()
    assert skip.head_bits == skip.module_bits == (8 if execution == "native" else None)
    assert skip.rounded(6) == ()


@pytest.mark.thorough
def test_nothing_that_is_kept_apart_is_trained_on():
    model = lively_model("llama", dtype=torch.float32)
    given = source(model)
    assert len(given.apart) == 1
    assert len(given.known) == 8
    trained_on = [text for n in range(5) for text in given.batch(n)]
    assert all(text[: len(ids)] != ids for ids in given.held_out(9) for text in trained_on)
    own = source(model, given=None)
    held = own.held_out(4)
    assert own.batch(1)[0][:1] == held[0][:1] == [1]
    assert len(set(map(tuple, held))) == 4  # four different prompts
    begins = [tuple(text) for n in range(3) for text in own.batch(n)]
    assert all(text[: len(ids)] != tuple(ids) for ids in held for text in begins)
    assert own.batch(1) == own.batch(1) != own.batch(2)


def test_texts_are_cut_short_when_it_is_late(monkeypatch):
    monkeypatch.setattr(data, "SHORTEST", 5)
    given = source(lively_model("llama", dtype=torch.float32))
    given.late = -math.inf
    cut = given.batch(0)
    given.late = math.inf
    whole = given.batch(0)
    for short, long in zip(cut, whole, strict=True):
        assert long[: len(short)] == short
    asked = sum(len(given.known[n % len(given.known)]) for n in range(data.BATCH))
    assert sum(map(len, cut)) - asked == 5 * data.BATCH
    assert sum(map(len, whole)) - asked > 5 * data.BATCH


def test_a_later_start_makes_the_same_texts(tmp_path):
    """A damaged file is drawn again; the others are kept."""
    given, folder = source(lively_model("llama", dtype=torch.float32)), tmp_path / "texts"
    made = [*islice(data.answers(given, folder, lambda: True), 2 * data.BATCH)]
    assert len(list(folder.iterdir())) == 2
    (folder / "00000.json").unlink()  # as an error about a damaged file advises
    assert [*data.answers(given, folder, lambda: False)] == made
    assert [*data.up_to(made, len(made[0]) + 1)] == made[:2]


def test_minutes_bound_all_starts_and_what_came_before(tmp_path, started, monkeypatch):
    """Loading took 60 of 300 seconds, an earlier start 30; judging gets a third, or a minute."""
    monkeypatch.setattr(judging.time, "monotonic", lambda: 1000.0)
    how = {"tokens": None, "minutes": 5.0, "started": 940.0}
    training(tmp_path / "draft", **how)
    new_assistant_training(tmp_path / "assistant", started, **how)
    for name in ("draft", "assistant"):
        (tmp_path / name / "work/seconds.json").write_text('{"texts": 20.0, "training": 10.0}')
    going = training(tmp_path / "draft", **how)
    assert going.until == 940 + 300 - 30
    assert going.budget(60) == 210 + 10 - 60
    assert going.budget(500) == 1.0  # at least one step
    further = new_assistant_training(tmp_path / "assistant", started, **how)
    assert further.until == 940 + 300 - 30
    assert training(tmp_path / "tokens", tokens=64).until == math.inf


@pytest.mark.parametrize(
    ("low", "over_default", "faster"),
    [
        (1.5, 1.1, True),
        (1.5, 0.9, False),  # the earlier draft is faster
        (0.9, 1.1, False),
        (None, None, False),  # one prompt has no interval
    ],
)
def test_the_verdict_is_the_clocks(low, over_default, faster):
    timed = {"trained": {"low": low, "over_default": {"low": over_default}}}
    assert judging._pays(timed) is faster
    assert not judging._pays({})  # every text ended with its first token


def test_judging_leaves_a_record_and_what_drafts_best(tmp_path, monkeypatch):
    model = lively_model("llama", dtype=torch.float32)
    costs = [CostTable(0.3, (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6))] * 3
    monkeypatch.setattr(judging, "cost_tables", lambda _, drafts, __: costs[: len(drafts)])
    for name, value in {"PROMPTS": 4, "NEW_TOKENS": 32, "TIMED": 1, "REPEATS": 1}.items():
        monkeypatch.setattr(judging, name, value)
    made = training(tmp_path, model)
    skip = made.run()
    ids = torch.tensor([[5, 9, 3, 44]])
    how = {"max_new_tokens": 12, "do_sample": True, "seed": 1, "top_k": 0}
    how |= {"execution": "fused"}
    plain = generate(model, ids, enabled=False, **how).sequences
    for pays in (True, False):
        monkeypatch.setattr(judging, "_pays", lambda _, pays=pays: pays)
        stored = None if pays else SkipConfig.early_exit(3)  # stored with the checkpoint
        record = judging.judge(made, skip, stored)
        assert record["pays"] == pays
        assert "untrained" in record["drafts"]
        assert record == json.loads((tmp_path / "train.json").read_text())
        of = record["drafts"]["trained"]
        assert of["bytes"] > 0
        speedups = [  # one option is to draft nothing
            (1 + sum(of["coupled"][:n])) / (0.3 * n + costs[0].verify_cost(n + 1)) for n in range(5)
        ]
        assert of["formula"] == max(speedups)
        written = SkipConfig.load(tmp_path / "skip.json")
        assert written.decoding is not None
        assert (written.trained == skip.trained) == pays
        if not pays:  # lookups and the stored draft may beat plain decoding
            assert written.exit_layer == 3
            before = record["timed"]["before"]["speedup"] > 1
            assert written.decoding.enabled is (None if before else False)
        # the trained weights are kept either way
        assert SkipConfig.load(tmp_path / "trained.json") == skip
        for name in ("skip.json", "trained.json"):
            got = generate(model, ids, skip=tmp_path / name, controller="fixed", **how)
            assert torch.equal(got.sequences, plain)
    assert got.stats is not None
    assert got.stats.num_accepted_tokens
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["recipe.json"]
    assert training(tmp_path, model).finished("train.json") == record


def test_held_out_texts_that_end_at_once_are_passed_over(tmp_path, monkeypatch):
    model = lively_model("llama", dtype=torch.float32)
    costs = [CostTable(0.3, (1.0,) * 7)] * 3
    monkeypatch.setattr(judging, "cost_tables", lambda _, drafts, __: costs[: len(drafts)])
    made = training(tmp_path, model, tokens=64)
    skip = made.run()
    (ended,) = made.texts.corpus.apart
    new = generate(model, torch.tensor([ended]), enabled=False, max_new_tokens=1).sequences[0, -1]
    model.generation_config.eos_token_id = new.item()
    with pytest.raises(ValueError, match=r"was not judged; use .*trained\.json, or train on other"):
        judging.judge(made, skip)
    made.texts.corpus.apart = [ended, [5, 9, 3, 44], ended]
    assert judging.judge(made, skip)["held_out"]["prompts"] == 2


# ---- What is refused ----


def test_what_cannot_be_trained_is_refused(tmp_path, monkeypatch):
    """Errors of files and disks are tested in `test_refused_drafts.py`."""
    model = lively_model("llama", dtype=torch.float32)
    with pytest.raises(ValueError, match="as the length of the training"):
        Recipe(kind="heads")
    for kind, skip, message in (
        ("exit-block", SkipConfig(mlp=(1,)), "an exit block follows an early exit"),
        ("exit-block", SkipConfig(), "an exit block follows an early exit"),
        ("exit-block", SkipConfig.early_exit(6), "exit_layer must be in 1..5"),
        ("heads", SkipConfig.early_exit(3), "of kind heads runs none of the model's layers"),
    ):
        with pytest.raises(ValueError, match=message):
            training(tmp_path / "none", model, kind=kind, skip=skip)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match=r"prompt long has .* an answer needs room for"):
        source(model, given=[*prompts(), Prompt(id="long", text="long" * 1000)])
    training(tmp_path / "a", model)
    with pytest.raises(ValueError, match=f"{tmp_path} is not empty, and holds no training; name"):
        training(tmp_path, model)
    other = source(model, given=prompts(10)[1:])  # as many
    texts, opened = Texts(Letters(), other), Sublayers(model, "fused")
    with pytest.raises(ValueError, match="holds a training with another hash of prompts"):
        Training(opened, texts, Recipe(tokens=640, **HOW), tmp_path / "a")


# ---- Assistants ----


def new_assistant_training(folder, start, **changes):
    model = lively_model("gemma4", dtype=torch.float32)
    told = {key: changes.pop(key) for key in ("progress", "started") if key in changes}
    recipe = Recipe(**({"tokens": 640} | HOW | {"kind": "assistant"} | changes))
    texts = Texts(Letters(), source(model))
    return AssistantTraining(str(start), Sublayers(model, "modules"), texts, recipe, folder, **told)


@pytest.fixture
def started(tmp_path):
    """A folder with an assistant for the tiny Gemma 4, with random weights."""
    target = tiny_model("gemma4").config
    torch.manual_seed(0)
    config = assistant_config(target)
    build_assistant(config).save_pretrained(tmp_path / "start")
    return tmp_path / "start"


@pytest.mark.thorough
def test_an_assistant_is_trained_further_and_goes_on_after_kills(tmp_path, started, monkeypatch):
    record = new_assistant_training(tmp_path / "whole", started, rate=5e-3).run_all()
    before, after = record["overlap"]["before"], record["overlap"]["after"]
    assert len(before) == len(after) == assistant_training.AHEAD
    assert all(new > old for old, new in zip(before, after, strict=True))
    whole = load_assistant(tmp_path / "whole" / "assistant").state_dict()
    begun = load_assistant(started).state_dict()
    assert any(not torch.equal(whole[name], begun[name]) for name in whole)

    cut = tmp_path / "cut"
    with pytest.raises(Stopped):
        new_assistant_training(cut, started, rate=5e-3, progress=stop_at("training", 0.5)).run_all()
    assert not (cut / "assistant").exists()
    with monkeypatch.context() as full_disk:
        full_disk.setattr(AssistantTraining, "save", lambda *_: stop_at("", 0)("", 0))
        with pytest.raises(Stopped):
            new_assistant_training(cut, started, rate=5e-3).run_all()
    again = new_assistant_training(cut, started, rate=5e-3).run_all()
    assert again | {"seconds": 0} == record | {"seconds": 0}
    assert not list(cut.glob(".*"))
    # it was finished, so nothing is repeated
    assert new_assistant_training(cut, started, rate=5e-3).run_all() == again


def test_an_assistant_of_another_model_is_refused(tmp_path, started):
    config = json.loads((started / "config.json").read_text())
    build = build_assistant(assistant_config(tiny_model("gemma4", sliding_window=3).config))
    assert config["backbone_hidden_size"] == build.config.backbone_hidden_size
    build.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="cannot draft for this model"):
        new_assistant_training(tmp_path / "out", tmp_path / "other")
    assert not (tmp_path / "out" / "work").exists()
