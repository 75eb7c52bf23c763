"""The costs of draft steps and verify passes on this machine, in target steps.

Rounds of fixed length on one row are timed once for each model, set of sources and kind of law. The
costs serve batches of any size, and other processes through a small file (see `kept.py`). A call
without costs spends at most `_BUDGET` seconds on measuring; the next calls continue, and times that
other work on the machine has disturbed are taken again. Under the rejection rule the text depends
on draft lengths, which a clock must not decide; there the analytic table of weights is used.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrefixConstrainedLogitsProcessor

from layerskip.config import SkipConfig
from layerskip.costs.speculation import CostTable, rising
from layerskip.decoding.controller import Offer
from layerskip.decoding.controllers import Controller
from layerskip.decoding.engine import Decoder, DraftOrSkip, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.sources import source_of
from layerskip.environment import hardware
from layerskip.model.sublayers import Sublayers
from layerskip.timing import kept

_LENGTHS = (1, 2, 4, 8)  # drafted tokens of the timed rounds; v in between is interpolated
_KNOWN = (1, 3, 7, 15)  # the same for known tokens, whose drafts are longer
_TYPICAL_LENGTH = 4  # of the drafts that c is computed from
_SWEEPS = 12  # half as many leave twice the spread
_CONTEXT = 4
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
    """The costs of one kind of call: times, their file, calls that measured, tables by rows."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.times: _Times | None = None
        self.file: Path | None = None
        self.calls = 0
        self.tables: dict[int, list[CostTable]] = {}


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


@dataclass(frozen=True)
class _Times:
    """Seconds of rounds of one row by (source, drafted tokens), and of draft steps by source."""

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

    def tables(self, rows: int = 1) -> list[CostTable]:
        """The table of each source, for a batch of so many rows.

        A pass over several rows costs as much as one over as many tokens of one row; draft steps
        cost more in the same proportion.
        """
        seconds = {key: typical(times) for key, times in self.rounds.items()}
        step = seconds[self.base, 0]
        costs = [typical(times) if times else 0.0 for times in self.steps.values()]
        totals = {length: each for (draft, length), each in seconds.items() if draft == self.base}
        first = _table(costs[self.base], totals)
        tables = [
            _like(first, cost, seconds[draft, _TYPICAL_LENGTH], step)
            if draft != self.base and (draft, _TYPICAL_LENGTH) in seconds
            else first
            for draft, cost in enumerate(costs)
        ]
        return [_of_rows(table, rows) for table in tables]


