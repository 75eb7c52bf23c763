"""Identifies the files that a report reads, and reads those that are one JSON document."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any, Literal

from layerskip.files.reading import errors_of, read_file
from layerskip.files.schema import mapping, parse

FileKind = Literal["run", "search", "training", "exits", "other"]
_BEGINS: dict[FileKind, bytes] = {
    "search": rb'\s*\{\s*"kind"\s*:\s*"search"',
    "exits": rb'\s*\{\s*"kind"\s*:\s*"exits"',
    "training": rb'\s*\{\s*"schema"\s*:\s*\d+\s*,\s*"recipe"',
}
"""The first characters of a document as written, which identify even an incomplete one."""


def kind_of(path: str | os.PathLike[str]) -> FileKind:
    """The kind of a file, complete or not: "other" is a complete JSON document of unknown kind.

    Anything that is not a document counts as a run, whose reader reports what is wrong.
    """
    try:
        data = read_file(path)
        for kind, begins in _BEGINS.items():
            if re.match(begins, data):
                return kind
        document = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return "run"
    if not isinstance(document, dict):
        return "run"
    named = document.get("kind")
    if named in ("search", "exits"):
        return "search" if named == "search" else "exits"
    if {"recipe", "curve"} <= document.keys():
        return "training"
    return "run" if named == "header" else "other"


def read(
    path: str | os.PathLike[str],
    what: str,
    check: Callable[[dict[str, Any]], None],
    advice: str = "",
) -> dict[str, Any]:
    """Read and check a document; `what` names it in errors, `advice` follows if it is incomplete.

    Raises:
        ValueError: the file cannot be read or is incomplete, or `check` rejects it; names the file
            and the reason in one line.
    """
    with errors_of(f"{what} {path}"):
        try:
            document: dict[str, Any] = mapping(parse(read_file(path)), f"a {what}")
        except json.JSONDecodeError as error:
            reason = f"it is cut off or not JSON (line {error.lineno})"
            raise ValueError(f"{reason}{advice}") from error
        check(document)
    return document
