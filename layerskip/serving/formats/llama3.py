"""Llama 3.1 and later: an answer consisting only of `{"name": ..., "parameters": ...}`."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.serving.formats.base import Call, Format, JsonCall, Mark, Tool, json_calls


class Llama3(Format):
    begin = "<|python_tag|>"
    bare, between = r"\s*(?=\{)", r"\s*;?\s*(?=\{)"
    marks = ("<|python_tag|>",)

    def in_template(self, template: str) -> bool:
        return self.begin in template or ("ipython" in template and '"parameters"' in template)

    def call(self) -> Call:
        return JsonCall(bare=True)

    def grammar(self, tools: Sequence[Tool], several: bool, mark: Mark) -> str:
        more = '("; " call)*' if several else ""
        return f"calls: call {more}\n{json_calls(tools, 'parameters')}"
