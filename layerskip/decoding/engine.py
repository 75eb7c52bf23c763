"""The loop: prefill, then rounds of draft, verify, accept, for rows that advance at their own pace.

Knows token ids, laws and controllers; knows nothing of text, files, clocks or `generate()`.
Letters: B rows, N positions, K drafted tokens, V vocabulary, W width of the padded prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.costs.speculation import draft_limit, round_sublayer_tokens
from layerskip.decoding.controllers import Controller, require_controller
from layerskip.decoding.laws import (
    DRAFT,
    TARGET,
    Law,
    NoiseBlocks,
    accept_uniform,
    acceptance_probability,
    gumbel_noise,
    residual,
    softmax_law,
    stream_key,
)
from layerskip.decoding.passes import Position, Session
from layerskip.decoding.rounds import DecodingStats, Round
from layerskip.model.cache import on_device
from layerskip.model.sublayers import Sublayers

Stop = Callable[[int, Tensor], bool]


@dataclass(frozen=True)
class Request:
    """What to decode, in token ids.

    Attributes:
        input_ids: prompts as `generate()` holds them, left-padded, (B, W).
        attention_mask: 1 at real tokens, 0 at pads, (B, W).
        max_new_tokens: tokens each row may grow by, at least 1.
        law: turns logits into the law, for draft and target alike.
        keys: noise-stream key of each row (`laws.stream_key`); unused where the law is greedy.
        rejection: accept by the rejection rule instead of coupled draws.
        eos: tokens that end a row.
        stop: asked after every emitted token with (row, that row's history (1, n)); True ends
            the row. Called in order, once per row and token.
        keep_scores, keep_logits: keep processed scores, raw logits of every emitted token in the
            rounds.
        clock: read at the phases of every round, in seconds; None: rounds have no times.
    """

    input_ids: Tensor
    attention_mask: Tensor
    max_new_tokens: int
    law: Law
    keys: Sequence[int] = ()
    rejection: bool = False
    eos: frozenset[int] = frozenset()
    stop: Stop | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    clock: Callable[[], float] | None = None


@dataclass
class _Drafts:
    """What a round has drafted.

    Attributes:
        tokens: drafted tokens per row; empty where they are still to be read from the device.
        confidences: those of the tokens per row, where the controller needs them.
        lengths: per row, how many tokens the target is asked about.
        last: each row's last token, drafted or emitted, in the session's order of rows, (R,).
        steps: of every draft step its positions, and the tokens drawn there, -1 for none, (N,).
        laws: for the rejection rule, of every draft step the draft's law, (N, V).
        unread: whether no token has been read from the device yet.
    """

    tokens: list[list[int]]
    confidences: list[list[float]]
    lengths: list[int]
    last: Tensor
    steps: list[tuple[list[Position], Tensor]]
    laws: list[Tensor]
    unread: bool

    def at(self, positions: Sequence[Position]) -> Tensor:
        """Where each position lies among those of all steps, -1 for none, (len(positions),)."""
        places = {position: i for i, position in enumerate(chain(*(at for at, _ in self.steps)))}
        return on_device([places.get(position, -1) for position in positions], self.last.device)


class Decoder:
    """Decodes one request; iterate over `rounds()`, once.

    Args:
        model: the opened model.
        skip: which sublayers the draft leaves out.
        controller: decides how long to draft; it is reset here.
        request: what to decode.
        max_draft_length: the most tokens any round drafts; 0 is plain decoding.

    Raises:
        TypeError: the controller lacks a part of the protocol.
        ValueError: lengths that the model's positions cannot hold; from `rounds()`, a law without
            any token to draw (NaN logits, or processors that forbid everything).
    """

    def __init__(
        self,
        model: Sublayers,
        skip: SkipConfig,
        controller: Controller,
        request: Request,
        *,
        max_draft_length: int,
    ) -> None:
        require_controller(controller)
        self.request = request
        self.controller = controller
        self.max_draft_length = max_draft_length
        rows, self.width = request.input_ids.shape
        self.rows = range(rows)
        self.device = model.device
        self.session = Session(
            model,
            skip,
            [
                ids[mask.bool()]
                for ids, mask in zip(request.input_ids, request.attention_mask, strict=True)
            ],
            max_new_tokens=request.max_new_tokens,
            max_draft_length=max_draft_length,
        )
        self.greedy = not request.law.do_sample
        self.rejection = request.rejection and not self.greedy
        self.noise = NoiseBlocks()
        self.emitted: list[list[int]] = [[] for _ in self.rows]
        self.finished = [False] * rows
        # pads and prompt, then emitted, then drafted tokens: what processors and criteria read
        slack = request.max_new_tokens + max_draft_length + 1
        self.history = F.pad(request.input_ids.to(self.device), (0, slack))  # (B, W + slack)
        self._reads_history = request.stop is not None or request.law.reads_history
        self.stats = DecodingStats()
        self._times: list[float] = []  # of the round in progress
        controller.reset(rows)

    def rounds(self) -> Iterator[Round]:
        """Yield the prefill's round and every round after it, until all rows are finished."""
        yield self._first_round()
        index = 0
        while not all(self.finished):
            index += 1
            yield self._round(index)

    def _first_round(self) -> Round:
        self._mark(begin=True)
        self._mark()
        raw = self.session.prefill()  # (B, V)
        self._mark()
        positions = [(row, 0) for row in self.rows]
        scores = self._scores(raw, positions)  # (B, V)
        (first,) = self._read(self._draw(scores, positions, TARGET))
        tokens = [[self._checked(token, row)] for row, token in enumerate(first)]
        nothing: list[list[int]] = [[] for _ in self.rows]
        return self._close(0, tokens, nothing, [[] for _ in self.rows], positions, scores, raw)

    def _round(self, index: int) -> Round:
        self._mark(begin=True)
        self._compact()
        drafts = self._draft()
        self._mark()
        positions = [
            (row, offset)
            for row in self.rows
            if not self.finished[row]
            for offset in range(drafts.lengths[row] + 1)
        ]
        raw = self.session.verify(drafts.last, positions)  # (N, V)
        self._mark()
        scores = self._scores(raw, positions)  # (N, V)
        judge = self._reject if self.rejection else self._match
        tokens = self._judged(drafts, positions, *judge(drafts, positions, scores))
        return self._close(index, tokens, drafts.tokens, drafts.confidences, positions, scores, raw)

    def _compact(self) -> None:
        """Leave finished rows behind where the others fit into half of the rows, or fewer.

        What stays is a power of two, so that passes have few shapes; finished rows fill it up.
        """
        rows = self.session.rows
        going = [row for row in rows if not self.finished[row]]
        size = 1 << (len(going) - 1).bit_length()
        if 2 * size > len(rows):
            return
        done = [row for row in rows if self.finished[row]]
        done.sort(key=self.session.lengths.__getitem__)  # the shortest have the least to attend to
        kept = sorted([*going, *done[: size - len(going)]])
        self.stats.num_compactions += 1
        self.stats.compacted_bytes += self.session.keep(kept)

    def _mark(self, *, begin: bool = False) -> None:
        """Note the time, if the request has a clock."""
        if begin:
            self._times.clear()
        if self.request.clock is not None:
            self._times.append(self.request.clock())

    def _draft(self) -> _Drafts:
        """Draft in lockstep, each row for as long as its controller says.

        Where nobody asks for the tokens before the target has seen them, they are not read: the
        host does not wait for the device. A draft then goes on behind an end, for nothing.
        """
        law, controller = self.request.law, self.controller
        unread = not controller.needs_confidence and not law.reads_history
        places = self.session.rows
        drafts = _Drafts(
            tokens=[[] for _ in self.rows],
            confidences=[[] for _ in self.rows],
            lengths=[0 for _ in self.rows],
            last=on_device([self.emitted[row][-1] for row in places], self.device),
            steps=[],
            laws=[],
            unread=unread,
        )
        limits = [0 if self.finished[row] else self._limit(row) for row in self.rows]
        drafting = [row for row in self.rows if limits[row] > 0]
        for step in range(max(limits)):
            if not (drafting and controller.draft_together(drafting)):
                break
            raw = self.session.draft_step(drafts.last, step)  # (R, V)
            last = drafts.last
            here = None
            if len(drafting) < len(places):
                # the others have no history of this length, which processors would stumble over
                here = on_device([places[row] for row in drafting], self.device)  # (N,)
                raw, last = raw[here], last[here]  # (N, V), (N,)
            positions = [(row, step) for row in drafting]
            scores = self._scores(raw, positions)  # (N, V)
            drawn = self._draw(scores, positions, DRAFT if self.rejection else TARGET)  # (N,)
            drafts.steps.append((positions, drawn))
            if self.rejection:
                drafts.laws.append(softmax_law(scores))
            # the processors may forbid every token, and half precision may overflow
            fed = torch.where(drawn < 0, last, drawn)  # (N,)
            drafts.last = fed if here is None else drafts.last.index_copy(0, here, fed)
            tokens: Sequence[float | None] = [None] * len(drafting)
            sure = [1.0] * len(drafting)
            if controller.needs_confidence:
                tokens, sure = self._read(drawn, _confidence(raw, fed))
            elif not unread:
                (tokens,) = self._read(drawn)
            going_on = []
            for row, token, confidence in zip(drafting, tokens, sure, strict=True):
                if token is not None:
                    if token < 0:
                        continue
                    self._remember(row, step, int(token))
                    drafts.tokens[row].append(int(token))
                    if controller.needs_confidence:
                        drafts.confidences[row].append(confidence)
                drafts.lengths[row] += 1
                if (
                    token not in self.request.eos
                    and drafts.lengths[row] < limits[row]
                    and controller.keep_drafting(row, confidence)
                ):
                    going_on.append(row)
            drafting = going_on
        return drafts

    def _limit(self, row: int) -> int:
        """How many tokens the row drafts at most in its next round."""
        left = self.request.max_new_tokens - len(self.emitted[row])
        free = self.session.cache.slots - self.session.lengths[row]
        allowed = draft_limit(self.max_draft_length, left, free)
        return min(self.controller.limit(row, allowed), allowed)

    @staticmethod
    def _read(*values: Tensor) -> list[list[float]]:
        """Numbers (n,) each on the host: the one place where it waits for the device.

        They travel together, as int64: whole numbers as they are, others as the bits of float32.
        """
        if len(values) == 1:
            return [values[0].tolist()]
        bits = [
            each.float().view(torch.int32).long() if each.is_floating_point() else each.long()
            for each in values
        ]
        pieces = torch.cat(bits).cpu().split([len(each) for each in values])
        return [
            (piece.int().view(torch.float32) if each.is_floating_point() else piece).tolist()
            for each, piece in zip(values, pieces, strict=True)
        ]

    def _remember(self, row: int, offset: int, token: int) -> None:
        """Write a token `offset` places behind the row's emitted ones into its history."""
        if self._reads_history:
            self.history[row, self.width + len(self.emitted[row]) + offset] = token

    def _scores(self, raw: Tensor, positions: Sequence[Position]) -> Tensor:
        """Processed scores (N, V) from the raw logits (N, V) at those positions."""
        rows = [row for row, _ in positions]
        lengths = [self.width + len(self.emitted[row]) + offset for row, offset in positions]
        return self.request.law.scores(raw, self.history, rows, lengths)

    def _draw(self, scores: Tensor, positions: Sequence[Position], purpose: int) -> Tensor:
        """Draw a token at each position, (N,); -1 where none has a score above -inf, or NaN."""
        if not self.greedy:
            keys, places = self._stream(positions)
            if purpose == TARGET:
                noise = self.noise.at(keys, places, scores)
            else:
                # A draft thrown away has told the controller something of its noise, so that no
                # later round may draft from the same: each round has a stream of its own.
                starts = [
                    place - offset for place, (_, offset) in zip(places, positions, strict=True)
                ]
                keys = list(map(stream_key, keys, starts))
                noise = gumbel_noise(
                    keys, places, scores.shape[-1], purpose=purpose, device=scores.device
                )
            scores = noise.add_(scores)  # (N, V)
        best, token = scores.max(-1)  # (N,), (N,)
        return torch.where(best > float("-inf"), token, -1)

    def _stream(self, positions: Sequence[Position]) -> tuple[list[int], list[int]]:
        """Noise-stream key and place, pads not counted, of the token drawn at each position."""
        keys = [self.request.keys[row] for row, _ in positions]
        lengths = self.session.prompt_lengths
        places = [lengths[row] + len(self.emitted[row]) + offset for row, offset in positions]
        return keys, places

    def _match(
        self, _: _Drafts, positions: Sequence[Position], scores: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """The target's own draws (N,), with which a draft has to agree."""
        return None, self._draw(scores, positions, TARGET)

    def _reject(
        self, drafts: _Drafts, positions: Sequence[Position], scores: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """The rejection rule (Leviathan et al. 2023, Algorithm 1).

        Returns:
            Of every position whether the token drafted there is accepted (N,), and what is emitted
            if it is not, or if there is none: a correction or the bonus (N,).
        """
        p = softmax_law(scores)  # (N, V)
        if not drafts.steps:
            return torch.zeros(len(p), device=p.device), self._draw(p.log(), positions, TARGET)
        index = drafts.at(positions)  # (N,)
        token = torch.cat([drawn for _, drawn in drafts.steps])[index]  # (N,)
        drafted = (index >= 0) & (token >= 0)  # (N,)
        q = torch.cat(drafts.laws)[index]  # (N, V)
        here = token.clamp_min(0)[:, None]  # (N, 1)
        chance = acceptance_probability(p.gather(1, here), q.gather(1, here))[:, 0]  # (N,)
        keys, places = self._stream(positions)
        accepted = drafted & (accept_uniform(keys, places, self.device) < chance)  # (N,)
        final = torch.where(drafted[:, None], residual(p, q), p)  # (N, V)
        return accepted, self._draw(final.log(), positions, TARGET)

    def _judged(
        self,
        drafts: _Drafts,
        positions: Sequence[Position],
        accepted: Tensor | None,
        drawn: Tensor,
    ) -> list[list[int]]:
        """Tokens of each row: drafted ones up to the first that falls, then the target's own.

        Args:
            accepted: of each position whether its drafted token stays (N,); None: if it is `drawn`.
            drawn: what the target has to say there, -1 for nothing (N,).
        """
        flags = [] if accepted is None else [accepted]
        steps = [tokens for _, tokens in drafts.steps] if drafts.unread else []
        target, *others = self._read(drawn, *flags, *steps)
        stays = others.pop(0) if flags else []
        for (at, _), step in zip(drafts.steps, others, strict=False):
            for (row, offset), token in zip(at, step, strict=True):
                draft = drafts.tokens[row]
                ended = draft and draft[-1] in self.request.eos
                if token >= 0 and offset == len(draft) and not ended:
                    draft.append(int(token))
        tokens: list[list[int]] = [[] for _ in self.rows]
        fallen: set[int] = set()
        for i, (row, offset) in enumerate(positions):
            if row in fallen:
                continue
            draft = drafts.tokens[row]
            token = draft[offset] if offset < len(draft) else -1
            if token >= 0 and (stays[i] if flags else target[i] == token):
                tokens[row].append(token)
            else:
                tokens[row].append(self._checked(target[i], row))
                fallen.add(row)
        return tokens

    def _checked(self, token: float, row: int) -> int:
        if token < 0:
            raise ValueError(
                f"row {row} has no token to draw after {len(self.emitted[row])} new tokens: its "
                "scores are NaN or all -inf; check the checkpoint and dtype for NaN logits, or "
                "the logits processors for forbidding every token"
            )
        return int(token)

    def _close(
        self,
        index: int,
        tokens: list[list[int]],
        drafts: list[list[int]],
        confidences: list[list[float]],
        positions: Sequence[Position],
        scores: Tensor,
        raw: Tensor,
    ) -> Round:
        """Emit each row's tokens one by one, stopping where the row ends; count; commit."""
        emitted: list[list[int]] = [[] for _ in self.rows]
        for row, candidates in enumerate(tokens):
            if not candidates:
                continue
            for token in candidates:
                self._remember(row, 0, token)
                self.emitted[row].append(token)
                emitted[row].append(token)
                if self._ends(row, token):
                    self.finished[row] = True
                    break
            if not self.greedy:
                (key,), (place,) = self._stream([(row, 0)])
                self.noise.forget(key, None if self.finished[row] else place)
            if index:
                self.session.commit(row, len(emitted[row]))
                self.controller.update(row, len(drafts[row]), len(candidates) - 1)
        accepted = [min(max(len(tokens[row]) - 1, 0), len(emitted[row])) for row in self.rows]
        request = self.request
        kept_scores = _by_row(scores, positions, emitted) if request.keep_scores else None
        kept_logits = _by_row(raw, positions, emitted) if request.keep_logits else None
        self._mark()
        round_ = Round(
            index=index,
            tokens=tuple(map(tuple, emitted)),
            drafted=tuple(map(len, drafts)),
            accepted=tuple(accepted),
            confidences=tuple(map(tuple, confidences)),
            finished=tuple(self.finished),
            scores=kept_scores,
            logits=kept_logits,
            times=tuple(self._times) or None,
        )
        session = self.session
        sublayers = session.model.num_sublayers
        self.stats.add(
            round_,
            lambda drafted: round_sublayer_tokens(
                drafted, session.num_kept, session.prefix, sublayers
            ),
        )
        return round_

    def _ends(self, row: int, token: int) -> bool:
        request, emitted = self.request, self.emitted[row]
        ended = token in request.eos or len(emitted) >= request.max_new_tokens
        if request.stop is not None:
            # asked even at an end: criteria may keep count of the tokens they have seen
            seen = self.history[row : row + 1, : self.width + len(emitted)]  # (1, W + emitted)
            ended = request.stop(row, seen) or ended
        return ended


def _confidence(raw: Tensor, tokens: Tensor) -> Tensor:
    """Probability of each token (N,) under the softmax of its raw logits (N, V), (N,)."""
    law = torch.softmax(raw.float(), dim=-1)  # (N, V); logsumexp is several times slower
    return law.gather(1, tokens[:, None])[:, 0]


def _by_row(
    values: Tensor, positions: Sequence[Position], emitted: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    """Of values (N, V) at those positions those of the emitted tokens: per row (emitted, V)."""
    places = [
        [i for i, (at, offset) in enumerate(positions) if at == row and offset < len(tokens)]
        for row, tokens in enumerate(emitted)
    ]
    return tuple(values[i].float() for i in places)
