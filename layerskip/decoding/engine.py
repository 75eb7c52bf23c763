"""The decoding loop: a prefill, then rounds of draft, verify, accept; rows advance independently.

Shapes: B rows, N positions, K drafted tokens, V vocabulary, W width of the padded prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from layerskip.cache.library_cache import EncoderStates
from layerskip.config.skips import SkipConfig
from layerskip.decoding.cached_texts import CachedTexts
from layerskip.decoding.controller import Controller, completed
from layerskip.decoding.draws import DraftedTokens, Draws
from layerskip.decoding.laws import Law
from layerskip.decoding.live_target import LiveTarget
from layerskip.decoding.passes import Filling, Passes
from layerskip.decoding.rounds import DecodingStats, Round, SourceCounts, joint_source
from layerskip.decoding.rules import Rule, rule_of
from layerskip.decoding.seats import Seat, Stop
from layerskip.decoding.sources.base import Source
from layerskip.decoding.speculator import Outcome, Speculator
from layerskip.decoding.target import VerifyResult
from layerskip.model.picture_features import Pictures
from layerskip.model.sublayers import Sublayers

DraftOrSkip = SkipConfig | Source
"""A source of drafts, or a skip config, which stands for the source of its sublayers."""


@dataclass(frozen=True)
class Request:
    """What to decode, in token ids.

    Attributes:
        input_ids: prompts as `generate()` holds them, left-padded, (B, W).
        attention_mask: 1 at real tokens, 0 at pads, (B, W).
        keys: noise-stream key of each row (`laws.stream_key`); unused for greedy decoding.
        stop: called after every emitted token with (row, that row's history (1, n)); True ends the
            row. Called in order, once per row and token.
        keep_scores, keep_logits: keep emitted tokens' processed scores or raw logits in the rounds.
        encoded: an encoder's output; the prompts are then those of the decoder.
        progress: called after every pass over the prompts with their tokens done, and in total.
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
    pictures: Pictures | None = None
    encoded: EncoderStates | None = None
    progress: Callable[[int, int], None] | None = None
    clock: Callable[[], float] | None = None

    @property
    def rule(self) -> Rule:
        return rule_of(rejection=self.rejection, sampling=self.law.do_sample)


class Decoder:
    """Decodes one request. Iterate over `rounds()` once.

    Args:
        drafts: sources of drafts; each row of a round uses one of them.
        max_draft_length: maximum number of tokens drafted in a round; 0 is plain decoding.
        cached: keys and values of earlier texts to start from; those of this text are added. Not
            used for several texts with pictures, nor for an encoder-decoder.

    Raises:
        TypeError: the controller lacks a part of the protocol.
        ValueError: the texts may exceed the model's positions; from `rounds()`: there is no token
            to draw (NaN logits, or processors that forbid everything).
    """

    def __init__(
        self,
        model: Sublayers,
        drafts: DraftOrSkip | Sequence[DraftOrSkip],
        controller: Controller,
        request: Request,
        *,
        max_draft_length: int,
        cached: CachedTexts | None = None,
    ) -> None:
        self.request = request
        self._weights: object = None  # identifies the weights to which cached contents belong
        alone = request.pictures is None or len(request.input_ids) == 1
        self.cached = cached if alone and request.encoded is None else None
        self.controller = controller = completed(controller)
        self.max_draft_length = max_draft_length
        ids = request.input_ids
        rows, self.width = ids.shape
        self.rows = range(rows)
        self.drafts = tuple(drafts) if isinstance(drafts, Sequence) else (drafts,)
        self.emitted: list[list[int]] = [[] for _ in self.rows]
        self.passes = Passes(
            model,
            self.drafts,
            [prompt[mask.bool()] for prompt, mask in zip(ids, request.attention_mask, strict=True)],
            max_new_tokens=request.max_new_tokens,
            max_draft_length=max_draft_length,
            emitted=self.emitted,
            pictures=request.pictures,
        )
        # Pads and prompt, emitted tokens, drafted tokens: what processors and criteria read.
        slack = request.max_new_tokens + max_draft_length + 1
        history = F.pad(ids.to(model.device), (0, slack))  # (B, W + slack)
        self.seats = [
            Seat(
                emitted,
                self.passes.prompt_lengths[row],
                request.max_new_tokens,
                key=request.keys[row] if request.keys else 0,
                number=row,
                eos=request.eos,
                stop=request.stop,
                history=history,
                width=self.width,
                remembers=request.stop is not None or request.law.reads_history,
            )
            for row, emitted in enumerate(self.emitted)
        ]
        rule = request.rule
        draws = Draws(request.law, self.seats, rule=rule, native=model.drawn)
        self.target = LiveTarget(self.passes, self.seats, [draws] * rows, rule, joint=True)
        self._speculator = Speculator(self.target, controller, self.seats, longest=max_draft_length)
        self.stats = DecodingStats(
            sources=[SourceCounts(each.name) for each in self.passes.sources]
        )
        self._times: list[float] = []  # of the current round
        controller.reset(rows)

    @property
    def finished(self) -> list[bool]:
        return [seat.finished for seat in self.seats]

    def rounds(self) -> Iterator[Round]:
        """Yield the prefill's round, then every further round until all rows are finished."""
        try:
            yield self._first_round()
            index = 0
            while not all(self.finished):
                index += 1
                with self.passes.model.disturbed():
                    round_ = self._round(index)
                yield round_
        except GeneratorExit:  # between two rounds, when everything decoded is exact
            for row in self.rows:
                if not self.seats[row].finished:
                    self._keep_text(row, self.passes.lengths[row])
            raise

    def _first_round(self) -> Round:
        self._times.clear()
        self._mark()
        self._mark()
        raw = self._prefill()  # (B, V)
        self._mark()
        positions = [(row, 0) for row in self.rows]
        verdict = self.target.judge(raw, positions, keep=self.request.keep_scores)
        emitted = {row: self.seats[row].emit(verdict.tokens[row]) for row in self.rows}
        for row, tokens in emitted.items():
            self.target.draws[row].forget(self.seats[row])
            self.passes.tell(row, tokens)
        nothing = DraftedTokens.of(len(self.rows))
        return self._close(0, Outcome({}, nothing, verdict, emitted, dict.fromkeys(self.rows, 0)))

    def _prefill(self) -> Tensor:
        passes, lengths = self.passes, self.passes.prompt_lengths
        filled: list[list[Filling]] = []
        marks: list[set[int]] = [set() for _ in self.rows]  # where to keep texts of window layers
        if self.cached is not None:
            self._weights = self.cached.check(passes.model, numbers=True)
            window = passes.cache.window
            for row, length in enumerate(lengths):
                prompt = passes.tokens(row, length)
                parts, same = self.cached.start(prompt, window, passes.needed)
                filled.append(parts)
                at = parts[-1].end if parts else 0
                self.stats.num_known_tokens += at
                if window:
                    marks[row] = {each for each in passes.cache.marks(length, same) if each > at}

        def reached() -> None:
            if self.request.progress is not None:
                self.request.progress(sum(passes.lengths), sum(lengths))
            for row, places in enumerate(marks):
                for place in sorted(each for each in places if each <= passes.lengths[row]):
                    places.remove(place)
                    self._keep_text(row, place)

        return passes.prefill(filled, reached, marks)

    def _keep_text(self, row: int, length: int) -> None:
        if self.cached is not None:
            self.cached.keep(self._weights, self.passes, row, length)

    def _round(self, index: int) -> Round:
        self._times.clear()
        self._mark()
        self.stats.num_compactions += self._speculator.compact()
        outcome = self._speculator.round(self._mark, keep=self.request.keep_scores)
        return self._close(index, outcome)

    def _mark(self) -> None:
        if self.request.clock is not None:
            self._times.append(self.request.clock())

    def _close(self, index: int, outcome: Outcome) -> Round:
        drafts, verdict = outcome.drafts, outcome.verdict
        emitted = [outcome.emitted.get(row, ()) for row in self.rows]
        for row in outcome.emitted:
            if self.seats[row].finished:
                self._keep_text(row, self.passes.lengths[row])
        drafted = list(map(len, drafts.tokens))
        scores = None if verdict.scores is None else _by_row(verdict.scores, verdict, emitted)
        logits = None
        if self.request.keep_logits and verdict.raw is not None:
            logits = _by_row(verdict.raw, verdict, emitted)
        self._mark()
        round_ = Round(
            index=index,
            tokens=tuple(map(tuple, emitted)),
            drafted=tuple(drafted),
            accepted=tuple(outcome.accepted.get(row, 0) for row in self.rows),
            confidences=tuple(map(tuple, drafts.confidences)),
            signal=self._speculator.signal,
            finished=tuple(self.finished),
            source=joint_source([outcome.source(row) for row in self.rows]),
            scores=scores,
            logits=logits,
            times=tuple(self._times) or None,
            drafts=tuple(map(tuple, drafts.tokens)),
            parents=tuple(drafts.parents.get(row) for row in self.rows),
            steps=drafts.num_steps,
        )
        self.stats.add(round_)
        return round_


def _by_row(
    values: Tensor, verdict: VerifyResult, emitted: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    """Select the emitted tokens' values from (N, V): per row (emitted, V)."""
    pairs = zip(verdict.read, emitted, strict=True)
    return tuple(values[places[: len(tokens)]].float() for places, tokens in pairs)
