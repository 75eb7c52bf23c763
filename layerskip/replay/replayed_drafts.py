"""Computes what a source would have drafted from every place of a trace, without decoding.

`replay` drafts to the full length, as decoding would. `follow` leaves each draft at its first wrong
token, at a fraction of the cost: a search follows hundreds of drafts, and replays only the best.
Shapes: J steps, N starts, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.config.skips import SkipConfig
from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law
from layerskip.decoding.rules import rule_of
from layerskip.decoding.seats import Reason, Seat
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.base import Batch, Source
from layerskip.replay.chains import Chain, Chains
from layerskip.replay.token_draws import NOTHING, DrawnTokens
from layerskip.replay.trace import Trace, TraceText


@dataclass(frozen=True)
class Replay:
    """A draft's tokens from every start of a trace.

    Starts are those of the trace's texts, text by text: `texts[t]` is the slice of text t.
    `simulation.py` determines what a controller would have kept of these drafts.

    Attributes:
        source: the source that drafts.
        tokens: drafted token of each step, (N, J) int64; `NOTHING` if none could be drawn; later
            ones are meaningless.
        matches: whether that is the text's own token, and so accepted, (N, J) bool; meaningless
            after a row's first False, where the draft has left the text.
        confidences, margins: of each token, what controllers with the signals "probability" and
            "margin" receive, (N, J) float32 each.
        ends: whether the token ends a draft: an end of text, or `NOTHING`, (N, J) bool.
        matched: for looked-up drafts, the tokens each start matched, (N,); None for a model's.
        longest: maximum number of tokens in a draft, if that is less than J.
    """

    trace: Trace
    source: Source
    texts: tuple[slice, ...]
    tokens: Tensor
    matches: Tensor
    confidences: Tensor
    margins: Tensor
    ends: Tensor
    matched: Tensor | None = None
    longest: int | None = None

    @property
    def draft_length(self) -> int:
        """J."""
        return self.tokens.shape[1]

    @property
    def survival(self) -> list[float]:
        """Share of all starts whose first j drafted tokens are the text's, for j = 1..J."""
        return self.matches.cumprod(1).float().mean(0).tolist()


@torch.no_grad()
def replay(
    trace: Trace,
    draft: SkipConfig | Source,
    draft_length: int | None = None,
    *,
    allowed: Tensor | None = None,
) -> Replay:
    """Draft from every start of a trace with one source, as decoding would.

    Args:
        allowed: the draft vocabulary of each text, (texts, V) bool; all tokens by default.

    Raises:
        ValueError: the draft length exceeds the places that the trace knows, or a skip config
            does not fit the model.
    """
    source, length = source_of(trace.model, draft), _length(trace, draft_length)
    if source.step_free:
        return _look_up(trace, source, length)
    chains = Chains(trace, source, all_starts(trace), length, allowed)
    longest = chains.steps if chains.steps < length else None
    return replace(_assembled(trace, source, chains.drafts()), longest=longest)


@torch.no_grad()
def follow(
    trace: Trace,
    draft: SkipConfig | Source,
    draft_length: int,
    starts: Sequence[Chain] | None = None,
    *,
    allowed: Tensor | None = None,
) -> Tensor:
    """Whether drafts from some starts equal their text up to each token, (N, J) bool.

    Each draft is left at its first wrong token, and takes the states of the prefix that it shares
    with the target from the trace. This is a small part of the work of `replay`.

    Args:
        starts: all of the trace by default, text by text.
        allowed: as for `replay`.

    Raises:
        ValueError: as for `replay`.
    """
    source, length = source_of(trace.model, draft), _length(trace, draft_length)
    starts = all_starts(trace) if starts is None else starts
    return Chains(trace, source, starts, length, allowed, follow=True).agreeing()


