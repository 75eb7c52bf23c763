"""Knows what a layer search means in plain words: what was found, what it gains, what to do next.

Every sentence follows from the tables by a rule written here; the rules' numbers are judgements.
Text from files goes in as it is: whoever shows it escapes it.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from layerskip.analysis import search_tables
from layerskip.analysis.runs import count_words, law_words, machine_words
from layerskip.analysis.search_tables import ORIGINS, PAYS, Search
from layerskip.analysis.verdict import FEW_PROMPTS, LOW_BOUND, OFF, WIDE, Verdict

LATE = 0.8  # share of the trials after which a new best says that more would be found
LEARNED = 0.95  # held-out over traced price, under which a set was fitted to its prompts


def judge(search: Search) -> Verdict:
    """The verdict on a search: its winner, or why there is none."""
    verdict = Verdict(search.label)
    table = search_tables.finalists(search)
    timed = table[table["measured"].notna()] if len(table) else table
    _faults(timed, verdict)
    winner = _named(table, search.document["winner"])
    if winner is None:
        _nothing(search, table, timed, verdict)
    else:
        _found(search, winner, len(timed), verdict)
        _beside_exit(search, winner, table, verdict)
    _limits(search, winner, verdict)
    _trials(search, winner, verdict)
    _advise(search, winner, table, timed, verdict)
    return verdict


def _faults(timed: pd.DataFrame, verdict: Verdict) -> None:
    for _, row in timed.iterrows():
        if row["faults"]:
            verdict.faults.append(
                f"FAULT: {row['faults']:.0f} of {row['compared']:.0f} texts of {row['name']} "
                "differ from plain decoding's by more than rounding can explain. Its speed means "
                "nothing until they do not: run `layerskip check` on this model and machine."
            )


def _found(search: Search, winner: Any, candidates: int, verdict: Verdict) -> None:
    model, document = search.document["model"]["name"], search.document
    where = f"{law_words(document['law'])}, {machine_words(document)}"
    what = (
        f"The search found {winner['name']}, a draft that leaves out {winner['left_out']} of "
        f"{2 * search.num_layers} sublayers of {model}"
    )
    if math.isnan(winner["measured"]):
        verdict.result.append(
            f"{what}. It is priced at {winner['forecast']:.2f} times plain decoding ({where}); it "
            "has not been timed, and a price is a forecast."
        )
        return
    prompts, repeats = int(winner["prompts"]), int(winner["repeats"])
    timed = f"{_plural(prompts, 'prompt')}, {_plural(repeats, 'repeat')}; {where}"
    if candidates > 1:
        timed = f"the fastest of {candidates} timed, {timed}"
    times = f"{winner['measured']:.2f} times as fast as plain decoding"
    if math.isnan(winner["low"]):
        verdict.result.append(f"{what}: {times} on the clock ({timed}), without an interval.")
    elif winner["low"] > 1:
        verdict.result.append(
            f"{what}: on the clock it was {times} ({_interval(winner)}, {timed})."
        )
    else:
        verdict.result.append(
            f"{what}, but it is not distinguishable from plain decoding: on the clock it was "
            f"{times} ({_interval(winner)}, {timed})."
        )


def _beside_exit(search: Search, winner: Any, table: pd.DataFrame, verdict: Verdict) -> None:
    best = _named(table, search.document["best_exit"])
    if best is None or search.document["space"]["kind"] == "exit":
        return
    if best["name"] == winner["name"]:
        verdict.result.append("It is an early exit: no other set of sublayers did better.")
    elif math.isnan(best["measured"]) or math.isnan(winner["measured"]):
        verdict.result.append(
            f"The best early exit, {best['name']}, is priced at {best['forecast']:.2f}, against "
            f"{winner['forecast']:.2f}."
        )
    else:
        apart = best["high"] < winner["low"]
        verdict.result.append(
            f"The best early exit, {best['name']}, was {best['measured']:.2f} times as fast "
            f"({_interval(best)}): "
            + ("the intervals are apart." if apart else "the intervals overlap.")
        )


def _nothing(search: Search, table: pd.DataFrame, timed: pd.DataFrame, verdict: Verdict) -> None:
    name = search.document["model"]["name"]
    where = f"{law_words(search.document['law'])}, {machine_words(search.document)}"
    if len(timed):
        best = timed.loc[timed["measured"].idxmax()]
        clearly = " clearly" if best["measured"] > 1 else ""
        verdict.result.append(
            f"Nothing{clearly} beat plain decoding of {name} on the clock ({where}): the fastest "
            f"of {len(timed)} finalists, {best['name']}, was {best['measured']:.2f} times as fast"
            f"{'' if math.isnan(best['low']) else f' ({_interval(best)})'}, where its price "
            f"promised {best['forecast']:.2f}."
        )
    elif len(table) and table["forecast"].max() > PAYS:
        best = table.loc[table["forecast"].idxmax()]
        verdict.result.append(
            f"The search names no winner for {name} ({where}): its finalists have not been timed. "
            f"The best by price is {best['name']}, at {best['forecast']:.2f} times plain decoding."
        )
    else:
        verdict.result.append(
            f"Nothing beat plain decoding of {name} ({where}): no draft is priced above it."
        )
    drafting = search.complete[search.complete["left_out"] > 0]  # nothing left out is no draft
    forced = drafting.dropna(subset=["forced_speedup"])
    if len(forced):
        best = forced.loc[forced["forced_speedup"].idxmax()]
        verdict.reasons.append(
            f"The best set tried, trial {best['number']}, would run "
            f"{best['forced_speedup']:.2f} times as fast as plain decoding if it had to draft: its "
            f"draft step costs c = {best['draft_cost']:.2f} target steps"
            + ("." if math.isnan(best["acceptance"]) else f"; {_accepted(best['acceptance'])}.")
        )


def _limits(search: Search, winner: Any, verdict: Verdict) -> None:
    verdict.reasons.append(
        f"No set of this space can be more than {search.document['bound']:.1f} times as fast as "
        "plain decoding (1/c of its cheapest draft)."
    )
    if winner is None:
        return
    accepted = "" if math.isnan(winner["alpha"]) else f"; {_accepted(winner['alpha'])}"
    verdict.reasons.append(
        f"A draft step of the winner costs c = {winner['draft_cost']:.2f} target steps, which "
        f"bounds it at {winner['bound']:.1f}{accepted}."
    )
    if not math.isnan(winner["measured"]):
        held_out = (
            "" if math.isnan(winner["held_out"]) else f" and {winner['held_out']:.2f} on others"
        )
        verdict.reasons.append(
            f"Its price promised {winner['predicted']:.2f} on the traced prompts{held_out}; "
            f"measured were {winner['measured']:.2f} ({winner['efficiency']:.0%} of that)."
        )


def _trials(search: Search, winner: Any, verdict: Verdict) -> None:
    table = search_tables.origins(search)
    if not len(table):
        verdict.reasons.append("The search holds no trials.")
        return
    space = search.document["space"]
    shares = ", ".join(f"{row['share']:.0%} {row['kind']}" for _, row in table.iterrows())
    came = "" if winner is None else f"; the winner came from the {ORIGINS[winner['kind']]}"
    verdict.reasons.append(
        f"{_plural(int(table['trials'].sum()), 'trial')} in the {space['kind']} space of "
        f"{count_words(space['size'])} sets: {shares}{came}."
    )
    failed = int(table["failed"].sum())
    if failed:
        verdict.reasons.append(f"{_plural(failed, 'trial')} failed.")


def _advise(
    search: Search, winner: Any, table: pd.DataFrame, timed: pd.DataFrame, verdict: Verdict
) -> None:
    advice = verdict.advice
    if winner is None:
        _without_winner(search, table, timed, advice)
    else:
        _with_winner(search, winner, table, verdict)
    _more_trials(search, advice)
    clocked = winner
    if winner is None and len(timed):
        clocked = timed.loc[timed["measured"].idxmax()]
    if clocked is None or math.isnan(clocked["measured"]):
        return
    if abs(clocked["efficiency"] - 1) > OFF:
        advice.append(
            f"Measured is {clocked['efficiency']:.0%} of predicted: other work on the machine, or "
            "costs measured at other contexts; search again on a quiet machine."
        )
    wide = clocked["high"] - clocked["low"] > WIDE * clocked["measured"]
    few = clocked["prompts"] < FEW_PROMPTS
    if math.isnan(clocked["low"]):
        advice.append("Time the finalists on more prompts: one leaves the interval unknown.")
    elif clocked["high"] >= 1 and (wide or few or clocked["low"] <= 1):
        advice.append(
            f"Time the finalists on more prompts: {clocked['prompts']:.0f} leave the interval "
            f"{clocked['low']:.2f} to {clocked['high']:.2f}."
        )


def _with_winner(search: Search, winner: Any, table: pd.DataFrame, verdict: Verdict) -> None:
    advice = verdict.advice
    if math.isnan(winner["measured"]):
        advice.append("Time the finalists before you rely on a price.")
    if not verdict.faults and not winner["low"] <= 1:
        advice.append(
            "Give the search's skip.json to --skip, or put it beside the checkpoint as "
            "layerskip.json; measure it on prompts of your own with `layerskip benchmark --skip`."
        )
    best = _named(table, search.document["best_exit"])
    if best is not None and best["name"] != winner["name"] and best["high"] >= winner["low"]:
        advice.append(
            f"The early exit {best['name']} may be as good, and is simpler: its interval and the "
            "winner's overlap."
        )
    if winner["held_out"] < LEARNED * winner["predicted"]:
        advice.append(
            "The winner is priced lower on held-out prompts than on those it was found on: search "
            "with more prompts."
        )


def _without_winner(
    search: Search, table: pd.DataFrame, timed: pd.DataFrame, advice: list[str]
) -> None:
    priced = len(table) and table["forecast"].max() > PAYS
    if priced and not len(timed):
        advice.append("Time the finalists before you rely on a price.")
        return
    advice.append("Decode plainly (--no-draft) as long as no draft is faster.")
    space = search.document["space"]
    if search.document["bound"] < LOW_BOUND:
        wider = [
            *(["--space sublayer"] if space["kind"] != "sublayer" else []),
            *(["--allow-ends"] if not space["allow_ends"] else []),
            *(["no limit on the sublayers left out"] if space["budget"] is not None else []),
        ]
        advice.append(
            "The space holds no cheap draft: even perfect acceptance could hardly pay."
            + (f" Search a wider one ({', '.join(wider)})." if wider else "")
        )
    elif not priced and len(search.complete):
        advice.append(
            "These drafts are wrong too often for their price: take a checkpoint trained with "
            "early exits, or a machine on which verifying several tokens costs little more than "
            "one."
        )


def _more_trials(search: Search, advice: list[str]) -> None:
    table, space = search.complete, search.document["space"]
    if not len(table):
        advice.append("Run the search again: it has no finished trial.")
        return
    best = table.loc[table["score"].idxmax()]
    late = (table["number"] < best["number"]).mean() >= LATE and best["kind"] != "seed"
    if late and best["score"] > PAYS and len(table) < space["size"]:
        advice.append(
            "The best set was found late in the search: ask for more --trials, and it goes on "
            "where it stopped."
        )
    if space["kind"] in ("exit", "layer"):
        advice.append(
            f"The {space['kind']} space is a small part of all sets: search the others with "
            "--space sublayer."
        )


def _named(table: pd.DataFrame, name: str | None) -> Any:
    """A finalist's line by name; None where there is no such name."""
    if name is None:
        return None
    return table[table["name"] == name].iloc[0]


def _accepted(alpha: float) -> str:
    return f"a drafted token is accepted with probability {alpha:.2f} (alpha)"


def _interval(row: Any) -> str:
    if math.isnan(row["low"]):
        return "no interval"
    return f"95% interval {row['low']:.2f} to {row['high']:.2f}"


def _plural(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
