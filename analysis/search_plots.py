"""Knows how a layer search looks as pictures, and says each in words too; computes nothing anew.

Every function takes a search and returns a `Plot`, or None where there is nothing to draw.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from layerskip.analysis import search_tables, shared_plots
from layerskip.analysis.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    MARKERS,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    WIDTH,
    Plot,
    add_legend,
    colour_of,
    layer_ticks,
    listed,
    marker_of,
    new_figure,
)
from layerskip.analysis.search_tables import ORIGINS, PAYS, Search
from layerskip.costs.speculation import CostTable

OTHERS = 15  # trials on the skip map beside the finalists
MANY = 200  # trials from which on points are small
KINDS = {
    "attention": (BLUE, "o", 0.5),
    "mlp": (ORANGE, "s", 1.5),
    "layer": (GREEN, "^", 1.0),
}
"""How a switch looks: its colour, marker, and its place among the layer's two columns."""
PANELS = {
    "importance": ("importance", 0.0),
    "alone_speedup": ("speedup, forced,\nleft out alone", 1.0),
    "alone_acceptance": ("acceptance,\nleft out alone", 1.0),
}
"""What is shown of every switch: its words, and the value from which it is drawn."""


def search_plots(search: Search) -> list[Plot]:
    """All plots of one search that its file has data for."""
    makers = (history, pareto, skip_map, sublayers, forecasts)
    drawn = [maker(search) for maker in makers]
    return [plot for plot in drawn if plot is not None]


def history(search: Search) -> Plot | None:
    """Every trial's score by number, marked by what proposed it, and the best so far."""
    table = search.complete
    if not len(table):
        return None
    figure, axes = new_figure(4.0)
    axes.axhline(1, color=INK, linewidth=1.2)
    axes.step(
        table["number"], table["best_so_far"], where="post", color=INK, linewidth=1.6,
        linestyle="--", label="best so far",
    )  # fmt: skip
    size = 3.5 if len(table) > MANY else 5.5
    words = []
    for (kind, name), colour, marker in zip(ORIGINS.items(), COLOURS, MARKERS, strict=False):
        rows = table[table["kind"] == kind]
        if not len(rows):
            continue
        pays = rows["score"] > PAYS
        for some, face in ((rows[~pays], PAPER), (rows[pays], colour)):
            axes.plot(
                some["number"], some["score"], marker, color=colour, markerfacecolor=face,
                markersize=size, markeredgewidth=0.9,
            )  # fmt: skip
        axes.plot([], [], marker, color=colour, label=name)
        words.append(f"{len(rows)} {name}, best {rows['score'].max():.2f}")
    if (table["score"] <= PAYS).any():
        axes.plot([], [], "o", color=MUTED, markerfacecolor=PAPER, label="hollow: does not pay")
    failed = len(search.trials) - len(table)
    if failed:
        words.append(f"{failed} failed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trial")
    axes.set_ylabel("priced speedup over plain")
    add_legend(figure, axes)
    best = table.loc[table["score"].idxmax()]
    alt = (
        f"Priced speedup of {len(table)} trials: {'; '.join(words)}. The best, trial "
        f"{best['number']}, has {best['score']:.2f}."
    )
    return Plot("search-history", "How the search went", alt, figure)


def pareto(search: Search) -> Plot | None:
    """Acceptance against cost of all trials, their front, and curves of equal speedup."""
    table = search.complete
    table = table[table["acceptance"].notna() & table["copy_of"].isna()]
    if not len(table):
        return None
    known = search_tables.finalists(search)
    known = known.dropna(subset=["alpha"]) if len(known) else known
    figure, axes = new_figure(4.6)
    dearest = max([1.0, table["draft_cost"].max(), *(known["draft_cost"] if len(known) else ())])
    least = min([table["acceptance"].min(), *(known["alpha"] if len(known) else ())])
    axes.set_xlim(0, dearest * 1.02)
    axes.set_ylim(max(0.0, least - 0.05), 1)
    if search.finalists:
        first = search.finalists[0]
        costs = CostTable(first["draft_cost"], tuple(first["verify"]))
        longest = max(1, search.document["trace"]["draft_length"])
        shared_plots.equal_speedups(axes, costs, longest)
    size = 3 if len(table) > MANY else 4.5
    exits, low = (
        table["origin"].str.startswith("seed:exit"),
        table.reindex(columns=["rounded"])["rounded"].notna(),
    )
    for rows, colour, marker, name in (
        (table[~exits & ~low], SKY, "o", "sets of sublayers"),
        (table[exits & ~low], GREEN, "^", "early exits"),
        (table[low], PURPLE, "s", "partly in low precision"),
    ):
        if len(rows):
            axes.plot(
                rows["draft_cost"], rows["acceptance"], marker, color=colour, markersize=size,
                label=name, clip_on=False,
            )  # fmt: skip
    front = table[table["front"]].sort_values(["draft_cost", "acceptance"])
    axes.step(
        front["draft_cost"], front["acceptance"], where="post", color=INK, linewidth=1.3,
        label="not dominated",
    )  # fmt: skip
    for number, (_, row) in enumerate(known.iterrows()):
        axes.plot(
            row["draft_cost"], row["alpha"], marker_of(number), color=colour_of(number),
            markersize=8, markeredgecolor=INK, label=_name(row), zorder=4, clip_on=False,
        )  # fmt: skip
    shared_plots.name_plane(axes)
    add_legend(figure, axes)
    few = front.iloc[np.unique(np.linspace(0, len(front) - 1, min(5, len(front))).astype(int))]
    points = listed(few, "{acceptance:.2f} at {draft_cost:.2f}")
    names = listed(known, "{name} accepts {alpha:.2f} at c {draft_cost:.2f}", "; ")
    alt = (
        f"Acceptance against draft cost of {len(table)} trials. {len(front)} are not dominated, "
        f"among them acceptance {points}. {names or 'No finalist drafts'}."
    )
    return Plot("search-pareto", "Acceptance against cost", alt, figure)


