"""Trees of drafted tokens: a node's logits are those of its path alone, whatever lies beside it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from models import FEW_FAMILIES, VOCABULARY, lively_model
from torch import Tensor

from layerskip.decoding.passes import Passes
from layerskip.model.branches import ROOT, Branches, along, depths
from layerskip.model.sublayers import Sublayers

NODES = 9


def tree(draw: random.Random, nodes: int = NODES) -> list[int]:
    """The parents of a random tree, the root's included."""
    return [ROOT, *(draw.randint(max(0, node - 4), node - 1) for node in range(1, nodes))]


def path_of(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to one, both included."""
    path = [node]
    while parents[path[0]] != ROOT:
        path.insert(0, parents[path[0]])
    return path


def opened_passes(opened: Sublayers, lengths: tuple[int, ...]) -> Passes:
    prompts = [torch.arange(row, row + each) % (VOCABULARY - 2) + 2 for row, each in
               enumerate(lengths)]  # fmt: skip
    passes = Passes(opened, [], prompts, max_new_tokens=40, max_draft_length=NODES)
    passes.prefill()
    return passes


def chain_logits(passes: Passes, texts: list[list[int]]) -> Tensor:
    """Logits (B, T, V) of tokens that follow one another."""
    count = len(texts[0])
    positions = [(row, offset) for row in range(len(texts)) for offset in range(count)]
    return passes.verify(torch.tensor(texts), positions).view(len(texts), count, -1)


@torch.no_grad()
def check(model: Any, execution: str, lengths: tuple[int, ...], seed: int) -> None:
    opened, draw = Sublayers(model, execution), random.Random(seed)
    assert opened.execution == execution

    def same(got: Tensor, want: Tensor) -> None:
        if opened.exact:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)  # norms are float32

    rows = len(lengths)
    parents = [tree(draw) for _ in lengths]
    tokens = [[draw.randrange(2, VOCABULARY) for _ in range(NODES)] for _ in lengths]
    positions = [(row, node) for row in range(rows) for node in range(NODES)]
    passes = opened_passes(opened, lengths)
    logits = passes.verify(torch.tensor(tokens), positions, parents).view(rows, NODES, -1).clone()
    paths: list[list[int]] = []
    for node in range(NODES - 1, 0, -1):
        paths = [path_of(each, node) for each in parents]
        texts = [
            [own[at] for at in path] + [5] * (NODES - len(path))
            for own, path in zip(tokens, paths, strict=True)
        ]
        alone = chain_logits(opened_passes(opened, lengths), texts)
        for row, path in enumerate(paths):
            same(logits[row, path], alone[row, : len(path)])
    # the text goes on along a path, and the next pass sees it as if nothing had been beside it
    paths = [path_of(each, draw.randrange(NODES)) for each in parents]
    other = opened_passes(opened, lengths)
    texts = [
        [own[at] for at in path] + [5] * (NODES - len(path))
        for own, path in zip(tokens, paths, strict=True)
    ]
    chain_logits(other, texts)
    for row, path in enumerate(paths):
        passes.commit(row, range(len(path)), path[1:])
        other.commit(row, range(len(path)))
    new = [[draw.randrange(2, VOCABULARY) for _ in range(3)] for _ in lengths]
    same(chain_logits(passes, new), chain_logits(other, new))


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("execution", ["modules", "fused"])
def test_nodes_see_their_path_alone(family: str, execution: str) -> None:
    for seed, lengths in enumerate([(6,), (9, 4, 30)]):
        check(lively_model(family), execution, lengths, seed)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gemma4"])
def test_native_nodes_have_the_bits_of_their_path(family: str, dtype: torch.dtype) -> None:
    model = lively_model(family, dtype=dtype, max_position_embeddings=600)
    for seed, lengths in enumerate([(6,), (9, 4, 30), (250, 247), (253, 15)]):
        check(model, "native", lengths, seed)


def test_a_tree_that_peeks_is_seen() -> None:
    """Negative control: a node that saw its neighbour would have other logits."""
    opened = Sublayers(lively_model("llama"), "fused")
    tokens = torch.tensor([[7, 9, 11]])
    positions = [(0, node) for node in range(3)]
    beside = opened_passes(opened, (6,)).verify(tokens, positions, [[ROOT, 0, 0]])
    behind = opened_passes(opened, (6,)).verify(tokens, positions, [[ROOT, 0, 1]])
    assert torch.allclose(beside[:2], behind[:2])
    assert not torch.allclose(beside[2], behind[2])


def test_a_chain_is_a_tree_with_one_branch() -> None:
    opened = Sublayers(lively_model("llama"), "fused")
    tokens = torch.tensor([[7, 9, 11]])
    positions = [(0, node) for node in range(3)]
    chain = opened_passes(opened, (6,)).verify(tokens, positions)
    same = opened_passes(opened, (6,)).verify(tokens, positions, [[ROOT, 0, 1]])
    torch.testing.assert_close(chain, same, rtol=1e-4, atol=1e-5)


def test_depths_and_paths() -> None:
    parents, tokens = [0, 0, 1, 2, 4], [5, 7, 6, 5, 5]
    assert depths(parents) == [0, 1, 1, 2, 2, 3]
    assert along(parents, tokens, [7, 5, 5, 3]) == [2, 4, 5]
    assert along(parents, tokens, [5, 5]) == [1]
    assert along(parents, tokens, [9]) == []
    for wrong in ([[0]], [[ROOT, 1]], [[ROOT, 0], [ROOT]], [[ROOT, 0, 3]]):
        with pytest.raises(ValueError, match=r"root|follow"):
            Branches(wrong)
