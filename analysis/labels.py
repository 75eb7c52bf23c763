"""Labels for runs, searches and their settings, and file names for them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def visible(text: str) -> str:
    """The text with non-printing characters, including line breaks, as their code points."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def printable(value: Any) -> Any:
    """A JSON value with visible strings, since they appear in plots, pages and terminals."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {name: printable(item) for name, item in value.items()}
    return value


def law_words(law: Mapping[str, Any]) -> str:
    if not law["do_sample"]:
        return "greedy"
    words = f"sampled at T={law['temperature']:g}" if law.get("temperature") else "sampled"
    for name in ("top_p", "top_k"):
        if law.get(name):
            words += f", {name} {law[name]:g}"
    return words + (" by rejection" if law.get("acceptance") == "rejection" else "")


def machine_words(header: Mapping[str, Any]) -> str:
    words = f"{header['dtype']} on {header['device']}"
    threads = header.get("threads")
    if header["device"] == "cpu" and threads:
        words += f", {threads} thread{'s' * (threads != 1)}"
    return words


def hardware(header: Mapping[str, Any]) -> str:
    """The names of a machine's GPUs, and of its CPU."""
    machine = header["environment"]
    devices = [device["name"] for device in machine["devices"]]
    return ", ".join([*devices, machine["cpu"]["model"] or "unknown processor"])


def setting(header: Mapping[str, Any]) -> str:
    return f"{law_words(header['law'])}, {machine_words(header)}"


def ranged(value: float, low: float, high: float) -> str:
    """A ratio, and its interval if it has one: 1.39 (1.26 to 1.55)."""
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} ({low:.2f} to {high:.2f})"


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers in words: 0-3, 6."""
    ordered = sorted(set(numbers))
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in pairs) or "none"


def slug_of(label: str, number: int) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.").lower() or f"run-{number}"


def distinct_labels(labels: Sequence[str], more: Sequence[str] | None = None) -> list[str]:
    """The labels; those that several files share are followed by more, by default their number."""
    times, more = Counter(labels), more or [f"file {n}" for n, _ in enumerate(labels, 1)]
    pairs = zip(labels, more, strict=True)
    return [f"{label}, {extra}" if times[label] > 1 else label for label, extra in pairs]


def labels_of(headers: Sequence[dict[str, Any]], files: Sequence[Path]) -> list[str]:
    """Model and law; also the machine, then the file, if those do not distinguish runs."""
    labels = [f"{header['model']['name']}, {law_words(header['law'])}" for header in headers]
    further = [machine_words(header) for header in headers]
    stems = [visible(Path(file).stem) for file in files]
    for more in (further, stems, [str(number + 1) for number in range(len(stems))]):
        labels = distinct_labels(labels, more)
    return labels