def skip_map(search: Search) -> Plot | None:
    """What finalists and the best other trials leave out or round, a row each."""
    chosen = search_tables.finalists(search)
    trials = {trial["number"]: trial for trial in search.document["trials"]}
    rows: list[shared_plots.Row] = []
    for finalist, (_, line) in zip(search.finalists, chosen.iterrows(), strict=True):
        speedup = line["forecast"] if np.isnan(line["measured"]) else line["measured"]
        rows.append(
            shared_plots.Row(_name(line), finalist["skipped"], finalist.get("low"), speedup)
        )
    told = len(rows)
    others = search_tables.best_trials(search, OTHERS + told)
    others = others[~others["number"].isin(chosen["trial"] if told else [])].head(OTHERS)
    for _, line in others.iterrows():
        seed = line["origin"].removeprefix("seed:") if line["kind"] == "seed" else ""
        trial = trials[line["number"]]
        rows.append(
            shared_plots.Row(
                seed or f"trial-{line['number']}",
                trial["skipped"],
                trial.get("low"),
                line["score"],
            )
        )
    if not rows:
        return None
    return shared_plots.skip_map("search-skip-map", rows, search.num_layers, told)


def sublayers(search: Search) -> Plot | None:
    """By switch: importance, and what leaving it out alone does to speed and acceptance."""
    table = search_tables.sublayers(search)
    if len(table):
        table = table[table["sublayer"].isin(KINDS)]
    panels = [name for name in PANELS if len(table) and table[name].notna().any()]
    if not panels:
        return None
    layers = search.num_layers
    figure = Figure(figsize=(WIDTH, 1.2 + 1.55 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    size = 5.0 if layers <= 32 else 2.5
    words = []
    for axes, name in zip(grid, panels, strict=True):
        label, base = PANELS[name]
        for kind, (colour, marker, place) in KINDS.items():
            rows = table[table["sublayer"] == kind]
            places = 2 * rows["layer"] + place
            axes.vlines(places, base, rows[name], color=colour, linewidth=size / 3)
            axes.plot(
                places, rows[name], marker, color=colour, markersize=size,
                label=kind if len(rows) else None,
            )  # fmt: skip
        axes.axhline(base, color=INK, linewidth=1)
        axes.set_ylabel(label, fontsize=9.5)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.margins(y=0.1)
        axes.grid(axis="x", visible=False)
        known = table.dropna(subset=[name]).sort_values(name, ascending=False)
        form = f"{{switch}} {{{name}:.3f}}"
        most, least = listed(known.head(3), form), listed(known.tail(1), form)
        words.append(f"{' '.join(label.split())}: highest {most}; lowest {least}")
    grid[-1].set_xlim(0, 2 * layers)
    layer_ticks(grid[-1], layers)
    grid[-1].set_xlabel("layer")
    add_legend(figure, grid[0])
    alt = f"{len(table)} switches by layer. {'. '.join(words)}."
    return Plot("search-sublayers", "What every sublayer is worth", alt, figure)


def forecasts(search: Search) -> Plot | None:
    """Finalists' predicted speedups, on held-out prompts where known, against measured ones."""
    table = search_tables.finalists(search)
    table = table[table["measured"].notna()] if len(table) else table
    if not len(table):
        return None
    table = table.assign(name=[_name(row) for _, row in table.iterrows()])
    title = "Finalists: predicted and measured"
    return shared_plots.forecasts("search-forecasts", title, table, "name")


def _name(finalist: pd.Series) -> str:
    """A finalist's name, the winner's with a word."""
    return f"{finalist['name']}{' (winner)' if 'winner' in finalist['role'] else ''}"
