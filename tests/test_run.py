"""`layerskip run`: a row for each prompt, once, whatever ended the runs before."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner

import layerskip
from layerskip.checkpoints import encode, load
from layerskip.cli import main as cli
from layerskip.prompts import read_prompts
from layerskip.text import decode_text

FLAGS = ("--execution", "fused", "--exit-layer", "3", "-n", "8", "--max-rows", "3")
SAMPLED = ("--do-sample", "--temperature", "0.9", "--top-k", "20", "--seed", "5")
ERROR = {"id": "a3", "error": "earlier"}


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Prompts of several lengths."""
    draw = random.Random(0)
    lines = [
        {"id": f"a{n}", "prompt": "def f(x):\n" * draw.randint(1, 9) + f"  return {n}"}
        for n in range(9)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(given: Path, output: Path, *flags: str) -> Any:
    arguments = ["run", "demo-llama", str(given), "--output", str(output), *FLAGS, *flags]
    return CliRunner().invoke(cli.app, arguments)


def rows(output: Path) -> dict[str, dict[str, Any]]:
    """Rows by id, none of them twice."""
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def texts(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {id_: row["text"] for id_, row in found.items()}


def test_answers_are_those_of_lone_prompts_and_shards_make_the_whole(given, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(given, whole, *SAMPLED).exit_code == 0
    loaded = load("demo-llama", device="cpu", dtype="float32")
    for number, prompt in enumerate(read_prompts(given)):
        ids = encode(loaded.tokenizer, prompt)
        rounds = layerskip.decode(
            loaded.model,
            ids,
            max_new_tokens=8,
            do_sample=True,
            temperature=0.9,
            top_k=20,
            seeds=[5 + number],
            enabled=False,
            execution="fused",
        )
        tokens = [token for each in rounds for token in each.tokens[0]]
        row = rows(whole)[prompt.id]
        assert row["token_ids"] == tokens
        assert row["text"] == decode_text(loaded.tokenizer, tokens)
        assert (row["prompt_tokens"], row["new_tokens"]) == (ids.shape[1], len(tokens))
        assert (row["seed"], row["finish_reason"]) == (5 + number, "length")
    assert sum(row["drafted"] for row in rows(whole).values()) > 0
    for index, count in enumerate((5, 9)):  # one file, one shard after the other
        assert run(given, parts, *SAMPLED, "--shard", f"{index}/2").exit_code == 0
        assert len(rows(parts)) == count
    assert texts(rows(parts)) == texts(rows(whole))


def test_a_run_goes_on_behind_a_torn_line_and_tries_errors_when_told(given, tmp_path):
    output, whole = tmp_path / "out", tmp_path / "whole"
    assert run(given, whole).exit_code == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines[:4] if b'"a3"' not in line]
    output.write_bytes(b"".join(kept) + json.dumps(ERROR).encode() + b"\n" + lines[5][:20])
    assert run(given, output).exit_code == 0
    assert output.read_bytes().startswith(b"".join(kept))
    found = rows(output)
    assert found.pop("a3") == ERROR
    # how much is drafted depends on who is beside it
    assert texts(found) == {id_: text for id_, text in texts(rows(whole)).items() if id_ != "a3"}
    assert run(given, output, "--retry-errors").exit_code == 0
    assert texts(rows(output)) == texts(rows(whole))
    before = output.read_bytes()
    assert run(given, output, "--retry-errors").exit_code == 0
    assert output.read_bytes() == before


def test_a_prompt_that_fails_has_a_row_of_its_own(given, tmp_path):
    output = tmp_path / "out"
    long = {"id": "long", "prompt": "x y z " * 5000}
    given.write_text(json.dumps(long) + "\n" + given.read_text())
    result = run(given, output)
    assert result.exit_code == 1
    assert "1 prompts failed" in result.stderr
    found = rows(output)
    assert found["long"].keys() == {"id", "error"}
    assert "must be at most" in found["long"]["error"]
    assert sum("text" in row for row in found.values()) == 9


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"id": "a1", "text": ""}\nnonsense\n', 2),
        (b'{"id": "a1"}\n', 1),
        (b'{"id": 1, "text": ""}\n', 1),
        (b"notes without an end of line", 1),
    ],
)
def test_a_file_of_something_else_is_left_alone(given, tmp_path, content, line):
    output = tmp_path / "out"
    output.write_bytes(content)
    result = run(given, output)
    assert result.exit_code == 2
    assert f"line {line}: " in result.stderr
    assert output.read_bytes() == content


def test_what_cannot_be_run_is_refused(given, tmp_path):
    output = tmp_path / "out"
    for shard in ("1", "2/2", "a/b", "-1/2", "0/0"):
        assert "--shard must be I/N" in run(given, output, f"--shard={shard}").stderr
    assert "is the file of the prompts" in run(given, given).stderr
    with FileLock(tmp_path / ".out.lock"):
        assert "another run writes" in run(given, output).stderr
    given.write_text(given.read_text() + '{"id": "a0", "prompt": "again"}\n')
    result = run(given, output)
    assert result.exit_code == 2
    assert "line 10: id must be unique, got 'a0' again" in result.stderr
    assert not output.exists()


@pytest.mark.parametrize(
    "ended", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_nothing_is_lost_or_twice_after_an_end(given, tmp_path, ended):
    output = tmp_path / "out"
    draw = random.Random(ended)
    given.write_text(
        "".join(json.dumps({"id": f"b{n}", "prompt": f"x = {n}"}) + "\n" for n in range(60))
    )
    command = [sys.executable, "-m", "layerskip", "run", "demo-llama", str(given)]
    command += ["--output", str(output), *FLAGS]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    finally:
        signal.signal(signal.SIGINT, before)
    wanted = draw.randint(1, 12)
    while process.poll() is None and (
        not output.exists() or output.read_bytes().count(b"\n") < wanted
    ):
        time.sleep(0.005)
    process.send_signal(ended)
    _, said = process.communicate()
    assert process.returncode == (130 if ended == signal.SIGINT else -ended)
    assert ("interrupted" in said) == (ended == signal.SIGINT)
    kept = output.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert wanted <= kept.count(b"\n") < 60
    assert run(given, output).exit_code == 0
    assert output.read_bytes().startswith(kept)
    assert rows(output).keys() == {f"b{n}" for n in range(60)}
