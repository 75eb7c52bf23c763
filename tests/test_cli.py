"""The command line: results, warnings, one-line errors and exit codes."""

import io
import json
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest
import torch
from checkpoints import CHAT, save_checkpoint, tiny_tokenizer
from commands import PROMPT, document, process, refused, run, warned
from marks import thorough
from models import tiny_model
from typer.main import get_command

from layerskip.api.loading import DTYPES
from layerskip.backends import native_passes
from layerskip.cli import main as cli
from layerskip.cli.benchmark import _table
from layerskip.cli.flags import PANELS, REMEMBERING, Decoding, Loading
from layerskip.cli.terminal import PATIENCE, Talk, aligned, reading
from layerskip.config.registry import names
from layerskip.config.skips import DecodingOptions, SkipConfig
from layerskip.decoding.noise import stream_key
from layerskip.files.locking import alone
from layerskip.files.records import read_run, read_unfinished
from layerskip.model.opened_models import EXECUTIONS, Sublayers
from layerskip.native import extension
from layerskip.texts.prompts import Prompt
from layerskip.version import __version__

DRAFT = ("--exit-layer", "3", "--controller", "fixed")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def expected(folder):
    """16 greedy tokens by transformers."""
    model = tiny_model("llama", dtype=torch.float32)
    ids = torch.tensor([[5, 7, 96, 20]])
    return model.generate(ids, do_sample=False, max_new_tokens=16)[0, 4:].tolist()


@pytest.fixture
def save_skip(tmp_path):
    def save(name="skip.json", **values):
        SkipConfig(**values).save(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture(autouse=True)
def few_draws(sizes):
    """Fewer draws for the check's tests of laws, which are tested elsewhere."""
    sizes(draws=64)


# ---- generate ----


def generate(folder, *arguments, prompt=PROMPT, tokens=16):
    return run("generate", folder, "--prompt", prompt, "--max-new-tokens", tokens, *arguments)


def test_greedy_text_is_that_of_transformers(folder, expected):
    result = generate(folder, *DRAFT, "--json")
    found = document(result)
    assert found["token_ids"] == expected
    assert found["text"] == tiny_tokenizer().decode(expected)
    assert found["new_tokens"] == 16
    assert found["seconds"] > 0
    assert found["tokens_per_second"] == pytest.approx(16 / found["seconds"])
    assert found["num_draft_tokens"] >= found["num_drafts"] > 0
    rate = found["num_accepted_tokens"] / found["num_draft_tokens"]
    assert found["acceptance_rate"] == pytest.approx(rate)
    length = 1 + found["num_accepted_tokens"] / found["num_drafts"]
    assert found["mean_acceptance_length"] == pytest.approx(length)
    assert found["seed"] is None  # nothing was sampled
    assert result.stdout.count("\n") == 1
    assert (found["finish_reason"], found["prompt_tokens"]) == ("length", 4)
    assert 0 < found["time_to_first_token"] < found["seconds"] < found["total_seconds"]
    first = found["time_to_first_token"]
    assert found["prefill_tokens_per_second"] == pytest.approx(4 / first)
    assert found["decode_tokens_per_second"] == pytest.approx(15 / (found["seconds"] - first))
    assert found["num_known_tokens"] == 0
    for words in (
        "16 tokens in",
        f"the first after {found['time_to_first_token']:.2f} s (prefill, ",
        f"the rest at {found['decode_tokens_per_second']:.1f} tokens/s",
        "mean acceptance length",
        f"{found['total_seconds']:.1f} s in all",
    ):
        assert words in result.stderr


@pytest.mark.parametrize("flags", [(), ("--stream",), ("--no-draft",), ("--quiet",)])
def test_results_go_to_stdout_and_talk_to_stderr(folder, expected, flags):
    result = generate(folder, "--exit-layer", 3, *flags)
    assert result.exit_code == 0
    assert result.stdout == tiny_tokenizer().decode(expected) + "\n"
    assert (result.stderr == "") == (flags == ("--quiet",))
    assert "\r" not in result.stderr  # no progress bar without a terminal


def test_a_seed_gives_one_text_whatever_is_drafted(folder):
    sample = ("--do-sample", "--temperature", 0.9, "--top-k", 30, "--top-p", 0.95, "--seed", 4)
    first = document(generate(folder, *DRAFT, *sample, "--json"))
    again = generate(folder, *DRAFT, *sample, "--stream")
    plain = generate(folder, *DRAFT[:2], *sample, "--no-draft")
    other = generate(folder, *DRAFT, *sample[:-1], 5)
    assert first["seed"] == 4
    assert first["text"] + "\n" == again.stdout == plain.stdout != other.stdout


def test_a_temperature_alone_samples_and_0_is_greedy(folder, expected):
    warm = ("--temperature", 1.5, "--seed", 4)
    result = generate(folder, *DRAFT, *warm)
    asked = generate(folder, *DRAFT, *warm, "--do-sample")
    said = "sampling, because --temperature is 1.5\n"
    assert (result.stderr.count(said), asked.stderr.count(said)) == (1, 0)
    assert tiny_tokenizer().decode(expected) not in (result.stdout, asked.stdout)
    assert result.stdout == asked.stdout
    for cold in (0, 1e-40):
        result = generate(folder, *DRAFT, "--temperature", cold, "--do-sample", "--json")
        assert document(result)["token_ids"] == expected
        (line,) = warned(result)
        assert line.startswith(f"--do-sample has no effect with --temperature {cold:g}, which")


def test_a_drawn_seed_is_reported_and_repeats_the_text(folder):
    sampled = document(generate(folder, *DRAFT, "--do-sample", "--json"))
    other = document(generate(folder, *DRAFT, "--do-sample", "--json"))
    assert sampled["seed"] != other["seed"]
    again = generate(folder, *DRAFT, "--do-sample", "--seed", sampled["seed"])
    assert again.stdout == sampled["text"] + "\n"
    assert f"seed {sampled['seed']}" in again.stderr


def test_several_prompts(folder, tmp_path, expected):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        f'{{"prompt": "{PROMPT}"}}\n{{"prompt": "w9", "id": "nine", "max_new_tokens": 15}}\n'
    )
    flags = ("--max-new-tokens", 16, "--prompt-file", path)
    results = document(run("generate", folder, *DRAFT, *flags, "--json"))["results"]
    assert [result["id"] for result in results] == ["1", "nine"]
    assert results[0]["token_ids"] == expected
    assert [result["finish_reason"] for result in results] == ["length"] * 2
    assert results[1]["new_tokens"] == 15
    text = run("generate", folder, *DRAFT, *flags).stdout
    assert text.index("prompt 1") < text.index(results[0]["text"]) < text.index("prompt nine")
    sample = ("--do-sample", "--seed", 8)
    sampled = document(run("generate", folder, *DRAFT, *flags, *sample, "--json"))["results"]
    sample = (*sample[:-1], sampled[1]["seed"])
    alone = generate(folder, *DRAFT, *sample, prompt="w9", tokens=15)
    assert [result["seed"] for result in sampled] == [8, 9]
    assert alone.stdout == sampled[1]["text"] + "\n"


