"""The names of shipped models, checkpoints and prompt files, and the paths they stand for."""

from __future__ import annotations

from pathlib import Path

SHIPPED = ("demo-llama", "demo-gemma2", "demo-gemma4")
"""Models that come with the package."""
SHIPPED_ASSISTANTS = ("demo-gemma4-assistant",)
"""Official assistants that come with the package, for `--assistant`."""

MADE = ("smollm2", "gemma3-270m")
"""Real checkpoints that `make checkpoints` puts into the folder `checkpoints`."""

_MODELS = Path(__file__).parent / "models"
SHIPPED_PROMPTS = _MODELS / "prompts.jsonl"
"""Held-out prompts of three categories: code, repetitive, unlike (the training data)."""
SPEC_BENCH = _MODELS / "spec-bench" / "prompts.jsonl"
"""Questions of Spec-Bench, the first turns: four of each of nine categories."""
COPYING = _MODELS / "copying.jsonl"
"""Requests whose answers copy: summaries, retrieval, edits of code; three of each, for chats."""
NAMED_PROMPTS = {"spec-bench": SPEC_BENCH, "copying": COPYING}
"""Prompt files by their names on the command line."""


def shipped(name: str) -> Path:
    """The folder of a model, or of an assistant, that comes with the package.

    Raises:
        ValueError: there is no such model, or this installation lacks it.
    """
    known = SHIPPED + SHIPPED_ASSISTANTS
    if name not in known:
        raise ValueError(f"a shipped model is one of {', '.join(known)}, got {name!r}")
    folder = _MODELS / name
    if not folder.is_dir():
        raise ValueError(f"the shipped model {name} is missing from this installation")
    return folder


def made(name: str) -> Path:
    """The folder where `make checkpoints` puts a real checkpoint, below the working folder.

    Raises:
        ValueError: it is not there.
    """
    folder = Path("checkpoints") / name
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder} here; `make checkpoints` in the repository of layerskip "
            "makes it"
        )
    return folder
