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
OFF = 0.1  # distance of measured / predicted from 1 that asks for a reason


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
            "right was set, and no trained model's acceptance follows from it."
        )
    speedups = tables.speedup(run).query(f"category == '{tables.ALL}'")
    sizes = speedups[speedups["over"] == run.baseline]
    table = sizes[sizes["batch_size"] == run.batch_sizes[0]].set_index("method")
    drafting = [method for method in run.drafting if method in table.index]
    if not drafting:
        verdict.result.append(_others(run, table))
        verdict.advice.append(
            "No self-speculative method was measured; add one with --method self."
        )
        return verdict
    method = str(table.loc[drafting, "speedup"].idxmax())
    row = table.loc[method]
    verdict.result.append(_headline(run, method, row, len(drafting)))
    _over_library(run, method, speedups, verdict)
    faster = _faster_peers(run, method, verdict)
    _unfinished(run, row, verdict)
    forecast = _row(predictions.predictions(run), run, method)
    shares = _shares(run, method)
    _limits(run, method, forecast, verdict)
    _time(shares, forecast, verdict)
    _repetition(run, method, verdict)
    _batches(sizes[sizes["method"] == method], verdict)
    if not run.synthetic:  # what was set asks for no change
        _advise(run, method, row, forecast, shares, faster, verdict)
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
                f"{run.baseline}'s by more than rounding can explain. That method was not lossless "
                "here, and its speed means nothing until it is: run `layerskip check` on this "
                "model and machine."
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
    if row["high"] < 1:
        return (
            f"Self-speculation{which} was slower than {run.baseline} decoding: {name} ran {times} "
            f"as fast {details}."
        )
    if row["low"] <= 1:
        return (
            f"Self-speculation{which} is not distinguishable from {run.baseline} decoding: {name} "
            f"ran {times} as fast {details}."
        )
    return (
        f"Self-speculation{which} made {name} {times} as fast as {run.baseline} decoding {details}."
    )


def _over_library(run: Run, method: str, speedups: pd.DataFrame, verdict: Verdict) -> None:
    for over in tables.comparisons(run)[1:]:
        row = _row(speedups[speedups["over"] == over], run, method)
        if row is not None:
            verdict.result.append(f"Over transformers' generate() it is {_ratio(row)}.")


def _others(run: Run, table: pd.DataFrame) -> str:
    found = [f"{m} {_ratio(row)}" for m, row in table.iterrows() if m != run.baseline]
    return f"Speed relative to {run.baseline}: {', '.join(found) or 'nothing else was measured'}."


def _faster_peers(run: Run, method: str, verdict: Verdict) -> list[str]:
    """Names of other libraries' methods whose paired interval lies above the draft's speed."""
    frame = typical(run)
    frame = frame[frame["batch_size"] == run.batch_sizes[0]]
    ours = frame[frame["method"] == method].set_index("unit")["total"]
    faster = []
    for peer in run.measured:
        if peer == run.baseline or run.methods[peer]["kind"] in ("self", "generate"):
            continue
        theirs = frame[frame["method"] == peer].set_index("unit")["total"]
        units = [unit for unit in ours.index if unit in theirs.index]
        ratio, low, high = ratio_of_totals(ours.loc[units].to_numpy(), theirs.loc[units].to_numpy())
        if low > 1 or (math.isnan(low) and ratio > 1):
            faster.append(peer)
            interval = "" if math.isnan(low) else f" ({low:.2f} to {high:.2f})"
            verdict.result.append(f"{peer} was faster still: {ratio:.2f} times as fast{interval}.")
    return faster


def _unfinished(run: Run, row: Any, verdict: Verdict) -> None:
    planned = run.header["prompts"]["count"]
    if run.batch_sizes[0] == 1 and row["prompts"] < planned:
        verdict.result.append(
            f"The run is unfinished: {row['prompts']} of {planned} prompts have been measured with "
            "both methods; run the benchmark again with the same --output to complete it."
        )


