"""Knows how a run's tables look as pictures, and says each in words too; computes nothing anew.

Every function takes a run (or all of them) and returns a `Plot`, or None where there is nothing to
draw. Its `alt` says what it shows, with the numbers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from layerskip.analysis import predictions, shared_plots, tables
from layerskip.analysis.canvas import (
    BLACK,
    BLUE,
    INK,
    LINE,
    ORANGE,
    PAPER,
    PURPLE,
    RED,
    SKY,
    WHITE,
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
from layerskip.analysis.runs import Run

WITH_INTERVAL = "{speedup:.2f} ({low:.2f} to {high:.2f})"
PHASES = {
    "prefill": ("prefill", SKY, ""),
    "draft": ("drafting", ORANGE, "///"),
    "verify": ("verifying", BLUE, "\\\\\\"),
    "other": ("accepting and other", PURPLE, "xxx"),
    "rest": ("not told apart", LINE, ""),
}
"""How a phase looks: its word, colour and hatch."""


def run_plots(run: Run) -> list[Plot]:
    """All plots of one run that its records have data for."""
    drawn = [speedups(run, batch_size) for batch_size in run.batch_sizes]
    drawn += [maker(run) for maker in (phases, forecasts, surface, what_if, skip_map)]
    return [plot for plot in drawn if plot is not None]


def speedups(run: Run, batch_size: int) -> Plot | None:
    """Every method's speedup over the baseline with its interval, by category."""
    table = _over_baseline(tables.speedup(run))
    table = table[(table["over"] == run.baseline) & (table["batch_size"] == batch_size)]
    if not len(table):
        return None
    figure, axes = _in_groups(table, "method", "category")
    lanes = table["category"].nunique() + 1
    for number, words in enumerate(table[table["category"] == tables.ALL]["words"]):
        note_at_the_side(axes, words, number * lanes)
    axes.set_xlabel(f"times as fast as {run.baseline} (95% interval over prompts)")
    where = f", batch size {batch_size}" if len(run.batch_sizes) > 1 else ""
    return Plot(
        f"speedup-batch-{batch_size}" if where else "speedup",
        f"Speedup over {run.baseline}{where}",
        f"Speed relative to {run.baseline}: {_in_words(table, 'category', 'method')}.",
        figure,
    )


def overview_plots(runs: Sequence[Run]) -> list[Plot]:
    """Methods over their runs' baselines, all prompts, at the smallest batch size."""
    table = _over_baseline(tables.comparison(runs))
    table = table.groupby(["run", "method"], sort=False).head(1)
    if not len(table):
        return []
    figure, axes = _in_groups(table, "run", "method")
    axes.set_xlabel("times as fast as the baseline")
    alt = f"Speed relative to each run's baseline. {_in_words(table, 'run', 'method')}."
    return [Plot("overview", "All runs side by side", alt, figure)]


def _over_baseline(table: pd.DataFrame) -> pd.DataFrame:
    """Without the lines that compare a method with itself; `words`: speedup and interval."""
    table = table[table["method"] != table["over"]]
    words = [
        listed(row.to_frame().T, "{speedup:.2f}" if pd.isna(row["low"]) else WITH_INTERVAL)
        for _, row in table.iterrows()
    ]
    return table.assign(words=words)


def _in_words(table: pd.DataFrame, group: str, series: str) -> str:
    parts = table.groupby(group, sort=False)
    return "; ".join(f"{name}: {listed(rows, f'{{{series}}} {{words}}')}" for name, rows in parts)


def _in_groups(table: pd.DataFrame, group: str, series: str) -> tuple[Figure, Axes]:
    """Speedups with their intervals; one group of lines for each value of a column.

    Lines without an interval are drawn hollow.
    """
    groups, members = (list(table[name].unique()) for name in (group, series))
    lanes = len(members) + 1
    figure, axes = new_figure(1.3 + 0.16 * lanes * len(groups))
    for place, member in enumerate(members):
        rows = table[table[series] == member]
        axes.errorbar(
            rows["speedup"],
            [groups.index(name) * lanes + place for name in rows[group]],
            xerr=error_bars(rows, "speedup"),
            fmt=marker_of(place),
            color=colour_of(place),
            markerfacecolor=PAPER if rows["low"].isna().any() else colour_of(place),
            markersize=6.5,
            elinewidth=1.6,
            capsize=2.5,
            label=member,
        )
    axes.axvline(1, color=INK, linewidth=1.2)
    middle = (len(members) - 1) / 2
    labels = [textwrap.fill(clipped(name, 80), 22) for name in groups]
    axes.set_yticks([n * lanes + middle for n in range(len(groups))], labels)
    axes.set_ylim(len(groups) * lanes - 1, -1)
    axes.grid(axis="y", visible=False)
    add_legend(figure, axes)
    return figure, axes


def phases(run: Run) -> Plot:
    """Where a token's time goes, at the smallest batch size."""
    table = tables.phases(run)
    table = table[table["batch_size"] == run.batch_sizes[0]]
    figure, axes = new_figure(1.3 + 0.38 * len(table))
    places = np.arange(len(table))  # (methods,)
    left = np.zeros(len(table))  # (methods,)
    for phase, (word, colour, hatch) in PHASES.items():
        values = table[phase].fillna(0.0).to_numpy()
        if values.any():
            axes.barh(
                places, values, left=left, label=word, color=colour, hatch=hatch, edgecolor=INK,
                linewidth=0.5,
            )  # fmt: skip
        left += values
    axes.set_yticks(places, [clipped(method, 30) for method in table["method"]])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds per new token")
    add_legend(figure, axes)
    parts = []
    for _, row in table.iterrows():
        known = [
            f"{word} {row[phase]:.3g}" for phase, (word, *_) in PHASES.items() if row[phase] > 0
        ]
        parts.append(f"{row['method']} {row['total']:.3g} ({', '.join(known)})")
    alt = f"Milliseconds per new token, by phase: {'; '.join(parts)}."
    return Plot("phases", "Where the time goes", alt, figure)


