"""Drafts that continue from places of a trace, run through the model many at a time.

A draft's round depends only on its start: it feeds the start's token, then its own, and sees the
target's keys and values before the start. So the drafts from all places are chains of tokens, and
those of the model's own sublayers run in a few wide passes. If chains are followed only until they
leave their text, the prefix that they share with the target is taken from the trace.
Shapes: A chains of a pass, B groups, G chains of a group, C chains, J steps, N some chains, P
places of all texts, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerskip.decoding.laws import softmax_law
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.sublayer_draft import SublayerDraft
from layerskip.replay.steps import Walk, Wide
from layerskip.replay.token_draws import (
    NOTHING,
    DrawnTokens,
    Histories,
    TextPlaces,
    draw,
    propose,
    scores_at,
)
from layerskip.replay.trace import Trace, TraceText

Chain = tuple[TraceText, int]  # a text, and the place of the first token fed

GROUPS = (64, 48, 32, 24, 16, 12, 8, 6, 4)  # chains that share one copy of their text's keys
COPY = 3  # chains that cost about as much as such a copy
CHAINS = 512  # maximum per pass
LOGITS = 2**24  # maximum number of logits per pass
_TILE = 2**20  # logits drawn at once on a CPU, so that intermediate results stay in its caches


class Chains:
    """C drafts of J steps that continue from places of texts, run together through the model.

    Args:
        allowed: tokens that can be drawn on each text, (texts, V) bool; None: all.
        follow: whether chains feed the text's tokens, not their own: all that a draft needs up to
            its first wrong token.
    """

    def __init__(
        self,
        trace: Trace,
        source: Source,
        chains: Sequence[Chain],
        steps: int,
        allowed: Tensor | None = None,
        *,
        follow: bool = False,
    ) -> None:
        self.trace, self.chains, self.allowed, self.follow = trace, chains, allowed, follow
        self.draft: Wide | Walk = (
            Wide(trace, source, follow=follow)
            if isinstance(source, SublayerDraft)
            else Walk(trace, source)
        )
        self.length, self.steps = steps, min(steps, self.draft.longest or steps)
        facts = [
            (
                text.number,
                place,
                trace.offsets[text.number] + place - text.prompt,
                trace.offsets[text.number] + len(text.following) - 1,
                int(text.tokens[place]),
            )
            for text, place in chains
        ]
        table = torch.tensor(facts, dtype=torch.long).view(len(chains), 5)
        self.text, self.place = table[:, :2].unbind(1)  # (C,) each
        self.row, self.last_row = table[:, 2:4].unbind(1)  # (C,) each: among the P places
        self.fed = table[:, 4:].repeat(1, self.steps + 1)  # (C, J + 1)

    def drafts(self) -> DrawnTokens:
        """The drafted tokens, (C, J) each.

        After the source's longest draft they are `NOTHING`, and confidences are meaningless.
        """
        nothing = torch.full((len(self.chains), self.length), NOTHING)  # (C, J)
        made = DrawnTokens(nothing, nothing.float(), nothing.float())
        left = torch.zeros_like(self.place)  # (C,) place of the first token off the text
        for step, at, raw in self._passes():
            drawn = self._draw(raw, at, left[at.chains])
            for whole, part in zip(made, drawn, strict=True):
                whole[at.chains, step] = part.cpu()
            tokens, following = made.tokens[at.chains, step], self.trace.following[at.rows]
            if self.follow:
                tokens = following
            # After the last known token of a text, no draft is on it.
            wrong = (tokens != following) | (following == NOTHING)
            strays = wrong & (left[at.chains] == 0)
            left[at.chains[strays]] = at.places[strays]
            self.fed[at.chains, step + 1] = tokens.clamp_min(0)  # any will do after `NOTHING`
        return made

    def agreeing(self) -> Tensor:
        """Whether each draft equals its text up to each token, (C, J) bool."""
        rows = self.row[:, None] + torch.arange(self.steps)  # (C, J)
        following = self.trace.following[torch.minimum(rows, self.last_row[:, None])]
        drawn = self.drafts().tokens[:, : self.steps]
        return ((drawn == following) & (following != NOTHING)).cumprod(1).bool()

    def _passes(self) -> Iterator[tuple[int, Places, Tensor]]:
        """Yield the steps of all chains: where they draw, and raw logits (N, V) there."""
        for layout in self._layouts():
            self.draft.begin(self.text[layout[:, 0]], self.place[layout], self.steps)
            for step in range(self.steps):
                at = self._places(layout, step)
                yield step, at, self._raw(step, at, layout)

    def _layouts(self) -> Iterator[Tensor]:
        """Yield the chains of each pass, (B, G), each spread over the texts."""
        if not self.chains or not self.steps:
            return
        if isinstance(self.draft, Walk):
            yield from self._in_turn()
            return
        groups = min(map(self._grouped, GROUPS), key=_cost)
        most = min(CHAINS, LOGITS // self.trace.model.vocabulary)
        together = max(1, most // len(groups[0]))
        parts = -(-len(groups) // together)
        yield from (torch.tensor(groups[part::parts]) for part in range(parts))

    def _in_turn(self) -> Iterator[Tensor]:
        """Yield one chain per text at a time, (B, 1), from its first place to its last."""
        chains = sorted(range(len(self.chains)), key=lambda chain: self.place[chain])
        texts = [[n for n in chains if self.text[n] == text] for text in self.text.unique()]
        for turn in range(max(map(len, texts))):
            yield torch.tensor([[mine[turn]] for mine in texts if turn < len(mine)])

    def _places(self, layout: Tensor, step: int) -> Places:
        """The places where the chains of a pass draw."""
        chains = layout.flatten()  # (N,)
        rows = torch.minimum(self.row[chains] + step, self.last_row[chains])  # (N,)
        histories = None
        if self.trace.law.reads_history:
            histories = [
                torch.cat([text.tokens[:place], tokens]).to(self.trace.model.device)
                for (text, place), tokens in zip(
                    (self.chains[chain] for chain in chains.tolist()),
                    self.fed[chains, : step + 1],
                    strict=True,
                )
            ]
        return Places(chains, rows, self.place[chains] + step + 1, histories)

    def _raw(self, step: int, at: Places, layout: Tensor) -> Tensor:
        """Raw logits (N, V) of a step of chains (B, G)."""
        rows = at.rows.view(layout.shape)  # (B, G)
        raw = self.draft.raw(step, self.fed[layout, step], rows).flatten(0, 1)  # (N, V)
        if self.allowed is None:
            return raw
        allowed = self.allowed[self.text[at.chains]].to(raw.device)  # (N, V)
        return raw.masked_fill(~allowed, float("-inf"))

    def _keys(self, at: Places) -> list[int]:
        return [self.trace.texts[text].key for text in self.text[at.chains].tolist()]

    def _draw(self, raw: Tensor, at: Places, left: Tensor) -> DrawnTokens:
        """Draw from raw logits (N, V), under the trace's law and acceptance rule.

        Args:
            left: place of each chain's first token off the text, 0 on it, (N,).
        """
        trace, histories = self.trace, at.histories
        if not trace.rejection:
            tiles = [
                draw(trace.law, raw[some], self._noise(at.some(some)), histories)
                for some in _tiles(raw, histories)
            ]
            return DrawnTokens(*map(torch.cat, zip(*tiles, strict=True)))

        def target(some: Tensor) -> Tensor:
            rows = some.cpu()
            seen = None if histories is None else [histories[i] for i in rows.tolist()]
            states = trace.states[at.rows[rows].to(trace.model.device)]  # (R, H)
            return softmax_law(scores_at(trace.law, trace.model.logits(states[None])[0], seen))

        beside = TextPlaces(
            trace.following[at.rows].to(raw.device),
            trace.likelihoods[at.rows].to(raw.device),
            self._keys(at),
            at.places.tolist(),
            left.tolist(),
        )
        return propose(trace.law, raw, histories, beside, target)

    def _noise(self, at: Places) -> Tensor | None:
        """The Gumbel noise that drafts share with their texts, (N, V); None for greedy decoding."""
        if not self.trace.law.do_sample:
            return None
        return self.trace.noise(self._keys(at), at.places.tolist())

    def _grouped(self, size: int) -> list[list[int]]:
        """Groups of chains of one text; short groups are filled with their last chain."""
        texts = self.text.tolist()
        groups: list[list[int]] = []
        for chain, text in enumerate(texts):
            if not groups or len(groups[-1]) == size or texts[groups[-1][0]] != text:
                groups.append([])
            groups[-1].append(chain)
        return [[*group, *[group[-1]] * (size - len(group))] for group in groups]


class Places(NamedTuple):
    """Where chains (N,) draw: rows among the P places, places drawn, and histories."""

    chains: Tensor
    rows: Tensor
    places: Tensor
    histories: Histories

    def some(self, part: slice) -> Places:
        return Places(self.chains[part], self.rows[part], self.places[part], self.histories)


def _tiles(raw: Tensor, histories: Histories) -> list[slice]:
    """Parts of logits (N, V) to draw from one by one; one part with histories, or on a GPU."""
    if histories is not None or raw.device.type != "cpu":
        return [slice(None)]
    size = max(1, _TILE // raw.shape[1])
    return [slice(first, first + size) for first in range(0, len(raw), size)]


def _cost(groups: Sequence[Sequence[int]]) -> int:
    """The cost of a pass over groups of one size, in chains."""
    return len(groups) * (len(groups[0]) + COPY)
