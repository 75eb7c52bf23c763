"""The chat command: turns, commands, Ctrl-C, editing of input, and the report on drafts."""

import io
import json
import os
import re
import select
import shutil
import signal
import sys
import termios
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import CHAT, save_checkpoint, tiny_tokenizer
from commands import document, process, refused, run
from models import lively_model, tiny_model
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from transformers import AutoTokenizer

import layerskip
from layerskip.api.session import Session
from layerskip.cli import chat as chatting
from layerskip.cli import main as cli
from layerskip.cli.chat import pieces, typed_lines
from layerskip.cli.terminal import two_columns
from layerskip.decoding.rounds import Round
from layerskip.decoding.sources.eagle import EagleHead
from layerskip.texts.prompts import read_prompts

DRAFT = ("--exit-layer", "3", "--controller", "fixed", "--execution", "fused")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("chatting"), template=CHAT)


@pytest.fixture
def outputs(monkeypatch):
    """Prompt ids and output of each answer."""
    found = []
    generate = Session.generate

    def kept(session, inputs, **kwargs):
        output = generate(session, inputs, **kwargs)
        found.append((inputs["input_ids"][0].tolist(), output))
        return output

    monkeypatch.setattr(Session, "generate", kept)
    return found


@pytest.fixture
def press():
    """Sends Ctrl-C if the command handles it; otherwise it would end pytest."""
    before = signal.getsignal(signal.SIGINT)  # it may be ignored, as in background jobs of a shell

    def pressed():
        assert signal.getsignal(signal.SIGINT) is not before, "nobody waits for Ctrl-C"
        signal.raise_signal(signal.SIGINT)

    yield pressed
    assert signal.getsignal(signal.SIGINT) is before


def talk(folder, *lines, flags=(), tokens=12):
    said = "".join(f"{line}\n" for line in lines)
    return run("chat", folder, *DRAFT, "-n", tokens, *flags, stdin=said)


def test_turns_are_those_of_the_template_and_the_prefix_is_kept(folder, outputs):
    result = talk(folder, "w5 w7", "", "w96 w20", flags=("--system", "w3"))
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    (ids, _), (longer, output) = outputs
    tokenizer, model = tiny_tokenizer(), tiny_model("llama", dtype=torch.float32)
    assert ids == tokenizer("w9 w3 w9 w5 w7 w10")["input_ids"]
    assert longer == tokenizer(f"w9 w3 w9 w5 w7 w9 {first} w9 w96 w20 w10")["input_ids"]
    for prompt, answer in ((ids, first), (longer, second)):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        assert answer == tokenizer.decode(expected[0, len(prompt) :], skip_special_tokens=True)
    assert output.stats.num_known_tokens >= 5  # w9 w3 w9 w5 w7
    assert output.stats.num_draft_tokens > 0


def test_a_seed_gives_the_same_text_twice(folder):
    lines = ("/temperature 1.5", "/seed 5", "w5", "/reset", "w5", "/reset", "/seed 6", "w5")
    first, again, other = talk(folder, *lines).stdout.splitlines()
    assert first == again != other
    flags = ("--temperature", 1.5, "--seed", 5)
    assert talk(folder, "w5", flags=flags).stdout == f"{first}\n"
    cold = [talk(folder, f"/temperature {t}", "w5", flags=flags).stdout for t in (0, 1e-5)]
    assert cold[0] == cold[1] == talk(folder, "w5").stdout != f"{first}\n"
    one, two = talk(folder, "/seed", "w5", "/reset", "w5", flags=flags).stdout.splitlines()
    assert one != two


def test_answers_of_one_seed_have_noise_of_their_own_and_may_be_tried_again(folder, outputs):
    talk(folder, "/temperature 1.5", "/seed 5", "w5", "w5", "/retry", "/retry")
    assert [output.stats.seeds for _, output in outputs] == [(5,), (6,), (7,), (8,)]
    assert outputs[1][0] == outputs[2][0] == outputs[3][0]  # the same prompt each time
    (_, second), (_, third) = outputs[1:3]
    assert second.sequences.tolist() != third.sequences.tolist()
    assert "there is no message yet" in talk(folder, "/retry").stderr


def test_a_conversation_is_saved_as_a_prompt(folder, tmp_path):
    path = tmp_path / "saved.jsonl"
    result = talk(folder, "w5", f"/save {path}", "/save", f"/save {tmp_path}/no/a")
    [prompt] = read_prompts(path)
    assert prompt.messages == (
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": result.stdout.splitlines()[0]},
    )
    assert "give a file name, for example /save chat.jsonl" in result.stderr
    assert f"cannot write {tmp_path}/no/a: No such file" in result.stderr


def test_commands_say_what_they_did(folder):
    wrong = ("/seed x", "/temperature -1", "/sing", "/image", "/draft")
    result = talk(folder, "/help", *wrong, "/quit", "w5")
    for command in chatting.COMMANDS:
        assert command in result.stdout
    for words in (
        "a seed must be a whole number, got x",
        "a temperature must be 0 or above, got '-1'",
        "there is no command /sing; see /help",
        "give a file name, for example /image cat.png",
        "there is no answer yet",
    ):
        assert words in result.stderr
    assert "w5" not in result.stdout  # after /quit nothing is answered


