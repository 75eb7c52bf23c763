"""Draws tokens from a round's logits, and decides which drafted tokens are accepted.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerskip.backends.base import Draw
from layerskip.cache.rows import on_device
from layerskip.decoding import noise, rules
from layerskip.decoding.laws import Law, softmax_law
from layerskip.decoding.passes import Position
from layerskip.decoding.rounds import DraftedTokens
from layerskip.decoding.rules import COUPLED, Rule
from layerskip.decoding.seats import Seat

Place = tuple[Seat, int]  # (text, tokens past the emitted ones); a `Position` names its row


class Drawn(NamedTuple):
    """What is drawn from raw logits (N, V), of a draft or of the target.

    Attributes:
        tokens: -1 if no token has a score above -inf, or one is NaN, (N,). The target draws its own
            tokens, and under the rejection rule corrections and the bonus.
        others: tokens with the next best scores, (N, up to best - 1), -1 for none, if requested.
        laws: for the rejection rule, a draft's N distributions (V,).
        accepted: whether the target accepts the token drafted at each position, (N,). None: it does
            if that equals its own.
        scores: the target's processed scores (N, V), if they are kept.
    """

    tokens: Tensor
    confidences: Tensor | None = None
    others: Tensor | None = None
    laws: Sequence[Tensor] = ()
    accepted: Tensor | None = None
    scores: Tensor | None = None


def joined(parts: Sequence[Drawn]) -> Drawn:
    """Concatenate what was drawn from parts of the logits; what one lacks, all lack."""
    if len(parts) == 1:
        return parts[0]

    def whole(name: str) -> Any:
        held = [getattr(each, name) for each in parts]
        return None if any(each is None for each in held) else torch.cat(held)

    laws = [law for each in parts for law in each.laws]
    values = {name: whole(name) for name in Drawn._fields if name != "laws"}
    return Drawn(**values, laws=laws)


class Draws:
    """Draws tokens at places of texts that share a distribution and advance independently."""

    def __init__(self, law: Law, *, rule: Rule = COUPLED, native: Draw | None = None) -> None:
        self.law, self.rule = law, rule
        self.greedy = not law.do_sample
        self.noise = noise.NoiseBlocks()
        self.warp = law.warp
        self.native = native if rule.shares_noise and self.warp is not None else None
        self.reads_history = law.reads_history

    @property
    def group_key(self) -> object:
        """A value that is equal for draws whose rows one native call can draw together."""
        return self if self.native is None else (self.warp, self.greedy)

    def draft(
        self,
        raw: Tensor,
        places: Sequence[Place],
        signal: str | None = None,
        *,
        best: int = 1,
    ) -> Drawn:
        """Draw from a draft's raw logits (N, V) at the given places.

        If processors that read the text fail, nothing is drawn. If the text reaches that position,
        they fail again when the target draws.

        Args:
            signal: the kind of confidence: "probability" of the token under the softmax of its raw
                logits, or "margin", 1 - exp(-m), where m is the margin between the two best scores
                of the draw; None for none.
        """
        try:
            return self._draft(raw, places, signal, best)
        except Exception:
            if not self.reads_history:
                raise
            nothing = raw.new_full((len(raw),), -1, dtype=torch.long)  # (N,)
            return Drawn(nothing, raw.new_zeros(len(raw)).float(), None, raw.float().unbind())

    def _draft(self, raw: Tensor, places: Sequence[Place], signal: str | None, best: int) -> Drawn:
        if self.native is not None and signal != "probability":
            tokens, negative, second = self._drawn(self.native, raw, places)
            sure = rules.margins_of(negative) if signal == "margin" else None
            ranked = [tokens, second]
            while len(ranked) < best:  # find the two best of the remaining tokens
                best_two = torch.stack(ranked[-2:], 1)  # (N, 2)
                raw = raw.scatter(1, best_two.clamp_min(0), -math.inf)
                token, _, second = self._drawn(self.native, raw, places)
                ranked += [token, second]
            return Drawn(tokens, sure, torch.stack(ranked[1:best], 1) if best > 1 else None)
        parts = [
            self._draft_of(scores, some, signal, best) for scores, some in self._pieces(raw, places)
        ]
        drawn = joined(parts)
        if signal == "probability":
            drawn = drawn._replace(confidences=confidence(raw, drawn.tokens.clamp_min(0)))
        return drawn

    def _draft_of(
        self, scores: Tensor, places: Sequence[Place], signal: str | None, best: int
    ) -> Drawn:
        """Draw from a draft's processed scores (N, V)."""
        purpose = noise.TARGET if self.rule.shares_noise else noise.DRAFT
        noisy = self._noisy(scores, places, purpose)
        sure = others = None
        if signal == "margin":
            token, sure = rules.with_margin(noisy)
        else:
            token = rules.largest(noisy)
        if best > 1 and self.rule.candidates > 1:
            further = [self._noisy(scores, places, noise.DRAFT, k) for k in range(1, best)]
            others = torch.stack([rules.largest(each) for each in further], 1)
        elif best > 1:
            others = rules.runners_up(noisy, token, best - 1)
        laws = () if self.rule.shares_noise else softmax_law(scores).unbind()
        return Drawn(token, sure, others, laws)

    def scores(self, place: Place, tokens: Sequence[int], raw: Sequence[float]) -> Sequence[float]:
        """The scores of some tokens at a place, as if `raw` were the target's raw logits.

        The target would draw the token with the largest score; under the rejection rule that is the
        likeliest one, since it is accepted most often. There are fewer scores if top-k or top-p
        leave fewer tokens, and none if the distribution is more than these and a temperature.
        """
        if self.warp is None:
            return ()
        if self.greedy or not self.rule.shares_noise:
            return raw
        scores = [each / self.warp.temperature for each in raw[: self.warp.top_k or len(raw)]]
        if self.warp.top_p < 1.0:
            weights = [math.exp(each - scores[0]) for each in scores]
            likelier = accumulate(weights[:-1], initial=0.0)
            most = self.warp.top_p * sum(weights)
            kept = sum(each < most for each in likelier)
            del scores[max(self.warp.least, kept) :]
        (key,), (position,) = streams([place])
        drawn = self.noise.of_tokens(key, position, tokens[: len(scores)])
        return [score + each for score, each in zip(scores, drawn, strict=True)]

    def judge(
        self,
        raw: Tensor,
        places: Sequence[Place],
        drafts: DraftedTokens | None = None,
        *,
        keep: bool = False,
    ) -> Drawn:
        """Make the target's decisions on its raw logits (N, V) at ascending places.

        If processors read the text, positions that the text does not reach stay undecided, since
        processors may fail there: those after a rejected token or an end of text.
        """
        if self.reads_history and drafts is not None and any(drafts.lengths):
            return self._judge_in_turn(raw, places, drafts, keep)
        return self._judge(raw, places, drafts, keep)

    def _judge_in_turn(
        self, raw: Tensor, places: Sequence[Place], drafts: DraftedTokens, keep: bool
    ) -> Drawn:
        """Like `_judge`, offset by offset, for texts whose drafts have been accepted so far."""
        drawn = torch.full((len(raw),), -1, device=raw.device)  # (N,)
        accepted = torch.zeros(len(raw), dtype=torch.bool, device=raw.device)  # (N,)
        scores = torch.zeros_like(raw, dtype=torch.float) if keep else None  # (N, V)
        alive = {seat for seat, _ in places}
        for now in range(1 + max(offset for _, offset in places)):
            here = [i for i, (seat, at) in enumerate(places) if at == now and seat in alive]
            if not here:
                break
            some = [places[i] for i in here]
            judged = self._judge(raw[here], some, drafts, keep)
            drafted = [drafts.token(position) for position in positions_of(some)]
            stays = judged.accepted
            if stays is None:
                stays = judged.tokens == on_device(drafted, raw.device)  # (n,)
            drawn[here], accepted[here] = judged.tokens, stays
            if scores is not None and judged.scores is not None:
                scores[here] = judged.scores
            on = zip(some, stays.tolist(), drafted, strict=True)
            alive = {seat for (seat, _), stay, token in on if stay and token not in seat.eos}
        return Drawn(drawn, accepted=accepted, scores=scores)

    def _judge(
        self, raw: Tensor, places: Sequence[Place], drafts: DraftedTokens | None, keep: bool
    ) -> Drawn:
        if self.native is not None and not keep:
            return Drawn(self._drawn(self.native, raw, places)[0])
        parts = []
        nodes = iter([] if drafts is None else drafts.nodes(positions_of(places)))
        for scores, some in self._pieces(raw, places):  # (n, V)
            stays = None
            if self.rule.choose is not None and drafts is not None:
                token = self._choose(drafts, some, [*islice(nodes, len(some))], scores)
            elif not self.rule.shares_noise and drafts is not None:
                stays, token = self._reject(drafts, some, scores)
            else:
                token = self._draw(scores, some)
            parts.append(Drawn(token, accepted=stays, scores=scores if keep else None))
        return joined(parts)

    def _drawn(
        self, native: Draw, raw: Tensor, places: Sequence[Place]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From raw logits (N, V): tokens, negative margins and second-best tokens, (N,) each."""
        warp = self.warp
        assert warp is not None
        starts = [] if self.greedy else noise.starts_of(*streams(places))
        return native(raw.contiguous(), *warp, starts)

    def _pieces(
        self, raw: Tensor, places: Sequence[Place]
    ) -> Iterator[tuple[Tensor, Sequence[Place]]]:
        """Yield processed scores (n, V) of raw logits (N, V) for a few places at a time."""
        # Processors that read the history get all rows at once: one call per length.
        count = len(places) if self.reads_history else noise.at_once(raw)
        for first in range(0, len(places), count):
            some = places[first : first + count]
            lengths = [seat.width + len(seat.emitted) + offset for seat, offset in some]
            rows = [seat.number for seat, _ in some]
            piece, (seat, _) = raw[first : first + count], some[0]  # one history for all rows
            yield self.law.scores(piece, seat.history, rows, lengths, seat.width), some

    def _draw(self, scores: Tensor, places: Sequence[Place]) -> Tensor:
        return rules.largest(self._noisy(scores, places, noise.TARGET))

    def _noisy(
        self, scores: Tensor, places: Sequence[Place], purpose: int, candidate: int = 0
    ) -> Tensor:
        if self.greedy:
            return scores
        keys, positions = streams(places, candidate)
        if purpose == noise.TARGET:
            drawn = torch.stack(self.noise.at(keys, positions, scores))  # (N, V)
        else:
            starts = [seat.place for seat, _ in places]
            drawn = noise.draft_noise(keys, starts, positions, scores)
        return drawn.add_(scores)

    def forget(self, seat: Seat) -> None:
        if not self.greedy:
            self.noise.forget(seat.key, None if seat.finished else seat.place)

    def _choose(
        self, drafts: DraftedTokens, places: Sequence[Place], nodes: Sequence[int], scores: Tensor
    ) -> Tensor:
        """The tokens (N,) of a rule that chooses among candidates, on scores (N, V).

        Args:
            nodes: of each place in its text's tree, where `places` have the depth.
        """
        assert self.rule.choose is not None
        p = softmax_law(scores)  # (N, V)
        tokens, final = [], []
        known = drafts.at(positions_of(places))
        for i, (place, node, at) in enumerate(zip(places, nodes, known, strict=True)):
            row = place[0].row
            drafted = drafts.tokens[row]
            parents = drafts.parents.get(row, range(len(drafted)))
            some = [token for token, parent in zip(drafted, parents, strict=True) if parent == node]
            token, rest = -1, p[i]
            if some:
                each_stream = [streams([place], number) for number in range(len(some))]
                parts = zip(*each_stream, strict=True)
                keys, at_each = ([each for (each,) in part] for part in parts)
                uniforms = noise.accept_uniform(keys, at_each, p.device)  # (K,)
                if row in drafts.step_free:  # certain of its token
                    q = torch.zeros_like(rest).index_fill_(0, on_device(some, p.device), 1.0)
                else:
                    q = drafts.laws[at]
                token, rest = self.rule.choose(rest, q, some, uniforms)
            tokens.append(token)
            final.append(rest)
        drawn = self._draw(torch.stack(final).log(), places)  # (N,)
        chosen = on_device(tokens, p.device)  # (N,)
        return torch.where(chosen < 0, drawn, chosen)

    def _reject(
        self, drafts: DraftedTokens, places: Sequence[Place], scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rejection rule (Leviathan et al. 2023, Algorithm 1) on scores (N, V)."""
        p = softmax_law(scores)  # (N, V)
        if not (drafts.steps or any(drafts.tokens)):  # a plain step
            return torch.zeros(len(p), device=p.device), self._draw(p.log(), places)
        positions = positions_of(places)
        if drafts.steps:
            at = drafts.at(positions)
            index = on_device(at, p.device)  # (N,)
            token = torch.cat([drawn for _, drawn in drafts.steps])[index]  # (N,)
            token = token.masked_fill(index < 0, -1)
            q = torch.stack([drafts.laws[i] for i in at])  # (N, V)
            if drafts.step_free:
                sure = [
                    drafts.token(each) if each[0] in drafts.step_free else -1 for each in positions
                ]
                chosen = on_device(sure, p.device)[:, None]  # (N, 1)
                token = torch.where(chosen[:, 0] < 0, token, chosen[:, 0])
                certain = torch.zeros_like(q).scatter_(1, chosen.clamp_min(0), 1.0)  # (N, V)
                q = torch.where(chosen < 0, q, certain)
        else:
            token = on_device([drafts.token(position) for position in positions], p.device)  # (N,)
            q = torch.zeros_like(p).scatter_(1, token.clamp_min(0)[:, None], 1.0)  # (N, V)
        here = token.clamp_min(0)[:, None]  # (N, 1)
        chance = rules.acceptance_probability(p.gather(1, here), q.gather(1, here))  # (N, 1)
        lucky = noise.accept_uniform(*streams(places), p.device) < chance[:, 0]  # (N,)
        drafted = token >= 0  # (N,)
        final = torch.where(drafted[:, None], rules.residual(p, q), p)  # (N, V)
        return drafted & lucky, self._draw(final.log(), places)


def positions_of(places: Sequence[Place]) -> list[Position]:
    return [(seat.row, offset) for seat, offset in places]


def streams(places: Sequence[Place], candidate: int = 0) -> tuple[list[int], list[int]]:
    """Noise-stream key and position (without pads) of the token drawn at each place.

    Further candidates of a place have streams of their own.
    """
    keys = [noise.stream_key(seat.key, candidate) if candidate else seat.key for seat, _ in places]
    return keys, [seat.place + offset for seat, offset in places]


def confidence(raw: Tensor, tokens: Tensor) -> Tensor:
    """Probability of each token (N,) under the softmax of its raw logits (N, V), (N,)."""
    count = noise.at_once(raw)
    return torch.cat(
        [
            # logsumexp is several times slower
            torch.softmax(some.float(), dim=-1).gather(1, chosen[:, None])[:, 0]
            for some, chosen in zip(raw.split(count), tokens.split(count), strict=True)
        ]
    )
