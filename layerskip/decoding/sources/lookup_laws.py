"""The source that looks laws up: what the target said when it last read the same few tokens.

It keeps the target's best scores at every place that it has computed, also behind drafts that it
rejected. A draft takes those behind the longest suffix that it has seen before, and draws from them
by the law and the noise of its own place: what the target would draw now, not what it drew then.

Letters: N positions, K tokens kept of each, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush, nlargest
from itertools import count, groupby
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from layerskip.decoding.acceptance import BranchAcceptance, CopyAcceptance
from layerskip.decoding.sources.base import Batch, Proposal, Source, State
from layerskip.decoding.sources.kept_laws import SUFFIX, Laws, Numbers, Tokens, best_of
from layerskip.decoding.sources.lookup import NOTHING, Lookup
from layerskip.model.branches import along

_LONGEST = 16  # nodes of a tree
_OF_A_TEXT = 2**12  # places that each text keeps where texts come and go


class LookupLaws(Source):
    """Looks laws up in what the target has said.

    Args:
        laws: where they are kept, also for later calls; by default every call begins with none.
        known: of earlier texts, looked up, too, and left as they are; perhaps of a file.
        branches: the most tokens that are drafted behind one, 8 at most.
        lookup: tokens looked up in texts join the trees, each as one of the best behind its node.
        longest: the most tokens of a tree.
        least: the least chance of a token to be accepted.
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
        known: Laws | None = None,
        longest: int = _LONGEST,
        least: float = 0.02,
        beside: bool = True,
    ) -> None:
        self.laws, self.branches, self.lookup = laws, branches, lookup
        self.known_laws, self.longest = known, longest
        self.least, self.beside = least, beside

    def open(self, batch: Batch) -> State:
        laws = Laws() if self.laws is None else self.laws
        tables = [laws, *self.others]
        for table in tables:
            table.check(batch.model)
        return _State(batch, laws, self)

    @property
    def others(self) -> list[Laws]:
        """Laws that are looked up only."""
        return [] if self.known_laws is None else [self.known_laws]

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
        self.source, self.branches = source, source.branches
        self.laws = [laws for _ in batch.prompts]  # which each row learns
        self.copies = None if source.lookup is None else source.lookup.open(batch)
        self.copy_acceptance = CopyAcceptance()
        self._copied: dict[int, Proposal] = {}  # by row, what was last looked up
        self.ends = [prompt[-SUFFIX:].tolist() for prompt in batch.prompts]
        self.acceptance = BranchAcceptance()
        # of the round in progress: what was seen, and the best behind it, (N, K) each
        self._read: tuple[Sequence[tuple[int, Sequence[int]]], Tokens, Numbers]
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
                if (own := chance * rate) >= self.source.least:
                    after = [*context, token][-SUFFIX:]
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
        tables = [self.laws[row], *self.source.others]
        found = [(*table.find(context), table) for table in tables]
        suffix, place, table = max(found, key=itemgetter(0))  # of equals the first
        if not suffix:
            return None
        tokens = table.tokens[place].tolist()  # (K,)
        scores = self.batch.scores(row, depth, tokens, table.logits[place].tolist())
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
        tokens, logits = best_of(raw)
        if not self.source.beside:
            self._read = seen, tokens, logits
            return
        for row, own in groupby(range(len(seen)), lambda i: seen[i][0]):
            places = [*own]
            contexts = [[*self.ends[row], *seen[i][1]] for i in places]
            self.laws[row].keep(contexts, tokens[places], logits[places])

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
        self.laws[row].keep([*kept.values()], tokens[[*kept]], logits[[*kept]])

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        if not self.source.beside:
            self._keep_path(row, emitted)
        self._learn(row, emitted)
        if self.copies is not None:
            self.copies.commit(row, emitted, steps)
        self.ends[row] = [*self.ends[row], *emitted][-SUFFIX:]

    def begin(self, row: int) -> None:
        self.laws[row] = Laws(_OF_A_TEXT)
        self.ends[row] = self.batch.prompts[row][-SUFFIX:].tolist()
        self._trees.pop(row, None)
        self._copied.pop(row, None)
        if self.copies is not None:
            self.copies.begin(row)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in {*self.laws, *self.source.others})