def test_a_system_message_begins_a_new_conversation(folder, outputs):
    talk(folder, "w5", "/system w4", "w6", "/system", "w7")
    tokenizer = tiny_tokenizer()
    assert [tokenizer.decode(ids) for ids, _ in outputs] == [
        "w9 w5 w10",
        "w9 w4 w9 w6 w10",
        "w9 w7 w10",
    ]


def test_an_interrupt_ends_the_answer_and_what_is_written_stays(
    folder, outputs, monkeypatch, press
):
    written = []

    def write(text):
        written.append(text)
        sys.stdout.write(text)
        if len(written) == 3:
            press()

    monkeypatch.setattr(chatting, "write_out", write)
    result = talk(folder, "w5 w7", "w96", tokens=100)
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert "(stopped)" in result.stderr
    assert 0 < len(first.split()) < 100
    assert len(outputs[1][1].rounds) > 3  # the second answer was not stopped
    assert first in tiny_tokenizer().decode(outputs[1][0])
    assert second


def test_an_interrupt_before_the_answer_drops_the_message(folder, outputs, monkeypatch, press):
    def read(talk):
        def told(done, whole):
            if not outputs:
                press()
                press()

        return told

    monkeypatch.setattr(chatting, "reading", read)
    result = talk(folder, "w5 w7")
    assert result.exit_code == 0
    assert "(stopped; your message is dropped)" in result.stderr
    assert outputs == []


def test_what_does_not_fit_is_told_and_dropped(folder, outputs):
    result = talk(folder, "w5 " * 300, "w7", flags=("--quiet",))
    assert "at most 256 tokens for this model" in result.stderr
    assert "/reset forgets the conversation" in result.stderr
    assert [ids for ids, _ in outputs] == [[9, 7, 10]]


def test_drafts_are_shown_with_what_they_gained(folder, outputs):
    result = talk(folder, "w5 w7", "/draft")
    answer, shown, _, legend, gain = result.stdout.splitlines()
    (_, output), stats = outputs[0], outputs[0][1].stats
    assert stats.num_accepted_tokens > 0
    assert re.sub(r"[][]", "", shown).split() == answer.split()
    marked = " ".join(re.findall(r"\[(.*?)\]", shown)).split()
    assert len(marked) == stats.num_accepted_tokens
    assert "[drafted], the rest comes from the model" in legend
    assert f"{stats.num_new_tokens} tokens in {len(output.rounds)} passes" in gain
    assert f"{stats.tokens_per_round:.2f} tokens per pass" in gain
    assert chatting._shown(EagleHead.name)[1] == "drafted by the EAGLE-3 head"


@pytest.fixture(scope="module")
def spelling(tmp_path_factory):
    """A model that can spell any character."""
    folder = tmp_path_factory.mktemp("spelling")
    shipped = Path(layerskip.__file__).parent / "models" / "demo-llama"
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": 2048, "max_position_embeddings": 100_000}
    model = lively_model("llama", **sizes, eos_token_id=0, dtype=torch.float32)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    return folder


def test_answers_are_kept_to_a_grammar(spelling):
    result = talk(spelling, "a", "b", "/draft", flags=("--regex", "(yes|no), indeed"))
    first, second, shown, _, legend, _ = result.stdout.splitlines()
    assert {first, second} <= {"yes, indeed", "no, indeed"}
    assert re.fullmatch(r"(yes|no)\[, inde.*\].*", shown)
    assert "the only allowed token" in legend
    schema = spelling / "schema.json"
    schema.write_text('{"enum": [7]}')
    assert talk(spelling, "a", flags=("--json-schema", schema)).stdout == "7\n"
    words = refused("chat", spelling, "--json-schema", schema, "--regex", "a")
    assert "give --json-schema or --regex, not both" in words


@pytest.mark.parametrize("form", ["--json-schema", "--regex"])
def test_a_form_follows_reasoning_that_the_template_opens(spelling, tmp_path, form):
    """In every command; the text of the reasoning is free."""
    thinking, given = shutil.copytree(spelling, tmp_path / "thinking"), tmp_path / "given.jsonl"
    template = thinking / "chat_template.jinja"
    template.write_text(template.read_text() + "<think>\n{# </think> #}")
    schema, prompts = tmp_path / "schema.json", ['{"prompt": "a\\n"}', '{"messages": [M]}']
    schema.write_text('{"enum": [7]}')
    given.write_text("\n".join(prompts).replace("M", '{"role": "user", "content": "a"}'))
    flags = (form, schema if form == "--json-schema" else "7", "-n", 4)
    free = run("generate", thinking, "--prompt", "a", "--chat", *flags[2:], "--quiet").stdout
    assert free != "7\n"
    assert run("generate", spelling, "--prompt", "a", "--chat", *flags, "--quiet").stdout == "7\n"
    assert run("generate", thinking, "--prompt", "a", "--chat", *flags, "--quiet").stdout == free
    assert talk(thinking, "a", flags=flags).stdout == free
    both = document(run("generate", thinking, "--prompts", given, *flags, "--json"))["results"]
    assert [each["text"] for each in both] == ["7", free[:-1]]
    output = tmp_path / "output.jsonl"
    assert run("run", thinking, given, "--output", output, *flags).exit_code == 0
    rows = map(json.loads, output.read_text().splitlines())
    assert {each["id"]: each["text"] for each in rows} == {"1": "7", "2": free[:-1]}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("command", ["chat", "generate", "stream"])
