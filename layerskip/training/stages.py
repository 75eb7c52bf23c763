"""Common parts of trainings: settings, a folder, the seconds spent in stages, and the steps.

If a training was killed, the same command resumes it after the last complete file.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from layerskip.files.documents import read
from layerskip.files.locking import LOCK
from layerskip.files.schema import check_fields, checked, number, parse
from layerskip.files.writing import write_text
from layerskip.training import data, processes, token_files

T = TypeVar("T")
RECORD = "train.json"
IDENTITY = "recipe.json"
"""The file in the work folder that says which training it is; it stays."""


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """The settings of any training.

    Attributes:
        loss: a name of `layerskip.config.registry`.
        minutes: for all stages together; None: as long as they take.
        rate: peak learning rate.
        window: tokens of a sequence; a step has `rows` of them.

    Raises:
        ValueError: a value is out of range.
    """

    loss: str = "lk"
    minutes: float | None = checked(number(0, above=True))
    seed: int = 0
    temperature: float = checked(number(0, above=True), 0.8)
    rate: float | None = checked(number(0))
    window: int = 256
    rows: int = 4

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Texts:
    """The texts of a training: a model's answers, those of a file, or half of each."""

    tokenizer: Any
    corpus: data.Corpus | None
    file: Path | None = None

    def identity(self) -> dict[str, Any]:
        """JSON values that identify them."""
        return {
            "hash of prompts": None if self.corpus is None else self.corpus.given,
            "texts": None if self.file is None else self.file.stat().st_size,
        }

    def given(self) -> Iterator[list[int]]:
        """Yield the token ids of the file's texts."""
        if self.file is not None:
            yield from token_files.tokenised(token_files.documents(self.file), self.tokenizer)


