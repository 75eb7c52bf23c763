"""Texts of a trace as a batch, for rounds and for sources that draft without steps."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law
from layerskip.decoding.seats import Reason, Seat
from layerskip.replay.trace import Trace, TraceText


class TextSeat(Seat):
    """The row of a recorded text, which ends where the recording ends."""

    def __init__(self, trace: Trace, text: TraceText, number: int) -> None:
        self.starts = text.starts
        limit = trace.max_new_tokens
        super().__init__(
            [], text.prompt, limit, key=text.key, number=number, eos=trace.eos, remembers=False
        )

    def end(self, token: int) -> Reason | None:
        return "stop" if len(self.emitted) > self.starts else None


class TextBatch:
    """Texts of a trace as a batch for the states of step-free sources, one row each."""

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

    def commit(self, row: int) -> None:
        """Continue after a row's emitted tokens, of which the last has not been fed."""
        self.lengths[row] = self.prompt_lengths[row] + len(self.emitted[row]) - 1
