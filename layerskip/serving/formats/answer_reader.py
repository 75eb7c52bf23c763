"""Splits a chat's answer as it comes into content, reasoning and tool calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from layerskip.serving.formats.base import Call, Format

Delta = dict[str, Any]


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a mark."""
    return max(
        (k for each in marks for k in range(1, len(each)) if text.endswith(each[:k])), default=0
    )


class Reader:
    """Reads an answer.

    Args:
        format_: format of tool calls; None: there are none.
        names: the declared tools. What looks like a call of another is content.
        reasoning: the marks around reasoning; None: there is none.
        inside: whether the answer begins inside reasoning, since the prompt ends with its mark.
        several: whether more than one call is allowed.

    Attributes:
        calls: number of calls.
    """

    def __init__(
        self,
        format_: Format | None = None,
        names: Collection[str] = (),
        reasoning: tuple[str, str] | None = None,
        *,
        inside: bool = False,
        several: bool = True,
    ) -> None:
        self._format, self._names, self._several = format_, names, several
        self._reasoning = reasoning
        self._inside = inside and reasoning is not None
        self._call: Callable[[str], Call] | None = None  # what reads the current call
        self._mark = ""  # of it
        self._reported: int | None = None  # number of reported characters of its arguments
        self._between = False  # after a call, perhaps before another
        self._begun = False  # whether there is content other than spaces before or between calls
        self._fresh = False  # whether spaces that come now are not content
        self._text = ""
        self.calls = 0

    def feed(self, text: str, last: bool = False) -> list[Delta]:
        """Read more text; returns what to report to a client.

        Args:
            last: whether the text ends here.
        """
        if self._format is None and self._reasoning is None:
            return [{"content": text}] if text else []
        self._text += text
        deltas: list[Delta] = []
        while self._step(deltas, last):
            pass
        return deltas

    def _step(self, deltas: list[Delta], last: bool) -> bool:
        """Process a part of the text; False if more text is needed first."""
        if self._inside:
            return self._reason(deltas, last)
        if self._call is not None:
            return self._read_call(self._call(self._text), deltas, last)
        if self.calls and not self._several:
            return False
        return self._go_on(last) if self._between else self._search(deltas, last)

    def _reason(self, deltas: list[Delta], last: bool) -> bool:
        assert self._reasoning is not None
        before, end, after = self._text.partition(self._reasoning[1])
        held = 0 if end or last else held_back(before, [self._reasoning[1]])
        if shown := before[: len(before) - held]:
            deltas.append({"reasoning_content": shown})
        self._text = after if end else before[len(shown) :]
        self._inside, self._fresh = not end, bool(end)
        return bool(end)

    def _search(self, deltas: list[Delta], last: bool) -> bool:
        """Report content up to a mark."""
        if self._fresh:
            self._text = self._text.lstrip()
            self._fresh = not self._text
        places: list[tuple[int, int, bool]] = []  # begin, end, whether it is a call's
        marks: list[str] = []
        if self._reasoning is not None:
            marks.append(self._reasoning[0])
            if (at := self._text.find(marks[0])) >= 0:
                places.append((at, at + len(marks[0]), False))
        if self._format is not None:
            marks.append(self._format.begin)
            if starts := self._format.starts(self._text, not self._begun and not self.calls):
                places.append((*starts, True))
        if not places:
            held = 0 if last else held_back(self._text, marks)
            self._tell(deltas, len(self._text) - held, keep=not last or not self.calls, last=last)
            return False
        at, end, call = min(places)
        mark, rest = self._text[at:end], self._text[end:]
        self._tell(deltas, at, keep=False, last=False)
        self._mark, self._text, self._inside = mark, rest, not call
        if call and self._format is not None:
            self._call, self._reported = self._format.call(), None
        return True

    def _tell(self, deltas: list[Delta], count: int, *, keep: bool, last: bool) -> None:
        """Report `count` characters of content.

        Args:
            keep: whether leading spaces may be content; they wait for what follows.
        """
        text, spaces = self._text[:count], not self._begun and not self._text[:count].strip()
        if spaces and keep and not last:
            return
        self._text = self._text[count:]
        if text and (keep or not spaces):
            self._begun = True
            deltas.append({"content": text})

    def _read_call(self, call: Call, deltas: list[Delta], last: bool) -> bool:
        ended, rest = call.rest is not None, call.rest or ""
        if call.name not in self._names:
            if ended or last:  # not a call, but content
                shown = self._mark + self._text[: len(self._text) - len(rest)]
                deltas.append({"content": shown})
                self._text, self._call, self._begun = rest, None, True
            return ended
        delta: Delta = {"index": self.calls, "function": {}}
        if self._reported is None:
            delta |= {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            delta["function"]["name"] = call.name
        new = call.arguments[self._reported or 0 :]
        if new or self._reported is None:
            delta["function"]["arguments"] = new
            deltas.append({"tool_calls": [delta]})
        self._reported = len(call.arguments)
        if ended or last:
            self._text, self._call, self._begun = rest, None, False
            self._between, self.calls = True, self.calls + 1
        return ended

    def _go_on(self, last: bool) -> bool:
        """Continue after a call: with another one, or with something else."""
        assert self._format is not None
        if follows := re.match(self._format.between, self._text):
            self._mark, self._text = follows[0], self._text[follows.end() :]
            self._call, self._reported = self._format.call(), None
            return True
        if not last and not self._text.strip(", ;\n"):
            return False
        self._text, self._between = re.sub(self._format.after, "", self._text), False
        self._fresh = True
        return bool(self._text)
