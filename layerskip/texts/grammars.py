"""Constrains text to a grammar: logits processors made from a JSON schema or a regular expression.

llguidance computes the allowed tokens. A grammar applies to the new tokens, not to the prompt.
Shapes: B rows, W tokens of a row so far, V vocabulary of the scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerskip.errors import LayerskipError

IN_A_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for JSON on one line, as by `json.dumps`."""
_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_COMBINED = ("allOf", "anyOf", "oneOf", "not", "if", "$ref")  # keywords that add other schemas
_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
}
_VALUES = ("const", "enum", "default", "examples")  # keywords that hold values, not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keywords of schemas by name
_MOST = 10**5  # of multipleOf: compilation takes memory and time in proportion to it


class GrammarLimit(LayerskipError):
    """A text needs more of its grammar than llguidance computes."""


class Grammar:
    """The state of a text in a grammar (see `layerskip.decoding.laws.Stateful`).

    End tokens are allowed exactly where the grammar may end; nothing else may follow its end.

    It is also a logits processor for transformers' own `generate()`, where one object serves one
    thread.

    Args:
        compiled: llguidance's matcher at the beginning of a text.
        eos: tokens that end a text.
        tokenizer: the tokenizer for which the grammar was made.
    """

    def __init__(self, compiled: Any, eos: Sequence[int], tokenizer: Any) -> None:
        self.compiled, self.eos, self.tokenizer = compiled, eos, tokenizer
        self.matcher = compiled.deep_copy()
        self._past_end = 0  # tokens after the grammar's end, which the matcher does not see
        self._called: list[list[int]] = []  # the rows in the last call of `__call__`
        self._width = 0  # number of their prompt tokens
        self._rows: list[Grammar] = []

    def start(self) -> Grammar:
        """Return the same grammar at the beginning of a text."""
        return type(self)(self.compiled, self.eos, self.tokenizer)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (B, V) for the tokens so far (B, W), like any logits processor.

        A text begins at the first call with its prompt, and grows by one token per call.

        Raises:
            ValueError: a row has grown differently.
        """
        rows, last, width = input_ids.tolist(), self._called, self._width
        begun = [row[:width] for row in rows] == [row[:width] for row in last]
        if not begun or len(rows[0]) == width:
            self._width, self._rows = len(rows[0]), [self.start() for _ in rows]
        elif [row[:-1] for row in rows] != last:
            raise ValueError(
                "a grammar must see all rows grow by one token at a time; leave out beams and "
                "assistants, and give each call of generate() a grammar.start() of its own"
            )
        else:
            for state, row in zip(self._rows, rows, strict=True):
                state.advance(row[-1])
        self._called = rows
        processed = [state.mask(each) for state, each in zip(self._rows, scores, strict=True)]
        return torch.stack(processed)  # (B, V)

    def forced(self) -> list[int]:
        """Return the tokens that must follow here, as far as they are known. Other tokens may spell
        the same text."""
        tokens: list[int] = [] if self._past_end else self.matcher.compute_ff_tokens()
        return tokens

    def advance(self, token: int) -> None:
        """Advance by a token. After a token that is not allowed, the text has ended."""
        if self._past_end or token in self.eos or not self.matcher.try_consume_tokens([token]):
            self._past_end += 1

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        past_end = min(count, self._past_end)
        self._past_end -= past_end
        if count > past_end:
            self.matcher.rollback(count - past_end)

    def mask(self, scores: Tensor) -> Tensor:
        """Set the scores (V,) of every token that is not allowed here to -inf.

        V may be larger than the tokenizer's vocabulary, as with padded heads, or smaller.
        """
        allowed = np.zeros(len(scores), dtype=bool)  # (V,)
        packed = b"" if self._past_end else self.matcher.compute_bitmask()
        if self.matcher.is_error():
            raise GrammarLimit(f"the grammar failed: {_reason(self.matcher)}; simplify it")
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
        allowed[: len(bits)] = bits[: len(scores)]
        ends = [token for token in self.eos if token < len(scores)]
        allowed[ends] = self._past_end > 0 or self.matcher.is_accepting()
        here = torch.from_numpy(allowed).to(scores.device)  # (V,)
        return scores.masked_fill(~here, -float("inf"))


def response_format(
    given: Mapping[str, Any],
    tokenizer: Any,
    *,
    eos: Sequence[int] | None = None,
    after: str | None = None,
) -> list[Grammar]:
    """Convert OpenAI's `response_format` to logits processors; there are none for text.

    Arguments are those of `json_schema`.

    Raises:
        ValueError: the format is unknown, or as for `json_schema`.
    """
    match given:
        case {"type": "text", **more} if not more:
            return []
        case {"type": "json_object", **more} if not more:
            schema: dict[str, Any] = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **about}, **more} if (
            not more and about.keys() <= {"name", "description", "strict"}
        ):
            pass
        case _:
            raise ValueError(
                'response_format must be {"type": "json_schema", "json_schema": {"schema": ...}} '
                "(there with a name, a description and strict, if you like), "
                '{"type": "json_object"} or {"type": "text"}'
            )
    return [json_schema(schema, tokenizer, eos=eos, after=after)]


def json_schema(
    schema: Mapping[str, Any] | str,
    tokenizer: Any,
    *,
    eos: int | Sequence[int] | None = None,
    whitespace: bool = False,
    after: str | None = None,
) -> Grammar:
    """Make a logits processor that restricts new text to JSON that matches a schema.

    Pass it as `logits_processor=[...]` to `layerskip.generate`, `decode` or `model.generate()`,
    with or without `LayerSkipDecoding`. With it, one object serves any number of threads.

    An object whose schema lists `properties` but not `additionalProperties` gets no further ones,
    since these could repeat a name.

    Args:
        schema: a JSON schema, as a mapping or as JSON text.
        tokenizer: the model's fast tokenizer.
        eos: tokens that end a text; by default the tokenizer's.
        whitespace: whether whitespace is allowed between JSON tokens; if not, the JSON is written
            on one line, as by `json.dumps`.
        after: a mark, as `</think>`, up to which the text is free; the JSON follows it.

    Raises:
        ValueError: the schema is invalid or cannot be satisfied, or llguidance is not installed or
            does not support the schema or the tokenizer.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"a JSON schema must be JSON: {error}") from error
    if not isinstance(schema, Mapping):
        kind = type(schema).__name__
        raise ValueError(f"a JSON schema must be an object, such as {{}} for any, got a {kind}")
    grammar = _library().LLMatcher.grammar_from_json_schema(
        close_objects(schema), overrides={} if whitespace else IN_A_LINE
    )
    return _compiled(grammar, tokenizer, eos, after)


