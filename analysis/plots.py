"""Knows how measured tables look as pictures, and says each in words too; computes nothing anew.

Every function takes a run (or all of them) and returns a `Plot`, or None where there is nothing to
draw. Its `alt` says what it shows, with the numbers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
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
    marker_of,
    new_figure,
)
from layerskip.analysis.runs import Run, rounds_of

HATCHES = {"prefill": "", "draft": "///", "verify": "\\\\\\", "other": "xxx", "rest": ""}


def run_plots(run: Run) -> list[Plot]:
    """All plots of one run that its records have data for."""
    drawn: list[Plot | None] = []
    with mpl.rc_context(STYLE):
        drawn += [speedups(run, batch_size) for batch_size in run.batch_sizes]
        makers: Sequence[Callable[[Run], Plot | None]] = (
            batches,
            phases,
            positions,
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
        return [
            plot for plot in (overview(runs), model_plots.all_forecasts(runs)) if plot is not None
        ]


def speedups(run: Run, batch_size: int) -> Plot | None:
    """Every method's speedup over the baseline with its interval, by category."""
    table = tables.speedup(run)
    table = table[(table["over"] == run.baseline) & (table["batch_size"] == batch_size)]
    methods = [m for m in run.measured if m != run.baseline and m in set(table["method"])]
    if not methods:
        return None
    categories = [tables.ALL, *run.categories]
    lanes = len(categories) + 1
    figure, axes = new_figure(1.2 + 0.17 * lanes * len(methods))
    for place, category in enumerate(categories):
        rows = table[table["category"] == category].set_index("method")
        rows = rows.loc[[m for m in methods if m in rows.index]]
        heights = [methods.index(m) * lanes + place for m in rows.index]
        _intervals(axes, rows, heights, place)
    for number, method in enumerate(methods):
        row = table[(table["method"] == method) & (table["category"] == tables.ALL)].iloc[0]
        axes.annotate(
            _short(row),
            (1.0, number * lanes),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.axvline(1, color=INK, linewidth=1.2)
    middle = (len(categories) - 1) / 2
    names = [clipped(method, 30) for method in methods]
    axes.set_yticks([n * lanes + middle for n in range(len(methods))], names)
    axes.set_ylim(len(methods) * lanes - 1, -1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"times as fast as {run.baseline} (95% interval over prompts)")
    add_legend(figure, axes)
    several = len(run.batch_sizes) > 1
    return Plot(
        f"speedup-batch-{batch_size}" if several else "speedup",
        f"Speedup over {run.baseline}" + (f", batch size {batch_size}" if several else ""),
        f"Speed relative to {run.baseline}, "
        + "; ".join(
            ("all prompts: " if category == tables.ALL else f"{category}: ")
            + ", ".join(
                f"{row['method']} {_short(row)}"
                for _, row in table[table["category"] == category].iterrows()
                if row["method"] != run.baseline
            )
            for category in categories
        )
        + ".",
        figure,
    )


def batches(run: Run) -> Plot | None:
    """Speedup over the baseline by batch size."""
    if len(run.batch_sizes) < 2:
        return None
    table = tables.comparison([run])
    figure, axes = new_figure(3.4)
    words = []
    for number, method in enumerate(m for m in run.measured if m != run.baseline):
        rows = table[table["method"] == method]
        axes.plot(
            rows["batch_size"], rows["speedup"], color=colour_of(number), marker=marker_of(number),
            label=method,
        )  # fmt: skip
        axes.fill_between(
            rows["batch_size"], rows["low"], rows["high"], color=colour_of(number), alpha=0.15
        )
        values = (f"{r['speedup']:.2f} at {r['batch_size']}" for _, r in rows.iterrows())
        words.append(f"{method} {', '.join(values)}")
    axes.axhline(1, color=INK, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(run.batch_sizes, [str(size) for size in run.batch_sizes])
    axes.set_xlabel("prompts in a batch")
    axes.set_ylabel(f"times as fast as {run.baseline}")
    add_legend(figure, axes)
    alt = f"Speed relative to {run.baseline} by batch size: {'; '.join(words)}."
    return Plot("batch-sizes", "Speedup by batch size", alt, figure)


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


def positions(run: Run) -> Plot | None:
    """Acceptance by place in the draft."""
    table = tables.positions(run)
    if not len(table):
        return None
    figure, axes = new_figure(3.3)
    words = []
    for number, (method, rows) in enumerate(table.groupby("method", sort=False)):
        rows = rows[rows["tried"] > 0]
        axes.plot(
            rows["position"], rows["acceptance"], color=colour_of(number), marker=marker_of(number),
            label=str(method),
        )  # fmt: skip
        values = (f"{r['acceptance']:.2f} at {r['position']:.0f}" for _, r in rows.iterrows())
        words.append(f"{method} {', '.join(values)}")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("place in the draft (1: first drafted token)")
    axes.set_ylabel("accepted, if all before were")
    add_legend(figure, axes)
    alt = f"Share of drafted tokens accepted where all before them were: {'; '.join(words)}."
    return Plot("acceptance-by-position", "Acceptance by draft position", alt, figure)


def draft_lengths(run: Run) -> Plot | None:
    """Tokens drafted and accepted, round by round, of one prompt's text."""
    record = next(
        (r for r in run.records if r["method"] in run.drafting[:1] and rounds_of(r)), None
    )
    if record is None:
        return None
    rounds = [r for r in rounds_of(record | {"rounds": _first_row(record)})]
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


def overview(runs: Sequence[Run]) -> Plot | None:
    """Every run's methods over its baseline, all prompts, at the smallest batch size."""
    table = tables.comparison(list(runs))
    methods = list(dict.fromkeys(m for run in runs for m in run.measured if m != run.baseline))
    if not methods:
        return None
    lanes = len(methods) + 1
    figure, axes = new_figure(1.4 + 0.15 * lanes * len(runs))
    words = []
    for run in runs:
        rows = table[(table["run"] == run.label) & (table["batch_size"] == run.batch_sizes[0])]
        rows = rows[rows["method"] != run.baseline]
        words.append(
            f"{run.label}: " + ", ".join(f"{r['method']} {_short(r)}" for _, r in rows.iterrows())
        )
    for place, method in enumerate(methods):
        rows = table[table["method"] == method].drop_duplicates("run").set_index("run")
        heights = [n * lanes + place for n, run in enumerate(runs) if run.label in rows.index]
        rows = rows.loc[[run.label for run in runs if run.label in rows.index]]
        _intervals(axes, rows, heights, place, label=method)
    axes.axvline(1, color=INK, linewidth=1.2)
    middle = (len(methods) - 1) / 2
    labels = [textwrap.fill(clipped(run.label, 80), 22) for run in runs]
    axes.set_yticks([n * lanes + middle for n in range(len(runs))], labels)
    axes.set_ylim(len(runs) * lanes - 1, -1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("times as fast as the baseline")
    add_legend(figure, axes)
    alt = f"Speed relative to each run's baseline. {'. '.join(words)}."
    return Plot("overview", "All runs side by side", alt, figure)


def _intervals(
    axes: Axes, rows: pd.DataFrame, heights: Sequence[float], place: int, label: str = ""
) -> None:
    """Points with their intervals; one without an interval is drawn hollow."""
    bars = np.stack([rows["speedup"] - rows["low"], rows["high"] - rows["speedup"]])  # (2, n)
    hollow = bool(rows["low"].isna().any())
    axes.errorbar(
        rows["speedup"], heights, xerr=np.nan_to_num(bars).clip(0), fmt=marker_of(place),
        color=colour_of(place), markersize=6.5, elinewidth=1.6, capsize=2.5,
        markerfacecolor=PAPER if hollow else colour_of(place),
        label=label or (rows["category"].iloc[0] if len(rows) else ""),
    )  # fmt: skip


def _first_row(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [row[:1] for row in record["rounds"][name]]
        for name in ("drafted", "accepted", "emitted")
    }


def _short(row: Any) -> str:
    if pd.isna(row["low"]):
        return f"{row['speedup']:.2f}"
    return f"{row['speedup']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
