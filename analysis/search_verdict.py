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
from layerskip.analysis.verdict import FEW_PROMPTS, LOW_BOUND, MOST_ADVICE, WIDE, Verdict

LATE = 0.8  # share of the trials after which a new best says that more would be found
LEARNED = 0.95  # held-out over traced price, under which a set was fitted to its prompts


def judge(search: Search) -> Verdict:
    """The verdict on a search: its winner, or why there is none."""
    verdict = Verdict(search.label)
    table = search_tables.finalists(search)
    timed = table[table["measured"].notna()] if len(table) else table
    for _, row in timed.iterrows():
        if row["faults"]:
            verdict.faults.append(
                f"FAULT: {row['faults']:.0f} of {row['compared']:.0f} texts of {row['name']} "
                "differ from plain decoding's by more than rounding can explain: its speed means "
                "nothing; run `layerskip check`."
            )
    winner = _named(table, search.document["winner"])
    if winner is None:
        verdict.result.append(_nothing(search, table, timed))
        verdict.reasons.append(
            f"No set of this space can be more than {search.document['bound']:.1f} times as fast "
            "as plain decoding (1/c of its cheapest draft)."
        )
        verdict.advice += _without_winner(search, table, timed)[:MOST_ADVICE]
    else:
        verdict.result += _found(search, winner, table, len(timed))
        verdict.reasons.append(_limit(winner))
        verdict.advice += _with_winner(search, winner, table, verdict)[:MOST_ADVICE]
    verdict.reasons.append(_trials(search, winner))
    return verdict


def _found(search: Search, winner: Any, table: pd.DataFrame, candidates: int) -> list[str]:
    """What the winner is worth, and the best early exit beside it."""
    document = search.document
    what = (
        f"The search found {winner['name']}, a draft that leaves out {winner['left_out']} of "
        f"{2 * search.num_layers} sublayers of {document['model']['name']}"
    )
    if math.isnan(winner["measured"]):
        said = (
            f"{what}. It is priced at {winner['forecast']:.2f} times plain decoding "
            f"({_where(search)}); it has not been timed."
        )
    else:
        fastest = f"the fastest of {candidates} timed, " if candidates > 1 else ""
        doubt = ", but it is not distinguishable from plain decoding" if winner["low"] <= 1 else ""
        said = (
            f"{what}{doubt}: on the clock it was {winner['measured']:.2f} times as fast as plain "
            f"decoding ({_interval(winner)}, {fastest}{_plural(int(winner['prompts']), 'prompt')}; "
            f"{_where(search)})."
        )
    best = _named(table, document["best_exit"])
    if best is None or document["space"]["kind"] == "exit":
        return [said]
    if best["name"] == winner["name"]:
        return [said, "It is an early exit: no other set of sublayers did better."]
    if math.isnan(best["measured"]) or math.isnan(winner["measured"]):
        speed = f"is priced at {best['forecast']:.2f}"
    else:
        speed = f"was {best['measured']:.2f} times as fast ({_interval(best)})"
    return [said, f"The best early exit, {best['name']}, {speed}."]


def _nothing(search: Search, table: pd.DataFrame, timed: pd.DataFrame) -> str:
    name, where = search.document["model"]["name"], _where(search)
    if len(timed):
        best = timed.loc[timed["measured"].idxmax()]
        clearly = " clearly" if best["measured"] > 1 else ""
        return (
            f"Nothing{clearly} beat plain decoding of {name} on the clock ({where}): the fastest "
            f"of {len(timed)} finalists, {best['name']}, was {best['measured']:.2f} times as fast "
            f"({_interval(best)}), where its price promised {best['forecast']:.2f}."
        )
    if len(table) and table["forecast"].max() > PAYS:
        best = table.loc[table["forecast"].idxmax()]
        return (
            f"The search names no winner for {name} ({where}): its finalists have not been timed. "
            f"The best by price is {best['name']}, at {best['forecast']:.2f} times plain decoding."
        )
    return f"Nothing beat plain decoding of {name} ({where}): no draft is priced above it."


