"""Drafts that run on from places of a trace, many of them through the model together.

A draft's round depends on its start alone: it feeds the start's token, then its own, and sees the
target's keys and values before the start. So the drafts from all places are chains of tokens in a
few wide passes through the engine's own sublayers. Where chains are followed only until they leave
their text, the prefix that they share with the target is taken from the trace, and passes shrink.
Letters: A chains of a pass, B groups, G chains of a group, C chains, J steps, N some chains, P
places of all texts, W vocabularies, V tokens of a whole one, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerskip.decoding.noise import gumbel_noise
from layerskip.decoding.sources.base import Source
from layerskip.replay.drawing import NOTHING, Drawn, Histories, TextPlaces, draw, narrowed, propose
from layerskip.replay.trace import Trace, TraceText

Chain = tuple[TraceText, int, int]  # the text left, the place and the id of the first token fed
Survival = Sequence[float]
Vocabularies = Sequence[Tensor | None]  # tokens to draw on each text, (texts, V) bool; None: all
Enough = Callable[[Sequence[Survival]], Sequence[bool]]

GROUPS = (16, 8, 4)  # chains that share one copy of their text's keys and values; copies cost, too
CHAINS = 512  # of one pass, at most
LOGITS = 2**24  # elements of one pass's logits, or of noise made at once, at most
_TILE = 2**20  # logits that are drawn from at once on a CPU: what is made of them stays in caches
REGROUP = 0.8  # a pass is made smaller when at most so many of its places are needed


class ChainDrafts(NamedTuple):
    """What drafts are, (C, J) each, as a replay has them."""

    tokens: Tensor
    confidences: Tensor
    margins: Tensor
    entropies: Tensor

    @classmethod
    def nothing(cls, chains: int, steps: int) -> ChainDrafts:
        sure, margins, entropies = (torch.zeros(chains, steps) for _ in range(3))
        return cls(torch.zeros(chains, steps, dtype=torch.long), sure, margins, entropies)

    @classmethod
    def concatenated(cls, parts: Sequence[ChainDrafts]) -> ChainDrafts:
        """The drafts of several texts, one behind the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))


