"""Knows how all pictures look: colours, sizes, legends, intervals; knows no run and no search.

Colours are Okabe and Ito's and a grey, safe for colour-blind readers; markers and hatches say the
same without colour.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

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

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, GREY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#7f7f7f",
)
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, GREY)
MARKERS = ("o", "s", "^", "v", "P", "X", "*", "<")
BLACK, WHITE = "#000001", "#fffffe"  # on filled cells, whatever the page's colours


@dataclass(frozen=True)
class Plot:
    """A picture: file name without ending, title, and what it shows in words and numbers."""

    name: str
    title: str
    alt: str
    figure: Figure


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


def error_bars(rows: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """(2, n): how far `low` and `high` are from a column's values; 0 where they are unknown."""
    low, value, high = (rows[column].to_numpy(dtype=float) for column in ("low", name, "high"))
    bars = np.stack([value - low, high - value])
    bars[np.isnan(bars)] = 0.0
    return bars.clip(0)


def note_at_the_side(axes: Axes, text: str, height: float) -> None:
    """A text in the right margin, at a height of the data."""
    axes.annotate(
        text, (1.0, height), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", va="center", fontsize=9,
    )  # fmt: skip


def note_below(axes: Axes, text: str, place: float) -> None:
    """A text among the tick labels, at a place of the data."""
    axes.annotate(
        text, (place, 0.0), xycoords=("data", "axes fraction"), xytext=(0, -6),
        textcoords="offset points", ha="center", va="top", fontsize=9,
    )  # fmt: skip


def layer_ticks(axes: Axes, layers: int) -> None:
    """Ticks in the middle of a layer's two columns, a dozen or so at equal distances."""
    shown = range(0, layers, -(-layers // 16))
    axes.set_xticks([2 * layer + 1 for layer in shown], [str(layer) for layer in shown])


def listed(rows: pd.DataFrame, form: str, between: str = ", ") -> str:
    """The rows in words, each by a format string over its columns."""
    return between.join(form.format_map(row) for row in rows.to_dict("records"))


def clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def marker_of(number: int) -> str:
    return MARKERS[number % len(MARKERS)]
