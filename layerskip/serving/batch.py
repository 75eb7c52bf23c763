"""A batch that rows join and leave: rounds of draft, verify, accept, each text by its own law.

Every text has a `Draws` of one row: so it is the text it has alone, whoever is beside it.
Letters: R rows of a pass, N positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerskip.costs.observed import LaterCosts
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controller import completed
from layerskip.decoding.controllers import make_controller
from layerskip.decoding.draws import DraftedTokens
from layerskip.decoding.engine import Request
from layerskip.decoding.known import KnownTexts
from layerskip.decoding.planning import Plan
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.lookup import Lookup
from layerskip.decoding.sources.lookup_laws import LookupLaws
from layerskip.decoding.sources.sublayers import SublayerDraft
from layerskip.decoding.sources.trained import TrainedDraft
from layerskip.decoding.speculator import Judged, Offering, Speculator
from layerskip.generation import LayerSkipDecoding
from layerskip.model.cache import rounded_up
from layerskip.model.opening import sublayers_of
from layerskip.model.whole import Whole
from layerskip.serving.places import Places
from layerskip.serving.tasks import Task
from layerskip.serving.texts import LOOKED_UP, PREDICTED, Text, Together
from layerskip.settings import LONGEST_DRAFT, law_of, warn_of_branches
from layerskip.timing.tables import cost_tables

_SERVED = Lookup | LookupLaws | SublayerDraft | TrainedDraft | Assistant
_MEASURING = 2.0  # seconds, about, before the first task


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
        for name in ("seed", "seeds", "known", "progress", "clock"):
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
            whole = isinstance(source, Assistant) and isinstance(source.model, Whole)
            if whole or not isinstance(source, _SERVED):
                raise ValueError(
                    f"serving does not support drafts by {type(source).__name__}"
                    f"{' of a model that runs whole' if whole else ''}; allowed sources are "
                    "lookups, of texts and of laws, the model's own sublayers, its trained "
                    "modules, and second models of Llama's kind"
                )
            if isinstance(source, LookupLaws) and source.laws is not None:
                raise ValueError(
                    "serving keeps the laws of each text apart; give those that all look up as "
                    "LookupLaws(known=...)"
                )
        self.model, self.seats, self.known = opened, seats, known
        limit, theirs = opened.max_positions, [each.max_positions for each in sources]
        self.max_tokens = min(limit, max_tokens or limit, *(each for each in theirs if each))
        self.longest = (decoding.max_draft_length or LONGEST_DRAFT) if decoding.enabled else 0
        own = [source for source in sources if not isinstance(source, Lookup)]
        self.lookups = [source for source in sources if isinstance(source, Lookup)]
        self.places = Places(
            opened, own, seats=seats, total=self.max_tokens, max_draft_length=self.longest
        )
        self._own, self._first = own, LOOKED_UP + len(self.lookups)
        self._eos = [frozenset[int]()] * seats
        self.model.backend.settled = True
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
            ids = torch.ones(self.seats, 4, dtype=torch.long, device=self.model.device)  # (B, 4)
            law = law_of(self.model.model, self.seats, (), do_sample=False)
            new = max(1, min(256, self.max_tokens - 4))
            request = Request(ids, torch.ones_like(ids), max_new_tokens=new, law=law)
            tables = decoding._tables(self.model, timed, request)
            if any(isinstance(each, LaterCosts) for each in tables):  # later is now
                with torch.no_grad():
                    cost_tables(self.model, timed, request, seconds=_MEASURING)
            found = [timed[0]] * self._first, [tables[0]] * self._first
            controller = decoding._control(
                [*found[0], *self._own], [*found[1], *tables[1:]], ahead=math.inf
            )
            if decoding.branches:
                warn_of_branches(self.model, self._own)
        self.controller = completed(controller)
        self._together = Together(self.places.written)
        self.places.draws = self._together.few
        self._speculator = Speculator(
            self.places, self._together, self.controller, eos=self._eos, longest=self.longest
        )
        self.controller.reset(self.seats)

    def clear(self) -> None:
        """Drop all texts and what passes have left, after one has failed."""
        for text in self._seated:
            text.seat = -1
        self._seated.clear()
        self._begun = 0
        self._number()
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
        return Text.of(task, self.model.model, self.max_tokens, self.longest)

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
        self._eos[seat] = text.eos
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
        self._together.texts = {text.seat: text for text in self.texts}
        self.places.rows = {text.seat: place for place, text in enumerate(self.texts)}

    def _keep(self, text: Text, length: int | None = None) -> None:
        length = self.places.lengths[text.seat] if length is None else length
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
            window = places.cache.window
            filled, same = self.known.start(text.task.prompt, window, places.needed)
            places.fill(seat, place, filled)
            text.counts.known, text.same = places.lengths[seat], same if window else 0
        before = places.lengths[seat]
        raw = places.piece(seat, place, min(most, places.most))
        if before < text.same <= places.lengths[seat]:
            self._keep(text, text.same)
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
                text.begin(self.lookups, self.model.vocabulary)
            if text.reason is None:
                self._emit(text, raw, self._speculator.judge(raw, [(seat, 0)]), None)
        return places.lengths[seat] - before

    def round(self) -> None:
        """One round of the texts that have begun."""
        self.rounds += 1
        with self.model.disturbed():
            drafts = self._speculator.draft(self._plan())
            if all(text.reason is not None for text in self.texts):
                return
            positions = drafts.positions(self.places.rows)
            branches = drafts.branches(self.places.rows)
            raw = self.places.verify(drafts.fed, positions, branches)  # (N, V)
            judged = self._speculator.judge(raw, positions, drafts)
            last: dict[int, int] = {}
            for text in self.texts:
                if text.reason is None:
                    self._emit(text, raw, judged, drafts)
                    if text.reason is None:
                        last[text.seat] = judged.read[text.seat][-1]
            self._speculator.show(raw, last)

    def _plan(self) -> dict[int, Plan]:
        left = {
            text.seat: text.task.max_new_tokens - len(text.emitted) if text.task.speculate else 0
            for text in self.texts
        }
        offers: list[Offering] = [
            *(partial(self._together.offer, number) for number in range(self._first)),
            *(state.offer for state in self.places.states),
        ]
        plans = self._speculator.plan(left, offers if self.longest else [])
        for text in self.texts:
            text.plan = plans[text.seat]
        # the places know only of the model's own drafts
        return {
            seat: plan if plan.source is None else plan._replace(source=plan.source - self._first)
            for seat, plan in plans.items()
        }

    def _emit(self, text: Text, raw: Tensor, judged: Judged, drafts: DraftedTokens | None) -> None:
        """Emit a text's tokens, judged by raw logits (N, V), and commit the round."""
        seat, counts = text.seat, text.counts
        emitted = text.emit(judged.tokens[seat])
        if text.task.top_logprobs is not None:
            text.tell_logprobs(raw[judged.read[seat][: len(emitted)]], emitted)
        if drafts is None:
            self.places.tell(seat, emitted)
            return
        self._speculator.commit(seat, emitted, judged, drafts)
        drafted = len(drafts.tokens[seat])
        accepted = min(len(judged.tokens[seat]) - 1, len(emitted))
        counts.rounds += 1
        counts.drafted += drafted
        counts.accepted += accepted
        if text.plan.source == PREDICTED:
            counts.predicted += drafted
            counts.predicted_accepted += accepted