class Chains:
    """C drafts of J steps that run on from given tokens, through the model together.

    Args:
        vocabularies: W of them. Drafts that differ only in the tokens they can draw compute the
            same on the text, so that they share everything but the draws; only while followed.
        follow: whether to leave each draft at its first wrong token.
    """

    def __init__(
        self,
        trace: Trace,
        source: Source,
        chains: Sequence[Chain],
        steps: int,
        vocabularies: Vocabularies,
        *,
        follow: bool = False,
    ) -> None:
        self.trace, self.chains = trace, chains
        self.vocabularies, self.follow = vocabularies, follow
        self.draft = source.steps(trace, follow=follow)
        self.steps = min(steps, self.draft.longest or steps)
        facts = [
            (
                text.number,
                place,
                token,
                trace.offsets[text.number] + place - text.prompt,
                trace.offsets[text.number] + len(text.following) - 1,
                0 if text.tokens[place : place + 1].tolist() == [token] else place,
            )
            for text, place, token in chains
        ]
        table = torch.tensor(facts, dtype=torch.long).view(len(chains), 6)
        self.text, self.place, self.token = table[:, :3].unbind(1)  # (C,) each
        self.row, self.last_row = table[:, 3:5].unbind(1)  # (C,) each: among the P places
        self.left = table[:, 5]  # (C,) place of the first token off the text, 0 on it

    def run(self, enough: Enough | None = None) -> list[ChainDrafts]:
        """Drafts (C, J), W times; if followed, what stands behind a wrong token means nothing.

        Some of the W end sooner, where it is enough.
        """
        shape = len(self.chains), self.steps
        drafts = [ChainDrafts.nothing(*shape) for _ in self.vocabularies]
        if not all(shape):
            return drafts
        size = next((s for s in reversed(GROUPS) if s >= len(self.chains)), GROUPS[0])
        groups = self._grouped(range(len(self.chains)), size)
        vocabulary = self.trace.model.vocabulary
        together = max(1, min(CHAINS, LOGITS // vocabulary) // size)
        parts = -(-len(groups) // together)
        lengths = [self.steps] * len(drafts)
        for part in range(parts):  # each has chains from all over the texts
            lengths = self._run(torch.tensor(groups[part::parts]), lengths, drafts, enough)
            enough = None  # the first part has decided for all
        return [
            ChainDrafts(*(table[:, :length] for table in each))
            for each, length in zip(drafts, lengths, strict=True)
        ]

    def _run(
        self,
        layout: Tensor,
        lengths: Sequence[int],
        drafts: Sequence[ChainDrafts],
        enough: Enough | None,
    ) -> list[int]:
        """Fill in the drafts of chains (B, G), so many steps of each; returns how many of each."""
        lengths, steps = list(lengths), max(lengths)
        trace = self.trace
        self.draft.begin(self.text[layout[:, 0]], self.place[layout], steps)
        begun = layout.flatten().unique()  # (A,)
        noise = None
        if trace.law.do_sample and not trace.rejection:
            noise = _SharedNoise(trace, [self.chains[chain] for chain in begun.tolist()], steps)
        fed = self.token[begun][:, None].repeat(1, steps + 1)  # (A, J + 1)
        left = self.left[begun].repeat(len(drafts), 1)  # (W, A)
        survivals: list[list[float]] = [[] for _ in drafts]
        for step in range(steps):
            flat = layout.flatten()  # (B G,)
            numbers = torch.searchsorted(begun, flat)  # (B G,) among those begun
            rows = torch.minimum(self.row[flat] + step, self.last_row[flat])  # (B G,)
            tokens = fed[numbers, step].view(layout.shape)  # (B, G)
            raw = self.draft.raw(step, tokens, rows.view(layout.shape)).flatten(0, 1)  # (B G, V)
            places = self.place[flat] + step + 1  # (B G,) of what is drawn
            at = Places(flat, rows, places, self._histories(flat, fed[numbers, : step + 1]))
            shared = None if noise is None else noise.at(step, numbers)
            wanted = tokens = trace.following[rows]  # (B G,)
            for number, (mine, allowed, gone, survival) in enumerate(
                zip(drafts, self.vocabularies, left, survivals, strict=True)
            ):
                if step >= lengths[number]:
                    continue
                drawn = self._draw(raw, at, allowed, gone[numbers], shared)
                tokens = drawn.tokens.cpu()
                mine.tokens[flat, step] = tokens
                mine.confidences[flat, step] = drawn.confidences.cpu()
                mine.margins[flat, step] = drawn.margins.cpu()
                mine.entropies[flat, step] = drawn.entropies.cpu()
                # behind the last known token of a text no draft is on it
                wrong = (gone[numbers] == 0) & ((tokens != wanted) | (wanted == NOTHING))
                gone[numbers[wrong]] = places[wrong]
                survival.append(int((gone == 0).sum()) / len(begun))
            if self.follow:
                tokens = wanted
            fed[numbers, step + 1] = tokens.clamp_min(0)  # behind `NOTHING` anything will do
            if enough is not None:
                over = [step + 1 if done else steps for done in enough(survivals)]
                lengths = list(map(min, lengths, over))
            going_on = [number for number, length in enumerate(lengths) if step + 1 < length]
            if not going_on:
                break
            if self.follow:
                alive = (left[going_on] == 0).any(0)  # (A,)
                if not alive.any():
                    break
                if int(alive.sum()) <= REGROUP * layout.numel():
                    kept = begun[alive].tolist()
                    layout = self._regrouped(layout, kept, steps, step + 1)
        return lengths

    def _histories(self, chains: Tensor, fed: Tensor) -> Histories:
        """What each of some chains has seen, having fed tokens (N, any)."""
        if not self.trace.law.reads_history:
            return None
        device = self.trace.model.device
        return [
            torch.cat([text.tokens[:place], tokens]).to(device)
            for (text, place, _), tokens in zip(
                (self.chains[chain] for chain in chains.tolist()), fed, strict=True
            )
        ]

    def _draw(
        self, raw: Tensor, at: Places, allowed: Tensor | None, left: Tensor, noise: Tensor | None
    ) -> Drawn:
        """Draw from raw logits (N, V), under the trace's law and accept rule.

        Args:
            left: place of each chain's first token off the text, 0 on it, (N,).
            noise: Gumbel noise that drafts share with their texts, (N, V), under that rule.
        """
        trace, histories = self.trace, at.histories
        texts = self.text[at.chains]
        if not trace.rejection and histories is None:
            tiles = []
            size = max(1, _TILE // raw.shape[1]) if raw.device.type == "cpu" else len(raw)
            for first in range(0, len(raw), size):
                some = slice(first, first + size)
                tokens = None if allowed is None else allowed[texts[some]].to(raw.device)
                shared = None if noise is None else noise[some]
                tiles.append(draw(trace.law, narrowed(raw[some], tokens), shared, None))
            return Drawn(*map(torch.cat, zip(*tiles, strict=True)))
        if allowed is not None:
            raw = narrowed(raw, allowed[texts].to(raw.device))
        if not trace.rejection:
            return draw(trace.law, raw, noise, histories)

        def target(some: Tensor) -> Tensor:
            rows = some.cpu()
            seen = None if histories is None else [histories[i] for i in rows.tolist()]
            return trace.target_law(at.rows[rows], seen)

        beside = TextPlaces(
            trace.following[at.rows].to(raw.device),
            trace.likelihoods[at.rows].to(raw.device),
            [trace.texts[text].key for text in texts.tolist()],
            at.places.tolist(),
            left.tolist(),
        )
        return propose(trace.law, raw, histories, beside, target)

    def _regrouped(self, layout: Tensor, kept: Sequence[int], steps: int, fed: int) -> Tensor:
        """The chains to be kept, in groups of a size that leaves few places empty."""
        groups = min((self._grouped(kept, size) for size in GROUPS), key=_places_taken)
        if _places_taken(groups) > REGROUP * layout.numel():
            return layout
        at = {chain: index for index, chain in enumerate(layout.flatten().tolist())}
        self.draft.regroup(
            torch.tensor([[at[chain] for chain in group] for group in groups]), steps, fed
        )
        return torch.tensor(groups)

    def _grouped(self, chains: Sequence[int], size: int) -> list[list[int]]:
        """Groups of chains of one text, short ones filled up with their last."""
        texts = self.text.tolist()
        groups: list[list[int]] = []
        for chain in chains:
            if not groups or len(groups[-1]) == size or texts[groups[-1][0]] != texts[chain]:
                groups.append([])
            groups[-1].append(chain)
        return [[*group, *[group[-1]] * (size - len(group))] for group in groups]


class Places(NamedTuple):
    """What chains (N,) draw at: rows among the P places, the places drawn, what they have seen."""

    chains: Tensor
    rows: Tensor
    places: Tensor
    histories: Histories


class _SharedNoise:
    """The Gumbel noise of chains that draw at neighbouring places: each place's is made once."""

    def __init__(self, trace: Trace, chains: Sequence[Chain], steps: int) -> None:
        vocabulary, device = trace.model.vocabulary, trace.model.device
        wanted = [(text.key, place + j + 1) for text, place, _ in chains for j in range(steps)]
        made = {pair: row for row, pair in enumerate(dict.fromkeys(wanted))}
        self.rows = torch.tensor([made[pair] for pair in wanted]).view(len(chains), steps)  # (A, J)
        pairs, many = list(made), max(1, LOGITS // vocabulary)  # making takes room
        pieces = []
        for first in range(0, len(pairs), many):
            keys, places = zip(*pairs[first : first + many], strict=True)
            pieces.append(gumbel_noise(keys, places, vocabulary, device=device))
        self.table = torch.cat(pieces)  # (R, V)

    def at(self, step: int, chains: Tensor) -> Tensor:
        """Noise of the chains so numbered, at a step, (N, V)."""
        return self.table[self.rows[chains, step].to(self.table.device)]


def _places_taken(groups: Sequence[Sequence[int]]) -> int:
    return len(groups) * len(groups[0])
