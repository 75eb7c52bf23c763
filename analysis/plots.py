"""Knows how measured tables look as pictures, and says each in words too; computes nothing anew.

Every function takes a run (or all of them) and returns a `Plot`, or None where there is nothing to
draw. Its `alt` says what it shows, with the numbers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from layerskip.analysis import model_plots, tables
from layerskip.analysis.canvas import (
    BLUE,
    INK,
    LINE,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    STYLE,
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
from layerskip.analysis.runs import Run, rounds_of

WITH_INTERVAL = "{speedup:.2f} ({low:.2f} to {high:.2f})"
HATCHES = {"prefill": "", "draft": "///", "verify": "\\\\\\", "other": "xxx", "rest": ""}


def run_plots(run: Run) -> list[Plot]:
    """All plots of one run that its records have data for."""
    drawn: list[Plot | None] = []
    with mpl.rc_context(STYLE):
        drawn += [speedups(run, batch_size) for batch_size in run.batch_sizes]
        makers: Sequence[Callable[[Run], Plot | None]] = (
            phases,
            model_plots.forecasts,
            model_plots.surface,
            model_plots.what_if,
            model_plots.calibration,
            model_plots.skip_map,
            draft_lengths,
        )
        drawn += [maker(run) for maker in makers]
    return [plot for plot in drawn if plot is not None]


def overview_plots(runs: Sequence[Run]) -> list[Plot]:
    """Plots over several runs; none for one."""
    if len(runs) < 2:
        return []
    with mpl.rc_context(STYLE):
        plot = overview(runs)
    return [] if plot is None else [plot]


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


def overview(runs: Sequence[Run]) -> Plot | None:
    """Every run's methods over its baseline, all prompts, at the smallest batch size."""
    table = _over_baseline(tables.comparison(list(runs)))
    table = table.groupby(["run", "method"], sort=False).head(1)
    if not len(table):
        return None
    figure, axes = _in_groups(table, "run", "method")
    axes.set_xlabel("times as fast as the baseline")
    alt = f"Speed relative to each run's baseline. {_in_words(table, 'run', 'method')}."
    return Plot("overview", "All runs side by side", alt, figure)


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


def phases(run: Run) -> Plot | None:
    """Where a token's time goes, at the smallest batch size."""
    table = tables.phases(run)
    table = table[table["batch_size"] == run.batch_sizes[0]]
    figure, axes = new_figure(1.3 + 0.38 * len(table))
    labels = {
        "prefill": "prefill",
        "draft": "drafting",
        "verify": "verifying",
        "other": "accepting and other",
        "rest": "not told apart",
    }
    colours = dict(zip(labels, (SKY, ORANGE, BLUE, PURPLE, LINE), strict=True))
    places = np.arange(len(table))  # (methods,)
    left = np.zeros(len(table))  # (methods,)
    for phase, label in labels.items():
        values = table[phase].fillna(0.0).to_numpy()
        if not values.any():
            continue
        axes.barh(
            places, values, left=left, label=label, color=colours[phase],
            hatch=HATCHES[phase], edgecolor=INK, linewidth=0.5,
        )  # fmt: skip
        left += values
    axes.set_yticks(places, [clipped(method, 30) for method in table["method"]])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds per new token")
    add_legend(figure, axes)
    parts = []
    for _, row in table.iterrows():
        known = [f"{labels[p]} {row[p]:.3g}" for p in labels if not pd.isna(row[p]) and row[p]]
        parts.append(f"{row['method']} {row['total']:.3g} ({', '.join(known)})")
    alt = f"Milliseconds per new token, by phase: {'; '.join(parts)}."
    return Plot("phases", "Where the time goes", alt, figure)


def draft_lengths(run: Run) -> Plot | None:
    """Tokens drafted and accepted, round by round, of one prompt's text."""
    record = next(
        (r for r in run.records if r["method"] in run.drafting[:1] and rounds_of(r)), None
    )
    if record is None:
        return None
    names = ("drafted", "accepted", "emitted")
    first = {name: [row[:1] for row in record["rounds"][name]] for name in names}
    rounds = rounds_of(record | {"rounds": first})
    if not rounds:
        return None
    places = np.arange(1, len(rounds) + 1)
    drafted = np.array([r.drafted for r in rounds])
    accepted = np.array([r.accepted for r in rounds])
    figure, axes = new_figure(2.7)
    axes.bar(places, drafted, width=0.85, facecolor=PAPER, edgecolor=MUTED, hatch="////",
             linewidth=0.5, label="drafted")  # fmt: skip
    axes.bar(places, accepted, width=0.85, color=BLUE, label="of them accepted")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, len(rounds) + 1)
    axes.set_ylim(0, max(1, drafted.max()) * 1.08)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("round")
    axes.set_ylabel("tokens")
    add_legend(figure, axes)
    prompt = clipped(str(record["prompts"][0]), 40)
    alt = (
        f"{record['method']} on prompt {prompt}: {len(rounds)} rounds drafted {drafted.mean():.1f} "
        f"tokens on average ({drafted.min()} to {drafted.max()}), {accepted.mean():.1f} accepted; "
        f"{(drafted == 0).sum()} rounds drafted nothing."
    )
    return Plot("draft-length", f"Draft length over time, prompt {prompt}", alt, figure)