class Stages:
    """The stages of a training in a folder; each kind of training first sets its `recipe`.

    Args:
        folder: empty, or of the same training.
        identity: JSON values that identify the training.
        texts: what is trained on.
        progress: called with a description of the stage and its completed share.
        say: called with messages for the user.
        started: time (of `time.monotonic`) when the minutes began; by default now.

    Attributes:
        work: the folder for files that only the training needs.
        half: whether it computes in bfloat16, if that is faster.
        curve: plain numbers stored with the module during training.
        seconds: by stage, over all starts.
        until: time (of `time.monotonic`) when everything should be done.

    Raises:
        ValueError: the texts are too short, or the folder holds another training, or something
            else.
    """

    recipe: BaseRecipe
    few = 0  # tokens below which a training is not expected to gain much

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        texts: Texts,
        device: torch.device,
        *,
        progress: Callable[[str, float], None] = lambda _what, _share: None,
        say: Callable[[str], None] = lambda _text: None,
        started: float | None = None,
    ) -> None:
        started = time.monotonic() if started is None else started
        self.texts, self.device, self.half = texts, device, bfloat16_is_fast(device)
        if texts.corpus is None:
            token_files.check_length(texts.given(), self.recipe.rows, self.recipe.window)
        self.curve: list[Any] = []
        self.folder, self.work, self.progress, self.say = folder, folder / "work", progress, say
        self._check_same(identity | texts.identity())
        self._clock, self.checkpoint = self.work / "seconds.json", self.work / "checkpoint.pt"
        self.seconds = defaultdict[str, float](float)
        if self._clock.exists():
            self.seconds |= parse(self._clock.read_bytes())
        self.until = math.inf
        if self.recipe.minutes is not None:  # earlier starts count
            self.until = started + 60 * self.recipe.minutes - sum(self.seconds.values())

    def _check_same(self, identity: dict[str, Any]) -> None:
        if not processes.is_first():
            return
        path, now = self.work / IDENTITY, json.loads(json.dumps(identity))
        if not path.exists():
            there = {*self.folder.glob("*"), *self.work.glob("*")}
            if there - {self.work, self.folder / LOCK}:
                raise ValueError(
                    f"{self.folder} is not empty, and holds no training; name another folder"
                )
            self.work.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(identity, indent=2) + "\n")
            return
        before = parse(path.read_bytes())
        other = [name for name in now if before.get(name) != now[name]]
        if other:
            raise ValueError(
                f"{self.folder} holds a training with another {other[0]} "
                f"({before.get(other[0])}, now {now[other[0]]}); name another folder"
            )
        for half in self.work.rglob(".*.tmp"):  # left by a run that was killed while writing
            half.unlink()

    def finished(
        self, name: str, check: Callable[[Any], None] = lambda _: None
    ) -> dict[str, Any] | None:
        """The record in the folder's file of this name, checked; None: the training is not done."""
        path = self.folder / name
        if not path.exists():
            return None
        self.say(f"this training is finished; its results are in {path}")
        return read(path, "training", check)

    def finish(self, name: str, record: dict[str, Any]) -> dict[str, Any]:
        """Write the record, and remove files that only training needs; returns it as written."""
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        write_text(self.folder / name, text)
        for each in self.work.iterdir():
            if each.is_dir():
                shutil.rmtree(each)
            elif each.name != IDENTITY:
                each.unlink()
        written: dict[str, Any] = json.loads(text)
        return written

    def timed(self, stage: str, parts: Iterable[T]) -> Iterator[T]:
        """Iterate over a stage's parts, adding their seconds to those of earlier starts."""
        before = time.monotonic()
        for part in parts:
            now = time.monotonic()
            self.seconds[stage] += now - before
            before = now
            if processes.is_first():
                write_text(self._clock, json.dumps(self.seconds))
            yield part

    def make_texts(self, tokens: float, share: float, apart: int) -> Tensor:
        """The windows of the texts, (N, T + 1); those held out are in another file.

        Args:
            tokens: how many are enough to train on.
            share: of the minutes, for making texts over all starts.
            apart: number of windows to hold out.

        Raises:
            ValueError: the texts are too short.
        """
        recipe, files = self.recipe, (self.work / token_files.TRAIN, self.work / token_files.APART)
        enough = max(tokens, recipe.rows * recipe.window) + recipe.rows
        processes.on_first(lambda: self._write_texts(enough, share, apart))
        there, held = map(token_files.length_of, files)
        if min(there // recipe.rows, held) <= recipe.window:
            raise ValueError(
                f"the texts hold {there:,} tokens, too few for a step of {recipe.rows} windows of "
                f"{recipe.window}; give more texts or minutes, and another folder"
            )
        return token_files.windows(files[0], recipe.window)

    def _write_texts(self, tokens: float, share: float, apart: int) -> None:
        """Write missing token files."""
        if (self.work / token_files.TRAIN).exists():
            return
        limit, corpus = share * 60 * (self.recipe.minutes or math.inf), self.texts.corpus
        texts: Iterator[list[int]] = takewhile(
            lambda _: self.seconds["texts"] < limit, self.texts.given()
        )
        if corpus is not None:
            # A file provides the other half.
            most, until = (math.inf, limit) if self.texts.file is None else (tokens / 2, limit / 2)
            corpus.late = time.monotonic() + until - self.seconds["texts"]
            drawn = data.answers(corpus, self.work / "texts", lambda: self.seconds["texts"] < until)
            texts = chain(data.up_to(drawn, most), texts)
        written = token_files.write_tokens(
            texts, self.work, tokens=tokens, length=self.recipe.window, apart=apart
        )
        for total in self.timed("texts", written):
            done = max(total / tokens, self.seconds["texts"] / limit)
            self.progress(f"texts: {total:,} tokens", min(1.0, done))

    def held_out(self, length: int, most: int) -> Tensor:
        """At most so many windows of T tokens of the held-out texts, (N, T + 1)."""
        windows = token_files.windows(self.work / token_files.APART, length)[:most]
        return windows.long().to(self.device)

    def precision(self) -> torch.autocast:
        """A context in which products use the training's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    def budget(self, judging: float) -> float:
        """Seconds of training over all starts, leaving `judging` seconds for judging."""
        left = self.until - time.monotonic() + self.seconds["training"]
        return max(1.0, left - judging)


def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster than in float32 on a device."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())
