"""`check --exits`: how often each early exit is right, as a table and a plot, and what to type."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from layerskip.cli.flags import Loading
from layerskip.cli.inputs import in_turn
from layerskip.cli.opening import open_model, open_passes
from layerskip.cli.terminal import Talk, aligned, bar, to_json, wrap
from layerskip.files.writing import write_text
from layerskip.texts.prompts import Prompt


def show_exits(
    prompts: Sequence[Prompt],
    loading: Loading,
    talk: Talk,
    output: Path | None,
    *,
    chat: bool,
    max_new_tokens: int,
    seed: int,
    as_json: bool,
) -> None:
    """Try every early exit on the first prompts, and print what that shows."""
    loaded = open_model(loading, talk)
    loaded.store_halves(loading.execution)  # as `generate` does

    from layerskip.api.loading import encode
    from layerskip.bench.checks import TEMPERATURE
    from layerskip.bench.methods import Task
    from layerskip.search.exits import POSITIONS, check_exits

    def progress(what: str, share: float) -> None:
        if talk.live:
            talk.progress(f"{bar(share)} {what}")

    chosen = in_turn(prompts)[: math.ceil(POSITIONS / max_new_tokens)]
    ids = [encode(loaded.tokenizer, each) for each in chosen]
    task = Task(max_new_tokens, True, TEMPERATURE, seed=seed, execution=loading.execution)
    with open_passes(loaded, loading, talk) as opened:
        drafts = check_exits(loaded.model, ids, task, progress=progress)
        record = {"model": loaded.name, "passes": opened.describe(), **task.law, "drafts": drafts}
    talk.progress("")
    best = max(drafts, key=_gain)
    record |= {"best": best, "command": _command(best, loading, chat)}
    lines = [["draft", "greedy", "sampled", "cost", "gain greedy", "gain sampled"]]
    for each in drafts:
        numbers = [*each["right"].values(), each["cost"], *each["gain"].values()]
        lines.append([_name(each), *(f"{number:.2f}" for number in numbers)])
    counted = " and ".join(f"{count} {law}" for law, count in best["positions"].items())
    print(aligned(lines))
    print(
        wrap(
            f"greedy, sampled: share of {counted} tokens that the draft gets right (sampled at "
            f"temperature {TEMPERATURE}); cost: of a draft step, in plain steps, uncertain by "
            f"{best['spread']:.0%}; gain: predicted speed over plain decoding, without lookups"
        )
    )
    print(f"{_verdict(best)}:\n{record['command']}")
    if output is not None:
        from layerskip.analysis.exit_report import draw_agreement

        output.mkdir(parents=True, exist_ok=True)
        write_text(output / "exits.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
        write_text(output / "exits.svg", draw_agreement(drafts))
        talk.say(f"written to {output}: exits.json, exits.svg")
    if as_json:
        print(to_json(record))


def _gain(draft: Mapping[str, Any]) -> float:
    return fmean(draft["gain"].values())


def _name(draft: Mapping[str, Any]) -> str:
    name = "whole model" if draft["exit"] is None else f"exit {draft['exit']}"
    return name if draft["bits"] is None else f"{name}, {draft['bits']} bits"


def _verdict(best: Mapping[str, Any]) -> str:
    if _gain(best) <= 1:
        return "no exit gains anything here"
    if best["exit"] is None:
        return "no exit gains more than the default, the whole model in 8 bits"
    return f"{_name(best)}, gains most"


def _command(best: Mapping[str, Any], loading: Loading, chat: bool) -> str:
    """How to generate with a draft, on the model as it was loaded here."""
    words = ["layerskip", "generate", loading.model, "--prompt", "TEXT", *["--chat"] * chat]
    if best["exit"] is not None and _gain(best) > 1:
        words += ["--exit-layer", str(best["exit"])]
        words += [] if best["bits"] is None else ["--low-precision", str(best["bits"])]
    usual = Loading()
    for name in [each.name for each in fields(Loading)][1:]:
        if (value := getattr(loading, name)) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)