def test_what_a_user_says_goes_through_the_chat_template(tmp_path):
    folder = save_checkpoint(tmp_path / "chatting", template=CHAT)
    for flags, whole in (
        (["--chat"], f"w9 {PROMPT} w10"),
        (["--system", "w3"], f"w9 w3 w9 {PROMPT} w10"),
    ):
        chat = document(generate(folder, *DRAFT, *flags, "--json"))
        text = document(generate(folder, *DRAFT, "--json", prompt=whole))
        assert chat["token_ids"] == text["token_ids"]
    own = Prompt(id="1", messages=({"role": "system", "content": "w4"},))
    assert own.with_system("w3") == own


def test_a_text_ends_for_a_reason_that_is_told():
    # the library's stop strings do not work with a tokenizer of whole words
    text = document(generate("demo-llama", "--json", prompt="def f("))
    word = text["text"][10:14]
    ends = ("--stop", "@@", "--stop", word)
    stopped = document(generate("demo-llama", *ends, "--json", prompt="def f("))
    count = stopped["new_tokens"]
    assert word in stopped["text"]
    assert stopped["token_ids"] == text["token_ids"][:count]
    assert count < 16
    assert stopped["finish_reason"] == "stop"
    last = generate("demo-llama", "--stop", word, "--json", prompt="def f(", tokens=count)
    assert document(last)["finish_reason"] == "stop"  # although it also reached the maximum


def test_penalties_and_min_p_are_those_of_transformers(folder, expected):
    model, ids = tiny_model("llama", dtype=torch.float32), torch.tensor([[5, 7, 96, 20]])
    other = model.generate(ids, do_sample=False, max_new_tokens=16, repetition_penalty=4.0)
    found = document(generate(folder, *DRAFT, "--repetition-penalty", 4, "--json"))
    assert found["token_ids"] == other[0, 4:].tolist() != expected
    # min-p of 1 leaves only the most probable token
    sample = ("--do-sample", "--seed", 3, "--json")
    assert document(generate(folder, *DRAFT, *sample, "--min-p", 1))["token_ids"] == expected
    assert document(generate(folder, *DRAFT, *sample))["token_ids"] != expected
    assert warned(generate(folder, *DRAFT, "--min-p", 0.1, "--quiet")) == [
        "--min-p has no effect without --do-sample or --temperature"
    ]


@pytest.mark.parametrize("flags", [(), ("--prompt", "-")])
def test_a_prompt_may_come_from_standard_input(folder, expected, flags):
    arguments = ("generate", folder, *DRAFT, "-n", 16, "--quiet", *flags)
    result = run(*arguments, stdin=PROMPT + "\n")
    assert result.stdout == tiny_tokenizer().decode(expected) + "\n"
    result = run(*arguments, stdin=b"\xff")
    assert result.exit_code == 2
    assert "standard input: not UTF-8: invalid start byte at byte 0" in result.stderr


def test_prompts_may_come_from_standard_input(folder, tmp_path):
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "w5"}\n{"prompt": "w9", "id": "nine"}\n')
    before = os.dup(0)
    try:
        with path.open() as file:
            os.dup2(file.fileno(), 0)
        result = run("generate", folder, "--prompts", "-", *DRAFT, "-n", 2, "--json")
    finally:
        os.dup2(before, 0)
        os.close(before)
    assert [each["id"] for each in document(result)["results"]] == ["1", "nine"]


@pytest.mark.parametrize(("command", "lock"), [("benchmark", ".out.lock"), ("train", "out/.lock")])
def test_a_second_command_does_not_write_beside_the_first(folder, tmp_path, command, lock):
    output = tmp_path / "out"
    given = [command, folder, "--output", output, "--prompts", "copying"]
    with alone(tmp_path / lock, output):
        reason = refused(*given)
    assert reason == f"another run writes {output}; wait until it ends, or give another --output"
    assert [*tmp_path.rglob("*.lock")] == []


