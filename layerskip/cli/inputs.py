"""The inputs and outputs of commands: prompts, pictures and folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from layerskip.cli.terminal import Talk
from layerskip.config.shipped import NAMED_PROMPTS, SHIPPED, SHIPPED_PROMPTS
from layerskip.files.reading import errors_of, read_text
from layerskip.texts.pictures import read_picture
from layerskip.texts.prompts import Prompt, by_category, read_prompts


def check_folder(folder: Path) -> None:
    """Reject an --output folder that cannot be made or written to. Called before a model loads."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        words = "is a file" if there == folder else f"cannot be made: {there} is a file"
        raise ValueError(f"--output {folder} {words}; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output {folder} cannot be made or written to: {there} is read-only")


def check_file(file: Path, talk: Talk) -> None:
    """The same for an --output file. Says if a folder will be made for it."""
    if str(file) == "-" or (file.exists() and not file.is_file()):  # a device might never end
        raise ValueError(f"--output {file} is a folder, a pipe or a device; give a file")
    check_folder(file.absolute().parent)
    if not file.absolute().parent.exists():
        talk.say(f"--output makes the folder {file.parent}, which does not exist yet")


def given_prompts(path: Path | None, model: str) -> list[Prompt]:
    """The prompts of a file, or those shipped with the model."""
    if path is not None:
        return read_given(path)
    if model not in SHIPPED:
        raise ValueError(
            "this model comes without prompts; give --prompts FILE: a few dozen prompts, as JSON "
            f"lines or one prompt per line, or {' or '.join(NAMED_PROMPTS)} (only "
            f"{' and '.join(SHIPPED)} come with prompts)"
        )
    return shipped_prompts(None)


def read_given(path: Path, *, strict: bool = False) -> list[Prompt]:
    """Read prompts from a file, from the shipped set of that name, or from standard input ("-")."""
    if str(path) == "-":
        path = Path("/dev/stdin")
    path = path if path.exists() else NAMED_PROMPTS.get(str(path), path)
    return read_prompts(path, strict=strict)


def read_tasks(folder: Path) -> list[Prompt]:
    """Read a folder of JSONL files. Each is a task, and its name is the category of its prompts."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"--tasks {folder} must be a folder with one .jsonl file per task")
    return [
        replace(prompt, id=f"{file.stem}-{prompt.id}", category=file.stem)
        for file in files
        for prompt in read_prompts(file)
    ]


def read_pictures(paths: Sequence[Path] | None) -> list[Any]:
    """Read the --image files. Called before the model is loaded, so that errors come early."""
    pictures = []
    for path in paths or ():
        with errors_of(f"picture {path}"):
            pictures.append(read_picture(read_text(path)))
    return pictures


def as_chats(prompts: Sequence[Prompt], chat: bool, system: str | None = None) -> list[Prompt]:
    """Mark the prompts for the chat template if --chat or a system message is given."""
    if system is not None:
        return [prompt.as_chat().with_system(system) for prompt in prompts]
    return [prompt.as_chat() if chat else prompt for prompt in prompts]


def shipped_prompts(per_category: int | None) -> list[Prompt]:
    """The first few shipped prompts of each category; None takes all."""
    return first_of_each(read_prompts(SHIPPED_PROMPTS), per_category)


def first_of_each(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of each category; None takes all."""
    return [prompt for each in by_category(prompts).values() for prompt in each[:limit]]


def in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, from each category in turn."""
    return [*filter(None, chain.from_iterable(zip_longest(*by_category(prompts).values())))]


def first_in_turn(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts, taken from each category in turn, in file order; None takes all."""
    chosen = {prompt.id for prompt in in_turn(prompts)[:limit]}
    return [prompt for prompt in prompts if prompt.id in chosen]
