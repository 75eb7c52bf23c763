"""Files of one JSON document: which kind one is of, and reading it whole; knows no kind of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from layerskip.files.schema import mapping, parse


def holds(
    path: str | os.PathLike[str], begins: bytes, fits: Callable[[Mapping[str, Any]], bool]
) -> bool:
    """Whether a file is of a kind, whole or cut off; False where it cannot be read.

    Args:
        begins: a pattern of what such a file begins with, as it is written.
        fits: whether a whole document, in whatever order, is one.
    """
    try:
        data = Path(path).read_bytes()
    except OSError:
        return False
    if re.match(begins, data):
        return True
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and fits(document)


def read(
    path: str | os.PathLike[str],
    what: str,
    check: Callable[[dict[str, Any]], None],
    advice: str = "",
) -> dict[str, Any]:
    """Read and check a document.

    Args:
        what: it is, in one word.
        advice: what to do where it is cut off.

    Raises:
        ValueError: the file cannot be read or is cut off, or `check` refuses it; names the file and
            the reason, in one line.
    """
    try:
        document: dict[str, Any] = mapping(parse(Path(path).read_bytes()), f"a {what}")
        check(document)
    except OSError as error:
        raise ValueError(f"cannot read {what} {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} {path} is cut off or not JSON: {error}{advice}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} {path}: {error}") from error
    return document
