"""Locks, so that several processes do not write the same file or folder at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
"""The lock of a folder, inside it."""


@contextmanager
def held(lock: Path, path: Path, seconds: float = 0, flag: str = "--output") -> Iterator[None]:
    """Hold the lock of a file or folder. If its process dies, the lock is released.

    Args:
        path: the file or folder, named by `flag`.

    Raises:
        ValueError: others hold the lock for longer than `seconds`, or no file can be made there.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()  # where no file can be made, the library would wait as if others held it
    except OSError as error:
        raise ValueError(
            f"cannot write to {lock.parent}: {error.strerror}; give another {flag}"
        ) from error
    try:
        holding = FileLock(lock, timeout=seconds).acquire()
    except Timeout as error:
        raise ValueError(
            f"another run writes {path}; wait until it ends, or give another {flag}"
        ) from error
    with holding:
        yield


@contextmanager
def alone(lock: Path, path: Path, flag: str = "--output") -> Iterator[None]:
    """Hold the lock of a file or folder, as `held`, and leave no trace of it."""
    made = not lock.parent.exists()
    with held(lock, path, flag=flag):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # unless it is in use now
                    lock.parent.rmdir()
