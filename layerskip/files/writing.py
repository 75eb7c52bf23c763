"""Files and folders that come to be whole or not at all.

What is written goes to a temporary name beside its place and is renamed into it, so that a reader
sees the old or the new, and a failure leaves the old.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write a file to, which takes the place of `path` at the end.

    Raises:
        OSError: the folder is not there or cannot be written, or the disk is full.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a full disk does not say where
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 with `\\n` line ends, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def replace_folder(built: Path, output: Path) -> None:
    """Put a folder in a place; what was there goes, unless that fails."""
    old = output.with_name(f".{output.name}.{os.getpid()}.old")
    if output.exists():
        os.replace(output, old)
    try:
        os.replace(built, output)
    except OSError:
        if old.exists():
            os.replace(old, output)
        raise
    shutil.rmtree(old, ignore_errors=True)