def regex(
    pattern: str,
    tokenizer: Any,
    *,
    eos: int | Sequence[int] | None = None,
    after: str | None = None,
) -> Grammar:
    r"""Make a logits processor for new text that as a whole matches a regular expression.

    Classes such as `\d` are ASCII-only; a leading `(?u)` makes them Unicode. Arguments and errors
    are those of `json_schema`.
    """
    if not pattern.startswith("(?u)"):
        pattern = re.sub(r"\\(.)", _ascii, pattern, flags=re.DOTALL)
    return _compiled(_library().LLMatcher.grammar_from_regex(pattern), tokenizer, eos, after)


def lark(
    grammar: str,
    tokenizer: Any,
    *,
    eos: int | Sequence[int] | None = None,
    after: str | None = None,
) -> Grammar:
    """Make a logits processor that restricts new text to a grammar in llguidance's Lark syntax.

    Arguments and errors are those of `json_schema`.
    """
    given = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    return _compiled(given, tokenizer, eos, after)


def search_terminal(pattern: str) -> str | None:
    """A Lark terminal for the strings in which a schema's pattern is found.

    None if it has anchors elsewhere than around the whole.
    """
    plain = re.sub(r"\\.|\[(?:\\.|[^]\\])*\]", "x", pattern, flags=re.DOTALL)
    begin, end = plain.startswith("^"), plain.endswith("$")
    inner, outer = plain[begin : len(plain) - end], None
    if "^" in inner or "$" in inner:
        return None
    while outer != inner:  # without groups
        outer, inner = inner, re.sub(r"\([^()]*\)", "", inner)
    if "|" in inner and (begin or end):
        return None
    core = _library().regex_to_lark(pattern[begin : len(pattern) - end], "dw")
    return f"/{'' if begin else '(?s:.*)'}({core}){'' if end else '(?s:.*)'}/"


