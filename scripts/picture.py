"""Draw the README's picture of one round: draft, verify, accept.

python scripts/picture.py docs/picture.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image

GREY, BLUE, PALE, ORANGE = "#dfe3e8", "#9ec5f4", "#e3eefc", "#f9cb8b"
GREEN, RED, WHITE = "#a8dba8", "#f3a9a9", "white"
DARK, SOFT = "#1f2933", "#52606d"
TEXT = ("to", "be", "or", "not", "to")
DRAFT, RIGHT = ("be", "that", "is", "fine"), ("be", "that", "is", "the")
RESULT = "4 tokens from one pass of the\nwhole model, and the very text\nit writes without drafts"
LAYERS, SHARED, SKIPPED = 6, 2, (3, 4)  # from the bottom, counted from 0
FOOT, STEP = 1.55, 0.5  # where towers of layers stand, and how far apart their layers are
PANELS = {
    0.3: ("1  Draft", "guess a few tokens, cheaply", "guessed"),
    5.2: ("2  Verify", "check all guesses in one pass", "what the model says"),
    10.1: ("3  Accept", "keep what the model says", "added to the text"),
}


def box(axes: Axes, x: float, y: float, text: str, colour: str, width: float = 0.8) -> None:
    """A token, or a layer; dashed where nothing runs."""
    how: dict[str, Any] = {"linestyle": "--" if colour in (WHITE, PALE) else "-", "edgecolor": DARK}
    round_ = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, 0.42, boxstyle=round_, facecolor=colour, **how))
    axes.text(x + width / 2, y + 0.2, text, ha="center", va="center", fontsize=10.5, color=DARK)


def row(axes: Axes, x: float, y: float, words: Sequence[str], colours: Sequence[str]) -> None:
    for place, (word, colour) in enumerate(zip(words, colours, strict=True)):
        box(axes, x + 0.88 * place, y, word, colour)


def say(axes: Axes, x: float, y: float, text: str, size: float = 10.5, **how: Any) -> None:
    axes.text(x, y, text, fontsize=size, **{"color": SOFT, "ha": "left", "va": "top", **how})


def draw(path: Path) -> None:
    figure = plt.figure(figsize=(11, 5.3), dpi=110)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 14.3), ylim=(0, 6.9))
    axes.set_axis_off()
    for x, (title, words, made) in PANELS.items():
        say(axes, x, 6.7, title, 16, weight="bold", color=DARK)
        say(axes, x, 6.17, words, 11.5)
        say(axes, x, 1.2, made)
    one, two, three = PANELS
    say(axes, one, 5.65, "the text so far")
    row(axes, one, 4.9, TEXT, [GREY] * len(TEXT))
    for layer in range(LAYERS):
        shared, skipped, y = layer < SHARED, layer in SKIPPED, FOOT + STEP * layer
        name = f"layer {layer + 1}"
        cheap = "skipped" if skipped else name if shared else f"{name}, 8 bits"
        colour = WHITE if skipped else BLUE if shared else ORANGE
        box(axes, one, y, cheap, colour, 1.8)
        box(axes, two, y, name, PALE if shared else BLUE, 1.8)
    say(axes, one + 2, 4.45, "by the model itself:\nits weights rounded,\nor layers skipped")
    say(axes, one + 2, 3.15, "or looked up: what\nfollowed when the\ntext said this before")
    say(axes, two + 2, 4.45, "the whole model,\nfor little more than\none token costs")
    say(axes, two + 2, 2.5, "layers that the draft\nran as they are need\nnot run again")
    row(axes, one, 0.4, DRAFT, [ORANGE] * 4)
    row(axes, two, 0.4, RIGHT, [BLUE] * 4)
    row(axes, three, 0.4, RIGHT, [GREEN] * 3 + [BLUE])
    for x in (one, two):
        ends = (x + 3.65, 0.61), (x + 4.75, 0.61)
        axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=15, color=SOFT))
    say(axes, two, 5.65, "the guesses, side by side")
    row(axes, two, 4.9, DRAFT, [ORANGE] * 4)
    say(axes, three, 5.65, "guessed")
    row(axes, three, 4.9, DRAFT, [GREEN] * 3 + [RED])
    say(axes, three, 4.65, "what the model says")
    row(axes, three, 3.9, RIGHT, [BLUE] * 4)
    say(axes, three, 3.2, RESULT, 11.5, weight="bold", color=DARK)
    figure.savefig(path)
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/picture.png"))
