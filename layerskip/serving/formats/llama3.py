"""Llama 3.1 and later: an answer consisting only of `{"name": ..., "parameters": ...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from layerskip.serving.formats.base import Call, Format, JsonCall, Mark, Tool, json_calls


class Llama3(Format):
    begin = "<|python_tag|>"
    marks = ("<|python_tag|>",)

    def in_template(self, template: str) -> bool:
        return self.begin in template or ("ipython" in template and '"parameters"' in template)

    def call(self) -> Call:
        return JsonCall(bare=True)

    def starts(self, text: str, first: bool) -> tuple[int, int] | None:
        if (marked := super().starts(text, first)) is not None:
            return marked
        bare = re.match(r"\s*(?=\{)", text) if first else None
        return None if bare is None else (0, bare.end())

    def another(self, rest: str) -> int | None:
        parted = re.match(r"\s*;?\s*(?=\{)", rest)
        return None if parted is None else parted.end()

    def grammar(self, tools: Sequence[Tool], several: bool, mark: Mark) -> str:
        more = '("; " call)*' if several else ""
        return f"calls: call {more}\n{json_calls(tools, 'parameters')}"
