"""Knows how what should be looks beside what is: forecasts, the speedup surface, exits, costs.

Every function takes a run and returns a `Plot`, or None where there is nothing to
draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from layerskip.analysis import predictions, tables
from layerskip.analysis.canvas import (
    BLACK,
    INK,
    MUTED,
    PAPER,
    RED,
    WHITE,
    WIDTH,
    Plot,
    add_legend,
    as_predicted,
    clipped,
    colour_of,
    error_bars,
    few_ticks,
    listed,
    marker_of,
    new_figure,
)
from layerskip.analysis.runs import Run, ranges
from layerskip.costs.speculation import CostTable

FEW_TOKENS = 10  # in a bin of confidences, below which its share is left out as noise


def forecasts(run: Run) -> Plot | None:
    """Predicted against measured decode speedups."""
    table = predictions.predictions(run)
    if not len(table):
        return None
    figure, axes = new_figure(4.2)
    for number, (method, rows) in enumerate(table.groupby("method", sort=False)):
        axes.errorbar(
            rows["predicted"], rows["measured"], yerr=error_bars(rows, "measured"),
            fmt=marker_of(number), color=colour_of(number), markersize=6, elinewidth=0.8,
            label=str(method),
        )  # fmt: skip
    values = table[["predicted", "measured"]].to_numpy()
    as_predicted(axes, values.min() * 0.93, values.max() * 1.07)
    axes.set_xlabel("predicted: other prompts' rounds, one cost table")
    axes.set_ylabel("measured decode speedup")
    add_legend(figure, axes)
    near = table["efficiency"].between(0.9, 1.1).sum()
    form = "{method}: predicted {predicted:.2f}, measured {measured:.2f}"
    words = listed(table[table["category"] == tables.ALL], form, "; ")
    alt = f"Measured is within 10% of predicted for {near} of {len(table)} points. {words}."
    return Plot("predicted-measured", "Predicted and measured speedup", alt, figure)


def surface(run: Run) -> Plot | None:
    """The best speedup over (c, alpha) at this run's verify costs, and where the run lies."""
    table = predictions.predictions(run)
    if len(table):
        table = table[table["batch_size"] == run.batch_sizes[0]].dropna(subset=["alpha"])
    if not len(table):
        return None
    costs = run.cost_table(table["method"].iloc[0], run.batch_sizes[0])
    assert costs is not None  # there is no prediction without
    draft_costs = np.geomspace(0.02, 1.0, 150)  # (C,)
    alphas = np.linspace(0.0, 0.995, 150)  # (A,)
    best = best_speedups(alphas, draft_costs, costs)  # (A, C)
    figure, axes = new_figure(4.4)
    levels = [1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 10, 50]
    norm = mpl.colors.BoundaryNorm(levels, 256)
    axes.contourf(draft_costs, alphas, best, levels=levels, cmap="cividis", norm=norm, alpha=0.9)
    lines = axes.contour(
        draft_costs, alphas, best, levels=levels[1:-1], colors=WHITE, linewidths=0.7
    )
    axes.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize=8)
    axes.contour(draft_costs, alphas, best, levels=[1.0001], colors=WHITE, linestyles="--")
    whole = table[table["category"] == tables.ALL]
    for number, (_, row) in enumerate(whole.iterrows()):
        axes.plot(
            row["draft_cost"], row["alpha"], marker_of(number), color=colour_of(number),
            markersize=9, markeredgecolor=WHITE, label=f"{row['method']}: {row['measured']:.2f}x",
        )  # fmt: skip
    for number, category in enumerate(run.categories):
        rows = table[(table["category"] == category) & (table["method"] == table["method"].iloc[0])]
        axes.plot(
            rows["draft_cost"], rows["alpha"], marker_of(number), color=WHITE, markersize=6,
            markeredgecolor=BLACK, label=category,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1], ["0.02", "0.05", "0.1", "0.2", "0.5", "1"])
    axes.minorticks_off()
    above = axes.secondary_xaxis("top", functions=(_inverse, _inverse))
    above.set_xticks([50, 20, 10, 5, 2, 1], ["50x", "20x", "10x", "5x", "2x", "1x"])
    above.minorticks_off()
    above.set_xlabel("bound 1/c")
    axes.set_xlabel("c: draft step / target step")
    axes.set_ylabel("alpha: a draft token is accepted")
    axes.grid(visible=False)
    add_legend(figure, axes)
    form = (
        "{method} lies at c {draft_cost:.2f}, alpha {alpha:.2f}: measured {measured:.2f}, best "
        "fixed length {best_length:.0f} by formula {best_formula:.2f}, bound {bound:.1f}"
    )
    words = listed(whole, form, "; ")
    alt = f"Contours of the best speedup a fixed draft length can give. {words}."
    return Plot("surface", "The run on the speedup surface", alt, figure)


