"""Times of passes, kept in small files for later processes on the same machine.

The folder is `$LAYERSKIP_CACHE` (if that is empty, nothing is kept), else in the user's cache
folder. Each model, machine, dtype, number of threads, set of sources and kind of law has a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from layerskip import __version__
from layerskip.files.writing import replacing
from layerskip.model.sublayers import Sublayers

_DAYS = 30  # that a file is valid: machines change
_MOST = 24  # times of a kind that are kept


def folder() -> Path | None:
    """The folder of the files; None to keep none."""
    named = os.environ.get("LAYERSKIP_CACHE")
    if named is not None:
        return Path(named) / "costs" if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerskip" / "costs"


def file_of(
    model: Sublayers, place: Mapping[str, Any], keys: Sequence[Hashable], law: Sequence[bool]
) -> Path | None:
    """The file of a kind of call; None if a source's key is not a string, or none are kept."""
    root = folder()
    if root is None or not all(isinstance(key, str) for key in keys):
        return None
    weights = model.weights
    about = (__version__, torch.__version__, weights.fingerprint(), sorted(place.items()))
    text = json.dumps([*about, weights.vocabulary, list(keys), list(law)])
    return root / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def read(file: Path) -> list[dict[str, Any]]:
    """Each kind of rounds, and the arguments of its `_Times`; none if the file is old or broken."""
    try:
        if time.time() - file.stat().st_mtime > _DAYS * 86400:
            return []
        return [
            {
                "rows": int(found["rows"]),
                "context": int(found["context"]),
                "rounds": {(int(a), int(b)): _seconds(some) for a, b, some in found["rounds"]},
                "steps": {int(a): _seconds(some) for a, some in found["steps"]},
                "weights": list(map(float, found["weights"])),
                "base": int(found["base"]),
            }
            for found in json.loads(file.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # then costs are measured again, and the file is rewritten


def _seconds(some: Any) -> list[float]:
    found = [float(each) for each in some]
    if not all(0.0 < each < 1e6 for each in found):
        raise ValueError("seconds are positive")
    return found


def write(file: Path | None, times: Mapping[Any, Any]) -> None:
    """Write times by kind, whole or not at all; skipped if the folder cannot be written."""
    if file is None or not times:
        return
    record = [
        {
            "rows": kind.rows,
            "context": kind.context,
            "rounds": [[a, b, some[:_MOST]] for (a, b), some in each.rounds.items()],
            "steps": [[a, some[:_MOST]] for a, some in each.steps.items()],
            "weights": list(each.weights),
            "base": each.base,
        }
        for kind, each in times.items()
    ]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps(record), encoding="utf-8")
    except OSError:
        return  # a full disk, or no permission: every process measures for itself
