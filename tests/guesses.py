"""A source that drafts random trees with tokens that are right most of the time."""

import random

from layerskip.cache.branches import ROOT, depths
from layerskip.decoding.sources.base import Proposal, Source, State

NODES = 9


def tree(draw, nodes=NODES):
    """The parents of a random tree, including that of the root."""
    return [ROOT, *(draw.randint(max(0, node - 4), node - 1) for node in range(1, nodes))]


def path_of(parents, node):
    """The nodes from the root to a node, both included."""
    path = [node]
    while parents[path[0]] != ROOT:
        path.insert(0, parents[path[0]])
    return path


class Guesses(Source):
    """Drafts random trees; four of five tokens are those of the true text at their depth."""

    key = "guesses"

    def __init__(self, texts, seed=0):
        self.texts, self.seed = texts, seed

    def open(self, batch):
        return _Guesses(batch, self.texts, random.Random(self.seed))


class _Guesses(State):
    def __init__(self, batch, texts, draw):
        super().__init__(batch)
        self.texts, self.draw = texts, draw

    def offer(self, row, most):
        rest = self.texts[row][len(self.batch.emitted[row]) :]
        parents, tokens = tree(self.draw, most + 1)[1:], list[int]()
        for depth, parent in zip(depths(parents)[1:], parents, strict=True):
            known = depth <= len(rest) and self.draw.random() < 0.8
            own = rest[depth - 1] if known else self.draw.randrange(2, self.batch.model.vocabulary)
            before = zip(parents, tokens, strict=False)
            tokens.append(0 if (parent, own) in before else own)
        return Proposal.of(tokens, 3, parents)