@pytest.mark.parametrize("command", ["generate", "check", "benchmark", "search"])
def test_chat_means_the_same_to_every_command(folder, tmp_path, command):
    flags = ["--prompts", "spec-bench", "--chat"]
    if command in ("benchmark", "search"):
        flags += ["--output", tmp_path / "out"]
    else:
        flags += ["--exit-layer", 3]
    assert "has chat messages, but this model's tokenizer" in refused(command, folder, *flags)


def test_a_skip_config_and_the_flags_that_override_it(folder, save_skip, expected):
    decoding = DecodingOptions(controller="fixed", max_draft_length=2)
    path = save_skip(attention=(2, 3), mlp=(4,), decoding=decoding)
    found = document(generate(folder, "--skip", path, "--json"))
    assert found["token_ids"] == expected
    assert found["num_draft_tokens"] <= 2 * found["num_drafts"]
    longer = document(generate(folder, "--skip", path, "--max-draft-length", 5, "--json"))
    assert longer["token_ids"] == expected
    assert longer["num_drafts"] < longer["num_draft_tokens"] / 2
    off = save_skip("off.json", exit_layer=3, decoding=DecodingOptions(enabled=False))
    result = generate(folder, "--skip", off, "--controller", "fixed", "--json")
    assert document(result)["num_drafts"] == 0
    assert warned(result) == ["--controller has no effect without drafts"]


def test_an_entry_of_a_file_of_skip_configs(folder, tmp_path, expected):
    path = tmp_path / "named.json"
    path.write_text('{"small": {"attention": [2, 3]}, "large": {"mlp": [1]}}')
    result = generate(folder, "--skip", path, "--entry", "small", "--json")
    assert document(result)["token_ids"] == expected
    assert drafts_said(result) == [
        "drafts: looked up in the text so far, or skip 2 attention, 0 MLP"
    ]
    assert warned(generate(folder, "--entry", "small")) == ["--entry has no effect without --skip"]


def test_the_skip_config_beside_the_checkpoint_is_the_default(tmp_path, expected):
    folder = save_checkpoint(tmp_path / "tiny")
    decoding = DecodingOptions(controller="fixed")
    SkipConfig(exit_layer=3, decoding=decoding, model="as/uploaded").save(folder / "layerskip.json")
    result = generate(folder, "--json")
    assert document(result)["num_drafts"] > 0
    assert document(result)["token_ids"] == expected
    assert warned(result) == []
    (line,) = drafts_said(result)
    assert line == "drafts: looked up in the text so far, or exit 3"
    SkipConfig(exit_layer=3, decoding=DecodingOptions(enabled=False)).save(
        folder / "layerskip.json"
    )
    result = generate(folder, "--json")
    assert document(result)["num_drafts"] == 0
    assert drafts_said(result) == ["drafts: none, as the skip config says"]


def drafts_said(result):
    return [line for line in result.stderr.splitlines() if line.startswith("drafts: ")]


REPEATED = "w5 w7 w96 w20 w5 w7 w96 w20 w5 w7"


@pytest.mark.parametrize(
    ("flags", "names", "said"),
    [
        ([], ["lookup", "sublayers"], "looked up in the text so far, or whole model, in 8 "),
        (["--low-precision", 4], ["lookup", "sublayers"], "or whole model, in 4 bits ("),
        (["--no-lookup"], ["sublayers"], "drafts: whole model, in 8 bits ("),
        (["--draft-memory", 0], ["lookup"], "drafts: looked up in the text so far"),
        (["--low-precision", "none"], ["lookup"], "drafts: looked up in the text so far"),
        (["--low-precision", "none", "--no-lookup"], [], "drafts: none"),
        (["--execution", "modules"], ["lookup", "exits"], "passes only, and these are modules"),
        (["--exit-layer", 3], ["lookup", "sublayers"], "so far, or exit 3"),
        (
            ["--exit-layer", 3, "--low-precision", 8],
            ["lookup", "sublayers"],
            "or exit 3, in 8 bits (",
        ),
        (["--window", 5], ["lookup", "sublayers"], "or whole model, in 8 bits, window 5 ("),
        (["--low-precision", "none", "--window", 5], ["lookup", "sublayers"], "model, window 5"),
        (["--window", 0], ["lookup", "sublayers"], "or whole model, in 8 bits ("),
        (
            ["--exit-layer", 3, "--window", 5, "--no-lookup"],
            ["sublayers"],
            "drafts: exit 3, window 5",
        ),
        (
            ["--exit-layer", 2, "--exit-layer", 4],
            ["lookup", "sublayers 1", "sublayers 2"],
            "so far, or sublayers 1: exit 2, or sublayers 2: exit 4",
        ),
    ],
)
@pytest.mark.usefixtures("built")
def test_drafts_need_no_set_up(folder, flags, names, said):
    """The text does not change, whatever drafts, and one line names the drafts."""
    how = ("--prompt", REPEATED, "--max-new-tokens", 24, "--json")
    plain = document(run("generate", folder, *how, "--no-draft"))
    result = run("generate", folder, *how, *flags)
    found = document(result)
    assert found["token_ids"] == plain["token_ids"]
    assert plain["sources"] == []
    assert [each["name"] for each in found["sources"]] == names
    for count in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(each[count] for each in found["sources"]) == found[count]
    (line,) = drafts_said(result)
    assert said in line
    assert warned(result) == []


