"""How a training goes, on windows kept apart from it; knows no stages, no kinds and no seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from layerskip.files.schema import parse
from layerskip.files.writing import write_text
from layerskip.training import processes
from layerskip.training.laws import Batch, Laws, Student

APART = 8
"""Windows that are kept apart, at most."""
POINTS = 8
"""Beside the one before training."""


def trained_on(count: int, rows: int) -> int:
    """How many of the windows are trained on; curves are measured on the others, the last ones."""
    return max(rows, count - max(1, min(APART, count // 16)))


class Curve:
    """Points of a training: after so many `tokens`, `loss`, and `overlap` by step of the draft.

    All processes measure; the first one has the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._count = path, 0

    @property
    def points(self) -> list[dict[str, Any]]:
        """Those in the file."""
        found: list[dict[str, Any]] = parse(self.path.read_bytes())
        return found

    def begin(self, tokens: int | None) -> None:
        """Leave the points up to so many tokens; None: there are none yet."""
        if processes.first():
            before = self.points if tokens is not None else []
            self._write([point for point in before if point["tokens"] <= (tokens or 0)])

    def due(self, share: float) -> bool:
        """Whether to measure again when so much of a training is done; the first process says."""
        return processes.first() and min(share, 1.0) * POINTS >= self._count

    @torch.no_grad()
    def measure(self, tokens: int, module: Student, laws: Laws, apart: Iterable[Batch]) -> None:
        """Add a point after so many tokens, of windows kept apart, (1, T) each."""
        losses, overlaps = [], []
        for batch in apart:
            made = module.made(batch)
            losses.append(laws.distance(made, batch).item())
            overlaps.append(laws.overlaps(made, batch))
        point = {
            "tokens": tokens,
            "loss": sum(losses) / len(losses),
            "overlap": [sum(step) / len(losses) for step in zip(*overlaps, strict=True)],
        }
        if processes.first():
            self._write([*self.points, point])

    def _write(self, points: list[dict[str, Any]]) -> None:
        write_text(self.path, json.dumps(points))
        self._count = len(points)
