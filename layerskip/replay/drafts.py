"""What any source would have drafted from every place of a trace, without decoding anything.

`replay` drafts to the full length, as decoding would.
`follow` leaves each draft at its first wrong token, which is all that a fixed draft length needs,
at a part of the cost: a search follows hundreds of drafts, and replays only the best whole.
Letters: C chains, J steps, M next best tokens, N starts, W vocabularies, V tokens of a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.passes import Passes
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.decoding.sources.steps import Steps
from layerskip.replay.chains import Chain, ChainDrafts, Chains, Enough, Vocabularies
from layerskip.replay.drawing import NOTHING, Drawn
from layerskip.replay.live import TextBatch
from layerskip.replay.trace import Trace, TraceText

Path = tuple[int, ...]
"""Drafted tokens behind a start, one behind the other."""
Said = tuple[tuple[int, ...], float]
"""The best tokens of a place, in order, and the margin of the first."""

TOGETHER = 16
"""Paths that are looked at in one pass: on a CPU so many cost little more than one."""


@dataclass(frozen=True)
class Replay:
    """A draft's tokens from every start of a trace.

    Starts are those of the trace's texts, text by text: `texts[t]` is the slice of text t. What a
    controller would have kept of these drafts is for `simulation.py` to say.

    Attributes:
        source: what drafts.
        allowed: the draft vocabulary of each text, (texts, V) bool; None: all tokens.
        tokens: what each step drafts, (N, J) int64; `NOTHING` where nothing could be drawn, and
            what stands behind that means nothing.
        matches: whether that is the text's own token, and so accepted, (N, J) bool; behind a row's
            first False the draft has left the text and it means nothing.
        confidences, margins: of each token, what controllers of the signals "probability" and
            "margin" are told, (N, J) float32 each.
        entropies: of the laws that each was drawn from, as observers are told, (N, J) float32.
        ends: whether the token ends a draft: an end of text, or `NOTHING`, (N, J) bool.
        others: the next best tokens of each place, in order, `NOTHING` for none, (N, J, M) int64;
            not of followed drafts.
        found: of looked-up drafts, how many tokens each start matched, (N,); None of a model's.
        longest: how many tokens a draft has at most, where that is less than J.
    """

    trace: Trace
    source: Source
    texts: tuple[slice, ...]
    tokens: Tensor
    matches: Tensor
    confidences: Tensor
    margins: Tensor
    entropies: Tensor
    ends: Tensor
    others: Tensor
    found: Tensor | None = None
    longest: int | None = None
    allowed: Tensor | None = None

    @property
    def skip(self) -> SkipConfig | None:
        """Of the source."""
        return self.source.skip

    @property
    def prior(self) -> float:
        """Of the source."""
        return self.source.prior

    @property
    def draft_length(self) -> int:
        """J."""
        return self.tokens.shape[1]

    @property
    def survival(self) -> list[float]:
        """Share of all starts whose first j drafted tokens are the text's, for j = 1..J."""
        return self.matches.cumprod(1).float().mean(0).tolist()

    def said(self, start: int, path: Path) -> Said:
        """What the draft says behind a start and some drafted tokens; computed once.

        Args:
            start: its number, among the N.
        """
        if (start, ()) not in self._said:
            told = self.tokens, self.others, self.margins
            self._keep(start, (), *(each[start] for each in told))
        if (start, path) not in self._said:
            self._leave(start, path)
        return self._said[start, path]

    @cached_property
    def state(self) -> State:
        """A state of the source, which says how it takes steps; nothing is run."""
        return opened(self.trace, self.source)

    @cached_property
    def _said(self) -> dict[tuple[int, Path], Said]:
        return {}

    @cached_property
    def _steps(self) -> Steps:
        return self.source.steps(self.trace, follow=False)

    def _keep(
        self, start: int, path: Path, tokens: Tensor, others: Tensor, margins: Tensor
    ) -> None:
        """Keep what a chain said, (J,) or (J, M), which was fed a path and then its own tokens."""
        rows = zip(tokens.tolist(), others.tolist(), margins.tolist(), strict=True)
        fed = path
        for place, (token, more, margin) in enumerate(rows):
            self._said.setdefault((start, fed[:place]), ((token, *more), margin))
            if place >= len(path):
                if token < 0:
                    return
                fed = (*fed, token)

    @torch.no_grad()
    def _leave(self, start: int, path: Path) -> None:
        """Look at a path that leaves the draft's own, and at others that leave it likeliest.

        They are as many as cost little more: the next best tokens at the smallest margins.
        """
        number = next(n for n, rows in enumerate(self.texts) if start < rows.stop)
        text = self.trace.texts[number]
        place = text.prompt + start - self.texts[number].start
        margins, here = {path: -1.0}, path[:-1]
        while (start, here) in self._said and len(here) + 1 < self.draft_length:
            (best, *more), margin = self._said[start, here]
            for rank, other in enumerate(more, 1):
                if other >= 0 and other not in self.trace.eos:
                    margins.setdefault((*here, other), rank * margin)
            if best < 0 or best in self.trace.eos:
                break
            here = (*here, best)
        paths = [
            each
            for each in sorted(margins, key=margins.__getitem__)
            if (start, each) not in self._said
        ][:TOGETHER]
        chain = text, place, int(text.tokens[place])
        chains = Chains(
            self.trace,
            self.source,
            [chain] * len(paths),
            self.draft_length,
            [self.allowed],
            best=self.others.shape[-1] + 1,
            paths=paths,
            draft=self._steps,
        )
        (drafts,) = chains.run()
        told = drafts.tokens, drafts.others, drafts.margins
        for each, *row in zip(paths, *told, strict=True):
            self._keep(start, each, *row)


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
        draft: a source, or a skip config.
        draft_length: tokens drafted from each start; the trace's by default.
        allowed: the draft vocabulary of each text, (texts, V) bool; all tokens by default.

    Raises:
        ValueError: a draft length that the trace does not know all places for, or a skip config
            that does not fit the model.
    """
    source, length = source_of(trace.model, draft), _length(trace, draft_length)
    if source.known:
        return _look_up(trace, source, length)
    if source.exit_layer is not None:
        drafts = _exit(trace, source, source.exit_layer, length, allowed)
        return _assembled(trace, source, drafts, length, allowed)
    best = opened(trace, source).best if trace.branches else 1
    chains = Chains(trace, source, all_starts(trace), length, [allowed], best=best)
    return _assembled(trace, source, chains.run()[0], length, allowed)


@torch.no_grad()
def follow(
    trace: Trace,
    draft: SkipConfig | Source,
    vocabularies: Vocabularies = (None,),
    draft_length: int | None = None,
    *,
    enough: Enough | None = None,
) -> list[Replay]:
    """Draft from every start of a trace, as far as the drafts agree with the text.

    A replay has tokens, matches and confidences up to each start's first wrong token. Behind it,
    confidences, margins and entropies are those of drafts that start at the same place: a draft
    that goes on after a wrong token is about as sure as one that starts there afresh. So rounds of
    a fixed draft length are exact (but for an end of text drafted behind a wrong token), and of
    other controllers close.

    Args:
        vocabularies: of W drafts, each of every text, (texts, V) bool; None: all tokens.
        draft_length: tokens drafted from each start; the trace's by default.
        enough: told the survival of each (of each step so far, the share of a sample of the starts
            that still agree), says of each whether longer drafts are of no interest; its replay
            then ends there.

    Raises:
        ValueError: a draft length that the trace does not know all places for, or a skip config
            that does not fit the model.
    """
    source, length = source_of(trace.model, draft), _length(trace, draft_length)
    chains = Chains(trace, source, all_starts(trace), length, vocabularies, follow=True)
    most = length if chains.steps < length and enough is None else 0
    return [_followed(_assembled(trace, source, each, most)) for each in chains.run(enough)]


def opened(trace: Trace, source: Source) -> State:
    """A source's state in a batch in which nothing is run."""
    prompt = torch.zeros(1, dtype=torch.long)
    longest = trace.draft_length
    return Passes(
        trace.model, [source], [prompt], max_new_tokens=1, max_draft_length=longest
    ).states[0]