def best_speedups(
    alphas: NDArray[np.float64],
    draft_costs: NDArray[np.float64],
    costs: CostTable,
    longest: int = predictions.LONGEST,
) -> NDArray[np.float64]:
    """(A, C): `speculation.speedup` at the best draft length in 0..longest, with the table's v."""
    best = np.ones((len(alphas), len(draft_costs)))
    tokens = np.ones(len(alphas))  # (A,) expected tokens of a round
    for length in range(1, longest + 1):
        tokens = tokens + alphas**length
        paid = length * draft_costs + costs.verify_cost(length + 1)  # (C,)
        best = np.maximum(best, tokens[:, None] / paid[None, :])
    return best


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
    axes.set_xlabel("most tokens drafted in a round (best threshold of each)")
    axes.set_ylabel("exit after layer")
    bar = figure.colorbar(mesh, ax=axes)
    bar.set_label("priced speedup")
    bar.outline.set_edgecolor(MUTED)
    best = table.loc[table["speedup"].idxmax()]
    by_exit = (f"exit {e} {row.max():.2f}" for e, row in cells.iterrows())
    alt = (
        f"Priced speedup by exit layer and draft length. Best: exit {best['exit']:.0f}, length "
        f"{best['draft_length']:.0f}, threshold {best['threshold']:g}, {best['speedup']:.2f} "
        f"(boxed). Best of each exit: {', '.join(by_exit)}."
    )
    return Plot("what-if", "What if: exit layer and draft length", alt, figure)


def calibration(run: Run) -> Plot | None:
    """Confidence against the share of tokens that matched, for a few exits."""
    table = tables.calibration(run)
    if not len(table):
        return None
    table = table[(table["trace"] == 0) & (table["tokens"] >= FEW_TOKENS)]
    if not len(table):
        return None
    chosen = _few_exits(run, sorted(table["exit"].unique()))
    figure, axes = new_figure(3.8)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, label="calibrated")
    errors = tables.exits(run).query("trace == 0").set_index("exit")["calibration_error"]
    for number, layer in enumerate(chosen):
        rows = table[table["exit"] == layer]
        axes.plot(
            rows["confidence"], rows["matched"], color=colour_of(number), marker=marker_of(number),
            label=f"exit {layer}",
        )  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("the draft's confidence in its token")
    axes.set_ylabel("share that matched")
    add_legend(figure, axes)
    words = "; ".join(f"exit {layer}: {errors[layer]:.2f}" for layer in chosen)
    alt = f"Confidence against the share that matched. Mean distance of the two: {words}."
    return Plot("calibration", "Can the draft's confidence be trusted?", alt, figure)


def skip_map(run: Run) -> Plot | None:
    """Kept and skipped sublayers of every skip config, coloured by what one token costs."""
    table = tables.sublayers(run)
    if not len(table):
        return None
    owners: dict[tuple[bool, ...], list[str]] = {}
    for method, rows in table.groupby("method", sort=False):
        owners.setdefault(tuple(rows["kept"]), []).append(str(method))
    layers = run.num_layers
    figure = Figure(figsize=(WIDTH, 1.0 + 1.25 * len(owners)), layout="constrained")
    grid = figure.subplots(len(owners), 1, squeeze=False)[:, 0]
    known = table["ms"].notna().any()
    top = table["ms"].max() if known else 1.0
    words, mesh = [], None
    for axes, (kept, methods) in zip(grid, owners.items(), strict=True):
        rows = table[table["method"] == methods[0]]
        cost = rows["ms"].fillna(0.5).to_numpy().reshape(2, layers)
        shown = np.where(np.array(kept).reshape(2, layers), cost, np.nan)
        mesh = axes.pcolormesh(
            shown, cmap="cividis", vmin=0, vmax=top, edgecolors=PAPER, linewidth=0.8
        )
        for index, keep in enumerate(kept):
            if not keep:
                corner = (index % layers + 0.06, index // layers + 0.06)
                cell = Rectangle(corner, 0.88, 0.88, hatch="////", facecolor=PAPER, edgecolor=MUTED)
                axes.add_patch(cell)
        axes.set_ylim(2, 0)
        axes.set_yticks([0.5, 1.5], ["attention", "MLP"])
        shown_layers = few_ticks(layers, 16)
        axes.set_xticks([n + 0.5 for n in shown_layers], [str(n) for n in shown_layers])
        axes.grid(visible=False)
        axes.set_title(clipped(", ".join(methods), 60), fontsize=10, color=INK)
        words.append(
            f"{', '.join(methods)} keeps {sum(kept)} of {2 * layers} sublayers: attention of "
            f"layers {_kept(kept[:layers])}, MLP of layers {_kept(kept[layers:])}"
        )
    grid[-1].set_xlabel("layer (hatched: skipped while drafting)")
    if known and mesh is not None:
        bar = figure.colorbar(mesh, ax=list(grid))
        bar.set_label("ms per token")
    alt = f"{'; '.join(words)}."
    return Plot("skip-map", "Which sublayers the draft runs", alt, figure)


def _few_exits(run: Run, known: Sequence[int]) -> list[int]:
    """The exits drafted with, the best by price, the first and the last: four at most."""
    wanted = [run.methods[m]["num_kept"] // 2 for m in run.drafting]
    priced = predictions.what_if(run)
    if len(priced) and priced["speedup"].notna().any():
        wanted.append(int(priced.loc[priced["speedup"].idxmax(), "exit"]))
    wanted += [known[0], known[-1], known[len(known) // 2]]
    return sorted(list(dict.fromkeys(layer for layer in wanted if layer in known))[:4])


def _inverse(costs: Any) -> Any:
    return 1 / np.maximum(costs, 1e-9)


def _kept(flags: Sequence[bool]) -> str:
    return ranges([place for place, flag in enumerate(flags) if flag])
