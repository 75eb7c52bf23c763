"""Keeps what was timed on this machine in small files, for later processes.

They lie in the folder `$LAYERSKIP_CACHE`, or in the user's cache folder. If the variable is empty,
nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from layerskip.files.environment import cache_folder, hardware
from layerskip.files.writing import replacing
from layerskip.model.opened_model import OpenedModel
from layerskip.version import __version__

_DAYS = 30.0  # lifetime of a file, since machines change


def machine(model: OpenedModel) -> dict[str, Any]:
    """Where and how a model's passes run, as JSON values; threads only on a CPU."""
    facts: dict[str, Any] = {
        "hardware": hardware(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "execution": model.execution,
    }
    return facts if model.threads is None else {**facts, "threads": model.threads}


def file_for(model: OpenedModel, *about: Any) -> Path | None:
    """The file with what was timed of a model on this machine; None if nothing is kept.

    Args:
        about: JSON values: what else the times depend on.
    """
    if os.environ.get("LAYERSKIP_CACHE") == "":
        return None
    weights, where = model.weights, sorted(machine(model).items())
    read = model.pass_bytes([1])  # differs if weights are stored in other formats
    key = [__version__, torch.__version__, weights.fingerprint(), where, weights.vocabulary, read]
    name = hashlib.sha256(json.dumps([*key, *about]).encode()).hexdigest()[:24]
    return cache_folder() / "costs" / f"{name}.json"


def kept(file: Path | None) -> tuple[Any, float]:
    """The JSON value in a file and its age in days; None if it is not there, old or broken."""
    try:
        if file is None:
            return None, 0.0
        days = (time.time() - file.stat().st_mtime) / 86400
        return (json.loads(file.read_text(encoding="utf-8")) if days <= _DAYS else None), days
    except (OSError, ValueError):
        return None, 0.0


def keep(file: Path | None, value: Any) -> None:
    """Write a JSON value atomically; does nothing if the folder cannot be written to."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps(value), encoding="utf-8")
    except OSError:
        return  # a full disk, or no permission: every process measures for itself
