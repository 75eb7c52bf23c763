"""A file of prompts answered by a `Serving`: a row for each, kept as soon as it is there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from layerskip.files.schema import mapping, parse
from layerskip.files.writing import replacing
from layerskip.prompts import Prompt
from layerskip.serving.scheduler import Serving
from layerskip.serving.tasks import Piece, Task
from layerskip.text import decode_text

_BEGIN = b'{"id": "'  # of every row


@dataclass
class Progress:
    """Of this run: rows written, those of them with an error, and tokens told."""

    rows: int = 0
    errors: int = 0
    tokens: int = 0


class Answers:
    """Rows in a file of JSON lines, on the disk when `add` returns.

    Attributes:
        done: ids of the rows.
        failed: those of rows with an error.
    """

    def __init__(self, file: IO[bytes], done: set[str], failed: set[str]) -> None:
        self._file, self.done, self.failed = file, done, failed

    def add(self, row: dict[str, Any]) -> None:
        """Write a row."""
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(row["id"])
        if "error" in row:
            self.failed.add(row["id"])


@contextmanager
def open_answers(path: Path, *, retry_errors: bool = False) -> Iterator[Answers]:
    """The rows of a file, and more; nobody else has it open in this way.

    A last line that was cut off goes.

    Args:
        retry_errors: rows with an error go, too.

    Raises:
        ValueError: another process has it, or a line is no row; names the line.
        OSError: it cannot be read or written.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"), blocking=False)
    try:
        lock.acquire()  # a dead process lets go
    except Timeout as error:
        raise ValueError(
            f"another run writes {path}; wait for its end, or give another --output"
        ) from error
    try:
        rows, torn = _read_rows(path)
        kept = [line for line, row in rows if not (retry_errors and "error" in row)]
        if len(kept) < len(rows):
            with replacing(path) as partial:
                partial.write_bytes(b"".join(kept))
        elif torn:
            os.truncate(path, sum(map(len, kept)))
        left = [row for _, row in rows if not (retry_errors and "error" in row)]
        failed = {row["id"] for row in left if "error" in row}
        with path.open("ab") as file:
            yield Answers(file, {row["id"] for row in left}, failed)
    finally:
        lock.release()


def _read_rows(path: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], bool]:
    """Whole lines and their rows, and whether a line behind them was cut off."""
    data = path.read_bytes() if path.exists() else b""
    *lines, last = data.split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = mapping(parse(line), "a row")
            if not isinstance(row.get("id"), str) or not row.keys() & {"text", "error"}:
                raise ValueError("a row must have an id, and a text or an error")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {error}; correct the line, or give another --output"
            ) from error
        rows.append((line + b"\n", row))
    if not last.startswith(_BEGIN[: len(last)]):  # nothing that a run has begun
        raise ValueError(f"{path}, line {len(lines) + 1}: no row; give another --output")
    return rows, bool(last)


def shard_of(prompts: Sequence[Prompt], index: int, count: int) -> list[tuple[int, Prompt]]:
    """Every `count`-th prompt from `index`, with its number among all."""
    return list(enumerate(prompts))[index::count]


def answer_all(
    serving: Serving,
    tokenizer: Any,
    asked: Iterable[tuple[int, Prompt]],
    task_of: Callable[[int, Prompt], Task],
    answers: Answers,
    *,
    ahead: int,
    told: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer prompts that have no row yet, those of like lengths beside each other.

    Args:
        asked: prompts and their numbers.
        task_of: what is asked for; a ValueError of it becomes a row.
        ahead: prompts that are encoded and sorted at once; `serving` must let twice as many wait.
        told: called after each step.
    """
    progress, going = Progress(), set[str]()
    left = (each for each in asked if each[1].id not in answers.done)

    def fail(id_: str, reason: object) -> None:
        answers.add({"id": id_, "error": " ".join(str(reason).split())})
        progress.rows += 1
        progress.errors += 1

    def submit(id_: str, task: Task) -> None:
        tokens: list[int] = []

        def tell(piece: Piece) -> None:
            tokens.extend(piece.tokens)
            progress.tokens += len(piece.tokens)
            if piece.reason is None:
                return
            going.discard(id_)
            if piece.reason == "error":
                return fail(id_, piece.error)
            row = {
                "id": id_,
                "text": decode_text(tokenizer, tokens),
                "token_ids": tokens,
                "finish_reason": piece.reason,
                "prompt_tokens": len(task.prompt),
                "new_tokens": len(tokens),
                "seed": task.seed if task.do_sample else None,
                "drafted": piece.counts.drafted,
                "accepted": piece.counts.accepted,
            }
            answers.add(row)
            progress.rows += 1

        serving.submit(task, tell)
        going.add(id_)

    more = True
    while more or going:
        if more and len(going) <= ahead // 2:  # before the batch runs out of texts
            taken = list(islice(left, ahead))
            more = bool(taken)
            tasks: list[tuple[str, Task]] = []
            for number, prompt in taken:
                try:
                    tasks.append((prompt.id, task_of(number, prompt)))
                except ValueError as error:
                    fail(prompt.id, error)
            for id_, task in sorted(tasks, key=lambda each: len(each[1].prompt)):
                try:
                    submit(id_, task)
                except ValueError as error:
                    fail(id_, error)
        serving.step()
        told(progress)
    return progress