def measure(
    model: Sublayers,
    drafts: Sequence[DraftOrSkip],
    request: Request,
    *,
    context: int = _CONTEXT,
    budget: float | None = None,
    whole: bool = True,
    turn: int = 0,
    now: Callable[[], float] = time.perf_counter,
) -> _Times | None:
    """Time draft steps and verify passes on a short context of the request's first prompt.

    Every phase includes its law (without a user's own processors), its draw and the transfer to
    the host, as in decoding. Verify passes are timed at several lengths for one source only, one of
    known tokens if there is one; for the others they are scaled in proportion.

    Args:
        drafts: the sources; those of known tokens cost verify passes only.
        context: the most tokens of the prompt that are used.
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
    prompt = request.input_ids[0][request.attention_mask[0].bool()][:context]  # (T,)
    known = [source.known for source in sources]
    base = known.index(True) if True in known else 0
    lengths = _KNOWN if known[base] else _LENGTHS
    # two plain steps: after a long round the CPU's caches hold other data
    order = [(base, length) for length in (0, 0, *lengths)]
    for i in range(len(sources)):
        if i != base and not known[i]:
            # first a round that catches up with the tokens of other sources' rounds
            order += [(i, 1), (i, _TYPICAL_LENGTH)]
    order = order[turn % len(order) :] + order[: turn % len(order)]
    growth = sum(length + 1 for _, length in order)
    holds = [source.max_positions for source in sources if source.max_positions]
    room = min([model.max_positions, *holds]) - len(prompt) - max(lengths) - 2
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
        law=Law(theirs, do_sample=request.law.do_sample, rows=1),
        input_ids=prompt[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=prompt.device),
        keys=request.keys[:1],
        max_new_tokens=sweeps * growth + max(lengths) + 2,
        eos=frozenset(),
        stop=None,
        keep_scores=False,
        keep_logits=False,
    )
    watch = Stopwatch(now)
    started = now()
    timed = [source.timed() for source in sources]
    decoder = Decoder(model, timed, watch, probe, max_draft_length=max(lengths) + 1)
    rounds = decoder.rounds()
    next(rounds)
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


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile, as other work on the machine only adds to times."""
    return sorted(seconds)[len(seconds) // 4]


def _table(draft: float, totals: dict[int, float]) -> CostTable:
    """The table in target steps, from seconds of a draft step and of rounds by drafted tokens.

    A round's time without its draft steps counts as its verify pass, so that `round_cost` is what
    was measured. Between measured lengths v is linear.
    """
    step = totals[0]
    lengths = sorted(totals)
    # a longer pass is never cheaper, except by noise
    verifies = rising([totals[length] - length * draft for length in lengths])
    verify = [1.0]
    for (low, low_seconds), (high, high_seconds) in pairwise(zip(lengths, verifies, strict=True)):
        for length in range(low + 1, high + 1):
            part = (length - low) / (high - low)
            seconds = low_seconds + part * (high_seconds - low_seconds)
            verify.append(max(1.0, seconds / step))
    return CostTable(draft / step, tuple(verify), "measured")


def _like(other: CostTable, draft: float, total: float, step: float) -> CostTable:
    """A table scaled from another source's, by seconds of a draft step, a round and a step."""
    verify = (total - _TYPICAL_LENGTH * draft) / step
    part = max(0.0, verify) / other.verify_cost(_TYPICAL_LENGTH + 1)
    return CostTable(
        draft / step, (1.0, *(max(1.0, part * each) for each in other.verify[1:])), "measured"
    )


def _of_rows(table: CostTable, rows: int) -> CostTable:
    """The table of a batch, from that of one row: v depends on the pass's tokens in all."""
    if rows == 1:
        return table
    step = table.verify_cost(rows)
    verify = [table.verify_cost(rows * n) / step for n in range(1, len(table.verify) + 1)]
    return CostTable(table.draft, tuple(verify), table.source)


def analytic(model: Sublayers, draft: DraftOrSkip, rows: int = 1) -> CostTable:
    """The table for a machine that is limited by reading weights, from their bytes.

    The more tokens a pass has, in all rows, the more of a mixture's experts it reads.
    """
    longest = _VERIFIED if model.mixtures else 1
    step, *read = model.pass_bytes([1, *(rows * count for count in range(1, longest + 1))])
    drafted = source_of(model, draft).step_bytes()
    return CostTable.analytic(drafted, [step], [each / read[0] for each in read])


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
) -> list[CostTable]:
    """The table of each source, measured at the first calls and remembered.

    While times are disturbed the next calls measure, too, and all their times count together, so
    that a long-lived process does not keep what one bad moment gave. Until there is a time of every
    kind, tables are analytic.

    Args:
        seconds: to spend on measuring now, at least two sweeps; for callers that want costs.
    """
    law: Law = request.law
    rows = request.input_ids.shape[0]
    kind = (law.do_sample, law.warp is not None, law.reads_history)
    place = (model.execution, model.dtype, model.device, model.weights.vocabulary, model.threads)
    sources = [source_of(model, draft) for draft in drafts]
    keys = [source.key for source in sources]
    with _lock:
        costs = _costs.setdefault(model.model, {}).setdefault((*keys, kind, place), _Costs())
    with costs.lock:  # for this kind of call only
        if costs.times is None:
            costs.file = kept.file_of(model, machine(model), keys, kind)
            if costs.file is not None and (saved := kept.read(costs.file)) is not None:
                costs.times, costs.calls = _Times(**saved), _CALLS
        done = costs.times is not None and costs.times.complete
        left = costs.times is None or not done or costs.times.disturbed()
        if left and costs.calls < (_CALLS if done else _TRIES):
            asked = {"budget": seconds} if seconds else {"whole": False, "turn": 3 * costs.calls}
            found = measure(model, sources, request, **asked)
            if found is not None:
                costs.times = found if costs.times is None else costs.times.merged(found)
                costs.tables.clear()
                if costs.times.complete and not costs.times.disturbed():
                    kept.write(costs.file, costs.times)
            costs.calls += 1
        if rows not in costs.tables:
            known = costs.times is not None and costs.times.complete
            costs.tables[rows] = (
                costs.times.tables(rows)
                if known and costs.times is not None
                else [analytic(model, source, rows) for source in sources]
            )
        return costs.tables[rows]
