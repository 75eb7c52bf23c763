"""Formats of tool calls and reasoning, read in pieces of any size and enforced by grammars."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import layerskip
from layerskip.grammars import lark
from layerskip.serving.answers import merged
from layerskip.serving.formats import FORMATS, REASONING, format_of, reasoning_of
from layerskip.serving.formats.reading import Reader

MESSY = '{"x": "a}\\"<tool_call>", "y": [1, {"z": 2}]}'
F, G = ("f", '{"x": 1}'), ("g", "{}")
READ = [
    (
        "hermes",
        f'Look.\n<tool_call>\n{{"name": "f", "arguments": {MESSY}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>',
        "Look.\n",
        [("f", MESSY), G],
    ),
    ("hermes", '<tool_call>{"nam": 3}</tool_call> ok', '<tool_call>{"nam": 3}</tool_call> ok', []),
    ("hermes", "plain < text <tool_cal", "plain < text <tool_cal", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [F]),
    ("hermes", "\n\n", "\n\n", []),
    (
        "llama3",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        "",
        [F, G],
    ),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [F]),
    ("llama3", '{"age": 3}', '{"age": 3}', []),
    ("llama3", 'Say {"name": "f"}', 'Say {"name": "f"}', []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [F, G],
    ),
    ("mistral", 'Hm.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{}', "Hm.", [F, G]),
    ("mistral", "[TOOL_CALLS] no call, {", "[TOOL_CALLS] no call, {", []),
    (
        "gemma4",
        '<|tool_call>call:f{x:<|"|>a,b}<|"|>,l:[1,2.5],o:{k:true}}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>",
        "",
        [("f", '{"x": "a,b}", "l": [1, 2.5], "o": {"k": true}}'), G],
    ),
    ("gemma4", "<|tool_call>call:f{x<tool_call|>done", "<|tool_call>call:f{x<tool_call|>done", []),
    *(
        (name, begin + "[" * 5000 + end, begin + "[" * 5000 + end, [])
        for name, begin, end in (
            ("gemma4", "<|tool_call>call:f{x:", "<tool_call|>"),
            ("hermes", '<tool_call>{"name": ', "]" * 5000 + "}</tool_call>"),
        )
    ),
    (
        "functiongemma",
        "<start_function_call>call:f{x:<escape>Paris<escape>}<end_function_call>",
        "",
        [("f", '{"x": "Paris"}')],
    ),
]


def told(reader, text, size):
    """Content, reasoning and calls that are read from a text in pieces of one size."""
    deltas = [
        each for at in range(0, len(text), size) for each in reader.feed(text[at : at + size])
    ]
    whole = merged([*deltas, *reader.feed("", True)])
    calls = [each["function"] for each in whole.get("tool_calls", ())]
    return (
        whole.get("content", ""),
        whole.get("reasoning_content", ""),
        [(each["name"], each["arguments"]) for each in calls],
    )


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_read_whatever_pieces_they_come_in(size):
    for name, text, content, calls in READ:
        assert told(Reader(FORMATS[name]), text, size) == (content, "", calls), text


def test_arguments_are_told_before_a_call_ends():
    reader = Reader(FORMATS["hermes"])
    first = reader.feed('<tool_call>{"name": "f", "arguments": {"path": "a')
    assert first[0]["tool_calls"][0]["function"]["name"] == "f"
    more = reader.feed('b", "n')
    assert more == [{"tool_calls": [{"index": 0, "function": {"arguments": 'b", "n'}}]}]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_reasoning_is_apart_from_content_and_calls(size):
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    think, hermes = REASONING["think"], FORMATS["hermes"]
    for text, inside, expected in (
        ("<think>a < b</think>\n\nHi", False, ("Hi", "a < b", [])),
        ("a\n</think>\n\nHi " + call, True, ("Hi ", "a\n", [F])),
        ("cut off", True, ("", "cut off", [])),
        ("no <thought>", False, ("no <thought>", "", [])),
        (f"<think>{call}</think>" + call, False, ("", call, [F])),
    ):
        assert told(Reader(hermes, think, inside=inside), text, size) == expected


def test_of_calls_that_may_not_be_parallel_the_first_counts():
    name, text, content, calls = READ[0]
    assert told(Reader(FORMATS[name], several=False), text, 5) == (content, "", calls[:1])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call> {{ name }}", "hermes"),
        ("<|python_tag|>", "llama3"),
        ('{% if role == "ipython" %} {"name": ..., "parameters": ...}', "llama3"),
        ("[TOOL_CALLS] [AVAILABLE_TOOLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", "mistral-named"),
        ("<|tool_call>call:", "gemma4"),
        ("<start_function_call>", "functiongemma"),
        ("<tool_call><function=", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_format(template, name):
    assert format_of("auto", template) is (None if name is None else FORMATS[name])
    assert format_of("none", template) is None


def test_formats_by_name():
    assert format_of("llama3", "<tool_call>") is FORMATS["llama3"]
    assert reasoning_of("auto", "... </think>") == ("<think>", "</think>")
    assert reasoning_of("auto", "") is None
    for choose, flag in ((format_of, "tool-parser"), (reasoning_of, "reasoning-parser")):
        with pytest.raises(ValueError, match=f"--{flag} must be auto, none, .*got 'magic'"):
            choose("magic", "")


TOOLS = [
    {
        "name": "weather",
        "parameters": {
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "where": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["city", "days"],
        },
    },
    {"name": "now", "parameters": {}},
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(layerskip.__file__).parent / "models" / "demo-llama")


def walk(grammar, tokenizer, seed):
    """A random text of a grammar, with short strings."""
    state, tokens = grammar.start(), list[int]()
    generator = torch.Generator().manual_seed(seed)
    for step in range(300):
        allowed = state.mask(torch.zeros(2048)) == 0  # (V,)
        weights = allowed.double()
        weights[tokenizer.eos_token_id] *= 1000
        if step > 40:  # prefers the ends of strings and numbers
            for token in tokenizer.convert_tokens_to_ids(['"', "}", "<", "]"]):
                weights[token] *= 1000
        token = int(torch.multinomial(weights, 1, generator=generator))
        if token == tokenizer.eos_token_id:
            return str(tokenizer.decode(tokens))
        tokens.append(token)
        state.advance(token)
    pytest.fail("no end")


def calls_of(name, text):
    content, _, calls = told(Reader(FORMATS[name]), text, 11)
    assert content == ""
    return [(called, json.loads(arguments)) for called, arguments in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_its_grammar_are_read_as_calls(name, tokenizer):
    """The tools' arguments have schemas; one call or several."""
    for several in (False, True):
        rules = FORMATS[name].grammar(TOOLS, several, json.dumps)
        grammar = lark(f"start: calls\n{rules}", tokenizer)
        seen = set()
        for seed in range(8):
            calls = calls_of(name, walk(grammar, tokenizer, seed))
            assert len(calls) == 1 or (several and calls)
            for called, arguments in calls:
                seen.add(called)
                if called == "weather":
                    assert isinstance(arguments["city"], str)
                    assert isinstance(arguments["days"], int)
                    assert arguments.get("unit", "C") in ("C", "F")
                    assert all(isinstance(x, int | float) for x in arguments.get("where", ()))
                else:
                    assert called == "now"
        assert seen == {"weather", "now"}


def test_a_schema_without_a_type_is_refused_where_calls_are_no_json():
    tool = {"name": "f", "parameters": {"properties": {"x": {"anyOf": []}}}}
    with pytest.raises(ValueError, match="a schema of a tool must say type, enum or const"):
        FORMATS["gemma4"].grammar([tool], False, json.dumps)
