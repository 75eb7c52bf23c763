"""The source of forced tokens: where a grammar leaves one token only, it is drafted for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip.decoding.laws import Stateful
from layerskip.decoding.sources.base import Batch, Proposal, Source, State
from layerskip.decoding.sources.lookup import NOTHING, Lookup

_SURE = 1 << 20  # tokens in common: more than any lookup has


class Forced(Source):
    """Drafts what processors with a state leave no choice about.

    A processor may know that by itself: by a method `forced()`, which returns tokens, perhaps none.

    Args:
        processors: those of every row.
    """

    key = "forced"

    def __init__(self, processors: Sequence[Stateful]) -> None:
        self.processors = processors

    def open(self, batch: Batch) -> State:
        return _State(batch, self.processors)

    def timed(self) -> Source:
        return Lookup().timed()


class _State(State):
    def __init__(self, batch: Batch, processors: Sequence[Stateful]) -> None:
        super().__init__(batch)
        self.rows = [[each.start() for each in processors] for _ in batch.prompts]

    def offer(self, row: int, most: int) -> Proposal:
        states = self.rows[row]
        known = [each.forced() for each in states if hasattr(each, "forced")]
        found = max(known, key=len, default=[])[:most]
        if len(known) < len(states):
            found = found or self._by_masks(states, most)
        return Proposal.of(found, _SURE) if found else NOTHING

    def _by_masks(self, states: Sequence[Stateful], most: int) -> list[int]:
        found = list[int]()
        while len(found) < most:
            scores = torch.zeros(self.batch.model.vocabulary)  # (V,)
            for state in states:
                scores = state.mask(scores)
            allowed = (scores > -float("inf")).nonzero()[:, 0]  # (n,)
            if len(allowed) != 1:
                break
            found.append(int(allowed[0]))
            for state in states:
                state.advance(found[-1])
        if found:
            for state in states:
                state.rollback(len(found))
        return found

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        for token in emitted:
            for state in self.rows[row]:
                state.advance(token)
