"""Knows what a run means in plain words: what was gained, what the limit was, what to change.

Every sentence follows from the tables by a rule written here; the rules' numbers are judgements,
named and explained. Text from records goes in as it is: whoever shows it escapes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from layerskip.analysis import predictions, tables
from layerskip.analysis.runs import Run, law_words, machine_words, typical
from layerskip.costs.ratios import ratio_of_totals

MUCH_REPEATED = 0.3  # share of repeated 4-grams above which drafts have it easy
MANY_LOOPS = 0.1  # share of looping texts above which the headline is flattered
FEW_PROMPTS = 8
WIDE = 0.2  # interval's width over the speedup
LOW_BOUND = 1.2  # speedup that no acceptance can exceed, above which drafting may pay
BETTER = 1.03  # what a priced alternative must promise to be worth naming
MOST_ADVICE = 2  # sentences: who reads more changes nothing


@dataclass
class Verdict:
    """Sentences about one run, in the order to be read."""

    run: str
    faults: list[str] = field(default_factory=list)
    """What makes the numbers void; before all else."""
    result: list[str] = field(default_factory=list)
    """What was gained, and against whom."""
    reasons: list[str] = field(default_factory=list)
    """The limit, where the time goes, what flatters the number."""
    advice: list[str] = field(default_factory=list)

    @property
    def sentences(self) -> list[str]:
        return [*self.faults, *self.result, *self.reasons, *self.advice]


def judge(run: Run) -> Verdict:
    """The verdict on a run's fastest self-speculative method at the smallest batch size."""
    verdict = Verdict(run.label)
    _faults(run, verdict)
    if run.synthetic:
        verdict.result.append(
            f"Synthetic acceptance ({run.synthetic}): the times are real, but how often drafts are "
            "right was set."
        )
    speedups = tables.speedup(run).query(f"category == '{tables.ALL}'")
    sizes = speedups[speedups["over"] == run.baseline]
    table = sizes[sizes["batch_size"] == run.batch_sizes[0]].set_index("method")
    drafting = [method for method in run.drafting if method in table.index]
    if not drafting:
        found = [f"{m} {_ratio(row)}" for m, row in table.iterrows() if m != run.baseline]
        verdict.result.append(
            f"Speed relative to {run.baseline}: {', '.join(found) or 'nothing else was measured'}."
        )
        verdict.advice.append(
            "No self-speculative method was measured; add one with --method self."
        )
        return verdict
    method = str(table.loc[drafting, "speedup"].idxmax())
    row = table.loc[method]
    verdict.result.append(_headline(run, method, row, len(drafting)))
    for over in tables.comparisons(run)[1:]:
        library = _row(speedups[speedups["over"] == over], run, method)
        if library is not None:
            verdict.result.append(f"Over transformers' generate() it is {_ratio(library)}.")
    faster = _faster_peer(run, method, verdict)
    planned = run.header["prompts"]["count"]
    if run.batch_sizes[0] == 1 and row["prompts"] < planned:
        verdict.result.append(f"The run is unfinished: {row['prompts']} of {planned} prompts.")
    forecast = _row(predictions.predictions(run), run, method)
    _limits(run, method, forecast, verdict)
    _repetition(run, method, verdict)
    by_size = sizes[sizes["method"] == method]
    if len(by_size) > 1:
        shown = (f"{row['speedup']:.2f} at {row['batch_size']}" for _, row in by_size.iterrows())
        verdict.reasons.append(f"By batch size it was {', '.join(shown)}.")
    if not run.synthetic:  # what was set asks for no change
        verdict.advice += _advice(run, method, row, forecast, faster)[:MOST_ADVICE]
    return verdict


def words(verdicts: list[Verdict]) -> str:
    """All verdicts as paragraphs, faults of every run first."""
    if len(verdicts) == 1:
        return " ".join(verdicts[0].sentences)
    faults = [f"{v.run}: {' '.join(v.faults)}" for v in verdicts if v.faults]
    rest = [f"{v.run}: {' '.join([*v.result, *v.reasons, *v.advice])}" for v in verdicts]
    return "\n\n".join([*faults, *rest])


def _faults(run: Run, verdict: Verdict) -> None:
    for _, row in tables.losslessness(run).iterrows():
        if row["faults"]:
            verdict.faults.append(
                f"FAULT: {row['faults']} of {row['compared']} texts of {row['method']} differ from "
                f"{run.baseline}'s by more than rounding can explain: its speed means nothing; run "
                "`layerskip check`."
            )


def _headline(run: Run, method: str, row: Any, candidates: int) -> str:
    name = run.header["model"]["name"]
    where = f"{law_words(run.header['law'])}, {machine_words(run.header)}"
    which = f" ({method}, the fastest of {candidates} measured)" if candidates > 1 else ""
    times = f"{row['speedup']:.2f} times"
    if math.isnan(row["low"]):
        return (
            f"Self-speculation{which} decoded {name} {times} as fast as {run.baseline} decoding "
            f"({where}) on the one prompt measured; one prompt says nothing about others."
        )
    details = (
        f"(95% interval {row['low']:.2f} to {row['high']:.2f}, {row['prompts']} prompts; {where})"
    )
    if row["low"] > 1:
        return (
            f"Self-speculation{which} made {name} {times} as fast as {run.baseline} decoding "
            f"{details}."
        )
    was = "was slower than" if row["high"] < 1 else "is not distinguishable from"
    return (
        f"Self-speculation{which} {was} {run.baseline} decoding: {name} ran {times} as fast "
        f"{details}."
    )


