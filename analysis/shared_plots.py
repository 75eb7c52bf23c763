"""Knows the pictures that runs and searches share: forecasts, the (c, alpha) plane, skip maps.

They are drawn from tables, costs and sets of sublayers; runs and searches are unknown here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from layerskip.analysis.canvas import (
    BLUE,
    GREEN,
    INK,
    LINE,
    MUTED,
    ORANGE,
    PAPER,
    Plot,
    add_legend,
    clipped,
    colour_of,
    error_bars,
    layer_ticks,
    listed,
    marker_of,
    new_figure,
    note_at_the_side,
    note_below,
)
from layerskip.analysis.runs import ranges
from layerskip.costs.speculation import CostTable

LEVELS = (1.0001, 1.1, 1.25, 1.5, 2, 3, 4, 6, 10, 20, 50)


def forecasts(name: str, title: str, table: pd.DataFrame, series: str) -> Plot:
    """Predicted against measured speedups, with a marker for each value of the column `series`.

    Args:
        table: columns `forecast`, `measured`, its interval `low` and `high`, `efficiency`.
    """
    figure, axes = new_figure(4.2)
    for number, (label, rows) in enumerate(table.groupby(series, sort=False)):
        axes.errorbar(
            rows["forecast"], rows["measured"], yerr=error_bars(rows, "measured"),
            fmt=marker_of(number), color=colour_of(number), markersize=6, elinewidth=0.8,
            label=str(label),
        )  # fmt: skip
    values = table[["forecast", "measured"]].to_numpy(dtype=float)
    ends = np.array([0.93 * values.min(), 1.07 * values.max()])
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color=LINE, alpha=0.5, label="within 10%")
    axes.plot(ends, ends, color=INK, linewidth=1.2, label="as predicted")
    axes.set_xlim(*ends)
    axes.set_xlabel("predicted: counted rounds, one cost table")
    axes.set_ylabel("measured speedup")
    add_legend(figure, axes)
    near = table["efficiency"].between(0.9, 1.1).sum()
    form = f"{{{series}}}: predicted {{forecast:.2f}}, measured {{measured:.2f}}"
    words = listed(table, form, "; ")
    alt = f"Measured is within 10% of predicted for {near} of {len(table)} points. {words}."
    return Plot(name, title, alt, figure)


def best_speedups(
    alphas: NDArray[np.float64],
    draft_costs: NDArray[np.float64],
    costs: CostTable,
    longest: int,
) -> NDArray[np.float64]:
    """(A, C): `speculation.speedup` at the best draft length in 0..longest, with the table's v."""
    best = np.ones((len(alphas), len(draft_costs)))
    tokens = np.ones(len(alphas))  # (A,) expected tokens of a round
    for length in range(1, longest + 1):
        tokens = tokens + alphas**length
        paid = length * draft_costs + costs.verify_cost(length + 1)  # (C,)
        best = np.maximum(best, tokens[:, None] / paid[None, :])
    return best


def equal_speedups(axes: Axes, costs: CostTable, longest: int) -> dict[float, float]:
    """Curves of equal speedup over (c, alpha), named where they leave the plot at alpha 1.

    Returns:
        Each curve's speedup and the c at which it ends there.
    """
    low, high = axes.get_xlim()
    across = np.linspace(max(low, 0.01), high, 300)  # (C,)
    alphas = np.linspace(axes.get_ylim()[0], 1, 150)  # (A,)
    best = best_speedups(alphas, across, costs, longest)  # (A, C)
    shown: dict[float, float] = {}  # level to its place at alpha 1
    for level in LEVELS:
        above = np.flatnonzero(best[-1] >= level)
        if not len(above):
            break
        place = float(across[above[-1]])
        if all(abs(place - other) > 0.07 * (high - low) for other in shown.values()):
            shown[level] = place
    if shown:
        axes.contour(
            across, alphas, best, levels=list(shown), colors=MUTED, linewidths=0.8, linestyles=":"
        )
        axes.plot([], [], color=MUTED, linewidth=0.8, linestyle=":", label="equal speedup (above)")
        top = axes.secondary_xaxis("top")
        top.set_xticks(list(shown.values()), [f"{level:.3g}x" for level in shown])
        top.tick_params(labelcolor=MUTED, color=MUTED, labelsize=9)
    return shown