def test_a_terminal_obeys_nothing_that_a_model_writes(command, spelling, monkeypatch):
    hostile = "a\x1b[2J\x1b]0;title\x07\x9b1m\rb\tc\n"
    how = [*DRAFT, "-n", "60", "--quiet", "--regex", re.escape(hostile)]
    lines = "say\n" + ("/draft\n" if command == "chat" else "")
    ask = [*(("generate", "--stream") if command == "stream" else (command,)), str(spelling), *how]
    monkeypatch.setenv("TERM", "dumb")
    for stdout in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        monkeypatch.setattr(sys, "stdout", stdout)
        cli.app(ask, standalone_mode=False)
        told = stdout.getvalue()
        if stdout.isatty():
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", told)
            assert r"a\x1b[2J\x1b]0;title\x07\x9b1m\x0db" in told
        else:
            assert told.startswith(hostile)


def test_errors_command_no_terminal_either(monkeypatch):
    for stderr in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stderr)
        ask = ["chat", "--json-schema", "no\x1b[2J.json"]
        assert cli.app(ask, standalone_mode=False) == 2
        name = r"no\x1b[2J.json" if stderr.isatty() else "no\x1b[2J.json"
        assert f"cannot read --json-schema {name}: " in stderr.getvalue()


def test_columns_keep_within_a_narrow_terminal(monkeypatch):
    rows = [*chatting.COMMANDS.items(), ("alone", "")]
    for columns in (12, 20, 34, 36, 60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = two_columns(rows)
        assert max(map(len, text.splitlines())) <= columns
        words = [word for row in rows for part in row for word in part.split()]
        assert "".join(text.split()) == "".join(words)


def test_pieces_wait_for_whole_characters():
    class Bytes:
        def decode(self, tokens, **_):
            return bytes(tokens).decode("utf-8", errors="replace")

    def round_(tokens, accepted, source):
        return Round(0, (tuple(tokens),), (accepted,), (accepted,), ((),), (False,), source)

    euro = "\u20ac".encode()
    rounds = [round_(b"a", 0, None), round_(b"bc" + euro[:2], 2, 0), round_(euro[2:] + b"d", 1, 1)]
    assert list(pieces(rounds, Bytes(), ["lookup", "sublayers"])) == [
        ("a", None),
        ("bc", "lookup"),
        ("\u20ac", "sublayers"),
        ("d", None),
    ]


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    line = refused("chat", save_checkpoint(tmp_path))
    assert "has no chat template" in line
    assert "smollm2" not in line  # which this machine may lack
    assert "layerskip generate" in line


def test_what_is_typed_during_an_answer_waits_for_the_next_message(spelling, monkeypatch):
    """In a real terminal: the answer does not show it, and Ctrl-C does not drop it."""
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    before, screen = termios.tcgetattr(theirs), ""

    def until(done):
        nonlocal screen
        begin = len(screen)
        while not done(screen[begin:]):
            assert select.select([ours], [], [], 60)[0], screen
            screen += os.read(ours, 4096).decode(errors="replace")

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    child = process(
        *("chat", spelling, *DRAFT, "-n", 90_000),
        **streams,
        preexec_fn=partial(os.login_tty, theirs),
    )
    try:
        until(lambda new: ">" in new and new.endswith("\x1b[?25h"))
        os.write(ours, b"say\r")
        until(lambda new: len(new.partition("[?2004l")[2]) > 50)  # the answer has begun
        os.write(ours, b"typed\x7fD ahead")
        until(lambda new: len(new) > 500)
        assert "type" not in screen.partition("[?2004l")[2]
        os.write(ours, b"\x03")
        until(lambda new: "(stopped)" in new and "typeD ahead" in new)
        os.write(ours, b"\x15\x04")  # clear the line, and end
        until(lambda new: "[?2004l" in new)
        assert child.wait(60) == 0
    finally:
        child.kill()
    assert "^C" not in screen
    assert "Loading weights" not in screen  # no bar of the library
    assert termios.tcgetattr(theirs) == before


def test_lines_are_typed_with_a_history():
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        lines = typed_lines()
        keys.send_text("first\r")
        assert next(lines) == "first"
        keys.send_text("\x1b[A\r")  # arrow up
        assert next(lines) == "first"
        keys.send_text("two\x1b\rlines\r")  # Alt-Enter
        assert next(lines) == "two\nlines"
        keys.send_text("dropped\x03kept\r")  # Ctrl-C
        assert next(lines) == "kept"
        keys.send_text("\x04")  # Ctrl-D
        assert list(lines) == []
