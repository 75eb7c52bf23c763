"""Texts of any size as files of token ids, which training reads window by window.

Shapes: N windows, T tokens of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerskip.files.reading import errors_of
from layerskip.files.schema import parse_characters, text
from layerskip.files.writing import replacing
from layerskip.texts.prompts import JSON_SUFFIXES

TRAIN, APART = "train.bin", "apart.bin"
"""Training token ids, and held-out ones; 4 bytes each."""
EVERY = 16
"""One of this many documents is held out."""
LINES = 64
"""Lines of plain text that count as one document."""
_TOGETHER = 32  # documents tokenised in one call


def documents(path: Path) -> Iterator[str]:
    """Yield the texts of a file, but no empty ones: of each JSON line, otherwise of LINES lines.

    Raises:
        ValueError: the file cannot be read, or a line is wrong.
    """
    with errors_of(f"texts {path}"), path.open(encoding="utf-8-sig") as file:
        if path.suffix in JSON_SUFFIXES:
            for number, line in enumerate(file, 1):
                if line.strip() and (document := _text_of(line, number)).strip():
                    yield document
            return
        while lines := "".join(islice(file, LINES)):
            yield lines


def _text_of(line: str, number: int) -> str:
    with errors_of(f"line {number}"):
        document = parse_characters(line)
        if not isinstance(document, dict) or "text" not in document:
            raise ValueError('a line must be an object with "text"')
        return str(text(document["text"], "text"))


def tokenised(texts: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the token ids of each text, followed by the token that ends a text."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rest = iter(texts)
    while some := list(islice(rest, _TOGETHER)):
        for ids in tokenizer(some, verbose=False)["input_ids"]:
            yield ids + end


def split(texts: Iterable[list[int]], apart: int, length: int) -> Iterator[tuple[str, list[int]]]:
    """Assign each text to a file: two windows' length is held out of the first texts, until they
    fill one, and of every EVERY-th text, until there are `apart` windows."""
    kept = 0
    for number, ids in enumerate(texts):
        if kept <= length or (number % EVERY == 0 and kept <= apart * length):
            kept += len(ids[: 2 * length])
            yield APART, ids[: 2 * length]
        else:
            yield TRAIN, ids


def check_length(texts: Iterable[list[int]], windows: int, length: int) -> None:
    """Raise an error for texts too short for `windows` windows and one held out; reads no further.

    Raises:
        ValueError: they are too short.
    """
    counts, need = {TRAIN: 0, APART: 0}, {TRAIN: windows * length + 1, APART: length + 1}
    for name, ids in split(texts, 1, length):
        counts[name] += len(ids)
        if all(counts[each] >= need[each] for each in need):
            return
    raise ValueError(
        f"the texts hold {sum(counts.values()):,} tokens, too few for {windows} windows of "
        f"{length} to train on and one to judge by; give more, or shorten exits' windows (--window)"
    )


def write_tokens(
    texts: Iterable[list[int]], folder: Path, *, length: int, tokens: float, apart: int
) -> Iterator[int]:
    """Write texts to the files TRAIN and APART of a folder atomically (see `split`), TRAIN last.

    Args:
        tokens: maximum number of training tokens.

    Yields:
        The number of training tokens so far, now and then.
    """
    with (
        replacing(folder / TRAIN) as train,
        replacing(folder / APART) as kept,
        train.open("wb") as train_file,
        kept.open("wb") as kept_file,
    ):
        files = {TRAIN: train_file, APART: kept_file}
        for number, (name, ids) in enumerate(split(texts, apart, length)):
            files[name].write(np.asarray(ids, np.int32).tobytes())
            count = train_file.tell() // 4
            if number % _TOGETHER == 0:
                yield count
            if count >= tokens:
                break


def length_of(path: Path) -> int:
    """The number of tokens in a file."""
    return path.stat().st_size // 4


def windows(path: Path, length: int) -> Tensor:
    """The windows of a file, (N, T + 1) int32, mapped rather than read; neighbours share a token.

    The file holds more than T tokens.
    """
    tokens = torch.from_file(str(path), size=length_of(path), dtype=torch.int32)
    return tokens.unfold(0, length + 1, length)
