"""Decodes one request: seats all its rows at once, drains the loop, and records its rounds.

Shapes: B rows, N positions, K drafted tokens, V vocabulary, W width of the padded prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from layerskip.cache.library_cache import EncoderStates
from layerskip.config.skips import SkipConfig
from layerskip.decoding.cached_texts import CachedTexts, Reuse
from layerskip.decoding.controllers import Controller, completed
from layerskip.decoding.decoding_loop import Loop, Outcome
from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law
from layerskip.decoding.live_target import LiveTarget
from layerskip.decoding.passes import Passes
from layerskip.decoding.rounds import DecodingStats, Round, SourceCounts, VerifyResult
from layerskip.decoding.rules import Rule, rule_of
from layerskip.decoding.seats import Seat, Stop
from layerskip.decoding.sources.base import Source
from layerskip.model.opened_model import OpenedModel
from layerskip.model.picture_features import Pictures

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
    acceptance: str = "coupled"
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
        return rule_of(self.acceptance, sampling=self.law.do_sample)


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
        model: OpenedModel,
        drafts: DraftOrSkip | Sequence[DraftOrSkip],
        controller: Controller,
        request: Request,
        *,
        max_draft_length: int,
        cached: CachedTexts | None = None,
    ) -> None:
        self.request = request
        ids = request.input_ids
        rows, width = ids.shape
        draws = Draws(request.law, rule=request.rule, native=model.drawn)
        # Pads and prompt, emitted tokens, drafted tokens: what processors and criteria read.
        slack = request.max_new_tokens + max_draft_length + 1
        history = F.pad(ids.to(model.device), (0, slack))  # (B, W + slack)
        pictures = None if request.pictures is None else request.pictures.to(model.device)
        self.seats = [
            Seat(
                prompt[mask.bool()],
                request.max_new_tokens,
                draws=draws,
                key=request.keys[row] if request.keys else 0,
                number=row,
                eos=request.eos,
                stop=request.stop,
                history=history,
                width=width,
                remembers=request.stop is not None or request.law.reads_history,
                pictures=pictures,
            )
            for row, (prompt, mask) in enumerate(zip(ids, request.attention_mask, strict=True))
        ]
        sources = tuple(drafts) if isinstance(drafts, Sequence) else (drafts,)
        self.passes = passes = Passes(model, sources, self.seats, max_draft_length=max_draft_length)
        self._times = times = list[float]()  # of the current round

        # These must not capture `self`: a cycle would keep the buffers alive.
        def note_time() -> None:
            if request.clock is not None:
                times.append(request.clock())

        def progress() -> None:
            if request.progress is not None:
                request.progress(sum(passes.lengths), sum(passes.prompt_lengths))

        self._note_time = note_time
        alone = (request.pictures is None or rows == 1) and request.encoded is None
        self.reuse = Reuse(cached if alone else None, self.passes)
        self.target = LiveTarget(passes, request.rule, self.reuse, progress)
        self.controller = completed(controller)
        self.loop = Loop(
            self.target,
            self.controller,
            longest=max_draft_length,
            keep=request.keep_scores,
            note_time=note_time,
        )
        self.stats = DecodingStats(sources=[SourceCounts(each.name) for each in passes.sources])

    @property
    def emitted(self) -> list[list[int]]:
        return [seat.emitted for seat in self.seats]

    @property
    def finished(self) -> list[bool]:
        return [seat.finished for seat in self.seats]

    def rounds(self) -> Iterator[Round]:
        """Yield the prefill's round, then every further round until all rows are finished."""
        try:
            yield self._record(0, self._first_round)
            index = 0
            while not all(self.finished):
                index += 1
                with self.passes.model.disturbed():
                    round_ = self._record(index, self._next_round)
                yield round_
        except GeneratorExit:  # between two rounds, when everything decoded is exact
            for row in self.loop.going:
                self.target.end(row)
            raise

    def _first_round(self) -> Outcome:
        self._note_time()
        self.reuse.check(numbers=True)
        self.reuse.start(dict.fromkeys(range(len(self.seats))))
        self.stats.num_known_tokens += sum(self.passes.lengths)
        return self.loop.prefill()

    def _next_round(self) -> Outcome:
        self.stats.num_compactions += self.loop.compact()
        return self.loop.round()

    def _record(self, index: int, run: Callable[[], Outcome]) -> Round:
        """Run a round, and record it."""
        self._times.clear()
        self._note_time()
        outcome = run()
        round_, verdict = self.loop.record(outcome, index), outcome.verdict
        scores = logits = None
        if verdict.scores is not None:
            scores = _by_row(verdict.scores, verdict, round_.tokens)
        if self.request.keep_logits and verdict.raw is not None:
            logits = _by_row(verdict.raw, verdict, round_.tokens)
        self._note_time()
        round_ = replace(round_, scores=scores, logits=logits, times=tuple(self._times) or None)
        self.stats.add(round_)
        return round_


def _by_row(
    values: Tensor, verdict: VerifyResult, emitted: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    """Select the emitted tokens' values from (N, V): per row (emitted, V)."""
    pairs = zip(verdict.read, emitted, strict=True)
    return tuple(values[places[: len(tokens)]].float() for places, tokens in pairs)