def test_drafts_are_looked_up_in_a_file(folder, tmp_path):
    notes = tmp_path / "notes.txt"
    how = ("--prompt", "w3 w9", "--max-new-tokens", 8, "--controller", "fixed", "--json")
    plain = document(run("generate", folder, *how[:4], "--no-draft", "--json"))
    notes.write_text(f"w3 w9 {plain['text']}")
    result = run("generate", folder, *how, "--low-precision", "none", "--lookup-file", notes)
    found = document(result)
    assert found["token_ids"] == plain["token_ids"]
    assert found["num_accepted_tokens"] == found["num_draft_tokens"] > 0
    assert drafts_said(result) == ["drafts: looked up in the text so far and in the texts given"]


def test_settings_without_effect_warn(folder):
    def of(*flags):
        result = generate(folder, *flags, tokens=2)
        assert result.exit_code == 0
        return warned(result)

    idle = ("--top-p", 0.9, "--top-k", 5, "--acceptance", "rejection")
    assert of(*DRAFT, *idle, "--seed", 1) == [
        f"--{name} has no effect without --do-sample or --temperature"
        for name in ("top-p", "top-k", "acceptance", "seed")
    ]
    assert of(*DRAFT, "--no-draft") == [
        f"--{name} has no effect with --no-draft" for name in ("exit-layer", "controller")
    ]
    nothing = ("--low-precision", "none", "--no-lookup")
    assert of("--max-draft-length", 3, *nothing) == [
        "--max-draft-length has no effect without drafts"
    ]
    assert of("--no-draft", *nothing) == [
        f"--{name} has no effect with --no-draft" for name in ("low-precision", "no-lookup")
    ]
    assert of(*DRAFT, "--draft-memory", 1) == ["--draft-memory has no effect with a skip config"]
    assert "threshold has no effect on the controller 'fixed'" in of(*DRAFT, "--threshold", 0.5)
    assert "adaptive has no effect on the controller 'fixed'" in of(*DRAFT, "--adaptive", "alpha=1")
    assert of(*DRAFT[:2], "--controller", "adaptive-threshold", "--adaptive", "alpha=1") == []
    assert of("--no-draft", "--no-branches") == ["--no-branches has no effect with --no-draft"]
    assert "branches has no effect on the controller 'fixed'" in of(*DRAFT, "--branches")
    for flags, reason in (
        (("--low-precision", "none"), "since no draft takes steps of a model"),
        (("--exit-layer", 3, "--repetition-penalty", 1.2), "with logits processors that read"),
        (("--exit-layer", 3, "--do-sample", *idle[-2:]), "under the rejection rule, which"),
    ):
        (line,) = of("--branches", *flags)
        assert line.startswith(f"branches has no effect {reason}")
    assert of(*DRAFT, *idle, "--do-sample") == of(*DRAFT, *idle, "--temperature", 0.5) == []


def test_a_config_searched_on_another_model_warns(folder, save_skip, expected):
    path = save_skip(exit_layer=3, model="someone/else")
    result = generate(folder, "--skip", path, "--controller", "fixed", "--quiet", "--json")
    assert document(result)["token_ids"] == expected
    (line,) = warned(result)
    assert line.startswith("this skip config was searched on someone/else")
    result = generate(folder, "--skip", save_skip(attention=(6,), model="someone/else"), "--quiet")
    (line,) = result.stderr.splitlines()  # no warning before the error
    assert "0..5 for a 6-layer model, got 6; this skip config was searched on someone/else" in line
    SkipConfig(exit_layer=2).save(path.parent / "skip.json")
    assert drafts_said(generate(folder, "--skip", path.parent, tokens=2)) == [
        "drafts: looked up in the text so far, or exit 2"
    ]


# ---- check, demo, env, version, help ----


def test_a_prompt_is_carried_once_and_what_prompts_share_too(folder, tmp_path, spied):
    carried = spied(Sublayers, "feed", lambda _, tokens, *__: tokens.tolist())
    path = tmp_path / "prompts.txt"
    shared = " ".join(f"w{n}" for n in range(30, 60))
    path.write_text(f"{shared} w8 w9\n{shared} w7\n{shared} w8 w9\n")
    flags = ("--prompt-file", path, *DRAFT, "--no-lookup", "--max-new-tokens", 8, "--json")
    found = document(run("generate", folder, *flags))["results"]
    assert [each["num_known_tokens"] for each in found] == [0, 30, 31]
    assert sum(row.count(40) for tokens in carried for row in tokens) == 1
    for each, prompt in zip(found, path.read_text().splitlines(), strict=True):
        alone = document(generate(folder, *DRAFT, "--json", prompt=prompt, tokens=8))
        assert each["token_ids"] == alone["token_ids"]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("taken", [PATIENCE / 2, 2 * PATIENCE])
def test_reading_is_shown_on_terminals_once_it_takes_long(live, taken, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: live)
    monkeypatch.setattr(sys, "stderr", terminal)
    seconds = iter((10.0, 10.0 + taken, 10.0 + taken))
    told = reading(Talk(quiet=False), lambda: next(seconds))
    told(512, 1024)
    told(1024, 1024)
    clear = "\r\033[K"
    shown = f"{clear}reading [{'#' * 15}{' ' * 15}] 512 of 1024 tokens{clear}"
    assert terminal.getvalue() == (shown if live and taken > PATIENCE else "")


@pytest.fixture
def two_prompts(tmp_path):
    path = tmp_path / "two.txt"
    path.write_text(f"{PROMPT}\nw9 w8 w7\n")
    return path


