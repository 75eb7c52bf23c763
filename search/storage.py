"""Storage for the trials of a search: a journal file, a database, or memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
from optuna import storages
from optuna.exceptions import ExperimentalWarning
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from layerskip.files.records import redacted
from layerskip.files.schema import has, integer
from layerskip.files.writing import add_lines

LOCK_SECONDS = 5
"""A journal lock older than this belongs to a process that was killed while writing."""
BEAT_SECONDS, SILENT_SECONDS = 20, 120
"""Optuna's heartbeats in databases: how often a worker sends one, and the silence after which its
trial is failed."""


def check_storage(storage: str | os.PathLike[str]) -> None:
    """Raise a ValueError for a storage that cannot be opened, before anything slow is done."""
    with quiet(), readable_errors(f"cannot open the storage {storage}"):
        optuna.get_all_study_names(open_storage(storage))


def open_storage(storage: str | os.PathLike[str] | None) -> storages.BaseStorage:
    """Open a database by URL, a journal file by path, or this process's memory (None)."""
    if storage is None:
        return storages.InMemoryStorage()
    text = os.fspath(storage)
    if "://" not in text:
        Path(text).parent.mkdir(parents=True, exist_ok=True)
        return storages.JournalStorage(_Journal(text))
    options: dict[str, Any] = {"pool_pre_ping": True}  # servers close idle connections
    if text.startswith("sqlite"):
        options = {"connect_args": {"timeout": 60, "factory": _SqliteConnection}}
    if text.startswith("postgres") and find_spec("psycopg") is None:
        raise ValueError("psycopg is not installed: pip install 'layerskip[postgres]'")
    text = re.sub("^postgres(ql)?://", "postgresql+psycopg://", text)  # the extra's driver
    database = storages.RDBStorage(
        text,
        engine_kwargs=options,
        heartbeat_interval=BEAT_SECONDS,
        grace_period=SILENT_SECONDS,
        heartbeat_stale_trial_callback=storages.RetryHeartbeatStaleTrialCallback(),
    )
    return storages.get_storage(database)


class _Journal(JournalFileBackend):
    """Optuna's journal, for writers that may be killed at any moment.

    An incomplete line left by a killed process, at which Optuna's reader fails, is removed before
    the next is written. Only a finished trial waits for the disk; in Optuna all parameters do.
    """

    def __init__(self, path: str) -> None:
        self.path, self.lock = path, JournalFileSymlinkLock(path, grace_period=LOCK_SECONDS)
        super().__init__(path, lock_obj=self.lock)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        number = log_number_from + 1
        try:
            for log in super().read_logs(log_number_from):
                yield has(op_code=integer())(log, "a line")
                number += 1
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} of {self.path} is not one of a study's journal ({error}); remove "
                "the line, or begin a new study elsewhere"
            ) from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self.lock.acquire()
        try:
            with open(self.path, "r+b") as journal:
                add_lines(journal, lines.encode())
                if any(log.get("values") for log in logs):
                    os.fsync(journal.fileno())
        finally:
            self.lock.release()


class _SqliteConnection(sqlite3.Connection):
    """As safe as the default, without waiting for the disk at each of a trial's parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA journal_mode=WAL")
        self.execute("PRAGMA synchronous=NORMAL")


@contextlib.contextmanager
def readable_errors(what: str, errors: type[Exception] = Exception) -> Iterator[None]:
    """Raise a storage's errors as ValueErrors of one line, without passwords."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, errors):
            cause = cause.__context__  # Optuna may fail again while handling an error
        if cause is None:
            raise
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        # Not chained, since the driver's own message may contain the password.
        raise ValueError(redacted(f"{what}: {reason}")) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's log, and warnings about experimental features and heartbeats."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            warnings.filterwarnings("ignore", "Heartbeat of storage is supposed")
            warnings.filterwarnings("ignore", "The best trial has no intermediate values")
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
