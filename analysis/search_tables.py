"""Knows what a layer search tried and found, as tables; no sentences and no pictures.

Functions take one search and return one table. Speedups are over plain decoding; those of trials
and predictions are priced (replayed rounds and a cost table), those measured are the clock's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from layerskip.analysis.runs import labels_of, printable, ranges, slug_of
from layerskip.files.searches import read_search

PAYS = 1.005
"""Priced speedup up to which a trial counts as one whose draft was turned off."""

ORIGINS = {
    "seed": "seeds",
    "single": "single sublayers",
    "ranked": "ranked path",
    "local": "local moves",
    "bayesian": "Bayesian sampler",
    "other": "others",
}
"""Kinds of what proposed a trial, in the order that a search runs through them."""


@dataclass(frozen=True)
class Search:
    """One search file: one model, one law, one machine, one space."""

    label: str
    """What tells this search from the others of a report, in words."""
    slug: str
    """The same as a file name."""
    document: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        return int(self.document["model"]["num_layers"])

    @property
    def finalists(self) -> list[dict[str, Any]]:
        return list(self.document["finalists"])

    @cached_property
    def trials(self) -> pd.DataFrame:
        """`trials` of this search, made once."""
        return trials(self)

    @property
    def complete(self) -> pd.DataFrame:
        """Its lines of trials that ended well."""
        return self.trials[self.trials["state"] == "complete"]


def load_searches(files: Sequence[Path]) -> list[Search]:
    """Read and check search files, and name each by what tells it from the others.

    Raises:
        ValueError: a file is not what it must be; says which and why, in one line.
    """
    documents = [printable(read_search(file)) for file in files]
    labels = labels_of(documents, files)
    return [
        Search(f"Search of {label}", f"search-{slug_of(label, number)}", document)
        for number, (label, document) in enumerate(zip(labels, documents, strict=True))
    ]


def trials(search: Search) -> pd.DataFrame:
    """Every trial, by number.

    Columns: `kind` (see ORIGINS) and `origin`; `left_out` (sublayers), `attention` and `mlp` (the
    layers they are of, in words); `rounded` (what runs in low precision, likewise; no column where
    no trial has any); `tokens_per_second`, `speedup` (never below plain's: a draft that does not
    pay is turned off), `forced_speedup` (where it may not be turned off), `score` (the latter where
    drafting does not pay and it is known, else `speedup`), `best_so_far` (of `speedup`);
    `acceptance` (alpha), `draft_cost` (c), `bound` (1 / c), `front` (whether no other trial accepts
    as much for less); the decoding options; `seconds`; `copy_of`. A failed trial has no numbers.
    """
    rows = []
    for trial in search.document["trials"]:
        row = {"number": trial["number"], "kind": kind_of(trial.get("origin")),
               "origin": trial.get("origin") or "unknown", "state": trial["state"]}  # fmt: skip
        if trial["state"] == "complete":
            forced = _number(trial["forced_speedup"])
            flat = trial["speedup"] <= PAYS and not np.isnan(forced)
            row |= {
                **_sets(trial),
                "tokens_per_second": trial["value"],
                "speedup": trial["speedup"],
                "forced_speedup": forced,
                "score": forced if flat else trial["speedup"],
                "acceptance": _number(trial["acceptance"]),
                "draft_cost": trial["draft_cost"],
                "bound": 1 / trial["draft_cost"],
                "controller": trial["controller"],
                "max_draft_length": _number(trial["max_draft_length"]),
                "threshold": _number(trial["threshold"]),
                "seconds": _number(trial["seconds"]),
                "copy_of": _number(trial["copy_of"]),
            }
        rows.append(row)
    frame = pd.DataFrame(rows, columns=_TRIAL_COLUMNS).sort_values("number", ignore_index=True)
    numbers = frame.columns[_TRIAL_COLUMNS.index("tokens_per_second") :].drop("controller")
    frame = frame.astype(dict.fromkeys(numbers, float) | {"left_out": "Int64"})
    if frame["rounded"].isna().all():
        frame = frame.drop(columns="rounded")
    frame["best_so_far"] = frame["speedup"].cummax().ffill()
    frame["front"] = front(frame["draft_cost"].to_numpy(), frame["acceptance"].to_numpy())
    return frame


_TRIAL_COLUMNS = [
    "number", "kind", "origin", "state", "left_out", "attention", "mlp", "rounded",
    "tokens_per_second",
    "speedup", "forced_speedup", "score", "acceptance", "draft_cost", "bound", "controller",
    "max_draft_length", "threshold", "seconds", "copy_of",
]  # fmt: skip


def kind_of(origin: str | None) -> str:
    """The kind of a trial's origin, one of ORIGINS."""
    name = (origin or "").partition(":")[0]
    name = {"tpe": "bayesian", "gp": "bayesian"}.get(name, name)
    return name if name in ORIGINS else "other"


