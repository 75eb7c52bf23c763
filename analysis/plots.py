"""Knows how tables look as pictures, and says each in words too; computes nothing anew.

Every function takes a run (or all of them) and returns a `Plot`, or None where there is nothing to
draw. Colours are Okabe and Ito's and the cividis map, safe for colour-blind readers; markers,
hatches or printed numbers say the same without colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from layerskip.analysis import predictions, tables
from layerskip.analysis.runs import Run, rounds_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from layerskip.speculation import CostTable

INK, PAPER, MUTED, LINE = "#222222", "#ffffff", "#666666", "#cccccc"
"""Colours that a page may exchange for its own, light or dark; no data has them."""

STYLE: Any = {
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "font.family": ["DejaVu Sans"],
    "font.size": 10.5,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.edgecolor": LINE,
    "legend.facecolor": PAPER,
    "legend.labelcolor": INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "layerskip",
    "text.color": INK,
    "text.parse_math": False,  # names in records are nobody's formulas
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}
WIDTH = 6.2  # inches; a phone shows two thirds of it, with the letters still readable

BLUE, ORANGE, GREEN, PURPLE, SKY, RED = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
)
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
MARKERS = ("o", "s", "^", "v", "P", "X", "*", "<")
HATCHES = {"prefill": "", "draft": "///", "verify": "\\\\\\", "other": "xxx", "rest": ""}
FEW_TOKENS = 10  # in a bin of confidences, below which its share is left out as noise
BLACK, WHITE = "#000001", "#fffffe"  # on filled cells, whatever the page's colours


@dataclass(frozen=True)
class Plot:
    """A picture: file name without ending, title, and what it shows in words and numbers."""

    name: str
    title: str
    alt: str
    figure: Figure


def run_plots(run: Run) -> list[Plot]:
    """All plots of one run that its records have data for."""
    drawn: list[Plot | None] = []
    with mpl.rc_context(STYLE):
        drawn += [speedups(run, batch_size) for batch_size in run.batch_sizes]
        makers: Sequence[Callable[[Run], Plot | None]] = (
            batches,
            phases,
            positions,
            forecasts,
            surface,
            what_if,
            calibration,
            skip_map,
            draft_lengths,
        )
        drawn += [maker(run) for maker in makers]
    return [plot for plot in drawn if plot is not None]


def overview_plots(runs: Sequence[Run]) -> list[Plot]:
    """Plots over several runs; none for one."""
    if len(runs) < 2:
        return []
    with mpl.rc_context(STYLE):
        return [plot for plot in (overview(runs), all_forecasts(runs)) if plot is not None]


def speedups(run: Run, batch_size: int) -> Plot | None:
    """Every method's speedup over the baseline with its interval, by category."""
    table = tables.speedup(run)
    table = table[(table["over"] == run.baseline) & (table["batch_size"] == batch_size)]
    methods = [m for m in run.measured if m != run.baseline and m in set(table["method"])]
    if not methods:
        return None
    categories = [tables.ALL, *run.categories]
    lanes = len(categories) + 1
    figure, axes = _figure(1.2 + 0.17 * lanes * len(methods))
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
    names = [_clipped(method, 30) for method in methods]
    axes.set_yticks([n * lanes + middle for n in range(len(methods))], names)
    axes.set_ylim(len(methods) * lanes - 1, -1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"times as fast as {run.baseline} (95% interval over prompts)")
    _legend(figure, axes)
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
    figure, axes = _figure(3.4)
    words = []
    for number, method in enumerate(m for m in run.measured if m != run.baseline):
        rows = table[table["method"] == method]
        axes.plot(
            rows["batch_size"], rows["speedup"], color=_colour(number), marker=_marker(number),
            label=method,
        )  # fmt: skip
        axes.fill_between(
            rows["batch_size"], rows["low"], rows["high"], color=_colour(number), alpha=0.15
        )
        values = (f"{r['speedup']:.2f} at {r['batch_size']}" for _, r in rows.iterrows())
        words.append(f"{method} {', '.join(values)}")
    axes.axhline(1, color=INK, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(run.batch_sizes, [str(size) for size in run.batch_sizes])
    axes.set_xlabel("prompts in a batch")
    axes.set_ylabel(f"times as fast as {run.baseline}")
    _legend(figure, axes)
    alt = f"Speed relative to {run.baseline} by batch size: {'; '.join(words)}."
    return Plot("batch-sizes", "Speedup by batch size", alt, figure)


def phases(run: Run) -> Plot | None:
    """Where a token's time goes, at the smallest batch size."""
    table = tables.phases(run)
    table = table[table["batch_size"] == run.batch_sizes[0]]
    figure, axes = _figure(1.3 + 0.38 * len(table))
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
    axes.set_yticks(places, [_clipped(method, 30) for method in table["method"]])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds per new token")
    _legend(figure, axes)
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
    figure, axes = _figure(3.3)
    words = []
    for number, (method, rows) in enumerate(table.groupby("method", sort=False)):
        rows = rows[rows["tried"] > 0]
        axes.plot(
            rows["position"], rows["acceptance"], color=_colour(number), marker=_marker(number),
            label=str(method),
        )  # fmt: skip
        values = (f"{r['acceptance']:.2f} at {r['position']:.0f}" for _, r in rows.iterrows())
        words.append(f"{method} {', '.join(values)}")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("place in the draft (1: first drafted token)")
    axes.set_ylabel("accepted, if all before were")
    _legend(figure, axes)
    alt = f"Share of drafted tokens accepted where all before them were: {'; '.join(words)}."
    return Plot("acceptance-by-position", "Acceptance by draft position", alt, figure)


def forecasts(run: Run) -> Plot | None:
    """Predicted against measured decode speedups of one run."""
    return _forecasts([run], "predicted-measured", "Predicted and measured speedup")


def all_forecasts(runs: Sequence[Run]) -> Plot | None:
    """Predicted against measured decode speedups of all runs."""
    return _forecasts(runs, "predicted-measured-all", "Predicted and measured speedup, all runs")


def _forecasts(runs: Sequence[Run], name: str, title: str) -> Plot | None:
    table = tables.together(runs, predictions.predictions)
    if not len(table):
        return None
    series = ["run"] if len(runs) > 1 else ["method"]
    figure, axes = _figure(4.2)
    for number, (label, rows) in enumerate(table.groupby(series[0], sort=False)):
        bars = np.stack([rows["measured"] - rows["low"], rows["high"] - rows["measured"]])
        axes.errorbar(
            rows["predicted"], rows["measured"], yerr=np.nan_to_num(bars).clip(0),
            fmt=_marker(number), color=_colour(number), markersize=6, elinewidth=0.8,
            label=str(label),
        )  # fmt: skip
    values = table[["predicted", "measured"]].to_numpy()
    ends = np.array([values.min() * 0.93, values.max() * 1.07])
    axes.plot(ends, ends, color=INK, linewidth=1.2, label="efficiency 1")
    axes.plot(ends, 0.9 * ends, color=MUTED, linewidth=0.9, linestyle="--", label="within 10%")
    axes.plot(ends, 1.1 * ends, color=MUTED, linewidth=0.9, linestyle="--")
    axes.set_xlim(*ends)
    axes.set_xlabel("predicted: other prompts' rounds, one cost table")
    axes.set_ylabel("measured decode speedup")
    _legend(figure, axes)
    near = table["efficiency"].between(0.9, 1.1).sum()
    whole = table[table["category"] == tables.ALL]
    words = "; ".join(
        f"{row['method']}{', ' + row['run'] if len(runs) > 1 else ''}: "
        f"predicted {row['predicted']:.2f}, measured {row['measured']:.2f}, "
        f"efficiency {row['efficiency']:.2f}"
        for _, row in whole.iterrows()
    )
    alt = f"Measured is within 10% of predicted for {near} of {len(table)} points. {words}."
    return Plot(name, title, alt, figure)


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
    figure, axes = _figure(4.4)
    levels = [1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 10, 50]
    norm = mpl.colors.BoundaryNorm(levels, 256)
    axes.contourf(draft_costs, alphas, best, levels=levels, cmap="cividis", norm=norm, alpha=0.9)
    lines = axes.contour(
        draft_costs, alphas, best, levels=levels[1:-1], colors=WHITE, linewidths=0.7
    )
    axes.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize=8)
    axes.contour(draft_costs, alphas, best, levels=[1.0001], colors=WHITE, linestyles="--")
    words = []
    for number, (_, row) in enumerate(table[table["category"] == tables.ALL].iterrows()):
        axes.plot(
            row["draft_cost"], row["alpha"], _marker(number), color=_colour(number), markersize=9,
            markeredgecolor=WHITE, label=f"{row['method']}: {row['measured']:.2f}x",
        )  # fmt: skip
        words.append(
            f"{row['method']} lies at c {row['draft_cost']:.2f}, alpha {row['alpha']:.2f}: "
            f"measured {row['measured']:.2f}, best fixed length {row['best_length']:.0f} by "
            f"formula {row['best_formula']:.2f}, bound {row['bound']:.1f}"
        )
    for number, category in enumerate(run.categories):
        rows = table[(table["category"] == category) & (table["method"] == table["method"].iloc[0])]
        axes.plot(
            rows["draft_cost"], rows["alpha"], _marker(number), color=WHITE, markersize=6,
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
    _legend(figure, axes)
    alt = f"Contours of the best speedup a fixed draft length can give. {'; '.join(words)}."
    return Plot("surface", "The run on the speedup surface", alt, figure)


def best_speedups(
    alphas: NDArray[np.float64], draft_costs: NDArray[np.float64], costs: CostTable
) -> NDArray[np.float64]:
    """(A, C): `speculation.speedup` at the best draft length in 0..LONGEST, with the table's v."""
    best = np.ones((len(alphas), len(draft_costs)))
    tokens = np.ones(len(alphas))  # (A,) expected tokens of a round
    for length in range(1, predictions.LONGEST + 1):
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
    figure, axes = _figure(1.5 + 0.27 * len(cells))
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
    figure, axes = _figure(3.8)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, label="calibrated")
    errors = tables.exits(run).query("trace == 0").set_index("exit")["calibration_error"]
    for number, layer in enumerate(chosen):
        rows = table[table["exit"] == layer]
        axes.plot(
            rows["confidence"], rows["matched"], color=_colour(number), marker=_marker(number),
            label=f"exit {layer}",
        )  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("the draft's confidence in its token")
    axes.set_ylabel("share that matched")
    _legend(figure, axes)
    words = []
    for layer in chosen:
        rows = table[table["exit"] == layer]
        first, last = rows.iloc[0], rows.iloc[-1]
        words.append(
            f"exit {layer}: {first['matched']:.2f} matched at confidence "
            f"{first['confidence']:.2f}, {last['matched']:.2f} at {last['confidence']:.2f}, "
            f"mean error {errors[layer]:.2f}"
        )
    alt = f"Share of draft tokens that matched, by the draft's confidence. {'; '.join(words)}."
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
        step = max(1, layers // 12)
        axes.set_xticks(np.arange(0, layers, step) + 0.5, [str(n) for n in range(0, layers, step)])
        axes.grid(visible=False)
        axes.set_title(_clipped(", ".join(methods), 60), fontsize=10, color=INK)
        words.append(
            f"{', '.join(methods)} keeps {sum(kept)} of {2 * layers} sublayers: attention of "
            f"layers {_ranges(kept[:layers])}, MLP of layers {_ranges(kept[layers:])}"
        )
    grid[-1].set_xlabel("layer (hatched: skipped while drafting)")
    if known and mesh is not None:
        bar = figure.colorbar(mesh, ax=list(grid))
        bar.set_label("ms per token")
        one = table[table["method"] == run.drafting[0]].groupby("sublayer")["ms"].mean()
        words.append(
            f"one token costs {one['attention']:.3g} ms per attention and {one['mlp']:.3g} ms per "
            "MLP sublayer on average"
        )
    alt = f"{'; '.join(words)}."
    return Plot("skip-map", "Which sublayers the draft runs", alt, figure)


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
    figure, axes = _figure(2.7)
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
    _legend(figure, axes)
    prompt = _clipped(str(record["prompts"][0]), 40)
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
    figure, axes = _figure(1.4 + 0.15 * lanes * len(runs))
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
    labels = [textwrap.fill(_clipped(run.label, 80), 22) for run in runs]
    axes.set_yticks([n * lanes + middle for n in range(len(runs))], labels)
    axes.set_ylim(len(runs) * lanes - 1, -1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("times as fast as the baseline")
    _legend(figure, axes)
    alt = f"Speed relative to each run's baseline. {'. '.join(words)}."
    return Plot("overview", "All runs side by side", alt, figure)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _intervals(
    axes: Axes, rows: pd.DataFrame, heights: Sequence[float], place: int, label: str = ""
) -> None:
    """Points with their intervals; one without an interval is drawn hollow."""
    bars = np.stack([rows["speedup"] - rows["low"], rows["high"] - rows["speedup"]])  # (2, n)
    hollow = bool(rows["low"].isna().any())
    axes.errorbar(
        rows["speedup"], heights, xerr=np.nan_to_num(bars).clip(0), fmt=_marker(place),
        color=_colour(place), markersize=6.5, elinewidth=1.6, capsize=2.5,
        markerfacecolor=PAPER if hollow else _colour(place),
        label=label or (rows["category"].iloc[0] if len(rows) else ""),
    )  # fmt: skip


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the plot, where it hides no data; not for a single series."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = max(1, min(len(handles), 62 // (max(map(len, labels)) + 7)))
        labels = [textwrap.fill(_clipped(label, 120), 56) for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)


def _few_exits(run: Run, known: Sequence[int]) -> list[int]:
    """The exits drafted with, the best by price, the first and the last: four at most."""
    wanted = [run.methods[m]["num_kept"] // 2 for m in run.drafting]
    priced = predictions.what_if(run)
    if len(priced) and priced["speedup"].notna().any():
        wanted.append(int(priced.loc[priced["speedup"].idxmax(), "exit"]))
    wanted += [known[0], known[-1], known[len(known) // 2]]
    return sorted(list(dict.fromkeys(layer for layer in wanted if layer in known))[:4])


def _first_row(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [row[:1] for row in record["rounds"][name]]
        for name in ("drafted", "accepted", "emitted")
    }


def _inverse(costs: Any) -> Any:
    return 1 / np.maximum(costs, 1e-9)


def _ranges(flags: Sequence[bool]) -> str:
    """The places of the true ones in words: 0-3, 6."""
    places = [i for i, flag in enumerate(flags) if flag]
    starts = [i for i in places if i - 1 not in places]
    ends = [i for i in places if i + 1 not in places]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in pairs) or "none"


def _short(row: Any) -> str:
    if pd.isna(row["low"]):
        return f"{row['speedup']:.2f}"
    return f"{row['speedup']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]