def forecasts(run: Run) -> Plot | None:
    """Predicted against measured decode speedups."""
    table = predictions.predictions(run)
    if not len(table):
        return None
    table = table.rename(columns={"predicted": "forecast"})
    return shared_plots.forecasts(
        "predicted-measured", "Predicted and measured speedup", table, "method"
    )


def surface(run: Run) -> Plot | None:
    """Where drafts lie between the best speedups over (c, alpha), at the smallest batch size."""
    table = predictions.predictions(run)
    if len(table):
        table = table[table["batch_size"] == run.batch_sizes[0]].dropna(subset=["alpha"])
    if not len(table):
        return None
    whole = table[table["category"] == tables.ALL]
    costs = run.cost_table(whole["method"].iloc[0], run.batch_sizes[0])
    assert costs is not None  # there is no prediction without
    figure, axes = new_figure(4.4)
    axes.set_xlim(0, max(1.0, table["draft_cost"].max()) * 1.02)
    axes.set_ylim(0, 1)
    shared_plots.equal_speedups(axes, costs, predictions.LONGEST)
    for number, (method, rows) in enumerate(table.groupby("method", sort=False)):
        for part, size in ((rows, 4), (rows[rows["category"] == tables.ALL], 9)):
            axes.plot(
                part["draft_cost"], part["alpha"], marker_of(number), color=colour_of(number),
                markersize=size, clip_on=False, label=str(method) if size > 4 else None,
            )  # fmt: skip
    shared_plots.name_plane(axes)
    add_legend(figure, axes)
    form = (
        "{method} lies at c {draft_cost:.2f}, alpha {alpha:.2f}: measured {measured:.2f}, best "
        "fixed length {best_length:.0f} by formula {best_formula:.2f}, bound {bound:.1f}"
    )
    words = listed(whole, form, "; ")
    alt = f"Curves of the best speedup a fixed draft length can give. {words}."
    return Plot("surface", "Cost and acceptance (small: kinds of prompts)", alt, figure)


def what_if(run: Run) -> Plot | None:
    """Speedup by exit and draft length, at each cell's best threshold."""
    table = predictions.what_if(run)
    if len(table):
        table = table[table["trace"] == 0].dropna(subset=["speedup"])
    if not len(table):
        return None
    cells = table.pivot_table(index="exit", columns="draft_length", values="speedup", aggfunc="max")
    values = cells.to_numpy()
    figure, axes = new_figure(1.5 + 0.27 * len(cells))
    mesh = axes.pcolormesh(values, cmap="cividis", edgecolors=PAPER, linewidth=0.8)
    for (i, j), value in np.ndenumerate(values):
        shade = mpl.colors.rgb_to_hsv(mesh.cmap(mesh.norm(value))[:3])[2]
        colour = BLACK if shade > 0.55 else WHITE
        middle = (j + 0.5, i + 0.5)
        axes.text(*middle, f"{value:.2f}", ha="center", va="center", fontsize=8.5, color=colour)
    i, j = (int(n) for n in np.unravel_index(np.nanargmax(values), values.shape))
    axes.add_patch(Rectangle((j, i), 1, 1, fill=False, edgecolor=RED, linewidth=2.5))
    axes.set_xticks(np.arange(len(cells.columns)) + 0.5, [f"{n:g}" for n in cells.columns])
    axes.set_yticks(np.arange(len(cells)) + 0.5, [f"{n:g}" for n in cells.index])
    axes.grid(visible=False)
    axes.set_xlabel("most tokens drafted in a round (at its best threshold)")
    axes.set_ylabel("exit after layer")
    best = table.loc[table["speedup"].idxmax()]
    by_exit = (f"exit {e} {row.max():.2f}" for e, row in cells.iterrows())
    alt = (
        f"Priced speedup by exit layer and draft length. Best: exit {best['exit']:.0f}, length "
        f"{best['draft_length']:.0f}, threshold {best['threshold']:g}, {best['speedup']:.2f} "
        f"(boxed). Best by exit: {', '.join(by_exit)}."
    )
    return Plot("what-if", "What if: priced speedup by exit and draft length", alt, figure)


def skip_map(run: Run) -> Plot | None:
    """What the skip configs leave out or round, with the best speedup of their methods."""
    table = tables.speedup(run)
    table = table[(table["over"] == run.baseline) & (table["category"] == tables.ALL)]
    fastest = table.groupby("method")["speedup"].max()
    owners: dict[str, list[str]] = {}
    for method in run.drafting:
        settings = run.methods[method]
        owners.setdefault(str((settings["skipped"], settings.get("low"))), []).append(method)
    rows = [
        shared_plots.Row(
            ", ".join(names),
            run.methods[names[0]]["skipped"],
            run.methods[names[0]].get("low"),
            fastest.reindex(names).max(),
        )
        for names in owners.values()
    ]
    if not rows:
        return None
    return shared_plots.skip_map("skip-map", rows, run.num_layers, told=len(rows))
