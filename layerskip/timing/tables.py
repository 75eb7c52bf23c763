"""The costs of draft steps and verify passes on this machine, in target steps.

Rounds of fixed length are timed once for each model, set of sources and kind of law, by number of
rows, behind a short context and a long one. In between, costs follow the bytes of keys and values.
They serve other processes through a small file (see `kept.py`). A call without costs spends at most
`_BUDGET` seconds on measuring; the next calls continue, and times that other work on the machine
has disturbed are taken again. Under the rejection rule the text depends on draft lengths, which a
clock must not decide; there the costs are those of the bytes of weights and keys.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PrefixConstrainedLogitsProcessor

from layerskip.config import SkipConfig
from layerskip.costs.observed import HealingCosts, healing
from layerskip.costs.speculation import ContextCosts, CostTable, keys_read, rising
from layerskip.decoding.controller import Offer
from layerskip.decoding.controllers import Controller
from layerskip.decoding.engine import Decoder, DraftOrSkip, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.passes import Passes
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.following import Following
from layerskip.environment import hardware
from layerskip.model.sublayers import Sublayers
from layerskip.timing import kept

_LENGTHS = (1, 2, 4, 8)  # drafted tokens of the timed rounds; v in between is interpolated
_KNOWN = (1, 3, 7, 15)  # the same for known tokens, whose drafts are longer
_TYPICAL_LENGTH = 4  # of the drafts that c is computed from
_SWEEPS = 12  # half as many leave twice the spread
_CONTEXT = 4
_FAR = 4096  # tokens behind which costs are measured, too, where calls get near that
_KEYS = 2**28  # or fewer, so that keys and values take at most so many bytes
_LEAST = 256  # tokens; where fewer take those bytes, nothing is measured behind them
_NEAR = 0.25  # of that length: from there on it is measured
_MOST_ROWS = 32
_TOKENS = 80  # of a pass over all rows, at most, but for short drafts
_BUDGET = 0.3  # seconds that a call spends on costs, at most
_PATIENCE = 4  # times the budget, if costs were asked for and times are disturbed
_REPEATED = 1.25  # undisturbed, the second quickest time is at most so many times the quickest
_DEAR = 2.0  # undisturbed, a draft step takes at most so many times what its weights suggest
_SMALL = 0.5  # of a plain step: below that, launches and draws count for more than weights
_CALLS = 4  # that measure at most, while times are disturbed
_TRIES = 20  # calls that measure at most, while a kind of time is missing
_VERIFIED = 16  # tokens of a row up to which an analytic v counts a mixture's experts
_READ = 2e10  # assumed bytes a second at which weights are read
_ROUNDS = 2  # a budget of less than so many plain steps is not used


class _Costs:
    """The costs of one kind of call: times, their file, calls that measured, tables."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.times: dict[_Kind, _Times] = {}
        self.file: Path | None = None
        self.read = False
        self.calls: dict[_Kind, int] = {}
        self.asked: set[_Kind] = set()  # measured by calls for just that
        self.tables: list[HealingCosts] | None = None
        self.guessed: dict[int, list[HealingCosts]] = {}  # by rows, until they are measured

    def wants(self, kind: _Kind) -> bool:
        """Whether the next call is to measure these rounds, again or for the first time."""
        times = self.times.get(kind)
        done = times is not None and times.complete
        left = times is None or not done or times.disturbed()
        return left and self.calls.get(kind, 0) < (_CALLS if done else _TRIES)

    def measured(self) -> dict[_Kind, _Times]:
        """The times of which there is one of every sort, first those behind few tokens."""
        done = {kind: times for kind, times in sorted(self.times.items()) if times.complete}
        return {kind: times for kind, times in done.items() if _Kind(kind.rows, _CONTEXT) in done}


_costs: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Costs]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


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


class _Kind(NamedTuple):
    """Which rounds are timed: of how many rows, and behind how many tokens."""

    rows: int
    context: int


class _Seconds(NamedTuple):
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
class _Times:
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

    def merged(self, other: _Times) -> _Times:
        """These times and those of another call of the same kind."""
        return replace(
            self,
            rounds={key: times + other.rounds[key] for key, times in self.rounds.items()},
            steps={key: times + other.steps[key] for key, times in self.steps.items()},
        )

    def tables(self) -> list[CostTable]:
        """The table of each source there."""
        return [each.table() for each in self.seconds()]

    def seconds(self) -> list[_Seconds]:
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
    context: int = _CONTEXT,
    budget: float | None = None,
    whole: bool = True,
    turn: int = 0,
    now: Callable[[], float] = time.perf_counter,
) -> _Times | None:
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
            if times are disturbed. `_BUDGET` by default.
        whole: whether to take two sweeps in any case; else no further round starts once the budget
            is used up, and some kinds of times may be missing.
        turn: the round of a sweep to begin with, so that calls with small budgets reach all.
        now: the clock, in seconds.

    Returns:
        Times for `tables()`; None if the model's positions leave no room to measure, or the budget
        is too small to begin.
    """
    budget = _BUDGET if budget is None else budget
    sources = [source_of(model, draft) for draft in drafts]
    weights = [analytic(model, source).draft for source in sources]
    step = model.pass_bytes([1])[0] / _READ
    if not whole and _ROUNDS * step > budget:
        return None
    prompt = request.input_ids[0][request.attention_mask[0].bool()][:_CONTEXT]  # (T,)
    zeros = context - _CONTEXT
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
    times = _Times(
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


def _seconds(draft: float, totals: dict[int, float]) -> _Seconds:
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
    return _Seconds(draft, passes)


def _like(other: _Seconds, draft: float, total: float) -> _Seconds:
    """Seconds scaled from another source's, by those of a draft step and of a round."""
    step, *longer = other.passes
    part = max(0.0, total - _TYPICAL_LENGTH * draft) / other.over(_TYPICAL_LENGTH + 1)
    return _Seconds(draft, [step, *(max(step, part * each) for each in longer)])


