"""Knows what trainings and comparisons of drafts mean in plain words, and what to do next.

Every sentence follows from the tables by a rule written here; the rules' numbers are judgements.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from layerskip.analysis import trainings
from layerskip.analysis.trainings import Comparison, Trainings
from layerskip.analysis.verdict import Verdict, faults_of, interval, setting

RISING = 0.02
"""Overlap gained over the second half of a training, from which on more of it is worth naming."""

MOST = 3
"""Trained drafts that pay whose speed is told, the fastest."""


def judge_trainings(of: Trainings) -> Verdict:
    """Which trained drafts pay, and whether the best was still learning."""
    table = trainings.trainings(of)
    verdict = Verdict(of.label)
    pays = table[table["pays"] == "yes"]
    if len(table) == 1:
        verdict.result.append(f"The trained draft {'pays' if len(pays) else 'does not pay'}.")
    else:
        count = len(pays) or "None"
        pay = "pay" if len(pays) > 1 else "pays"
        verdict.result.append(f"{count} of {len(table)} trained drafts {pay}.")
    timed = table[table["measured"].notna()].sort_values("measured", ascending=False)
    told = timed[timed["pays"] == "yes"].head(MOST) if len(pays) else timed.head(1)
    for _, row in told.iterrows():
        beside = "" if pd.isna(row["before"]) else f", what drafted before {row['before']:.2f}"
        verdict.result.append(f"{_speed(row)}{beside}.")
    best = table.loc[table["accepted_1"].idxmax()]
    verdict.reasons.append(
        f"{best['draft']} is accepted most often: {best['accepted_1']:.3f} of its first tokens and "
        f"{best['accepted_2']:.3f} of its first two at c {best['draft_cost']:.2f}; training took "
        f"its overlap with the target from {best['overlap_before']:.3f} to {best['overlap']:.3f}."
    )
    curve = trainings.curves(of)
    curve = curve[(curve["draft"] == best["draft"]) & (curve["step"] == 1)]
    late = curve[curve["tokens"] >= curve["tokens"].max() / 2]["overlap"]
    if len(late) > 1 and late.iloc[-1] - late.iloc[0] > RISING:
        verdict.advice.append(
            f"Train {best['draft']} on more tokens: its overlap still rose by "
            f"{late.iloc[-1] - late.iloc[0]:.3f} over the second half of its training."
        )
    return verdict


def judge_comparison(of: Comparison) -> Verdict:
    """The fastest draft, and what trained weights bring beside the best without any."""
    table = trainings.drafts(of)
    verdict = Verdict(of.label, faults_of(table, "draft"))
    timed = table[table["measured"].notna()].sort_values("measured", ascending=False)
    if not len(timed):
        best = table.loc[table["accepted_1"].fillna(0.0).idxmax()]
        verdict.result.append(
            f"{best['draft']} is accepted most often, {best['accepted_1']:.3f} of its first "
            "tokens; nothing was timed yet."
        )
        verdict.advice.append("Run the script again without --skip-clock, on a quiet machine.")
        return verdict
    best = timed.iloc[0]
    verdict.result.append(f"{_speed(best)}, the fastest draft; {setting(of.document)}.")
    trained, others = timed[timed["trained"] == "yes"], timed[timed["trained"] == "no"]
    if len(trained) and len(others):
        one, other = trained.iloc[0], others.iloc[0]
        rival = other if best["trained"] == "yes" else one
        what = "without trained weights" if best["trained"] == "yes" else "with trained weights"
        overlap = one["low"] <= other["high"] and other["low"] <= one["high"]
        verdict.result.append(
            f"{_speed(rival)}, the best {what}: training brings "
            f"{one['measured'] / other['measured']:.2f}x"
            f"{', and the intervals overlap' if overlap else ''}."
        )
    far = timed[~timed["efficiency"].between(0.9, 1.1)]
    verdict.reasons.append(
        "All are within 10% of what was predicted."
        if far.empty
        else f"{len(far)} of {len(timed)} are more than 10% from what was predicted."
    )
    return verdict


def _speed(row: Any) -> str:
    words = f"{row['measured']:.2f} times as fast as plain decoding ({interval(row)})"
    return f"{row['draft']} is {words}"
