"""Files and folders that come to be whole or not at all.

What is written goes to a temporary name beside its place and is renamed into it, so that a reader
sees the old or the new, and a failure leaves the old.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write a file to, which takes the place of `path` at the end.

    A link stays, and the file that it leads to is replaced.

    Raises:
        OSError: the folder is not there or cannot be written, the disk is full, or there is a pipe
            or a device in that place.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path, partial):
            yield partial
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """An error that names no file, as that of a full disk, or the temporary one, names this."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial)):
            error.filename = str(path)
            del error.filename2  # None would be printed
        raise


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
