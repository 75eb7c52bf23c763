"""The plots of trees of drafts: tokens a pass by size, and one tree with what was taken of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from layerskip.analysis import tables
from layerskip.analysis.plots import (
    BLUE,
    INK,
    MUTED,
    PAPER,
    Plot,
    add_legend,
    add_line,
    clipped,
    new_figure,
)
from layerskip.analysis.runs import Run, Tree, rounds_of

LARGEST = 24  # drafted tokens of a tree that is drawn: more would be too small to read


def tree_plots(run: Run) -> list[Plot]:
    """Those that the run's records have data for."""
    return [plot for plot in (sizes(run), picture(run)) if plot is not None]


def sizes(run: Run) -> Plot | None:
    """Tokens a pass by how many were drafted."""
    table = tables.sizes(run)
    if not len(table):
        return None
    figure, axes = new_figure(3.6)
    words = []
    for number, (method, rows) in enumerate(table.groupby("method", sort=False)):
        add_line(axes, number, rows["drafted"], rows["tokens_per_pass"], str(method))
        told = (
            f"{row['drafted']}: {row['tokens_per_pass']:.2f} ({row['rounds']})"
            for row in rows.to_dict("records")
        )
        words.append(f"{method} {', '.join(told)}")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("tokens drafted, in a chain or in a tree")
    axes.set_ylabel("tokens a target pass")
    add_legend(figure, axes)
    alt = f"Tokens a target pass by tokens drafted, in brackets the rounds: {'; '.join(words)}."
    return Plot("sizes", "Tokens a pass by size", alt, figure)


class _Found(NamedTuple):
    """A tree, and where it was drafted: a round, from 1 on, of a record."""

    tree: Tree
    record: dict[str, Any]
    number: int


def _trees(run: Run) -> Iterator[_Found]:
    for record in run.records:
        if record["batch_size"] == 1:
            for number, each in enumerate(rounds_of(record), 1):
                if each.tree is not None and each.drafted <= LARGEST:
                    yield _Found(each.tree, record, number)


def _told(found: _Found) -> tuple[int, int, int]:
    """How much a tree shows: tokens taken behind a first choice that was wrong, taken, drafted."""
    taken, parents = found.tree.taken, found.tree.parents
    turns = [
        place for place, node in enumerate(taken) if parents.index(parents[node - 1]) + 1 < node
    ]
    return (len(taken) - turns[0] if turns else 0), len(taken), len(parents)


def picture(run: Run) -> Plot | None:
    """The tree that shows most: what was drafted, and what the text took of it."""
    found = max(_trees(run), key=_told, default=None)  # of equals the first
    if found is None:
        return None
    tree, depths = found.tree, found.tree.depths
    heights = _heights(tree)
    figure, axes = new_figure(0.9 + 0.36 * (max(heights) + 1))
    taken = {0, *tree.taken}
    for node, parent in enumerate(tree.parents, 1):
        on = node in taken
        axes.plot(
            [depths[parent], depths[node]], [heights[parent], heights[node]],
            color=BLUE if on else MUTED, linewidth=2.6 if on else 1.0, zorder=2 if on else 1,
        )  # fmt: skip
    most = max(4, 56 // (max(depths) + 1))
    for node, (depth, height) in enumerate(zip(depths, heights, strict=True)):
        on = node in taken
        axes.plot(
            [depth], [height], marker="o", markersize=8 if on else 6, zorder=3,
            color=BLUE if on else MUTED, markerfacecolor=BLUE if on else PAPER,
        )  # fmt: skip
        axes.annotate(
            clipped(_name(tree, node), most), (depth, height), xytext=(0, 6), ha="center",
            textcoords="offset points", fontsize=8.5, fontweight="bold" if on else "normal",
            color=INK,
        )  # fmt: skip
    axes.set_ylim(max(heights) + 0.5, -0.9)
    axes.set_xlim(-0.5, max(depths) + 0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    axes.set_xlabel("place behind the text so far (bold: what the text took)")
    record = found.record
    alt = (
        f"Round {found.number} of {record['prompts'][0]}, {record['method']}: "
        f"{len(tree.parents)} tokens drafted, the longest path {max(depths)}; taken: "
        f"{', '.join(_name(tree, node) for node in tree.taken) or 'none'}, and then a token of "
        "the target's own."
    )
    return Plot("tree", "A tree that was drafted, and what was taken of it", alt, figure)


def _name(tree: Tree, node: int) -> str:
    """What a node is called: its token's text, or its number where the records have no texts."""
    if not node:
        return "text"
    if tree.words is None:
        return str(node)
    return tree.words[node - 1].strip() or "\N{OPEN BOX}"


def _heights(tree: Tree) -> list[int]:
    """A line for every leaf; each node lies on that of the first one that follows it."""
    following: list[list[int]] = [[] for _ in range(len(tree.parents) + 1)]
    for node, parent in enumerate(tree.parents, 1):
        following[parent].append(node)
    heights, used, waiting = [0] * len(following), -1, [0]
    while waiting:
        node = waiting.pop()
        if not following[node]:
            used += 1
            while True:  # back along the first ones
                heights[node] = used
                if not node or following[tree.parents[node - 1]][0] != node:
                    break
                node = tree.parents[node - 1]
            continue
        waiting += reversed(following[node])
    return heights