def test_check_passes(folder, two_prompts):
    flags = ("--exit-layer", 3, "--prompts", two_prompts, "--max-new-tokens", 8)
    result = run("check", folder, *flags, "--json", columns=60)
    found = document(result)
    assert found["passed"] is True
    for each in (found["greedy"], found["plain"], found["coupled"]):
        assert (each["tokens"], each["near_ties"], each["faults"]) == (16, 0, 0)
    assert f"resolution {found['greedy']['resolution']:.2g}" in result.stdout
    lines = result.stdout.splitlines()
    assert lines[-2] == "passed"
    assert max(map(len, lines[:-1])) <= 60


def test_check_fails_and_shows_where(folder, two_prompts, shifted_verify):
    shifted_verify(9.0)
    flags = ("--exit-layer", 3, "--prompts", two_prompts, "--max-new-tokens", 8)
    result = run("check", folder, *flags, "--json")
    assert result.exit_code == 1
    assert "got 'w5'; margin" in result.stdout
    assert "FAULT" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["passed"] is False


@pytest.mark.parametrize("draft_cost", [0.2, *thorough(0.9)])
def test_demo_shows_the_same_text_and_why(folder, tmp_path, draft_cost):
    costs = {"draft": draft_cost, "verify": [1.0, 1.1, 1.2]}
    replace(SkipConfig.early_exit(3), costs=costs).save(tmp_path / "skip.json")
    flags = ("--skip", tmp_path / "skip.json", "--no-lookup", "--max-new-tokens", 8)
    result = run("demo", folder, *flags, "--json", columns=60)
    found = document(result)
    assert found["passed"] is True
    assert found["text"] in result.stdout
    assert len(found["token_ids"]) == 8
    for law, texts in (("coupled", 9), ("greedy", 6)):  # for three prompts
        same = found[law]
        assert (same["compared"], same["equal"]) == (texts, texts)
    speed = found["tokens_per_second"]
    assert speed.keys() == {"generate", "plain", "self"}
    assert found["speedup"] == pytest.approx(speed["self"] / speed["plain"])
    assert f"{found['speedup']:.2f}x" in result.stdout
    assert f"passes: {found['passes']}" in result.stderr.splitlines()
    assert found["draft_cost"] == draft_cost
    drafting = "acceptance rate" if draft_cost < 0.5 else "turned itself off"
    for words in ("9/9", drafting, f"1/c = {1 / draft_cost:.1f}x", f"layerskip check {folder}"):
        assert words in result.stdout
    shown = result.stdout.rpartition("The same text?")[2].partition("What next?")[0].splitlines()
    assert max(map(len, shown)) <= 60


@pytest.mark.thorough
def test_demo_fails_where_the_text_differs(folder, monkeypatch):
    drawn = []

    def moody(seed, row=0):
        drawn.append(seed)
        return stream_key(seed + len(drawn), row)

    monkeypatch.setattr("layerskip.api.generation.stream_key", moody)
    result = run("demo", folder, "--exit-layer", 3, "--max-new-tokens", 8)
    assert result.exit_code == 1
    assert "9 faults" in result.stdout
    assert "6/6" in result.stdout  # greedy texts use no seed


def test_progress_is_replaced_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    talk = Talk(quiet=False)
    talk.progress("loading " + "x" * 40)
    talk.say("loaded, and ready to decode whatever comes")
    quiet = Talk(quiet=True)
    quiet.progress("nothing")
    quiet.say("nothing")
    clear = "\r\033[K"
    shown = f"{clear}loading {'x' * 21}{clear}loaded, and ready to decode\n  whatever comes\n"
    assert terminal.getvalue() == shown


def test_a_table_too_wide_for_a_terminal_is_folded(monkeypatch):
    lines = [["method", "batch", "tokens/s", "same text"], ["plain", "1", "52.9", "6/6, all"]]
    one = "method  batch  tokens/s  same text\nplain       1      52.9  6/6, all"
    monkeypatch.setenv("COLUMNS", "34")
    assert aligned(lines, 2) == one  # not on a terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert aligned(lines, 2) == one
    monkeypatch.setenv("COLUMNS", "33")
    folded = "method  batch  tokens/s\nplain       1      52.9\n\n"
    assert aligned(lines, 2) == folded + "method  batch  same text\nplain       1  6/6, all"


def test_env_says_versions():
    assert __version__ in run("env").stdout
    found = document(run("env", "--json"))
    assert found["layerskip"] == __version__
    assert found["native"] == extension.status()


def test_how_passes_are_computed_is_said_once(folder, monkeypatch):
    how = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", "2", *DRAFT)
    lines = run(*how, "--execution", "modules").stderr.splitlines()
    assert [x for x in lines if "passes" in x] == ["passes: modules: as asked for"]
    monkeypatch.setattr(extension, "refusal", lambda: "no C++ compiler was found")
    for flags, expected in (
        ((), "passes: fused: no C++ compiler was found"),
        (("--quiet",), "layerskip: warning: passes use the fused path: no C++ compiler was found"),
    ):
        native_passes.warn_refusal.cache_clear()
        lines = run(*how, "--dtype", "float32", *flags).stderr.splitlines()
        assert [x for x in lines if "passes" in x] == [expected]


