"""Reads whole files named by the user; refuses implausibly large ones, and names those in error."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LARGEST = 1 << 30
"""Maximum bytes of a file of this package: far more than it ever writes."""
LONGEST = 1 << 28
"""Maximum bytes of a user's own text."""


def read_file(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Read a file of at most `most` bytes.

    Raises:
        OSError: it cannot be read, is larger, or is not a regular file: a pipe may block forever, a
            device may never end.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
    if status.st_size > most:
        what = f"it has {status.st_size:,} bytes, and such a file has {most:,} at most"
        raise OSError(errno.EFBIG, what, str(path))
    return Path(path).read_bytes()


@contextmanager
def errors_of(what: str, advice: str = "") -> Iterator[None]:
    """Turn an error about a file, or a part of it, into a ValueError of one line that names it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: not UTF-8: {error.reason} at byte {error.start}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}{advice}") from error


def read_text(path: str | os.PathLike[str]) -> bytes:
    """Read a user's text, which another program may also write to a pipe.

    Raises:
        OSError: it cannot be read, or does not end within `LONGEST`.
    """
    with open(path, "rb") as file:
        data = file.read(LONGEST + 1)
    if len(data) > LONGEST:
        raise OSError(errno.EFBIG, f"it has more than {LONGEST:,} bytes", str(path))
    return data
