"""Writes files and folders atomically.

Data goes to a temporary name in the same folder, which is then renamed. So a reader sees either the
old or the new contents, and a failure leaves the old.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write a file to; at the end it replaces `path`.

    A link stays, and the file that it points to is replaced.

    Raises:
        OSError: the folder does not exist or cannot be written to, the disk is full, or `path` is a
            pipe or a device.
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
    """Make errors that name no file (a full disk), or the temporary one, name this path."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial)):
            error.filename = str(path)
            del error.filename2  # otherwise None would be printed
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text with `\\n` line ends, atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def add_lines(file: BinaryIO, lines: bytes) -> None:
    """Add whole lines to a file, in place of a last one that a killed process has cut off."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read(1) not in (b"\n", b""):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
    file.write(lines)
    file.flush()


def replace_folder(built: Path, output: Path) -> None:
    """Move a folder into place. What was there is removed, unless that fails."""
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


@contextmanager
def replacing_folder(output: Path) -> Iterator[Path]:
    """A temporary folder to write files to; at the end it replaces `output`, `readable`."""
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        partial.mkdir()
        yield partial
        readable(partial)
        replace_folder(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def readable(folder: Path) -> None:
    """Let everybody read the files of a folder; some libraries write weights for the owner only."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
