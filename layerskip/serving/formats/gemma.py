"""Gemma 4 and FunctionGemma: `call:name{key:value}` between marks, with marks around strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from layerskip.serving.formats.base import Call, Format, Mark, Tool, schema_of


class _Call(Call):
    """A call that is read only when complete, as its arguments are not JSON."""

    def __init__(self, end: str, quote: str) -> None:
        super().__init__()
        self._end, self._quote = end, quote

    def _read(self) -> None:
        body, end, rest = self.text.partition(self._end)
        if not end:
            return
        self.rest = rest
        named = re.match(r"\s*call:([\w.-]+)\s*(?=\{)", body)
        if named is None:
            return
        try:
            arguments, _ = json.JSONDecoder().raw_decode(_as_json(body[named.end() :], self._quote))
        except (ValueError, RecursionError):  # perhaps thousands of brackets
            return
        self.name, self.arguments = named[1], json.dumps(arguments, ensure_ascii=False)


def _as_json(text: str, quote: str) -> str:
    """Rewrite a value as JSON: strings between marks, and keys, get quotation marks."""
    mark = re.escape(quote)
    parts = rf"{mark}(.*?){mark}|([\w.-]+)(?=\s*:)"
    return re.sub(parts, lambda part: json.dumps(part[2] or part[1]), text, flags=re.DOTALL)


class Gemma4(Format):
    begin, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'

    def __init__(self) -> None:
        self.marks = (self.begin, self.end, self.quote)

    def call(self) -> Call:
        return _Call(self.end, self.quote)

    def grammar(self, tools: Sequence[Tool], several: bool, mark: Mark) -> str:
        begin, end, quote = map(mark, self.marks)
        rules: dict[str, str] = {"string": f"{quote} /[^<]*/ {quote}"}
        calls = []
        for tool in tools:
            arguments = _rule(schema_of(tool), rules, quote)
            calls.append(f'{begin} "call:{tool["name"]}" {arguments} {end}')
        rules["calls"] = f"({' | '.join(calls)}){'+' if several else ''}"
        return "".join(f"{name}: {body}\n" for name, body in rules.items())


class FunctionGemma(Gemma4):
    begin, end, quote = "<start_function_call>", "<end_function_call>", "<escape>"


def _rule(schema: Mapping[str, Any], rules: dict[str, str], quote: str) -> str:
    """Add a rule for values of a schema to the rules; returns its name.

    Raises:
        ValueError: this notation has no rule for such values.
    """
    kind = schema.get("type")
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        told = [
            f"{quote} {json.dumps(value)} {quote}"
            if isinstance(value, str)
            else json.dumps(json.dumps(value))
            for value in values
        ]
        body = " | ".join(told)
    elif kind == "string":
        return "string"
    elif kind == "object":
        body = _object(schema, rules, quote)
    elif kind == "array":
        item = _rule(schema.get("items") or {"type": "string"}, rules, quote)
        body = f'"[" ({item} ("," {item})*)? "]"'
    elif kind in ("integer", "number", "boolean", "null"):
        body = _WORDS[kind]
    else:
        raise ValueError(
            f"a schema of a tool must say type, enum or const for this model's calls, got {schema}"
        )
    name = f"value{len(rules)}"
    rules[name] = body
    return name


_WORDS = {
    "integer": r"/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    "boolean": '"true" | "false"',
    "null": '"null"',
}


def _object(schema: Mapping[str, Any], rules: dict[str, str], quote: str) -> str:
    """A rule for properties in their order; optional ones may be left out."""
    properties = schema.get("properties") or {}
    required = [name for name in properties if name in schema.get("required", ())]
    others = [name for name in properties if name not in required]
    rule = {name: f'"{name}:" {_rule(properties[name], rules, quote)}' for name in properties}
    if required:
        body = ' "," '.join(rule[name] for name in required)
        body += "".join(f' ("," {rule[name]})?' for name in others)
    else:  # at most one optional property: commas between several would need many rules
        body = f"({' | '.join(rule[name] for name in others)})?" if others else ""
    return f'"{{" {body} "}}"'