def front(costs: NDArray[np.float64], acceptances: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(n,): whether no other point accepts as much at less cost, or more at as little.

    Points with a NaN are on no front; of equal points all are.
    """
    best, held, on = -np.inf, np.nan, np.zeros(len(costs), dtype=bool)
    for index in np.lexsort((-acceptances, costs)):  # by cost, the most accepted of equals first
        cost, accepted = costs[index], acceptances[index]
        if np.isnan(cost) or np.isnan(accepted):
            continue
        if accepted > best or (accepted == best and cost == held):
            best, held, on[index] = accepted, cost, True
    return on


def best_trials(search: Search, count: int) -> pd.DataFrame:
    """The trials of the highest score, no copies among them; the first of equals first."""
    frame = search.complete
    frame = frame[frame["copy_of"].isna()]
    return frame.sort_values(["score", "number"], ascending=[False, True]).head(count)


def finalists(search: Search) -> pd.DataFrame:
    """The finalists in the file's order: priced, and measured where they were.

    `predicted` is of the traced prompts, `held_out` of the others, `forecast` the latter where
    known; `measured` has its interval in `low` and `high`; `efficiency` = measured / forecast;
    `role` says "winner", "best exit", both or nothing.
    """
    kinds = search.trials.set_index("number")["kind"]
    rows = []
    for finalist in search.finalists:
        done = finalist["confirmed"] or {}
        held_out = _number(finalist["predicted_held_out"])
        forecast = finalist["predicted"] if np.isnan(held_out) else held_out
        measured = _number(done.get("speedup"))
        roles = {"winner": "winner", "best_exit": "best exit"}
        named = [w for key, w in roles.items() if search.document[key] == finalist["name"]]
        rows.append(
            {
                "name": finalist["name"],
                "role": ", ".join(named),
                "trial": finalist["trial"],
                "kind": "given" if finalist["trial"] is None else kinds[finalist["trial"]],
                **_sets(finalist),
                "alpha": _number(finalist["alpha"]),
                "draft_cost": finalist["draft_cost"],
                "bound": 1 / finalist["draft_cost"],
                **finalist["decoding"],
                "lookup": bool(finalist["decoding"].get("lookup")),
                "predicted": finalist["predicted"],
                "held_out": held_out,
                "forecast": forecast,
                "measured": measured,
                "low": _number(done.get("low")),
                "high": _number(done.get("high")),
                "efficiency": measured / forecast,
                **{
                    name: _number(done.get(name))
                    for name in ("tokens_per_second", "prompts", "repeats", "acceptance_rate",
                                 "compared", "equal", "near_ties", "faults")
                },
            }
        )  # fmt: skip
    frame = pd.DataFrame(rows)
    if len(frame) and frame["rounded"].isna().all():
        frame = frame.drop(columns="rounded")
    if len(frame) and not frame["lookup"].any():
        frame = frame.drop(columns="lookup")
    return frame


def sublayers(search: Search) -> pd.DataFrame:
    """By switch, in the model's order: what it is worth, and what leaving it out alone does.

    Where a search tried switches on a draft that pays, alone means of that draft.

    Columns: `switch`, its `sublayer` ("attention", "mlp" or "layer"; "exit", "low" and "head" are
    of no `layer`), `importance` (the sampler's, NaN where not given), `alone_speedup` (forced),
    `alone_acceptance` and `alone_cost` (c) of the trial that left out nothing else, `finalists`
    (how many leave it out).
    """
    alone = {}
    for trial in search.document["trials"]:
        if trial["state"] == "complete" and trial["origin"] == "single":
            alone[_switch(trial["skipped"])] = trial
    importance = search.document["importance"] or {}
    rows = []
    for switch in sorted({*importance, *alone} - {""}, key=_place):
        trial, (kind, layer) = alone.get(switch, {}), _parts(switch)
        names = ("attention", "mlp") if kind == "layer" else (kind,)
        rows.append(
            {
                "switch": switch,
                "sublayer": kind,
                "layer": float("nan") if layer < 0 else layer,
                "importance": _number(importance.get(switch)),
                "alone_speedup": _number(trial.get("forced_speedup")),
                "alone_acceptance": _number(trial.get("acceptance")),
                "alone_cost": _number(trial.get("draft_cost")),
                "finalists": float("nan")
                if layer < 0
                else sum(
                    all(layer in finalist["skipped"][name] for name in names)
                    for finalist in search.finalists
                ),
            }
        )
    return pd.DataFrame(rows)


def _sets(draft: Mapping[str, Any]) -> dict[str, Any]:
    skipped, low = draft["skipped"], draft.get("low")
    return {
        "left_out": len(skipped["attention"]) + len(skipped["mlp"]),
        "attention": ranges(skipped["attention"]),
        "mlp": ranges(skipped["mlp"]),
        "rounded": _low_words(low) if low else float("nan"),
    }


def _low_words(low: Mapping[str, Any]) -> str:
    sets = f"attention {ranges(low['attention'])}, MLP {ranges(low['mlp'])}"
    return f"{low['bits']} bits: {sets}{', head' if low['head'] else ''}"


def _switch(skipped: Mapping[str, Sequence[int]]) -> str:
    """The name of the switch that leaves out these and nothing else; empty for larger sets."""
    attention, mlp = skipped["attention"], skipped["mlp"]
    if len({*attention, *mlp}) != 1:
        return ""
    kind = "layer" if attention and mlp else "attention" if attention else "mlp"
    return f"{kind}.{(attention or mlp)[0]}"


def _parts(switch: str) -> tuple[str, int]:
    kind, _, layer = switch.partition(".")
    return kind, int(layer or -1)


def _place(switch: str) -> tuple[int, str]:
    kind, layer = _parts(switch)
    return layer, kind


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
