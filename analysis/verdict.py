"""Knows what a run means in plain words: what was gained, what the limit was, what to change.

Every sentence follows from the tables by a rule written here; the rules' numbers are judgements,
named and explained. Text from records goes in as it is: whoever shows it escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from layerskip.analysis import predictions, tables
from layerskip.analysis.runs import Run, law_words, machine_words

MUCH_REPEATED = 0.3  # share of repeated 4-grams above which drafts have it easy
MANY_LOOPS = 0.1  # share of looping texts above which the headline is flattered
FEW_PROMPTS = 8
WIDE = 0.2  # interval's width over the speedup
BETTER = 1.03  # what a priced alternative must promise to be worth naming
MOST_ADVICE = 2  # sentences: who reads more changes nothing


@dataclass
class Verdict:
    """Sentences about one run or search, in the order to be read."""

    label: str
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


def words(verdicts: Sequence[Verdict]) -> str:
    """All verdicts as paragraphs, faults of every run first."""
    if len(verdicts) == 1:
        return " ".join(verdicts[0].sentences)
    faults = [f"{v.label}: {' '.join(v.faults)}" for v in verdicts if v.faults]
    rest = [f"{v.label}: {' '.join([*v.result, *v.reasons, *v.advice])}" for v in verdicts]
    return "\n\n".join([*faults, *rest])


def faults_of(table: pd.DataFrame, name: str) -> list[str]:
    """A sentence for each line with faults; `name` is the column that says whose they are."""
    return [
        f"FAULT: {row['faults']:.0f} of {row['compared']:.0f} texts of {row[name]} differ from the "
        "baseline's by more than rounding can explain: its speed means nothing; run `layerskip "
        "check`."
        for _, row in table.iterrows()
        if row["faults"] > 0
    ]


def interval(row: Any) -> str:
    if math.isnan(row["low"]):
        return "no interval"
    return f"95% interval {row['low']:.2f} to {row['high']:.2f}"


def doubt(row: Any, speedup: float) -> str:
    """What the interval leaves open, if it is wide, over few prompts or around 1."""
    wide = row["high"] - row["low"] > WIDE * speedup
    if row["prompts"] >= FEW_PROMPTS and not wide and not row["low"] <= 1 <= row["high"]:
        return ""
    return f"more prompts: {row['prompts']:.0f} leave doubt ({interval(row)})."


def setting(header: Any) -> str:
    """Law and machine of a run or search, in words."""
    return f"{law_words(header['law'])}, {machine_words(header)}"


def judge(run: Run) -> Verdict:
    """The verdict on a run's fastest self-speculative method at the smallest batch size."""
    verdict = Verdict(run.label, faults_of(tables.losslessness(run), "method"))
    if run.synthetic:
        verdict.result.append(
            f"Synthetic acceptance ({run.synthetic}): the times are real, but how often drafts are "
            "right was set."
        )
    table = _whole(tables.speedup(run), run)
    own = table[table["over"] == run.baseline].set_index("method")
    drafting = [method for method in run.drafting if method in own.index]
    if not drafting:
        found = [f"{m} {_times(row)}" for m, row in own.iterrows() if m != run.baseline]
        verdict.result.append(
            f"Speed relative to {run.baseline}: {', '.join(found) or 'nothing else was measured'}."
        )
        verdict.advice.append(
            "No self-speculative method was measured; add one with --method self."
        )
        return verdict
    method = str(own.loc[drafting, "speedup"].idxmax())
    row = own.loc[method]
    verdict.result.append(_headline(run, method, row, len(drafting)))
    for _, over in table[(table["method"] == method) & (table["over"] != run.baseline)].iterrows():
        verdict.result.append(f"Over transformers' generate() it is {_times(over)}.")
    peers = [m for m in own.index if run.methods[m]["kind"] not in ("plain", "self", "generate")]
    faster = [peer for peer in peers if own.loc[peer, "low"] > row["speedup"]]
    if faster:
        peer = max(faster, key=lambda name: own.loc[name, "speedup"])
        verdict.result.append(
            f"{peer} was faster still, {_times(own.loc[peer])} as {run.baseline}."
        )
        verdict.advice.append(f"For prompts like these, prefer {peer}.")
    planned = run.header["prompts"]["count"]
    if run.batch_sizes[0] == 1 and row["prompts"] < planned:
        verdict.result.append(f"The run is unfinished: {row['prompts']} of {planned} prompts.")
    forecast = _line(predictions.predictions(run), run, method)
    verdict.reasons += [*_limits(run, method, forecast), *_repetition(run, method)]
    verdict.advice += _advice(run, method, row, forecast)
    verdict.advice = [] if run.synthetic else verdict.advice[:MOST_ADVICE]
    return verdict


