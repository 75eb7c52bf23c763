"""A file of prompts answered by a `Serving`: a row for each, kept as soon as it is there.

One of several processes, on machines that share a folder, writes a part of the file OUT, which is
OUT.I-of-N, and joins it at its end; what a killed one has left is joined by the next that starts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from layerskip.files.schema import mapping, parse
from layerskip.files.writing import replacing
from layerskip.prompts import Prompt
from layerskip.serving.requests import Piece, TextRequest
from layerskip.serving.scheduler import Serving
from layerskip.text import decode_text

Row = dict[str, Any]
Asked = tuple[int, Prompt]
"""A prompt and its number among all."""
_BEGIN = b'{"id": "'  # of every row
_JOINING = 60.0  # seconds in which other processes join their parts


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
        progress: what has been added.
    """

    def __init__(self, file: IO[bytes], done: set[str]) -> None:
        self._file, self.done, self.progress = file, done, Progress()

    def add(self, row: Row) -> None:
        """Write a row."""
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        _keep(self._file)
        self.done.add(row["id"])
        self.progress.rows += 1
        self.progress.errors += "error" in row


@contextmanager
def open_answers(path: Path, *, retry_errors: bool = False) -> Iterator[Answers]:
    """The rows of a file, and more; nobody else has it open in this way.

    A last line that was cut off goes.

    Args:
        retry_errors: rows with an error go, too.

    Raises:
        ValueError: another process has it or a part of it, or a line is no row; names the line.
        OSError: it cannot be read or written.
    """
    with _locked(path):
        rows = _joined(path)
        if retry_errors and any(map(_failed, rows.values())):
            rows = {id_: line for id_, line in rows.items() if not _failed(line)}
            _write(path, rows)
        with path.open("ab") as file:
            yield Answers(file, set(rows))


@contextmanager
def open_part(
    path: Path, index: int, count: int, *, retry_errors: bool = False
) -> Iterator[Answers]:
    """The rows of a file, and more in a part of this process, joined at its end.

    Args:
        index, count: which of how many processes.
        retry_errors: rows with an error are not done; new ones take their places.

    Raises:
        ValueError: processes of another count have parts of it, or a line is no row.
        OSError: it cannot be read or written.
    """
    part = path.with_name(f"{path.name}.{index}-of-{count}")
    with ExitStack() as stack:
        with _locked(path, _JOINING):
            rows = _joined(path, count)
            stack.enter_context(_locked(part))
        done = {id_ for id_, line in rows.items() if not (retry_errors and _failed(line))}
        with part.open("ab") as file:
            try:
                yield Answers(file, done)
            finally:
                stack.close()
                with _locked(path, _JOINING):
                    _joined(path, count)


def _joined(path: Path, count: int = 1) -> dict[str, bytes]:
    """Lines of a file by the ids of their rows, parts of it that nobody writes joined.

    Args:
        count: of processes that may write parts meanwhile.
    """
    rows, torn = _read_rows(path)
    name = re.compile(re.escape(path.name) + r"\.\d+-of-(\d+)")
    matches = [(each, name.fullmatch(each.name)) for each in path.parent.iterdir()]
    with ExitStack() as stack:
        joined = []
        for part, match in matches:
            if match is None:
                continue
            try:
                stack.enter_context(_locked(part))
            except ValueError:
                if int(match[1]) != count:
                    raise
                continue
            rows |= _read_rows(part)[0]
            joined.append(part)
        if joined or torn:
            _write(path, rows)
        for part in joined:
            part.unlink()
    for part in joined:
        _lock_file(part).unlink(missing_ok=True)  # whoever locks a part has locked the whole
    return rows


def _read_rows(path: Path) -> tuple[dict[str, bytes], bool]:
    """Whole lines by the ids of their rows, and whether a line behind them was cut off."""
    data = path.read_bytes() if path.exists() else b""
    *lines, last = data.split(b"\n")
    rows = {}
    for number, line in enumerate(lines, 1):
        try:
            row = mapping(parse(line), "a row")
            if not isinstance(row.get("id"), str) or not row.keys() & {"text", "error"}:
                raise ValueError("a row must have an id, and a text or an error")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {error}; correct the line, or give another --output"
            ) from error
        rows[row["id"]] = line + b"\n"
    if not last.startswith(_BEGIN[: len(last)]):  # nothing that a run has begun
        raise ValueError(f"{path}, line {len(lines) + 1}: no row; give another --output")
    return rows, bool(last)


