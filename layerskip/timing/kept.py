"""Times of passes, kept in small files for later processes on the same machine.

The folder is `$LAYERSKIP_CACHE` (if that is empty, nothing is kept), else in the user's cache
folder. Each model, machine, dtype, number of threads and kind of law has a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from layerskip import __version__
from layerskip.costs.model import Place
from layerskip.files.writing import replacing
from layerskip.model.sublayers import Sublayers
from layerskip.timing.rounds import Times, typical

_DAYS = 30  # that a file is valid: machines change


def file_of(model: Sublayers, place: Mapping[str, Any], law: Sequence[bool]) -> Path | None:
    """The file of a kind of call; None if none are kept."""
    folder = os.environ.get("LAYERSKIP_CACHE")
    if folder == "":
        return None
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(user, "layerskip") if folder is None else Path(folder)
    weights = model.weights
    about = (__version__, torch.__version__, weights.fingerprint(), sorted(place.items()))
    text = json.dumps([*about, weights.vocabulary, list(law)])
    return root / "costs" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def read(file: Path | None) -> dict[Place, Times]:
    """The times by place; none if the file is old or broken."""
    times: dict[Place, Times] = {}
    try:
        if file is None or time.time() - file.stat().st_mtime > _DAYS * 86400:
            return {}
        for rows, context, source, tokens, seconds in json.loads(file.read_text(encoding="utf-8")):
            if not 0.0 < seconds < 1e6:
                return {}
            place = Place(int(rows), int(context))
            # twice, as times that nothing has disturbed
            times.setdefault(place, {})[source, int(tokens)] = 2 * [float(seconds)]
    except (OSError, ValueError, TypeError):
        return {}  # then costs are measured again, and the file is rewritten
    return times


def write(file: Path | None, times: Mapping[Place, Times]) -> None:
    """Write typical times, whole or not at all; skipped if the folder cannot be written."""
    lines = [
        [*place, source, tokens, typical(seconds)]
        for place, works in times.items()
        for (source, tokens), seconds in works.items()
        if seconds and (source is None or isinstance(source, str))
    ]
    if file is None or not lines:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps(lines), encoding="utf-8")
    except OSError:
        return  # a full disk, or no permission: every process measures for itself
