"""Mistral: `[TOOL_CALLS]` before a list of objects, or before each `name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from layerskip.serving.formats import base

_NAME = r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*"


class _MistralCall(base.Call):
    """A call in either notation, depending on what comes before its first object."""

    def __init__(self) -> None:
        super().__init__()
        self._object = base.JsonCall()
        self._named = False
        self._taken = 0

    def _read(self) -> None:
        if not self._taken:
            head, brace, _ = self.text.partition("{")
            if not brace:
                return
            begun = head.lstrip("[ \n") if head.lstrip().startswith("[") else head
            named = re.fullmatch(_NAME, begun)
            if named is None and begun.strip():
                self.rest = ""  # not a call
                return
            if named is not None:
                self._object.feed(f'{{"name": "{named[1]}", "arguments": ')
            self._named, self._taken = named is not None, len(head)
        taken, self._taken = self._taken, len(self.text)
        self._object.feed(self.text[taken:])
        self.name, self.arguments = self._object.name, self._object.arguments
        self.rest = self._object.rest
        if self._named and (end := self._object.ends.get("arguments")) is not None:
            self.rest = self._object.text[end:]


class Mistral(base.Format):
    begin = "[TOOL_CALLS]"
    between, after = r"\s*,\s*(?=\{)", r"^\s*\]"
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def __init__(self, named: bool = False) -> None:
        self._named = named

    def in_template(self, template: str) -> bool:
        return self.begin in template and ("[ARGS]" in template) == self._named

    def call(self) -> base.Call:
        return _MistralCall()

    def grammar(self, tools: Sequence[base.Tool], several: bool, mark: base.Mark) -> str:
        begin = mark(self.begin)
        if not self._named:
            more = '(", " call)*' if several else ""
            return f'calls: {begin} "[" call {more} "]"\n{base.json_calls(tools, "arguments")}'
        calls = " | ".join(
            f'{begin} "{tool["name"]}" {mark("[ARGS]")} {base.json_arguments(tool)}'
            for tool in tools
        )
        return f"calls: call{'+' if several else ''}\ncall: {calls}\n"
