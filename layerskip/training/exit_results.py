"""Results of a training of exits: the exits to judge, the best one, and the model card.

Rows of a table are those of `exits.exit_table`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from layerskip.costs.speculation import CostTable, best_length

JUDGED = 16
"""Minimum number of exits to judge, if the model has as many."""
POINTS = 50
"""Maximum number of points in a curve."""
DRAFTED = 8
"""Maximum draft length, in tokens, for the expected speedup."""


def judged_exits(trained: Sequence[int], layers: int) -> list[int]:
    """The exits to judge: those trained, JUDGED evenly spaced ones, and the last."""
    step = max(1, layers // JUDGED)
    return sorted({*trained, *range(step, layers, step), layers})


def best_exit(table: list[dict[str, float]]) -> tuple[int, float]:
    """The early exit with the highest expected speedup by the formula, and that speedup.

    It assumes the accepted shares at every depth, and costs proportional to the number of layers.
    """
    layers, promises = table[-1]["exit"], {}
    for row in table[:-1]:
        survival = [row["accepted"] ** depth for depth in range(1, DRAFTED + 1)]
        costs = CostTable(row["exit"] / layers, (1.0,) * (DRAFTED + 1))
        promises[int(row["exit"])] = max(1.0, best_length(survival, costs)[0])
    best = max(promises, key=lambda each: promises[each])
    return best, promises[best]


def curve(losses: list[float]) -> list[float]:
    """Mean losses of at most POINTS equal parts of a training."""
    size = max(1, math.ceil(len(losses) / POINTS))
    parts = (losses[first : first + size] for first in range(0, len(losses), size))
    return [sum(part) / len(part) for part in parts]


def table_of(record: dict[str, Any]) -> list[list[str]]:
    """Each trained exit before and after training: the cells of a table."""
    trained = {*record["recipe"]["exits"], record["best"], record["after"][-1]["exit"]}
    lines = [["exit", "loss", "after", "agreement", "after", "accepted", "after"]]
    for before, after in zip(record["before"], record["after"], strict=True):
        if after["exit"] in trained:
            pairs = ((before[name], after[name]) for name in ("loss", "agreement", "accepted"))
            lines.append([f"{after['exit']:.0f}", *(f"{v:.3f}" for pair in pairs for v in pair)])
    return lines


def card(record: dict[str, Any]) -> str:
    """The model card: what was done, and the results."""
    recipe = record["recipe"]
    lines = table_of(record)
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines[1:])
    head = "| " + " | ".join(lines[0]) + " |\n" + "|---" * len(lines[0]) + "|"
    begun = record["model"] or "a model without a name"
    begun = f"random weights in the shape of {begun}" if recipe["init"] == "random" else begun
    return f"""---
library_name: transformers
tags: [layerskip, early-exit]
---

# Trained for early exits

Started from {begun} ({record["base"]}), whose terms hold for this model, as do those of the texts.
Trained by `layerskip train --recipe exits`: {record["steps"]:,} steps, {record["tokens"]:,} tokens,
loss `{recipe["loss"]}`, weight {recipe["keep"]:g} of the final layer's divergence from the
original, layer dropout up to {recipe["dropout"]:g}, {recipe["curriculum"]} curriculum, learning
rate {recipe["rate"]:g}, seed {recipe["seed"]}.

On held-out texts, before and after; the last row is the model itself. "accepted" is the share of an
exit's tokens that are right under shared noise, at temperature {recipe["temperature"]:g}.

{head}
{rows}

`layerskip.json` names exit {record["best"]}. It loads in transformers and in any server as before.
"""
