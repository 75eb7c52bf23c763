"""The tables of a report on trainings: the value of each draft, and the course of its training.

Overlap is the share that two distributions have in common, 1 - TV.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip.analysis.labels import distinct_labels, printable
from layerskip.analysis.run_tables import Line, number, tabled
from layerskip.config.skips import SkipConfig
from layerskip.files.trainings import read_training

DEPTHS = 4
"""Draft positions whose acceptance the table shows."""
_NAMED_BY = ("of", "loss", "rank", "rate", "temperature", "tokens", "minutes", "seed")
"""Settings of a recipe that may distinguish trainings."""


@dataclass(frozen=True)
class Trainings:
    """All files of trainings in a report, by label, for comparison."""

    each: Mapping[str, Mapping[str, Any]]
    label = "Trainings"

    @property
    def models(self) -> list[str]:
        """The names of the models, each once."""
        named = (record.get("model") or record["base"] for record in self.each.values())
        return list(dict.fromkeys(named))


def load_trainings(files: Sequence[Path]) -> Trainings:
    """Read and check files of trainings, and give each a label that distinguishes it.

    Raises:
        ValueError: a file is not valid; says which and why, in one line.
    """
    records = [printable(read_training(file)) for file in files]
    recipes = [record["recipe"] | {"of": base_of(record["recipe"])} for record in records]
    differing = [name for name in _NAMED_BY if len({recipe.get(name) for recipe in recipes}) > 1]
    labels = []
    for recipe in recipes:
        words = [
            f"{recipe[name]}" if name in ("of", "loss") else f"{name} {recipe[name]}"
            for name in differing
            if recipe.get(name) not in (None, "")
        ]
        labels.append(f"{recipe['kind']} ({', '.join(words)})" if words else recipe["kind"])
    return Trainings(dict(zip(distinct_labels(labels), records, strict=True)))


def base_of(recipe: Mapping[str, Any]) -> str:
    """The part of the model on which a draft is trained, in a few words."""
    if recipe["kind"] == "healed":  # of earlier versions: corrections of rounded weights
        return "kept sublayers"
    if recipe["kind"] != "exit-block":
        return "last states"
    # Old files also name the weights that a draft began with, of a kind that is gone.
    skip = SkipConfig.from_dict({k: v for k, v in recipe["skip"].items() if k != "trained"})
    bits = "" if skip.low is None else f", {skip.low.bits} bits"
    return f"exit {min(skip.attention, default=skip.exit_layer)}{bits}"


@tabled
def trainings(of: Trainings) -> Iterator[Line]:
    """A line for each training; the page explains the columns."""
    for label, record in of.each.items():
        recipe, trained, curve = record["recipe"], record["drafts"]["trained"], record["curve"]
        timed, before = (record["timed"].get(name) or {} for name in ("trained", "before"))
        yield {
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
            **{f"accepted_{n}": float(s) for n, s in enumerate(trained["coupled"][:DEPTHS], 1)},
            "draft_cost": float(trained["costs"]["draft"]),
            "predicted": float(trained["formula"]),
            "measured": number(timed.get("speedup")),
            "low": number(timed.get("low")),
            "high": number(timed.get("high")),
            "before": number(before.get("speedup")),
            "pays": "yes" if record["pays"] else "no",
        }


@tabled
def curves(of: Trainings) -> Iterator[Line]:
    """The course of trainings, a line for each point and step of the draft."""
    for label, record in of.each.items():
        for point in record["curve"]:
            reached = {"draft": label, "tokens": point["tokens"], "loss": float(point["loss"])}
            for step, overlap in enumerate(point["overlap"], 1):
                yield reached | {"step": step, "overlap": float(overlap)}