def _limits(run: Run, method: str, forecast: Any, verdict: Verdict) -> None:
    accepted = _row(tables.acceptance(run), run, method)
    if forecast is not None:
        verdict.reasons.append(
            f"No draft of this kind can gain more than {forecast['bound']:.1f} times (1/c, with c "
            f"= {forecast['draft_cost']:.2f}, the cost of a draft step in target steps)."
        )
    if accepted is not None and not math.isnan(accepted["alpha"]):
        verdict.reasons.append(
            f"A drafted token was accepted with probability {accepted['alpha']:.2f} (alpha), which "
            f"gave {accepted['tokens_per_pass']:.2f} tokens per target pass."
        )
    elif accepted is not None and not accepted["drafted"]:
        verdict.reasons.append("It drafted nothing: its controller expected no gain.")


def _time(shares: dict[str, float], forecast: Any, verdict: Verdict) -> None:
    if shares:
        names = {"draft": "drafting", "verify": "verification", "prefill": "the prefill",
                 "other": "accepting, drawing and other work"}  # fmt: skip
        order = sorted(shares, key=lambda name: -shares[name])
        most, next_ = order[:2]
        verdict.reasons.append(
            f"{shares[most]:.0%} of its time goes to {names[most]}, {shares[next_]:.0%} to "
            f"{names[next_]}."
        )
    if forecast is not None:
        verdict.reasons.append(
            f"Its rounds, priced with the cost table, promised {forecast['predicted']:.2f} times "
            f"for decoding without prefill; measured were {forecast['measured']:.2f} "
            f"({forecast['efficiency']:.0%} efficiency)."
        )


def _repetition(run: Run, method: str, verdict: Verdict) -> None:
    table = tables.repetition(run)
    row = table[(table["category"] == tables.ALL) & (table["method"] == method)].iloc[0]
    sentence = f"{row['repeated_4grams']:.0%} of the 4-grams in its texts had occurred before"
    if row["loops"] > MANY_LOOPS * row["texts"]:
        sentence += (
            f", and {row['loops']} of {row['texts']} texts loop: text that repeats itself is easy "
            "to draft, and flatters this speedup"
        )
    elif row["repeated_4grams"] > MUCH_REPEATED:
        sentence += ": text that repeats itself is easy to draft, and flatters this speedup"
    verdict.reasons.append(sentence + ".")


def _batches(rows: pd.DataFrame, verdict: Verdict) -> None:
    if len(rows) > 1:
        by_size = (f"{row['speedup']:.2f} at {row['batch_size']}" for _, row in rows.iterrows())
        verdict.reasons.append(f"By batch size it was {', '.join(by_size)}.")