@dataclass(frozen=True)
class _Read:
    """Bytes that passes read of weights, and of the keys and values of a token of each row.

    It holds numbers only: tables outlive the models that they are of.
    """

    step: float
    draft: float
    verify: Sequence[float]
    """By tokens of the pass; more than one for mixtures of experts."""
    keys: Mapping[int | None, float]
    draft_keys: Mapping[int | None, float]

    @classmethod
    def of(cls, model: Sublayers, draft: DraftOrSkip, rows: int = 1) -> _Read:
        longest = _VERIFIED if model.mixtures else 1
        step, *read = model.pass_bytes([1, *(rows * count for count in range(1, longest + 1))])
        source = source_of(model, draft)
        drafted = math.fsum(source.step_bytes())
        return cls(step, drafted, read, model.key_bytes(), source.key_bytes())

    def table(self, context: int, rows: int) -> CostTable:
        """The analytic table."""
        keys = rows * keys_read(self.keys, context)
        step = self.step + keys
        draft = self.draft + rows * keys_read(self.draft_keys, context)
        verify = [(each + keys) / (self.verify[0] + keys) for each in self.verify]
        return replace(CostTable.analytic([draft], [step], verify), step=step / _READ)


def _measured(times: Mapping[_Kind, Sequence[_Seconds]], read: _Read, number: int) -> ContextCosts:
    """The costs of a source from what was measured, in seconds, behind few tokens or many.

    A pass takes a + b x (bytes of the keys and values it reads). Where b is not known, keys are
    taken to cost what weights do. A pass over several rows takes as long as one over as many tokens
    of other rows, and what every row costs beside its tokens. That is told by the passes over as
    many tokens in the next smaller and the next larger number of rows that were measured.
    """

    def known(rows: int, context: int) -> _Seconds:
        low, *others = sorted(kind for kind in times if kind.rows == rows)
        near, weight = times[low][number], times[low][number].passes[0] / read.step
        far = times[others[-1]][number] if others else None

        def more(keys: Mapping[int | None, float], end: int) -> float:
            return rows * max(0.0, keys_read(keys, end) - keys_read(keys, low.context))

        def at(keys: Mapping[int | None, float], first: float, last: float | None) -> float:
            if last is None:
                return first + weight * more(keys, context)
            spread = more(keys, others[-1].context)
            return first + max(0.0, last - first) * more(keys, context) / max(spread, 1.0)

        counts = range(1, len(near.passes) + 1)
        return _Seconds(
            at(read.draft_keys, near.draft, far and far.draft) if near.draft else 0.0,
            [at(read.keys, near.over(count), far and far.over(count)) for count in counts],
        )

    def table(context: int, rows: int) -> CostTable:
        sizes = sorted({kind.rows for kind in times})
        few = max((size for size in sizes if size <= rows), default=sizes[0])
        many = min((size for size in sizes if size >= rows), default=few)
        low, high = known(few, context), known(many, context)
        counts = range(1, max(len(low.passes), len(high.passes)) + 1)
        if rows > many:  # than were measured
            part = rows / few
            seconds = [low.over(part * count) for count in counts]
            draft = low.draft * low.over(part) / low.over(1)
        else:
            part = (rows - few) / (many - few) if many > few else 0.0
            beside = high.over(1) - low.over(many / few)
            seconds = [
                low.over(rows * count / few) + part * beside
                if rows * count <= many
                else high.over(rows * count / many) - (1 - part) * beside
                for count in counts
            ]
            draft = low.draft + part * (high.draft - low.draft)
        return _Seconds(draft, seconds).table()

    return ContextCosts(table)


def by_bytes(model: Sublayers, draft: DraftOrSkip, rows: int = 1) -> ContextCosts:
    """The costs on a machine that is limited by reading weights and keys, from their bytes.

    The more tokens a pass has, in all rows, the more of a mixture's experts it reads.
    """
    return ContextCosts(_Read.of(model, draft, rows).table)


def analytic(model: Sublayers, draft: DraftOrSkip, rows: int = 1) -> CostTable:
    """The table of `by_bytes` where no keys are read yet."""
    return _Read.of(model, draft, rows).table(0, rows)


