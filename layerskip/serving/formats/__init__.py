"""How models write tool calls and reasoning, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from layerskip.serving.formats.base import Format
from layerskip.serving.formats.gemma import FunctionGemma, Gemma4
from layerskip.serving.formats.json_objects import Hermes, Llama3, Mistral

T = TypeVar("T")

FORMATS: dict[str, Format] = {
    "hermes": Hermes(),
    "llama3": Llama3(),
    "mistral": Mistral(),
    "mistral-named": Mistral(named=True),
    "gemma4": Gemma4(),
    "functiongemma": FunctionGemma(),
}
"""Formats of tool calls by their names in `--tool-parser`."""

REASONING: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""The marks around reasoning by their names in `--reasoning-parser`."""


def format_of(name: str, template: str) -> Format | None:
    """The format of tool calls with that name; "auto": the one whose marks a chat template has.

    Raises:
        ValueError: there is no format of that name.
    """
    return _chosen(FORMATS, name, "tool-parser", lambda each: each.in_template(template))


def reasoning_of(name: str, template: str) -> tuple[str, str] | None:
    """The marks around reasoning, chosen as in `format_of`."""
    return _chosen(REASONING, name, "reasoning-parser", lambda each: each[1] in template)


def template_of(tokenizer: Any) -> str:
    """A tokenizer's chat template, or all of them, as one text."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template or "")


def left_open(marks: tuple[str, str] | None, tokenizer: Any, prompt: Sequence[int]) -> str | None:
    """The mark that ends the reasoning which a prompt has begun, as some templates do; or None."""
    if marks is None:
        return None
    end = tokenizer.decode(prompt[-16:]).rstrip()
    return marks[1] if end.endswith(marks[0].rstrip()) else None


def _chosen(table: dict[str, T], name: str, flag: str, fits: Callable[[T], bool]) -> T | None:
    if name in ("none", "auto"):
        return next(filter(fits, table.values()), None) if name == "auto" else None
    if name not in table:
        raise ValueError(f"--{flag} must be auto, none, {', '.join(table)}, got {name!r}")
    return table[name]
