"""`check --exits`: what it counts, which draft it names, and whom it refuses."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint
from commands import PROMPT, document, refused, run, warned
from cost_records import cost_record
from models import lively_model, prompt, tiny_model
from small import small_model

from layerskip import LayerSkipDecoding, SkipConfig, decode, generate
from layerskip.api.loading import encode, load
from layerskip.api.own_exits import agreement_of
from layerskip.bench.methods import Task
from layerskip.cli.check import _command, _verdict
from layerskip.cli.flags import Loading
from layerskip.cli.inputs import shipped_prompts
from layerskip.model.opened_models import sublayers_of
from layerskip.search.exits import check_exits

NEW = 12
TASK = Task(NEW, True, 0.8, seed=3, execution="modules")


@pytest.fixture
def untimed(monkeypatch):
    """Costs that take no time to measure."""

    def made(opened, *_, **__):
        return {**cost_record(opened.num_layers), "spread": 0.0, "busy": False}

    monkeypatch.setattr("layerskip.search.pipeline.sublayer_costs.measure", made)


def test_greedy_shares_are_those_of_the_librarys_hidden_states(untimed):
    """In a model that was trained to exit early, which shows. Without the norm they differ."""
    loaded = load("demo-llama", dtype="float64")
    model, ids = loaded.model, [encode(loaded.tokenizer, each) for each in shipped_prompts(1)[:1]]
    drafts = check_exits(model, ids, TASK)
    norm, head = model.model.norm, model.lm_head
    counts, right, unnormed = 0, 0, 0
    for each in ids:
        text = model.generate(each, do_sample=False, max_new_tokens=NEW)  # (1, T)
        starts = slice(each.shape[1], text.shape[1] - 1)
        with torch.no_grad():
            states = torch.cat(model(text, output_hidden_states=True).hidden_states[1:-1])[
                :, starts
            ]
            following = text[:, starts.start + 1 :]
            right += (head(norm(states)).argmax(-1) == following).sum(1)  # (L - 1,)
            unnormed += (head(states).argmax(-1) == following).sum(1)
        counts += following.numel()
    found = [each["right"]["greedy"] for each in drafts]
    assert [each["exit"] for each in drafts] == [*range(1, 24)]
    assert found == pytest.approx((right / counts).tolist())
    assert found != pytest.approx((unnormed / counts).tolist())
    assert found[2] > 0.5


def test_sampled_shares_are_those_of_first_drafted_tokens(untimed):
    """From every place of every text, with the exit and with the text's noise."""
    model, rows = lively_model("llama"), [prompt(5), prompt(9, seed=1)]
    how = {"do_sample": True, "temperature": 0.8, "top_k": 0, "execution": "modules"}
    drafts = check_exits(model, rows, TASK)
    count = 2 * (NEW - 1)
    assert {each["positions"]["sampled"] for each in drafts} == {count}
    accepted = dict.fromkeys((1, 3, 5), 0)
    for seed, ids in enumerate(rows, 3):
        out = generate(model, ids, enabled=False, seed=seed, max_new_tokens=NEW, **how)
        for place in range(ids.shape[1], out.sequences.shape[1] - 1):
            for layer in accepted:
                skip = {"skip": SkipConfig.early_exit(layer), "lookup": False, "seed": seed}
                fixed = {"controller": "fixed", "max_draft_length": 1, "max_new_tokens": 3}
                before = out.sequences[:, :place]
                _, first, *_ = decode(model, before, **how, **skip, **fixed)
                assert first.drafted == (1,)
                accepted[layer] += first.accepted[0]
    counted = [each["right"]["sampled"] * count for each in drafts[::2]]
    assert counted == pytest.approx([*accepted.values()])
    assert len({*counted}) == 3  # or any mistake could pass


def test_check_exits_answers_for_the_plan(untimed, monkeypatch):
    monkeypatch.setattr("layerskip.search.exits.ENOUGH", 20)
    monkeypatch.setattr("layerskip.api.own_exits.POSITIONS", 20)
    model, rows = lively_model("llama"), [prompt(5), prompt(9, seed=1)]
    task = Task(13, True, 0.8, execution="modules")
    greedy = [each["right"]["greedy"] for each in check_exits(model, rows, task)]
    agreement = agreement_of(sublayers_of(model, "modules"))
    assert agreement.done
    shares = [right / agreement.positions for right in agreement.right.values()]
    assert shares == pytest.approx(greedy)
    assert "exit 5 at" in LayerSkipDecoding(execution="modules").explain(model)