def _failed(line: bytes) -> bool:
    return "error" in json.loads(line)


def _write(path: Path, rows: dict[str, bytes]) -> None:
    with replacing(path) as partial, partial.open("wb") as file:
        file.writelines(rows.values())
        _keep(file)


def _keep(file: IO[bytes]) -> None:
    """What was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _locked(path: Path, seconds: float = 0) -> Iterator[None]:
    """Nobody else has locked it meanwhile.

    Args:
        seconds: to wait for others.

    Raises:
        ValueError: they have not gone.
    """
    lock = FileLock(_lock_file(path), timeout=seconds)
    try:
        lock.acquire()  # a dead process lets go
    except Timeout as error:
        raise ValueError(
            f"another run writes {path}; wait for its end, or give another --output"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def shard_of(prompts: Sequence[Prompt], index: int, count: int) -> list[Asked]:
    """Every `count`-th prompt from `index`, with its number among all."""
    return list(enumerate(prompts))[index::count]


@dataclass(frozen=True)
class Answering:
    """A model that answers prompts.

    Attributes:
        task_of: what is asked for; a ValueError of it becomes a row.
        ahead: prompts that are encoded and sorted at once; `serving` lets twice as many wait.
    """

    serving: Serving
    tokenizer: Any
    task_of: Callable[[int, Prompt], TextRequest]
    ahead: int

    def submit(self, id_: str, task: TextRequest, tell: Callable[[int, Row | None], None]) -> None:
        """Begin a text.

        Args:
            tell: called on the thread that steps, with the number of new tokens, and with the row
                at last.
        """
        tokens: list[int] = []

        def told(piece: Piece) -> None:
            tokens.extend(piece.tokens)
            row: Row | None = None
            if piece.reason == "error":
                row = error_row(id_, piece.error)
            elif piece.reason is not None:
                row = {
                    "id": id_,
                    "text": decode_text(self.tokenizer, tokens),
                    "token_ids": tokens,
                    "finish_reason": piece.reason,
                    "prompt_tokens": len(task.prompt),
                    "new_tokens": len(tokens),
                    "seed": task.seed if task.do_sample else None,
                    "drafted": piece.counts.drafted,
                    "accepted": piece.counts.accepted,
                }
            tell(len(piece.tokens), row)

        self.serving.submit(task, told)


def error_row(id_: str, reason: object) -> Row:
    """The row of a prompt that has no text."""
    return {"id": id_, "error": " ".join(str(reason).split())}


def answer_all(
    answering: Answering,
    asked: Iterable[Asked],
    answers: Answers,
    told: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Answer prompts that have no row yet, those of like lengths beside each other.

    Args:
        told: called after each step.
    """
    progress, going = answers.progress, set[str]()
    left = (each for each in asked if each[1].id not in answers.done)

    def submit(id_: str, task: TextRequest) -> None:
        def tell(new: int, row: Row | None) -> None:
            progress.tokens += new
            if row is not None:
                going.discard(id_)
                answers.add(row)

        answering.submit(id_, task, tell)
        going.add(id_)

    more = True
    while more or going:
        if more and len(going) <= answering.ahead // 2:  # before the batch runs out of texts
            taken = list(islice(left, answering.ahead))
            more = bool(taken)
            tasks: list[tuple[str, TextRequest]] = []
            for number, prompt in taken:
                try:
                    tasks.append((prompt.id, answering.task_of(number, prompt)))
                except ValueError as error:
                    answers.add(error_row(prompt.id, error))
            for id_, task in sorted(tasks, key=lambda each: len(each[1].prompt)):
                try:
                    submit(id_, task)
                except ValueError as error:
                    answers.add(error_row(id_, error))
        answering.serving.step()
        told(progress)
