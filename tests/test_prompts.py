"""Prompt files: their forms, and errors that name the line."""

import json
from collections import Counter
from pathlib import Path

import pytest

from layerskip.cli.inputs import read_given
from layerskip.config.shipped import COPYING, NAMED_PROMPTS, SPEC_BENCH
from layerskip.texts.prompts import Prompt, read_prompts

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
BODY = {"model": "any", "messages": CHAT, "max_tokens": 5}


def write(path, *lines):
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_json_lines_of_every_kind(tmp_path):
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "def f(x):\n", "category": "code", "id": "a"},
        {"messages": CHAT},
        "",
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
        {"question_id": 81, "category": "writing", "turns": ["First", "Second"], "reference": []},
        {"prompt": "Hello", "max_tokens": 5, "max_new_tokens": None},
    )
    prompts = read_prompts(path, strict=True)
    old = {"text", "messages", "response_format", "body"}  # in fingerprints of rows
    assert [each.content.keys() - old for each in prompts] == [{*()}] * 4 + [{"max_new_tokens"}]
    assert prompts == [
        Prompt(id="a", text="def f(x):\n", category="code"),
        Prompt(id="2", messages=tuple(CHAT)),
        Prompt(id="b", messages=tuple(CHAT), body=BODY),
        Prompt(id="81", text="First", category="writing"),
        Prompt(id="6", text="Hello", max_new_tokens=5),
    ]


def test_plain_text_is_one_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffOnce upon a time\r\n\r\n  {indented\u2028ünicode\n".encode())
    assert read_prompts(path) == [
        Prompt(id="1", text="Once upon a time"),
        Prompt(id="3", text="  {indented\u2028ünicode"),
    ]


def test_json_is_recognised_whatever_the_name(tmp_path):
    path = write(tmp_path / "prompts.txt", {"prompt": "Hello"}, {"prompt": "Bye"})
    assert [prompt.text for prompt in read_prompts(path)] == ["Hello", "Bye"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "Hel', "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('["Hello"]', r"must be a JSON object, got \['Hello'\]"),
        ({"text": "Hello"}, r"one of prompt, messages or turns, got the keys \['text'\]"),
        ({"prompt": "Hello", "turns": ["Hello"]}, "one of .*, got prompt and turns"),
        ({"prompt": " \n"}, "prompt must not be empty"),
        ({"prompt": 3}, "prompt must be a string, got 3"),
        ({"turns": []}, "turns must have at least 1 items, got 0"),
        ({"turns": "Hello"}, "turns must be a list"),
        ({"turns": [""]}, "must not be empty"),
        ({"messages": ["Hello"]}, "must be a JSON object, got 'Hello'"),
        ({"messages": [{"content": "Hello"}]}, "role is missing"),
        ({"messages": [{"role": "user", "content": ""}]}, "content must not be empty"),
        ({"prompt": "Hello", "category": 4}, "category must be a string, got 4"),
        ({"prompt": "Hello", "id": True}, "id must be a string or an integer, got True"),
        ({"body": {"prompt": "Hello"}}, "custom_id must be a string"),
        ({"custom_id": "a", "body": {}}, "body must hold either prompt or messages"),
        ({"custom_id": "a", "body": {"messages": []}}, "body.messages must have at least 1 items"),
        ({"prompt": "Hello", "max_tokens": 0}, "max_tokens must be 1 or more, got 0"),
        ({"prompt": "x", "max_tokens": 2, "max_new_tokens": 3}, "give one of them"),
        ({"prompt": "Hello", "id": 1}, "id must be unique, got '1' again"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "prompts.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert f"{path}, line 3: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((empty, "{} are empty") for empty in (b"", b"\n \r\n", b"\xef\xbb\xbf")),
        (None, "cannot read prompts {}: "),
        ("caf\xe9".encode("latin-1"), "{}: not UTF-8: .* at byte 3"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, content, message):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    for file in (path, tmp_path) if content is None else (path,):
        with pytest.raises(ValueError, match=message.format(file)):
            read_prompts(file)


def test_text_becomes_what_a_user_says():
    text = Prompt(id="a", text="Hello", category="talk")
    said = ({"role": "user", "content": "Hello"},)
    assert text.as_chat() == Prompt(id="a", messages=said, category="talk")
    chat = Prompt(id="b", messages=tuple(CHAT))
    assert chat.as_chat() == chat


def test_the_shipped_sample_of_spec_bench():
    prompts = read_prompts(SPEC_BENCH)
    counts = Counter(prompt.category for prompt in prompts)
    assert len(counts) == 9
    assert set(counts.values()) == {4}
    # the licences of the other categories do not allow redistribution
    assert not counts.keys() & {"translation", "summarization", "qa", "rag"}
    terms = (SPEC_BENCH.parent / "README.md").read_text()
    assert all(f"`{category}`" in terms for category in counts)
    assert "Copyright (c) 2021 OpenAI" in terms


def test_the_shipped_requests_to_copy():
    """Each prompt contains the text to copy from, which is most of it."""
    prompts = read_prompts(COPYING)
    assert Counter(prompt.category for prompt in prompts) == {
        "summarise": 3,
        "retrieval": 3,
        "editing": 3,
    }
    for prompt in prompts:
        text, _, request = prompt.text.rpartition("\n\n")
        assert len(text) > 2 * len(request) > 0


def test_a_file_of_ones_own_goes_before_a_sample_of_its_name(tmp_path, monkeypatch):
    assert read_given(Path("copying")) == read_prompts(NAMED_PROMPTS["copying"])
    monkeypatch.chdir(tmp_path)
    Path("copying").write_text("Once\n")
    assert [prompt.text for prompt in read_given(Path("copying"))] == ["Once"]