def test_version_and_help():
    assert run("--version").stdout == f"layerskip {__version__}\n"
    assert "/help" in run("chat", "-h").stdout
    assert "epeatable" not in run("check", "-h").stdout
    text = run("--help", columns=80).stdout
    assert "..." not in text.partition("Commands:")[2]
    assert re.findall(r"(?m)^  (\w+) +[A-Z]", text) == [*COMMANDS]
    for command in COMMANDS:
        text = run(command, "-h", columns=80).stdout
        assert max(map(len, text.splitlines())) <= 80, command
        assert ("--json " in text) == (command not in ("chat", "serve", "run"))


COMMANDS = get_command(cli.app).commands


def test_help_is_in_groups_and_its_examples_are_commands():
    given = {each.name for command in COMMANDS.values() for each in command.params}
    assert given | {"help"} >= {flag for flags in PANELS.values() for flag in flags.split()}
    for name, command in COMMANDS.items():
        text = run(name, "-h", columns=80).stdout
        (example,) = re.findall(r"Example: layerskip (.*)", text)
        assert shlex.split(example)[0] == name
        command.make_context(name, shlex.split(example)[1:])  # raises for what it does not take
        found = re.findall(r"(?m)^(\S.*):$", text)
        assert found == [each for each in ("Arguments", *PANELS) if each in found]
    text = run("generate", "-h", columns=80).stdout
    assert re.findall(r"(?m)^\S.*:\n  (\S+)", text) == [
        "model", "--prompt", "-n,", "--temperature", "--no-draft", "--threads",
    ]  # fmt: skip
    assert (
        "--window T " in run("train", "-h").stdout.partition("exits:")[2].partition("Sampling")[0]
    )


def test_options_of_decoding_are_flags_of_every_command_that_decodes():
    options = {each.name for each in fields(DecodingOptions) if each.metadata["flag"]}
    assert len(options) == len(fields(DecodingOptions)) - len({"enabled", "draft_vocabulary"})
    for name in ("generate", "chat", "serve", "run", "benchmark"):
        missing = options - {each.name for each in COMMANDS[name].params}
        without = {"serve": {"acceptance"}, "benchmark": {*REMEMBERING}}  # which would time itself
        assert missing == without.get(name, set())


def test_choices_are_those_of_the_library():
    hints = get_type_hints(Decoding) | get_type_hints(Loading)
    assert set(get_args(get_args(hints["controller"])[0])) == set(names("controller"))
    assert get_args(hints["dtype"]) == DTYPES
    assert set(get_args(hints["execution"])) == set(EXECUTIONS)