def _look_up(trace: Trace, source: Source, length: int) -> Replay:
    """What a source of known tokens drafts from every start, as decoding would."""
    found = []
    for text in trace.texts:
        row = TextBatch(trace, [text])
        state = source.open(cast(Batch, row))
        if state.reads_logits:
            raise TypeError(
                f"a {type(source).__name__} cannot be replayed from every place, as it learns in "
                "every round; simulate Live(trace, source)"
            )
        for token in text.tokens.tolist()[text.prompt :][: text.starts]:
            row.emit([state], 0, [token])
            proposal = state.offer(0, length)
            found.append((list(proposal.tokens or ()), proposal.match or 0))
    tokens = [known + [NOTHING] * (length - len(known)) for known, _ in found]
    drafts = ChainDrafts.nothing(len(found), length)  # nobody asks for confidences
    drafts = drafts._replace(tokens=torch.tensor(tokens))
    played = _assembled(trace, source, drafts)
    return replace(played, found=torch.tensor([match for _, match in found]))


def _length(trace: Trace, draft_length: int | None) -> int:
    """The draft length asked for."""
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


def _assembled(
    trace: Trace,
    source: Source,
    drafts: ChainDrafts,
    longest: int = 0,
    allowed: Tensor | None = None,
) -> Replay:
    """The replay of drafts (N, any) from every start, of J tokens where `longest` is J."""
    most = drafts.tokens.shape[1]
    length = max(most, longest)
    if most < length:
        rest = (0, length - most)
        nothing = F.pad(drafts.tokens, rest, value=NOTHING)  # (N, J)
        sure, margins, entropies = (F.pad(each, rest) for each in drafts[1:4])
        others = F.pad(drafts.others, (0, 0, *rest), value=NOTHING)  # (N, J, M)
        drafts = ChainDrafts(nothing, sure, margins, entropies, others)
    texts, wanted, first = [], [], 0
    for text in trace.texts:
        texts.append(slice(first, first + text.starts))
        first += text.starts
        following = F.pad(text.following, (0, length), value=NOTHING)
        wanted.append(following.unfold(0, length, 1)[: text.starts])  # (starts, J)
    own = torch.cat(wanted)  # (N, J)
    matches = (drafts.tokens == own) & (own != NOTHING)
    ends = torch.isin(drafts.tokens, torch.tensor([NOTHING, *trace.eos]))
    limit = most if most < length else None
    return Replay(
        trace=trace,
        source=source,
        texts=tuple(texts),
        matches=matches,
        ends=ends,
        longest=limit,
        allowed=allowed,
        **drafts._asdict(),
    )


