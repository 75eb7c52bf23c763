"""Formats of tool calls and reasoning, read in pieces of any size and enforced by grammars."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import layerskip
from layerskip.serving.answers import merged
from layerskip.serving.formats import FORMATS, REASONING, format_of, reasoning_of
from layerskip.serving.formats.answer_reader import Reader
from layerskip.texts.grammars import lark

MESSY = '{"x": "a}\\"<tool_call>", "y": [1, {"z": 2}]}'
F, G, NAMES = ("f", '{"x": 1}'), ("g", "{}"), ("f", "g", "weather", "now")
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
    *(
        ("llama3", text, text, [])  # only looks like a call
        for text in (
            '{"age": 3}',
            '{"name": "Alice", "age": 30}',
            '{"name": "Alice", "parameters": {"x": 1}} ok',
            '{"name": "f", "age": 30}',
            '{"name": "f", "parameters": 5}',
            'Say {"name": "f"}',
        )
    ),
    *(
        (name, text, text, [])
        for name, text in (
            ("hermes", '<tool_call>{"name": "Alice", "arguments": {}}</tool_call> ok'),
            ("mistral", '[TOOL_CALLS][{"name": "Alice", "arguments": {}}]'),
            ("mistral-named", '[TOOL_CALLS]Alice[ARGS]{"x": 1}'),
            ("gemma4", "<|tool_call>call:Alice{x:1}<tool_call|> ok"),
            ("gemma4", "<|tool_call>call:f{x:NaN}<tool_call|> ok"),
        )
    ),
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
        [("f", '{"x":"a,b}","l":[1,2.5],"o":{"k":true}}'), G],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{$filter:<|"|><tool_call|>"<|"|>,Basic LLM Chain:1e999,'
        '<|"|>a:b<|"|>:null}<tool_call|>',
        "",
        [("f", '{"$filter":"<tool_call|>\\"","Basic LLM Chain":1e999,"a:b":null}')],
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
        [("f", '{"x":"Paris"}')],
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
        assert told(Reader(FORMATS[name], NAMES), text, size) == (content, "", calls), text


def test_arguments_are_told_before_a_call_ends():
    reader = Reader(FORMATS["hermes"], NAMES)
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
        assert told(Reader(hermes, NAMES, think, inside=inside), text, size) == expected


def test_of_calls_that_may_not_be_parallel_the_first_counts():
    name, text, content, calls = READ[0]
    assert told(Reader(FORMATS[name], NAMES, several=False), text, 5) == (content, "", calls[:1])


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


@pytest.fixture(scope="module")
def marked():
    """The same with a token for each mark."""
    made = AutoTokenizer.from_pretrained(Path(layerskip.__file__).parent / "models" / "demo-llama")
    made.add_tokens([mark for each in FORMATS.values() for mark in each.marks])
    return made


def walk(grammar, tokenizer, seed):
    """A random text of a grammar, with short strings."""
    state, tokens = grammar.start(), list[int]()
    generator = torch.Generator().manual_seed(seed)
    for step in range(300):
        allowed = state.mask(torch.zeros(len(tokenizer))) == 0  # (V,)
        weights = allowed.double()
        weights[tokenizer.eos_token_id] *= 1000
        if step > 40:  # prefers the ends of strings and numbers
            weights[tokenizer.convert_tokens_to_ids(['"', "}", "]", ":"])] *= 1000
            weights[tokenizer.convert_tokens_to_ids(['<|"|>', "<escape>"])] *= 1e6
        token = int(torch.multinomial(weights, 1, generator=generator))
        if token == tokenizer.eos_token_id:
            return str(tokenizer.decode(tokens))
        tokens.append(token)
        state.advance(token)
    pytest.fail("no end")


def calls_of(name, text):
    content, _, calls = told(Reader(FORMATS[name], NAMES), text, 11)
    assert content == ""
    return [(called, json.loads(arguments)) for called, arguments in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_its_grammar_are_read_as_calls(name, marked):
    """The tools' arguments have schemas; one call or several."""
    ids = marked.get_added_vocab()
    for several in (False, True):
        rules = FORMATS[name].grammar(TOOLS, several, lambda mark: f"<[{ids[mark]}]>")
        grammar = lark(f"start: calls\n{rules}", marked)
        seen = set()
        for seed in range(8):
            calls = calls_of(name, walk(grammar, marked, seed))
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