def name_plane(axes: Axes) -> None:
    axes.set_xlabel("c: draft step / target step")
    axes.set_ylabel("alpha: a draft token is accepted")


class Row(NamedTuple):
    """A draft on a skip map."""

    name: str
    skipped: Mapping[str, Sequence[int]]
    """Layers left out, by kind of sublayer."""
    low: Mapping[str, Any] | None
    """Layers run in low precision, likewise, with `bits`, and `head`: whether that is, too."""
    speedup: float
    """NaN where unknown."""

    def words(self) -> str:
        left_out, low = (
            f"attention of layers {ranges(of['attention'])} and MLP of layers {ranges(of['mlp'])}"
            for of in (self.skipped, self.low or self.skipped)
        )
        words = f"{self.name} leaves out {left_out}"
        if self.low:
            head = " and the head" if self.low["head"] else ""
            words += f", runs {low}{head} in {self.low['bits']} bits"
        return f"{words}, speedup {self.speedup:.2f}"


_KINDS = (("attention", BLUE, 0), ("mlp", ORANGE, 1))


def skip_map(name: str, rows: Sequence[Row], layers: int, told: int) -> Plot:
    """What drafts leave out, and what they run in low precision, a row each.

    Args:
        told: so many rows, the first ones, are put into words and stand apart from the others.
    """
    figure, axes = new_figure(1.3 + 0.21 * (len(rows) + 1))
    heights = [place + (place >= told > 0) * 0.6 for place in range(len(rows))]
    any_low = any(row.low for row in rows)
    head = 2 * layers + 0.025 * layers  # where its column begins
    column = max(1.0, 0.04 * layers)
    edge = 0.5 if layers <= 32 else 0.0
    for height, row in zip(heights, rows, strict=True):
        frames = [(0.0, 2.0 * layers), *([(head, column)] if any_low else [])]
        for left, width in frames:
            axes.add_patch(
                Rectangle((left, height - 0.4), width, 0.8, facecolor=PAPER, edgecolor=LINE)
            )
        if not np.isnan(row.speedup):
            note_at_the_side(axes, f"{row.speedup:.2f}", height)
        for kind, colour, place in _KINDS:
            axes.broken_barh(
                [(2 * layer + place, 1) for layer in row.skipped[kind]], (height - 0.4, 0.8),
                facecolor=colour, edgecolor=PAPER, linewidth=edge,
            )  # fmt: skip
            if row.low:
                axes.broken_barh(
                    [(2 * layer + place, 1) for layer in row.low[kind]], (height + 0.1, 0.3),
                    facecolor=GREEN, edgecolor=PAPER, linewidth=edge,
                )  # fmt: skip
        if row.low and row.low["head"]:
            axes.broken_barh([(head, column)], (height + 0.1, 0.3), facecolor=GREEN)
    for kind, colour, _ in _KINDS:
        axes.bar([0], [0], color=colour, label=f"{kind} left out")
    if any_low:
        bits = " or ".join(map(str, sorted({row.low["bits"] for row in rows if row.low})))
        axes.bar([0], [0], color=GREEN, label=f"low bar: in {bits} bits")
    axes.set_xlim(0, head + column if any_low else 2 * layers)
    axes.set_ylim(heights[-1] + 0.7, -0.7)
    axes.set_yticks(heights, [clipped(row.name, 28) for row in rows], fontsize=9)
    axes.tick_params(axis="y", length=0)
    layer_ticks(axes, layers)
    if any_low:
        note_below(axes, "head", head + column / 2)
    axes.grid(visible=False)
    axes.set_xlabel("layer (right: speedup, measured where it was)")
    add_legend(figure, axes)
    title = "What the drafts leave out" + (" or round" if any_low else "")
    words = "; ".join(row.words() for row in rows[:told])
    alt = f"{title.replace('the', str(len(rows)))}. {words}."
    return Plot(name, title, alt, figure)
