"""Names of shipped models, checkpoints and prompt files, and their paths."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

SHIPPED = ("demo-llama", "demo-gemma2", "demo-gemma4")
"""Models that come with the package."""
SHIPPED_ASSISTANTS = ("demo-gemma4-assistant",)
"""Official assistants that come with the package, for `--assistant`."""

MADE = ("smollm2", "gemma3-270m")
"""Real checkpoints made by `make checkpoints`, in one of `checkpoint_folders`."""

_MODELS = Path(__file__).parents[1] / "models"
SHIPPED_PROMPTS = _MODELS / "prompts.jsonl"
"""Held-out prompts in three categories: code, repetitive, unlike (the training data)."""
SPEC_BENCH = _MODELS / "spec-bench" / "prompts.jsonl"
"""First turns of Spec-Bench questions: four from each of nine categories."""
COPYING = _MODELS / "copying.jsonl"
"""Chat requests to copy text: three each of summaries, retrieval and edits of code."""
AGENT_DAY = _MODELS / "agent-day.jsonl"
"""A day of an agent's requests: edits of a file, JSON of one schema, tool calls; with answers."""
NAMED_PROMPTS = {"spec-bench": SPEC_BENCH, "copying": COPYING, "agent-day": AGENT_DAY}
"""Prompt files by their names on the command line."""


def shipped(name: str) -> Path:
    """Return the folder of a model or an assistant that comes with the package.

    Raises:
        ValueError: there is no such model, or this installation lacks it.
    """
    names = SHIPPED + SHIPPED_ASSISTANTS
    if name not in names:
        raise ValueError(f"a shipped model is one of {', '.join(names)}, got {name!r}")
    folder = _MODELS / name
    if not folder.is_dir():
        raise ValueError(f"the shipped model {name} is missing from this installation")
    return folder


def checkpoint_folders() -> list[Path]:
    """List the folders in which to look for real checkpoints, in order of preference.

    `$LAYERSKIP_CHECKPOINTS` if it is set; otherwise `checkpoints` in the working folder, then
    `layerskip/checkpoints` in the user's data folder (`$XDG_DATA_HOME`, else `~/.local/share`).
    """
    named = os.environ.get("LAYERSKIP_CHECKPOINTS")
    if named:
        return [Path(named)]
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return [Path("checkpoints"), data / "layerskip" / "checkpoints"]


def made(name: str) -> Path:
    """Return the folder of a real checkpoint made by `make checkpoints`.

    Raises:
        ValueError: it is in none of `checkpoint_folders`.
    """
    places = checkpoint_folders()
    for place in places:
        if (place / name).is_dir():
            return place / name
    raise ValueError(
        f"there is no folder {name} in {' or '.join(map(str, places))}; run `make checkpoints` in "
        "the layerskip repository, or set LAYERSKIP_CHECKPOINTS to the folder that contains it"
    )


def model_folder(name: str) -> Path | None:
    """Return the folder that a model name stands for; None if it can only be a Hub id.

    Raises:
        ValueError: the folder does not exist or has no checkpoint.
    """
    if not name.strip():
        raise ValueError("the model's name is empty; give a Hub id, a local folder or demo-llama")
    folder = Path(name)
    if name in SHIPPED + SHIPPED_ASSISTANTS:
        folder = shipped(name)
    elif name in MADE and not folder.is_dir():
        folder = made(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            what = "it has no config.json"
            if (folder / "adapter_config.json").exists():
                what = (
                    f"it is an adapter: serve its base model with --lora NAME={name}, or merge the "
                    "two with peft's merge_and_unload() and give the result"
                )
            raise ValueError(f"folder {name} holds no checkpoint: {what}")
        for path in folder.iterdir():  # reading a pipe would block forever
            if path.exists() and not path.is_file() and not path.is_dir():
                raise ValueError(f"checkpoint {name}: {path.name} is not a regular file")
        return folder
    if folder.exists():
        raise ValueError(f"model {name} is a file; give a GGUF file, or a folder")
    what = "file" if name.endswith(".gguf") else "folder"
    if what == "file" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no {what} {name}{suggestion(name)}")
    names = available_models() + SHIPPED_ASSISTANTS
    if "/" not in name and get_close_matches(name, names, cutoff=0.8):
        raise ValueError(f"there is no model {name}{suggestion(name)}")
    return None


def available_models() -> tuple[str, ...]:
    """List the names of models that this machine has."""
    there = [name for name in MADE if any((each / name).is_dir() for each in checkpoint_folders())]
    return (*SHIPPED, *there)


def suggestion(name: str) -> str:
    """Suggest a similar name for a model that was not found, to be appended to a sentence."""
    path = Path(name)
    names = [*available_models(), *SHIPPED_ASSISTANTS]
    if path.parent.is_dir():
        names += [str(each.parent) for each in path.parent.glob("*/config.json")]
    close = get_close_matches(name, names, n=1)
    if not close:  # perhaps a missing folder that is named like a model
        close = get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""
