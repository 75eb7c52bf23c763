"""The source that looks up logits that the target computed earlier after the same few tokens.

It stores the target's best scores at every position computed, including those after rejected
drafts, in memory for the texts of one batch. A draft uses the scores stored for the longest suffix
seen before, and draws from them with the law and the noise of its own position: the token that the
target would draw now, not the one it drew then.

Shapes: N positions, K tokens kept of each, V vocabulary, S stored positions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from layerskip.cache.branches import along
from layerskip.decoding.acceptance import CopyAcceptance
from layerskip.decoding.sources.base import Batch, Proposal, Source, State
from layerskip.decoding.sources.lookup import NOTHING, Lookup
from layerskip.research.trees import best_first

_SUFFIX = 4  # tokens in the longest suffix that is looked up
_MOST = 2**14  # positions stored for a batch
OF_A_TEXT = 2**12  # positions stored per text, where texts come and go
_KEPT = 32  # K
_PLACE = 1024  # approximate bytes per stored position
_LEAST = 0.02  # minimum chance of acceptance for a token

Tokens = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.float32]

# Priors for the best tokens of a position: by the number of tokens in common, by the margin of the
# scores, and for tokens after the best one by rank.
_SUFFIX_PRIOR = (0.22, 0.44, 0.59, 0.7)
_MARGIN_EDGES = (0.5, 1.5, 4.0)
_MARGIN_FACTORS = (0.6, 0.85, 1.1, 1.35)
_RANK_PRIOR = (0.2, 0.1, 0.05, 0.03, 0.02, 0.015, 0.01)
_WEIGHT = 8.0


class LogitLookup(Source):
    """Drafts from logits that the target computed earlier in the same call.

    Args:
        branches: maximum number of tokens drafted after one, at most 8.
        lookup: looked-up tokens join the trees, each as one of the best after its node.
        longest: maximum number of tokens in a tree.
    """

    key, name = "lookup-laws", "laws"
    words = "trees of stored logits"

    def __init__(
        self, branches: int = 3, lookup: Lookup | None = None, *, longest: int = 16
    ) -> None:
        self.branches, self.lookup, self.nodes = branches, lookup, longest

    def open(self, batch: Batch) -> State:
        return _TableState(batch, self)


class LogitTable:
    """The best raw logits of a model, by the tokens before them.

    Args:
        most: maximum number of positions, of which the latest are kept.

    Attributes:
        tokens, logits: for every position, likeliest first, (S, K).
    """

    def __init__(self, most: int = _MOST) -> None:
        self.most, self._next = most, 0
        self._contexts: list[tuple[int, ...]] = []
        self._places: dict[tuple[int, ...], int] = {}

    @property
    def nbytes(self) -> int:
        """Their approximate size in bytes."""
        return _PLACE * len(self._contexts)

    def keep(self, contexts: Sequence[Sequence[int]], tokens: Tokens, logits: Numbers) -> None:
        """Store the best of raw logits that follow contexts, as from `best_of`, (N, K) each."""
        if not self._contexts:
            shape = self.most, tokens.shape[1]  # (S, K)
            self.tokens, self.logits = np.empty(shape, np.int32), np.empty(shape, np.float32)
        places = [(self._next + i) % self.most for i in range(len(contexts))]
        for place, context in zip(places, contexts, strict=True):
            last = tuple(context[-_SUFFIX:])
            if self._next < self.most:
                self._contexts.append(last)
            else:
                for key in _suffixes(self._contexts[place]):
                    if self._places[key] == place:
                        del self._places[key]
                self._contexts[place] = last
            self._places.update(dict.fromkeys(_suffixes(last), place))
            self._next += 1
        self.tokens[places], self.logits[places] = tokens, logits

    def find(self, context: Sequence[int]) -> tuple[int, int]:
        """The length of the longest known suffix, 0 for none, and its stored position."""
        for key in _suffixes(tuple(context[-_SUFFIX:])):
            place = self._places.get(key)
            if place is not None:
                return len(key), place
        return 0, -1


def _suffixes(context: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The suffixes of a context, longest first."""
    return [context[first:] for first in range(len(context))]


def best_of(raw: Tensor) -> tuple[Tokens, Numbers]:
    """The best tokens of raw logits (N, V), and their logits, likeliest first, (N, K) each."""
    logits, tokens = raw.float().topk(min(_KEPT, raw.shape[1]))
    return tokens.int().cpu().numpy(), logits.cpu().numpy()


class _Best(NamedTuple):
    """The best tokens after a node of a tree.

    Attributes:
        suffix: number of tokens that their stored position has in common with the node's.
        margin: between the scores of the best two.
    """

    tokens: list[int]
    suffix: int
    margin: float


class _Tree(NamedTuple):
    """The last proposal to a row: each node's parent, its token, and the best after nodes."""

    parents: list[int]
    tokens: list[int]
    best: dict[int, _Best]


