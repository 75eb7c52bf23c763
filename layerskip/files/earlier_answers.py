"""Files of earlier answers, which drafts are looked up in: a header, then a line for each answer.

Several processes may share a file. Each appends its answers under a lock, and one that finds the
file full writes it anew with the newest half.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from layerskip.files import schema
from layerskip.files.locking import LOCK, held
from layerskip.files.reading import errors_of, read_file
from layerskip.files.schema import has, integer, items, name_text, parse
from layerskip.files.writing import add_lines, naming, replacing

SCHEMA = 1
_HEADER = has(schema=schema.version(SCHEMA), tokenizer=name_text)
_WAIT = 60.0  # seconds to wait for other processes, which hold the lock for milliseconds


class AnswerFile:
    """The token ids of earlier answers in a folder.

    Args:
        tokenizer: a hash of the vocabulary that the ids belong to.
        vocabulary: its number of tokens.
        most: maximum number of tokens in the file.
    """

    def __init__(self, folder: Path, tokenizer: str, vocabulary: int, most: int) -> None:
        self._folder, self._path = folder, folder / "answers.jsonl"
        self._tokenizer, self._vocabulary, self._most = tokenizer, vocabulary, most

    def read(self) -> list[list[int]]:
        """The answers, the oldest first; none if there is no file.

        Raises:
            ValueError: the file is damaged, or belongs to another tokenizer, or files cannot be
                written there; in one line.
        """
        with self._locked():
            lines = self._lines()
        check, answers = items(integer(), least=1), list[list[int]]()
        for number, line in enumerate(lines[1:], 2):
            with self._errors(f", line {number}"):
                tokens = check(parse(line), "an answer")
                if max(tokens) >= self._vocabulary:
                    most = self._vocabulary - 1
                    raise ValueError(f"token ids must be in 0..{most}, got {max(tokens)}")
                answers.append(tokens)
        return answers

    def add(self, tokens: Sequence[int]) -> None:
        """Append an answer; the oldest ones give way.

        Raises:
            OSError, ValueError: it cannot be written, or others have spoilt the file.
        """
        line = _line(tokens)
        with self._locked(), naming(self._path):
            lines = self._lines()
            if lines and sum(map(_size, lines[1:])) + len(tokens) <= self._most:
                with self._path.open("a+b") as file:
                    add_lines(file, line)
                return
            first, room = len(lines), self._most // 2 - len(tokens)
            while first > 1 and (room := room - _size(lines[first - 1])) >= 0:
                first -= 1
            header = _line({"schema": SCHEMA, "tokenizer": self._tokenizer})
            with replacing(self._path) as partial:
                partial.write_bytes(b"".join([header, *lines[first:], line]))

    def clear(self) -> None:
        """Remove the file."""
        with self._locked():
            self._path.unlink(missing_ok=True)

    def _lines(self) -> list[bytes]:
        """The header and the answers; a last line that a killed process has cut off is left out."""
        with self._errors(""):
            if not self._path.exists():
                return []
            lines = read_file(self._path).splitlines(keepends=True)
            if lines and not lines[-1].endswith(b"\n"):
                lines.pop()
            if lines and _HEADER(parse(lines[0]), "")["tokenizer"] != self._tokenizer:
                raise ValueError("it holds token ids of another tokenizer")
        return lines

    def _errors(self, where: str) -> AbstractContextManager[None]:
        advice = "; give another --remember folder, or remove the file"
        return errors_of(f"{self._path}{where}", advice)

    def _locked(self) -> AbstractContextManager[None]:
        return held(self._folder / LOCK, self._path, _WAIT, "--remember")


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _size(line: bytes) -> int:
    """The number of tokens of an answer."""
    return line.count(b",") + 1
