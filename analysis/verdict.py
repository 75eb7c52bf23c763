"""Sums up runs, searches and trainings in a few plain sentences each, with advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from layerskip.analysis import run_tables, search_tables, training_tables
from layerskip.analysis.labels import setting
from layerskip.analysis.runs import ALL, Run

MANY_LOOPS = 0.1  # share of looping texts above which the headline is too favourable
FEW_PROMPTS = 8
WIDE = 0.2  # width of the interval relative to the speedup
BETTER = 1.03  # predicted advantage above which another exit is mentioned
RISING = 0.02  # gain of overlap in the second half of a training, above which more may help
PLAIN = "Decode plainly (--no-draft): that was faster here."
TIME_THEM = "Time the finalists before you rely on a prediction."


@dataclass
class Verdict:
    """Sentences about one run, one search or all trainings, in reading order."""

    label: str
    faults: list[str] = field(default_factory=list)
    """Problems that invalidate the numbers; shown first."""
    lines: list[str] = field(default_factory=list)
    """The gain and its reasons; the first is the headline."""
    advice: list[str] = field(default_factory=list)


def words(verdicts: Sequence[Verdict]) -> str:
    if len(verdicts) == 1:
        (one,) = verdicts
        return " ".join([*one.faults, *one.lines, *one.advice])
    faults = [f"{v.label}: {' '.join(v.faults)}" for v in verdicts if v.faults]
    rest = [f"{v.label}: {' '.join([*v.lines, *v.advice])}" for v in verdicts]
    return "\n\n".join([*faults, *rest])


def judge_run(run: Run) -> Verdict:
    """The verdict on a run's fastest self-speculative method at the smallest batch size."""
    texts = run_tables.losslessness(run).query("category == @ALL")
    verdict = Verdict(run.label, _faults(texts, "method"))
    table = run_tables.speedup(run)
    first = table["batch_size"] == run.batch_sizes[0]
    table = table[(table["category"] == ALL) & first]
    speeds = table[table["over"] == run.baseline].set_index("method")
    drafting = [method for method in run.drafting if method in speeds.index]
    if not drafting:
        others = [f"{m} {_times(row)}" for m, row in speeds.iterrows() if m != run.baseline]
        verdict.lines.append(
            f"Speed relative to {run.baseline}: {', '.join(others) or 'nothing else was measured'}."
        )
        verdict.advice.append(
            "No self-speculative method was measured; add one with --method self."
        )
        return verdict
    method = str(speeds.loc[drafting, "speedup"].idxmax())
    row = speeds.loc[method]
    verdict.lines.append(_headline(run, method, row))
    for _, over in table[(table["method"] == method) & (table["over"] != run.baseline)].iterrows():
        verdict.lines.append(f"Over transformers' generate() it is {_times(over)}.")
    verdict.lines += _reasons(run, method, texts.set_index("method").loc[method])
    planned = run.header["prompts"]["count"]
    if run.batch_sizes[0] == 1 and row["prompts"] < planned:
        verdict.lines.append(f"The run is unfinished: {row['prompts']} of {planned} prompts.")
    verdict.advice += _advice(run, method, speeds)
    return verdict


def _headline(run: Run, method: str, row: Any) -> str:
    counted = "1 prompt" if row["prompts"] == 1 else f"{row['prompts']} prompts"
    parts = f"prefill {row['prefill_speedup']:.2f}, decoding {row['decode_speedup']:.2f}"
    if math.isnan(row["decode_speedup"]):
        parts = "every text ended with its first token"
    doubt = ""
    if row["low"] <= 1 <= row["high"]:
        doubt = f", which is not distinguishable from {run.baseline} decoding"
    return (
        f"{method} made {run.header['model']['name']} {row['speedup']:.2f} times as fast as "
        f"{run.baseline} decoding{doubt} ({_interval(row)}, {counted}; {parts}; "
        f"{setting(run.header)})."
    )