def grammar_of(name, parameters, tokenizer, mark=json.dumps):
    rules = FORMATS[name].grammar([{"name": "f", "parameters": parameters}], False, mark)
    return lark(f"start: calls\n{rules}", tokenizer)


def fits(grammar, text):
    state, tokens = grammar.start(), grammar.tokenizer.encode(text, add_special_tokens=False)
    return state.matcher.try_consume_tokens(tokens) == len(tokens) and state.matcher.is_accepting()


def written(name, arguments):
    """A call as chat templates write it; keys and strings of Gemma 4 stand as they are."""
    whole = json.dumps(arguments, ensure_ascii=False)
    match name:
        case "hermes":
            return f'<tool_call>\n{{"name": "f", "arguments": {whole}}}\n</tool_call>'
        case "llama3":
            return f'{{"name": "f", "parameters": {whole}}}'
        case "mistral":
            return f'[TOOL_CALLS][{{"name": "f", "arguments": {whole}}}]'
        case "mistral-named":
            return f"[TOOL_CALLS]f[ARGS]{whole}"
    form = FORMATS[name]
    return f"{form.begin}call:f{bare(arguments, form.quote)}{form.end}"


def bare(value, quote):
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            keys = {k: f"{quote}{k}{quote}" if {*k} & {*":<,"} else k for k in value}
            pairs = (f"{keys[k]}:{bare(each, quote)}" for k, each in value.items())
            return f"{{{','.join(pairs)}}}"
        case list():
            return f"[{','.join(bare(each, quote) for each in value)}]"
    return json.dumps(value)


V = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
KIDS = {"kids": {"type": "array", "items": {"$ref": "#/$defs/N"}}}
DEFS = {"N": V | {"properties": V["properties"] | KIDS}, "A": {"type": "null"}}
ODD = ["<|", 1, None, {"a:b": ["", 0.5]}]
HELD = [  # schemas, values that fit, and values that do not
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 9}, [3, 8], [2, 9, 3.5]),
    ({"type": "number", "multipleOf": 0.5}, [1.5, 2], [1.2]),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "é<"], ["", "abc"]),
    ({"type": "string", "pattern": "^(a|/)+$"}, ["a/a"], ["ab", ""]),
    ({"type": "string", "pattern": "\\d[|]"}, ["x1|y"], ["x|", "٣|"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-06-31", "٢024-02-29"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00.5Z"], ["2024-02-29"]),
    ({"type": "array", "minItems": 1, "maxItems": 2}, [[1], ["a", {}]], [[], [1, 2, 3]]),
    ({"type": "object"}, [{}, {"b": {"c": []}}], [[], "a"]),
    ({"type": ["string", "null"], "enum": ["a", None, 1]}, ["a", None], ["b", 1]),
    ({"enum": ODD}, ODD, [0, {}]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, [1, None], ["a"]),
    ({"allOf": [{"$ref": "#/$defs/N"}]}, [{"v": 1, "kids": [{"v": 2}]}], [{}, {"v": "a"}]),
    ({"properties": {"b": {}}, "required": ["c"]}, [{"b": 1, "c": 2}, {"c": 1}, "a"], [{"b": 1}]),
    ({"properties": {"properties": {"type": "null"}}}, [{"properties": None}], [{"b": 1}]),
]
ROOTS = [  # the same of whole parameters
    ({"properties": {"a": V, "b": {"$ref": "#/properties/a"}}}, {"b": {"v": 1}}, {"b": {}}),
    ({"properties": {"a": {"$ref": "#/definitions/V"}}, "definitions": {"V": V}}, {}, {"a": 1}),
    ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, {"a": [{}]}, {"a": [1]}),
    ({"$ref": "#/$defs/N", "$defs": DEFS}, {"v": 1, "kids": [{"v": 2}]}, {}),
]
PIECES = [
    "a",
    "é😀",
    '"',
    "\\",
    "\n",
    " ",
    "<",
    "<tool_call|>",
    "</tool_call>",
    "}",
    "7:",
    "[ARGS]",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
NUMBERS = st.integers(-(10**20), 10**20) | st.sampled_from([0.5, -1e-07, 3e300])
KEYS = ["a", "b", "$filter", "Basic LLM Chain", "a:b", "<k", '"q"', "properties"]
ANY = st.recursive(
    TEXTS | NUMBERS | st.sampled_from([True, False, None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS[:4]), inner),
    max_leaves=4,
)


def asking(schema):
    return {"properties": {"a": schema}, "required": ["a"], "$defs": DEFS}


@st.composite
def schemas(draw, deep=2):
    """A schema, and its values."""
    held, good, _ = draw(st.sampled_from(HELD))
    kinds = [({}, ANY), ({"type": "string"}, TEXTS), (held, st.sampled_from(good))]
    if deep:
        inner, values = draw(schemas(deep - 1))
        kinds += [
            ({"type": "array", "items": inner}, st.lists(values, max_size=3)),
            ({"additionalProperties": inner}, st.dictionaries(st.sampled_from(KEYS[:4]), values)),
            ({"anyOf": [{"type": "boolean"}, inner]}, st.booleans() | values),
            draw(objects(deep)),
        ]
    return draw(st.sampled_from(kinds))


@st.composite
def objects(draw, deep=2):
    names = draw(st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    made = {name: draw(schemas(deep - 1)) for name in names}
    needed = [name for name in names if draw(st.booleans())]
    schema = {"type": "object", "properties": {name: made[name][0] for name in names}}
    every = st.fixed_dictionaries({name: made[name][1] for name in names})
    left_out = st.sets(st.sampled_from(names)) if names else st.just(set())
    return schema | {"required": needed, "additionalProperties": False}, st.builds(
        lambda found, less: {n: found[n] for n in names if n in needed or n not in less},
        every,
        left_out,
    )


@settings(max_examples=40)
@given(objects(), st.data())
def test_what_is_written_to_a_schema_is_read_again(tokenizer, made, data):
    """By the grammar of each format and by its reader; random schemas and values."""
    value = data.draw(made[1])
    for name in FORMATS:
        text = written(name, value)
        assert fits(grammar_of(name, made[0] | {"$defs": DEFS}, tokenizer), text), text
        assert calls_of(name, text) == [("f", value)]


def test_keywords_and_references_are_held_in_every_format(tokenizer):
    rows = [
        (asking(schema), [{"a": each} for each in good], [{"a": each} for each in bad])
        for schema, good, bad in HELD
    ]
    for name in FORMATS:
        for schema, good, bad in rows + [(root, [good], [bad]) for root, good, bad in ROOTS]:
            grammar = grammar_of(name, schema, tokenizer)
            assert all(fits(grammar, written(name, value)) for value in good), schema
            assert not any(fits(grammar, written(name, value)) for value in bad), schema


def test_strings_do_not_spell_the_mark_that_ends_them(marked):
    end = marked.convert_tokens_to_ids('<|"|>')
    state = grammar_of("gemma4", asking({"type": "string"}), marked, lambda _: f"<[{end}]>").start()
    ids = [marked.encode(each, add_special_tokens=False) for each in ("call:f{a:", '"<|x>', "}")]
    spelled = marked.convert_tokens_to_ids(["<", "|", '"', "|", ">"])
    tokens = [end, *ids[0], end, *ids[1], *spelled]
    assert state.matcher.try_consume_tokens(tokens) == len(tokens) - 1
    assert state.matcher.try_consume_tokens([end, *ids[2], end]) == 2 + len(ids[2])


def test_what_has_no_rule_is_refused_by_name(tokenizer):
    for schema, words in (
        ({"const": '<|"|>'}, "cannot be written"),
        ({"type": "string", "pattern": "^a|b$"}, "no rule for 'pattern'"),
        ({"type": "string", "format": "ipv6"}, "no rule for 'format'.*leave it out"),
        ({"type": "array", "prefixItems": [{}]}, "no rule for 'prefixItems'"),
        ({"anyOf": [{}], "minimum": 1}, "no rule for 'minimum'"),
        ({"allOf": [{}, {}]}, "no rule for 'allOf'"),
        ({"$ref": "#/$defs/A", "type": "string"}, "no rule for 'type'"),
        ({"type": "colour"}, "Invalid type: colour$"),
    ):
        with pytest.raises(ValueError, match=words):
            grammar_of("gemma4", asking(schema), tokenizer)
