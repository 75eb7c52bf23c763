"""Sums up runs, searches and trainings: for each a headline, its reasons, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from layerskip.analysis import run_tables, search_tables, training_tables
from layerskip.analysis.labels import ranged, setting
from layerskip.analysis.runs import ALL, Run
from layerskip.files.searches import GUIDED

MANY_LOOPS = 0.1  # share of looping texts above which the headline is too favourable
FEW_PROMPTS = 8
WIDE = 0.2  # width of the interval relative to the speedup
BETTER = 1.03  # predicted advantage above which another exit is mentioned
RISING = 0.02  # gain of overlap in the second half of a training, above which more may help


@dataclass
class Verdict:
    """Sentences about one run, one search or all trainings, in reading order."""

    label: str
    faults: list[str] = field(default_factory=list)
    """Problems that invalidate the numbers; shown first."""
    lines: list[str] = field(default_factory=list)
    """The first is the headline."""


def words(verdicts: Sequence[Verdict]) -> str:
    if len(verdicts) == 1:
        return " ".join(verdicts[0].faults + verdicts[0].lines)
    faults = [f"{v.label}: {' '.join(v.faults)}" for v in verdicts if v.faults]
    return "\n\n".join([*faults, *(f"{v.label}: {' '.join(v.lines)}" for v in verdicts)])


def judge_run(run: Run) -> Verdict:
    """The verdict on a run's fastest self-speculative method at the smallest batch size."""
    texts = run_tables.losslessness(run).query("category == @ALL")
    verdict = Verdict(run.label, _faults(texts, "method"))
    table = run_tables.speedup(run)
    table = table[(table["category"] == ALL) & (table["batch_size"] == run.batch_sizes[0])]
    speeds = table[table["over"] == run.baseline].set_index("method")
    drafting = [method for method in run.drafting if method in speeds.index]
    if not drafting:
        others = [f"{m} {_times(row)}" for m, row in speeds.iterrows() if m != run.baseline]
        words = ", ".join(others) or "nothing else was measured"
        verdict.lines = [
            f"Speed relative to {run.baseline}: {words}.",
            "No self-speculative method was measured; add one with --method self.",
        ]
        return verdict
    method = str(speeds.loc[drafting, "speedup"].idxmax())
    over = table[(table["method"] == method) & (table["over"] != run.baseline)]
    verdict.lines = [
        _headline(run, method, speeds.loc[method]),
        *(f"Over transformers' generate() it is {_times(row)}." for _, row in over.iterrows()),
        *_reasons(run, method, texts.set_index("method").loc[method]),
        *_next_steps(run, method, speeds),
    ]
    return verdict


def _headline(run: Run, method: str, row: Any) -> str:
    parts = f"prefill {row['prefill_speedup']:.2f}, decoding {row['decode_speedup']:.2f}"
    if math.isnan(row["decode_speedup"]):
        parts = "every text ended with its first token"
    doubt = ", not distinguishable from it" if row["low"] <= 1 <= row["high"] else ""
    return (
        f"With {method}, {run.header['model']['name']} was {row['speedup']:.2f} times as fast as "
        f"with {run.baseline}{doubt} ({_interval(row)}, {row['prompts']} "
        f"prompt{'' if row['prompts'] == 1 else 's'}; {parts}; {setting(run.header)})."
    )


def _reasons(run: Run, method: str, texts: Any) -> list[str]:
    """Acceptance, and whether texts are equal or repetitive."""
    sentences = []
    drafts = _line(run_tables.acceptance(run), run, method)
    if drafts is not None and drafts["drafted"]:
        sentences.append(
            f"A drafted token was accepted with probability {drafts['alpha']:.2f}; a pass of the "
            f"whole model yielded {drafts['tokens_per_pass']:.2f} tokens."
        )
    elif drafts is not None:
        sentences.append("It drafted nothing: its controller expected no gain.")
    if texts["compared"]:
        sentences.append(f"Texts equal to {run.baseline}'s: {run_tables.same_text(texts)}.")
    row = _line(run_tables.repetition(run), run, method)
    if row["loops"] > MANY_LOOPS * row["texts"]:
        sentences.append(
            f"{row['loops']} of {row['texts']} texts loop, which inflates this speedup."
        )
    return sentences


