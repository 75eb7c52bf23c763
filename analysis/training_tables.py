"""The tables of a report on trainings: the value of each draft, and the course of its training.

Overlap is the share that two distributions have in common, 1 - TV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from layerskip.analysis.labels import distinct_labels, printable
from layerskip.config.skips import SkipConfig
from layerskip.files.trainings import read_training

DEPTHS = 4
"""Draft positions whose acceptance the table shows."""
_TOLD_BY = ("loss", "rank", "rate", "temperature", "tokens", "minutes", "seed")
"""Settings of a recipe that may distinguish trainings."""


@dataclass(frozen=True)
class Trainings:
    """All files of trainings in a report, by label, for comparison."""

    each: Mapping[str, Mapping[str, Any]]
    label = "Trainings"
    slug = "trainings"


def load_trainings(files: Sequence[Path]) -> Trainings:
    """Read and check files of trainings, and give each a label that distinguishes it.

    Raises:
        ValueError: a file is not valid; says which and why, in one line.
    """
    records = [printable(read_training(file)) for file in files]
    recipes = [record["recipe"] for record in records]
    settings = {"of": [base_of(recipe) for recipe in recipes]}
    settings |= {name: [recipe.get(name) for recipe in recipes] for name in _TOLD_BY}
    differing = {name: values for name, values in settings.items() if len(set(values)) > 1}
    labels = []
    for number, recipe in enumerate(recipes):
        setting = {name: values[number] for name, values in differing.items()}
        words = [
            f"{value}" if name in ("of", "loss") else f"{name} {value}"
            for name, value in setting.items()
            if value not in (None, "")
        ]
        labels.append(f"{recipe['kind']} ({', '.join(words)})" if words else recipe["kind"])
    return Trainings(dict(zip(distinct_labels(labels), records, strict=True)))


def base_of(recipe: Mapping[str, Any]) -> str:
    """The parts of the model on which a draft is trained, in a few words."""
    kind, content = recipe["kind"], recipe.get("skip")
    if content is None or kind not in ("healed", "exit-block"):
        return "last states"
    # Old files also name the weights that a draft began with, of a kind that is gone.
    skip = SkipConfig.from_dict({k: v for k, v in content.items() if k != "trained"})
    words = []
    if kind == "exit-block":
        words.append(f"exit {min(skip.attention, default=skip.exit_layer)}")
    elif skip.attention or skip.mlp:
        words.append(f"{len(skip.attention) + len(skip.mlp)} sublayers out")
    if skip.low is not None:
        words.append(f"{skip.low.bits} bits")
        if skip.low.head_bits not in (None, skip.low.bits):
            words.append(f"head {skip.low.head_bits}")
    return ", ".join([*words, "trained before"] if content.get("trained") else words)


def trainings(of: Trainings) -> pd.DataFrame:
    """A line for each training; `page.SHOWN` explains the columns."""
    rows = []
    for label, record in of.each.items():
        recipe, trained = record["recipe"], record["drafts"]["trained"]
        timed, before = (record["timed"].get(name) or {} for name in ("trained", "before"))
        curve = record["curve"]
        rows.append(
            {
                "draft": label,
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
                **{
                    f"accepted_{depth}": float(share)
                    for depth, share in enumerate(trained["coupled"][:DEPTHS], 1)
                },
                "draft_cost": float(trained["costs"]["draft"]),
                "predicted": float(trained["formula"]),
                "measured": timed.get("speedup"),
                "low": timed.get("low"),
                "high": timed.get("high"),
                "before": before.get("speedup"),
                "pays": "yes" if record["pays"] else "no",
            }
        )
    return pd.DataFrame(rows).astype(dict.fromkeys(("measured", "low", "high", "before"), float))


def curves(of: Trainings) -> pd.DataFrame:
    """The course of trainings, a line for each point and step of the draft."""
    return pd.DataFrame(
        [
            {
                "draft": label,
                "tokens": point["tokens"],
                "loss": float(point["loss"]),
                "step": step,
                "overlap": float(overlap),
            }
            for label, record in of.each.items()
            for point in record["curve"]
            for step, overlap in enumerate(point["overlap"], 1)
        ]
    )
