"""Files that a report reads: tells their kinds apart, and reads those of one JSON document."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any, Literal

from layerskip.files.reading import read_file
from layerskip.files.schema import mapping, parse

FileKind = Literal["run", "search", "training", "exits", "other"]
_BEGINS: dict[FileKind, bytes] = {
    "search": rb'\s*\{\s*"kind"\s*:\s*"search"',
    "exits": rb'\s*\{\s*"kind"\s*:\s*"exits"',
    "training": rb'\s*\{\s*"schema"\s*:\s*\d+\s*,\s*"recipe"',
}
"""What a document begins with as it is written, so that one that was cut off is known, too."""


def kind_of(path: str | os.PathLike[str]) -> FileKind:
    """What a file holds, whole or cut off: "other" is a whole JSON document of no known kind.

    Whatever is no document at all counts as a run, whose reader says what is wrong with it.
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
    """Read and check a document; `what` it is, and `advice` where it is cut off, are for errors.

    Raises:
        ValueError: the file cannot be read or is cut off, or `check` refuses it; names the file and
            the reason, in one line.
    """
    try:
        document: dict[str, Any] = mapping(parse(read_file(path)), f"a {what}")
        check(document)
    except OSError as error:
        raise ValueError(f"cannot read {what} {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        reason = f"is cut off or not JSON (line {error.lineno})"
        raise ValueError(f"{what} {path} {reason}{advice}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} {path}: {error}") from error
    return document
