"""The tables of a report on layer searches: trials and finalists.

Speedups are over plain decoding. Those of trials and predictions are priced (followed or replayed
drafts and a cost table); measured ones are timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from layerskip.analysis.labels import labels_of, printable, ranges
from layerskip.analysis.run_tables import Line, number, same_text, tabled
from layerskip.files.searches import read_search

PAYS = 1.005
"""Maximum predicted speedup of a draft that counts as not paying."""


@dataclass(frozen=True)
class SearchTables:
    """One search file: one model, one law, one machine, one space."""

    label: str
    """The label that distinguishes this search from the others in a report."""
    folder: Path
    document: Mapping[str, Any]
    others: tuple[Mapping[str, Any], ...] = ()
    """Other searches of the same model, law and space in the report."""

    @cached_property
    def trials(self) -> pd.DataFrame:
        return trials(self)

    @property
    def complete(self) -> pd.DataFrame:
        """The lines of successful trials."""
        return self.trials[self.trials["state"] == "complete"]


def load_searches(files: Sequence[Path]) -> list[SearchTables]:
    """Read and check search files, and give each a label that distinguishes it.

    Raises:
        ValueError: a file is not valid; says which and why, in one line.
    """
    documents = [printable(read_search(file)) for file in files]
    return [
        SearchTables(
            f"Search of {label}",
            file.parent,
            document,
            tuple(d for d in documents if d is not document and _kind(d) == _kind(document)),
        )
        for label, file, document in zip(labels_of(documents, files), files, documents, strict=True)
    ]


def _kind(document: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values that must be equal for two searches to be comparable."""
    return document["model"]["name"], document["law"], document["space"]


def progress(document: Mapping[str, Any]) -> pd.DataFrame:
    """Complete trials in their order: trial, seconds so far, proposer, speedup, best so far."""
    complete = [trial for trial in document["trials"] if trial["state"] == "complete"]
    complete.sort(key=lambda trial: int(trial["number"]))
    frame = pd.DataFrame(
        {
            "trial": range(1, len(complete) + 1),
            "seconds": np.cumsum([trial["seconds"] or 0.0 for trial in complete]),
            "proposer": [trial["origin"].partition(":")[0] for trial in complete],
            "speedup": [float(trial["speedup"]) for trial in complete],
        }
    )
    return frame.assign(best=frame["speedup"].cummax())


_TRIAL_COLUMNS = [
    "number", "origin", "state", "left_out", "attention", "mlp", "rounded", "draft_vocabulary",
    "value", "acceptance", "draft_cost", "bound", "draft_length", "positions", "seconds",
]  # fmt: skip


def trials(search: SearchTables) -> pd.DataFrame:
    """Every trial, best first; a failed one has no numbers.

    `value`: its speedup; `predicted`: the speedup of a finalist, which is another number; `front`:
    no other trial accepts as much at a lower cost.
    """
    rows = []
    for trial in search.document["trials"]:
        row = {key: trial.get(key) for key in _TRIAL_COLUMNS} | {"value": trial.get("speedup")}
        if trial["state"] == "complete":
            row |= {**_sets(trial), "bound": 1 / trial["draft_cost"]}
        rows.append(row)
    frame = pd.DataFrame(rows, columns=_TRIAL_COLUMNS)
    first = _TRIAL_COLUMNS.index("draft_vocabulary")
    frame = frame.astype(dict.fromkeys(_TRIAL_COLUMNS[first:], float))
    frame = frame.astype({"left_out": "Int64"})
    frame["front"] = front(frame["draft_cost"].to_numpy(), frame["acceptance"].to_numpy())
    predicted = {each["trial"]: each["predicted"] for each in search.document["finalists"]}
    frame["predicted"] = frame["number"].map(predicted).astype(float)
    return frame.sort_values(["value", "number"], ascending=[False, True], ignore_index=True)


def best(search: SearchTables) -> Mapping[str, Any] | None:
    """The winner; if there is none, the fastest finalist, of those that were timed if any was."""
    drafts: list[Mapping[str, Any]] = search.document["finalists"]
    timed = [each for each in drafts if each["confirmed"]]
    won = [each for each in drafts if each["name"] == search.document["winner"]]
    if timed and not won:
        return max(timed, key=lambda each: float(each["confirmed"]["speedup"]))
    return max(won or drafts, key=lambda each: float(each["predicted"]), default=None)


def front(costs: NDArray[np.float64], acceptances: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(n,): whether no other point accepts as much at less cost, or more at the same cost.

    Points with a NaN are never on the front; equal points are all on it or all off it.
    """
    cost, accepted = costs[:, None], acceptances[:, None]  # of the point that may be better
    better = (cost < costs) & (accepted >= acceptances) | (cost <= costs) & (accepted > acceptances)
    on: NDArray[np.bool_] = ~better.any(0) & ~np.isnan(costs + acceptances)
    return on


ROLES = ("winner", "best_exit")
PREDICTED = ("predicted", "predicted_low", "predicted_high")
_CONFIRMED = (
    "low", "high", "tokens_per_second", "prompts", "repeats", "acceptance_rate", "compared",
    "equal", "near_ties", "faults",
)  # fmt: skip


@tabled
def finalists(search: SearchTables) -> Iterator[Line]:
    """The finalists in the file's order: priced, and measured if they were timed.

    `efficiency` = measured / predicted.
    """
    document = search.document
    for finalist in document["finalists"]:
        done, name, how = finalist["confirmed"] or {}, finalist["name"], finalist["decoding"]
        measured = number(done.get("speedup"))
        role = ", ".join(key.replace("_", " ") for key in ROLES if document[key] == name)
        yield {
            "name": name,
            "role": role,
            "finalist": f"{name} ({role})" if role else name,
            "trial": finalist["trial"],
            **_sets(finalist),
            "alpha": number(finalist["alpha"]),
            "draft_cost": finalist["draft_cost"],
            "bound": 1 / finalist["draft_cost"],
            **how,
            "controller": _controller(**how),
            "drafts": _drafts(how),
            "lookup": bool(how.get("lookup")),
            **{key: number(finalist.get(key)) for key in PREDICTED},
            "measured": measured,
            "efficiency": measured / finalist["predicted"],
            **{key: number(done.get(key)) for key in _CONFIRMED},
            "same_text": same_text(done),
        }


def _drafts(decoding: Mapping[str, Any]) -> str:
    """How long drafts are, and whether some are looked up."""
    length, threshold = decoding.get("max_draft_length"), decoding.get("threshold")
    words = [_controller(**decoding)]
    words += [] if length is None else [f"up to {length}"]
    words += [] if threshold is None else [f"threshold {threshold:g}"]
    return ", ".join([*words, *(["lookups"] if decoding.get("lookup") else [])])


def _controller(controller: str, adaptive: dict[str, float] | None = None, **_: Any) -> str:
    rule = ", ".join(f"{name} {value:g}" for name, value in (adaptive or {}).items())
    return f"{controller} ({rule})" if rule else controller


def _sets(draft: Mapping[str, Any]) -> dict[str, Any]:
    skipped, low = draft["skipped"], draft.get("low")
    rounded = low and (
        f"{low['bits']} bits: attention {ranges(low['attention'])}, MLP {ranges(low['mlp'])}"
        f"{', head' if low['head'] else ''}"
    )
    return {
        "left_out": len(skipped["attention"]) + len(skipped["mlp"]),
        "attention": ranges(skipped["attention"]),
        "mlp": ranges(skipped["mlp"]),
        "rounded": rounded,
    }
