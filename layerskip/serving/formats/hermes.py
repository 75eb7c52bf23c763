"""Hermes, and most Qwen models: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.serving.formats.base import Call, Format, JsonCall, Mark, Tool, json_calls


class Hermes(Format):
    begin = "<tool_call>"
    marks = ("<tool_call>", "</tool_call>")

    def in_template(self, template: str) -> bool:
        return self.begin in template and "<function=" not in template

    def call(self) -> Call:
        return JsonCall("</tool_call>")

    def grammar(self, tools: Sequence[Tool], several: bool, mark: Mark) -> str:
        begin, end = map(mark, self.marks)
        more = f'("\\n" {begin} "\\n" call "\\n" {end})*' if several else ""
        return f'calls: {begin} "\\n" call "\\n" {end} {more}\n{json_calls(tools, "arguments")}'
