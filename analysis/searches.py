"""The tables of a report on layer searches: trials and finalists.

Speedups are over plain decoding; those of trials and predictions are priced (replayed rounds and a
cost table), those measured are the clock's.
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

from layerskip.analysis.labels import labels_of, printable, ranges, slug_of
from layerskip.files.searches import read_search

PAYS = 1.005
"""Priced speedup up to which a trial counts as one whose draft was turned off."""


@dataclass(frozen=True)
class Search:
    """One search file: one model, one law, one machine, one space."""

    label: str
    """What tells this search from the others of a report."""
    slug: str
    document: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        return int(self.document["model"]["num_layers"])

    @property
    def finalists(self) -> list[dict[str, Any]]:
        return list(self.document["finalists"])

    @cached_property
    def trials(self) -> pd.DataFrame:
        return trials(self)

    @property
    def complete(self) -> pd.DataFrame:
        """Its lines of trials that ended well and are no copies of others."""
        table = self.trials
        return table[(table["state"] == "complete") & table["copy_of"].isna()]


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


_TRIAL_COLUMNS = [
    "number", "origin", "state", "left_out", "attention", "mlp", "rounded",
    "tokens_per_second", "speedup", "forced_speedup", "score", "acceptance", "draft_cost", "bound",
    "max_draft_length", "threshold", "seconds", "copy_of", "controller",
]  # fmt: skip


def trials(search: Search) -> pd.DataFrame:
    """Every trial, the best score first; a failed one has no numbers.

    `speedup` is never below plain's, as a draft that does not pay is turned off; `forced_speedup`
    is where it may not be. `score` is the latter where drafting does not pay and it is known.
    `front`: no other trial accepts as much for less.
    """
    rows = []
    for trial in search.document["trials"]:
        row = {key: trial.get(key) for key in ("number", "origin", "state")}
        if trial["state"] == "complete":
            forced = _number(trial["forced_speedup"])
            flat = trial["speedup"] <= PAYS and not np.isnan(forced)
            row |= {
                **{key: trial[key] for key in _TRIAL_COLUMNS if key in trial},
                **_sets(trial),
                "tokens_per_second": trial["value"],
                "score": forced if flat else trial["speedup"],
                "bound": 1 / trial["draft_cost"],
            }
        rows.append(row)
    frame = pd.DataFrame(rows, columns=_TRIAL_COLUMNS)
    first, last = (_TRIAL_COLUMNS.index(name) for name in ("tokens_per_second", "copy_of"))
    frame = frame.astype(dict.fromkeys(_TRIAL_COLUMNS[first : last + 1], float))
    frame = frame.astype({"left_out": "Int64"})
    frame["front"] = front(frame["draft_cost"].to_numpy(), frame["acceptance"].to_numpy())
    return frame.sort_values(["score", "number"], ascending=[False, True], ignore_index=True)


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


_CONFIRMED = (
    "low", "high", "tokens_per_second", "prompts", "repeats", "acceptance_rate", "compared",
    "equal", "near_ties", "faults",
)  # fmt: skip


def finalists(search: Search) -> pd.DataFrame:
    """The finalists in the file's order: priced, and measured where they were.

    `predicted` is of the traced prompts, `held_out` of the others, `forecast` the latter where
    known; `efficiency` = measured / forecast.
    """
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
                "efficiency": measured / forecast,
                **{name: _number(done.get(name)) for name in _CONFIRMED},
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


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
