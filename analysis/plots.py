"""The plots of a report, each with what it shows in words.

Every function returns a `Plot`, or None where there is nothing to draw. Colours are Okabe and Ito's
and a grey, safe for colour-blind readers; markers and hatches say the same without colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from layerskip.analysis import searches, tables, trainings
from layerskip.analysis.labels import ranges
from layerskip.analysis.runs import ALL, Run
from layerskip.analysis.searches import Search
from layerskip.analysis.trainings import Trainings

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
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#d55e00", "#7f7f7f")
MARKERS = ("o", "s", "^", "v", "P", "X", "*", "<")

PHASES = {
    "prefill": ("prefill", SKY, ""),
    "draft": ("drafting", ORANGE, "///"),
    "verify": ("verifying", BLUE, "\\\\\\"),
    "other": ("accepting and other", PURPLE, "xxx"),
    "rest": ("not told apart", LINE, ""),
}
"""How a phase looks: its word, colour and hatch."""
MANY = 200  # trials from which on points are small


@dataclass(frozen=True)
class Plot:
    """A picture: file name without ending, title, and what it shows in words and numbers."""

    name: str
    title: str
    alt: str
    figure: Figure


def run_plots(run: Run) -> list[Plot]:
    """All plots of one run that its records have data for."""
    return _known(
        [*(contexts(run, size) for size in run.batch_sizes),
         *(speedups(run, size) for size in run.batch_sizes), positions(run), phases(run),
         run_skip_map(run)]
    )  # fmt: skip


def search_plots(search: Search) -> list[Plot]:
    """All plots of one search that its file has data for."""
    return _known([search_front(search), search_skip_map(search)])


def training_plots(of: Trainings) -> list[Plot]:
    """All plots of trainings."""
    return [training_curve(of)]


def _known(drawn: Iterable[Plot | None]) -> list[Plot]:
    return [plot for plot in drawn if plot is not None]


def speedups(run: Run, batch_size: int) -> Plot | None:
    """Every method's speedup over the baseline with its interval, by category.

    Speedups without an interval are drawn hollow.
    """
    table = tables.speedup(run)
    table = table[(table["over"] == run.baseline) & (table["batch_size"] == batch_size)]
    table = table[table["method"] != run.baseline]
    if not len(table):
        return None
    methods, categories = (list(table[name].unique()) for name in ("method", "category"))
    lanes = len(categories) + 1
    figure, axes = new_figure(1.3 + 0.16 * lanes * len(methods))
    for place, category in enumerate(categories):
        rows = table[table["category"] == category]
        colour = _colour_of(place)
        axes.errorbar(
            rows["speedup"],
            [methods.index(name) * lanes + place for name in rows["method"]],
            xerr=_error_bars(rows, "speedup"),
            fmt=_marker_of(place),
            color=colour,
            markerfacecolor=PAPER if rows["low"].isna().any() else colour,
            markersize=6.5,
            elinewidth=1.6,
            capsize=2.5,
            label=category,
        )
    words = [
        f"{row['speedup']:.2f}"
        + ("" if pd.isna(row["low"]) else f" ({row['low']:.2f} to {row['high']:.2f})")
        for _, row in table.iterrows()
    ]
    table = table.assign(words=words)
    for number, text in enumerate(table[table["category"] == ALL]["words"]):
        _note_at_the_side(axes, text, number * lanes)
    axes.axvline(1, color=INK, linewidth=1.2)
    middle = (len(categories) - 1) / 2
    labels = [textwrap.fill(clipped(name, 80), 22) for name in methods]
    axes.set_yticks([n * lanes + middle for n in range(len(methods))], labels)
    axes.set_ylim(len(methods) * lanes - 1, -1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"times as fast as {run.baseline} (95% interval over prompts)")
    add_legend(figure, axes)
    where = f", batch size {batch_size}" if len(run.batch_sizes) > 1 else ""
    by_group = table.groupby("category", sort=False)
    said = "; ".join(f"{name}: {_listed(rows, '{method} {words}')}" for name, rows in by_group)
    return Plot(
        f"speedup-batch-{batch_size}" if where else "speedup",
        f"Speedup over {run.baseline}{where}",
        f"Speed relative to {run.baseline}: {said}.",
        figure,
    )


def contexts(run: Run, batch_size: int) -> Plot | None:
    """Every method's speed behind the first tokens by length of context, where there are several.

    With its slowest and fastest calls, and what memory allows for plain decoding.
    """
    table = tables.decoding(run)
    table = table[(table["batch_size"] == batch_size) & table["context"].notna()]
    if table["context"].nunique() < 2:
        return None
    figure, axes = new_figure(4.2)
    words = []
    for number, (method, rows) in enumerate(table.groupby("method", sort=False)):
        rows = rows.sort_values("context")
        speeds = rows["tokens_per_second"]
        axes.errorbar(
            rows["context"], speeds, yerr=_error_bars(rows, "tokens_per_second"),
            marker=_marker_of(number), color=_colour_of(number), markersize=5.5, linewidth=1.6,
            elinewidth=1.2, capsize=2.5, label=str(method),
        )  # fmt: skip
        words.append(f"{method} {_listed(rows, '{tokens_per_second:.1f} at {context:,.0f}')}")
        if run.methods[str(method)]["kind"] == "plain" and rows["share"].notna().all():
            axes.plot(
                rows["context"], speeds / rows["share"], color=MUTED, linestyle="--",
                linewidth=1.2, label="what memory allows plain",
            )  # fmt: skip
    places = sorted(table["context"].unique())
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("tokens a second")
    add_legend(figure, axes)
    where = f", batch size {batch_size}" if len(run.batch_sizes) > 1 else ""
    return Plot(
        f"contexts-batch-{batch_size}" if where else "contexts",
        f"Speed by length of context{where}",
        f"Tokens a second behind the first, by tokens of context: {'; '.join(words)}.",
        figure,
    )


def positions(run: Run) -> Plot | None:
    """Acceptance by place in the draft, of tokens with all before them accepted."""
    table = tables.positions(run)
    table = table[table["tried"] > 0] if len(table) else table
    if not len(table):
        return None
    figure, axes = new_figure(3.6)
    words = []
    for number, (method, rows) in enumerate(table.groupby("method", sort=False)):
        add_line(axes, number, rows["position"], rows["acceptance"], str(method))
        words.append(f"{method} {_listed(rows.head(4), '{acceptance:.2f}')}")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("place in the draft")
    axes.set_ylabel("accepted, if all before it were")
    add_legend(figure, axes)
    alt = f"Acceptance of the first, second, ... drafted token: {'; '.join(words)}."
    return Plot("positions", "Acceptance by position", alt, figure)


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


def run_skip_map(run: Run) -> Plot | None:
    """What the skip configs leave out or round, with the best speedup of their methods."""
    table = tables.speedup(run)
    table = table[(table["over"] == run.baseline) & (table["category"] == ALL)]
    fastest = table.groupby("method")["speedup"].max()
    owners: dict[str, list[str]] = {}
    for method in run.drafting:
        settings = run.methods[method]
        chosen = [settings.get(name) for name in ("skipped", "low", "experts", "window")]
        owners.setdefault(str(chosen), []).append(method)
    rows = [
        SkipMapRow(
            ", ".join(names),
            run.methods[names[0]]["skipped"],
            run.methods[names[0]].get("low"),
            run.methods[names[0]].get("experts"),
            run.methods[names[0]].get("window"),
            fastest.reindex(names).max(),
        )
        for names in owners.values()
    ]
    return skip_map("skip-map", rows, run.num_layers) if rows else None


def search_skip_map(search: Search) -> Plot | None:
    """What finalists leave out or round, with what was measured of them, or their price."""
    lines = searches.finalists(search).to_dict("records")
    rows = [
        SkipMapRow(
            _name(line),
            finalist["skipped"],
            finalist.get("low"),
            finalist.get("experts"),
            finalist.get("window"),
            line["forecast"] if np.isnan(line["measured"]) else line["measured"],
        )
        for finalist, line in zip(search.finalists, lines, strict=True)
    ]
    return skip_map("search-skip-map", rows, search.num_layers) if rows else None


class SkipMapRow(NamedTuple):
    """A draft on a skip map."""

    name: str
    skipped: Mapping[str, Sequence[int]]
    """Layers left out, by kind of sublayer."""
    low: Mapping[str, Any] | None
    """Layers run in low precision, likewise, with `bits`, and `head`: whether that is, too."""
    experts: int | None
    """How many of a mixture it runs for a token; None: as many as the model."""
    window: int | None
    """How many of a text's last slots it sees; None: as many as the model."""
    speedup: float
    """NaN where unknown."""

    def words(self) -> str:
        left_out, low = (
            f"attention {ranges(of['attention'])} and MLP {ranges(of['mlp'])}"
            for of in (self.skipped, self.low or self.skipped)
        )
        rounded = f", runs {low} in {self.low['bits']} bits" if self.low else ""
        fewer = "" if self.experts is None else f", with {self.experts} experts"
        fewer += "" if self.window is None else f", sees the last {self.window} slots"
        return f"{self.name} leaves out {left_out}{rounded}{fewer}, speedup {self.speedup:.2f}"


