"""What comes with the package: two small models and prompts; reads none of it."""

from __future__ import annotations

from pathlib import Path

SHIPPED = ("demo-llama", "demo-gemma2")
"""Models that come with the package."""

_SHELF = Path(__file__).parent / "models"
SHIPPED_PROMPTS = _SHELF / "prompts.jsonl"
"""Held-out prompts of three categories: code, repetitive, unlike (the training data)."""


def shipped(name: str) -> Path:
    """The folder of a model that comes with the package, for `from_pretrained()`.

    Raises:
        ValueError: none by that name, or not in this installation.
    """
    if name not in SHIPPED:
        raise ValueError(f"a shipped model is one of {', '.join(SHIPPED)}, got {name!r}")
    folder = _SHELF / name
    if not folder.is_dir():
        raise ValueError(f"the shipped model {name} is missing from this installation")
    return folder
