"""Grammars that a text is kept to: logits processors made of a JSON schema or a regular expression.

llguidance computes what they allow. A grammar is about the new tokens, not about the prompt.
Letters: B rows, W tokens of a row so far, V vocabulary of the scores.
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

SEPARATORS = ", ", ": "
"""What JSON has between two items, and behind a key: those of `json.dumps`."""
_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_COMBINED = ("allOf", "anyOf", "oneOf", "not", "if", "$ref")  # keywords that add other schemas
_VALUES = ("const", "enum", "default", "examples")  # keywords that hold values, no schemas


class Grammar:
    """A text's place in a grammar (see `layerskip.decoding.laws.Stateful`).

    Ends of text are allowed exactly where the grammar may end, and nothing else behind its end.

    It is also a logits processor for `generate()` of transformers itself, where one object serves
    one thread.

    Args:
        compiled: llguidance's matcher, at the beginning of a text.
        eos: tokens that end a text.
        tokenizer: which the grammar was made for.
    """

    def __init__(self, compiled: Any, eos: Sequence[int], tokenizer: Any) -> None:
        self.compiled, self.eos, self.tokenizer = compiled, eos, tokenizer
        self.matcher = compiled.deep_copy()
        self._behind = 0  # tokens behind the grammar's end, which the matcher is not told
        self._called: list[list[int]] = []  # the rows that `__call__` was asked about last
        self._width = 0  # how many of their tokens are prompt
        self._rows: list[Grammar] = []

    def start(self) -> Grammar:
        """The same grammar at the beginning of a text."""
        return type(self)(self.compiled, self.eos, self.tokenizer)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) behind the tokens so far (B, W), as any logits processor.

        A text begins at the first call with its prompt, and grows by a token from call to call.

        Raises:
            ValueError: it did not.
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
        """Tokens that follow here whatever is written, as far as they are known; perhaps others
        that spell the same."""
        tokens: list[int] = [] if self._behind else self.matcher.compute_ff_tokens()
        return tokens

    def advance(self, token: int) -> None:
        """Goes on by a token; behind one that is not allowed the text has ended."""
        if self._behind or token in self.eos or not self.matcher.try_consume_tokens([token]):
            self._behind += 1

    def rollback(self, count: int) -> None:
        """Takes back the last tokens."""
        behind = min(count, self._behind)
        self._behind -= behind
        if count > behind:
            self.matcher.rollback(count - behind)

    def mask(self, scores: Tensor) -> Tensor:
        """Scores (V,) with -inf for every token that is not allowed here.

        V may be larger than the tokenizer's vocabulary, as padded heads are, or smaller.
        """
        allowed = np.zeros(len(scores), dtype=bool)  # (V,)
        if not self._behind:
            packed = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
            if self.matcher.is_error():
                raise ValueError(f"the grammar went wrong: {_line(self.matcher.get_error())}")
            bits = np.unpackbits(packed, bitorder="little")[: len(scores)]
            allowed[: len(bits)] = bits
        ends = [token for token in self.eos if token < len(scores)]
        allowed[ends] = self._behind > 0 or self.matcher.is_accepting()
        here = torch.from_numpy(allowed).to(scores.device)  # (V,)
        return scores.masked_fill(~here, -float("inf"))


def response_format(
    given: Mapping[str, Any], tokenizer: Any, *, eos: Sequence[int] | None = None
) -> list[Grammar]:
    """What a `response_format` of OpenAI's interface asks for, as logits processors; text: none.

    Raises:
        ValueError: it is none, or as for `json_schema`.
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
    return [json_schema(schema, tokenizer, eos=eos)]


