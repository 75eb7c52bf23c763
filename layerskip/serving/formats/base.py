"""The interface of tool call formats, and calls in the form of JSON objects."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerskip.texts.grammars import IN_A_LINE, close_objects

Tool = Mapping[str, Any]
"""A function as clients describe it: `name`, and optionally `parameters`, a JSON schema."""
Mark = Callable[[str], str]
"""A mark in a grammar: the token with that text if there is one, otherwise its characters."""


class Call(ABC):
    """A tool call that is being written.

    Attributes:
        name: the function's name, once it is known.
        arguments: JSON, as far as it is known.
        text: the text read so far.
        rest: the text after the call; None while the call continues.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.text = ""
        self.rest: str | None = None

    def feed(self, text: str) -> None:
        """Read more text."""
        self.text += text
        self._read()

    @abstractmethod
    def _read(self) -> None:
        """Read `text` again after it has grown. A call that ends without a name is not a call."""


class Format(ABC):
    """How a model writes tool calls.

    Attributes:
        begin: the mark at the beginning of a call.
        bare: a pattern of what begins a call without its mark, where an answer begins.
        between: a pattern of what stands between a call and another one without its mark.
        after: a pattern of what belongs to the calls, after the last one.
        marks: texts of tokens to read even if a tokenizer calls them special.
    """

    begin: str
    bare = between = r"(?!)"  # matches nothing
    after = ""
    marks: Sequence[str] = ()

    def in_template(self, template: str) -> bool:
        """Whether a chat template has this format's marks."""
        return self.begin in template

    @abstractmethod
    def call(self) -> Call:
        """Start reading a call, after its mark."""

    def starts(self, text: str, first: bool) -> tuple[int, int] | None:
        """Where a call's mark begins and ends in a text; None if there is none.

        Args:
            first: whether nothing but spaces precedes it.
        """
        place = text.find(self.begin)
        if place < 0:
            bare = re.match(self.bare, text) if first else None
            return None if bare is None else bare.span()
        return place, place + len(self.begin)

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], several: bool, mark: Mark) -> str:
        """A Lark grammar whose rule `calls` is one call, or one or more if `several`."""


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}:,"]', re.DOTALL)
"""What structures JSON: whole strings, brackets and separators; or the beginning of a string."""


class JsonCall(Call):
    """`{"name": ..., "arguments": {...}}`, whose arguments are read as they come.

    Args:
        end: the text that follows the object.
        bare: whether no mark precedes the object; it is then a call only if its arguments are an
            object.

    Attributes:
        values: the finished values of the object by their keys, as they are written.
        ends: where each of them ends in the text.
    """

    def __init__(self, end: str = "", bare: bool = False) -> None:
        super().__init__()
        self._end, self._bare = end, bare
        self.values: dict[str, str] = {}
        self.ends: dict[str, int] = {}
        self._place = self._depth = 0
        self._key = ""
        self._value: int | None = None  # where a value of the outermost object begins
        self._closed = False

    def _read(self) -> None:
        self._closed = self._closed or self.text.lstrip()[:1] not in ("", "{")
        while not self._closed and (token := _TOKEN.search(self.text, self._place)):
            if token[0] == '"':  # a string whose end may still come
                break
            self._place = token.end()
            self._step(token[0], token.start())
            self._closed = self._depth == 0
        name, arguments = _loaded(self.values.get("name", "")), self._argued()
        if isinstance(name, str) and name and (arguments.startswith("{") or not self._bare):
            self.name, self.arguments = name, arguments
        if self._closed:
            self.rest = self._behind(self.text[self._place :])

    def _argued(self) -> str:
        """The arguments so far. As a JSON string, which some models write, only when complete."""
        keys = ("arguments", "parameters")
        whole = next((self.values[key] for key in keys if key in self.values), None)
        if whole is None:
            begun = "" if self._value is None or self._key not in keys else self.text[self._value :]
            whole = "" if begun.lstrip().startswith('"') else begun.strip()
        elif whole.startswith('"'):
            whole = str(_loaded(whole))
        return "{}" if self._closed and not whole and not self._bare else whole

    def _behind(self, rest: str) -> str | None:
        """The text after the object and its end; None: its end may still come."""
        if self.name is None or not self._end:
            return rest
        before, end, after = rest.partition(self._end)
        if end and not before.strip():
            return after
        return None if self._end.startswith(rest.strip()) else rest

    def _step(self, token: str, place: int) -> None:
        if token in "{[":
            self._depth += 1
        elif token in ",}]":
            self._depth -= token != ","
            if self._depth < 2 and self._value is not None:
                end = place + (token != "," and self._depth == 1)  # with the value's own bracket
                self.values.setdefault(self._key, self.text[self._value : end].strip())
                self.ends.setdefault(self._key, end)
                self._value = None
        elif self._depth == 1 and self._value is None:
            if token == ":":
                self._value = place + 1
            else:
                self._key = str(_loaded(token))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # perhaps thousands of brackets
        return None


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments."""
    return close_objects({"type": "object", **(tool.get("parameters") or {})})


def json_calls(tools: Sequence[Tool], key: str) -> str:
    """A Lark rule `call` for objects with a name and arguments.

    Args:
        key: the key of the arguments.
    """
    calls = []
    for tool in tools:
        begin = json.dumps(f'{{"name": "{tool["name"]}", "{key}": ')
        calls.append(f'{begin} {json_arguments(tool)} "}}"')
    return f"call: {' | '.join(calls)}\n"


def json_arguments(tool: Tool) -> str:
    """The arguments in a Lark rule, as a schema of their own, to whose root references lead."""
    return f"%json {json.dumps(schema_of(tool) | {'x-guidance': IN_A_LINE})}"
