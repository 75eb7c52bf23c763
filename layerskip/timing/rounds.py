"""Times rounds of fixed lengths: draft steps, and passes over several tokens of every row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, pairwise
from typing import NamedTuple

import torch
from transformers import PrefixConstrainedLogitsProcessor

from layerskip.costs.speculation import CostTable, rising
from layerskip.decoding.controller import Offer
from layerskip.decoding.controllers import Controller
from layerskip.decoding.engine import Decoder, DraftOrSkip, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.passes import Passes
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.following import Following
from layerskip.model.sublayers import Sublayers
from layerskip.timing.analytic import READ, analytic

_LENGTHS = (1, 2, 4, 8)  # drafted tokens of the timed rounds; v in between is interpolated
_KNOWN = (1, 3, 7, 15)  # the same for known tokens, whose drafts are longer
_TYPICAL_LENGTH = 4  # of the drafts that c is computed from
_SWEEPS = 12  # half as many leave twice the spread
CONTEXT = 4
_TOKENS = 80  # of a pass over all rows, at most, but for short drafts
BUDGET = 0.3  # seconds that a call spends on costs, at most
_PATIENCE = 4  # times the budget, if costs were asked for and times are disturbed
_REPEATED = 1.25  # undisturbed, the second quickest time is at most so many times the quickest
_DEAR = 2.0  # undisturbed, a draft step takes at most so many times what its weights suggest
_SMALL = 0.5  # of a plain step: below that, launches and draws count for more than weights
_ROUNDS = 2  # a budget of less than so many plain steps is not used


class Stopwatch(Controller):
    """A controller that drafts `length` tokens and notes when the last one was drawn.

    Attributes:
        draft: the number of the source to draft from.
        known: whether that source's tokens are known.
    """

    needs_confidence = True

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.draft = 0
        self.known = False
        self.length = 0
        self.left = 0
        self.drafted = 0.0

    def choose(self, offers: Sequence[Offer]) -> int | None:
        return self.draft if self.length else None

    def learn(self, draft: int, row: int, known: int, right: int) -> None:
        pass

    def limit(self, row: int, allowed: int) -> int:
        self.left = self.length
        # one more than wanted, so that `keep_drafting` is called after the last one, too
        return self.length + (not self.known) if self.length else 0

    def keep_drafting(self, row: int, confidence: float) -> bool:
        if row == 0:  # the others follow in the same step
            self.left -= 1
            self.drafted = self.now()
        return self.left > 0


class Kind(NamedTuple):
    """Which rounds are timed: of how many rows, and behind how many tokens."""

    rows: int
    context: int


class Seconds(NamedTuple):
    """Seconds of a source's draft step, and of passes over 1, 2, ... tokens of every row."""

    draft: float
    passes: Sequence[float]

    def over(self, tokens: float) -> float:
        """Seconds of a pass over so many tokens, on lines between those that are known."""
        places = range(1, len(self.passes) + 1)
        low = min(max(1, int(tokens)), max(1, len(places) - 1))
        first = self.passes[low - 1]
        slope = self.passes[low] - first if low < len(places) else 0.0
        return first + slope * (tokens - low)

    def table(self) -> CostTable:
        """In target steps; a longer pass is never cheaper."""
        step = self.passes[0]
        verify = [max(1.0, each / step) for each in accumulate(self.passes, max)]
        return CostTable(self.draft / step, tuple(verify), "measured", step)