@pytest.mark.parametrize("name", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_idle_threads_give_way_soon_where_nobody_says_otherwise(name, monkeypatch):
    said = {} if name is None else {name: "7"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_"))}
    environment |= said
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(cli, "app", lambda **_: 0)
    monkeypatch.setattr(cli.atexit, "register", lambda _: None)  # it would end the tests
    with pytest.raises(SystemExit):
        cli.main()
    found = {k: v for k, v in environment.items() if k in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    assert found == (said or {"GOMP_SPINCOUNT": "10000"})


# ---- benchmark, report ----


def bench(folder, prompts, output, *flags):
    few = ("--max-new-tokens", 6, "--repeats", 1, "--warmup", 0)
    return run("benchmark", folder, "--prompts", prompts, *few, "--output", output, *flags)


def test_benchmark_measures_and_goes_on(folder, two_prompts, tmp_path, priced):
    output = tmp_path / "new" / "run.jsonl"
    flags = ("--exit-layer", 3, "--controller", "fixed", "--controller", "expected-gain")
    flags += tuple(
        word for name in ("self", "generate-early-exit", "generate") for word in ("--method", name)
    )
    result = bench(folder, two_prompts, output, *flags, "--max-draft-length", 2, "--json")
    found = document(result)
    names = ["plain", "self:fixed", "self:expected-gain", "generate", "generate-early-exit"]
    assert [row["method"] for row in found["methods"]] == names
    assert all((row["compared"], row["faults"]) == (2, 0) for row in found["methods"])
    assert found["methods"][0]["speedups"]["plain"] == [1.0, 1.0, 1.0]
    usual = [row | {"method": row["method"][:8]} for row in found["methods"][0:4]]
    assert max(map(len, _table(usual).splitlines())) <= 80  # method names of 8 letters
    for words in (*names, "x plain", "x generate", "same text"):
        assert words in result.stdout
    assert f"layerskip report {output}" in result.stderr
    assert f"--output makes the folder {output.parent}, which" in result.stderr
    records = read_run(output)
    assert len(records.records) == 2 * 5
    assert records.header["law"]["do_sample"] is False
    assert records.header["methods"][1]["costs"]["1"]["draft"] == 0.2
    assert [m["max_draft_length"] for m in records.header["methods"][1:3]] == [2, 2]
    assert "w96" not in output.read_text()
    # The last record is cut off, as after a kill. Only that one is measured again.
    data = output.read_bytes()
    output.write_bytes(data[:-40])
    again = bench(folder, two_prompts, output, *flags, "--max-draft-length", 2)
    assert again.exit_code == 0
    assert output.read_bytes().startswith(data[: data.rindex(b"\n", 0, -1)])
    assert len(read_run(output).records) == 2 * 5
    line = refused_bench(folder, two_prompts, output, *flags, "--max-draft-length", 3)
    assert "holds records of other settings: methods is" in line


def refused_bench(folder, prompts, output, *flags):
    few = ("--max-new-tokens", 6, "--repeats", 1, "--warmup", 0)
    flags = ("--prompts", prompts, *few, "--output", output, *flags)
    return refused("benchmark", folder, *flags)


def test_a_run_refused_before_it_measured_binds_nobody(folder, two_prompts, tmp_path):
    output = tmp_path / "run.jsonl"
    larger = tiny_model("llama", dtype=torch.float32, vocab_size=120)
    other = save_checkpoint(tmp_path / "other", larger)
    flags = ("--method", "generate-assistant", "--assistant")
    refused_bench(folder, two_prompts, output, *flags, other)  # by transformers, when it decodes
    assert not output.exists()
    result = bench(folder, two_prompts, output, *flags, folder)
    assert result.exit_code == 0, result.output
    assert read_run(output).header["methods"][1]["assistant"] == str(folder)
    output.write_text(output.read_text().splitlines()[0] + "\n")  # as after a run that was stopped
    assert bench(folder, two_prompts, output, "--method", "generate").exit_code == 0


def test_benchmark_samples_in_batches_with_text_on_request(
    folder, two_prompts, tmp_path, priced, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["layerskip", "benchmark", "--x=http://me:secret@host/x"])
    output = tmp_path / "run.jsonl"
    flags = ("--method", "self", "--method", "self-together", "--exit-layer", 2)
    flags += ("--exit-layer", 4, "--batch-size", 2)
    draw = ("--temperature", 0.8, "--top-k", 9, "--seed", 3, "--save-text")
    result = bench(folder, two_prompts, output, *flags, *draw)
    assert result.exit_code == 0
    run_ = read_run(output)
    names = ["plain", "self:exit-2", "self:exit-4", "self-together"]
    assert [method["name"] for method in run_.header["methods"]] == names
    assert run_.header["methods"][-1]["sources"] == ["lookup", "sublayers 1", "sublayers 2"]
    assert run_.header["argv"] == ["benchmark", "--x=http://me:***@host/x"]
    law = {"temperature": 0.8, "top_p": 1.0, "top_k": 9, "acceptance": "coupled", "seed": 3}
    assert run_.header["law"] == {"do_sample": True, **law}
    texts = {tuple(record["texts"]) for record in run_.records}
    assert len(run_.records) == 4
    assert len(texts) == 1
    assert run_.records[0]["prompt_texts"] == [PROMPT, "w9 w8 w7"]
    assert warned(bench(folder, two_prompts, output, *flags, *draw, "--assistant", folder)) == [
        "--assistant has no effect without --method self-assistant or generate-assistant"
    ]
    idle = ("--draft-memory", 1, "--exit-layer", 2, "--lookup", "--controller", "fixed")
    told = warned(bench(folder, two_prompts, tmp_path / "plain", "--method", "plain", *idle))
    assert [line.split()[0] for line in told] == [*idle[:4:2], "--lookup", "--controller"]


def test_a_skip_config_asks_for_branches(folder, save_skip):
    """`generate` reads this from the config. A flag overrides it; other controllers ignore it."""
    costs = {"draft": 0.1, "verify": [1.0] * 9}
    how = {"exit_layer": 3, "decoding": DecodingOptions(branches=True), "costs": costs}
    flags = ("--skip", save_skip(**how), "--low-precision", "none", "--no-lookup")
    found = {
        name: document(generate(folder, *flags, *more, "--json", tokens=40))
        for name, more in (("on", ()), ("off", ("--no-branches",)), ("plain", ("--no-draft",)))
    }
    assert len({str(each["token_ids"]) for each in found.values()}) == 1
    assert found["on"]["num_draft_tokens"] > found["off"]["num_draft_tokens"]
    assert warned(generate(folder, *flags, "--controller", "fixed", tokens=2)) == []


@pytest.mark.thorough
def test_benchmark_at_lengths_of_context(folder, two_prompts, tmp_path, priced):
    output = tmp_path / "run.jsonl"
    flags = ("--method", "self", "--method", "generate", "--exit-layer", 3)
    flags += ("--context", 30, "--context", 12, "--batch-size", 1, "--batch-size", 2)
    result = bench(folder, two_prompts, output, *flags, "--json")
    rows = document(result)["methods"]
    assert [(row["batch_size"], row["context"]) for row in rows[::3]] == [
        (1, 12), (1, 30), (2, 12), (2, 30),
    ]  # fmt: skip
    assert all((row["compared"], row["faults"]) == (4, 0) for row in rows)  # of both batch sizes
    assert result.stderr.count("prompts repeat for contexts of 12 tokens and more") == 1
    assert "context" in result.stdout.splitlines()[0]
    found = read_run(output)
    assert found.header["contexts"] == [12, 30]
    assert found.header["prompts"]["count"] == 4
    assert {tuple(r["prompt_tokens"]) for r in found.records} == {
        (12,),
        (30,),
        (12,) * 2,
        (30,) * 2,
    }
    line = refused_bench(folder, two_prompts, output, *flags, "--context", 40)
    assert "holds records of other settings: prompts.count is" in line
    assert run("report", output, "--output", tmp_path / "report").exit_code == 0
    line = refused_bench(folder, two_prompts, tmp_path / "other.jsonl", "--context", 300)
    assert "at most 256 tokens for this model, got 306" in line


def test_a_second_model_drafts(folder, two_prompts, tmp_path, priced):
    second = save_checkpoint(tmp_path / "second", tiny_model("llama", dtype=torch.float32, seed=1))
    flags = ("--prompt", PROMPT, "--max-new-tokens", 12, "--json")
    plain = document(run("generate", folder, *flags, "--no-draft"))
    alone = ("--assistant", second, "--no-lookup", "--low-precision", "none")
    alone += ("--controller", "fixed")
    result = run("generate", folder, *flags, *alone)
    assert f"drafts: a second model, {second}" in result.stderr
    found = document(result)
    assert found["token_ids"] == plain["token_ids"]
    assert [each["name"] for each in found["sources"]] == ["assistant"]
    assert found["num_draft_tokens"] > 0
    several = ("--assistant", second, "--exit-layer", 3)
    found = document(run("generate", folder, *flags, *several))
    assert found["token_ids"] == plain["token_ids"]
    assert [each["name"] for each in found["sources"]] == ["lookup", "assistant", "sublayers"]
    output = tmp_path / "run.jsonl"
    methods = ("--method", "self-assistant", "--method", "generate-assistant")
    result = bench(folder, two_prompts, output, *methods, "--assistant", second)
    assert result.exit_code == 0, result.output
    _, ours, theirs = read_run(output).header["methods"]
    assert (ours["name"], ours["sources"]) == ("self-assistant", ["assistant"])
    assert ours["assistant"] == theirs["assistant"] == str(second)
    assert ours["costs"]["1"]["draft"] > 0


def test_a_second_model_with_another_tokenizer_drafts(folder, two_prompts, tmp_path, priced):
    model = tiny_model("llama", dtype=torch.float32, vocab_size=98)
    other = save_checkpoint(tmp_path / "other", model)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7": 7', '"w7": 9').replace('"w9": 9,', '"w9": 7,'))
    flags = ("--prompt", PROMPT, "--max-new-tokens", 12, "--json")
    plain = document(run("generate", folder, *flags, "--no-draft"))
    result = run("generate", folder, *flags, "--assistant", other, "--controller", "fixed")
    assert f"a second model, {other}, with another tokenizer" in result.stderr
    assert document(result)["token_ids"] == plain["token_ids"]
    flags = ("--method", "self-assistant", "--method", "generate-assistant", "--assistant", other)
    result = bench(folder, two_prompts, tmp_path / "run.jsonl", *flags)
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("priced")
def test_benchmark_fails_where_a_text_differs(folder, two_prompts, tmp_path, shifted_verify):
    shifted_verify(9.0)
    flags = ("--method", "self", "--exit-layer", 3, "--controller", "fixed")
    result = bench(folder, two_prompts, tmp_path / "run.jsonl", *flags, "--method", "generate")
    assert result.exit_code == 1
    assert "faults" in result.stdout


@pytest.mark.wheel
def test_interrupting_a_benchmark_keeps_what_it_measured(folder, two_prompts, tmp_path):
    output = tmp_path / "run.jsonl"
    flags = ("--prompts", two_prompts, "--method", "plain", "--max-new-tokens", 200)
    child = process("benchmark", folder, *flags, "--repeats", 500, "--output", output)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (output.exists() and b"record" in _tail(output)):
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 130
    assert "keeps the measurements" in err
    assert err.splitlines()[-1] == "layerskip: interrupted"
    assert len(read_unfinished(output).records) >= 1


def _tail(path):
    return path.read_bytes().partition(b"\n")[2]


# ---- Bad input: most of it in test_bad_input.py ----


def test_a_prompt_of_no_tokens_is_refused(folder):
    assert "prompt 1 is empty" in refused("generate", folder, "--prompt", " ")


def test_nan_logits_stop(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[4].mlp.up_proj.weight[0, 0] = float("nan")
    folder = save_checkpoint(tmp_path, model)
    assert "NaN logits" in refused("generate", folder, "--prompt", PROMPT, *DRAFT)
    assert "NaN logits" in refused("generate", folder, "--prompt", PROMPT, "--no-draft")


def test_closed_streams_are_no_streams(monkeypatch):
    """A shell closes them with `>&-`; Python then has none, and would print errors elsewhere."""
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr("atexit.register", lambda _: None)  # of what ends the process
    monkeypatch.setattr(cli, "app", lambda **_: sys.stderr.writelines(["an error"]))
    with pytest.raises(SystemExit):
        cli.main()
    with sys.stderr as nowhere:
        assert nowhere.name == os.devnull


def test_no_command():
    result = run()
    assert result.exit_code == 2
    assert result.stderr == "layerskip: error: Missing command. (see layerskip --help)\n"
    assert refused("check", "--colour").endswith(" (see layerskip check --help)")


# ---- Real processes ----


@pytest.mark.wheel
def test_interrupting_keeps_what_was_streamed(tmp_path):
    model = tiny_model("llama", dtype=torch.float32, max_position_embeddings=100_000)
    folder = save_checkpoint(tmp_path, model)
    text = generate(folder, "--no-draft", "--exit-layer", 3, tokens=40).stdout.strip()
    flags = ("--exit-layer", 3, "--max-new-tokens", 90_000, "--stream", "--quiet")
    child = process("generate", folder, "--prompt", PROMPT, *flags)
    try:
        start = child.stdout.read(len(text))  # blocks until this much was streamed
        child.send_signal(signal.SIGINT)
        rest, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 130
    assert start == text
    assert rest.endswith("\n")
    assert err.strip() == "layerskip: interrupted"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.wheel
def test_output_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        child = process("--version", stdout=full)
        _, err = child.communicate(timeout=120)
    assert child.returncode == 2
    assert err == "layerskip: error: [Errno 28] No space left on device\n"


@pytest.mark.wheel
def test_a_reader_that_goes_away_ends_it_quietly():
    with process("--help") as child:
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 128 + signal.SIGPIPE
