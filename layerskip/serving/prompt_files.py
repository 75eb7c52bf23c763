"""Answers a file of prompts with a `Serving`, and stores each row as soon as it is complete.

Several processes, on machines that share a folder, may write one file: each answers its own part of
the prompts, and appends complete rows under a lock.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from layerskip.files.locking import alone, held
from layerskip.files.reading import errors_of
from layerskip.files.schema import mapping, parse
from layerskip.files.writing import add_lines, naming, replacing
from layerskip.serving.answers import Answer
from layerskip.serving.requests import Piece
from layerskip.serving.scheduler import Serving
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import decode_text, plural

Row = dict[str, Any]
Numbered = tuple[int, Prompt]
"""A prompt and its number among all prompts."""
_BEGIN = b'{"id": "'  # the beginning of every row
_WAIT = 60.0  # seconds to wait for a lock while others append rows
_PARTS = ("another model", "other settings", "another prompt")  # the parts of a fingerprint


class Answers:
    """Rows of a JSON lines file. They are on disk when `add` returns.

    Attributes:
        done: ids of the rows.
        rows, errors, tokens: counts of this run: rows, those with an error, and new tokens.
    """

    def __init__(self, path: Path, fingerprints: Mapping[str, str], done: set[str]) -> None:
        self._path, self._fingerprints = path, fingerprints
        self.done = done
        self.rows = self.errors = self.tokens = 0

    def add(self, row: Row) -> None:
        """Append a row."""
        if (fingerprint := self._fingerprints.get(row["id"])) is not None:
            row = row | {"fingerprint": fingerprint}
        with _locked(self._path), naming(self._path), self._path.open("a+b") as file:
            add_lines(file, _line(row))
            os.fsync(file.fileno())
        self.done.add(row["id"])
        self.rows += 1
        self.errors += _failed(row)


@contextmanager
def open_answers(
    path: Path,
    fingerprints: Mapping[str, str],
    part: tuple[int, int] = (0, 1),
    *,
    retry_errors: bool = False,
    force: bool = False,
) -> Iterator[Answers]:
    """Open a file of rows; only runs with other parts of the same prompts may write it meanwhile.

    Args:
        fingerprints: by the id of each prompt of this part, everything that its answer depends on:
            three hashes separated by hyphens, of the model, the settings and the prompt.
        part: the number of this process, and the number of processes.
        retry_errors: remove rows of these prompts that have an error.
        force: also remove rows of these prompts that have another fingerprint.

    Raises:
        ValueError: another run uses the file, or a line is not a row with the right fingerprint.
        OSError: the file cannot be read or written.
    """
    with _alone(path, *part):
        with _locked(path):
            rows = _read_rows(path)
            ours = [id_ for id_ in rows if id_ in fingerprints and "fingerprint" in rows[id_]]
            other = {i: rows[i] for i in ours if rows[i]["fingerprint"] != fingerprints[i]}
            if other and not force:
                raise ValueError(_refusal(path, other, fingerprints))
            gone = {*other}
            if retry_errors:
                gone |= {id_ for id_, row in rows.items() if id_ in fingerprints and _failed(row)}
            if gone:
                kept = (row for id_, row in rows.items() if id_ not in gone)
                with replacing(path) as partial, partial.open("wb") as file:
                    file.writelines(_line(row) for row in kept)
                    file.flush()
                    os.fsync(file.fileno())
        yield Answers(path, fingerprints, rows.keys() - gone)


def _refusal(path: Path, rows: Mapping[str, Row], fingerprints: Mapping[str, str]) -> str:
    first = next(iter(rows))
    pairs = zip(
        _PARTS, rows[first]["fingerprint"].split("-"), fingerprints[first].split("-"), strict=True
    )
    what = " and ".join(name for name, old, new in pairs if old != new)
    return (
        f"{path} has {plural(len(rows), 'row')} with another origin; the first is that of prompt "
        f"{first}, from {what}; give another --output, or --force to answer these prompts again"
    )


def _read_rows(path: Path) -> dict[str, Row]:
    """Read rows by their ids; an incomplete last line is ignored."""
    data = path.read_bytes() if path.exists() else b""
    *lines, last = data.split(b"\n")
    rows = {}
    for number, line in enumerate(lines, 1):
        with errors_of(f"{path}, line {number}", "; correct the line, or give another --output"):
            row = mapping(parse(line), "a row")
            if not isinstance(row.get("id"), str) or not row.keys() & {"text", "response", "error"}:
                raise ValueError("a row must have an id, and a text or an error")
        rows[row["id"]] = row
    if not last.startswith(_BEGIN[: len(last)]):  # not the beginning of a row
        raise ValueError(f"{path}, line {len(lines) + 1}: not a row of run; give another --output")
    return rows


def _line(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _failed(row: Row) -> bool:
    return row.get("error") is not None


@contextmanager
def _alone(path: Path, index: int, count: int) -> Iterator[None]:
    """Hold off runs with other parts, and other processes of this part, from writing the file."""
    mine = path.with_name(f".{path.name}.{index}-of-{count}.lock")
    pattern = re.compile(rf"\.{re.escape(path.name)}\.\d+-of-(\d+)\.lock")
    with ExitStack() as stack:
        with _locked(path):
            for other in path.parent.iterdir():
                match = pattern.fullmatch(other.name)
                if match is not None and int(match[1]) != count:
                    with alone(other, path):  # left by a killed process
                        pass
            stack.enter_context(alone(mine, path))
        try:
            yield
        finally:
            with _locked(path):
                stack.close()


def _locked(path: Path) -> AbstractContextManager[None]:
    """Prevent others from reading or appending rows meanwhile."""
    return held(path.with_name(f".{path.name}.lock"), path, _WAIT)


@dataclass(frozen=True)
class Answering:
    """A model that answers prompts.

    Attributes:
        answer_for: prepares the answer to a prompt with its number; its ValueError becomes a row.
        ahead: number of prompts sorted at once; `serving` queues up to twice as many.
    """

    serving: Serving
    tokenizer: Any
    answer_for: Callable[[int, Prompt], Answer]
    ahead: int

    def submit(self, numbered: Numbered, tell: Callable[[int, Row | None], None]) -> None:
        """Submit a prompt.

        Args:
            tell: called with the number of new tokens, and finally with the row; on the thread that
                decodes, or at once if the prompt is refused.
        """
        prompt, tokens = numbered[1], list[int]()

        def receive(piece: Piece) -> None:
            tokens.extend(piece.tokens)
            if prompt.body is not None:
                answer.add(0, piece)
            row: Row | None = None
            if piece.reason in ("error", "cancelled"):
                row = error_row(prompt, piece.error or piece.reason)
            elif piece.reason is not None:
                row = self._row(prompt, answer, tokens, piece)
            tell(len(piece.tokens), row)

        try:
            answer = self.answer_for(*numbered)
            self.serving.submit(answer.choices[0].task, receive)
        except ValueError as error:
            tell(0, error_row(prompt, error))

    def _row(self, prompt: Prompt, answer: Answer, tokens: list[int], last: Piece) -> Row:
        if prompt.body is not None:
            response = {"status_code": 200, "request_id": prompt.id, "body": answer.whole()}
            return _batch_row(prompt, response, None)
        request = answer.choices[0].task
        return {
            "id": prompt.id,
            "text": decode_text(self.tokenizer, tokens),
            "token_ids": tokens,
            "finish_reason": last.reason,
            "prompt_tokens": request.num_prompt,
            "new_tokens": len(tokens),
            "seed": request.seed if request.do_sample else None,
            "drafted": last.counts.drafted,
            "accepted": last.counts.accepted,
        }


def error_row(prompt: Prompt, reason: object) -> Row:
    """The row of a prompt without a text."""
    message = " ".join(str(reason).split())
    if prompt.body is None:
        return {"id": prompt.id, "error": message}
    return _batch_row(prompt, None, {"message": message})


def _batch_row(prompt: Prompt, response: Row | None, error: Row | None) -> Row:
    return {"id": prompt.id, "custom_id": prompt.id, "response": response, "error": error}


def length(numbered: Numbered) -> int:
    """The approximate length of a prompt, by which prompts are grouped."""
    return len(numbered[1].text or str(numbered[1].messages))


def answer_all(
    answering: Answering,
    prompts: Iterable[Numbered],
    answers: Answers,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Answer prompts that have no row yet, grouping those of similar lengths.

    Args:
        progress: called after each step.
    """
    going, ended = 0, list[Row]()
    left = (each for each in prompts if each[1].id not in answers.done)

    def tell(new: int, row: Row | None) -> None:
        answers.tokens += new
        if row is not None:  # written below, where an error ends the run
            ended.append(row)

    more = True
    while more or going:
        if more and going <= answering.ahead // 2:  # refill before the batch runs out
            taken = list(islice(left, answering.ahead))
            more = bool(taken)
            going += len(taken)
            for each in sorted(taken, key=length):
                answering.submit(each, tell)
        answering.serving.step()
        for row in ended:
            answers.add(row)
        going -= len(ended)
        ended.clear()
        progress()
