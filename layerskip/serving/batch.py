"""A batch that rows join and leave: rounds of draft, verify, accept, each text by its own law.

Every text has a `Draws` of one row: so it is the text it has alone, whoever is beside it.
Letters: R rows of a pass, N positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import MinPLogitsWarper

from layerskip.costs.speculation import CostTable, draft_limit
from layerskip.decoding.controller import Observer, completed, signal_of
from layerskip.decoding.controllers import make_controller
from layerskip.decoding.draws import DraftedTokens, Draws, certainty
from layerskip.decoding.engine import Request
from layerskip.decoding.known import KnownTexts
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.planning import Plan, Planner, in_common, usable
from layerskip.decoding.sources.base import Proposal, Source
from layerskip.decoding.sources.forced import ForcedRow
from layerskip.decoding.sources.lookup import NOTHING, Lookup, LookupRow
from layerskip.decoding.sources.sublayers import SublayerDraft
from layerskip.decoding.sources.trained import TrainedDraft
from layerskip.generation import LayerSkipDecoding
from layerskip.model.cache import on_device, rounded_up
from layerskip.model.opening import sublayers_of
from layerskip.model.whole import Whole
from layerskip.requests import check_tokens, end_tokens
from layerskip.serving.places import Places
from layerskip.serving.tasks import Counts, Reason, Task, in_a_line
from layerskip.settings import DEFAULT_CONTROLLER, LONGEST_DRAFT, law_of
from layerskip.timing.tables import cost_tables, stored

_BEGIN = 2**31 - 1  # stands before a prediction, which the text begins with; no token is so large
_BELIEVED = 8  # such marks: a match of so many tokens
# Numbers of sources: 0 is what is forced, and behind what is looked up is the model's own draft.
_PREDICTED, _LOOKED_UP = 1, 2
_MEASURING = 2.0  # seconds, about, before the first task


class Text:
    """A task on its way: its row, and what has happened since it was last told.

    Attributes:
        slots: that it needs at most.
        plan, draft: of this round, and the tokens drafted.
        news, logprobs: tokens since it was last told, see `Piece`.
        reason: why it has ended; None while it goes on.
    """

    def __init__(self, task: Task, law: Law, eos: frozenset[int], slots: int) -> None:
        self.task, self.law, self.eos, self.slots = task, law, eos, slots
        self.counts = Counts()
        self.seat = -1
        self.weights: object = None  # that its keys and values are of
        self.plan, self.draft = Plan(), list[int]()
        self.news: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.reason: Reason | None = None
        self.error: str | None = None

    def open(self, seat: int, emitted: list[int], device: Any, native: Any) -> None:
        """Take a seat."""
        prompt = list(self.task.prompt)
        self.seat, self.emitted = seat, emitted
        self.history = torch.zeros(1, self.slots, dtype=torch.long, device=device)  # (1, S)
        self.history[0, : len(prompt)] = torch.tensor(prompt, device=device)
        self.draws = Draws(
            self.law,
            [stream_key(self.task.seed, 0)],
            rejection=False,
            history=self.history,
            width=len(prompt),
            prompt_lengths=[len(prompt)],
            emitted=[emitted],
            native=native,
        )

    @cached_property
    def unwarped(self) -> Law:
        """Its law before temperature and the others."""
        return Law(self.task.processors, do_sample=False, rows=1)

    @property
    def length(self) -> int:
        """Tokens of prompt and text."""
        return len(self.task.prompt) + len(self.emitted)

    def at(self, offset: int) -> int:
        """The token to feed at a place behind the last one; the draft's last again behind all."""
        return (self.emitted[-1:] + self.draft)[min(offset, len(self.draft))]

    def write(self, offset: int, token: int) -> None:
        """Write a token into the history, so many places behind the text."""
        self.history[0, self.length + offset] = token

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What its processors and stop raise ends this text only."""
        try:
            yield
        except Exception as error:
            self.reason, self.error = "error", in_a_line(error)


class Batch:
    """Texts on one model.

    Args:
        model: as for `layerskip.decode`.
        seats: the most texts at a time.
        max_tokens: the most tokens of a text, its prompt included; None: what the model allows.
        known: keys and values of earlier texts.
        settings: of `LayerSkipDecoding`.

    Raises:
        ValueError: a setting or a model that cannot be served.
    """

    def __init__(
        self,
        model: Any,
        *,
        seats: int,
        max_tokens: int | None,
        known: KnownTexts,
        settings: Mapping[str, Any],
    ) -> None:
        for name in ("seed", "seeds", "known", "progress", "clock", "assistant", "sources"):
            if settings.get(name):
                raise ValueError(f"serving does not support the setting {name}; leave it out")
        decoding = LayerSkipDecoding(**settings)
        if decoding.acceptance != "coupled":
            raise ValueError(
                "serving does not support acceptance 'rejection': a text would depend on those "
                "beside it; use 'coupled'"
            )
        opened = sublayers_of(model, decoding.execution)
        if isinstance(opened, Whole):
            raise ValueError(f"serving does not support models that run whole: {opened.reason}")
        sources: list[Source] = []
        if decoding.enabled:
            opened, sources = decoding._sources(opened, rejection=False)
        for source in sources:
            if not isinstance(source, Lookup | SublayerDraft | TrainedDraft):
                raise ValueError(
                    f"serving does not support drafts by {type(source).__name__}; allowed are "
                    "lookups, the model's own sublayers and its trained modules"
                )
        self.model, self.seats, self.known = opened, seats, known
        self.max_tokens = min(max_tokens or opened.max_positions, opened.max_positions)
        self.longest = (decoding.max_draft_length or LONGEST_DRAFT) if decoding.enabled else 0
        own = [source for source in sources if not isinstance(source, Lookup)]
        self.lookups = [source for source in sources if isinstance(source, Lookup)]
        self.places = Places(
            opened, own, seats=seats, total=self.max_tokens, max_draft_length=self.longest
        )
        self._own = own
        # of every seat, what it has forced, predicted and looked up
        self._rows: list[list[ForcedRow | LookupRow | None]] = [[] for _ in range(seats)]
        self._control(decoding)
        self._weights: object = None  # that keys and values are of
        self._seated: list[Text] = []  # in order of their places, those in rounds first
        self._begun = 0  # how many are in rounds
        self._free = list(range(seats))
        self.rounds = 0

    def _control(self, decoding: LayerSkipDecoding) -> None:
        """Make the controller; costs are measured here, not while somebody waits for a text."""
        controller = decoding.controller
        if not decoding.enabled:
            controller = make_controller("fixed", costs=CostTable(1.0, (1.0,)))
        elif isinstance(controller, str):
            timed = [Lookup(), *self._own]
            brought = decoding.costs
            if brought is None and decoding.skip is not None:
                brought = stored(decoding.skip, self.model, self.seats)
            ids = torch.ones(self.seats, 4, dtype=torch.long, device=self.model.device)  # (B, 4)
            law = law_of(self.model.model, self.seats, (), do_sample=False)
            new = max(1, min(256, self.max_tokens - 4))
            request = Request(ids, torch.ones_like(ids), max_new_tokens=new, law=law)
            if brought is None and controller == DEFAULT_CONTROLLER:
                with torch.no_grad():
                    cost_tables(self.model, timed, request, seconds=_MEASURING)
            tables = [
                each or CostTable(1.0, (1.0,))
                for each in decoding._tables(self.model, timed, request, brought)
            ]
            known = _LOOKED_UP + len(self.lookups)
            costs = [tables[0]] * known + list(tables[1:])
            priors = [timed[0].prior] * known + [source.prior for source in self._own]
            controller = make_controller(
                controller,
                max_draft_length=decoding.max_draft_length,
                threshold=decoding.threshold,
                costs=costs,
                priors=priors,
                ahead=math.inf,
            )
        self.controller = completed(controller)
        self.signal = signal_of(self.controller) if self.controller.needs_confidence else None
        self._planner = Planner(self.controller)
        self._observer = self.controller if isinstance(self.controller, Observer) else None
        self.controller.reset(self.seats)

    def clear(self) -> None:
        """Drop all texts and what passes have left, after one has failed."""
        for text in self._seated:
            text.seat = -1
        self._seated.clear()
        self._begun = 0
        self._free = list(range(self.seats))
        self.places.clear()
        self.controller.reset(self.seats)

    @property
    def texts(self) -> list[Text]:
        """Those in rounds."""
        return self._seated[: self._begun]

    @property
    def joining(self) -> list[Text]:
        """Those whose prompts are being run."""
        return self._seated[self._begun :]

    def text(self, task: Task) -> Text:
        """A checked task; from any thread.

        Raises:
            ValueError: nothing that can be decoded, with the reason.
        """
        if not task.prompt:
            raise ValueError("a prompt is empty; it needs at least one token")
        check_tokens(self.model.model, torch.tensor([*task.prompt, *task.predicted]))
        if task.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {task.max_new_tokens}")
        total = len(task.prompt) + task.max_new_tokens
        if total > self.max_tokens:
            raise ValueError(
                f"prompt plus new tokens must be at most {self.max_tokens}, got "
                f"{len(task.prompt)} + {task.max_new_tokens}; shorten one of them"
            )
        sampling = {"temperature": task.temperature, "top_k": task.top_k, "top_p": task.top_p}
        law = law_of(self.model.model, 1, task.processors, do_sample=task.do_sample, **sampling)
        if task.do_sample and task.min_p is not None:
            warper: Any = MinPLogitsWarper(task.min_p)
            law = Law([*law.processors, warper], do_sample=True, rows=1)
        eos = end_tokens(self.model.model) if task.eos is None else task.eos
        return Text(task, law, eos, total + self.longest + 1)

    def shape(self, text: Text, memory: int) -> tuple[int, int] | None:
        """Places and slots with which a text can join; None: not beside the others."""
        going = [*self._seated, text]
        rows, slots = len(going), max(each.slots for each in going)
        now = self.places.cache.rows, self.places.slots
        unused = rows == 1 and slots <= now[1] // 4
        if rows <= now[0] and slots <= now[1] and not unused:
            return now
        ample = min(self.seats, 1 << (rows - 1).bit_length()), rounded_up(slots)
        for shape in (ample, (rows, slots)):
            if self.places.nbytes(*shape) <= memory:
                return shape
        return None

    def join(self, text: Text, shape: tuple[int, int]) -> None:
        """Give a text a place behind the others."""
        places = self.places
        if shape != (places.cache.rows, places.slots):
            places.resize(*shape, len(self._seated))
        seat = self._free.pop()
        text.open(seat, places.written[seat], self.model.device, self.model.drawn)
        self._seated.append(text)
        places.sit(seat, text.task.prompt)
        self.controller.forget(seat)

    def leave(self, text: Text) -> None:
        """Drop a text; the last one in rounds takes its place, the last one that one's."""
        if text.seat < 0:  # it could not join
            return
        self._keep(text)
        place = self._seated.index(text)
        if place < self._begun:
            self._begun -= 1
            self._move(self._begun, place)
            place = self._begun
        self._move(len(self._seated) - 1, place)
        self._seated.pop()
        self._number()
        self._free.append(text.seat)

    def _move(self, place: int, free: int) -> None:
        """Move a text to a place that is free."""
        if place != free:
            text = self._seated[free] = self._seated[place]
            self.places.move(place, free, self.places.lengths[text.seat])

    def _number(self) -> None:
        self.places.rows = {text.seat: place for place, text in enumerate(self.texts)}

    def _keep(self, text: Text) -> None:
        length = self.places.lengths[text.seat]
        if length:
            rows, self.places.rows = self.places.rows, {text.seat: self._seated.index(text)}
            self.known.keep(text.weights, self.places, text.seat, length)
            self.places.rows = rows

    def left(self, text: Text) -> int:
        """How many tokens of a prompt have to be run."""
        return len(text.task.prompt) - self.places.lengths[text.seat]

    def prefill(self, text: Text, most: int) -> int:
        """Run the next tokens of a joining text's prompt, at first behind what is known; how many.

        Behind the last one the text is in rounds.
        """
        places, seat, place = self.places, text.seat, self._seated.index(text)
        if not places.lengths[seat]:  # by now more may be known than when it joined
            if not any(places.lengths[each.seat] for each in self._seated):
                # not beside texts on their way, which new weights would spoil anyway
                self._weights = self.known.check(self.model)
            text.weights = self._weights
            places.fill(seat, place, self.known.start(text.task.prompt, 0, places.needed)[0])
            text.counts.known = places.lengths[seat]
        before = places.lengths[seat]
        raw = places.piece(seat, place, most)
        if raw is not None:
            self._keep(text)
            if place != self._begun:
                other = self._seated[place] = self._seated[self._begun]
                self._seated[self._begun] = text
                longest = max(places.lengths[seat], places.lengths[other.seat])
                places.exchange(place, self._begun, longest)
            self._begun += 1
            self._number()
            with text.alone():
                self._rows[seat] = self._known_tokens(text)
            if text.reason is None:
                self._judge(text, raw)
        return places.lengths[seat] - before

    def _known_tokens(self, text: Text) -> list[ForcedRow | LookupRow | None]:
        """What may be drafted for a text without a step."""
        stateful, task = text.law.stateful, text.task
        marks = [_BEGIN] * _BELIEVED
        predicted = LookupRow(Lookup([marks + list(task.predicted)]), own=False)
        predicted.extend(marks)
        return [
            ForcedRow(stateful, self.model.vocabulary) if stateful else None,
            predicted if task.predicted else None,
            *(lookup.row(task.prompt) for lookup in self.lookups),
        ]

    def round(self) -> None:
        """One round of the texts that have begun."""
        self.rounds += 1
        with self.model.disturbed():
            self._plan()
            steps = self._draft()
            going = [text for text in self.texts if text.reason is None]
            if not going:
                return
            longest = max(len(text.draft) for text in going)
            first = min(steps, longest)
            fed = [[text.at(i) for i in range(first, longest + 1)] for text in self.texts]
            positions = [(text.seat, i) for text in going for i in range(len(text.draft) + 1)]
            raw = self.places.verify(on_device(fed, self.model.device), positions)  # (N, V)
            at = 0
            for text in going:
                count = len(text.draft) + 1
                self._judge(text, raw[at : at + count])
                at += count

    def _plan(self) -> None:
        lengths, slots = self.places.lengths, self.places.cache.slots
        sources = range(_LOOKED_UP + len(self.lookups) + len(self._own) if self.longest else 0)
        proposals: list[dict[int, Proposal]] = [{} for _ in sources]
        for text in self.texts:
            left = text.task.max_new_tokens - len(text.emitted)
            free = slots - lengths[text.seat]
            most = draft_limit(self.longest, left, free) if text.task.speculate else 0
            for number in sources:
                proposals[number][text.seat] = self._proposal(text, number, most)
        rows, size = self.places.rows, self._begun
        context = sum(lengths[row] for row in rows) // size
        plans = self._planner.plan(rows, proposals, context=context, size=size)
        for text in self.texts:
            text.plan = plans[text.seat]
            text.draft = list(text.plan.tokens or ())
            for offset, token in enumerate(text.draft):
                text.write(offset, token)

    def _proposal(self, text: Text, number: int, most: int) -> Proposal:
        """What a source offers a text."""
        rows = self._rows[text.seat]
        if number == len(rows):
            return self.places.states[0].offer(text.seat, most)
        proposal, row = NOTHING, rows[number]
        if row is not None and most:
            with text.alone():
                proposal = usable(
                    row.find(most),
                    law=text.law,
                    row=0,
                    emitted=text.emitted,
                    eos=text.eos,
                    vocabulary=self.model.vocabulary,
                )
        return proposal

    def _draft(self) -> int:
        """Steps of the model's own draft, in lockstep; how many."""
        drafting = [text for text in self.texts if text.plan.limit and text.plan.tokens is None]
        at = {text.seat: place for place, text in enumerate(self.texts)}
        steps = 0
        while drafting and self.controller.draft_together([text.seat for text in drafting]):
            fed = on_device([text.at(steps) for text in self.texts], self.model.device)  # (R,)
            raw = self.places.draft_step(fed, steps)  # (R, V)
            going = []
            for text in drafting:
                place, token, sure = at[text.seat], -1, 1.0
                with text.alone():
                    own = raw[place : place + 1]  # (1, V)
                    drawn, sures, _ = text.draws.draft(own, [(0, steps)], self.signal)
                    token, sure = int(drawn), 1.0 if sures is None else float(sures)
                if token < 0:
                    continue
                text.write(steps, token)
                text.draft.append(token)
                if self._observer is not None and sures is not None:
                    self._observer.see_draft(text.seat, sure, float(certainty(own)[1]))
                if (
                    token not in text.eos
                    and len(text.draft) < text.plan.limit
                    and self.controller.keep_drafting(text.seat, sure)
                ):
                    going.append(text)
            drafting, steps = going, steps + 1
        return steps

    def _judge(self, text: Text, raw: Tensor) -> None:
        """Emit a text's tokens from its raw logits (N, V)."""
        draft, seat, begun = text.draft, text.seat, bool(text.emitted)
        positions = [(0, offset) for offset in range(len(draft) + 1)]
        known = set[int]() if text.plan.tokens is None else {0}
        drafts = DraftedTokens([draft], [[]], [len(draft)], raw, known=known)
        length, emitted = text.length, list[int]()
        with text.alone():
            target = text.draws.judge(raw, positions, drafts).drawn.tolist()
            for token in target[: in_common(draft, target) + 1]:
                if token < 0:
                    raise ValueError(
                        f"no token to draw after {len(text.emitted)} new tokens: the scores are "
                        "NaN or all -inf; check the processors and the model"
                    )
                text.write(0, token)
                text.emitted.append(token)
                emitted.append(token)
                text.draws.forget(0, finished=False)
                if text.task.stop is not None and text.task.stop(0, text.history[:, : text.length]):
                    text.reason = "stop"
                if token in text.eos:
                    text.reason = "stop"
                elif text.reason is None and len(text.emitted) >= text.task.max_new_tokens:
                    text.reason = "length"
                if text.reason is not None:
                    break
            if text.task.top_logprobs is not None:
                text.logprobs += self._logprobs(text, raw[: len(emitted)], length, emitted)
            for row in self._rows[seat]:
                if row is not None:
                    row.extend(emitted)
        text.news += emitted
        if begun:
            self._count(text, emitted)
            if self._observer is not None and text.reason is None:
                last = len(emitted) - 1
                most, entropy = certainty(raw[last : last + 1])
                self._observer.see_target(seat, float(most), float(entropy))
        else:
            self.places.tell(seat, emitted)

    def _count(self, text: Text, emitted: list[int]) -> None:
        """Commit a round of a text, and tell the controller and the counts."""
        seat, counts = text.seat, text.counts
        self.places.commit(seat, emitted)
        accepted = in_common(emitted, text.draft)
        self._planner.learn(seat, emitted)
        self.controller.update(seat, len(text.draft), accepted)
        counts.rounds += 1
        counts.drafted += len(text.draft)
        counts.accepted += accepted
        if text.plan.source == _PREDICTED:
            counts.predicted += len(text.draft)
            counts.predicted_accepted += accepted

    def _logprobs(
        self, text: Text, raw: Tensor, length: int, emitted: Sequence[int]
    ) -> list[dict[int, float]]:
        """Of each emitted token, its own log-probability and the largest, from logits (n, V)."""
        lengths = [length + i for i in range(len(emitted))]
        width = len(text.task.prompt)
        scores = text.unwarped.scores(raw, text.history, [0] * len(emitted), lengths, width=width)
        found = []
        for token, row in zip(emitted, scores.log_softmax(-1), strict=True):  # (V,)
            top = row.topk(min(text.task.top_logprobs or 0, len(row)))
            each = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            found.append({token: float(row[token])} | each)
        return found