@dataclass(frozen=True)
class Times:
    """Seconds of rounds by (source, drafted tokens), and of draft steps by source."""

    rounds: dict[tuple[int, int], list[float]]
    steps: dict[int, list[float]]
    weights: Sequence[float]
    """c of each source by its weights alone."""
    base: int
    """The source whose rounds are timed at several lengths."""

    @property
    def complete(self) -> bool:
        """Whether there is a time of every kind."""
        return all(self.rounds.values()) and all(
            self.steps[i] for i, weight in enumerate(self.weights) if weight
        )

    def disturbed(self) -> bool:
        """Whether other work on the machine seems to have disturbed the times.

        Other work only adds to times. So undisturbed, the quickest two of each kind are alike. If
        all times of a kind were disturbed, a draft step takes far longer than its weights suggest.
        That also happens where products are slow; then only the time to measure again is lost.
        """
        kinds = [sorted(times) for times in self.rounds.values()]
        if any(len(times) < 2 or times[1] > _REPEATED * times[0] for times in kinds):
            return True
        plain = typical(self.rounds[self.base, 0])
        return any(
            typical(times) > _DEAR * max(self.weights[draft], _SMALL) * plain
            for draft, times in self.steps.items()
            if times
        )

    def merged(self, other: Times) -> Times:
        """These times and those of another call of the same kind."""
        return replace(
            self,
            rounds={key: times + other.rounds[key] for key, times in self.rounds.items()},
            steps={key: times + other.steps[key] for key, times in self.steps.items()},
        )

    def tables(self) -> list[CostTable]:
        """The table of each source there."""
        return [each.table() for each in self.seconds()]

    def seconds(self) -> list[Seconds]:
        """The typical seconds of each source."""
        known = {key: typical(times) for key, times in self.rounds.items()}
        costs = [typical(times) if times else 0.0 for times in self.steps.values()]
        totals = {length: each for (draft, length), each in known.items() if draft == self.base}
        first = _seconds(costs[self.base], totals)
        return [
            _like(first, cost, known[draft, _TYPICAL_LENGTH])
            if draft != self.base and (draft, _TYPICAL_LENGTH) in known
            else first
            for draft, cost in enumerate(costs)
        ]


