"""What any source would have drafted from every place of a trace, without decoding anything.

`replay` drafts to the full length, as decoding would. `follow` leaves each draft at its first wrong
token, at a part of the cost: a search follows hundreds of drafts, and replays only the best whole.
Letters: J steps, N starts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.base import Batch, Source
from layerskip.replay.batch import TextBatch
from layerskip.replay.chains import Chain, Chains
from layerskip.replay.drawing import NOTHING, Drawn
from layerskip.replay.trace import Trace


@dataclass(frozen=True)
class Replay:
    """A draft's tokens from every start of a trace.

    Starts are those of the trace's texts, text by text: `texts[t]` is the slice of text t. What a
    controller would have kept of these drafts is for `simulation.py` to say.

    Attributes:
        source: what drafts.
        tokens: what each step drafts, (N, J) int64; `NOTHING` where nothing could be drawn, and
            what stands behind that means nothing.
        matches: whether that is the text's own token, and so accepted, (N, J) bool; behind a row's
            first False the draft has left the text and it means nothing.
        confidences, margins: of each token, what controllers of the signals "probability" and
            "margin" are told, (N, J) float32 each.
        ends: whether the token ends a draft: an end of text, or `NOTHING`, (N, J) bool.
        matched: of looked-up drafts, how many tokens each start matched, (N,); None of a model's.
        longest: how many tokens a draft has at most, where that is less than J.
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
    """Draft from every start of a trace with one draft, as decoding would.

    Args:
        allowed: the draft vocabulary of each text, (texts, V) bool; all tokens by default.

    Raises:
        ValueError: a draft length that the trace does not know all places for, or a skip config
            that does not fit the model.
    """
    source, length = source_of(trace.model, draft), _length(trace, draft_length)
    if source.step_free:
        return _look_up(trace, source, length)
    drafts = Chains(trace, source, all_starts(trace), length, allowed).drafts()
    return _assembled(trace, source, drafts, length)


@torch.no_grad()
def follow(
    trace: Trace,
    draft: SkipConfig | Source,
    draft_length: int,
    starts: Sequence[Chain] | None = None,
    *,
    allowed: Tensor | None = None,
) -> Tensor:
    """Whether drafts from some starts are their text's up to each token, (N, J) bool.

    Each draft is left at its first wrong token, and takes the states of the prefix that it shares
    with the target from the trace: a small part of what `replay` computes.

    Args:
        starts: all of the trace by default, text by text.
        allowed: as of `replay`.

    Raises:
        ValueError: as `replay`.
    """
    source, length = source_of(trace.model, draft), _length(trace, draft_length)
    starts = all_starts(trace) if starts is None else starts
    return Chains(trace, source, starts, length, allowed, follow=True).agreeing()


def _look_up(trace: Trace, source: Source, length: int) -> Replay:
    """What a source of known tokens drafts from every start, as decoding would."""
    offers = []
    for text in trace.texts:
        row = TextBatch(trace, [text])
        state = source.open(cast(Batch, row))
        if state.reads_logits:
            raise TypeError(
                f"a {type(source).__name__} cannot be replayed from every place, as it learns in "
                "every round; time it by decoding"
            )
        for token in text.tokens.tolist()[text.prompt :][: text.starts]:
            row.emitted[0].append(token)
            state.commit(0, [token], 0)
            row.commit(0)
            proposal = state.offer(0, length)
            offers.append((list(proposal.tokens or ()), proposal.match or 0))
    tokens = [offered + [NOTHING] * (length - len(offered)) for offered, _ in offers]
    sure = torch.zeros(len(offers), length)  # nobody asks for confidences
    played = _assembled(trace, source, Drawn(torch.tensor(tokens), sure, sure))
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
    """A chain from every start, N of them."""
    return [
        (text, place, token)
        for text in trace.texts
        for place, token in enumerate(text.tokens.tolist()[: text.prompt + text.starts])
        if place >= text.prompt
    ]


def _assembled(trace: Trace, source: Source, drafts: Drawn, longest: int = 0) -> Replay:
    """The replay of drafts (N, any) from every start, of J tokens where `longest` is J."""
    most = drafts.tokens.shape[1]
    length = max(most, longest)
    if most < length:
        # behind `NOTHING` confidences mean nothing
        rest = (F.pad(each, (0, length - most), value=NOTHING) for each in drafts)
        drafts = Drawn(*rest)  # (N, J) each
    texts, wanted, first = [], [], 0
    for text in trace.texts:
        texts.append(slice(first, first + text.starts))
        first += text.starts
        padded = F.pad(text.following, (0, length), value=NOTHING)
        wanted.append(padded.unfold(0, length, 1)[: text.starts])  # (starts, J)
    following = torch.cat(wanted)  # (N, J)
    matches = (drafts.tokens == following) & (following != NOTHING)
    ends = torch.isin(drafts.tokens, torch.tensor([NOTHING, *trace.eos]))
    limit = most if most < length else None
    return Replay(
        trace=trace,
        source=source,
        texts=tuple(texts),
        matches=matches,
        ends=ends,
        longest=limit,
        **drafts._asdict(),
    )
