"""`layerskip run`: one row for each prompt, however earlier runs ended."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import commands
import pytest
import torch
from answers import FLAGS, SAMPLED, complete, rows, run, settled, started, wait_for_rows
from checkpoints import save_checkpoint, shallow_demo
from small import small_model
from talks import alone

from layerskip.api.loading import encode, load
from layerskip.cli.run import _device
from layerskip.serving.prompt_files import open_answers
from layerskip.serving.requests import TextRequest
from layerskip.texts.prompts import read_prompts
from layerskip.texts.tokens import decode_text

ERROR = {"id": "a3", "error": "earlier"}


def test_answers_are_those_of_lone_prompts_and_shards_make_the_whole(given, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(given, whole, *SAMPLED).exit_code == 0
    loaded = load(shallow_demo(), device="cpu", dtype="float32")
    for number, prompt in enumerate(read_prompts(given)):
        ids, law = encode(loaded.tokenizer, prompt), {"do_sample": True, "temperature": 0.9}
        asked = TextRequest(ids[0].tolist(), 8, top_k=20, seed=5 + number, **law)
        tokens = alone(loaded.model, asked)
        row = rows(whole)[prompt.id]
        assert row["token_ids"] == tokens
        assert row["text"] == decode_text(loaded.tokenizer, tokens)
        assert (row["prompt_tokens"], row["new_tokens"]) == (ids.shape[1], len(tokens))
        assert (row["seed"], row["finish_reason"]) == (5 + number, "length")
    assert sum(row["drafted"] for row in rows(whole).values()) > 0
    for index, count in enumerate((5, 9)):  # both shards append to one file
        assert run(given, parts, *SAMPLED, "--shard", f"{index}/2").exit_code == 0
        assert len(rows(parts)) == count
    assert settled(parts) == settled(whole)


def test_a_line_may_limit_its_own_text(given, tmp_path):
    """Whatever limits the others in the batch have."""
    whole, output = tmp_path / "whole", tmp_path / "new" / "out"
    lines = [json.loads(line) for line in given.read_text().splitlines()]
    assert run(given, whole, *SAMPLED, "-n", "9").exit_code == 0
    limits = {line["id"]: 1 + 4 * number % 9 for number, line in enumerate(lines) if number % 4}
    for number, line in enumerate(lines):
        if line["id"] in limits:
            line["max_tokens" if number % 2 else "max_new_tokens"] = limits[line["id"]]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run(given, output, *SAMPLED)
    assert result.exit_code == 0
    assert f"--output makes the folder {output.parent}, which" in result.stderr
    for id_, row in rows(output).items():
        assert row["token_ids"] == rows(whole)[id_]["token_ids"][: limits.get(id_, 8)]
        assert row["finish_reason"] == "length"
    assert "9 of 9 rows already done" in run(given, output, *SAMPLED).stderr
    given.write_text(given.read_text().replace('_tokens": 5', '_tokens": 6'))
    assert "from another prompt" in run(given, output, *SAMPLED).stderr


def test_models_that_run_whole_answer_files(tmp_path):
    folder = save_checkpoint(tmp_path / "whole", deepcopy(small_model("phi")).float())
    asked, output = tmp_path / "asked.txt", tmp_path / "out"
    asked.write_text("w5 w7 w5 w7\nw9 w8\n")
    result = commands.run(
        *("run", folder, asked, "--output", output, "--max-new-tokens", 8, "--controller", "fixed")
    )
    assert result.exit_code == 0, result.output
    loaded = load(str(folder))
    for number, text in enumerate(("w5 w7 w5 w7", "w9 w8"), 1):
        row = rows(output)[str(number)]
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
        out = loaded.model.generate(ids, max_new_tokens=8, do_sample=False)
        assert row["token_ids"] == out[0, ids.shape[1] :].tolist()
    assert sum(row["drafted"] for row in rows(output).values()) > 0


@pytest.mark.thorough
def test_a_run_goes_on_behind_a_torn_line_and_tries_errors_when_told(given, tmp_path):
    output, whole = tmp_path / "out", tmp_path / "whole"
    assert run(given, whole).exit_code == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines[:4] if b'"a3"' not in line]
    output.write_bytes(b"".join(kept) + json.dumps(ERROR).encode() + b"\n" + lines[5][:20])
    assert run(given, output).exit_code == 0
    assert output.read_bytes().startswith(b"".join(kept))
    assert settled(output) == settled(whole) | {"a3": ERROR}
    assert run(given, output, "--retry-errors").exit_code == 0
    assert settled(output) == settled(whole)
    before = output.read_bytes()
    assert run(given, output, "--retry-errors").exit_code == 0
    assert output.read_bytes() == before


def test_a_prompt_that_fails_has_a_row_of_its_own(given, tmp_path):
    output = tmp_path / "out"
    long = {"id": "long", "prompt": "x y z " * 5000}
    given.write_text(json.dumps(long) + "\n" + given.read_text())
    result = run(given, output)
    assert result.exit_code == 1
    assert "1 prompt failed" in result.stderr
    found = rows(output)
    assert found["long"].keys() == {"id", "error", "fingerprint"}
    assert "texts have at most 512 tokens" in found["long"]["error"]
    assert sum("text" in row for row in found.values()) == 9


def test_texts_are_kept_to_grammars_their_own_first(given, tmp_path):
    output, schema = tmp_path / "out", {"type": "object", "required": ["a"]}
    schema |= {"properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False}
    own = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    forms = [None, own, {"type": "text"}, {"type": "grammar"}]
    lines = [
        {"id": f"g{n}", "prompt": "x =", "response_format": each} for n, each in enumerate(forms)
    ]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(given, output, "--regex", "(yes|no)+", "-n", "20").exit_code == 1
    found = rows(output)
    assert re.match("(yes|no){3}", found["g0"]["text"])
    assert json.loads(found["g1"]["text"])["a"] in (1, 2)
    assert not re.match("yes|no|{", found["g2"]["text"])
    assert "response_format must be" in found["g3"]["error"]


def test_batch_files_of_openai_are_answered_in_their_shape(given, tmp_path):
    """Flags apply where a line sets nothing; errors become rows."""
    output, plain = tmp_path / "out", tmp_path / "plain"
    text = {"prompt": "def f(x):", "model": "any"}
    bodies = [
        text,
        text | {"max_tokens": 3, "logprobs": 1},
        text | {"temperature": 1.0, "seed": 9, "response_format": {"type": "json_object"}},
        text | {"colour": 1},
        text | {"n": 2},
        text | {"temperature": 1.0},
        text | dict.fromkeys(("temperature", "max_tokens", "n", "stream")),
    ]
    lines = [{"custom_id": f"c{n}", "body": body} for n, body in enumerate(bodies)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(given, output).exit_code == 1
    found = rows(output)
    assert all(row["custom_id"] == id_ for id_, row in found.items())
    words = "has 1 row with another origin; the first is that of prompt c5, from another prompt"
    assert words in run(given, output, "--seed", "6").stderr
    given.write_text(json.dumps({"id": "a", "prompt": text["prompt"]}))
    assert run(given, plain).exit_code == 0
    answers = [found[f"c{n}"]["response"] for n in range(3)]
    for answer in (answers[0], found["c6"]["response"]):
        assert answer["body"]["choices"][0]["text"] == rows(plain)["a"]["text"]
    assert answers[1]["body"]["usage"]["completion_tokens"] == 3
    assert len(answers[1]["body"]["choices"][0]["logprobs"]["tokens"]) == 3
    assert answers[2]["body"]["choices"][0]["text"].startswith("{")
    assert answers[2]["body"]["timings"]["seeds"] == [9]
    assert [found[f"c{n}"]["error"]["message"] for n in (3, 4)] == [
        "colour is not supported; leave it out",
        "a line of a file is one text: leave out stream and n",
    ]


def test_lines_of_batch_files_go_through_the_chat_template_if_asked(given, tmp_path):
    folder = save_checkpoint(tmp_path / "chatting", template="{{ messages[0].content }} w8")
    given.write_text(json.dumps({"custom_id": "a", "body": {"prompt": "w5 w7"}}))
    output = tmp_path / "out"
    assert commands.run("run", folder, given, "--chat", "--output", output).exit_code == 0
    body = rows(output)["a"]["response"]["body"]
    assert (body["object"], body["usage"]["prompt_tokens"]) == ("chat.completion", 3)


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


def test_what_cannot_be_run_is_refused(given, tmp_path, monkeypatch):
    output = tmp_path / "out"
    with monkeypatch.context() as torchrun:
        torchrun.setenv("WORLD_SIZE", "2")
        for flags in (["--shard", "0/2"], ["--ray"]):
            assert "leave out --shard and --ray" in run(given, output, *flags).stderr
    for shard in ("1", "2/2", "a/b", "-1/2", "0/0"):
        assert "--shard must be I/N" in run(given, output, f"--shard={shard}").stderr
    assert "is the file of prompts" in run(given, given).stderr
    for place in ("/dev/full", "-"):
        assert f"{place} is a folder, a pipe or a device" in run(given, Path(place)).stderr
    if Path("/proc").is_dir():
        assert "cannot write to /proc: " in run(given, Path("/proc/x")).stderr
    with open_answers(output, {}):
        assert "another run writes" in run(given, output).stderr
    given.write_text(given.read_text() + '{"id": "a0", "prompt": "again"}\n')
    result = run(given, output)
    assert result.exit_code == 2
    assert "line 10: id must be unique, got 'a0' again" in result.stderr
    given.write_text(json.dumps({"custom_id": "a", "max_tokens": 5, "body": {"prompt": "x"}}))
    assert "may have the keys custom_id, method, url, body, got 'max_t" in run(given, output).stderr
    assert not output.exists()


def row_of(id_, text="", **more):
    return {"id": id_, "text": text} | more


class TestParts:
    """Several processes that write into one file."""

    def test_they_add_to_it_and_keep_others_away(self, tmp_path):
        output = tmp_path / "out"
        output.write_text(json.dumps(row_of("a")) + "\n" + '{"id": "b')  # cut off by a kill
        with open_answers(output, {}, (0, 2)) as first, open_answers(output, {}, (1, 2)) as second:
            first.add(row_of("b"))
            second.add(row_of("c"))
            first.add(row_of("d"))
            for part in ((0, 1), (0, 3), (0, 2)):
                with (
                    pytest.raises(ValueError, match=r"another run writes .*/out;"),
                    open_answers(output, {}, part),
                ):
                    pass
        assert list(rows(output)) == ["a", "b", "c", "d"]
        assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.lock"}
        (tmp_path / ".out.4-of-9.lock").touch()  # left by a killed process
        with open_answers(output, {}) as answers:
            assert answers.done == {"a", "b", "c", "d"}
        assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.lock"}

    def test_each_tries_its_own_errors_again(self, tmp_path):
        output, other = tmp_path / "out", ERROR | {"id": "other"}
        lines = [ERROR, other, row_of("b")]
        output.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with open_answers(output, {"a3": "1-2-3"}, (0, 2)) as answers:
            assert answers.done == {"a3", "other", "b"}
        with open_answers(output, {"a3": "1-2-3"}, (1, 2), retry_errors=True) as answers:
            assert answers.done == {"other", "b"}
            answers.add(row_of("a3", "better"))
        better = row_of("a3", "better", fingerprint="1-2-3")
        assert list(rows(output).values()) == [other, row_of("b"), better]

    def test_a_full_disk_ends_the_run_and_is_told_by_the_name_of_the_file(
        self, given, tmp_path, monkeypatch
    ):
        full = Path("/dev/full").write_bytes
        monkeypatch.setattr(
            "layerskip.serving.prompt_files.add_lines", lambda file, lines: full(lines)
        )
        result = run(given, tmp_path / "out")
        assert result.exit_code == 2
        assert f"No space left on device: '{tmp_path / 'out'}'" in result.stderr


def test_rows_that_came_from_something_else_are_refused_before_a_model_is_loaded(
    given, tmp_path, monkeypatch
):
    output = tmp_path / "out"
    assert run(given, output, *SAMPLED).exit_code == 0
    before = settled(output)
    monkeypatch.setattr("layerskip.cli.run.open_model", lambda *_, **__: pytest.fail("loaded"))
    for changed, what in (
        (["--temperature", "0.8"], "other settings"),
        (["--stop", "x"], "other settings"),
        (["--regex", "a+"], "other settings"),
        (["--seed", "6"], "another prompt"),
        (["--chat"], "another prompt"),
        (["--dtype", "bfloat16"], "another model"),
        (["--max-rows", "2", "--no-lookup"], None),  # no text depends on these
    ):
        result = run(given, output, *SAMPLED, *changed)
        if what is None:
            assert result.exit_code == 0
        else:
            assert "has 9 rows with another origin" in result.stderr
            assert f"from {what}; give another --output" in result.stderr
    assert settled(output) == before
    monkeypatch.undo()
    lines = given.read_text().splitlines(keepends=True)
    given.write_text("".join(lines[:3]).replace("return 1", "return 11") + "".join(lines[3:]))
    words = "has 1 row with another origin; the first is that of prompt a1, from another prompt"
    assert words in run(given, output, *SAMPLED).stderr
    assert run(given, output, *SAMPLED, "--force").exit_code == 0
    after = settled(output)
    assert after.pop("a1") != before.pop("a1")
    assert after == before


def test_processes_of_torchrun_on_one_machine_share_its_gpus(monkeypatch):
    assert _device("auto") == "auto"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert _device("cpu") == "cpu"
        found.append(_device("auto"))
    assert found == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


@pytest.mark.slow
def test_processes_of_torchrun_write_the_file_of_one(given, tmp_path):
    output, whole = tmp_path / "out", tmp_path / "whole"
    given.write_text(
        json.dumps({"id": "long", "prompt": "x y z " * 5000}) + "\n" + given.read_text()
    )
    assert run(given, whole, *SAMPLED).exit_code == 1
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    command += ["layerskip", "run", shallow_demo(), str(given), "--output", str(output)]
    # torchrun would kill the other processes if one failed
    done = subprocess.run([*command, *FLAGS, *SAMPLED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 prompt failed" in done.stderr
    assert settled(output) == settled(whole)


@pytest.mark.thorough
@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_lost_or_twice_after_an_end(given, tmp_path, ended):
    output = tmp_path / "out"
    draw = random.Random(ended)
    given.write_text(
        "".join(json.dumps({"id": f"b{n}", "prompt": f"x = {n}"}) + "\n" for n in range(60))
    )
    process = started(given, output)
    wanted = draw.randint(1, 12)
    wait_for_rows(process, output, wanted)
    process.send_signal(ended)
    _, said = process.communicate()
    assert process.returncode == (130 if ended == signal.SIGINT else -ended)
    assert ("interrupted" in said) == (ended == signal.SIGINT)
    kept = complete(output)
    assert wanted <= kept.count(b"\n") < 60
    assert run(given, output).exit_code == 0
    assert output.read_bytes().startswith(kept)
    assert rows(output).keys() == {f"b{n}" for n in range(60)}


@pytest.mark.slow
def test_twenty_kills_at_any_moment_lose_nothing(given, tmp_path):
    output, whole = tmp_path / "out", tmp_path / "whole"
    lines = [{"id": f"b{n}", "prompt": f"x = {n}" * (1 + n % 7)} for n in range(300)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(given, whole, *SAMPLED).exit_code == 0
    draw = random.Random(0)
    kept, counts = b"", []
    for kill in range(20):
        process = started(given, output, *SAMPLED)
        if kill % 4:  # while it answers
            wait_for_rows(process, output, kept.count(b"\n") + draw.randint(1, 12))
            time.sleep(draw.random() / 50)
        else:  # while it starts
            time.sleep(draw.random() * 6)
        assert process.poll() is None
        process.kill()
        process.communicate()
        before, kept = kept, complete(output)
        assert kept.startswith(before)
        counts.append(kept.count(b"\n"))
    assert len(set(counts)) > 10
    assert counts[-1] < 300
    assert run(given, output, *SAMPLED).exit_code == 0
    assert output.read_bytes().startswith(kept)
    assert settled(output) == settled(whole)