def measure(
    model: Sublayers,
    drafts: Sequence[DraftOrSkip],
    request: Request,
    *,
    rows: int = 1,
    context: int = CONTEXT,
    budget: float | None = None,
    whole: bool = True,
    turn: int = 0,
    now: Callable[[], float] = time.perf_counter,
) -> Times | None:
    """Time draft steps and verify passes on a short context of the request's first prompt.

    A long context is a short one behind zeros, which nobody computes: times are the same.

    Every phase includes its law (without a user's own processors), its draw and the transfer to
    the host, as in decoding. Verify passes are timed at several lengths for one source only, one of
    known tokens if there is one; for the others they are scaled in proportion.

    Args:
        drafts: the sources; those of known tokens cost verify passes only.
        rows: of the batch.
        context: how many tokens are before the rounds, at least.
        budget: seconds after which no further sweep starts once there are two; four times as many
            if times are disturbed. `BUDGET` by default.
        whole: whether to take two sweeps in any case; else no further round starts once the budget
            is used up, and some kinds of times may be missing.
        turn: the round of a sweep to begin with, so that calls with small budgets reach all.
        now: the clock, in seconds.

    Returns:
        Times for `tables()`; None if the model's positions leave no room to measure, or the budget
        is too small to begin.
    """
    budget = BUDGET if budget is None else budget
    sources = [source_of(model, draft) for draft in drafts]
    weights = [analytic(model, source).draft for source in sources]
    step = model.pass_bytes([1])[0] / READ
    if not whole and _ROUNDS * step > budget:
        return None
    prompt = request.input_ids[0][request.attention_mask[0].bool()][:CONTEXT]  # (T,)
    zeros = context - CONTEXT
    known = [source.known for source in sources]
    base = known.index(True) if True in known else 0
    longest = max(_TYPICAL_LENGTH, _TOKENS // rows - 1)
    lengths = [each for each in (_KNOWN if known[base] else _LENGTHS) if each <= longest]
    # two plain steps: after a long round the CPU's caches hold other data
    order = [(base, length) for length in (0, 0, *lengths)]
    for i in range(len(sources)):
        if i != base and not known[i]:
            # first a round that catches up with the tokens of other sources' rounds
            order += [(i, 1), (i, _TYPICAL_LENGTH)]
    order = order[turn % len(order) :] + order[: turn % len(order)]
    growth = sum(length + 1 for _, length in order)
    holds = [source.max_positions for source in sources if source.max_positions]
    room = min([model.max_positions, *holds]) - zeros - len(prompt) - longest - 3
    sweeps = min(_SWEEPS, room // growth)
    if sweeps < 2:
        return None
    # a user's own processors may work for the request's texts only, not for this one
    theirs = [
        processor
        for processor in request.law.processors
        if type(processor).__module__.startswith("transformers.")
        and not isinstance(processor, PrefixConstrainedLogitsProcessor)
    ]
    probe = replace(
        request,
        law=Law(theirs, do_sample=request.law.do_sample, rows=rows),
        input_ids=prompt.expand(rows, -1),
        attention_mask=prompt.new_ones(rows, len(prompt)),
        # of their own, so that rows fall out of step as theirs do
        keys=list(islice(cycle(request.keys), rows)),
        max_new_tokens=zeros + sweeps * growth + longest + 3,
        eos=frozenset(),
        stop=None,
        keep_scores=False,
        keep_logits=False,
    )
    watch = Stopwatch(now)
    started = now()
    timed = [source.timed() for source in sources]
    decoder = Decoder(model, timed, watch, probe, max_draft_length=longest + 1)
    rounds = decoder.rounds()
    next(rounds)
    if zeros:
        _put_before(decoder.passes, zeros)
        next(rounds)  # the buffers grow
    times = Times(
        rounds={each: [] for each in order},
        steps={number: [] for number in range(len(sources))},
        weights=weights,
        base=base,
    )
    if whole:
        started = now()
    for sweep in range(sweeps):
        for each in order:
            if not whole and now() - started > budget:
                return times
            watch.draft, watch.length = each
            watch.known = known[watch.draft]
            start = now()
            next(rounds)
            times.rounds[each].append(now() - start)
            if watch.length == _TYPICAL_LENGTH and not watch.known:
                times.steps[watch.draft].append((watch.drafted - start) / watch.length)
        taken = now() - started
        # the first sweep includes one-time work
        enough = budget if sweep and not times.disturbed() else _PATIENCE * budget
        if sweep and taken > enough:
            break
    return times


def _put_before(passes: Passes, zeros: int) -> None:
    """Let all rows go on behind so many slots of zeros, as if tokens had been computed there."""
    passes.prompts = [torch.cat([each.new_zeros(zeros), each]) for each in passes.prompts]
    for lengths in (passes.prompt_lengths, passes.lengths):
        lengths[:] = [length + zeros for length in lengths]
    for state in passes.states:
        if isinstance(state, Following):
            state.seen = [seen + zeros for seen in state.seen]


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile, as other work on the machine only adds to times."""
    return sorted(seconds)[len(seconds) // 4]


def _seconds(draft: float, totals: dict[int, float]) -> Seconds:
    """From the seconds of a draft step and of rounds by drafted tokens.

    A round's time without its draft steps counts as its verify pass, so that `round_cost` is what
    was measured. Between measured lengths passes lie on lines.
    """
    lengths = sorted(totals)
    # a longer pass is never cheaper, except by noise
    verifies = rising([totals[length] - length * draft for length in lengths])
    passes = [totals[0]]
    for (low, low_seconds), (high, high_seconds) in pairwise(zip(lengths, verifies, strict=True)):
        for length in range(low + 1, high + 1):
            part = (length - low) / (high - low)
            passes.append(max(totals[0], low_seconds + part * (high_seconds - low_seconds)))
    return Seconds(draft, passes)


def _like(other: Seconds, draft: float, total: float) -> Seconds:
    """Seconds scaled from another source's, by those of a draft step and of a round."""
    step, *longer = other.passes
    part = max(0.0, total - _TYPICAL_LENGTH * draft) / other.over(_TYPICAL_LENGTH + 1)
    return Seconds(draft, [step, *(max(step, part * each) for each in longer)])