def _reasons(run: Run, method: str, texts: Any) -> list[str]:
    """Acceptance, the bound of the speedup, and whether texts are equal or repetitive."""
    sentences = []
    accepted = _line(run_tables.acceptance(run), run, method)
    if accepted is not None and not accepted["drafted"]:
        sentences.append("It drafted nothing: its controller expected no gain.")
    elif accepted is not None:
        sentences.append(
            f"A drafted token was accepted with probability {accepted['alpha']:.2f}; a pass of the "
            f"whole model yielded {accepted['tokens_per_pass']:.2f} tokens."
        )
    forecast = _line(run_tables.predictions(run), run, method)
    if forecast is not None and not math.isnan(forecast["bound"]):
        sentences.append(
            f"A draft step cost {forecast['draft_cost']:.2f} plain steps, so such drafts "
            f"can be at most {forecast['bound']:.1f} times as fast."
        )
    if texts["compared"]:
        near = f", {texts['near_ties']} near-ties" if texts["near_ties"] else ""
        sentences.append(
            f"Texts equal to {run.baseline}'s: {texts['equal']}/{texts['compared']}{near}."
        )
    row = _line(run_tables.repetition(run), run, method)
    if row["loops"] > MANY_LOOPS * row["texts"]:
        sentences.append(
            f"{row['loops']} of {row['texts']} texts loop, which inflates this speedup."
        )
    return sentences


def _advice(run: Run, method: str, speeds: pd.DataFrame) -> list[str]:
    row, advice = speeds.loc[method], []
    if row["high"] < 1:
        advice.append(PLAIN)
    others = [
        m for m in speeds.index if run.methods[m]["kind"] not in ("plain", "self", "generate")
    ]
    faster = speeds.loc[
        [name for name in others if speeds.loc[name, "low"] > row["speedup"]], "speedup"
    ]
    if len(faster):
        peer = faster.idxmax()
        advice.append(f"For prompts like these, prefer {peer}: it is {_times(speeds.loc[peer])}.")
    priced = run_tables.sweeps(run)
    if len(priced):
        best = priced.loc[priced["speedup"].idxmax()]
        now = run.methods[method]["num_kept"] / 2
        if best["exit"] != now and best["speedup"] > BETTER * max(1.0, row["decode_speedup"]):
            advice.append(
                f"Try --exit-layer {best['exit']:.0f}: the sweep predicts that it is "
                f"{best['speedup']:.2f} times as fast as plain decoding."
            )
    return advice + _more_prompts(row, row["speedup"])


def judge_search(search: search_tables.SearchTables) -> Verdict:
    """The verdict on a search: the command to run, its effect, and the reasons."""
    table, document = search_tables.finalists(search), search.document
    verdict = Verdict(search.label, _faults(table, "name"), [_what_to_type(search)])
    lines = {row["name"]: row for _, row in table.iterrows()}
    found, best = search_tables.best(search), lines.get(document["best_exit"])
    winner = None if found is None else lines[found["name"]]
    if winner is not None:
        if math.isnan(winner["measured"]):
            promising = document["winner"] or winner["predicted"] > search_tables.PAYS
            verdict.advice = [TIME_THEM] if promising else []
        elif document["winner"]:
            verdict.advice = _more_prompts(winner, winner["measured"])
        but = ", not distinguishable from plain" if winner["low"] <= 1 else ""
        verdict.lines.append(
            f"The best draft found, {winner['name']}, {_draft(search, winner)}{but} "
            f"({setting(document)}): it {_speed(winner)}."
        )
        if best is not None and best["name"] != winner["name"]:
            verdict.lines.append(f"The best early exit, {best['name']}, {_speed(best)}.")
        verdict.lines.append(
            f"A step of that draft costs c = {winner['draft_cost']:.2f} target steps; its first "
            f"token is right with probability alpha = {winner['alpha']:.2f}."
        )
    verdict.lines.append(
        f"No draft of this space can be more than {document['bound']:.1f} times as fast as plain."
    )
    guided = search.complete["origin"].isin(search_tables.GUIDED).sum()
    failed = int((search.trials["state"] != "complete").sum())
    verdict.lines.append(
        f"{len(search.complete)} trials finished, {guided} of them guided"
        f"{f' ({failed} more failed)' if failed else ''}, in the {document['space']['kind']} space "
        f"of {document['space']['size']:,} sets."
    )
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
    drafts, winner = document["finalists"], document["winner"]
    best = next((each for each in drafts if each["name"] == winner), None)
    if best is None:
        if not len(search.complete):
            return "No trial finished in time: search again with a longer --timeout."
        return f"Run `{plain} --no-draft`: nothing found is faster than plain decoding."
    with_it = f"Run `{plain} --skip {search.folder}/skip.json`"
    timed = best["confirmed"]
    if timed is None:
        return f"{with_it}: it should be {_predicted(best)} times as fast as plain decoding."
    over = timed["over_default"]
    low, high = (search_tables.number(over[end]) for end in ("low", "high"))
    return (
        f"{with_it}: it is {timed['speedup']:.2f} times as fast as plain decoding, and "
        f"{over['speedup']:.2f} times{'' if math.isnan(low) else f' ({low:.2f} to {high:.2f})'} "
        f"as fast as without --skip{has}."
    )


