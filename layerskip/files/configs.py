"""The files that skip configs come in, named ones too; knows JSON, not what a config may hold."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from layerskip.files.schema import parse
from layerskip.files.writing import write_text


def read(path: Path) -> tuple[Path, Any]:
    """The file meant by `path`, and the JSON of the config in it.

    A file of several configs under names (the bare sets published with Draft & Verify) is asked for
    one of them: then `path` ends in `#name`.

    Raises:
        ValueError: the file is missing or is not JSON, or the name is; says which.
    """
    path, name = _split_name(path)
    try:
        content = parse(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read skip config {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"skip config {path} is not valid JSON: {error}") from error
    try:
        return path, _choose(content, name)
    except ValueError as error:
        raise ValueError(f"skip config {path}: {error}") from error


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write JSON to `path`, whole or not at all; every list of numbers on one line.

    Raises:
        OSError: the folder cannot be written.
        TypeError, ValueError: something in it is not JSON.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    # a line for each list of numbers, however long: no string holds a line break
    text = re.sub(r"\[\n[^][{}\"]+\]", lambda found: _one_line(found[0]), text)
    write_text(path, text)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("[ ", "[").replace(" ]", "]")


def _split_name(path: Path) -> tuple[Path, str | None]:
    """`file.json#name` as path and name, unless a file is really called that."""
    stem, mark, name = path.name.rpartition("#")
    return (path.with_name(stem), name) if stem and mark and not path.exists() else (path, None)


def _choose(content: object, name: str | None) -> object:
    """The config itself, or the one called `name` of a file that holds several."""
    if (
        not isinstance(content, dict)
        or not content
        or any(
            not isinstance(value, dict) or value.keys() != {"attention", "mlp"}
            for value in content.values()
        )
    ):
        if name is not None:
            raise ValueError(f"holds one skip config without a name; leave out #{name}")
        return content
    if name not in content:
        choices = ", ".join(f"#{key}" for key in content)
        got = "no name" if name is None else f"#{name}"
        raise ValueError(f"holds several skip configs; end the path in one of {choices}; got {got}")
    return content[name]