class _TableState(State):
    reads_logits = True

    def __init__(self, batch: Batch, source: LogitLookup) -> None:
        super().__init__(batch)
        self.source = source
        self.stored = [LogitTable()] * len(batch.seats)  # where each row's logits are added
        self.copies = None if source.lookup is None else source.lookup.open(batch)
        self.copy_acceptance, self.acceptance = CopyAcceptance(), BestAcceptance()
        self._copied: dict[int, Proposal] = {}  # by row, the last proposal looked up in texts
        self._trees: dict[int, _Tree] = {}
        self.ends = [prompt[-_SUFFIX:].tolist() for prompt in batch.prompts]

    def offer(self, row: int, most: int) -> Proposal:
        bests: dict[int, _Best] = {}
        copied = NOTHING if self.copies is None or not most else self.copies.offer(row, most)
        self._copied[row] = copied
        copy, match = list(copied.tokens or ()), copied.match or 0

        def children(
            node: int, chance: float, here: tuple[list[int], int, bool]
        ) -> Iterator[tuple[bool, float, int, tuple[list[int], int, bool]]]:
            context, depth, copies = here  # the last tokens, how many, and whether they are copied
            rates: dict[int, float] = {}
            best = self._best(row, depth, context)
            if best is not None:
                bests[node] = best
                rates.update(zip(best.tokens, self.acceptance.chances(best), strict=False))
            if copies and depth < len(copy):
                rate = self.copy_acceptance.acceptance(match + depth)
                rates[copy[depth]] = max(rate, rates.get(copy[depth], 0.0))
            for token, rate in rates.items():
                if chance * rate >= _LEAST:
                    there = [*context, token][-_SUFFIX:], depth + 1
                    goes_on = copies and copy[depth : depth + 1] == [token]
                    yield False, chance * rate, token, (*there, goes_on)

        nodes = best_first(min(most, self.source.nodes), children, (self.ends[row], 0, True))
        tree = _Tree([each.parent for each in nodes], [each.token for each in nodes], bests)
        self._trees[row] = tree
        if not nodes:
            return NOTHING
        common = max(match, bests[0].suffix if 0 in bests else 0)
        return Proposal.of(tree.tokens, common, tree.parents, [each.chance for each in nodes])

    def _best(self, row: int, depth: int, context: list[int]) -> _Best | None:
        table = self.stored[row]
        suffix, place = table.find(context)
        if not suffix:
            return None
        tokens = table.tokens[place].tolist()  # (K,)
        scores = self.batch.scores(row, depth, tokens, table.logits[place].tolist())
        branches = self.source.branches
        best = nlargest(max(2, branches), range(len(scores)), scores.__getitem__)
        if not best:
            return None
        margin = scores[best[0]] - scores[best[1]] if len(best) > 1 else math.inf
        return _Best([tokens[i] for i in best[:branches]], suffix, margin)

    def _learn(self, row: int, emitted: Sequence[int]) -> None:
        """Count which of the tokens after the nodes on the text's path were right."""
        copied = self._copied.pop(row, NOTHING)
        for depth, (ours, came) in enumerate(zip(copied.tokens or (), emitted, strict=False)):
            self.copy_acceptance.observe((copied.match or 0) + depth, ours == came)
            if ours != came:
                break
        tree, here = self._trees.pop(row, _Tree([], [], {})), 0
        for token in emitted:
            if here not in tree.best:
                return
            best = tree.best[here]
            rank = best.tokens.index(token) if token in best.tokens else None
            self.acceptance.observe(best, rank)
            here = next(iter(along(tree.parents, tree.tokens, [token], here)), -1)

    def read(self, raw: Tensor, seen: Sequence[tuple[int, Sequence[int]]]) -> None:
        tokens, logits = best_of(raw)
        for row, places in groupby(range(len(seen)), lambda i: seen[i][0]):
            at = [*places]
            contexts = [[*self.ends[row], *seen[i][1]] for i in at]
            self.stored[row].keep(contexts, tokens[at], logits[at])

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        self._learn(row, emitted)
        if self.copies is not None:
            self.copies.commit(row, emitted, steps)
        self.ends[row] = [*self.ends[row], *emitted][-_SUFFIX:]

    def begin(self, row: int) -> None:
        self.stored[row] = LogitTable(OF_A_TEXT)
        self.ends[row] = self.batch.seats[row].prompt[-_SUFFIX:].tolist()
        self._trees.pop(row, None)
        self._copied.pop(row, None)
        if self.copies is not None:
            self.copies.begin(row)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in {*self.stored})


class BestAcceptance:
    """Estimates which of the best tokens after a known context comes next.

    The best one's chance depends on the common suffix and on the margin between the two best
    scores; that of each further one, if the best is wrong, only on its rank.
    """

    def __init__(self) -> None:
        self._won = [
            [_WEIGHT * min(0.97, prior * factor) for factor in _MARGIN_FACTORS]
            for prior in _SUFFIX_PRIOR
        ]
        self._seen = [[_WEIGHT] * len(_MARGIN_FACTORS) for _ in _SUFFIX_PRIOR]
        self._others = [_WEIGHT * prior for prior in _RANK_PRIOR]
        self._missed = _WEIGHT

    def chances(self, best: _Best) -> list[float]:
        """The chances of the tokens, starting with the best one."""
        row, column = self._bin(best)
        first = self._won[row][column] / self._seen[row][column]
        rest = (1.0 - first) / self._missed
        return [first, *(rest * won for won in self._others)][: len(best.tokens)]

    def observe(self, best: _Best, rank: int | None) -> None:
        """Count the rank of the actual token: 0 for the best, None for none of them."""
        row, column = self._bin(best)
        self._won[row][column] += rank == 0
        self._seen[row][column] += 1.0
        if rank != 0:
            self._missed += 1.0
            if rank is not None and rank <= len(self._others):
                self._others[rank - 1] += 1.0

    @staticmethod
    def _bin(best: _Best) -> tuple[int, int]:
        return min(best.suffix, len(_SUFFIX_PRIOR)) - 1, bisect_right(_MARGIN_EDGES, best.margin)