def _next_steps(run: Run, method: str, speeds: pd.DataFrame) -> list[str]:
    """What would be faster or surer."""
    row, steps = speeds.loc[method], []
    if row["high"] < 1:
        steps.append("Decode plainly (--no-draft): that was faster here.")
    peers = [n for n in speeds.index if run.methods[n]["kind"] not in ("plain", "self", "generate")]
    faster = speeds.loc[peers].query("low > @row.speedup")
    if len(faster):
        peer = faster["speedup"].idxmax()
        steps.append(f"For prompts like these, prefer {peer}: it is {_times(faster.loc[peer])}.")
    priced = run_tables.exits(run)
    if len(priced):
        best = priced.loc[priced["speedup"].idxmax()]
        now = run.methods[method]["num_kept"] / 2
        if best["exit"] != now and best["speedup"] > BETTER * max(1.0, row["decode_speedup"]):
            steps.append(
                f"Try --exit-layer {best['exit']:.0f}: the sweep predicts that it is "
                f"{best['speedup']:.2f} times as fast as plain decoding."
            )
    planned = run.header["prompts"]["count"]
    if run.batch_sizes[0] == 1 and row["prompts"] < planned:
        steps.append(f"The run is unfinished: {row['prompts']} of {planned} prompts.")
    return steps + _more_prompts(row, row["speedup"])


def judge_search(search: search_tables.SearchTables) -> Verdict:
    """The verdict on a search: the command to run, its effect, and the reasons."""
    table, document = search_tables.finalists(search), search.document
    verdict = Verdict(search.label, _faults(table, "name"), [_what_to_type(search)])
    lines = {row["name"]: row for _, row in table.iterrows()}
    found, best = search_tables.best(search), lines.get(document["best_exit"])
    if found is not None:
        row = lines[found["name"]]
        but = ", not distinguishable from plain" if row["low"] <= 1 else ""
        rounded = f" and runs in {row['rounded']}" if pd.notna(row["rounded"]) else ""
        verdict.lines.append(
            f"The best draft found, {row['name']}, leaves out {row['left_out']} of "
            f"{2 * document['model']['num_layers']} sublayers{rounded}{but} ({setting(document)}): "
            f"it {_speed(row)}."
        )
        if best is not None and best["name"] != row["name"]:
            verdict.lines.append(f"The best early exit, {best['name']}, {_speed(best)}.")
    failed = int((search.trials["state"] != "complete").sum())
    guided = search.complete["origin"].isin(GUIDED).sum()
    verdict.lines.append(
        f"{len(search.complete)} trials finished, {guided} of them guided"
        f"{f' ({failed} more failed)' if failed else ''}; no set of the "
        f"{document['space']['kind']} space can be more than {document['bound']:.1f} times as fast "
        "as plain."
    )
    if found is not None and found["confirmed"] is None:
        if document["winner"] or found["predicted"] > search_tables.PAYS:
            verdict.lines.append("Time the finalists before you rely on a prediction.")
    elif document["winner"]:
        verdict.lines += _more_prompts(row, row["measured"])
    return verdict


def _what_to_type(search: search_tables.SearchTables) -> str:
    """The fastest command, and its effect compared with the one without a skip config."""
    document = search.document
    default, law = document["default"], document["law"]
    plain = f"layerskip generate {document['model']['name']} --prompt TEXT"
    plain += " --chat" if document["prompts"].get("chat") else ""
    if law["do_sample"]:
        names = [n for n in ("temperature", "top_p", "top_k") if law[n] is not None]
        plain += "".join([" --do-sample", *(f" --{n} {law[n]:g}".replace("_", "-") for n in names)])
    has = "" if default is None else f" ({default['speedup']:.2f} times plain decoding)"
    if document["keep_default"]:
        return (
            f"Run `{plain}`, without --skip: its default drafts{has} are as fast as anything "
            "found, as far as these prompts show."
        )
    won = [each for each in document["finalists"] if each["name"] == document["winner"]]
    if not won and not len(search.complete):
        return "No trial finished in time: search again with a longer --timeout."
    if not won:
        return f"Run `{plain} --no-draft`: nothing found is faster than plain decoding."
    with_it, timed = f"Run `{plain} --skip {search.folder}/skip.json`", won[0]["confirmed"]
    if timed is None:
        expected = ranged(*(run_tables.number(won[0].get(n)) for n in search_tables.PREDICTED))
        return f"{with_it}: it should be {expected} times as fast as plain decoding."
    over = (run_tables.number(timed["over_default"][n]) for n in ("speedup", "low", "high"))
    return (
        f"{with_it}: it is {timed['speedup']:.2f} times as fast as plain decoding, and "
        f"{ranged(*over)} times as fast as without --skip{has}."
    )


