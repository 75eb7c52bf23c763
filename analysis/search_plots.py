"""Knows how a layer search looks as pictures, and says each in words too; computes nothing anew.

Every function takes a search and returns a `Plot`, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from layerskip.analysis import search_tables
from layerskip.analysis.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    LINE,
    MARKERS,
    MUTED,
    ORANGE,
    PAPER,
    RED,
    SKY,
    STYLE,
    WIDTH,
    Plot,
    add_legend,
    as_predicted,
    clipped,
    error_bars,
    few_ticks,
    listed,
    new_figure,
    note_at_the_side,
)
from layerskip.analysis.model_plots import best_speedups
from layerskip.analysis.search_tables import ORIGINS, PAYS, Search
from layerskip.costs.speculation import CostTable

OTHERS = 15  # trials on the skip map beside the finalists
MANY = 200  # trials from which on points are small
LEVELS = (1.0001, 1.1, 1.25, 1.5, 2, 3, 4, 6, 10, 20, 50)
KINDS = {
    "attention": ("attention", BLUE, "o", 0.5),
    "mlp": ("MLP", ORANGE, "s", 1.5),
    "layer": ("whole layer", GREEN, "^", 1.0),
}
"""How a switch looks: its word, colour, marker, and its place among the layer's two columns."""


def search_plots(search: Search) -> list[Plot]:
    """All plots of one search that its file has data for."""
    makers: Sequence[Callable[[Search], Plot | None]] = (
        history,
        pareto,
        skip_map,
        sublayers,
        forecasts,
    )
    with mpl.rc_context(STYLE):
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
    failed = search.trials[search.trials["state"] != "complete"]["number"]
    if len(failed):
        axes.plot(
            failed, [0.02] * len(failed), "x", color=RED, label="failed",
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        words.append(f"{len(failed)} failed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trial")
    axes.set_ylabel("priced speedup over plain")
    add_legend(figure, axes)
    best = table.loc[table["score"].idxmax()]
    alt = (
        f"Priced speedup of {len(table)} trials: {'; '.join(words)}. The best, trial "
        f"{best['number']}, has {best['score']:.2f}; the best of the first tenth had "
        f"{table['score'].iloc[: max(1, len(table) // 10)].max():.2f}."
    )
    return Plot("search-history", "How the search went", alt, figure)


def pareto(search: Search) -> Plot | None:
    """Acceptance against cost of all trials, their front, and curves of equal speedup."""
    table = search.complete
    table = table[table["acceptance"].notna() & table["copy_of"].isna()]
    if not len(table):
        return None
    chosen = search_tables.finalists(search).head(12)
    figure, axes = new_figure(4.6)
    axes.set_xlim(0, max(1.0, table["draft_cost"].max()) * 1.02)
    axes.set_ylim(max(0.0, table["acceptance"].min() - 0.05), 1)
    levels = equal_speedups(search, axes)
    size = 3 if len(table) > MANY else 4.5
    exits = table["origin"].str.startswith("seed:exit")
    for rows, colour, marker, name in (
        (table[~exits], SKY, "o", "sets of sublayers"),
        (table[exits], GREEN, "^", "early exits"),
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
    known = chosen.dropna(subset=["alpha"]) if len(chosen) else chosen
    if len(known):
        axes.plot(
            known["draft_cost"], known["alpha"], "D", color=RED, markersize=6.5,
            markeredgecolor=INK, label="finalists", zorder=4, clip_on=False,
        )  # fmt: skip
        _label_at_the_side(axes, known["draft_cost"], known["alpha"], _names(known))
    if levels:
        axes.plot([], [], color=MUTED, linewidth=0.8, linestyle=":", label="equal speedup (above)")
    axes.set_xlabel("c: draft step / target step")
    axes.set_ylabel("alpha: a draft token is accepted")
    add_legend(figure, axes)
    points = listed(_few(front), "{acceptance:.2f} at {draft_cost:.2f}")
    names = listed(known, "{name} accepts {alpha:.2f} at c {draft_cost:.2f}", "; ")
    alt = (
        f"Acceptance against draft cost of {len(table)} trials. {len(front)} are not dominated, "
        f"among them acceptance {points}. {names or 'No finalist drafts'}."
    )
    return Plot("search-pareto", "Acceptance against cost", alt, figure)


def skip_map(search: Search) -> Plot | None:
    """What finalists and the best other trials leave out, a row each."""
    chosen = search_tables.finalists(search)
    skipped = {t["number"]: t.get("skipped") for t in search.document["trials"]}
    rows: list[tuple[str, dict[str, list[int]], float]] = []
    for finalist, (_, line) in zip(search.finalists, chosen.iterrows(), strict=True):
        score = line["forecast"] if np.isnan(line["measured"]) else line["measured"]
        rows.append((_names(line.to_frame().T)[0], finalist["skipped"], score))
    count = len(rows)
    others = search_tables.best_trials(search, OTHERS + count)
    others = others[~others["number"].isin(chosen["trial"] if count else [])].head(OTHERS)
    for _, line in others.iterrows():
        rows.append((_trial_name(line), skipped[line["number"]], line["score"]))
    if not rows:
        return None
    layers = search.num_layers
    figure, axes = new_figure(1.3 + 0.21 * (len(rows) + 1))
    heights = [place + (place >= count > 0) * 0.6 for place in range(len(rows))]
    for height, (_, sets, score) in zip(heights, rows, strict=True):
        note_at_the_side(axes, f"{score:.2f}", height)
        axes.add_patch(
            Rectangle((0, height - 0.4), 2 * layers, 0.8, facecolor=PAPER, edgecolor=LINE)
        )
        for kind in ("attention", "mlp"):
            _, colour, _, place = KINDS[kind]
            axes.broken_barh(
                [(2 * layer + place - 0.5, 1) for layer in sets[kind]], (height - 0.4, 0.8),
                facecolor=colour, edgecolor=PAPER, linewidth=0.5 if layers <= 32 else 0.0,
            )  # fmt: skip
    for kind in ("attention", "mlp"):
        axes.bar([0], [0], color=KINDS[kind][1], label=f"{KINDS[kind][0]} left out")
    axes.set_xlim(0, 2 * layers)
    axes.set_ylim(heights[-1] + 0.7, -0.7)
    axes.set_yticks(heights, [clipped(name, 28) for name, _, _ in rows], fontsize=9)
    axes.tick_params(axis="y", length=0)
    _layer_ticks(axes, layers)
    axes.grid(visible=False)
    axes.set_xlabel("layer (right: speedup, measured for finalists that were timed)")
    add_legend(figure, axes)
    words = "; ".join(
        f"{name} leaves out attention of layers {line['attention']} and MLP of layers "
        f"{line['mlp']}, speedup {score:.2f}"
        for (name, _, score), (_, line) in zip(rows, chosen.iterrows(), strict=False)
    )
    alt = f"What {count} finalists and {len(rows) - count} other trials leave out. {words}."
    return Plot("search-skip-map", "What the best sets leave out", alt, figure)


def sublayers(search: Search) -> Plot | None:
    """By switch: importance, and what leaving it out alone does to speed and acceptance."""
    table = search_tables.sublayers(search)
    if len(table):
        table = table[table["sublayer"].isin(KINDS)]
    panels = [
        (name, label, base)
        for name, label, base in (
            ("importance", "importance", 0.0),
            ("alone_speedup", "speedup, forced,\nleft out alone", 1.0),
            ("alone_acceptance", "acceptance,\nleft out alone", 1.0),
        )
        if len(table) and table[name].notna().any()
    ]
    if not panels:
        return None
    layers = search.num_layers
    figure = Figure(figsize=(WIDTH, 1.2 + 1.55 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    size = 5.0 if layers <= 32 else 2.5
    for axes, (name, label, base) in zip(grid, panels, strict=True):
        for kind, (word, colour, marker, place) in KINDS.items():
            rows = table[(table["sublayer"] == kind) & table[name].notna()]
            if not len(rows):
                continue
            places = 2 * rows["layer"] + place
            axes.vlines(places, base, rows[name], color=colour, linewidth=size / 3)
            axes.plot(places, rows[name], marker, color=colour, markersize=size, label=word)
        axes.axhline(base, color=INK, linewidth=1)
        axes.set_ylabel(label, fontsize=9.5)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.margins(y=0.1)
    grid[-1].set_xlim(0, 2 * layers)
    _layer_ticks(grid[-1], layers)
    for axes in grid:
        axes.grid(axis="x", visible=False)
    grid[-1].set_xlabel("layer")
    add_legend(figure, max(grid, key=lambda axes: len(axes.get_legend_handles_labels()[1])))
    words = []
    for name, label, _ in panels:
        known = table.dropna(subset=[name]).sort_values(name, ascending=False)
        ends = (known.head(3), known.tail(1))
        values = [", ".join(f"{r['switch']} {r[name]:.3f}" for _, r in e.iterrows()) for e in ends]
        words.append(f"{' '.join(label.split())}: highest {values[0]}; lowest {values[1]}")
    alt = f"{len(table)} switches by layer. {'. '.join(words)}."
    return Plot("search-sublayers", "What each sublayer is worth", alt, figure)


def forecasts(search: Search) -> Plot | None:
    """Predicted against measured speedups of the finalists that were timed."""
    table = search_tables.finalists(search)
    table = table[table["measured"].notna()] if len(table) else table
    if not len(table):
        return None
    figure, axes = new_figure(4.2)
    values = table[["predicted", "held_out", "measured", "low", "high"]].to_numpy(dtype=float)
    axes.set_ylim(np.nanmin(values) * 0.95, np.nanmax(values) * 1.05)
    asked = values[:, :2]
    spare = max(0.02, 0.2 * (np.nanmax(asked) - np.nanmin(asked)))
    as_predicted(axes, np.nanmin(asked) - spare, np.nanmax(asked) + spare)
    both = table[table["held_out"].notna()]
    if len(both):
        axes.hlines(both["measured"], both["predicted"], both["held_out"], color=MUTED, linewidth=1)
        axes.plot(
            both["predicted"], both["measured"], "s", color=BLUE, markersize=5,
            markerfacecolor=PAPER, label="by the traced prompts",
        )  # fmt: skip
    axes.errorbar(
        table["forecast"], table["measured"], yerr=error_bars(table, "measured"), fmt="o",
        color=ORANGE, ecolor=INK, markeredgecolor=INK, markersize=6, elinewidth=0.9, capsize=2.5,
        label="by the held-out prompts" if len(both) else "by the traced prompts",
    )  # fmt: skip
    few = table.head(12)
    _label_at_the_side(axes, few["forecast"], few["measured"], _names(few))
    axes.set_xlabel("predicted speedup")
    axes.set_ylabel("measured speedup")
    add_legend(figure, axes)
    near = table["efficiency"].between(0.9, 1.1).sum()
    words = listed(table, "{name}: predicted {forecast:.2f}, measured {measured:.2f}", "; ")
    alt = f"Measured is within 10% of predicted for {near} of {len(table)} finalists. {words}."
    return Plot("search-forecasts", "Finalists: predicted and measured", alt, figure)


def equal_speedups(search: Search, axes: Axes) -> dict[float, float]:
    """Curves of equal speedup by the closed formula, named where they leave the plot at the top.

    The verify costs are the first finalist's, alpha is 1 at the top. Returns each curve's speedup
    and the c at which it ends there.
    """
    if not search.finalists:
        return {}
    first = search.finalists[0]
    costs = CostTable(first["draft_cost"], tuple(first["verify"]))
    longest = max(1, search.document["trace"]["draft_length"])
    low, high = axes.get_xlim()
    across = np.linspace(max(low, 0.01), high, 300)  # (C,)
    alphas = np.linspace(*axes.get_ylim(), 150)  # (A,)
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
        top = axes.secondary_xaxis("top")
        top.set_xticks(list(shown.values()), [f"{level:.3g}x" for level in shown])
        top.tick_params(labelcolor=MUTED, color=MUTED, labelsize=9)
    return shown


def _label_at_the_side(
    axes: Axes, x: Sequence[float], y: Sequence[float], names: Sequence[str]
) -> None:
    """Names in the right margin, joined to their points: none covers another, or a point."""
    low, high = axes.get_ylim()
    gap = 0.07
    order = sorted(zip(x, y, names, strict=True), key=lambda point: -point[1])
    places: list[float] = []
    for _, height, _ in order:
        place = (height - low) / (high - low)
        places.append(min(place, places[-1] - gap) if places else place)
    for number in reversed(range(len(places))):  # what was pushed out at the bottom moves up
        below = places[number + 1] + gap if number + 1 < len(places) else 0.0
        places[number] = max(places[number], below)
    for (across, height, name), place in zip(order, places, strict=True):
        axes.annotate(
            clipped(name, 22), (across, height), xytext=(1.04, place), fontsize=9, va="center",
            textcoords="axes fraction",
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkB": 3,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def _layer_ticks(axes: Axes, layers: int) -> None:
    """Ticks in the middle of a layer's two columns, a dozen or so."""
    shown = few_ticks(layers, 16)
    axes.set_xticks([2 * layer + 1 for layer in shown], [str(layer) for layer in shown])


def _names(table: pd.DataFrame) -> list[str]:
    """Finalists' names, the winner's with a word."""
    return [
        f"{row['name']} (winner)" if "winner" in row["role"] else row["name"]
        for _, row in table.iterrows()
    ]


def _trial_name(trial: Any) -> str:
    """A seed's own name, else the trial's number."""
    seed = trial["origin"].partition(":")[2] if trial["kind"] == "seed" else ""
    return seed or f"trial-{trial['number']}"


def _few(table: pd.DataFrame) -> Any:
    """Five lines of a table at most, ends included."""
    return table.iloc[np.unique(np.linspace(0, len(table) - 1, min(5, len(table))).astype(int))]
