"""Sources that learn while they draft, along the texts of a trace: they live as long as a walk.

What such a source drafts depends on the rounds before, so that there is no table of its drafts to
be made beforehand. Its states take part in simulated rounds as in decoding. A trace knows what the
target said along its texts alone, so that nothing is learnt behind rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law
from layerskip.decoding.planning import usable
from layerskip.decoding.sources.base import Proposal, Source, State
from layerskip.replay.trace import Trace, TraceText


@dataclass(frozen=True)
class Live:
    """A source of known tokens, to be simulated along a trace in the place of a replay.

    Raises:
        TypeError: the source takes steps of a model.
        ValueError: the trace is of the rejection rule, where texts depend on drafts.
    """

    trace: Trace
    source: Source

    def __post_init__(self) -> None:
        if not self.source.known:
            raise TypeError(
                f"a {type(self.source).__name__} drafts by steps of a model; replay it instead"
            )
        if self.trace.rejection:
            raise ValueError(
                "a source that learns cannot be simulated under the rejection rule, where texts "
                "depend on drafts; take a trace of coupled draws"
            )

    @property
    def draft_length(self) -> int:
        """The most tokens of a round: so far the trace knows how texts go on."""
        return self.trace.draft_length


class TextBatch:
    """Texts of a trace as the batch of a state that knows its tokens, a row each."""

    def __init__(self, trace: Trace, texts: Sequence[TraceText]) -> None:
        self.model, self.eos = trace.model, trace.eos
        self.emitted = [list[int]() for _ in texts]
        self.prompts = [text.tokens[: text.prompt] for text in texts]
        self.prompt_lengths = [text.prompt for text in texts]
        self.rows = {row: row for row in range(len(texts))}
        self.lengths = list(self.prompt_lengths)
        self.total = self.slots = max(len(text.tokens) for text in texts)
        draws = Draws(
            Law(trace.law.processors, do_sample=trace.law.do_sample, rows=len(texts)),
            [text.key for text in texts],
            rejection=trace.rejection,
            history=torch.empty(0),  # which no law of a few tokens reads
            width=0,
            prompt_lengths=self.prompt_lengths,
            emitted=self.emitted,
        )
        self.branches = trace.model.branches and not draws.apart
        self.scores, self.allowed = draws.few, draws.allowed

    def emit(self, states: Iterable[State], row: int, tokens: Sequence[int]) -> None:
        """Let a row go on by some tokens, and tell the states."""
        self.emitted[row] += tokens
        for state in states:
            state.commit(row, tokens, 0)
        # the last one has not been fed
        self.lengths[row] = self.prompt_lengths[row] + len(self.emitted[row]) - 1

    def offer(self, state: State, row: int, most: int) -> Proposal:
        """What the row may draft, as decoding would use it."""
        return usable(
            state.offer(row, most),
            partial(self.allowed, row, vocabulary=self.model.vocabulary),
            eos=self.eos,
            branches=self.branches,
        )