def _speed(row: Any) -> str:
    """How fast a finalist was, or is predicted to be."""
    predicted = ranged(*(row[name] for name in search_tables.PREDICTED))
    if math.isnan(row["measured"]):
        return f"is predicted to be {predicted} times as fast as plain, but not timed"
    return (
        f"was timed at {row['measured']:.2f} times the speed of plain decoding "
        f"({_interval(row)}, n = {row['prompts']:.0f}; predicted {predicted})"
    )


def judge_trainings(of: training_tables.Trainings) -> Verdict:
    """Which trained drafts pay, how fast the fastest is, and whether it was still learning."""
    table = training_tables.trainings(of)
    pays = table[table["pays"] == "yes"]
    verdict = Verdict(of.label, lines=[f"{len(pays)} of {len(table)} trained drafts pay."])
    timed = (pays if len(pays) else table).dropna(subset=["measured"])
    if len(timed):
        row = timed.loc[timed["measured"].idxmax()]
        before = "" if pd.isna(row["before"]) else f", the previous draft {row['before']:.2f}"
        speed = ranged(row["measured"], row["low"], row["high"])
        verdict.lines.append(f"{row['draft']} is {speed} times as fast as plain decoding{before}.")
    best = table.loc[table["accepted_1"].idxmax()]
    verdict.lines.append(
        f"{best['draft']} is accepted most often: {best['accepted_1']:.3f} of its first tokens at "
        f"c {best['draft_cost']:.2f}; training changed its overlap with the target from "
        f"{best['overlap_before']:.3f} to {best['overlap']:.3f}."
    )
    curve = training_tables.curves(of).query("step == 1 and draft == @best.draft")
    late = curve[curve["tokens"] >= curve["tokens"].max() / 2]["overlap"]
    if len(late) > 1 and late.iloc[-1] - late.iloc[0] > RISING:
        verdict.lines.append(f"Train {best['draft']} on more tokens: its overlap still grew.")
    return verdict


def _faults(table: pd.DataFrame, name: str) -> list[str]:
    """A sentence for each line with faults; `name` is the column with their origin."""
    return [
        f"FAULT: {row['faults']:.0f} of {row['compared']:.0f} texts of {row[name]} differ from the "
        "baseline's by more than rounding can explain, so its speed is meaningless; run `layerskip "
        "check`."
        for _, row in table.iterrows()
        if row["faults"] > 0
    ]


def _interval(row: Any) -> str:
    if math.isnan(row["low"]):
        return "no interval"
    return f"95% interval {row['low']:.2f} to {row['high']:.2f}"


def _more_prompts(row: Any, speedup: float) -> list[str]:
    """Advice if an interval is missing, wide, around 1, or based on few prompts."""
    narrow = row["high"] - row["low"] <= WIDE * speedup
    if narrow and row["prompts"] >= FEW_PROMPTS and not row["low"] <= 1 <= row["high"]:
        return []
    return [f"Measure more prompts: {row['prompts']:.0f} leave the result uncertain."]


def _line(table: pd.DataFrame, run: Run, method: str) -> Any:
    """A method's line over all prompts at the smallest batch size, or None."""
    place = {"category": ALL, "method": method, "batch_size": run.batch_sizes[0]}
    for name, value in place.items():
        table = table[table[name] == value] if name in table else table
    return table.iloc[0] if len(table) else None


def _times(row: Any) -> str:
    return f"{ranged(row['speedup'], row['low'], row['high'])} times as fast"
