"""The source of forced tokens: where a grammar allows only one token, drafting it is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from layerskip.decoding.laws import Stateful
from layerskip.decoding.sources.base import Batch, Proposal, RowsState, Source, State
from layerskip.decoding.sources.lookup import NOTHING

_SURE = 1 << 20  # tokens in common: more than any lookup has


class Forced(Source):
    """Drafts the tokens that stateful processors force.

    A processor may know forced tokens itself and return them, if any, from a method `forced()`.
    """

    key = name = "forced"

    def __init__(self, processors: Sequence[Stateful]) -> None:
        self.processors = processors

    def open(self, batch: Batch) -> State:
        vocabulary = batch.model.vocabulary
        return RowsState(batch, lambda _: ForcedRow(self.processors, vocabulary))


class ForcedRow:
    """The new tokens of a row, as processors see them."""

    def __init__(self, processors: Sequence[Stateful], vocabulary: int) -> None:
        self._states = [each.start() for each in processors]
        self._vocabulary = vocabulary

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            for state in self._states:
                state.advance(token)

    def find(self, longest: int) -> Proposal:
        """The tokens that must come next, at most `longest`."""
        found: list[list[int]] = [each.forced() for each in self._states if hasattr(each, "forced")]
        tokens = max(found, key=len, default=[])[:longest]
        if len(found) < len(self._states):
            tokens = tokens or self._by_masks(longest)
        return Proposal.of(tokens, _SURE) if tokens else NOTHING

    def _by_masks(self, longest: int) -> list[int]:
        tokens = list[int]()
        while len(tokens) < longest:
            scores = torch.zeros(self._vocabulary)  # (V,)
            for state in self._states:
                scores = state.mask(scores)
            allowed = (scores > -float("inf")).nonzero()[:, 0]  # (n,)
            if len(allowed) != 1:
                break
            tokens.append(int(allowed[0]))
            self.extend(tokens[-1:])
        if tokens:
            for state in self._states:
                state.rollback(len(tokens))
        return tokens
