"""The folder of a training: what it was begun with, and the seconds that its stages took.

A training that was killed is started again by the same command, and goes on after the last file
that is complete.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from layerskip.files.schema import parse
from layerskip.files.writing import write_text
from layerskip.training import processes

T = TypeVar("T")


class Stages:
    """The stages of a training in a folder.

    Args:
        folder: empty, or of the same training.
        identity: JSON values that make the training this one.
        stages: their names.
        minutes: for all of them, over all starts; None: as long as they take.
        progress: called with a stage in words and the share of it that is done.
        say: called with notes for the user.
        started: of `time.monotonic`, when the minutes began; by default they do now.

    Attributes:
        work: the folder of files that only the training needs.
        seconds: by stage, over all starts.
        until: of `time.monotonic`, when all should be done.

    Raises:
        ValueError: the folder holds another training.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        stages: Iterable[str],
        *,
        minutes: float | None = None,
        progress: Callable[[str, float], None] = lambda _what, _share: None,
        say: Callable[[str], None] = lambda _text: None,
        started: float | None = None,
    ) -> None:
        started = time.monotonic() if started is None else started
        self.folder, self.work, self.progress, self.say = folder, folder / "work", progress, say
        self._check_same(identity)
        self._clock = self.work / "seconds.json"
        self.seconds: dict[str, float] = dict.fromkeys(stages, 0.0)
        if self._clock.exists():
            self.seconds |= parse(self._clock.read_bytes())
        self.until = math.inf
        if minutes is not None:  # those of earlier starts count
            self.until = started + 60 * minutes - sum(self.seconds.values())

    def _check_same(self, identity: dict[str, Any]) -> None:
        path, now = self.work / "recipe.json", json.loads(json.dumps(identity))
        if not path.exists():
            if processes.first():
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

    def timed(self, stage: str, parts: Iterable[T]) -> Iterator[T]:
        """Iterate over a stage's parts, and add their seconds to those of earlier starts."""
        before = time.monotonic()
        for part in parts:
            now = time.monotonic()
            self.seconds[stage] += now - before
            before = now
            if processes.first():
                write_text(self._clock, json.dumps(self.seconds))
            yield part
