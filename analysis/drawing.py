"""Common parts of a report's plots: style, colours, lines, legends, words.

Colours are Okabe and Ito's and a grey, safe for colour-blind readers; markers and hatches convey
the same without colour.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, PAPER, MUTED, LINE = "#222222", "#ffffff", "#666666", "#cccccc"
"""Colours that a page may replace by its own, light or dark; data never use them."""

_COLOURED = {
    INK: "text.color axes.labelcolor legend.labelcolor xtick.labelcolor ytick.labelcolor",
    PAPER: "figure.facecolor axes.facecolor savefig.facecolor legend.facecolor",
    MUTED: "axes.edgecolor xtick.color ytick.color",
    LINE: "grid.color legend.edgecolor",
}
STYLE: Any = {name: colour for colour, names in _COLOURED.items() for name in names.split()} | {
    "axes.grid": True,
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.spines.right", "axes.spines.top"), False),
    "font.family": ["DejaVu Sans"],
    "font.size": 10.5,
    **dict.fromkeys(("grid.linewidth", "hatch.linewidth"), 0.6),
    "svg.fonttype": "path",
    "svg.hashsalt": "layerskip",
    "text.parse_math": False,  # names in records are not formulas
}
WIDTH = 6.2  # inches; a phone shows two thirds of it, with the text still readable
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#d55e00", "#7f7f7f")
MARKERS = ("o", "s", "^", "v", "P", "X", "*", "<")


@dataclass(frozen=True)
class Plot:
    """A picture: file name without suffix, title, and a description in words and numbers."""

    name: str
    title: str
    alt: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """The picture, in the style of the moment."""
        drawn = io.StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # for scripts that the font lacks
            self.figure.savefig(drawn, format="svg", metadata={"Date": None})
        return drawn.getvalue()

    @property
    def box(self) -> str:
        """The corners of its coordinates, as in SVG."""
        found = re.search('viewBox="([^"]+)"', self.svg)
        assert found is not None
        return found[1]

    def drawing(self, prefix: str) -> Markup:
        """What its `svg` element holds, with prefixed ids and in the page's colours."""
        root = self.svg.index(">", self.svg.index("<svg")) + 1
        # A style element would affect the rest of the page; the root's attribute is inherited.
        inner = re.sub(r"<metadata>.*?</metadata>", "", self.svg[root:], flags=re.DOTALL)
        inner = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", inner, count=1, flags=re.DOTALL)
        inner = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}", inner)
        for colour, name in {INK: "ink", PAPER: "paper", MUTED: "muted", LINE: "line"}.items():
            inner = inner.replace(colour, f"var(--{name})")
        return Markup(inner)


def new_axes(height: float) -> Axes:
    return Figure(figsize=(WIDTH, height), layout="constrained").subplots()


def finished(axes: Axes, name: str, title: str, alt: str, x: str, y: str = "") -> Plot:
    """The plot of axes with labels, and with a legend below if there are several series."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.set_xlabel(x)
    axes.set_ylabel(textwrap.fill(y, 24))  # an axis of 2 inches holds so many letters
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = max(1, min(len(handles), 62 // (max(map(len, labels)) + 7)))
        labels = [textwrap.fill(clipped(label, 120), 56) for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)
    return Plot(name, title, alt, figure)


def lines(axes: Axes, table: pd.DataFrame, by: str, x: str, y: str, form: str) -> str:
    """Draw a line of `y` over `x` for each value of a column, with its interval if it has one.

    Returns the lines in words: `form`, a format string over columns, for each point.
    """
    words = []
    for number, (label, rows) in enumerate(table.groupby(by, sort=False)):
        colour = colour_of(number)
        axes.plot(
            rows[x], rows[y], marker=marker_of(number), markersize=5, linewidth=1.6, color=colour,
            label=str(label), clip_on=False,
        )  # fmt: skip
        if "low" in rows:
            bars = error_bars(rows, y)
            axes.errorbar(rows[x], rows[y], yerr=bars, fmt="none", color=colour, capsize=2.5)
        words.append(f"{label} {listed(rows, form)}")
    return "; ".join(words)


def error_bars(rows: pd.DataFrame, name: str) -> Any:
    """(2, n): the distances of `low` and `high` from a column's values; 0 if unknown."""
    low, value, high = (rows[column].to_numpy(dtype=float) for column in ("low", name, "high"))
    return np.nan_to_num(np.stack([value - low, high - value])).clip(0)


def note_at_the_side(axes: Axes, text: str, height: float) -> None:
    """Write a text in the right margin, at a height in data coordinates."""
    axes.annotate(
        text, (1.0, height), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", va="center", fontsize=9,
    )  # fmt: skip


def listed(rows: pd.DataFrame, form: str, between: str = ", ") -> str:
    """The rows in words, each by a format string over its columns."""
    return between.join(form.format_map(row) for row in rows.to_dict("records"))


def clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def in_lines(names: Iterable[str]) -> tuple[list[str], int]:
    """Names broken into lines, and the largest number of lines; only a paragraph is cut."""
    broken = [textwrap.fill(clipped(name, 80), 26) for name in names]
    return broken, max((name.count("\n") + 1 for name in broken), default=1)


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def marker_of(number: int) -> str:
    return MARKERS[number % len(MARKERS)]