def _advise(
    run: Run,
    method: str,
    row: Any,
    forecast: Any,
    shares: dict[str, float],
    faster: list[str],
    verdict: Verdict,
) -> None:
    advice = verdict.advice
    gains = not math.isnan(row["low"]) and row["low"] > 1
    settings = run.methods[method]
    if faster:
        advice.append(f"For prompts like these, prefer {faster[0]}.")
    if forecast is not None and forecast["bound"] < LOW_BOUND:
        advice.append(
            f"The draft is too dear: at c = {forecast['draft_cost']:.2f} even perfect acceptance "
            "could hardly pay. Exit earlier or skip more sublayers."
        )
    elif forecast is not None and forecast["best_length"] == 0:
        advice.append(
            f"At alpha {forecast['alpha']:.2f} and c {forecast['draft_cost']:.2f} no fixed draft "
            "length pays: this draft is wrong too often for its price. Take another exit layer, "
            "search for sublayers to skip, or a checkpoint trained with early exits."
        )
    better = _better_exit(run, settings)
    if better:
        advice.append(better)
    elif not run.traces:
        advice.append(
            "Add --trace to the benchmark: it prices every exit layer and draft length at once."
        )
    if forecast is not None and not math.isnan(forecast["formula"]):
        length, best = forecast["formula_length"], forecast["best_length"]
        if best > 0 and forecast["best_formula"] > BETTER * forecast["formula"]:
            advice.append(
                f"At this acceptance a draft length of {best:.0f} should do better than "
                f"{length:.0f} ({forecast['best_formula']:.2f} against "
                f"{forecast['formula']:.2f} by formula); or let --controller expected-gain choose."
            )
    costs = run.cost_table(method, run.batch_sizes[0])
    if costs is not None and shares.get("verify", 0) > 0.5 and costs.verify_cost(4) > 1.25:
        advice.append(
            f"Verifying 4 tokens costs {costs.verify_cost(4):.2f} plain steps here, where it would "
            "cost about 1 on a machine limited by reading weights: try more threads or a GPU, or "
            "shorter drafts."
        )
    elif shares.get("draft", 0) > 0.5:
        advice.append("Most time goes to drafting: an earlier exit or shorter drafts would cut it.")
    if forecast is not None and abs(forecast["efficiency"] - 1) > OFF:
        if forecast["efficiency"] < 1:
            advice.append(
                f"{1 - forecast['efficiency']:.0%} of the promised speed is missing: other work on "
                "the machine, longer contexts than those the costs were measured at, or overhead "
                "between the passes; measure again on a quiet machine."
            )
        else:
            advice.append(
                "It did better than its costs promise: they were measured on a busier machine or "
                "at other contexts; measure again on a quiet one."
            )
    if settings.get("controller") != "expected-gain" and not gains:
        advice.append("Try --controller expected-gain, which stops drafting where it does not pay.")
    if not gains and not math.isnan(row["high"]) and row["high"] < 1:
        advice.append("Until then decode plainly (--no-draft): that was the faster way here.")
    wide = (row["high"] - row["low"]) / row["speedup"] > WIDE
    if row["prompts"] < FEW_PROMPTS or wide or (not gains and row["high"] >= 1):
        advice.append(
            f"Measure more prompts: {row['prompts']} leave the interval "
            + ("unknown." if math.isnan(row["low"]) else f"{row['low']:.2f} to {row['high']:.2f}.")
        )


def _better_exit(run: Run, settings: dict[str, Any]) -> str:
    """What the trace prices higher than what was run; nothing where that is the best."""
    table = predictions.what_if(run)
    if not len(table) or table["speedup"].isna().all():
        return ""
    best = table.loc[table["speedup"].idxmax()]
    if best["speedup"] <= 1:
        return (
            "The trace prices every exit layer and draft length below plain decoding: an early "
            "exit cannot pay on this text; search for sublayers to skip (`layerskip search`), or "
            "decode plainly."
        )
    early_exit = settings["num_kept"] % 2 == 0 and settings.get("prefix") == settings["num_kept"]
    now = table[table["exit"] == settings["num_kept"] // 2] if early_exit else table.iloc[:0]
    if not len(now) or best["speedup"] <= BETTER * now["speedup"].max():
        return ""
    threshold = f", threshold {best['threshold']:g}" if best["threshold"] else ""
    return (
        f"Try --exit-layer {best['exit']:.0f}: with up to {best['draft_length']:.0f} drafted tokens"
        f"{threshold} the trace prices it at {best['speedup']:.2f}, against "
        f"{now['speedup'].max():.2f} for exit {settings['num_kept'] // 2}."
    )


def _shares(run: Run, method: str) -> dict[str, float]:
    """Shares of a method's time by phase; empty where it does not tell phases apart."""
    table = tables.phases(run)
    row = table[(table["method"] == method) & (table["batch_size"] == run.batch_sizes[0])].iloc[0]
    if pd.isna(row["draft"]) or pd.isna(row["verify"]):
        return {}
    parts = {name: float(row[name]) for name in ("prefill", "draft", "verify")}
    parts["other"] = float(row["total"]) - sum(parts.values())
    return {name: value / float(row["total"]) for name, value in parts.items()}


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
