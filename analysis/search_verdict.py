"""Knows what a layer search means in plain words: what was found, what it gains, what to do next.

Every sentence follows from the tables by a rule written here; the rules' numbers are judgements.
Text from files goes in as it is: whoever shows it escapes it.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from layerskip.analysis import search_tables
from layerskip.analysis.runs import count_words
from layerskip.analysis.search_tables import ORIGINS, PAYS, Search
from layerskip.analysis.verdict import (
    MOST_ADVICE,
    Verdict,
    doubt,
    faults_of,
    interval,
    setting,
)

LATE = 0.8  # share of the trials after which a new best says that more would be found
LEARNED = 0.95  # held-out over traced price, under which a set was fitted to its prompts
TIME_THEM = "Time the finalists before you rely on a price."


def judge(search: Search) -> Verdict:
    """The verdict on a search: its winner, or why there is none."""
    table = search_tables.finalists(search)
    verdict = Verdict(search.label, faults_of(table, "name"))
    winner = _named(table, search.document["winner"])
    if winner is None:
        verdict.result.append(_nothing(search, table))
        verdict.reasons.append(
            f"No set of this space can be more than {search.document['bound']:.1f} times as fast "
            "as plain decoding (1/c of its cheapest draft)."
        )
        advice = _without_winner(table)
    else:
        verdict.result += _found(search, winner, table)
        verdict.reasons.append(_limit(winner))
        advice = _with_winner(search, winner, table, faulty=bool(verdict.faults))
    verdict.reasons.append(_trials(search, winner))
    verdict.advice += [*advice, *_more_trials(search)][:MOST_ADVICE]
    return verdict


def _found(search: Search, winner: Any, table: pd.DataFrame) -> list[str]:
    """What the winner is worth, and the best early exit beside it."""
    but = ", but it is not distinguishable from plain decoding" if winner["low"] <= 1 else ""
    said = [
        f"The search found {winner['name']}, a draft that {_draft(search, winner)}{but} "
        f"({setting(search.document)}): it {_speed(winner)}."
    ]
    best = _named(table, search.document["best_exit"])
    if best is not None and search.document["space"]["kind"] != "exit":
        said.append(
            "It is an early exit: no other set of sublayers did better."
            if best["name"] == winner["name"]
            else f"The best early exit, {best['name']}, {_speed(best)}."
        )
    return said


def _draft(search: Search, row: Any) -> str:
    """What a finalist's draft does with the model's sublayers."""
    finalist = next(each for each in search.finalists if each["name"] == row["name"])
    low, count = finalist.get("low"), 2 * search.num_layers
    of = f"{count} sublayers of {search.document['model']['name']}"
    words = f"leaves out {row['left_out']} of {of}"
    if low is not None:
        rounded = len(low["attention"]) + len(low["mlp"])
        runs = f"in {low['bits']} bits"
        if row["left_out"]:
            words += f" and runs {rounded} {runs}"
        else:
            words = f"runs {'all' if rounded == count else f'{rounded} of'} {of} {runs}"
    trained = finalist.get("trained")
    if trained is not None:
        words += f", {trained}" if trained == "healed" else f", with {trained}"
    return f"{words}, joined by lookups" if finalist["decoding"].get("lookup") else words


def _nothing(search: Search, table: pd.DataFrame) -> str:
    timed = table[table["measured"].notna()] if len(table) else table
    where = f"{search.document['model']['name']} ({setting(search.document)})"
    if len(timed):
        best = timed.loc[timed["measured"].idxmax()]
        clearly = " clearly" if best["measured"] > 1 else ""
        return (
            f"Nothing{clearly} beat plain decoding of {where}: the fastest of {len(timed)} "
            f"finalists, {best['name']}, {_speed(best)}, where its price promised "
            f"{best['forecast']:.2f}."
        )
    if _priced(table):
        best = table.loc[table["forecast"].idxmax()]
        return (
            f"The search names no winner for {where}: its finalists have not been timed. The best "
            f"by price, {best['name']}, {_speed(best)}."
        )
    return f"Nothing beat plain decoding of {where}: no draft is priced above it."


def _speed(row: Any) -> str:
    """How fast a finalist was, or by its price should be."""
    if math.isnan(row["measured"]):
        return f"is priced at {row['forecast']:.2f} times plain decoding and has not been timed"
    return (
        f"was {row['measured']:.2f} times as fast as plain decoding on the clock "
        f"({interval(row)}, n = {row['prompts']:.0f})"
    )


def _limit(winner: Any) -> str:
    accepted = "" if math.isnan(winner["alpha"]) else f", accepted with alpha {winner['alpha']:.2f}"
    price = f"{winner['predicted']:.2f} on the traced prompts"
    if not math.isnan(winner["held_out"]):
        price += f", {winner['held_out']:.2f} on others"
    return (
        f"Its draft step costs c = {winner['draft_cost']:.2f} target steps (bound "
        f"{winner['bound']:.1f}){accepted}; its price promised {price}."
    )


def _trials(search: Search, winner: Any) -> str:
    table = search.trials
    space, failed = search.document["space"], int((table["state"] != "complete").sum())
    came = ""
    if winner is not None:
        origin = ORIGINS.get(winner["kind"])
        came = f"; the winner came from the {origin}" if origin else "; the winner is none of them"
    return (
        f"Trials: {len(table)}{f' ({failed} failed)' if failed else ''}, in the {space['kind']} "
        f"space of {count_words(space['size'])} sets{came}."
    )


def _with_winner(search: Search, winner: Any, table: pd.DataFrame, faulty: bool) -> list[str]:
    """What to do with a winner, what matters most first."""
    if math.isnan(winner["measured"]):
        return [TIME_THEM]
    advice = []
    if winner["held_out"] < LEARNED * winner["predicted"]:
        advice.append(
            "The winner is priced lower on held-out prompts than on those it was found on: search "
            "with more prompts."
        )
    if not faulty and not winner["low"] <= 1:
        advice.append(
            "Give the search's skip.json to --skip, or put it beside the checkpoint as "
            "layerskip.json."
        )
    advice += _more_prompts(winner)
    best = _named(table, search.document["best_exit"])
    if best is not None and best["name"] != winner["name"] and best["high"] >= winner["low"]:
        advice.append(f"The early exit {best['name']} may be as good, and is simpler.")
    return advice


def _without_winner(table: pd.DataFrame) -> list[str]:
    timed = table[table["measured"].notna()] if len(table) else table
    if len(timed):
        best = timed.loc[timed["measured"].idxmax()]
        return ["Decode plainly (--no-draft) as long as no draft is faster.", *_more_prompts(best)]
    return [TIME_THEM] if _priced(table) else ["Decode plainly (--no-draft)."]


def _more_prompts(timed: Any) -> list[str]:
    """Advice where a timed draft's interval leaves its gain open; a clear loss asks for nothing."""
    more = "" if timed["high"] < 1 else doubt(timed, timed["measured"])
    return [f"Time the finalists on {more}"] if more else []


def _more_trials(search: Search) -> list[str]:
    """Advice where the search had not come to its end, or had little room."""
    table, space = search.complete, search.document["space"]
    if not len(table):
        return ["Run the search again: it has no finished trial."]
    best = table.loc[table["score"].idxmax()]
    late = (table["number"] < best["number"]).mean() >= LATE and best["kind"] != "seed"
    if late and best["score"] > PAYS and len(table) < space["size"]:
        return ["The best set was found late in the search: ask for more --trials."]
    if space["kind"] in ("exit", "layer"):
        return ["Search more sets with --space sublayer."]
    return []


def _priced(table: pd.DataFrame) -> bool:
    """Whether a finalist's price promises a gain."""
    return bool(len(table) and table["forecast"].max() > PAYS)


def _named(table: pd.DataFrame, name: str | None) -> Any:
    """A finalist's line by name; None where there is no such name."""
    return None if name is None else table[table["name"] == name].iloc[0]