def _draft(search: search_tables.SearchTables, row: Any) -> str:
    """What a finalist's draft does with the model's sublayers."""
    finalist = next(each for each in search.document["finalists"] if each["name"] == row["name"])
    low, count = finalist.get("low"), 2 * search.document["model"]["num_layers"]
    rest = count - row["left_out"]
    words = (
        f"skips {row['left_out']} of {count} sublayers"
        if row["left_out"]
        else f"runs all {count} sublayers"
    )
    words += f" of {search.document['model']['name']}"
    if low is not None:
        some = len(low["attention"]) + len(low["mlp"])
        which = "the others" if some == rest else f"{some} of the other {rest}"
        which = f" and runs {which}" if row["left_out"] else f", {some} of them"
        words += f"{which} in {low['bits']} bits"
    if finalist.get("trained") is not None:
        words += f", with {finalist['trained']}"
    return f"{words}, with lookups" if row["lookup"] else words


def _predicted(finalist: Any) -> str:
    """A predicted speedup, with its interval if the file has one."""
    predicted, low, high = (
        search_tables.number(finalist.get(name)) for name in search_tables.PREDICTED
    )
    return f"{predicted:.2f}" + ("" if math.isnan(low) else f" ({low:.2f} to {high:.2f})")


def _speed(row: Any) -> str:
    """How fast a finalist was, or is predicted to be."""
    if math.isnan(row["measured"]):
        return f"is predicted to be {_predicted(row)} times as fast as plain, but not timed"
    return (
        f"was timed at {row['measured']:.2f} times the speed of plain decoding "
        f"({_interval(row)}, n = {row['prompts']:.0f}; predicted {_predicted(row)})"
    )


def judge_trainings(of: training_tables.Trainings) -> Verdict:
    """Which trained drafts pay, how fast the fastest is, and whether it was still learning."""
    table = training_tables.trainings(of)
    verdict = Verdict(of.label)
    pays = table[table["pays"] == "yes"]
    verdict.lines.append(f"{len(pays)} of {len(table)} trained drafts pay.")
    timed = (pays if len(pays) else table).dropna(subset=["measured"])
    if len(timed):
        row = timed.loc[timed["measured"].idxmax()]
        previous = "" if pd.isna(row["before"]) else f", the previous draft {row['before']:.2f}"
        verdict.lines.append(
            f"{row['draft']} is {row['measured']:.2f} times as fast as plain decoding "
            f"({_interval(row)}){previous}."
        )
    best = table.loc[table["accepted_1"].idxmax()]
    verdict.lines.append(
        f"{best['draft']} is accepted most often: {best['accepted_1']:.3f} of its first tokens at "
        f"c {best['draft_cost']:.2f}; training changed its overlap with the target from "
        f"{best['overlap_before']:.3f} to {best['overlap']:.3f}."
    )
    curve = training_tables.curves(of).query("step == 1")
    curve = curve[curve["draft"] == best["draft"]]
    late = curve[curve["tokens"] >= curve["tokens"].max() / 2]["overlap"]
    if len(late) > 1 and late.iloc[-1] - late.iloc[0] > RISING:
        verdict.advice.append(f"Train {best['draft']} on more tokens: its overlap still grew.")
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
    interval = "" if math.isnan(row["low"]) else f" ({row['low']:.2f} to {row['high']:.2f})"
    return f"{row['speedup']:.2f} times as fast{interval}"