def _look_up(trace: Trace, source: Source, length: int) -> Replay:
    """The drafts of a source of known tokens from every start, as in decoding."""
    offers = []
    for text in trace.texts:
        batch = TextBatch(trace, [text])
        state, seat = source.open(batch), batch.seats[0]
        if state.reads_logits:
            raise TypeError(
                f"a {type(source).__name__} cannot be replayed from every place, as it learns in "
                "every round; time it by decoding"
            )
        for token in text.tokens.tolist()[text.prompt :][: text.starts]:
            seat.emitted.append(token)
            state.commit(0, [token], 0)
            seat.follow()
            proposal = state.offer(0, min(length, source.longest or length))
            offers.append((list(proposal.tokens or ())[:length], proposal.match or 0))
    tokens = [offered + [NOTHING] * (length - len(offered)) for offered, _ in offers]
    sure = torch.zeros(len(offers), length)  # confidences are not used
    played = _assembled(trace, source, DrawnTokens(torch.tensor(tokens), sure, sure))
    return replace(played, matched=torch.tensor([match for _, match in offers]))


def _length(trace: Trace, draft_length: int | None) -> int:
    length = trace.draft_length if draft_length is None else draft_length
    if not 1 <= length <= trace.draft_length:
        raise ValueError(
            f"draft_length must be in 1..{trace.draft_length}, as far as this trace looks ahead; "
            f"got {length}; take a trace with a longer one"
        )
    return length


def all_starts(trace: Trace) -> list[Chain]:
    """A chain from each of the N starts."""
    return [(text, text.prompt + start) for text in trace.texts for start in range(text.starts)]


def _assembled(trace: Trace, source: Source, drafts: DrawnTokens) -> Replay:
    """The replay of drafts (N, J) from every start."""
    texts, wanted, first, length = [], [], 0, drafts.tokens.shape[1]
    for text in trace.texts:
        texts.append(slice(first, first + text.starts))
        first += text.starts
        padded = F.pad(text.following, (0, length), value=NOTHING)
        wanted.append(padded.unfold(0, length, 1)[: text.starts])  # (starts, J)
    following = torch.cat(wanted)  # (N, J)
    matches = (drafts.tokens == following) & (following != NOTHING)
    ends = torch.isin(drafts.tokens, torch.tensor([NOTHING, *trace.eos]))
    return Replay(
        trace=trace,
        source=source,
        texts=tuple(texts),
        matches=matches,
        ends=ends,
        **drafts._asdict(),
    )


class TextSeat(Seat):
    """The row of a recorded text, which ends where the recording ends."""

    def __init__(self, trace: Trace, text: TraceText, row: int, draws: Draws) -> None:
        prompt, limit, self.starts = text.tokens[: text.prompt], trace.max_new_tokens, text.starts
        super().__init__(prompt, limit, row=row, number=row, draws=draws, key=text.key)
        self.length, self.eos = text.prompt, trace.eos

    @property
    def start(self) -> int:
        """The number of the present start."""
        return len(self.emitted) - 1

    def end(self, token: int) -> Reason | None:
        return "stop" if len(self.emitted) > self.starts else None

    def follow(self) -> None:
        """Continue after its emitted tokens, of which the last has not been fed."""
        self.length = self.place - 1


class TextBatch(Batch):
    """Texts of a trace as a batch for the states of step-free sources, one row each."""

    seats: list[TextSeat]

    def __init__(self, trace: Trace, texts: Sequence[TraceText]) -> None:
        self.model = trace.model
        self.draws = Draws(
            Law(trace.law.processors, do_sample=trace.law.do_sample, rows=len(texts)),
            rule=rule_of(
                "rejection" if trace.rejection else "coupled", sampling=trace.law.do_sample
            ),
        )
        self.seats = [TextSeat(trace, text, row, self.draws) for row, text in enumerate(texts)]
        self.rows: dict[int, int] = {}
        self.total = self.slots = max(len(text.tokens) for text in texts)
        # A recording has a slot for every token and every draft.
        self.cache: Any = SimpleNamespace(slots=sys.maxsize)
