"""Texts on one model that join and leave a batch; each is the same as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from layerskip.api.generation import LayerSkipDecoding
from layerskip.api.plan import open_plan
from layerskip.api.settings import LONGEST_DRAFT
from layerskip.cache.rows import rounded_up
from layerskip.decoding.cached_texts import CachedTexts, Reuse
from layerskip.decoding.controllers import completed
from layerskip.decoding.decoding_loop import Loop, Outcome
from layerskip.decoding.live_target import LiveTarget
from layerskip.decoding.passes import Passes
from layerskip.decoding.rules import rule_of
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.earlier import EarlierAnswers
from layerskip.model.opened_models import sublayers_of
from layerskip.serving.served_texts import OfTexts, Text
from layerskip.texts.tokens import common_prefix

_PREDICTED = 1  # the number of the source of predictions; 0 is that of forced tokens
_SCORED = 64  # prompt tokens per pass if their log-probabilities are requested
_TOGETHER = 64  # tokens of several prompts per pass; with more, a CPU would only delay the first
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
        if not rule_of(decoding.acceptance, sampling=True).independent:
            raise ValueError(
                f"serving does not support acceptance {decoding.acceptance!r}: a text would depend "
                "on others in the batch; use 'coupled'"
            )
        opened = sublayers_of(model, decoding.execution)
        if opened.encoder:  # make places for encoder states, which come with the texts
            nothing = torch.zeros(seats, 1, dtype=torch.long)  # (B, 1)
            with torch.no_grad():
                opened = opened.reading(opened.encode(nothing, torch.ones_like(nothing)))
        plan = open_plan(opened, decoding)
        self.model, own = plan.model, plan.sources
        shared = any(isinstance(source, EarlierAnswers) and source.shared for source in own)
        for source in own:
            if source.keeps_texts and not shared:
                raise ValueError(
                    f"{type(source).__name__} learns from the texts of all clients, who may see "
                    "by their own speed what others wrote; leave it out, or accept that by "
                    "remember='shared'"
                )
        self.num_seats = seats
        limit, theirs = self.model.max_positions, [each.max_positions for each in own]
        self.max_tokens = min(limit, max_tokens or limit, *(each for each in theirs if each))
        self.longest = (decoding.max_draft_length or LONGEST_DRAFT) if decoding.enabled else 0
        nothing = torch.zeros(1, dtype=torch.long)  # (1,)
        # A `Text` in each occupied seat.
        self.seats: list[Any] = [Seat(nothing) for _ in range(seats)]
        forced = OfTexts("forced", self.seats, Text.forced)
        predicted = OfTexts("predicted", self.seats, Text.predicted)
        plan = replace(plan, sources=[forced, predicted, *own])
        self.passes = Passes(
            self.model,
            plan.sources,
            self.seats,
            max_draft_length=self.longest,
        )
        self.passes.open_seats(self.max_tokens)
        self.reuse = Reuse(cached, self.passes, early=True)
        self.target = LiveTarget(self.passes, reuse=self.reuse)
        self.model.backend.long_lived = True
        request = plan.request(seats, max(1, min(256, self.max_tokens - 4)))
        with torch.no_grad():  # costs are measured here, before any text is waited for
            controller, _ = plan.controller(request, _MEASURING, ahead=math.inf)
        self.controller = completed(controller)
        self.loop = Loop(self.target, self.controller, longest=self.longest)
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
        return [self.seats[row] for row in self.passes.joining]

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
        text.open(self._free.pop(), self.model)
        self.loop.seat(text)

    def leave(self, text: Text) -> None:
        if text.row < 0:  # it never joined
            return
        self.loop.leave([text.row])
        self._free.append(text.row)

    def left(self, text: Text) -> int:
        return text.prompt_length - text.length

    def prefill(self, text: Text, most: int, room: int) -> int:
        """Run the next tokens of a joining text's prompt after the cached ones; returns the number.

        If that ends the prompt, whole prompts of other joining texts are run beside it. After its
        last token, a text takes part in rounds.

        Args:
            most: maximum number of tokens of this text.
            room: maximum number of tokens of all.
        """
        passes, row, scored = self.passes, text.row, text.request.prompt_logprobs
        if not any(self.seats[each].length for each in passes.seated):
            # Only if no text is in progress: new weights would spoil those anyway.
            self.reuse.check()
        self._start(text)
        before, read = text.length, None
        most = min(most, passes.piece)
        if before + 1 < scored:
            most = min(most, scored - 1 - before)
        elif scored:
            most, read = min(most, _SCORED), partial(text.tell_prompt, first=before + 1)
        ends = {row: passes.end_of_piece(row, before + most)}
        if ends[row] == text.prompt_length and read is None:
            on_cpu = self.model.device.type == "cpu"
            ends = self._beside(text, min(room, _TOGETHER) if on_cpu else room)
        texts: list[Text] = [self.seats[each] for each in ends]
        starts = sum(each.length for each in texts)
        outcome = self.loop.prefill(ends, read)
        self._tell_logprobs(outcome)
        return sum(each.length for each in texts) - starts

    def _start(self, text: Text) -> None:
        """Let a text start from what is cached now, which may be more than when it joined."""
        if not text.length:
            self.reuse.start({text.row: text.request.prompt_logprobs or None})
            text.counts.cached = text.length

    def _beside(self, text: Text, room: int) -> dict[int, int]:
        """Texts whose prompts end with one pass beside that of a text, and their lengths.

        A text that would start from much of what another one leaves waits for it.
        """
        passes, group, longest = self.passes, [text], self.left(text)
        others = [] if self._runs_alone(text) else [each for each in self.joining if each != text]
        for other in sorted(others, key=self.left):
            known = other.length
            if not known:
                found, _ = self.reuse.find(other.row)
                known = found[-1].end if found else 0
            left = other.prompt_length - known
            longest_here = max(longest, left)
            if left > passes.piece or longest_here * (len(group) + 1) > room:
                continue
            ahead = other.request.prompt[known:-1]
            same = max(common_prefix(ahead, each.request.prompt[known:]) for each in group)
            if 2 * same >= left or self._runs_alone(other):
                continue
            group.append(other)
            longest = longest_here
        for each in group[1:]:
            self._start(each)
        rows = {each.row for each in group}
        return {row: self.seats[row].prompt_length for row in passes.joining if row in rows}

    def _runs_alone(self, text: Text) -> bool:
        asked = text.request
        return bool(asked.prompt_logprobs) or asked.pictures is not None or self.model.encoder

    def _tell_logprobs(self, outcome: Outcome) -> None:
        for row, emitted in outcome.emitted.items():
            text, raw, read = self.seats[row], outcome.verdict.raw, outcome.verdict.read[row]
            if text.request.top_logprobs is not None and raw is not None:
                text.tell_logprobs(raw[read[: len(emitted)]], emitted)

    def round(self) -> None:
        """Run a round of the texts that have begun."""
        if not self.loop.going:
            return
        with self.model.disturbed():
            outcome = self.loop.round()
        self._tell_logprobs(outcome)
        for row in outcome.emitted:
            self.seats[row].count(outcome, _PREDICTED)
