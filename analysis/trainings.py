"""Knows what trainings and comparisons of drafts measured, as tables; no sentences, no pictures.

Speedups are over plain decoding. Overlap is the share of two laws that is common (1 - TV), on
windows of texts that nothing was trained on; acceptance is of tokens drafted along held-out texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from layerskip.analysis.runs import labels_of, printable, slug_of, visible
from layerskip.config import SkipConfig
from layerskip.files.comparisons import read_comparison
from layerskip.files.trainings import read_training

DEPTHS = 4
"""Drafted tokens whose acceptance tables show."""
_TEXTS = ("compared", "equal", "near_ties", "faults")
_TOLD_BY = ("loss", "optimizer", "rank", "rate", "temperature", "tokens", "minutes", "seed")
"""Settings of a recipe that tell trainings of one kind apart, the first that differ."""
_DEFAULTS = {"optimizer": "adamw"}  # what older files do not say


@dataclass(frozen=True)
class Training:
    """One file of a training."""

    label: str
    """What tells this training from the others of a report, in words."""
    but_for_seed: str
    """The same without its seed."""
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Trainings:
    """All files of trainings of a report: they are there to be compared."""

    each: Sequence[Training]
    label = "Trainings"
    slug = "trainings"


@dataclass(frozen=True)
class Comparison:
    """One file of a comparison of drafts: one model, one machine."""

    label: str
    slug: str
    document: Mapping[str, Any]

    @property
    def law(self) -> str:
        """What the file calls the sampling that the clock was run on."""
        return f"{self.document['law']['temperature']:g}"


def load_trainings(files: Sequence[Path]) -> Trainings:
    """Read and check files of trainings, and name each by what tells it from the others.

    Raises:
        ValueError: a file is not what it must be; says which and why, in one line.
    """
    records = [printable(read_training(file)) for file in files]
    recipes = [record["recipe"] for record in records]
    told: dict[str, list[Any]] = {"of": [base_of(each) for each in recipes]}
    told |= {name: [each.get(name, _DEFAULTS.get(name)) for each in recipes] for name in _TOLD_BY}
    told["folder"] = [visible(Path(file).absolute().parent.name) for file in files]
    told["file"] = [number + 1 for number in range(len(files))]
    labels: list[list[str]] = [[recipe["kind"]] for recipe in recipes]
    for name, values in told.items():
        apart = [
            len({v for v, other in zip(values, labels, strict=True) if other == label}) > 1
            for label in labels
        ]
        bare = name in ("of", "loss", "optimizer", "folder")
        words = [f"{v}" if bare else f"{name} {v}" for v in values]
        labels = [
            [*label, word] if more and value is not None else label
            for label, word, value, more in zip(labels, words, values, apart, strict=True)
        ]
    return Trainings(
        [
            Training(_named(label), _named([w for w in label if not w.startswith("seed ")]), record)
            for label, record in zip(labels, records, strict=True)
        ]
    )


def _named(label: Sequence[str]) -> str:
    kind, *more = label
    return f"{kind} ({', '.join(more)})" if more else kind


def base_of(recipe: Mapping[str, Any]) -> str:
    """What of the model a draft is trained on, in a few words."""
    kind, content = recipe["kind"], recipe.get("skip")
    if content is None or kind not in ("healed", "exit-block"):
        return "last states"
    skip = SkipConfig.from_dict(content)
    words = []
    if kind == "exit-block":
        words.append(f"exit {min(skip.attention, default=skip.exit_layer)}")
    elif skip.attention or skip.mlp:
        words.append(f"{len(skip.attention) + len(skip.mlp)} sublayers out")
    if skip.low is not None:
        words.append(f"{skip.low.bits} bits")
        if skip.low.head_bits not in (None, skip.low.bits):
            words.append(f"head {skip.low.head_bits}")
    return ", ".join([*words, "trained before"] if skip.trained is not None else words)


def load_comparisons(files: Sequence[Path]) -> list[Comparison]:
    """Read and check comparisons of drafts, and name each by what tells it from the others.

    Raises:
        ValueError: a file is not what it must be; says which and why, in one line.
    """
    documents = [printable(read_comparison(file)) for file in files]
    labels = labels_of(documents, files)
    return [
        Comparison(f"Drafts of {label}", f"drafts-{slug_of(label, number)}", document)
        for number, (label, document) in enumerate(zip(labels, documents, strict=True))
    ]


def trainings(of: Trainings) -> pd.DataFrame:
    """A line for each training.

    Columns: `draft` (the label), `kind`, `of` (see `base_of`), `loss`, `seed`, `model`, `tokens`
    (in all passes), `minutes` (of texts, features and training), `parameters`, `own_megabytes`,
    `overlap_before` and `overlap` (of the first step, before training and after it), `greedy`
    (acceptance of the first token), `accepted_1` to `accepted_4` (with shared noise, of all up to
    that depth), `draft_cost`, `predicted` (by the formula), `measured` with its interval `low` and
    `high` (with lookups beside it), `before` (measured, what drafted before), `pays`.
    """
    rows = []
    for each in of.each:
        record, recipe = each.record, each.record["recipe"]
        trained, timed = record["drafts"]["trained"], record["timed"]
        curve = record["curve"]
        rows.append(
            {
                "draft": each.label,
                "kind": recipe["kind"],
                "of": base_of(recipe),
                "loss": recipe["loss"],
                "seed": recipe["seed"],
                "model": record.get("model") or record["base"],
                "tokens": record["tokens"],
                "minutes": sum(record["seconds"].values()) / 60,
                "parameters": record["parameters"],
                "own_megabytes": trained["bytes"] / 1e6,
                "overlap_before": float(curve[0]["overlap"][0]),
                "overlap": float(curve[-1]["overlap"][0]),
                "greedy": float(trained["greedy"][0]),
                **_by_depth("accepted", trained["coupled"]),
                "draft_cost": float(trained["costs"]["draft"]),
                "predicted": float(trained["formula"]),
                **_measured(timed.get("trained")),
                "before": _number((timed.get("before") or {}).get("speedup")),
                "pays": "yes" if record["pays"] else "no",
            }
        )
    return pd.DataFrame(rows)


def curves(of: Trainings) -> pd.DataFrame:
    """How trainings went, a line for each point and step of the draft.

    Columns: `draft` and `but_for_seed` (labels), `loss_kind`, `tokens`, `loss`, `step`, `overlap`.
    """
    return pd.DataFrame(
        [
            {
                "draft": each.label,
                "but_for_seed": each.but_for_seed,
                "loss_kind": each.record["recipe"]["loss"],
                "tokens": point["tokens"],
                "loss": float(point["loss"]),
                "step": step,
                "overlap": float(overlap),
            }
            for each in of.each
            for point in each.record["curve"]
            for step, overlap in enumerate(point["overlap"], 1)
        ]
    )


def drafts(of: Comparison) -> pd.DataFrame:
    """A line for each draft or mixture, in the file's order.

    Columns: `draft`, `kind`, `own_megabytes`, `parameters`, `tokens`, `minutes` (of training; NaN
    for others); acceptance by depth `greedy_1` to `greedy_4`, `accepted_1` ... (at the temperature
    that is timed) and `at_one_1` ... (at temperature 1); `draft_cost` (c); `offered` (by lookups,
    share of places); `predicted`, `measured`, `low`, `high`, `efficiency` (measured / predicted),
    `compared` texts, how many of them were `equal` to plain decoding's, `near_ties` and `faults`;
    `greedy_measured`, `greedy_low`, `greedy_high`; `trained` (whether with trained weights).
    """
    laws = {"greedy": "greedy", "accepted": of.law, "at_one": "1"}
    rows = []
    for row in of.document["rows"]:
        known = {name: row.get(name) or {} for name in ("acceptance", "timed", "predicted")}
        timed = known["timed"].get(of.law)
        rows.append(
            {
                "draft": row["name"],
                "kind": row["kind"],
                "trained": "yes" if row.get("trained") else "no",
                "own_megabytes": row["bytes"] / 1e6,
                "parameters": row["parameters"],
                "tokens": _number(row.get("tokens")),
                "minutes": _number(row.get("minutes")),
                **{
                    key: share
                    for name, law in laws.items()
                    for key, share in _by_depth(name, known["acceptance"].get(law)).items()
                },
                "draft_cost": _number((row.get("costs") or {}).get("draft")),
                "offered": _number((row.get("offered") or {}).get(of.law)),
                "predicted": _number(known["predicted"].get(of.law)),
                **_measured(timed),
                **{name: _number((timed or {}).get(name)) for name in _TEXTS},
                **{f"greedy_{k}": v for k, v in _measured(known["timed"].get("greedy")).items()},
            }
        )
    frame = pd.DataFrame(rows)
    return frame.assign(efficiency=frame["measured"] / frame["predicted"])


def _by_depth(name: str, survival: Sequence[float] | None) -> dict[str, float]:
    """Acceptance of all tokens up to each depth; NaN where it is not known."""
    known = [float(share) for share in survival or ()][:DEPTHS]
    known += [math.nan] * (DEPTHS - len(known))
    return {f"{name}_{depth}": share for depth, share in enumerate(known, 1)}


def _measured(timed: Mapping[str, Any] | None) -> dict[str, float]:
    timed = timed or {}
    names = {"measured": "speedup", "low": "low", "high": "high"}
    return {name: _number(timed.get(key)) for name, key in names.items()}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
