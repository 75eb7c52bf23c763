"""The source that looks laws up: what the target said when it last read the same few tokens.

It keeps the target's best scores at every place that it has computed, also behind drafts that it
rejected. A draft takes those behind the longest suffix that it has seen before, and draws from them
by the law and the noise of its own place: what the target would draw now, not what it drew then.

Letters: N positions, K tokens kept of each, V vocabulary, S places.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from heapq import heappop, heappush, nlargest
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from layerskip.decoding.acceptance import BranchAcceptance, CopyAcceptance
from layerskip.decoding.sources.base import Batch, Proposal, Source, State
from layerskip.decoding.sources.lookup import NOTHING, Lookup
from layerskip.model.branches import along

_KEPT = 32  # K
_SUFFIX = 4  # tokens of the longest suffix
_BLOCK = 64  # neighbouring tokens
_LONGEST = 16  # nodes of a tree
_LEAST = 0.02  # the least chance of a node


class Laws:
    """The best raw logits of a model, by the tokens before them.

    Args:
        most: places that are kept, the latest ones. A place takes about a kilobyte, of which 256
            bytes are tokens and logits.

    Attributes:
        tokens, logits: of every place, the likeliest first, (S, K).
    """

    def __init__(self, most: int = 2**14) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._of: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._next = 0
        self._contexts: list[tuple[int, ...]] = []
        self._places: dict[tuple[int, ...], int] = {}

    def check(self, fingerprint: str) -> None:
        """Drop everything if it is of another model than the one of this fingerprint."""
        with self._lock:
            if self._of not in (None, fingerprint):
                self._clear()
            self._of = fingerprint

    def add(self, contexts: Sequence[Sequence[int]], raw: Tensor) -> None:
        """Keep raw logits (N, V) behind contexts, the last tokens of each."""
        self.keep(contexts, *best_of(raw))

    def keep(
        self,
        contexts: Sequence[Sequence[int]],
        tokens: npt.NDArray[np.int32],
        logits: npt.NDArray[np.float32],
    ) -> None:
        """Keep the best of raw logits behind contexts, as `best_of` has them, (N, K) each."""
        with self._lock:
            if not self._contexts:
                shape = self.most, tokens.shape[1]  # (S, K)
                self.tokens = np.empty(shape, np.int32)
                self.logits = np.empty(shape, np.float32)
            places = [(self._next + i) % self.most for i in range(len(contexts))]
            for place, context in zip(places, contexts, strict=True):
                own = tuple(context[-_SUFFIX:])
                if self._next < self.most:
                    self._contexts.append(own)
                else:
                    for key in suffixes(self._contexts[place]):
                        if self._places[key] == place:
                            del self._places[key]
                    self._contexts[place] = own
                self._places.update(dict.fromkeys(suffixes(own), place))
                self._next += 1
            self.tokens[places], self.logits[places] = tokens, logits

    def find(self, context: Sequence[int]) -> tuple[int, int]:
        """The length of the longest suffix that is known, 0 for none, and its place."""
        for key in suffixes(tuple(context[-_SUFFIX:])):
            place = self._places.get(key)
            if place is not None:
                return len(key), place
        return 0, -1


def suffixes(context: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Those of a context, the longest first."""
    return [context[first:] for first in range(len(context))]