_KINDS = (("attention", BLUE, 0), ("mlp", ORANGE, 1))


def skip_map(name: str, rows: Sequence[SkipMapRow], layers: int) -> Plot:
    """What drafts leave out, and what they run in low precision, a row each."""
    figure, axes = new_figure(1.3 + 0.21 * (len(rows) + 1))
    any_low = any(row.low for row in rows)
    head = 2 * layers + 0.025 * layers  # where its column begins
    column = max(1.0, 0.04 * layers)
    edge = 0.5 if layers <= 32 else 0.0
    for height, row in enumerate(rows):
        for left, width in [(0.0, 2.0 * layers), *([(head, column)] if any_low else [])]:
            axes.add_patch(
                Rectangle((left, height - 0.4), width, 0.8, facecolor=PAPER, edgecolor=LINE)
            )
        if not np.isnan(row.speedup):
            _note_at_the_side(axes, f"{row.speedup:.2f}", height)
        for kind, colour, place in _KINDS:
            axes.broken_barh(
                [(2 * layer + place, 1) for layer in row.skipped[kind]], (height - 0.4, 0.8),
                facecolor=colour, edgecolor=PAPER, linewidth=edge,
            )  # fmt: skip
            if row.low:
                axes.broken_barh(
                    [(2 * layer + place, 1) for layer in row.low[kind]], (height + 0.1, 0.3),
                    facecolor=GREEN, edgecolor=PAPER, linewidth=edge,
                )  # fmt: skip
        if row.low and row.low["head"]:
            axes.broken_barh([(head, column)], (height + 0.1, 0.3), facecolor=GREEN)
    for kind, colour, _ in _KINDS:
        axes.bar([0], [0], color=colour, label=f"{kind} left out")
    shown = range(0, layers, -(-layers // 16))  # a dozen ticks or so
    ticks = {2 * layer + 1.0: str(layer) for layer in shown}
    if any_low:
        bits = " or ".join(map(str, sorted({row.low["bits"] for row in rows if row.low})))
        axes.bar([0], [0], color=GREEN, label=f"low bar: in {bits} bits; right: the head")
    axes.set_xlim(0, head + column if any_low else 2 * layers)
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_yticks(range(len(rows)), [clipped(row.name, 28) for row in rows], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.set_xlabel("layer (right: speedup, measured where it was)")
    add_legend(figure, axes)
    alt = f"{len(rows)} drafts, among them: {'; '.join(row.words() for row in rows[:5])}."
    return Plot(name, "What the drafts leave out" + " or round" * any_low, alt, figure)


def search_front(search: Search) -> Plot | None:
    """Acceptance against cost of all trials, coloured by priced speedup, and their front."""
    table = search.complete.dropna(subset=["acceptance"])
    if not len(table):
        return None
    known = searches.finalists(search)
    known = known.dropna(subset=["alpha"]) if len(known) else known
    figure, axes = new_figure(4.6)
    points = axes.scatter(
        table["draft_cost"], table["acceptance"], s=12 if len(table) > MANY else 25,
        c=table["score"], cmap="cividis", edgecolors=MUTED, linewidths=0.4, label="trials",
    )  # fmt: skip
    figure.colorbar(points, ax=axes, label="priced speedup over plain")
    front = table[table["front"]].sort_values(["draft_cost", "acceptance"])
    axes.step(
        front["draft_cost"], front["acceptance"], where="post", color=INK, linewidth=1.3,
        label="not dominated",
    )  # fmt: skip
    for number, row in enumerate(known.to_dict("records")):
        axes.plot(
            row["draft_cost"], row["alpha"], _marker_of(number), color=_colour_of(number),
            markersize=9, markeredgecolor=INK, label=_name(row), zorder=4,
        )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_xlabel("c: draft step / target step")
    axes.set_ylabel("alpha: a draft token is accepted")
    add_legend(figure, axes)
    names = _listed(known, "{name} accepts {alpha:.2f} at c {draft_cost:.2f}", "; ")
    alt = (
        f"Acceptance against draft cost of {len(table)} trials, {len(front)} of them not "
        f"dominated; the best has a priced speedup of {table['score'].max():.2f}. "
        f"{names or 'No finalist drafts'}."
    )
    return Plot("search-front", "Acceptance against cost", alt, figure)


def _name(finalist: Any) -> str:
    """A finalist's name, the winner's with a word."""
    return f"{finalist['name']}{' (winner)' if 'winner' in finalist['role'] else ''}"


def training_curve(of: Trainings) -> Plot:
    """Overlap of the first step with the target's law against tokens, a line each."""
    table = trainings.curves(of).query("step == 1")
    names = list(table["draft"].unique())
    figure, axes = new_figure(3.6 + 0.2 * sum(1 + len(name) // 56 for name in names))
    words = []
    for number, name in enumerate(names):
        rows = table[table["draft"] == name]
        add_line(axes, number, rows["tokens"], rows["overlap"], name)
        ends = rows.iloc[[0, -1]]
        said = _listed(ends, "{overlap:.3f}", " to ")
        words.append(f"{name} {said} after {ends['tokens'].iloc[-1]:,} tokens")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("overlap with the target's law")
    add_legend(figure, axes)
    alt = f"Overlap of the first drafted token by tokens of training. {'; '.join(words)}."
    return Plot("training-curve", "Overlap against tokens of training", alt, figure)


def short(count: float) -> str:
    """A count of tokens for an axis: 50k, 1.5M."""
    for size, word in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:g}{word}"
    return f"{count:g}"


def new_figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def add_legend(figure: Figure, axes: Axes) -> None:
    """Below the plot, where it hides no data; not for a single series."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = max(1, min(len(handles), 62 // (max(map(len, labels)) + 7)))
        labels = [textwrap.fill(clipped(label, 120), 56) for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)


def _error_bars(rows: pd.DataFrame, name: str) -> Any:
    """(2, n): how far `low` and `high` are from a column's values; 0 where they are unknown."""
    low, value, high = (rows[column].to_numpy(dtype=float) for column in ("low", name, "high"))
    return np.nan_to_num(np.stack([value - low, high - value])).clip(0)


def _note_at_the_side(axes: Axes, text: str, height: float) -> None:
    """A text in the right margin, at a height of the data."""
    axes.annotate(
        text, (1.0, height), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", va="center", fontsize=9,
    )  # fmt: skip


def _listed(rows: pd.DataFrame, form: str, between: str = ", ") -> str:
    """The rows in words, each by a format string over its columns."""
    return between.join(form.format_map(row) for row in rows.to_dict("records"))


def clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def add_line(axes: Axes, number: int, x: pd.Series, y: pd.Series, label: str) -> None:
    """A line through measured points, in the colour and with the marker of its number."""
    axes.plot(
        x, y, marker=_marker_of(number), markersize=5, linewidth=1.6, color=_colour_of(number),
        label=label, clip_on=False,
    )  # fmt: skip


def _colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _marker_of(number: int) -> str:
    return MARKERS[number % len(MARKERS)]