def _faster_peer(run: Run, method: str, verdict: Verdict) -> str | None:
    """The fastest of other libraries' methods whose paired interval lies above the draft's."""
    frame = typical(run)
    frame = frame[frame["batch_size"] == run.batch_sizes[0]]
    ours = frame[frame["method"] == method].set_index("unit")["total"]
    best, name = (1.0, math.nan, math.nan), None
    for peer in run.measured:
        if peer == run.baseline or run.methods[peer]["kind"] in ("self", "generate"):
            continue
        theirs = frame[frame["method"] == peer].set_index("unit")["total"]
        units = [unit for unit in ours.index if unit in theirs.index]
        ratio = ratio_of_totals(ours.loc[units].to_numpy(), theirs.loc[units].to_numpy())
        clearly = math.isnan(ratio[1]) or ratio[1] > 1
        if clearly and ratio[0] > best[0]:
            best, name = ratio, peer
    if name is not None:
        found = dict(zip(("speedup", "low", "high"), best, strict=True))
        verdict.result.append(f"{name} was faster still: {_ratio(found)}.")
    return name


def _limits(run: Run, method: str, forecast: Any, verdict: Verdict) -> None:
    accepted = _row(tables.acceptance(run), run, method)
    if accepted is not None and not accepted["drafted"]:
        verdict.reasons.append("It drafted nothing: its controller expected no gain.")
    elif accepted is not None:
        verdict.reasons.append(
            f"A drafted token was accepted with probability {accepted['alpha']:.2f} (alpha): "
            f"{accepted['tokens_per_pass']:.2f} tokens per target pass."
        )
    if forecast is not None:
        verdict.reasons.append(
            f"No draft at c = {forecast['draft_cost']:.2f} target steps gains more than "
            f"{forecast['bound']:.1f} times; this one's rounds promised "
            f"{forecast['predicted']:.2f} without prefill, measured {forecast['measured']:.2f}."
        )


def _repetition(run: Run, method: str, verdict: Verdict) -> None:
    table = tables.repetition(run)
    row = table[(table["category"] == tables.ALL) & (table["method"] == method)].iloc[0]
    if row["loops"] > MANY_LOOPS * row["texts"]:
        easy = f"{row['loops']} of {row['texts']} texts loop"
    elif row["repeated_4grams"] > MUCH_REPEATED:
        easy = f"{row['repeated_4grams']:.0%} of the 4-grams in its texts had occurred before"
    else:
        return
    verdict.reasons.append(f"{easy}: such text is easy to draft, and flatters this speedup.")


def _advice(run: Run, method: str, row: Any, forecast: Any, faster: str | None) -> list[str]:
    """What to change, what helps most first."""
    advice = []
    if faster:
        advice.append(f"For prompts like these, prefer {faster}.")
    if row["high"] < 1:
        advice.append("Decode plainly (--no-draft): that was the faster way here.")
    if forecast is not None and forecast["bound"] < LOW_BOUND:
        advice.append(
            f"The draft is too dear at c = {forecast['draft_cost']:.2f}: exit earlier or skip more "
            "sublayers."
        )
    elif forecast is not None and forecast["best_length"] == 0:
        advice.append(
            f"At alpha {forecast['alpha']:.2f} and c {forecast['draft_cost']:.2f} no fixed draft "
            "length pays: take another exit layer, `layerskip search`, or a checkpoint trained "
            "with early exits."
        )
    better = _better_exit(run, run.methods[method])
    if better:
        advice.append(better)
    elif not run.traces:
        advice.append("Add --trace to the benchmark: it prices every exit layer.")
    wide = (row["high"] - row["low"]) / row["speedup"] > WIDE
    if row["prompts"] < FEW_PROMPTS or wide or row["low"] <= 1 <= row["high"]:
        unknown = math.isnan(row["low"])
        interval = "unknown" if unknown else f"{row['low']:.2f} to {row['high']:.2f}"
        advice.append(f"Measure more prompts: {row['prompts']} leave the interval {interval}.")
    return advice


def _better_exit(run: Run, settings: dict[str, Any]) -> str:
    """What the trace prices higher than what was run; nothing where that is the best."""
    table = predictions.what_if(run)
    if not len(table) or table["speedup"].isna().all():
        return ""
    best = table.loc[table["speedup"].idxmax()]
    if best["speedup"] <= 1:
        return (
            "The trace prices every exit layer and draft length below plain decoding: search for "
            "sublayers to skip (`layerskip search`), or decode plainly."
        )
    early_exit = settings["num_kept"] % 2 == 0 and settings.get("prefix") == settings["num_kept"]
    now = table[table["exit"] == settings["num_kept"] // 2] if early_exit else table.iloc[:0]
    if not len(now) or best["speedup"] <= BETTER * now["speedup"].max():
        return ""
    return (
        f"Try --exit-layer {best['exit']:.0f}: the trace prices it at {best['speedup']:.2f}, "
        f"against {now['speedup'].max():.2f} for exit {settings['num_kept'] // 2}."
    )


def _row(table: pd.DataFrame, run: Run, method: str) -> Any:
    """The line of a method over all prompts at the smallest batch size, if there is one."""
    if not len(table):
        return None
    found = table[
        (table["method"] == method)
        & (table["category"] == tables.ALL)
        & (table["batch_size"] == run.batch_sizes[0])
    ]
    return found.iloc[0] if len(found) else None


def _ratio(row: Any) -> str:
    if math.isnan(row["low"]):
        return f"{row['speedup']:.2f} times as fast"
    return f"{row['speedup']:.2f} times as fast ({row['low']:.2f} to {row['high']:.2f})"