@pytest.mark.parametrize(
    ("best", "gains", "words", "flags"),
    [
        ((6, 8), (1.9, 1.1), "exit 6, 8 bits, gains most", "--exit-layer 6 --low-precision 8"),
        ((4, None), (1.5, 1.2), "exit 4, gains most", "--exit-layer 4"),
        ((None, 8), (1.5, 1.2), "no exit gains more than the default, the whole", ""),
        ((6, None), (1.1, 0.8), "no exit gains anything", ""),
    ],
)
def test_the_command_for_the_best_draft(best, gains, words, flags):
    best = {**dict(zip(("exit", "bits"), best, strict=True)), "gain": dict(enumerate(gains))}
    assert _verdict(best).startswith(words)
    loading = Loading(model="my model", dtype="float16", trust_remote_code=True)
    command = f"layerskip generate 'my model' --prompt TEXT --chat {flags}"
    expected = shlex.split(f"{command} --dtype float16 --trust-remote-code")
    assert shlex.split(_command(best, loading, chat=True)) == expected


def test_the_command_prints_a_table_and_writes_a_plot(tmp_path, untimed):
    folder = save_checkpoint(tmp_path / "tiny", lively_model("llama", dtype=torch.float32))
    flags = ("--exits", "-n", 8, "--output", tmp_path / "out", "--execution", "modules")
    result = run("check", folder, *flags, "--no-lookup", "--json", columns=80)
    found = document(result)
    assert [each["exit"] for each in found["drafts"]] == [1, 2, 3, 4, 5]
    *lines, command, _ = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:3] == ["exit", "1", f"{found['drafts'][0]['right']['greedy']:.2f}"]
    assert command == found["command"]
    assert "[" not in result.stderr  # no bar, as standard error is not a terminal
    assert warned(result) == ["--no-lookup has no effect with --exits, which tries every exit"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"exits.json", "exits.svg"}
    assert "<svg" in (tmp_path / "out" / "exits.svg").read_text()
    told = warned(run("check", folder, "--exit-layer", 3, "-n", 2, "--output", tmp_path / "out"))
    assert told == ["--output has no effect without --exits"]


def test_models_without_exits_are_refused(tmp_path):
    one = save_checkpoint(tmp_path / "one", tiny_model("llama", num_hidden_layers=1))
    whole = save_checkpoint(tmp_path / "whole", small_model("gpt2").float())
    assert "a model of one layer has no early exit" in refused("check", one, "--exits")
    assert "no early exit of it can be read" in refused("check", whole, "--exits")
    line = refused("check", one, "--exits", "--output", one / "config.json")
    assert "is a file; give a folder" in line


def test_where_exits_are_suggested(tmp_path):
    """By name, where no exit drafts yet."""
    model, words = (
        lively_model("llama", dtype=torch.float32),
        "trained to exit early? layerskip check",
    )
    for name, execution, skip, told in (
        ("facebook/layerskip-tiny", "auto", None, True),
        ("facebook/layerskip-tiny", "auto", SkipConfig.early_exit(2), False),
        ("layerskip/tiny", "auto", None, False),
        ("tiny", "modules", None, False),
    ):
        model.name_or_path = name
        explained = LayerSkipDecoding(skip, execution=execution).explain(model)
        assert (f"{words} {name} --exits" in explained) is told
    assert words not in LayerSkipDecoding().explain(small_model("gpt2"))
    for name in ("layerskip-tiny", "tiny"):
        flags = ("generate", save_checkpoint(tmp_path / name, model), "--prompt", PROMPT, "-n", 2)
        assert (words in run(*flags).stderr) is (name != "tiny")
        assert words not in run(*flags, "--exit-layer", 2).stderr


def test_the_page_of_checkpoints_holds_what_its_program_prints(capsys):
    page = (Path(__file__).parents[1] / "docs/layerskip-checkpoints.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    columns, cells = {"AVX2": 4, "AMX": 6, "H100": 8}, {}
    for row in page.splitlines():
        if re.match(r"\|[^|]*\|[^|]*\| 0\.\d{3} \|", row):
            cells[row.split("|")[3].strip()] = [each.strip() for each in row.split("|")]
    for line in capsys.readouterr().out.splitlines():
        share, machine, bits, _, gain = line.split(maxsplit=4)
        if machine != "H100" or bits == "own":
            assert cells[share][columns[machine] + (bits == "8")] in (gain, "")
    assert len(cells) == 7
