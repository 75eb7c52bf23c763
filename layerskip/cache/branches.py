"""A round's tokens as a tree: the token that each follows, the tokens it sees, its position.

Nodes are numbered from the root, which is the row's last token, with every node after the one that
it follows. A node's cache slot is the root's plus its number, until the text continues along its
path. Its position, which determines angles and windows, is the root's plus its depth. Without
branches, number and depth are equal.
Shapes: B rows, N nodes, T tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

ROOT = -1
"""The parent of the root: the text before it."""


class Branches:
    """The trees of a pass.

    Args:
        parents: per row, the number of the node that each one follows, `ROOT` for node 0, (N,).
        first: number of nodes of each tree that earlier passes have run.

    Raises:
        ValueError: a node follows a later one, or rows have different numbers of nodes.
    """

    def __init__(self, parents: Sequence[Sequence[int]], first: int = 0) -> None:
        self.parents, self.first = [list(each) for each in parents], first
        self.nodes = len(self.parents[0])
        for row in self.parents:
            if len(row) != self.nodes or row[0] != ROOT:
                raise ValueError("every row's tree needs a root, and as many nodes as the others'")
            if not all(0 <= parent < node for node, parent in enumerate(row[1:], 1)):
                raise ValueError(f"each node must follow an earlier one, got {row}")

    @cached_property
    def depths(self) -> list[list[int]]:
        """Per row, the distance of each node from the root, (B, N)."""
        return [depths(row[1:]) for row in self.parents]

    @cached_property
    def flat(self) -> list[int]:
        """The parents of all rows, concatenated, (B * N,)."""
        return list(chain(*self.parents))

    @cached_property
    def sees(self) -> Tensor:
        """Whether a node sees another: itself and those on its path, (B, N, N) bool."""
        seen = torch.zeros(len(self.parents), self.nodes, self.nodes, dtype=torch.bool)
        for row, parents in enumerate(self.parents):
            for node, parent in enumerate(parents):
                if parent >= 0:
                    seen[row, node] = seen[row, parent]
                seen[row, node, node] = True
        return seen

    @cached_property
    def paths(self) -> Tensor:
        """`sees` of the pass's tokens, each as the bits of a number, (B, T); for up to 64 nodes."""
        paths = []
        for parents in self.parents:
            bits: list[int] = []
            for node, parent in enumerate(parents):
                bits.append(1 << node | (0 if parent == ROOT else bits[parent]))
            paths.append(bits[self.first :])
        return torch.tensor(paths, dtype=torch.uint64).view(torch.int64)


def depths(parents: Sequence[int]) -> list[int]:
    """Distances of the root and of nodes 1, 2, ... from the root."""
    all_depths = [0]
    for parent in parents:
        all_depths.append(all_depths[parent] + 1)
    return all_depths


def along(
    parents: Sequence[int], tokens: Sequence[int], text: Sequence[int], here: int = 0
) -> list[int]:
    """The nodes (1, 2, ...) along which a text continues after node `here`, by default the root."""
    path: list[int] = []
    for token in text:
        nodes = (
            node
            for node, (parent, drafted) in enumerate(zip(parents, tokens, strict=True), 1)
            if parent == here and drafted == token
        )
        here = next(nodes, 0)
        if not here:
            break
        path.append(here)
    return path


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes after the root on the path to a node, which is included."""
    path: list[int] = []
    while node:
        path.append(node)
        node = parents[node - 1]
    return path[::-1]


def trunk(parents: Sequence[int]) -> list[int]:
    """The chain of nodes after the root in which each is the first child of the one before."""
    path: list[int] = []
    here = 0
    while here in parents:
        here = parents.index(here) + 1
        path.append(here)
    return path
