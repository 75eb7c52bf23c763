"""Knows how trainings and comparisons of drafts look as pictures; computes nothing anew.

Every function returns a `Plot`, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from layerskip.analysis import trainings
from layerskip.analysis.canvas import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    WIDTH,
    Plot,
    add_legend,
    clipped,
    colour_of,
    error_bars,
    listed,
    marker_of,
    new_figure,
    note_at_the_side,
)
from layerskip.analysis.trainings import Comparison, Trainings

WIDE = 10
"""Times the least loss, the largest from which on their axis is logarithmic."""
DASHES = ("-", "--", ":")
"""Of trainings that differ in the seed alone, one after the other."""


def training_plots(of: Trainings) -> list[Plot]:
    """All plots of trainings."""
    return [overlaps(of), losses(of)]


def comparison_plots(of: Comparison) -> list[Plot]:
    """All plots of a comparison that its file has data for."""
    drawn = [speedups(of), acceptance(of)]
    return [plot for plot in drawn if plot is not None]


def overlaps(of: Trainings) -> Plot:
    """Overlap of the first step with the target's law against tokens, a line each."""
    table = trainings.curves(of).query("step == 1")
    looks = _looks(table)
    figure, axes = new_figure(3.4 + _room_for(looks))
    words = []
    for name, look in looks.items():
        rows = table[table["draft"] == name]
        _line(axes, rows, "overlap", look, name)
        ends = rows.iloc[[0, -1]]
        said = listed(ends, "{overlap:.3f}", " to ")
        words.append(f"{name} {said} after {ends['tokens'].iloc[-1]:,} tokens")
    _tokens_below(axes)
    axes.set_ylabel("overlap with the target's law")
    add_legend(figure, axes)
    alt = f"Overlap of the first drafted token by tokens of training. {'; '.join(words)}."
    return Plot("training-overlap", "Overlap against tokens of training", alt, figure)


def losses(of: Trainings) -> Plot:
    """Loss against tokens, a panel for each kind of loss: their numbers do not compare."""
    table = trainings.curves(of).query("step == 1")
    looks = _looks(table)
    kinds = list(table["loss_kind"].unique())
    height = 0.7 + (2.7 if len(kinds) == 1 else 1.9 * len(kinds)) + _room_for(looks)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(len(kinds), 1, squeeze=False, sharex=True)[:, 0]
    words = []
    for axes, kind in zip(grid, kinds, strict=True):
        values = table.loc[table["loss_kind"] == kind, "loss"]
        if values.min() > 0 and values.max() > WIDE * values.min():
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        said = []
        for name, rows in table[table["loss_kind"] == kind].groupby("draft", sort=False):
            _line(axes, rows, "loss", looks[str(name)])
            said.append(f"{name} {listed(rows.iloc[[0, -1]], '{loss:.3g}', ' to ')}")
        words.append(f"{kind}: {', '.join(said)}")
        axes.set_ylabel(f"loss: {kind}")
    for name, look in looks.items():
        grid[0].plot([], [], label=name, **look)
    _tokens_below(grid[-1])
    add_legend(figure, grid[0])
    alt = f"Loss on texts kept apart, by tokens of training. {'; '.join(words)}."
    return Plot("training-loss", "Loss against tokens of training", alt, figure)


def _looks(table: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """How the line of each training looks: those that differ in the seed alone are alike."""
    alike = list(table["but_for_seed"].unique())
    seen: Counter[str] = Counter()
    looks = {}
    for name, family in table[["draft", "but_for_seed"]].drop_duplicates().itertuples(index=False):
        number, dashes = alike.index(family), DASHES[seen[family] % len(DASHES)]
        seen[family] += 1
        looks[name] = {
            "color": colour_of(number), "marker": marker_of(number), "linestyle": dashes,
        }  # fmt: skip
    return looks


def _room_for(names: Iterable[str]) -> float:
    """Inches that a legend of these takes below a plot, were each on a line of its own."""
    return 0.25 + 0.2 * sum(1 + len(name) // 56 for name in names)


def _line(
    axes: Axes, rows: pd.DataFrame, column: str, look: dict[str, Any], label: str | None = None
) -> None:
    axes.plot(
        rows["tokens"], rows[column], markersize=5, linewidth=1.6, label=label, clip_on=False,
        **look,
    )  # fmt: skip


def _tokens_below(axes: Axes) -> None:
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlabel("tokens trained on")


def short(count: float) -> str:
    """A count of tokens for an axis: 50k, 1.5M."""
    for size, word in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:g}{word}"
    return f"{count:g}"


def speedups(of: Comparison) -> Plot | None:
    """Measured speedup of every row with its interval, and the predicted one beside it."""
    table = trainings.drafts(of)
    table = table[table["measured"].notna()].sort_values("measured", ascending=False)
    if not len(table):
        return None
    figure, axes = new_figure(1.3 + 0.27 * len(table))
    places = np.arange(len(table))
    axes.plot(
        table["predicted"], places, "D", color=ORANGE, markerfacecolor=PAPER, markersize=6,
        label="predicted",
    )  # fmt: skip
    for trained, marker, colour, words in (
        ("no", "o", BLUE, "measured"),
        ("yes", "s", GREEN, "measured, with trained weights"),
    ):
        own = (table["trained"] == trained).to_numpy()
        if own.any():
            axes.errorbar(
                table["measured"][own], places[own], xerr=error_bars(table[own], "measured"),
                fmt=marker, color=colour, markersize=6, elinewidth=1.6, capsize=2.5, label=words,
            )  # fmt: skip
    for place, value in zip(places, table["measured"], strict=True):
        note_at_the_side(axes, f"{value:.2f}", float(place))
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.set_yticks(places, [clipped(name, 34) for name in table["draft"]])
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("times as fast as plain decoding (95% interval)")
    add_legend(figure, axes)
    near = int(table["efficiency"].between(0.9, 1.1).sum())
    form = "{draft} measured {measured:.2f}, predicted {predicted:.2f}"
    alt = (
        f"Speedup over plain decoding; measured is within 10% of predicted for {near} of "
        f"{len(table)}. {listed(table, form, '; ')}."
    )
    return Plot("draft-speedups", "Speedup by draft, predicted and measured", alt, figure)


def acceptance(of: Comparison) -> Plot | None:
    """Share of places whose first tokens are all accepted, by depth, of every single draft."""
    rows = [row for row in of.document["rows"] if of.law in row["acceptance"]]
    if not rows:
        return None
    figure, axes = new_figure(4.2)
    words = []
    for number, row in enumerate(rows):
        survival = row["acceptance"][of.law]
        axes.plot(
            range(1, len(survival) + 1), survival, marker=marker_of(number),
            color=colour_of(number), markersize=5, linewidth=1.4, label=row["name"], clip_on=False,
        )  # fmt: skip
        shares = ", ".join(f"{share:.2f}" for share in survival[: trainings.DEPTHS])
        words.append(f"{row['name']} {shares}")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("drafted tokens")
    axes.set_ylabel(f"all accepted, sampled at {of.law}")
    add_legend(figure, axes)
    alt = f"Share of places whose first tokens are all accepted, by depth. {'; '.join(words)}."
    return Plot("draft-acceptance", "Acceptance by depth", alt, figure)
