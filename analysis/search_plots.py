"""The plots of a report on a search: progress, influence, front, finalists."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from layerskip.analysis import drawing, search_tables
from layerskip.analysis.drawing import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE
from layerskip.analysis.plots import skip_map

MANY = 200  # number of trials from which on points are small
PROPOSERS = {
    "first": ("first sets", MUTED, "s"),
    "gp": ("Optuna's Gaussian process", BLUE, "o"),
    "ours": ("the earlier Gaussian process", GREEN, "^"),
    "tpe": ("Optuna's TPE", ORANGE, "v"),
    "random": ("random", PURPLE, "x"),
}
"""The appearance of trials by their proposer: words, colour and marker."""
LINES = ("--", ":", "-.")
VALUE = "value: speedup at a\nfixed draft length"
"""Of a trial. A finalist's predicted speedup is another number: its controller's, with lookups."""


def search_plots(search: search_tables.SearchTables) -> list[drawing.Plot]:
    """The pictures of a search, except those with nothing to show."""
    drawn = [search_progress(search), influence(search), search_front(search)]
    drawn.append(search_skip_map(search))
    return [plot for plot in drawn if plot is not None]


def search_progress(search: search_tables.SearchTables) -> drawing.Plot | None:
    """The best speedup so far, by trial and by second of trials, with other searches."""
    table = search_tables.progress(search.document)
    if not len(table):
        return None
    axes = Figure(figsize=(drawing.WIDTH, 4.2), layout="constrained").subplots(1, 2, sharey=True)
    for number, (each, x) in enumerate(zip(axes, ("trial", "seconds"), strict=True)):
        for kind, rows in table.groupby("proposer", sort=False):
            words, colour, marker = PROPOSERS.get(str(kind), (str(kind), MUTED, "."))
            each.scatter(
                rows[x], rows["speedup"], s=10 if len(table) > MANY else 18, color=colour,
                marker=marker, linewidths=1.0, alpha=0.7, label="" if number else words,
            )  # fmt: skip
        each.step(
            table[x], table["best"], where="post", color=INK, linewidth=1.6,
            label="" if number else "best so far",
        )  # fmt: skip
        for index, document in enumerate(search.others):
            other = search_tables.progress(document)
            sampler = document["sampler"]
            words, colour, _ = PROPOSERS.get(sampler, (sampler, MUTED, ""))
            each.step(
                other[x], other["best"], where="post", color=colour, linewidth=1.2,
                linestyle=LINES[index % len(LINES)],
                label="" if number else f"best so far of another search ({words})",
            )  # fmt: skip
    axes[1].set_xlabel("seconds of trials")
    last = table.iloc[-1]
    alt = (
        f"Best value so far: {last['best']:.3f} after {len(table)} trials and "
        f"{last['seconds']:.0f} seconds."
    )
    return drawing.finished(axes[0], "search-progress", "How the search went", alt, "trials", VALUE)


def influence(search: search_tables.SearchTables) -> drawing.Plot | None:
    """How much each sublayer changes its input, and which ones the best draft skips."""
    values = np.array(search.document["influence"], dtype=float)
    if not len(values):
        return None
    strip = values.reshape(-1, 2).T  # (2, L)
    axes = drawing.new_axes(2.3)
    least = max(float(values[values > 0].min(initial=1.0)), 1e-6)
    image = axes.imshow(
        strip.clip(least), aspect="auto", cmap="cividis",
        norm=LogNorm(least, max(float(values.max()), 2 * least)),
    )  # fmt: skip
    axes.figure.colorbar(image, ax=axes, label="1 - similarity", format="%.2g")
    best = search_tables.best(search)
    skipped = best["skipped"] if best else {}
    for row, kind in enumerate(("attention", "mlp")):
        out = skipped.get(kind, ())
        axes.scatter(out, [row] * len(out), s=22, color="white", edgecolors=INK, zorder=3)
    axes.set_yticks([0, 1], ["attention", "MLP"])
    axes.grid(visible=False)
    names = [f"{'MLP' if place % 2 else 'attention'} {place // 2}" for place in np.argsort(values)]
    alt = (
        "1 - cosine similarity of hidden states before and after each sublayer: least for "
        f"{', '.join(names[:3])}, most for {', '.join(names[:-4:-1])}."
    )
    title = "Which sublayers matter"
    title += f" (dots: left out by {best['name']})" if best else ""
    return drawing.finished(axes, "search-influence", title, alt, "layer")


def search_front(search: search_tables.SearchTables) -> drawing.Plot | None:
    """Acceptance against cost of all trials, coloured by value, and their front."""
    table = search.complete.dropna(subset=["acceptance"])
    if not len(table):
        return None
    best = search_tables.finalists(search)
    best = best.dropna(subset=["alpha"]) if len(best) else best
    axes = drawing.new_axes(4.6)
    points = axes.scatter(
        table["draft_cost"], table["acceptance"], s=12 if len(table) > MANY else 25,
        c=table["value"], cmap="cividis", edgecolors=MUTED, linewidths=0.4, label="trials",
    )  # fmt: skip
    axes.figure.colorbar(points, ax=axes, label=VALUE)
    front = table[table["front"]].sort_values(["draft_cost", "acceptance"])
    axes.step(
        front["draft_cost"], front["acceptance"], where="post", color=INK, linewidth=1.3,
        label="not dominated",
    )  # fmt: skip
    for number, row in enumerate(best.to_dict("records")):
        axes.plot(
            row["draft_cost"], row["alpha"], drawing.marker_of(number), label=row["finalist"],
            color=drawing.colour_of(number), markersize=9, markeredgecolor=INK, zorder=4,
        )  # fmt: skip
    axes.set_xlim(left=0)
    alt = (
        f"Acceptance against draft cost of {len(table)} trials, {len(front)} of them not "
        f"dominated; the best has a value of {table['value'].max():.2f}."
    )
    cost, alpha = "c: draft step / target step", "alpha: a draft token is accepted"
    return drawing.finished(axes, "search-front", "Acceptance against cost", alt, cost, alpha)


def search_skip_map(search: search_tables.SearchTables) -> drawing.Plot | None:
    table = search_tables.finalists(search)
    speedups = table["measured"].fillna(table["predicted"]) if len(table) else ()
    names, document = table.get("finalist", ()), search.document
    rows = [*zip(names, document["finalists"], speedups, strict=True)]
    return skip_map("search-skip-map", rows, document["model"]["num_layers"]) if rows else None
