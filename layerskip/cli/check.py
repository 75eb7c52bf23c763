"""The check command: whether drafting is lossless on this model and machine, and which exit pays.

With --exits it shows how often each early exit is right, as a table and a plot, and what to type.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from layerskip.cli import flags, terminal
from layerskip.cli.flags import flag, switch, warn_idle
from layerskip.cli.inputs import as_chats, check_folder, in_turn, read_given, shipped_prompts
from layerskip.cli.opening import open_checked_drafts, open_model, open_passes
from layerskip.files.writing import write_text
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import plural

if TYPE_CHECKING:
    from layerskip.bench.checks import CheckReport


@dataclass(frozen=True)
class OneDraft(flags.DraftFlags):
    """The flags that select draft sources, with one skip config at most."""

    skip: list[str] | None = flag("Draft with the skip config in this JSON file.", "FILE")
    exit_layer: list[int] | None = flag("Draft with layers 0 to E-1 (early exit).", "E")


def check(
    *,
    draft: OneDraft,
    prompts: Path | None = flag("File of prompts.  [default: some shipped ones]", "FILE"),
    chat: flags.Chat = False,
    max_new_tokens: flags.MaxNewTokens = 64,
    seed: flags.Seed = 0,
    exits: bool = switch(
        "--exits", "Show instead how often each early exit is right, and what it would gain here."
    ),
    output: Path | None = flag("With --exits: folder for exits.json and a plot.", "DIR"),
    loading: flags.Loading,
    quiet: flags.Quiet = False,
    as_json: flags.AsJson = False,
) -> None:
    """Check that drafting changes only the speed on this machine.

    It compares greedy text with plain decoding and with transformers, sampled text with plain
    decoding, and tokens drawn by both acceptance rules with the model's distribution. It also
    checks the cache, and that the model is left unchanged.

    Example: layerskip check demo-llama --exit-layer 6 --low-precision 8
    """
    if len(draft.given) > 1:
        raise ValueError("check takes one --skip or --exit-layer; run it once for each")
    chosen = as_chats(shipped_prompts(2) if prompts is None else read_given(prompts), chat)
    talk = terminal.Talk(quiet)
    if exits:
        warn_idle(draft.values(), "with --exits, which tries every exit")
        if output is not None:
            check_folder(output)
        how: dict[str, Any] = {"output": output, "as_json": as_json, "chat": chat}
        return show_exits(chosen, loading, talk, max_new_tokens=max_new_tokens, seed=seed, **how)
    warn_idle({"output": output}, "without --exits")
    with open_checked_drafts(draft, loading, talk) as opened:
        from layerskip.api.loading import encode
        from layerskip.bench.checks import check as check_tokens

        loaded, passes = opened.loaded, opened.model.describe()
        report = check_tokens(
            loaded.model,
            [encode(loaded.tokenizer, each) for each in chosen],
            next(iter(opened.settings["skip"] or ()), None),
            **opened.sources,
            max_new_tokens=max_new_tokens,
            seed=seed,
            execution=loading.execution,
            note=lambda text: talk.progress(f"checking: {text}"),
        )
    talk.progress("")
    ids = [each.id for each in chosen]
    print(_table(report, ids, loaded.tokenizer))
    if as_json:
        head = {"model": loaded.name, "passes": passes, "drafts": opened.plan.summary, "seed": seed}
        print(terminal.to_json(head | report.to_dict()))
    if not report.passed:
        raise typer.Exit(1)


def _table(report: CheckReport, ids: Sequence[str], tokenizer: Any) -> str:
    compared = (
        ("plain", "greedy = plain", report.plain),
        ("transformers", "greedy = transformers", report.greedy),
        ("coupled", "coupled = plain", report.coupled),
    )
    rows = [(words, terminal.verdict(comparison)) for _, words, comparison in compared]
    for rule, test in report.laws.items():
        words = f"p-values from {min(test.p_values):.2g}, {plural(len(test.p_values), 'test')}"
        rows.append((f"{rule} law", words))
    same = "the same" if report.cache_passed else "DIFFERENT"
    rows.append(("cache = fresh prefill", f"within {report.cache_error:.1g}: {same}"))
    changed = ", ".join(report.changed[:3])
    rows.append(("model as it was found", f"no: CHANGED {changed}" if changed else "yes"))
    lines = [terminal.two_columns(rows)]
    for what, _, comparison in compared:
        lines += [
            terminal.wrap(f"{what}: {x}") for x in terminal.differences(comparison, ids, tokenizer)
        ]
    if not report.laws_passed:
        lines.append("the sampled distribution is WRONG: p-values are below the test's level")
    lines.append("passed" if report.passed else "FAILED")
    return "\n".join(lines)


def show_exits(
    prompts: Sequence[Prompt],
    loading: flags.Loading,
    talk: terminal.Talk,
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
            talk.progress(f"{terminal.bar(share)} {what}")

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
    print(terminal.aligned(lines))
    print(
        terminal.wrap(
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
        print(terminal.to_json(record))


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


def _command(best: Mapping[str, Any], loading: flags.Loading, chat: bool) -> str:
    """How to generate with a draft, on the model as it was loaded here."""
    words = ["layerskip", "generate", loading.model, "--prompt", "TEXT", *["--chat"] * chat]
    if best["exit"] is not None and _gain(best) > 1:
        words += ["--exit-layer", str(best["exit"])]
        words += [] if best["bits"] is None else ["--low-precision", str(best["bits"])]
    usual = flags.Loading()
    for name in [each.name for each in fields(flags.Loading)][1:]:
        if (value := getattr(loading, name)) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)