def json_schema(
    schema: Mapping[str, Any] | str,
    tokenizer: Any,
    *,
    eos: int | Sequence[int] | None = None,
    whitespace: bool = False,
) -> Grammar:
    """A logits processor that keeps new text to JSON of a schema.

    Give it as `logits_processor=[...]` to `layerskip.generate`, `decode`, or `model.generate()`,
    with or without `LayerSkipDecoding`. With it, one object serves any number of threads.

    An object whose schema lists `properties` and says nothing of `additionalProperties` gets none,
    as these could have one name twice.

    Args:
        schema: a JSON schema, as a mapping or as JSON.
        tokenizer: the model's fast tokenizer.
        eos: tokens that end a text; by default the tokenizer's.
        whitespace: whether there may be any between tokens of JSON; else it is written in one
            line, as `json.dumps` does.

    Raises:
        ValueError: it is no schema, nothing fits it, or llguidance is not installed or cannot
            serve it or the tokenizer.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"a JSON schema must be JSON: {error}") from error
    if not isinstance(schema, Mapping):
        kind = type(schema).__name__
        raise ValueError(f"a JSON schema must be an object, such as {{}} for any, got a {kind}")
    item, key = SEPARATORS
    strict = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    grammar = _library().LLMatcher.grammar_from_json_schema(
        closed(schema), overrides={} if whitespace else strict
    )
    return _compiled(grammar, tokenizer, eos)


def regex(pattern: str, tokenizer: Any, *, eos: int | Sequence[int] | None = None) -> Grammar:
    r"""A logits processor that keeps new text, as a whole, to a regular expression.

    Classes such as `\d` are of ASCII; behind `(?u)` at the beginning they are of Unicode.
    Arguments and errors are those of `json_schema`.
    """
    if not pattern.startswith("(?u)"):
        pattern = re.sub(r"\\(.)", _ascii, pattern, flags=re.DOTALL)
    return _compiled(_library().LLMatcher.grammar_from_regex(pattern), tokenizer, eos)


def lark(grammar: str, tokenizer: Any, *, eos: int | Sequence[int] | None = None) -> Grammar:
    """A logits processor that keeps new text to a grammar in llguidance's kind of Lark.

    Arguments and errors are those of `json_schema`.
    """
    return _compiled(_library().LLMatcher.grammar_from_lark(grammar), tokenizer, eos)


def _ascii(escaped: re.Match[str]) -> str:
    """A class that a backslash stands for, written out; anything else as it is."""
    name = escaped[1]
    among = _ASCII.get(name.lower())
    if among is None:
        return escaped[0]
    return f"[{among}]" if name.islower() else f"[^{among}]"


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """All objects inside a schema, but for the values that it names."""
    if isinstance(value, dict):
        yield value
        value = [each for name, each in value.items() if name not in _VALUES]
    if isinstance(value, list):
        for each in value:
            yield from _schemas(each)


def _refuse_rings(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Refuse references that lead back to themselves, which nothing fits."""
    seen: list[Any] = []
    while isinstance(schema, dict) and isinstance(place := schema.get("$ref"), str):
        if place in seen:
            raise ValueError(f"a JSON schema has references that go round in a ring: {place}")
        seen.append(place)
        target: Any = root
        for part in place.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        schema = target


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` where it lists properties and says nothing.

    Left as it is where it combines schemas, one of which may add properties to another.

    Raises:
        ValueError: references go round in a ring.
    """
    schema = dict(schema)
    every = list(_schemas(schema))
    for each in every:
        _refuse_rings(each, schema)
    if any("properties" in each and each.keys() & {*_COMBINED} for each in every) or any(
        "allOf" in each for each in every
    ):
        return schema
    copied: dict[str, Any] = json.loads(json.dumps(schema))
    for each in _schemas(copied):
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


def _compiled(grammar: str, tokenizer: Any, eos: int | Sequence[int] | None) -> Grammar:
    given = tokenizer.eos_token_id if eos is None else eos
    ends = (given,) if isinstance(given, int) else tuple(given or ())
    if not ends:
        raise ValueError(
            "a grammar needs a token that ends a text, the tokenizer has none; give eos="
        )
    first = _library().LLMatcher(_for_llguidance(tokenizer, ends), grammar, log_level=0)
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        reason = _line(first.get_error()).partition(" <state>")[0]
        reason = "nothing fits it" if reason == "NoExtensionBias" else reason
        raise ValueError(f"llguidance refuses the grammar: {reason}")
    return Grammar(first, ends, tokenizer)


@lru_cache(maxsize=4)  # it takes a second for large vocabularies
def _for_llguidance(tokenizer: Any, eos: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, eos_token=list(eos))


def _line(text: str) -> str:
    return " ".join(text.split())
