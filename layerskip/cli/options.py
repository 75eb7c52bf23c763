"""Flags that several commands share, and what they do with them; every heavy import waits."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layerskip.cli.terminal import Talk
from layerskip.config import SkipConfig

if TYPE_CHECKING:
    from layerskip.checkpoints import Loaded
    from layerskip.prompts import Prompt

Model = Annotated[
    str, typer.Argument(help="Hub id, local folder, or a shipped model: demo-llama, demo-gemma2.")
]
Skip = Annotated[str | None, typer.Option(metavar="FILE", help="Skip config, as JSON.")]
ExitLayer = Annotated[
    int | None, typer.Option(metavar="E", help="Draft with layers 0 to E-1: an early exit.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "float64"],
    typer.Option(help="auto: the checkpoint's; float32 for shipped models on the CPU."),
]
Seed = Annotated[int | None, typer.Option(help="Of sampling; drawn and reported if not given.")]
FixedSeed = Annotated[int, typer.Option(help="Of sampling.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
]
Execution = Annotated[
    Literal["auto", "modules", "fused", "compiled"],
    typer.Option(
        help="How sublayers run: the library's modules, fewer kernels, or these compiled (the "
        "first run on a machine compiles for minutes)."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Results, warnings and errors only.")]
MAX_NEW_TOKENS = typer.Option(min=1, help="Tokens to generate at most.")
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document as the last line.")]


def to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False)


def write_out(text: str) -> None:
    print(text, end="", flush=True)


def given_skip(skip: str | None, exit_layer: int | None) -> SkipConfig | None:
    """The skip config that the flags name; before the model is loaded, so that errors are quick."""
    if skip is not None and exit_layer is not None:
        raise ValueError("give --skip or --exit-layer, not both")
    if exit_layer is not None:
        return SkipConfig.early_exit(exit_layer)
    return None if skip is None else SkipConfig.load(skip)


def open_model(
    name: str, device: str, dtype: str, trust_remote_code: bool, talk: Talk, quiet: bool
) -> Loaded:
    talk.progress("importing torch and transformers")
    from transformers.utils import logging as chatter

    from layerskip.checkpoints import load
    from layerskip.model.joined import join

    chatter.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if quiet or not sys.stderr.isatty():
        chatter.disable_progress_bar()
    talk.progress(f"loading {name}")
    loaded = load(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    join(loaded.model)  # for good: nobody else has this model
    talk.say(loaded.describe())
    return loaded


def skip_config(given: SkipConfig | None, loaded: Loaded) -> SkipConfig | None:
    """The given skip config, else the one beside the checkpoint, for this model."""
    skip = given
    if skip is None and (skip := loaded.skip_config()) is not None:
        skip = replace(skip, model=None)  # it lies with its model, whatever the folder is called
    if skip is not None:
        skip.resolve(loaded.model.config.num_hidden_layers)  # refuses what does not fit
    return skip


NO_SKIP = (
    "no skip config: {name} has no layerskip.json; search for one with `layerskip search`, or try "
    "an early exit with --exit-layer E"
)


def need_skip(given: SkipConfig | None, loaded: Loaded) -> SkipConfig:
    skip = skip_config(given, loaded)
    if skip is None:
        raise ValueError(NO_SKIP.format(name=loaded.name))
    return skip


def describe_skip(skip: SkipConfig, num_layers: int) -> str:
    if skip.exit_layer is not None and not skip.attention and not skip.mlp:
        return f"layers 0-{skip.exit_layer - 1} of {num_layers} (early exit at {skip.exit_layer})"
    return f"{len(skip.kept(num_layers))} of {2 * num_layers} sublayers"


def shipped_prompts(per_category: int | None) -> list[Prompt]:
    """The first few prompts of each category; None takes all."""
    from layerskip.checkpoints import SHIPPED_PROMPTS
    from layerskip.prompts import read_prompts

    return first_of_each(read_prompts(SHIPPED_PROMPTS), per_category)


def first_of_each(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first so many prompts of each category; None takes all."""
    chosen: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        chosen.setdefault(prompt.category, []).append(prompt)
    return [prompt for each in chosen.values() for prompt in each[:limit]]


def warn_idle(flags: dict[str, Any], reason: str) -> None:
    """Warn about each flag that was given and has no effect."""
    for name, value in flags.items():
        if value is not None:
            warnings.warn(f"--{name.replace('_', '-')} has no effect {reason}", stacklevel=2)
