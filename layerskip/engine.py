"""The loop: prefill, then rounds of draft, verify, accept, for rows that advance at their own pace.

Knows token ids, laws and controllers; knows nothing of text, files, clocks or `generate()`.
Letters: B rows, N positions, K drafted tokens, V vocabulary, W width of the padded prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.controllers import Controller, drafts_on
from layerskip.laws import (
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
from layerskip.passes import Position, Session
from layerskip.speculation import draft_limit, round_sublayer_tokens
from layerskip.sublayers import Sublayers

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


@dataclass(frozen=True)
class Round:
    """What one round did, row by row; round 0 is the prefill and its first token.

    Attributes:
        index: 0 for the prefill, then 1, 2, ...
        tokens: emitted tokens per row, in order; empty for rows that had finished.
        drafted: tokens drafted per row.
        accepted: drafted tokens that were emitted, per row.
        confidences: per row, the draft's own probability (softmax of its raw logits at
            temperature 1) of each drafted token; empty where the controller needs none.
        finished: whether each row is finished after this round.
        scores, logits: per row, (emitted, V) float32, where the request asked for them.
        times: what the request's clock said when the round began, when its drafts were there, when
            the target's logits were, and when its tokens were out.
    """

    index: int
    tokens: tuple[tuple[int, ...], ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    confidences: tuple[tuple[float, ...], ...]
    finished: tuple[bool, ...]
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    times: tuple[float, ...] | None = None


@dataclass
class DecodingStats:
    """Counts of a decoding, over all rows; rates are derived from them.

    Attributes:
        num_rounds: rounds (verify passes) rows took part in, prefill not counted.
        num_drafts: those of them that drafted at least one token.
        num_draft_tokens: tokens drafted.
        num_accepted_tokens: drafted tokens that were emitted.
        accepted_per_position: entry j counts rounds whose draft token j + 1 was emitted.
        num_new_tokens: tokens emitted, the first one of each row (from the prefill) included.
        num_sequences: rows, each of which got one token from the prefill.
        sublayer_tokens: tokens carried through one sublayer in rounds, padding not counted.
        num_compactions: times finished rows were left behind, and the cache's other rows moved up.
        compacted_bytes: keys and values that this copied; nothing else ever copies them.
        seeds: the seed of each row's noise; empty for greedy decoding.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_new_tokens: int = 0
    num_sequences: int = 0
    sublayer_tokens: int = 0
    num_compactions: int = 0
    compacted_bytes: int = 0
    seeds: tuple[int, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens (r); 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens per verify that followed a draft, the bonus included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per target pass over all rounds, also those that did not draft."""
        emitted = self.num_new_tokens - self.num_sequences
        return emitted / self.num_rounds if self.num_rounds else 0.0

    def add(self, round_: Round, cost: Callable[[int], int]) -> None:
        """Count a round; `cost` gives the sublayer-tokens of a row's round by drafted tokens."""
        self.num_new_tokens += sum(map(len, round_.tokens))
        if round_.index == 0:
            self.num_sequences += len(round_.tokens)
            return
        for tokens, drafted, accepted in zip(
            round_.tokens, round_.drafted, round_.accepted, strict=True
        ):
            if not tokens:
                continue
            self.num_rounds += 1
            self.num_drafts += drafted > 0
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
            self.sublayer_tokens += cost(drafted)
            self.accepted_per_position += [0] * (accepted - len(self.accepted_per_position))
            for position in range(accepted):
                self.accepted_per_position[position] += 1


class Decoder:
    """Decodes one request; iterate over `rounds()`, once.

    Args:
        model: the opened model.
        skip: which sublayers the draft leaves out.
        controller: decides how long to draft; it is reset here.
        request: what to decode.
        max_draft_length: the most tokens any round drafts; 0 is plain decoding.

    Raises:
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
        first = self._draw(scores, positions, TARGET)
        nothing: list[list[int]] = [[] for _ in self.rows]
        tokens = [[self._checked(token, row)] for row, token in enumerate(first)]
        return self._close(0, tokens, nothing, [[] for _ in self.rows], positions, scores, raw)

    def _round(self, index: int) -> Round:
        self._mark(begin=True)
        self._compact()
        drafts, confidences, laws = self._draft()
        self._mark()
        positions = [
            (row, offset)
            for row in self.rows
            if not self.finished[row]
            for offset in range(len(drafts[row]) + 1)
        ]
        last = [(drafts[row] or self.emitted[row])[-1] for row in self.session.rows]
        raw = self.session.verify(self._tensor(last), positions)  # (N, V)
        self._mark()
        scores = self._scores(raw, positions)  # (N, V)
        accept = self._reject if self.rejection else self._match
        tokens = accept(drafts, positions, scores, laws)
        return self._close(index, tokens, drafts, confidences, positions, scores, raw)

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

    def _draft(self) -> tuple[list[list[int]], list[list[float]], dict[Position, Tensor]]:
        """Draft in lockstep, each row for as long as its controller says.

        Returns:
            Drafted tokens per row; their confidences per row, where the controller needs them;
            for the rejection rule the draft law (V,) at every drafted position.
        """
        drafts: list[list[int]] = [[] for _ in self.rows]
        confidences: list[list[float]] = [[] for _ in self.rows]
        laws: dict[Position, Tensor] = {}
        limits = [0 if self.finished[row] else self._limit(row) for row in self.rows]
        drafting = [row for row in self.rows if limits[row] > 0]
        places = self.session.rows
        tokens = [self.emitted[row][-1] for row in places]
        for step in range(max(limits)):
            if not drafts_on(self.controller, drafting):
                break
            raw = self.session.draft_step(self._tensor(tokens), step)  # (R, V)
            if len(drafting) < len(places):
                # the others have no history of this length, which processors would stumble over
                raw = raw[[places[row] for row in drafting]]  # (N, V)
            positions = [(row, step) for row in drafting]
            scores = self._scores(raw, positions)  # (N, V)
            drawn = self._draw(scores, positions, DRAFT if self.rejection else TARGET)
            if self.rejection:
                laws.update(zip(positions, softmax_law(scores), strict=True))
            sure = [1.0] * len(drawn)
            if self.controller.needs_confidence:
                sure = self._confidence(raw, drawn)
            going_on = []
            for row, token, confidence in zip(drafting, drawn, sure, strict=True):
                if token is None:  # nothing to draw: the processors forbid all, or it overflowed
                    continue
                self._remember(row, len(drafts[row]), token)
                drafts[row].append(token)
                tokens[places[row]] = token
                if self.controller.needs_confidence:
                    confidences[row].append(confidence)
                if (
                    token not in self.request.eos
                    and len(drafts[row]) < limits[row]
                    and self.controller.keep_drafting(row, confidence)
                ):
                    going_on.append(row)
            drafting = going_on
        return drafts, confidences, laws

    def _limit(self, row: int) -> int:
        """How many tokens the row drafts at most in its next round."""
        left = self.request.max_new_tokens - len(self.emitted[row])
        free = self.session.cache.slots - self.session.lengths[row]
        allowed = draft_limit(self.max_draft_length, left, free)
        return min(self.controller.limit(row, allowed), allowed)

    def _confidence(self, raw: Tensor, drawn: list[int | None]) -> list[float]:
        """Probability of each drawn token under the softmax of the raw logits (N, V)."""
        law = torch.softmax(raw.float(), dim=-1)  # (N, V); logsumexp is several times slower
        places = list(range(len(drawn)))
        return law[places, [token or 0 for token in drawn]].tolist()

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, device=self.device)  # (len(tokens),)

    def _remember(self, row: int, offset: int, token: int) -> None:
        """Write a token `offset` places behind the row's emitted ones into its history."""
        if self._reads_history:
            self.history[row, self.width + len(self.emitted[row]) + offset] = token

    def _scores(self, raw: Tensor, positions: Sequence[Position]) -> Tensor:
        """Processed scores (N, V) from the raw logits (N, V) at those positions."""
        rows = [row for row, _ in positions]
        lengths = [self.width + len(self.emitted[row]) + offset for row, offset in positions]
        return self.request.law.scores(raw, self.history, rows, lengths)

    def _draw(
        self, scores: Tensor, positions: Sequence[Position], purpose: int
    ) -> list[int | None]:
        """Draw a token at each position; None where no token has a score above -inf, or NaN."""
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
        # The one host synchronisation: ends, limits and criteria are decided token by token.
        drawn = torch.where(best > float("-inf"), token, -1).tolist()
        return [None if each < 0 else each for each in drawn]

    def _stream(self, positions: Sequence[Position]) -> tuple[list[int], list[int]]:
        """Noise-stream key and place, pads not counted, of the token drawn at each position."""
        keys = [self.request.keys[row] for row, _ in positions]
        lengths = self.session.prompt_lengths
        places = [lengths[row] + len(self.emitted[row]) + offset for row, offset in positions]
        return keys, places

    def _match(
        self,
        drafts: list[list[int]],
        positions: Sequence[Position],
        scores: Tensor,
        _: dict[Position, Tensor],
    ) -> list[list[int]]:
        """The target's own draws, up to and with the first that differs from the draft."""
        drawn = dict(zip(positions, self._draw(scores, positions, TARGET), strict=True))
        tokens: list[list[int]] = [[] for _ in self.rows]
        for (row, offset), token in drawn.items():
            if tokens[row] == drafts[row][:offset]:
                tokens[row].append(self._checked(token, row))
        return tokens

    def _reject(
        self,
        drafts: list[list[int]],
        positions: Sequence[Position],
        scores: Tensor,
        laws: dict[Position, Tensor],
    ) -> list[list[int]]:
        """The rejection rule (Leviathan et al. 2023, Algorithm 1)."""
        p = softmax_law(scores)  # (N, V)
        keys, places = self._stream(positions)
        uniform = accept_uniform(keys, places, self.device).tolist()  # N
        tokens: list[list[int]] = [[] for _ in self.rows]
        ends: list[Position] = []
        final: list[Tensor] = []
        for i, (row, offset) in enumerate(positions):
            if offset != len(tokens[row]):
                continue  # behind a rejection
            if offset == len(drafts[row]):
                ends.append((row, offset))
                final.append(p[i])  # (V,) the bonus
                continue
            token, q = drafts[row][offset], laws[row, offset]  # (V,)
            if uniform[i] < acceptance_probability(p[i], q)[token]:
                tokens[row].append(token)
            else:
                ends.append((row, offset))
                final.append(residual(p[i], q))  # (V,) the correction
        drawn = self._draw(torch.stack(final).log(), ends, TARGET)
        for (row, _), last in zip(ends, drawn, strict=True):
            tokens[row].append(self._checked(last, row))
        return tokens

    def _checked(self, token: int | None, row: int) -> int:
        if token is None:
            raise ValueError(
                f"row {row} has no token to draw after {len(self.emitted[row])} new tokens: its "
                "scores are NaN or all -inf; check the checkpoint and dtype for NaN logits, or "
                "the logits processors for forbidding every token"
            )
        return token

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


def _by_row(
    values: Tensor, positions: Sequence[Position], emitted: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    """Of values (N, V) at those positions those of the emitted tokens: per row (emitted, V)."""
    places = [
        [i for i, (at, offset) in enumerate(positions) if at == row and offset < len(tokens)]
        for row, tokens in enumerate(emitted)
    ]
    return tuple(values[i].float() for i in places)