def best_of(raw: Tensor) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The best tokens of raw logits (N, V), and their logits, the likeliest first, (N, K) each."""
    logits, tokens = (each.cpu() for each in largest_of(raw.float(), _KEPT))
    return tokens.int().numpy(), logits.numpy()


def largest_of(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of values (N, V), in order, and their indices, (N, K) each: K = min(count, V).

    As `topk`, which would take several times as long on a CPU.
    """
    count = min(count, values.shape[1])
    if missing := -values.shape[1] % _BLOCK:
        values = F.pad(values, (0, missing), value=-float("inf"))
    blocks = values.unflatten(1, (-1, _BLOCK))  # (N, V / 64, 64)
    # the blocks with the largest maxima hold them
    best = blocks.amax(2).topk(min(count, blocks.shape[1])).indices  # (N, M)
    few = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)  # (N, 64 M)
    found, at = few.topk(count)  # (N, K) each
    return found, best.gather(1, at // _BLOCK) * _BLOCK + at % _BLOCK


class LookupLaws(Source):
    """Looks laws up in what the target has said.

    Args:
        laws: where they are kept, also for later calls; by default every call begins with none.
        branches: the most tokens that are drafted behind one.
        lookup: tokens looked up in texts join the trees, each as one of the best behind its node.
        longest: the most tokens of a tree.
        beside: whether it also learns what the target said behind drafts that it rejected.
    """

    key = "lookup-laws"
    longest: int

    def __init__(
        self,
        laws: Laws | None = None,
        branches: int = 3,
        lookup: Lookup | None = None,
        *,
        longest: int = _LONGEST,
        beside: bool = True,
    ) -> None:
        self.laws, self.branches, self.lookup = laws, branches, lookup
        self.longest, self.beside = longest, beside

    def open(self, batch: Batch) -> State:
        laws = Laws() if self.laws is None else self.laws
        laws.check(batch.model.weights.fingerprint())
        return _State(batch, laws, self)

    def timed(self) -> Source:
        return Lookup().timed()


class _Behind(NamedTuple):
    """What may follow a node of a tree: the best tokens, with how much their context has in common.

    Attributes:
        margin: of the scores of the best two.
    """

    tokens: list[int]
    suffix: int
    margin: float


class _State(State):
    reads_logits = True

    def __init__(self, batch: Batch, laws: Laws, source: LookupLaws) -> None:
        super().__init__(batch)
        self.laws, self.source, self.branches = laws, source, source.branches
        self.copies = None if source.lookup is None else source.lookup.open(batch)
        self.copy_acceptance = CopyAcceptance()
        self._copied: dict[int, Proposal] = {}  # by row, what was last looked up
        self.ends = [prompt[-_SUFFIX:].tolist() for prompt in batch.prompts]
        self.acceptance = BranchAcceptance()
        # of the round in progress: what was seen, and the best behind it, (N, K) each
        self._read: tuple[
            Sequence[tuple[int, Sequence[int]]],
            npt.NDArray[np.int32],
            npt.NDArray[np.float32],
        ]
        # by row, of the tree last offered: what each node follows, its token, what is behind it
        self._trees: dict[int, tuple[list[int], list[int], dict[int, _Behind]]] = {}

    def offer(self, row: int, most: int) -> Proposal:
        parents, tokens, chances = list[int](), list[int](), list[float]()
        behind: dict[int, _Behind] = {}
        # the most promising first: chance, order, parent, token, the context behind it, its depth
        waiting: list[tuple[float, int, int, int, list[int], int]] = []

        copied = NOTHING if self.copies is None or not most else self.copies.offer(row, most)
        self._copied[row] = copied
        copy, match = list(copied.tokens or ()), copied.match or 0
        trunk = 0  # the last node of the tree that is of the copy's beginning

        def grow(node: int, chance: float, context: list[int], depth: int) -> None:
            rates: dict[int, float] = {}
            found = self._behind(row, depth, context)
            if found is not None:
                behind[node] = found
                known = self.acceptance.chances(found.suffix, found.margin, len(found.tokens))
                rates.update(zip(found.tokens, known, strict=False))
            if node == trunk and depth < len(copy):
                rate = self.copy_acceptance.acceptance(match + depth)
                rates[copy[depth]] = max(rate, rates.get(copy[depth], 0.0))
            for token, rate in rates.items():
                if (own := chance * rate) >= _LEAST:
                    after = [*context, token][-_SUFFIX:]
                    heappush(waiting, (-own, next(order), node, token, after, depth + 1))

        order = count()
        if most:
            grow(0, 1.0, self.ends[row], 0)
        while waiting and len(tokens) < min(most, self.source.longest):
            less, _, parent, token, context, depth = heappop(waiting)
            parents.append(parent)
            tokens.append(token)
            chances.append(-less)
            if parent == trunk and copy[depth - 1 : depth] == [token]:
                trunk = len(tokens)
            if len(tokens) < most:
                grow(len(tokens), -less, context, depth)
        self._trees[row] = parents, tokens, behind
        if not tokens:
            return NOTHING
        common = max(match, behind[0].suffix if 0 in behind else 0)
        return Proposal.of(tokens, common, parents, chances)

    def _behind(self, row: int, depth: int, context: list[int]) -> _Behind | None:
        suffix, place = self.laws.find(context)
        if not suffix:
            return None
        tokens = self.laws.tokens[place].tolist()  # (K,)
        scores = self.batch.scores(row, depth, tokens, self.laws.logits[place].tolist())
        best = nlargest(max(2, self.branches), range(len(scores)), scores.__getitem__)
        if not best:
            return None
        margin = scores[best[0]] - scores[best[1]] if len(best) > 1 else math.inf
        return _Behind([tokens[i] for i in best[: self.branches]], suffix, margin)

    def _learn(self, row: int, emitted: Sequence[int]) -> None:
        """Count which of the tokens behind the nodes on the text's path were right."""
        copied = self._copied.pop(row, NOTHING)
        copy, match = copied.tokens or (), copied.match or 0
        for depth, (ours, came) in enumerate(zip(copy, emitted, strict=False)):
            self.copy_acceptance.observe(match + depth, ours == came)
            if ours != came:
                break
        parents, tokens, behind = self._trees.pop(row, ([], [], {}))
        here = 0
        for token in emitted:
            if here not in behind:
                return
            own = behind[here]
            rank = own.tokens.index(token) if token in own.tokens else None
            self.acceptance.observe(own.suffix, own.margin, rank)
            here = next(iter(along(parents, tokens, [token], here)), -1)

    def read(self, raw: Tensor, seen: Sequence[tuple[int, Sequence[int]]]) -> None:
        best = best_of(raw)
        if self.source.beside:
            self.laws.keep([[*self.ends[row], *tokens] for row, tokens in seen], *best)
        else:
            self._read = seen, *best

    def _keep_path(self, row: int, emitted: Sequence[int]) -> None:
        """Keep what the target said along the text alone."""
        seen, tokens, logits = self._read
        kept = {
            i: [*self.ends[row], *drafted]
            for i, (other, drafted) in enumerate(seen)
            if other == row
            and list(drafted) == list(emitted[: len(drafted)])
            and len(drafted) < len(emitted)  # behind an end of text nothing is said
        }
        self.laws.keep([*kept.values()], tokens[[*kept]], logits[[*kept]])

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        if not self.source.beside:
            self._keep_path(row, emitted)
        self._learn(row, emitted)
        if self.copies is not None:
            self.copies.commit(row, emitted, steps)
        self.ends[row] = [*self.ends[row], *emitted][-_SUFFIX:]
