"""The plots of a report; None if there is nothing to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator

from layerskip.analysis import drawing, run_tables, training_tables
from layerskip.analysis.drawing import BLUE, GREEN, INK, LINE, MUTED, ORANGE, PAPER, PURPLE, SKY
from layerskip.analysis.labels import ranged
from layerskip.analysis.runs import ALL, Run

PHASES = {
    "prefill": ("prefill", SKY, ""),
    "draft": ("drafting", ORANGE, "///"),
    "verify": ("verifying", BLUE, "\\\\\\"),
    "other": ("accepting and other", PURPLE, "xxx"),
    "rest": ("not measured apart", LINE, ""),
}
"""The appearance of a phase: word, colour and hatch."""
SIDES = {"attention": BLUE, "mlp": ORANGE}
"""Kinds of sublayers on a skip map, in their order in a layer, with their colours."""


def run_plots(run: Run) -> list[drawing.Plot]:
    drawn = [plot(run, size) for plot in (contexts, speedups) for size in run.batch_sizes]
    drawn += [positions(run), phases(run), run_skip_map(run)]
    priced = run_tables.sweeps(run)
    drawn += [heat_map(priced, name) for name in HEATED if len(priced)]
    return [plot for plot in drawn if plot is not None]


def _named(run: Run, name: str, title: str, batch_size: int) -> tuple[str, str]:
    """Name and title of a plot for one batch size, which they state if there are several."""
    if len(run.batch_sizes) == 1:
        return name, title
    return f"{name}-batch-{batch_size}", f"{title}, batch size {batch_size}"


def speedups(run: Run, batch_size: int) -> drawing.Plot | None:
    """Speedups over the baseline by method and category; hollow without an interval."""
    table = run_tables.speedup(run)
    table = table[(table["over"] == run.baseline) & (table["batch_size"] == batch_size)]
    table = table[table["method"] != run.baseline]
    if not len(table):
        return None
    ends = (table[name] for name in ("speedup", "low", "high"))
    table = table.assign(words=[*map(ranged, *ends)])
    methods, categories = (list(table[name].unique()) for name in ("method", "category"))
    lanes = len(categories) + 1
    labels, tall = drawing.in_lines(methods)
    axes = drawing.new_axes(1.3 + 0.16 * max(lanes, tall) * len(methods))
    for place, category in enumerate(categories):
        rows = table[table["category"] == category]
        colour = drawing.colour_of(place)
        axes.errorbar(
            rows["speedup"], [methods.index(name) * lanes + place for name in rows["method"]],
            xerr=drawing.error_bars(rows, "speedup"), fmt=drawing.marker_of(place), color=colour,
            markerfacecolor=PAPER if rows["low"].isna().any() else colour, markersize=6.5,
            elinewidth=1.6, capsize=2.5, label=category,
        )  # fmt: skip
    for number, text in enumerate(table[table["category"] == ALL]["words"]):
        drawing.note_at_the_side(axes, text, number * lanes)
    axes.axvline(1, color=INK, linewidth=1.2)
    middle = (len(categories) - 1) / 2
    axes.set_yticks([n * lanes + middle for n in range(len(methods))], labels)
    axes.set_ylim(len(methods) * lanes - 1, -1)
    axes.grid(axis="y", visible=False)
    whole = drawing.listed(table[table["category"] == ALL], "{method} {words}")
    return drawing.finished(
        axes,
        *_named(run, "speedup", f"Speedup over {run.baseline}", batch_size),
        f"Speed relative to {run.baseline}: {whole}.",
        f"times as fast as {run.baseline} (95% interval over prompts)",
    )


def contexts(run: Run, batch_size: int) -> drawing.Plot | None:
    """Speed after the first tokens by context length, with slowest and fastest calls."""
    table = run_tables.decoding(run)
    if not len(table):
        return None  # every text ended with its first token
    table = table[(table["batch_size"] == batch_size) & table["context"].notna()]
    if table["context"].nunique() < 2:
        return None
    table = table.sort_values("context", kind="stable")
    axes = drawing.new_axes(4.2)
    form = "{tokens_per_second:.1f} at {context:,.0f}"
    words = drawing.lines(axes, table, "method", "context", "tokens_per_second", form)
    for method, rows in table.groupby("method", sort=False):
        if run.methods[str(method)]["kind"] == "plain" and rows["share"].notna().all():
            axes.plot(
                rows["context"], rows["tokens_per_second"] / rows["share"], color=MUTED,
                linestyle="--", linewidth=1.2, label="what memory allows plain",
            )  # fmt: skip
    places = sorted(table["context"].unique())
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    return drawing.finished(
        axes,
        *_named(run, "contexts", "Speed by length of context", batch_size),
        f"Tokens a second after the first, by tokens of context: {words}.",
        "tokens of context",
        "tokens a second",
    )


def positions(run: Run) -> drawing.Plot | None:
    """Acceptance by place in the draft, for tokens after accepted ones only."""
    table = run_tables.positions(run)
    table = table[table["tried"] > 0] if len(table) else table
    if not len(table):
        return None
    axes = drawing.new_axes(3.6)
    words = drawing.lines(axes, table, "method", "position", "acceptance", "{acceptance:.2f}")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    alt = f"Acceptance of the first, second, ... drafted token: {words}."
    where, what = "place in the draft", "accepted, if all before it were"
    return drawing.finished(axes, "positions", "Acceptance by position", alt, where, what)


def phases(run: Run) -> drawing.Plot:
    """The parts of the time per token, at the smallest batch size."""
    table = run_tables.phases(run)
    table = table[table["batch_size"] == run.batch_sizes[0]]
    names, tall = drawing.in_lines(table["method"])
    axes = drawing.new_axes(1.3 + max(0.38, 0.18 * tall) * len(table))
    places = np.arange(len(table))  # (methods,)
    left = np.zeros(len(table))  # (methods,)
    for phase, (word, colour, hatch) in PHASES.items():
        values = table[phase].fillna(0.0).to_numpy()
        if values.any():
            axes.barh(
                places, values, left=left, label=word, color=colour, hatch=hatch,
                edgecolor=INK, linewidth=0.5,
            )  # fmt: skip
        left += values
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    alt = f"Milliseconds per new token: {drawing.listed(table, '{method} {total:.3g}')}."
    return drawing.finished(
        axes, "phases", "Where the time goes", alt, "milliseconds per new token"
    )


HEATED = {
    "acceptance_rate": ("Acceptance", "share of drafted tokens that are accepted"),
    "tokens_per_pass": ("Tokens a pass", "tokens per pass of the whole model"),
    "speedup": ("Predicted speedup", "predicted speedup over plain decoding"),
}
"""The numbers of a sweep that are drawn: title, and description."""


def heat_map(table: pd.DataFrame, name: str) -> drawing.Plot:
    """Replayed decoding by exit and draft length; the best cell is framed."""
    title, what = HEATED[name]
    form = "{:.2f}"
    cells = table.pivot_table(index="draft_length", columns="exit", values=name)
    values = cells.to_numpy()  # (lengths, exits)
    axes = drawing.new_axes(1.4 + 0.3 * len(cells))
    axes.figure.colorbar(axes.pcolormesh(values, cmap="cividis"), ax=axes)
    light = (values - np.nanmin(values)) > 0.55 * np.ptp(values)
    small = 9 if len(cells.columns) <= 12 else 6
    if len(cells.columns) <= 20:
        for (row, column), value in np.ndenumerate(values):
            axes.text(
                column + 0.5, row + 0.5, form.format(value), ha="center", va="center",
                fontsize=small, color="black" if light[row, column] else "white",
            )  # fmt: skip
    row, column = map(int, np.unravel_index(np.nanargmax(values), values.shape))
    axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=ORANGE, lw=2))
    axes.set_xticks(np.arange(len(cells.columns)) + 0.5, list(map(str, cells.columns)))
    axes.set_yticks(np.arange(len(cells)) + 0.5, list(map(str, cells.index)))
    axes.grid(visible=False)
    best = f"{form.format(values[row, column])} at exit {cells.columns[column]}"
    alt = (
        f"{title} by exit layer and draft length: from {form.format(np.nanmin(values))} to {best} "
        f"with {cells.index[row]} drafted tokens."
    )
    return drawing.finished(
        axes,
        f"sweep-{name}",
        f"{title} by exit",
        alt,
        f"exit layer\n(cells: {what})",
        "draft length",
    )


def run_skip_map(run: Run) -> drawing.Plot | None:
    table = run_tables.comparison([run])
    first = table[table["batch_size"] == run.batch_sizes[0]].set_index("method")["speedup"]
    rows = [(name, run.methods[name], first.get(name, np.nan)) for name in run.drafting]
    return skip_map("skip-map", rows, run.header["model"]["num_layers"]) if rows else None


def skip_map(
    name: str, rows: Sequence[tuple[str, Mapping[str, Any], float]], layers: int
) -> drawing.Plot:
    """What drafts skip or round; for each its name, its entry in the file, and its speedup."""
    names, tall = drawing.in_lines(name for name, _, _ in rows)
    axes = drawing.new_axes(1.3 + max(0.21, 0.16 * tall) * (len(rows) + 1))
    bits = sorted({draft["low"]["bits"] for _, draft, _ in rows if draft.get("low")})
    looks = {f"{kind} left out": colour for kind, colour in SIDES.items()}
    looks |= {f"in {' or '.join(map(str, bits))} bits; last: the head": GREEN} if bits else {}
    cells = np.full((len(rows), 2 * layers + bool(bits)), np.nan)  # (drafts, sublayers and head)
    for number, (_, draft, speedup) in enumerate(rows):
        row, low = cells[number], draft.get("low") or {"head": False}
        for place, kind in enumerate(SIDES):
            row[[2 * layer + place for layer in low.get(kind, ())]] = 2
            row[[2 * layer + place for layer in draft["skipped"][kind]]] = place
        if low["head"]:
            row[-1] = 2
        if not np.isnan(speedup):
            drawing.note_at_the_side(axes, f"{speedup:.2f}", number + 0.5)
    axes.pcolormesh(
        np.ma.masked_invalid(cells), cmap=ListedColormap([*SIDES.values(), GREEN]), vmin=0, vmax=2,
        edgecolors=PAPER, linewidth=0.5 if layers <= 32 else 0.0,
    )  # fmt: skip
    for label, colour in looks.items():
        axes.bar([0], [0], color=colour, label=label)
    shown = range(0, layers, -(-layers // 16))  # about a dozen ticks
    axes.set_xlim(0, cells.shape[1])
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([2 * layer + 1.0 for layer in shown], list(map(str, shown)))
    axes.set_yticks(np.arange(len(rows)) + 0.5, names, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.hlines(range(1, len(rows)), 0, cells.shape[1], colors=PAPER, linewidth=4)
    out = [f"{label} {sum(map(len, draft['skipped'].values()))}" for label, draft, _ in rows]
    alt = f"Sublayers left out of {2 * layers}: {', '.join(out)}."
    title = "What the drafts leave out" + " or round" * bool(bits)
    return drawing.finished(axes, name, title, alt, "layer (right: speedup, predicted if untimed)")


def training_curve(of: training_tables.Trainings) -> drawing.Plot:
    """Overlap of the first step with the target's distribution, by tokens of training."""
    table = training_tables.curves(of).query("step == 1")
    names = table["draft"].unique()
    axes = drawing.new_axes(3.6 + 0.2 * sum(1 + len(name) // 56 for name in names))
    drawing.lines(axes, table, "draft", "tokens", "overlap", "")
    ends = table.drop_duplicates("draft", keep="last")
    words = drawing.listed(ends, "{draft} {overlap:.3f} after {tokens:,} tokens", "; ")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    alt = f"Overlap of the first drafted token with the target's distribution: {words}."
    title, overlap = "Overlap against tokens of training", "overlap with the target's distribution"
    return drawing.finished(axes, "training-curve", title, alt, "tokens trained on", overlap)
