"""Files of earlier answers, which drafts are looked up in: a header, then a line for each answer.

Several processes may share a file. Each adds its answers under a lock, and writes the file anew.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from layerskip.files import schema
from layerskip.files.locking import LOCK, held
from layerskip.files.reading import errors_of, read_file
from layerskip.files.schema import has, integer, items, name_text, parse
from layerskip.files.writing import replacing

SCHEMA = 1
_HEADER = has(schema=schema.version(SCHEMA), tokenizer=name_text)
_WAIT = 60.0  # seconds to wait for other processes, which hold the lock for milliseconds


@dataclass(frozen=True)
class AnswerFile:
    """The token ids of earlier answers in a folder.

    Attributes:
        tokenizer: a hash of the vocabulary that the ids belong to.
        vocabulary: its number of tokens.
        most: maximum number of tokens in the file.
    """

    folder: Path
    tokenizer: str
    vocabulary: int
    most: int

    @property
    def path(self) -> Path:
        return self.folder / "answers.jsonl"

    def read(self) -> list[list[int]]:
        """The answers, the oldest first; none if there is no file.

        Raises:
            ValueError: the file is damaged or belongs to another tokenizer, or the folder cannot be
                written to; in one line.
        """
        with self._locked():
            lines = self._lines()[1:]
        answers = list[list[int]]()
        for number, line in enumerate(lines, 2):
            with self._errors(f", line {number}"):
                answers.append(items(integer(), least=1)(parse(line), "an answer"))
                if max(answers[-1]) >= self.vocabulary:
                    raise ValueError(f"{max(answers[-1])} is no token id of the model")
        return answers

    def add(self, tokens: Sequence[int]) -> None:
        """Add an answer, to which the oldest ones give way.

        Raises:
            OSError, ValueError: it cannot be written, or others have spoilt the file.
        """
        with self._locked():
            answers = deque([*self._lines()[1:], _line(tokens)])
            size = sum(map(_size, answers))
            while size > self.most:
                size -= _size(answers.popleft())
            header = _line({"schema": SCHEMA, "tokenizer": self.tokenizer})
            with replacing(self.path) as partial:
                partial.touch(0o600)  # answers may be private
                partial.write_bytes(b"".join([header, *answers]))

    def clear(self) -> None:
        """Remove the file."""
        with self._locked():
            self.path.unlink(missing_ok=True)

    def _lines(self) -> list[bytes]:
        """The header and the answers."""
        with self._errors():
            lines = read_file(self.path).splitlines(True) if self.path.exists() else []
            if lines and _HEADER(parse(lines[0]), "")["tokenizer"] != self.tokenizer:
                raise ValueError("it holds token ids of another tokenizer")
        return lines

    def _errors(self, where: str = "") -> AbstractContextManager[None]:
        advice = "; give another --remember folder, or remove the file"
        return errors_of(f"{self.path}{where}", advice)

    def _locked(self) -> AbstractContextManager[None]:
        return held(self.folder / LOCK, self.path, _WAIT, "--remember")


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _size(line: bytes) -> int:
    """The number of tokens of an answer."""
    return line.count(b",") + 1
