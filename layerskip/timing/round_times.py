"""Times rounds of fixed length: draft steps, and passes over several tokens of every row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice

import torch

from layerskip.backends.captured import clock
from layerskip.costs.cost_model import READ, TimingPoint, Work
from layerskip.decoding.controllers import Controller, Offer
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law, of_the_batch
from layerskip.decoding.passes import Passes
from layerskip.decoding.sources.base import Batch, Following, Proposal, Source, State
from layerskip.model.opened_model import OpenedModel

TOKENS = (1, 2, 4, 8, 16)  # tokens per row in timed passes
_MOST = 80  # maximum tokens of all rows in a pass, but at least `_FEW` per row
_FEW = 5  # tokens per row that are timed in any case
STEPS = 4  # length of the drafts from which the time of a step is taken
SWEEPS = 12  # half as many leave twice the spread
CONTEXT = 4
BUDGET = 0.3  # maximum seconds that a call spends on costs
_PATIENCE = 4  # multiple of the budget, if costs were requested and times are disturbed
_REPEATED = 1.25  # maximum ratio of the second quickest time to the quickest, if undisturbed
_ROUNDS = 2  # a budget of fewer plain steps is not used

Times = dict[Work, list[float]]
"""Seconds of each kind of work, one entry per timing."""


class Stopwatch(Controller):
    """Makes rounds draft a given length, and times them; source 0 looks tokens up."""

    rounds: Iterator[object]

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.draft = self.length = self.left = 0  # source, draft length, steps left
        self.drafted = 0.0  # time when the last token was drawn

    def choose(self, offers: Sequence[Offer]) -> int | None:
        return self.draft if self.length else None

    def learn(self, draft: int, row: int, shown: int, right: int) -> None:
        pass

    def limit(self, row: int, allowed: int) -> int:
        self.left = self.length
        # One step more than needed, so that `keep_drafting` is also called after the last one.
        return self.length + (self.draft > 0) if self.length else 0

    def keep_drafting(self, row: int, confidence: float) -> bool:
        if row == 0:  # the other rows follow in the same step
            self.left -= 1
            self.drafted = self.now()
        return self.left > 0

    def time_pass(self, tokens: int) -> float:
        """Seconds of a round that verifies looked-up tokens, `tokens` per row in a pass."""
        return self._round(0, tokens - 1)

    def time_steps(self, source: int, per_step: int) -> float:
        """Seconds per step, for `STEPS` draft steps in a row, or for those that draft as much."""
        self._round(source, 1)  # catch up with the tokens of other sources' rounds
        start = self.now()
        self._round(source, STEPS)
        return (self.drafted - start) / -(-STEPS // per_step)

    def _round(self, source: int, length: int) -> float:
        self.draft, self.length = source, length
        start = self.now()
        next(self.rounds)
        return self.now() - start


class _Echo(Source):
    """Always has a draft, of which any number of tokens can be verified."""

    key = "echo"

    def open(self, batch: Batch) -> State:
        return _EchoState(batch)


class _EchoState(State):
    def offer(self, row: int, most: int) -> Proposal:
        return Proposal.of([0] * most, match=1)


def time_rounds(
    model: OpenedModel,
    sources: Sequence[Source],
    request: Request,
    times: Times,
    *,
    place: TimingPoint,
    budget: float,
    tokens: Sequence[int] = TOKENS,
    whole: bool = True,
    now: Callable[[], float] = clock,
) -> None:
    """Time passes, and draft steps of sources, after the request's first prompt.

    A long context is imitated by zeros before a short one, which are not computed: times are the
    same. Every phase includes its law (without a user's own processors), its draw and the transfer
    to the host, as in decoding.

    Args:
        sources: those that take steps.
        times: where the seconds are added; work with the fewest entries comes first.
        budget: seconds after which no further sweep starts, once there are two; four times as many
            if times are disturbed.
        tokens: tokens per row in timed passes, the largest last.
        whole: whether to take at least two sweeps; otherwise two rounds, and no further ones once
            the budget is spent.
    """
    if not whole and _ROUNDS * model.pass_bytes([1])[0] / READ > budget:
        return
    prompt = request.input_ids[0][request.attention_mask[0].bool()][:CONTEXT]  # (T,)
    zeros, most = place.context - CONTEXT, max(_FEW, _MOST // place.rows)
    order: list[Work] = [(None, each) for each in tokens if each <= most]
    if whole or not times.get((None, 1)):
        order.insert(0, (None, 1))  # twice, since a long round leaves other data in the caches
    order += [(source.key, 0) for source in sources]
    numbers = {source.key: number for number, source in enumerate(sources, 1)}
    for work in order:
        times.setdefault(work, [])
    # Plain steps first, since they show the pace at the moment.
    order.sort(key=lambda work: (work != (None, 1), len(times[work])))
    growth, longest = sum(count or STEPS + 3 for _, count in order), min(most, tokens[-1])
    limits = [source.max_positions for source in sources if source.max_positions]
    room = min([model.max_positions, *limits]) - zeros - len(prompt) - longest - 3
    sweeps = min(SWEEPS, room // growth)
    if sweeps < 2:
        return
    asked = replace(
        request,
        law=_of_any_rows(request.law, place.rows),
        input_ids=prompt.expand(place.rows, -1),
        attention_mask=prompt.new_ones(place.rows, len(prompt)),
        # Separate keys, so that rows fall out of step as those of the request do.
        keys=list(islice(cycle(request.keys), place.rows)),
        max_new_tokens=zeros + sweeps * growth + longest + 3,
        eos=frozenset(),
        stop=None,
        keep_scores=False,
        keep_logits=False,
    )
    timed = [_Echo(), *(source.timed() for source in sources)]
    watch = Stopwatch(now)
    decoder = Decoder(model, timed, watch, asked, max_draft_length=longest + 1)
    watch.rounds = decoder.rounds()
    next(watch.rounds)
    if zeros:
        _prepend_zeros(decoder.passes, zeros)
        next(watch.rounds)  # lets the buffers grow
    started, rounds = now(), 0
    for sweep in range(sweeps):
        for source, count in order:
            if not whole and rounds >= _ROUNDS and now() - started > budget:
                return
            rounds += 1
            if count:
                seconds = watch.time_pass(count)
            else:
                number = numbers[source]
                seconds = watch.time_steps(number, timed[number].per_step)
            times[source, count].append(seconds)
        # The first sweep includes one-time work.
        enough = budget if sweep and not disturbed(times) else _PATIENCE * budget
        if sweep and now() - started > enough:
            return


def _of_any_rows(law: Law, rows: int) -> Law:
    """A law for `rows` rows, without processors that support only the request's own rows."""
    processors = [each for each in law.processors if not of_the_batch(each)]
    return Law(processors, do_sample=law.do_sample, rows=rows)


def _prepend_zeros(passes: Passes, zeros: int) -> None:
    """Put slots of zeros before all rows, as if tokens had been computed there."""
    for seat in passes.seats:
        seat.prompt = torch.cat([seat.prompt.new_zeros(zeros), seat.prompt])
        seat.length += zeros
    for state in passes.states:
        if isinstance(state, Following):
            state.seen = [seen + zeros for seen in state.seen]


def disturbed(times: Mapping[Work, Sequence[float]]) -> bool:
    """Whether other work disturbed the times: undisturbed, the quickest two of a kind agree."""
    quickest = (sorted(each)[:2] for each in times.values())
    return any(len(each) < 2 or each[1] > _REPEATED * each[0] for each in quickest)


def quartile(seconds: Sequence[float]) -> float:
    """The lower quartile, since other work on the machine only adds to times."""
    return sorted(seconds)[len(seconds) // 4] if seconds else math.nan
