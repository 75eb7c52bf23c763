"""Texts on one model that join and leave a batch; each is the same as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from layerskip.api.generation import LayerSkipDecoding
from layerskip.api.plan import open_plan
from layerskip.api.settings import LONGEST_DRAFT
from layerskip.cache.rows import rounded_up
from layerskip.decoding.cached_texts import CachedTexts
from layerskip.decoding.controller import completed
from layerskip.decoding.live_target import LiveTarget
from layerskip.decoding.passes import Passes
from layerskip.decoding.rules import rule_of
from layerskip.decoding.seats import Seat
from layerskip.decoding.speculator import Speculator
from layerskip.model.opened_models import sublayers_of
from layerskip.serving.served_texts import OfTexts, Text

_PREDICTED = 1  # the number of the source of predictions; 0 is that of forced tokens
_SCORED = 64  # prompt tokens per pass if their log-probabilities are requested
_MEASURING = 2.0  # approximate seconds of measurements before the first request


class ServingBatch:
    """Texts on one model.

    Args:
        max_tokens: maximum number of tokens of a text, prompt included; None: the model's limit.

    Raises:
        ValueError: a setting or a model is not supported.
    """

    def __init__(
        self,
        model: Any,
        *,
        seats: int,
        max_tokens: int | None,
        cached: CachedTexts,
        settings: Mapping[str, Any],
    ) -> None:
        for name in ("seed", "seeds", "cached", "progress", "clock"):
            if settings.get(name):
                raise ValueError(f"serving does not support the setting {name}; leave it out")
        decoding = LayerSkipDecoding(**settings)
        if not rule_of(rejection=decoding.acceptance == "rejection", sampling=True).independent:
            raise ValueError(
                "serving does not support acceptance 'rejection': a text would depend on others "
                "in the batch; use 'coupled'"
            )
        opened = sublayers_of(model, decoding.execution)
        if opened.encoder:  # make places for encoder states, which come with the texts
            nothing = torch.zeros(seats, 1, dtype=torch.long)  # (B, 1)
            with torch.no_grad():
                opened = opened.reading(opened.encode(nothing, torch.ones_like(nothing)))
        plan = open_plan(opened, decoding)
        self.model, own = plan.model, plan.sources
        for source in own:
            if source.keeps_texts:
                raise ValueError(
                    f"{type(source).__name__} shares state across requests, so it cannot be "
                    "served; leave it out"
                )
        self.num_seats, self.cached = seats, cached
        limit, theirs = self.model.max_positions, [each.max_positions for each in own]
        self.max_tokens = min(limit, max_tokens or limit, *(each for each in theirs if each))
        self.longest = (decoding.max_draft_length or LONGEST_DRAFT) if decoding.enabled else 0
        self.seats: list[Any] = [Seat([], 0, 0)] * seats  # a `Text` in each occupied seat
        forced = OfTexts("forced", self.seats, Text.forced)
        predicted = OfTexts("predicted", self.seats, Text.predicted)
        plan = replace(plan, sources=[forced, predicted, *own])
        self.passes = Passes(
            self.model,
            plan.sources,
            [torch.zeros(1, dtype=torch.long)] * seats,
            max_new_tokens=1,
            max_draft_length=self.longest,
            emitted=[[] for _ in range(seats)],
        )
        self.passes.open_seats(self.max_tokens)
        self._draws: list[Any] = [None] * seats
        self.target = LiveTarget(self.passes, self.seats, self._draws, joint=False)
        self.model.backend.long_lived = True
        request = plan.request(seats, max(1, min(256, self.max_tokens - 4)))
        with torch.no_grad():  # costs are measured here, before any text is waited for
            controller, _ = plan.controller(request, _MEASURING, ahead=math.inf)
        self.controller = completed(controller)
        self._speculator = Speculator(
            self.target, self.controller, self.seats, longest=self.longest
        )
        self.controller.reset(seats)
        self._weights: object = None  # identifies the weights of the keys and values
        self._free = list(range(seats))

    def clear(self) -> None:
        self._free = list(range(self.num_seats))
        self.passes.clear()
        self.controller.reset(self.num_seats)

    @property
    def texts(self) -> list[Text]:
        return [self.seats[row] for row in self.passes.rows]

    @property
    def joining(self) -> list[Text]:
        passes = self.passes
        return [self.seats[row] for row in passes.seated[len(passes.rows) :]]

    def shape(self, text: Text, memory: int) -> tuple[int, int] | None:
        """Places and slots with which a text can join; None if it does not fit with the others."""
        passes = self.passes
        going = [*self.texts, *self.joining, text]
        rows, slots = len(going), max(each.slots for each in going)
        encoder_length = max(each.request.encoder_length for each in going)
        now = passes.cache.rows, passes.slots
        unused = rows == 1 and slots <= now[1] // 4  # by a lone text that needs far less
        fits = rows <= now[0] and slots <= now[1] and passes.nbytes(*now, encoder_length) <= memory
        if fits and not unused:
            return now
        ample = min(self.num_seats, 1 << (rows - 1).bit_length()), rounded_up(slots)
        for shape in (ample, (rows, slots)):
            if passes.nbytes(*shape, encoder_length) <= memory:
                return shape
        return None

    def join(self, text: Text, shape: tuple[int, int]) -> None:
        passes = self.passes
        if shape != (passes.cache.rows, passes.slots):
            passes.resize(*shape)
        row = self._free.pop()
        self._draws[row] = text.open(row, self.seats, passes.emitted[row], self.model)
        self.seats[row] = text
        passes.join(row, text.request.prompt, text.request.pictures, text.request.encoded)
        self.controller.forget(row)

    def leave(self, text: Text) -> None:
        if text.row < 0:  # it never joined
            return
        if length := self.passes.lengths[text.row]:
            self.cached.keep(text.weights, self.passes, text.row, length)
        self.passes.leave(text.row)
        self._free.append(text.row)

    def left(self, text: Text) -> int:
        return text.prompt_length - self.passes.lengths[text.row]

    def prefill(self, text: Text, most: int) -> int:
        """Run the next tokens of a joining text's prompt after the cached ones; returns the number.

        After the last one, the text takes part in rounds.
        """
        passes, row, scored = self.passes, text.row, text.request.prompt_logprobs
        if not passes.lengths[row]:  # more may be cached now than when it joined
            if not any(passes.lengths[each] for each in passes.seated):
                # Only if no text is in progress: new weights would spoil those anyway.
                self._weights = self.cached.check(self.model)
            text.weights = self._weights
            window = passes.cache.window
            prompt = passes.tokens(row, scored or text.prompt_length)
            filled, same = self.cached.start(prompt, window, passes.needed)
            passes.fill(row, filled)
            text.counts.cached = passes.lengths[row]
            text.marks = passes.cache.marks(text.prompt_length, same)
        before = passes.lengths[row]
        ahead = sorted(mark for mark in text.marks if mark > before)
        every = 0 < scored <= before + 1
        most = min(most, passes.piece, _SCORED if every else most)
        if before + 1 < scored:
            most = min(most, scored - 1 - before)
        if ahead and self.model.recurrent:
            most = min(most, ahead[0] - before)
        raw = passes.prefill_piece(row, most, every)  # (1, V), or (n, V)
        if every and raw is not None:
            text.tell_prompt(raw, before + 1)
            raw = raw[-1:] if passes.lengths[row] == text.prompt_length else None  # (1, V)
        for mark in ahead:
            if mark <= passes.lengths[row]:
                self.cached.keep(text.weights, passes, row, mark)
        if raw is not None:
            passes.begin(row)
            verdict = self.target.judge(raw, [(row, 0)])
            if text.reason is None:
                emitted = text.emit(verdict.tokens[row])
                text.tell_logprobs(raw, emitted)
                passes.tell(row, emitted)
        return passes.lengths[row] - before

    def round(self) -> None:
        """Run a round of the texts that have begun."""
        if all(text.finished for text in self.texts):
            return
        with self.model.disturbed():
            outcome = self._speculator.round()
        for row, emitted in outcome.emitted.items():
            text, raw, read = self.seats[row], outcome.verdict.raw, outcome.verdict.read[row]
            if text.request.top_logprobs is not None and raw is not None:
                text.tell_logprobs(raw[read[: len(emitted)]], emitted)
            text.count(outcome, _PREDICTED)
