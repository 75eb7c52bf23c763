"""Gemma 4 and FunctionGemma: `call:name{key:value}` between marks, with marks around strings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from layerskip.serving.formats.base import Call, Format, Mark, Tool, schema_of
from layerskip.serving.formats.schemas import Rules

_WORD = re.compile(r"([^{}\[\],:]+)(:?)")
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=int)  # refuses NaN


def _as_key(word: re.Match[str]) -> str:
    """A word with quotation marks, if it is a key."""
    key = word[1].strip(" \n")
    return json.dumps(key, ensure_ascii=False) + ":" if key and word[2] else word[0]


class Gemma4(Format):
    begin, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'

    def __init__(self) -> None:
        self.marks = (self.begin, self.end, self.quote)

    def call(self) -> Callable[[str], Call]:
        return self._read

    def _read(self, text: str) -> Call:
        """Read a call when it is complete, as its arguments are not JSON."""
        parts = text.split(self.quote)  # every second one is a string
        last = next((n for n in range(0, len(parts), 2) if self.end in parts[n]), None)
        if last is None:
            return Call()
        parts[last], _, rest = parts[last].partition(self.end)
        rest = self.quote.join([rest, *parts[last + 1 :]])
        named = re.match(r"\s*call:([\w.-]+)\s*(?=\{)", parts[0])
        if named is None:
            return Call(rest=rest)
        parts[0] = parts[0][named.end() :]
        arguments = "".join(
            json.dumps(part, ensure_ascii=False) if number % 2 else _WORD.sub(_as_key, part)
            for number, part in enumerate(parts[: last + 1])
        )
        try:
            _, length = _DECODER.raw_decode(arguments)
        except (ValueError, RecursionError):  # perhaps thousands of brackets
            return Call(rest=rest)
        return Call(named[1], arguments[:length], rest)

    def grammar(self, tools: Sequence[Tool], several: bool, mark: Mark) -> str:
        begin, end, quote = map(mark, self.marks)
        rules: dict[str, str] = {}
        calls = []
        for tool in tools:
            schema = schema_of(tool)
            arguments = Rules(schema, self.quote, quote, rules).value(schema)
            calls.append(f'{begin} "call:{tool["name"]}" {arguments} {end}')
        rules["calls"] = f"({' | '.join(calls)}){'+' if several else ''}"
        return "".join(f"{name}: {body}\n" for name, body in rules.items())


class FunctionGemma(Gemma4):
    begin, end, quote = "<start_function_call>", "<end_function_call>", "<escape>"
