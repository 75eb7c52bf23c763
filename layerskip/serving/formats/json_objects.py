"""Formats whose calls hold JSON: Hermes, Llama 3 and Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from layerskip.serving.formats.base import Call, Format, Mark, Tool, schema_of
from layerskip.texts.grammars import IN_A_LINE

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}:,"]', re.DOTALL)
"""What structures JSON: whole strings, brackets and separators; or the beginning of a string."""


class _Members:
    """Reads the JSON object with which a text begins, as the text grows.

    Attributes:
        values: its finished values by their keys, as they are written.
        begun: the same of the value that is not finished, if there is one.
        end: where the object ends; None while it continues; 0 if the text begins otherwise.
    """

    def __init__(self) -> None:
        self.values, self.begun = dict[str, str](), dict[str, str]()
        self.end: int | None = None
        self._key, self._value = "", 0  # where the value that is not finished begins; 0: nowhere
        self._place = self._depth = 0

    def read(self, text: str) -> None:
        """Read the text again after it has grown."""
        if text.lstrip()[:1] not in ("", "{"):
            self.end = 0
        while self.end is None and (token := _TOKEN.search(text, self._place)):
            if token[0] == '"':  # a string whose end may still come
                break
            self._place = token.end()
            self._step(text, token[0])
            if self._depth == 0:
                self.end = self._place
        self.begun = {self._key: text[self._value :].strip()} if self._value else {}

    def _step(self, text: str, token: str) -> None:
        if token in "{[":
            self._depth += 1
        elif token in ",}]":
            self._depth -= token != ","
            if self._depth < 2 and self._value:
                own = token != "," and self._depth == 1  # the bracket that ends the value
                value = text[self._value : self._place - (not own)].strip()
                self.values.setdefault(self._key, value)
                self._value = 0
        elif self._depth == 1 and not self._value:
            if token == ":":
                self._value = self._place
            else:
                self._key = str(_loaded(token))


def _json_call(members: _Members, text: str, end: str = "", bare: bool = False) -> Call:
    """Read `{"name": ..., "arguments": {...}}`, whose arguments are told as they come.

    As a JSON string, which some models write, they are told when complete.

    Args:
        members: has read the beginning of the text.
        end: the text that follows the object.
        bare: whether no mark precedes the object; it is then a call only if its arguments are an
            object.
    """
    members.read(text)
    begun = {key: value for key, value in members.begun.items() if not value.startswith('"')}
    known, keys = begun | members.values, ("arguments", "parameters")
    name = _loaded(members.values.get("name", ""))
    arguments = next((known[key] for key in keys if key in known), "")
    if arguments.startswith('"'):
        arguments = str(_loaded(arguments))
    if members.end is not None and not arguments and not bare:
        arguments = "{}"
    rest = None if members.end is None else text[members.end :]
    if not (isinstance(name, str) and name and (arguments.startswith("{") or not bare)):
        return Call(rest=rest)
    if end and rest is not None:
        before, mark, after = rest.partition(end)
        if mark and not before.strip():
            rest = after
        elif end.startswith(rest.strip()):  # its end may still come
            rest = None
    return Call(name, arguments, rest)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # perhaps thousands of brackets
        return None


def _json_calls(tools: Sequence[Tool], key: str) -> str:
    """A Lark rule `call` for objects with a name and arguments.

    Args:
        key: the key of the arguments.
    """
    calls = []
    for tool in tools:
        begin = json.dumps(f'{{"name": "{tool["name"]}", "{key}": ')
        calls.append(f'{begin} {_json_arguments(tool)} "}}"')
    return f"call: {' | '.join(calls)}\n"


def _json_arguments(tool: Tool) -> str:
    """The arguments in a Lark rule, as a schema of their own, to whose root references lead."""
    return f"%json {json.dumps(schema_of(tool) | {'x-guidance': IN_A_LINE})}"


class Hermes(Format):
    """Also most Qwen models: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

    begin = "<tool_call>"
    marks = ("<tool_call>", "</tool_call>")

    def in_template(self, template: str) -> bool:
        return self.begin in template and "<function=" not in template

    def call(self) -> Callable[[str], Call]:
        return partial(_json_call, _Members(), end="</tool_call>")

    def grammar(self, tools: Sequence[Tool], several: bool, mark: Mark) -> str:
        begin, end = map(mark, self.marks)
        more = f'("\\n" {begin} "\\n" call "\\n" {end})*' if several else ""
        return f'calls: {begin} "\\n" call "\\n" {end} {more}\n{_json_calls(tools, "arguments")}'


class Llama3(Format):
    """Also later ones: an answer consisting only of `{"name": ..., "parameters": ...}`."""

    begin = "<|python_tag|>"
    bare, between = r"\s*(?=\{)", r"\s*;?\s*(?=\{)"
    marks = ("<|python_tag|>",)

    def in_template(self, template: str) -> bool:
        return self.begin in template or ("ipython" in template and '"parameters"' in template)

    def call(self) -> Callable[[str], Call]:
        return partial(_json_call, _Members(), bare=True)

    def grammar(self, tools: Sequence[Tool], several: bool, mark: Mark) -> str:
        more = '("; " call)*' if several else ""
        return f"calls: call {more}\n{_json_calls(tools, 'parameters')}"


_NAMED = r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*"


def _mistral_call(members: _Members, text: str) -> Call:
    """Read a call in either notation, depending on what comes before its first object."""
    head, brace, _ = text.partition("{")
    if not brace:
        return Call()
    whole = text[len(head) :]
    begun = head.lstrip("[ \n") if head.lstrip().startswith("[") else head
    named = re.fullmatch(_NAMED, begun)
    if named is None:
        return Call(rest="") if begun.strip() else _json_call(members, whole)
    members.read(whole)
    end = members.end
    return Call(named[1], whole[:end].strip(), None if end is None else whole[end:])


class Mistral(Format):
    """`[TOOL_CALLS]` before a list of objects, or before each `name[ARGS]{...}`."""

    begin = "[TOOL_CALLS]"
    between, after = r"\s*,\s*(?=\{)", r"^\s*\]"
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def __init__(self, named: bool = False) -> None:
        self._named = named

    def in_template(self, template: str) -> bool:
        return self.begin in template and ("[ARGS]" in template) == self._named

    def call(self) -> Callable[[str], Call]:
        return partial(_mistral_call, _Members())

    def grammar(self, tools: Sequence[Tool], several: bool, mark: Mark) -> str:
        begin = mark(self.begin)
        if not self._named:
            more = '(", " call)*' if several else ""
            return f'calls: {begin} "[" call {more} "]"\n{_json_calls(tools, "arguments")}'
        calls = " | ".join(
            f'{begin} "{tool["name"]}" {mark("[ARGS]")} {_json_arguments(tool)}' for tool in tools
        )
        return f"calls: call{'+' if several else ''}\ncall: {calls}\n"
