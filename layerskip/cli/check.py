"""The check command: tests whether drafting is lossless on this model and machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from layerskip.cli import flags
from layerskip.cli.check_exits import show_exits
from layerskip.cli.flags import flag, switch, warn_idle
from layerskip.cli.inputs import as_chats, check_folder, read_given, shipped_prompts
from layerskip.cli.opening import open_checked_drafts
from layerskip.cli.terminal import Talk, differences, to_json, two_columns, verdict, wrap
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
    talk = Talk(quiet)
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
        print(to_json(head | report.to_dict()))
    if not report.passed:
        raise typer.Exit(1)


def _table(report: CheckReport, ids: Sequence[str], tokenizer: Any) -> str:
    compared = (
        ("plain", "greedy = plain", report.plain),
        ("transformers", "greedy = transformers", report.greedy),
        ("coupled", "coupled = plain", report.coupled),
    )
    rows = [(words, verdict(comparison)) for _, words, comparison in compared]
    for rule, test in report.laws.items():
        words = f"p-values from {min(test.p_values):.2g}, {plural(len(test.p_values), 'test')}"
        rows.append((f"{rule} law", words))
    same = "the same" if report.cache_passed else "DIFFERENT"
    rows.append(("cache = fresh prefill", f"within {report.cache_error:.1g}: {same}"))
    changed = ", ".join(report.changed[:3])
    rows.append(("model as it was found", f"no: CHANGED {changed}" if changed else "yes"))
    lines = [two_columns(rows)]
    for what, _, comparison in compared:
        lines += [wrap(f"{what}: {x}") for x in differences(comparison, ids, tokenizer)]
    if not report.laws_passed:
        lines.append("the sampled distribution is WRONG: p-values are below the test's level")
    lines.append("passed" if report.passed else "FAILED")
    return "\n".join(lines)