def _headline(run: Run, method: str, row: Any, candidates: int) -> str:
    which = f" ({method}, the fastest of {candidates} measured)" if candidates > 1 else ""
    name, times = run.header["model"]["name"], f"{row['speedup']:.2f} times"
    gained = f"made {name} {times} as fast as {run.baseline} decoding"
    if math.isnan(row["low"]):
        return (
            f"Self-speculation{which} {gained} ({setting(run.header)}) on the one prompt measured; "
            "one prompt says nothing about others."
        )
    if row["low"] <= 1:
        was = "was slower than" if row["high"] < 1 else "is not distinguishable from"
        gained = f"{was} {run.baseline} decoding: {name} ran {times} as fast"
    details = f"{interval(row)}, {row['prompts']} prompts; {setting(run.header)}"
    return f"Self-speculation{which} {gained} ({details})."


def _limits(run: Run, method: str, forecast: Any) -> list[str]:
    said = []
    accepted = _line(tables.acceptance(run), run, method)
    if accepted is not None and not accepted["drafted"]:
        said.append("It drafted nothing: its controller expected no gain.")
    elif accepted is not None:
        said.append(
            f"A drafted token was accepted with probability {accepted['alpha']:.2f} (alpha): "
            f"{accepted['tokens_per_pass']:.2f} tokens per target pass."
        )
    if run.looks_up(method):
        said += _sources(run, method)
    if forecast is not None:
        bound = (
            ""
            if math.isnan(forecast["bound"])
            else f"No draft at c = {forecast['draft_cost']:.2f} target steps gains more than "
            f"{forecast['bound']:.1f} times. "
        )
        said.append(
            f"{bound}These rounds promised {forecast['predicted']:.2f} times without prefill, "
            f"measured {forecast['measured']:.2f}."
        )
    return said


def _sources(run: Run, method: str) -> list[str]:
    table = tables.sources(run)
    if not len(table):
        return []
    wanted = (table["category"] == tables.ALL) & (table["method"] == method)
    first = table["batch_size"] == run.batch_sizes[0]
    shares = [f"{row['source']} {row['share']:.0%}" for _, row in table[wanted & first].iterrows()]
    return [f"Rounds by source of their draft: {', '.join(shares)}."]


def _repetition(run: Run, method: str) -> list[str]:
    table = tables.repetition(run)
    row = table[(table["category"] == tables.ALL) & (table["method"] == method)].iloc[0]
    if row["loops"] > MANY_LOOPS * row["texts"]:
        easy = f"{row['loops']} of {row['texts']} texts loop"
    elif row["repeated_4grams"] > MUCH_REPEATED:
        easy = f"{row['repeated_4grams']:.0%} of the 4-grams in its texts had occurred before"
    else:
        return []
    return [f"{easy}: such text is easy to draft, and flatters this speedup."]


def _advice(run: Run, method: str, row: Any, forecast: Any) -> list[str]:
    """What to change, what helps most first."""
    advice = []
    if row["high"] < 1:
        advice.append("Decode plainly (--no-draft): that was the faster way here.")
    if forecast is not None and forecast["best_length"] == 0:
        advice.append(
            f"At alpha {forecast['alpha']:.2f} and c {forecast['draft_cost']:.2f} no fixed draft "
            "length pays: take another exit layer, `layerskip search`, or a checkpoint trained "
            "with early exits."
        )
    if run.traces:
        advice += _better_exit(run, run.methods[method])
    else:
        advice.append("Add --trace to the benchmark: it prices every exit layer.")
    more = doubt(row, row["speedup"])
    return [*advice, f"Measure {more}"] if more else advice


def _better_exit(run: Run, settings: dict[str, Any]) -> list[str]:
    """What the trace prices higher than what was run; nothing where that is the best."""
    table = predictions.what_if(run)
    if not len(table) or table["speedup"].isna().all():
        return []
    best = table.loc[table["speedup"].idxmax()]
    if best["speedup"] <= 1:
        return [
            "The trace prices every exit layer and draft length below plain decoding: search for "
            "sublayers to skip (`layerskip search`), or decode plainly."
        ]
    layer, odd = divmod(settings["num_kept"], 2)
    is_exit = not (odd or settings.get("low")) and settings.get("prefix") == settings["num_kept"]
    now = table[table["exit"] == layer]["speedup"].max() if is_exit else math.nan
    if not best["speedup"] > BETTER * now:
        return []
    return [
        f"Try --exit-layer {best['exit']:.0f}: the trace prices it at {best['speedup']:.2f}, "
        f"against {now:.2f} for exit {layer}."
    ]


def _whole(table: pd.DataFrame, run: Run) -> pd.DataFrame:
    """The lines over all prompts at the smallest batch size."""
    if not len(table):
        return table
    everything = table["category"] == tables.ALL
    return table[everything & (table["batch_size"] == run.batch_sizes[0])]


def _line(table: pd.DataFrame, run: Run, method: str) -> Any:
    """A method's line among `_whole`, if there is one."""
    table = _whole(table, run)
    found = table[table["method"] == method] if len(table) else table
    return found.iloc[0] if len(found) else None


def _times(row: Any) -> str:
    if math.isnan(row["low"]):
        return f"{row['speedup']:.2f} times as fast"
    return f"{row['speedup']:.2f} times as fast ({row['low']:.2f} to {row['high']:.2f})"