def _ascii(escaped: re.Match[str]) -> str:
    """Expand a backslash class to ASCII; leave any other escape as it is."""
    name = escaped[1]
    among = _ASCII.get(name.lower())
    if among is None:
        return escaped[0]
    return f"[{among}]" if name.islower() else f"[^{among}]"


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all schema objects inside a schema, but not the values that it lists."""
    if isinstance(value, dict):
        yield value
        named = [[*value[name].values()] for name in _NAMED if isinstance(value.get(name), dict)]
        others = [each for name, each in value.items() if name not in (*_VALUES, *_NAMED)]
        value = [*named, *others]
    if isinstance(value, list):
        for each in value:
            yield from _schemas(each)


def _refuse_cycles(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Reject references that lead back to themselves, since nothing can match them."""
    seen: list[Any] = []
    while isinstance(schema, dict) and isinstance(place := schema.get("$ref"), str):
        if place in seen:
            raise ValueError(f"a JSON schema has references that form a cycle: {place}")
        seen.append(place)
        schema = referenced(place, root)


def referenced(place: str, root: Any) -> Any:
    """The part of a schema that a reference, as `#/$defs/A`, means; None if there is none."""
    for part in place.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Add `additionalProperties: false` where a schema lists properties but does not mention it.

    A schema that combines others gets none, since one may add properties to another. Formats of
    strings that are not known are left out, as annotations.

    Raises:
        ValueError: references form a cycle, or a `multipleOf` is too large to be compiled.
    """
    copied: dict[str, Any] = json.loads(json.dumps(dict(schema)))
    every = list(_schemas(copied))
    for each in every:
        _refuse_cycles(each, copied)
        if isinstance(form := each.get("format"), str) and form not in _FORMATS:
            del each["format"]
        if isinstance(step := each.get("multipleOf"), int | float) and step > _MOST:
            raise ValueError(f"multipleOf must be at most {_MOST} in a JSON schema, got {step}")
    if any("properties" in each and each.keys() & {*_COMBINED} for each in every) or any(
        "allOf" in each for each in every
    ):
        return copied
    for each in every:
        listed, required = each.get("properties"), each.get("required", ())
        others = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
        if isinstance(listed, dict) and not each.keys() & others and {*required} <= listed.keys():
            each["additionalProperties"] = False
    return copied


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(
            "llguidance is not installed; run pip install 'layerskip[grammars]'"
        ) from error
    return llguidance


def _after_mark(mark: str, grammar: str, tokenizer: Any) -> str:
    """Put free text up to the first occurrence of a mark, and up to two spaces, before a grammar.

    If the mark is one token, it ends the text; its characters cannot be spelled by others.
    """
    given = json.loads(grammar)
    given["grammars"][0]["name"] = "answer"
    text, spelled = "/(?s:.*)/", json.dumps(mark)
    if (token := tokenizer.get_added_vocab().get(mark)) is None:
        head = f"start: free SPACE @answer\nfree[lazy]: TEXT\nTEXT: {text} {spelled}"
    else:
        head = f"start: TEXT <[{token}]> SPACE @answer\nTEXT: {text} & ~({text} {spelled} {text})"
    first = {"lark_grammar": f"{head}\nSPACE: /\\s{{0,2}}/"}
    return json.dumps({**given, "grammars": [first, *given["grammars"]]})


def _compiled(
    grammar: str, tokenizer: Any, eos: int | Sequence[int] | None, after: str | None = None
) -> Grammar:
    given = tokenizer.eos_token_id if eos is None else eos
    ends = (given,) if isinstance(given, int) else tuple(given or ())
    if not ends:
        raise ValueError(
            "a grammar needs a token that ends a text, but the tokenizer has none; give eos="
        )
    if after is not None:
        grammar = _after_mark(after, grammar, tokenizer)
    return Grammar(_matcher(grammar, tokenizer, ends), ends, tokenizer)


@lru_cache(maxsize=16)  # many requests have the same
def _matcher(grammar: str, tokenizer: Any, eos: tuple[int, ...]) -> Any:
    first = _library().LLMatcher(_for_llguidance(tokenizer, eos), grammar, log_level=0)
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        raise ValueError(f"llguidance refuses the grammar: {_reason(first)}")
    return first


@lru_cache(maxsize=4)  # it takes a second for large vocabularies
def _for_llguidance(tokenizer: Any, eos: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, eos_token=list(eos))


def _reason(matcher: Any) -> str:
    """An error in a line, without llguidance's state and lines of the grammar, perhaps ours."""
    reason = " ".join(re.split(r"\s<state>|\n\s*\d+ \| ", matcher.get_error())[0].split())
    reason = re.sub(r"^at \S+ (failed to compile JSON schema: )?", "", reason)
    return "nothing fits it" if reason == "NoExtensionBias" else reason
