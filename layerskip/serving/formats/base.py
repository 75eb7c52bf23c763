"""The interface of tool call formats."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from layerskip.texts.grammars import close_objects

Tool = Mapping[str, Any]
"""A function as clients describe it: `name`, and optionally `parameters`, a JSON schema."""
Mark = Callable[[str], str]
"""A mark in a grammar: the token with that text if there is one, otherwise its characters."""


class Call(NamedTuple):
    """A tool call, as far as it is written.

    Attributes:
        name: the function's name; None: it is not known yet, or this is not a call.
        arguments: JSON, as far as it is known.
        rest: the text after the call; None while the call continues.
    """

    name: str | None = None
    arguments: str = ""
    rest: str | None = None


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
    def call(self) -> Callable[[str], Call]:
        """What reads a call from the text after its mark, again after the text has grown."""

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


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments."""
    return close_objects({"type": "object", **(tool.get("parameters") or {})})
