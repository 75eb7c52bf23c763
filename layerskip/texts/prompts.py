"""Prompt files: JSON lines or plain text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from layerskip.files import schema
from layerskip.files.reading import errors_of, read_text
from layerskip.files.schema import anything, has, integer, items, mapping, name_text, optional
from layerskip.texts.pictures import with_pictures

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: either `text`, or chat `messages` for a chat template; the other is None."""

    id: str
    """`id` or `question_id` in the file, else the line number; unique in the file."""
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    category: str | None = None
    response_format: dict[str, Any] | None = None
    """The form that the text must have, as OpenAI's API defines it."""
    max_new_tokens: int | None = None
    """The maximum number of new tokens, if the line of the file sets one."""
    body: dict[str, Any] | None = None
    """The body of a line in OpenAI's batch format, including the text or the messages."""

    @property
    def content(self) -> dict[str, Any]:
        """Everything on which an answer may depend."""
        names = ("text", "messages", "response_format", "body")
        content = {name: getattr(self, name) for name in names}
        limit = self.max_new_tokens  # left out without one, as in the fingerprints of older rows
        return content if limit is None else content | {"max_new_tokens": limit}

    def as_chat(self) -> Prompt:
        """Convert to a chat prompt: text becomes a user message; messages are unchanged."""
        if self.text is None:
            return self
        return replace(self, text=None, messages=({"role": "user", "content": self.text},))

    def with_pictures(self, pictures: Sequence[Any]) -> Prompt:
        """Return the chat with PIL images in front of its last message."""
        *before, last = self.as_chat().messages or ()
        return replace(self, text=None, messages=(*before, with_pictures(last, pictures)))

    def with_system(self, text: str) -> Prompt:
        """Return the chat with a system message in front, unless it already has one."""
        messages = self.messages or ()
        if messages and messages[0]["role"] == "system":
            return self
        return replace(self, messages=({"role": "system", "content": text}, *messages))


def read_prompts(path: str | os.PathLike[str], *, strict: bool = False) -> list[Prompt]:
    """Read a prompt file. Blank lines are ignored.

    Each JSON line contains one of `prompt` (a string), `messages` (a chat: objects with `role` and
    `content`) or `turns` (Spec-Bench, arXiv 2401.07851: the first turn is the prompt). It may also
    contain `category`, `id`, `reference`, `response_format` and `max_new_tokens` (or `max_tokens`).
    A line of OpenAI's batch files has `custom_id` and `body`, which contains `prompt` or
    `messages`. A file that neither has one of `JSON_SUFFIXES` nor starts with a JSON object is
    plain text, one prompt per line.

    Args:
        strict: refuse other keys of a line; otherwise they are ignored.

    Raises:
        ValueError: the file cannot be read, is not UTF-8, has no prompt, or a line is wrong. The
            message names the file and the line.
    """
    path = Path(path)
    with errors_of(f"prompts {path}"):
        lines = read_text(path).decode("utf-8-sig").split("\n")
    numbered = [(n, line.rstrip("\r")) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"prompts {path} are empty; give at least one prompt")
    if path.suffix not in JSON_SUFFIXES and not _is_json_object(numbered[0][1]):
        return [Prompt(id=str(number), text=line) for number, line in numbered]
    prompts: dict[str, Prompt] = {}
    for number, line in numbered:
        with errors_of(f"prompts {path}, line {number}"):
            prompt = _parse(line, number, strict)
            if prompt.id in prompts:
                raise ValueError(f"id must be unique, got {prompt.id!r} again")
        prompts[prompt.id] = prompt
    return list(prompts.values())


def by_category(prompts: Iterable[Prompt]) -> dict[str | None, list[Prompt]]:
    """The prompts of each category, in order of appearance."""
    categories: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    return categories


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(schema.parse(line), dict)
    except ValueError:
        return False


def _parse(line: str, number: int, strict: bool) -> Prompt:
    values = mapping(schema.parse_characters(line), "a line")
    allowed = _BATCH_KEYS if "body" in values else _KEYS
    if strict and (unknown := [key for key in values if key not in allowed]):
        raise ValueError(f"a line may have the keys {', '.join(allowed)}, got {shown(unknown[0])}")
    if "body" in values:
        return _parse_body(values)
    kinds = [kind for kind in _KINDS if kind in values]
    if len(kinds) != 1:
        got = " and ".join(kinds) or f"the keys {shown(list(values))}"
        raise ValueError(f"a line must hold one of prompt, messages or turns, got {got}")
    id_ = values.get("id", values.get("question_id", number))
    if isinstance(id_, bool) or not isinstance(id_, str | int):
        raise ValueError(f"id must be a string or an integer, got {shown(id_)}")
    also = {
        "category": optional(name_text)(values.get("category"), "category"),
        "response_format": optional(mapping)(values.get("response_format"), "response_format"),
        "max_new_tokens": _limit(values),
    }
    if kinds == ["messages"]:
        messages = tuple(_MESSAGES(values["messages"], "messages"))
        return Prompt(id=str(id_), messages=messages, **also)
    if kinds == ["turns"]:
        text = name_text(items(anything, least=1)(values["turns"], "turns")[0], "turns[0]")
    else:
        text = name_text(values["prompt"], "prompt")
    return Prompt(id=str(id_), text=text, **also)


def _limit(values: dict[str, Any]) -> int | None:
    limits: list[int | None] = [optional(integer(1))(values.get(name), name) for name in _LIMITS]
    if None not in limits and limits[0] != limits[1]:
        raise ValueError("max_tokens is another name of max_new_tokens; give one of them")
    return limits[0] or limits[1]


def _parse_body(values: dict[str, Any]) -> Prompt:
    """A line of OpenAI's batch files. Clients write null for what they leave out."""
    id_ = name_text(values.get("custom_id"), "custom_id")
    given = mapping(values["body"], "body")
    body = {name: value for name, value in given.items() if value is not None}
    if ("prompt" in body) == ("messages" in body):
        raise ValueError("body must hold either prompt or messages")
    if "messages" in body:
        messages = items(mapping, least=1)(body["messages"], "body.messages")
        return Prompt(id=id_, messages=tuple(messages), body=body)
    return Prompt(id=id_, text=name_text(body["prompt"], "body.prompt"), body=body)


_KINDS, _LIMITS = ("prompt", "messages", "turns"), ("max_new_tokens", "max_tokens")
_KEYS = (*_KINDS, "id", "question_id", "category", "reference", "response_format", *_LIMITS)
_BATCH_KEYS = ("custom_id", "method", "url", "body")
_MESSAGES = items(has(role=name_text, content=name_text), least=1)
