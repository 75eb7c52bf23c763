"""The names of shipped models, checkpoints and prompt files, and the paths they stand for."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

SHIPPED = ("demo-llama", "demo-gemma2", "demo-gemma4")
"""Models that come with the package."""
SHIPPED_ASSISTANTS = ("demo-gemma4-assistant",)
"""Official assistants that come with the package, for `--assistant`."""

MADE = ("smollm2", "gemma3-270m")
"""Real checkpoints that `make checkpoints` makes, in one of `checkpoint_folders`."""

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
    names = SHIPPED + SHIPPED_ASSISTANTS
    if name not in names:
        raise ValueError(f"a shipped model is one of {', '.join(names)}, got {name!r}")
    folder = _MODELS / name
    if not folder.is_dir():
        raise ValueError(f"the shipped model {name} is missing from this installation")
    return folder


def checkpoint_folders() -> list[Path]:
    """Where real checkpoints are looked for, the first first.

    That is `$LAYERSKIP_CHECKPOINTS`; if it is not set, `checkpoints` in the working folder, then
    `layerskip/checkpoints` in the user's data folder (`$XDG_DATA_HOME`, else `~/.local/share`).
    """
    named = os.environ.get("LAYERSKIP_CHECKPOINTS")
    if named:
        return [Path(named)]
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return [Path("checkpoints"), data / "layerskip" / "checkpoints"]


def made(name: str) -> Path:
    """The folder of a real checkpoint that `make checkpoints` has made.

    Raises:
        ValueError: it is in none of `checkpoint_folders`.
    """
    places = checkpoint_folders()
    for place in places:
        if (place / name).is_dir():
            return place / name
    raise ValueError(
        f"there is no folder {name} in {' or '.join(map(str, places))}; `make checkpoints` in the "
        "repository of layerskip makes it, LAYERSKIP_CHECKPOINTS=FOLDER says where it lies"
    )


def model_folder(name: str) -> Path | None:
    """The folder that the name of a model means; None where it can only be a Hub id.

    Raises:
        ValueError: it holds no checkpoint, or there is none of that name.
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
                    "two by peft's merge_and_unload() and name the result"
                )
            raise ValueError(f"folder {name} holds no checkpoint: {what}")
        for path in folder.iterdir():  # reading a pipe waits for ever
            if path.exists() and not path.is_file() and not path.is_dir():
                raise ValueError(f"checkpoint {name}: {path.name} is a pipe or a device, no file")
        return folder
    if folder.exists():
        raise ValueError(f"model {name} is a file; give a GGUF file, or a folder")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no folder {name}{suggestion(name)}")
    return None


def suggestion(name: str) -> str:
    """What was probably meant by the name of a model that is not there, to end a sentence."""
    path = Path(name)
    names = [*SHIPPED, *SHIPPED_ASSISTANTS, *MADE]
    if path.parent.is_dir():
        names += [str(each.parent) for each in path.parent.glob("*/config.json")]
    close = get_close_matches(name, names, n=1)
    if not close:  # a missing folder that is called like a model
        close = get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""
