"""Reads prompt files: JSON lines or plain text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: either `text`, or chat `messages` for a chat template; the other is None."""

    id: str
    """Its `id` or `question_id` in the file, else the number of its line; unique in the file."""
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    category: str | None = None

    def as_chat(self) -> Prompt:
        """The same for a chat template: text is what a user says; messages stay as they are."""
        if self.text is None:
            return self
        return replace(self, text=None, messages=({"role": "user", "content": self.text},))


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read a prompt file; blank lines are left out.

    Each line of JSON holds one of `prompt` (a string), `messages` (a chat: objects with `role`
    and `content`) or `turns` (Spec-Bench, arXiv 2401.07851: the first turn is the prompt), and
    may hold `category` and `id`; other keys are left alone. A file that neither has one of
    `JSON_SUFFIXES` nor starts with a JSON object is plain text, one prompt a line.

    Raises:
        ValueError: the file cannot be read, is not UTF-8, holds no prompt, or a line is wrong;
            names the file and the line.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"prompts {path} are not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    numbered = [(n, line.rstrip("\r")) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"prompts {path} are empty; give at least one prompt")
    if path.suffix not in JSON_SUFFIXES and not _is_json_object(numbered[0][1]):
        return [Prompt(id=str(number), text=line) for number, line in numbered]
    prompts: dict[str, Prompt] = {}
    for number, line in numbered:
        try:
            prompt = _parse(line, number)
            if prompt.id in prompts:
                raise ValueError(f"id must be unique, got {prompt.id!r} again")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"prompts {path}, line {number}: {error}") from error
        prompts[prompt.id] = prompt
    return list(prompts.values())


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parse(line: str, number: int) -> Prompt:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"a line must be a JSON object, got {shown(values)}")
    kinds = [kind for kind in ("prompt", "messages", "turns") if kind in values]
    if len(kinds) != 1:
        got = " and ".join(kinds) or f"the keys {shown(list(values))}"
        raise ValueError(f"a line must hold one of prompt, messages or turns, got {got}")
    id_ = values.get("id", values.get("question_id", number))
    if isinstance(id_, bool) or not isinstance(id_, str | int):
        raise ValueError(f"id must be a string or an integer, got {shown(id_)}")
    category = values.get("category")
    if category is not None:
        category = _text("category", category)
    if kinds == ["messages"]:
        messages = tuple(_messages(values["messages"]))
        return Prompt(id=str(id_), messages=messages, category=category)
    if kinds == ["turns"]:
        text = _text("the first turn", next(iter(_items("turns", values["turns"]))))
    else:
        text = _text("prompt", values["prompt"])
    return Prompt(id=str(id_), text=text, category=category)


def _messages(value: object) -> Iterator[dict[str, Any]]:
    for message in _items("messages", value):
        if not isinstance(message, dict):
            raise ValueError(f"a message must be a JSON object, got {shown(message)}")
        _text("role of a message", message.get("role"))
        _text("content of a message", message.get("content"))
        yield message


def _items(name: str, value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list with at least one item, got {shown(value)}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {shown(value)}")
    if not value.strip():
        raise ValueError(f"{name} must not be empty")
    return value
