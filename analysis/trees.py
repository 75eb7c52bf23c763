"""The picture of one tree that was drafted, and of what the text took of it."""

from __future__ import annotations

from matplotlib.ticker import MaxNLocator

from layerskip.analysis.drawing import (
    BLUE,
    INK,
    MUTED,
    PAPER,
    Plot,
    clipped,
    finished,
    new_axes,
)
from layerskip.analysis.runs import Run, Tree

LARGEST = 24  # drafted tokens of a tree that is drawn: more would be too small to read


def _told(tree: Tree) -> tuple[int, int, int]:
    """How much a tree shows: tokens taken after a first choice that was wrong, taken, drafted."""
    taken, parents = tree.taken, tree.parents
    turns = [
        place for place, node in enumerate(taken) if parents.index(parents[node - 1]) + 1 < node
    ]
    return (len(taken) - turns[0] if turns else 0), len(taken), len(parents)


def picture(run: Run) -> Plot | None:
    """The tree that shows most: what was drafted, and what the text took of it."""
    table = run.rounds.query(f"batch_size == 1 and drafted <= {LARGEST}")
    table = table[table["tree"].notna()]
    if not len(table):
        return None
    place = max(table.index, key=lambda index: _told(table["tree"][index]))  # of equals the first
    shown = table.loc[place]
    tree, prompt = shown["tree"], run.records[shown["record"]]["prompts"][0]
    depths = tree.depths
    heights = _heights(tree)
    axes = new_axes(0.9 + 0.36 * (max(heights) + 1))
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
    alt = (
        f"Round {shown['number'] + 1} of {prompt}, {shown['method']}: "
        f"{len(tree.parents)} tokens drafted, the longest path {max(depths)}; taken: "
        f"{', '.join(_name(tree, node) for node in tree.taken) or 'none'}, and then a token of "
        "the target's own."
    )
    title, places = (
        "A tree that was drafted, and what was taken of it",
        "place after the text so far",
    )
    return finished(axes, "tree", title, alt, f"{places} (bold: what the text took)")


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
