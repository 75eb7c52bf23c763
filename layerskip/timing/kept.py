"""Times of passes in small files, for the next process on the same machine.

They lie in `$LAYERSKIP_CACHE` (nowhere, if that is empty), else in the user's cache folder, one
file for each model, machine, dtype, number of threads, set of sources and kind of law.
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
from layerskip.model.fingerprint import fingerprint
from layerskip.model.sublayers import Sublayers

_DAYS = 30  # for which a file holds: machines change
_MOST = 24  # times of a kind


def folder() -> Path | None:
    """Where files of times lie; None: nowhere."""
    named = os.environ.get("LAYERSKIP_CACHE")
    if named is not None:
        return Path(named) / "costs" if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerskip" / "costs"


def file_of(
    model: Sublayers, place: Mapping[str, Any], keys: Sequence[Hashable], law: Sequence[bool]
) -> Path | None:
    """The file of a kind of call; None where sources cannot be told apart in a file."""
    root = folder()
    if root is None or not all(isinstance(key, str) for key in keys):
        return None
    told = (__version__, torch.__version__, fingerprint(model.model), sorted(place.items()))
    words = json.dumps([*told, model.weights.vocabulary, list(keys), list(law)])
    return root / f"{hashlib.sha256(words.encode()).hexdigest()[:24]}.json"


def read(file: Path) -> dict[str, Any] | None:
    """Times as `_Times` takes them; None where there are none, or they are old or broken."""
    try:
        if time.time() - file.stat().st_mtime > _DAYS * 86400:
            return None
        told = json.loads(file.read_text(encoding="utf-8"))
        return {
            "rounds": {(int(a), int(b)): _seconds(some) for a, b, some in told["rounds"]},
            "steps": {int(a): _seconds(some) for a, some in told["steps"]},
            "weights": list(map(float, told["weights"])),
            "base": int(told["base"]),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None  # then they are measured, and the file is written anew


def _seconds(some: Any) -> list[float]:
    found = [float(each) for each in some]
    if not all(0.0 < each < 1e6 for each in found):
        raise ValueError("seconds are positive")
    return found


def write(file: Path | None, times: Any) -> None:
    """Write times, whole or not at all; a folder that cannot be written keeps none."""
    if file is None:
        return
    told = {
        "rounds": [[a, b, some[:_MOST]] for (a, b), some in times.rounds.items()],
        "steps": [[a, some[:_MOST]] for a, some in times.steps.items()],
        "weights": list(times.weights),
        "base": times.base,
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps(told), encoding="utf-8")
    except OSError:
        return  # a full disk or a folder of others: every process measures for itself