def machine(model: Sublayers) -> dict[str, Any]:
    """Where and how a model's passes run, as JSON values; threads on a CPU only."""
    found: dict[str, Any] = {
        "hardware": hardware(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "execution": model.execution,
    }
    return found if model.threads is None else {**found, "threads": model.threads}


def place(model: Sublayers, rows: int) -> dict[str, Any]:
    """The conditions that a cost table is valid for, as JSON values for a skip config."""
    return {**machine(model), "batch_size": rows, "draft_vocabulary": model.weights.vocabulary}


def stored(skip: SkipConfig, model: Sublayers, rows: int) -> CostTable | None:
    """The costs in a skip config; None if it has none, or they are for other conditions.

    Raises:
        ValueError, TypeError: they are not a cost table.
    """
    if skip.costs is None:
        return None
    here = place(model, rows)
    there = {"draft_vocabulary": model.vocabulary, **skip.costs}  # of all tokens, if none is named
    elsewhere = {name: there[name] for name in here if there.get(name, here[name]) != here[name]}
    if elsewhere:
        warnings.warn(
            "the skip config's costs are left aside, as they were measured for "
            f"{', '.join(f'{name} {value}' for name, value in elsewhere.items())}; here it is "
            f"{', '.join(str(here[name]) for name in elsewhere)}",
            stacklevel=2,
        )
        return None
    known = {name: skip.costs[name] for name in ("draft", "verify", "source") if name in skip.costs}
    return CostTable.from_dict({"source": "given"} | known)


def cost_tables(
    model: Sublayers,
    drafts: Sequence[DraftOrSkip],
    request: Request,
    *,
    seconds: float | None = None,
) -> list[HealingCosts]:
    """The costs of each source, measured at the first calls and remembered.

    Rounds of one row and of as many rows as the call has are timed, and such rounds behind a long
    context where the call gets near that. While times are disturbed the next calls measure, too,
    and all their times count together, so that a long-lived process does not keep what one bad
    moment gave. Until there is a time of every sort, costs are those of the bytes read.

    Args:
        seconds: to spend on measuring now, at least two sweeps; for callers that want costs.
    """
    law: Law = request.law
    rows = request.input_ids.shape[0]
    context = int(request.attention_mask.sum()) // rows + request.max_new_tokens
    kind = (law.do_sample, law.warp is not None, law.reads_history)
    place = (model.execution, model.dtype, model.device, model.weights.vocabulary, model.threads)
    sources = [source_of(model, draft) for draft in drafts]
    keys = [source.key for source in sources]
    with _lock:
        costs = _costs.setdefault(model.model, {}).setdefault((*keys, kind, place), _Costs())
    with costs.lock:  # for this kind of call only
        if not costs.read:
            costs.read = True
            costs.file = kept.file_of(model, machine(model), keys, kind)
            for saved in () if costs.file is None else kept.read(costs.file):
                known = _Kind(saved.pop("rows"), saved.pop("context"))
                costs.times[known], costs.calls[known] = _Times(**saved), _CALLS
        wanted = [each for each in _kinds(model, rows, context) if costs.wants(each)]
        if seconds is None:  # who asked for costs before wants no call to take its time for them
            wanted = [each for each in wanted if each not in costs.asked and not model.limited]
        budget, started = _BUDGET if seconds is None else seconds, time.perf_counter()
        for number, each in enumerate(wanted):
            left = budget + started - time.perf_counter()
            asked = {"budget": left / (len(wanted) - number), **each._asdict()}
            if seconds is None:
                asked |= {"whole": False, "turn": 3 * costs.calls.get(each, 0)}
            found = measure(model, sources, request, **asked)
            costs.calls[each] = costs.calls.get(each, 0) + 1
            if seconds is not None:
                costs.asked.add(each)
            if found is not None:
                before = costs.times.get(each)
                costs.times[each] = found if before is None else before.merged(found)
                costs.tables = None
        measured = costs.measured()
        if costs.tables is None and measured:
            if wanted:
                quiet = {kind: times for kind, times in measured.items() if not times.disturbed()}
                kept.write(costs.file, quiet)
            seconds_of = {each: times.seconds() for each, times in measured.items()}
            costs.tables = healing(
                _measured(seconds_of, _Read.of(model, source), number)
                for number, source in enumerate(sources)
            )
        if costs.tables is None and rows not in costs.guessed:
            costs.guessed[rows] = healing(by_bytes(model, source, rows) for source in sources)
        return costs.tables or costs.guessed[rows]


def _kinds(model: Sublayers, rows: int, context: int) -> Iterator[_Kind]:
    """The rounds whose times tell the costs of a batch that gets so long."""
    # what an encoder has read is read for the rows that there are
    many = 1 if model.read else min(_MOST_ROWS, 1 << (rows - 1).bit_length())
    yield from (_Kind(each, _CONTEXT) for each in sorted({1, many}))
    # compiled passes would be compiled anew, and the library's own caches have no free slots
    token = 0.0 if model.execution in ("compiled", "whole") else keys_read(model.key_bytes(), _FAR)
    if token:
        far = min(_FAR, model.max_positions * 3 // 4, int(_KEYS * _FAR / (many * token)))
        if far >= _LEAST and context >= _NEAR * far:
            yield _Kind(many, far)
