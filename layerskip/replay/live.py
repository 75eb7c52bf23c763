"""Sources that learn while they draft, along the texts of a trace.

A trace knows what the target said along its texts alone: nothing is learnt behind rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law
from layerskip.decoding.seats import Reason, Seat
from layerskip.decoding.sources.base import Source, State
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
        if not self.source.step_free:
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
        return self.trace.draft_length


class TextSeat(Seat):
    """The row of a recorded text, which ends where it was recorded to end."""

    def __init__(self, trace: Trace, text: TraceText, number: int) -> None:
        self.starts = text.starts
        limit = trace.max_new_tokens
        super().__init__(
            [], text.prompt, limit, key=text.key, number=number, eos=trace.eos, remembers=False
        )

    def end(self, token: int) -> Reason | None:
        return "stop" if len(self.emitted) > self.starts else None


class TextBatch:
    """Texts of a trace as the batch that the states of step-free sources read, a row each."""

    def __init__(self, trace: Trace, texts: Sequence[TraceText]) -> None:
        self.model = trace.model
        self.seats = [TextSeat(trace, text, row) for row, text in enumerate(texts)]
        self.emitted = [seat.emitted for seat in self.seats]
        self.prompts = [text.tokens[: text.prompt] for text in texts]
        self.prompt_lengths = [text.prompt for text in texts]
        self.rows = {row: row for row in range(len(texts))}
        self.lengths = list(self.prompt_lengths)
        self.total = self.slots = max(len(text.tokens) for text in texts)
        self.draws = Draws(
            Law(trace.law.processors, do_sample=trace.law.do_sample, rows=len(texts)),
            self.seats,
            rejection=trace.rejection,
        )
        self.scores = self.draws.scores

    def commit(self, states: Iterable[State], row: int, tokens: Sequence[int]) -> None:
        for state in states:
            state.commit(row, tokens, 0)
        # the last one has not been fed
        self.lengths[row] = self.prompt_lengths[row] + len(self.emitted[row]) - 1