def _limit(winner: Any) -> str:
    accepted = "" if math.isnan(winner["alpha"]) else f", accepted with alpha {winner['alpha']:.2f}"
    price = f"{winner['predicted']:.2f} on the traced prompts" + (
        "" if math.isnan(winner["held_out"]) else f", {winner['held_out']:.2f} on others"
    )
    return (
        f"Its draft step costs c = {winner['draft_cost']:.2f} target steps (bound "
        f"{winner['bound']:.1f}){accepted}; its price promised {price}."
    )


def _trials(search: Search, winner: Any) -> str:
    table = search.trials
    if not len(table):
        return "The search holds no trials."
    space, failed = search.document["space"], int((table["state"] != "complete").sum())
    came = "" if winner is None else f"; the winner came from the {ORIGINS[winner['kind']]}"
    return (
        f"{_plural(len(table), 'trial')}{f' ({failed} failed)' if failed else ''} in the "
        f"{space['kind']} space of {count_words(space['size'])} sets{came}."
    )


def _with_winner(search: Search, winner: Any, table: pd.DataFrame, verdict: Verdict) -> list[str]:
    """What to do with a winner, what matters most first."""
    if math.isnan(winner["measured"]):
        return ["Time the finalists before you rely on a price.", *_more_trials(search)]
    advice = []
    if winner["held_out"] < LEARNED * winner["predicted"]:
        advice.append(
            "The winner is priced lower on held-out prompts than on those it was found on: search "
            "with more prompts."
        )
    if not verdict.faults and not winner["low"] <= 1:
        advice.append(
            "Give the search's skip.json to --skip, or put it beside the checkpoint as "
            "layerskip.json."
        )
    advice += _more_prompts(winner)
    best = _named(table, search.document["best_exit"])
    if best is not None and best["name"] != winner["name"] and best["high"] >= winner["low"]:
        advice.append(f"The early exit {best['name']} may be as good, and is simpler.")
    return advice + _more_trials(search)


def _without_winner(search: Search, table: pd.DataFrame, timed: pd.DataFrame) -> list[str]:
    priced = len(table) and table["forecast"].max() > PAYS
    if priced and not len(timed):
        return ["Time the finalists before you rely on a price.", *_more_trials(search)]
    advice = ["Decode plainly (--no-draft) as long as no draft is faster."]
    space = search.document["space"]
    if len(timed):
        advice += _more_prompts(timed.loc[timed["measured"].idxmax()])
    if search.document["bound"] < LOW_BOUND:
        wider = [
            *(["--space sublayer"] if space["kind"] != "sublayer" else []),
            *(["--allow-ends"] if not space["allow_ends"] else []),
            *(["no --budget"] if space["budget"] is not None else []),
        ]
        advice.append(
            "The space holds no cheap draft: even perfect acceptance could hardly pay."
            + (f" Search a wider one ({', '.join(wider)})." if wider else "")
        )
    more = _more_trials(search)
    if not priced and not more and len(search.complete):
        advice.append(
            "These drafts are wrong too often for their price: take a checkpoint trained with "
            "early exits."
        )
    return advice + more


def _more_prompts(timed: Any) -> list[str]:
    """Advice where a timed draft's interval leaves its gain open."""
    wide = timed["high"] - timed["low"] > WIDE * timed["measured"]
    if math.isnan(timed["low"]):
        return ["Time the finalists on more prompts: one leaves the interval unknown."]
    if timed["high"] >= 1 and (wide or timed["prompts"] < FEW_PROMPTS or timed["low"] <= 1):
        return [
            f"Time the finalists on more prompts: {timed['prompts']:.0f} leave the interval "
            f"{timed['low']:.2f} to {timed['high']:.2f}."
        ]
    return []


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


def _named(table: pd.DataFrame, name: str | None) -> Any:
    """A finalist's line by name; None where there is no such name."""
    if name is None:
        return None
    return table[table["name"] == name].iloc[0]


def _where(search: Search) -> str:
    return f"{law_words(search.document['law'])}, {machine_words(search.document)}"


def _interval(row: Any) -> str:
    if math.isnan(row["low"]):
        return "no interval"
    return f"95% interval {row['low']:.2f} to {row['high']:.2f}"


def _plural(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
