"""How models write tool calls and reasoning: one small file per format."""

from __future__ import annotations

from typing import Any

from layerskip.serving.formats.base import Format
from layerskip.serving.formats.gemma import FunctionGemma, Gemma4
from layerskip.serving.formats.hermes import Hermes
from layerskip.serving.formats.llama3 import Llama3
from layerskip.serving.formats.mistral import Mistral

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


def format_of(name: str, template: str | None) -> Format | None:
    """The format of tool calls with that name; "auto": the one whose marks a chat template has.

    Raises:
        ValueError: there is no format of that name.
    """
    if name == "none":
        return None
    if name != "auto":
        named: Format = _named(FORMATS, name, "tool-parser")
        return named
    told = template or ""
    return next((each for each in FORMATS.values() if each.in_template(told)), None)


def reasoning_of(name: str, template: str | None) -> tuple[str, str] | None:
    """The marks around reasoning, chosen as in `format_of`."""
    if name == "none":
        return None
    if name != "auto":
        marks: tuple[str, str] = _named(REASONING, name, "reasoning-parser")
        return marks
    told = template or ""
    return next((each for each in REASONING.values() if each[1] in told), None)


def _named(table: dict[str, Any], name: str, flag: str) -> Any:
    if name not in table:
        raise ValueError(f"--{flag} must be auto, none, {', '.join(table)}, got {name!r}")
    return table[name]