def astray(matches: Tensor) -> Tensor:
    """Which steps lie behind a row's first wrong token, (N, J)."""
    return F.pad(matches.long().cumprod(1)[:, :-1], (1, 0), value=1) == 0


def _followed(played: Replay) -> Replay:
    """The same without what stands behind wrong tokens."""
    lost = astray(played.matches)  # (N, J)
    steps = torch.arange(played.draft_length)
    afresh = torch.cat(
        [
            (torch.arange(rows.start, rows.stop)[:, None] + steps).clamp_(max=rows.stop - 1)
            for rows in played.texts
        ]
    )  # (N, J)
    return replace(
        played,
        tokens=played.tokens.masked_fill(lost, 0),
        matches=played.matches & ~lost,
        confidences=torch.where(lost, played.confidences[afresh, 0], played.confidences),
        margins=torch.where(lost, played.margins[afresh, 0], played.margins),
        entropies=torch.where(lost, played.entropies[afresh, 0], played.entropies),
        ends=played.ends & ~lost,
    )


def _exit(
    trace: Trace, source: Source, layer: int, length: int, allowed: Tensor | None
) -> ChainDrafts:
    """Drafts (N, J) that are nothing but shared prefix.

    While it agrees with the text, such a draft computes what the target did there, so that the
    trace knows its tokens. Behind its first wrong token it is the same whatever place it started
    from: one chain for every place where the exit is wrong.
    """
    wrong: list[Tensor] = []
    chains: list[Chain] = []
    proposals = [trace.proposed(text, layer, allowed) for text in trace.texts]
    for text, proposed in zip(trace.texts, proposals, strict=True):
        drafted, following = proposed.tokens, text.following  # (places,) each
        places = torch.nonzero(drafted != following)[:, 0]
        places = places[places < text.starts + length - 1]  # as far as any start's draft reaches
        wrong.append(places)
        chains += [
            (text, text.prompt + place + 1, token)
            for place, token in zip(places.tolist(), drafted[places].tolist(), strict=True)
        ]
    best = 2 if trace.branches else 1
    left = Chains(trace, source, chains, length - 1, [allowed], best=best).run()[0]
    # one row and column more, so that there is something to look up where nothing is wrong
    rest = [F.pad(t, (*(0,) * (2 * t.dim() - 4), 0, 1, 0, 1)) for t in left]  # (C + 1, J) each
    parts, first = [], 0
    for text, places, proposed in zip(trace.texts, wrong, proposals, strict=True):
        reached = torch.arange(text.starts)[:, None] + torch.arange(length)  # (starts, J)
        number = torch.searchsorted(places, reached[:, 0].contiguous())  # (starts,)
        end = F.pad(places, (0, 1), value=len(text.tokens) + length)[number]  # (starts,)
        behind = reached - end[:, None] - 1  # (starts, J) steps since the first wrong token
        chain = (first + number).clamp(max=len(chains))[:, None], behind.clamp_min(0)
        known = _exit_drafts(text, proposed, length)
        tables = zip(known, rest, strict=True)
        on_text = behind < 0  # (starts, J)
        parts.append(
            ChainDrafts(
                *(
                    torch.where(
                        on_text if own.dim() == 2 else on_text[:, :, None], own, later[chain]
                    )
                    for own, later in tables
                )
            )
        )
        first += len(places)
    return ChainDrafts.concatenated(parts)


def _exit_drafts(text: TraceText, proposed: Drawn, length: int) -> ChainDrafts:
    """What an exit drafts from each start (starts, J) while it agrees with the text."""
    reached = torch.arange(text.starts)[:, None] + torch.arange(length)  # (starts, J)
    reached = reached.clamp(max=len(text.following) - 1)
    return ChainDrafts(*(getattr(proposed, name)[reached] for name in ChainDrafts._fields))
