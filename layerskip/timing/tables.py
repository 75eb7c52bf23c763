"""What a draft step and a verify pass cost on this machine, in target steps; the only clock.

Cost tables are measured once per process for each (model, drafts, batch, kind of law), by timing
the phases of real rounds of fixed length, for a fraction of a second; for longer, and again by the
next calls, where other work on the machine shows in the times. Where no clock may decide (the
rejection rule's text depends on the draft lengths) the analytic table of weights serves.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PrefixConstrainedLogitsProcessor

from layerskip.config import SkipConfig
from layerskip.costs.speculation import CostTable, rising
from layerskip.decoding.controllers import Controller
from layerskip.decoding.engine import Decoder, Draft, Request
from layerskip.decoding.followers import Drafter
from layerskip.decoding.laws import Law
from layerskip.decoding.lookup import Found, Lookup, LookupRow, Offer
from layerskip.decoding.trained import TrainedDraft, as_drafter
from layerskip.environment import hardware
from layerskip.model.sublayers import Sublayers

_LENGTHS = (1, 2, 4, 8)  # drafted tokens of the rounds timed; v in between is interpolated
_LOOKED_UP = (1, 3, 7, 15)  # of looked-up drafts, which are longer
_TYPICAL_LENGTH = 4  # of the drafts that c is read off
_SWEEPS = 12  # half as many leave twice the spread
_CONTEXT = 32
_BUDGET = 0.3
_PATIENCE = 4  # times as long where times are disturbed
_REPEATED = 1.25  # times the quickest, the second quickest is on a machine that is left alone
_DEAR = 2.0  # times what its weights say, a draft step costs on a machine that is left alone
_CALLS = 4  # that measure, at most, while times are disturbed

# by kind of call: its times, the tables made of them, and how many calls measured
_tables: weakref.WeakKeyDictionary[
    nn.Module, dict[Any, tuple[_Times | None, list[CostTable], int]]
] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Stopwatch(Controller):
    """A controller that drafts `length` tokens and notes when the last one was there.

    Attributes:
        draft: which of several drafts they come from.
        looked_up: whether that is a lookup.
    """

    needs_confidence = True

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.draft = 0
        self.looked_up = False
        self.length = 0
        self.left = 0
        self.drafted = 0.0

    def choose(self, offers: Sequence[Offer]) -> int | None:
        return self.draft if self.length else None

    def learn(self, draft: int, row: int, known: int, right: int) -> None:
        pass

    def reset(self, rows: int) -> None:
        pass

    def limit(self, row: int, allowed: int) -> int:
        self.left = self.length
        # one more than wanted, so that `keep_drafting` is asked after the last one too
        return self.length + (not self.looked_up) if self.length else 0

    def keep_drafting(self, row: int, confidence: float) -> bool:
        if row == 0:  # the others follow in the same step
            self.left -= 1
            self.drafted = self.now()
        return self.left > 0

    def update(self, row: int, drafted: int, accepted: int) -> None:
        pass


class _Echo(Lookup):
    """A lookup that always finds something: the same token, as often as asked for."""

    def open(self, prompt: Sequence[int]) -> LookupRow:
        return _EchoRow(self)


class _EchoRow(LookupRow):
    def extend(self, tokens: Iterable[int]) -> None:
        pass

    def find(self, longest: int) -> Found:
        return Found([0] * longest, 1)


@dataclass(frozen=True)
class _Times:
    """Seconds of rounds, by draft and tokens drafted, and of their draft steps, by draft."""

    rounds: dict[tuple[int, int], list[float]]
    steps: dict[int, list[float]]
    weights: Sequence[float]
    """c of each draft by its weights alone."""
    base: int
    """The draft whose rounds were timed at several lengths."""

    def disturbed(self) -> bool:
        """Whether other work on the machine shows.

        Times then do not repeat: that work only ever adds, so that the quickest two of each kind
        are alike on a machine that is left alone. Or all of one kind met it: a draft step takes far
        longer than its weights say. That may be true, where products are slow; then nothing is lost
        but the time to look twice.
        """
        kinds = [sorted(times) for times in self.rounds.values()]
        if any(second > _REPEATED * first for first, second, *_ in kinds):
            return True
        plain = typical(self.rounds[self.base, 0])
        return any(
            typical(times) > _DEAR * self.weights[draft] * plain
            for draft, times in self.steps.items()
            if times
        )

    def joined(self, other: _Times) -> _Times:
        """With what another call took of the same kinds."""
        return replace(
            self,
            rounds={key: times + other.rounds[key] for key, times in self.rounds.items()},
            steps={key: times + other.steps[key] for key, times in self.steps.items()},
        )

    def tables(self) -> list[CostTable]:
        """The table of each draft."""
        seconds = {key: typical(times) for key, times in self.rounds.items()}
        step = seconds[self.base, 0]
        costs = [typical(times) if times else 0.0 for times in self.steps.values()]
        totals = {length: each for (draft, length), each in seconds.items() if draft == self.base}
        first = _table(costs[self.base], totals)
        return [
            _like(first, cost, seconds[draft, _TYPICAL_LENGTH], step)
            if draft != self.base and (draft, _TYPICAL_LENGTH) in seconds
            else first
            for draft, cost in enumerate(costs)
        ]


def measure(
    model: Sublayers,
    drafts: Sequence[Draft],
    request: Request,
    *,
    context: int = _CONTEXT,
    budget: float = _BUDGET,
    now: Callable[[], float] = time.perf_counter,
) -> _Times | None:
    """Time draft steps and verify passes on a short context of the request's first prompt.

    Every phase includes its law (without a user's own processors), its draw and the transfer to
    the host, as in decoding.

    Of several drafts one has its verify passes timed at several lengths, a lookup if there is one;
    those of the others are taken to be in proportion.

    Args:
        drafts: whose; of drafts that are looked up only the verify passes cost anything.
        context: tokens of the prompt that are used, at most.
        budget: seconds after which no further sweep starts, behind the second; four times as many
            where times are disturbed.
        now: the clock, in seconds.

    Returns:
        Times, of which `tables()` makes a table for each draft; None where the model's positions
        leave no room to measure.
    """
    drafts = [draft if isinstance(draft, Lookup) else as_drafter(model, draft) for draft in drafts]
    for draft in drafts:
        if isinstance(draft, TrainedDraft):
            draft.longest = None  # steps beyond it cost the same
    rows = request.input_ids.shape[0]
    prompt = request.input_ids[0][request.attention_mask[0].bool()][:context]  # (T,)
    looked_up = [isinstance(draft, Lookup) for draft in drafts]
    base = looked_up.index(True) if True in looked_up else 0
    lengths = _LOOKED_UP if looked_up[base] else _LENGTHS
    # two plain steps: one that follows a long round finds other things in the caches
    order = [(base, length) for length in (0, 0, *lengths)]
    for i, draft in enumerate(drafts):
        if i != base and not looked_up[i]:
            # before the round that is timed, one to see the tokens of those of other drafts
            order += [(i, 1)] if isinstance(draft, Drafter) else []
            order.append((i, _TYPICAL_LENGTH))
    growth = sum(length + 1 for _, length in order)
    holds = [draft.max_positions for draft in drafts if isinstance(draft, Drafter)]
    room = min([model.max_positions, *holds]) - len(prompt) - max(lengths) - 2
    sweeps = min(_SWEEPS, room // growth)
    if sweeps < 2:
        return None
    # a user's own functions may know the request's texts only, and the probe is none of them
    known = [
        processor
        for processor in request.law.processors
        if type(processor).__module__.startswith("transformers.")
        and not isinstance(processor, PrefixConstrainedLogitsProcessor)
    ]
    probe = replace(
        request,
        law=Law(known, do_sample=request.law.do_sample, rows=rows),
        input_ids=prompt.expand(rows, -1),
        attention_mask=torch.ones(rows, len(prompt), dtype=torch.long, device=prompt.device),
        max_new_tokens=sweeps * growth + max(lengths) + 2,
        eos=frozenset(),
        stop=None,
        keep_scores=False,
        keep_logits=False,
    )
    watch = Stopwatch(now)
    timed = [_Echo() if isinstance(draft, Lookup) else draft for draft in drafts]
    decoder = Decoder(model, timed, watch, probe, max_draft_length=max(lengths) + 1)
    rounds = decoder.rounds()
    next(rounds)
    times = _Times(
        rounds={each: [] for each in order},
        steps={number: [] for number in range(len(drafts))},
        weights=[analytic(model, draft).draft for draft in drafts],
        base=base,
    )
    for draft in drafts:
        if isinstance(draft, SkipConfig):
            model.draft(draft)  # copies of weights are no part of a pass
    started = now()
    for sweep in range(sweeps):
        for each in order:
            watch.draft, watch.length = each
            watch.looked_up = looked_up[watch.draft]
            start = now()
            next(rounds)
            times.rounds[each].append(now() - start)
            if watch.length == _TYPICAL_LENGTH and not watch.looked_up:
                times.steps[watch.draft].append((watch.drafted - start) / watch.length)
        taken = now() - started
        # the first sweep meets what is still to be made
        enough = budget if sweep and not times.disturbed() else _PATIENCE * budget
        if sweep and taken > enough:
            break
    return times


def typical(seconds: Sequence[float]) -> float:
    """Lower quartile: other work on the machine only ever adds to a time."""
    return sorted(seconds)[len(seconds) // 4]


def _table(draft: float, totals: dict[int, float]) -> CostTable:
    """The table in target steps from seconds, of a draft step and of whole rounds by drafts.

    What a round costs beyond its draft steps counts as its verify pass, so that `round_cost` is
    what was measured. Between measured lengths v is a straight line.
    """
    step = totals[0]
    lengths = sorted(totals)
    # a longer pass is never cheaper; where it looks so, that was noise
    verifies = rising([totals[length] - length * draft for length in lengths])
    verify = [1.0]
    for (low, low_seconds), (high, high_seconds) in pairwise(zip(lengths, verifies, strict=True)):
        for length in range(low + 1, high + 1):
            part = (length - low) / (high - low)
            seconds = low_seconds + part * (high_seconds - low_seconds)
            verify.append(max(1.0, seconds / step))
    return CostTable(draft / step, tuple(verify), "measured")


def _like(other: CostTable, draft: float, total: float, step: float) -> CostTable:
    """A table from another draft's and from seconds: of a draft step, a typical round, a step."""
    verify = (total - _TYPICAL_LENGTH * draft) / step
    part = max(0.0, verify) / other.verify_cost(_TYPICAL_LENGTH + 1)
    return CostTable(
        draft / step, (1.0, *(max(1.0, part * each) for each in other.verify[1:])), "measured"
    )


def analytic(model: Sublayers, draft: Draft) -> CostTable:
    """The table of a machine limited by reading weights, from their bytes."""
    if isinstance(draft, Lookup):
        return CostTable(0.0, (1.0,), "analytic")
    whole, draft = model.weight_bytes(), as_drafter(model, draft)
    if isinstance(draft, Drafter):
        return CostTable.analytic(draft.step_bytes(), [*whole["sublayers"], whole["head"]])
    skip = draft.resolve(model.num_layers)
    rounded = set(skip.rounded())
    low = model.weight_bytes(None if skip.low is None else skip.low.bits)
    head = model.weight_bytes(skip.head_bits)["head"]
    read = [(low if index in rounded else whole)["sublayers"][index] for index in skip.kept()] + [
        head * model.draft_vocabulary / model.vocabulary
    ]
    return CostTable.analytic(read, [*whole["sublayers"], whole["head"]])


def machine(model: Sublayers) -> dict[str, Any]:
    """Where and how a model's passes are timed, as JSON values; threads are those of a CPU."""
    found: dict[str, Any] = {
        "hardware": hardware(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "execution": model.execution,
    }
    return found if model.threads is None else {**found, "threads": model.threads}


def place(model: Sublayers, rows: int) -> dict[str, Any]:
    """What a cost table holds for: JSON values that go with it into a skip config."""
    return {**machine(model), "batch_size": rows, "draft_vocabulary": model.draft_vocabulary}


def stored(skip: SkipConfig, model: Sublayers, rows: int) -> CostTable | None:
    """The costs that a skip config brings; None where it has none, or says they are of elsewhere.

    Raises:
        ValueError, TypeError: they are no cost table.
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


def cost_tables(model: Sublayers, drafts: Sequence[Draft], request: Request) -> list[CostTable]:
    """The measured tables, measured at the first call in this process and remembered.

    While times are disturbed the next calls, too, measure, and what all of them took counts
    together: a long-lived process does not go on with what one bad moment said.
    """
    law: Law = request.law
    names = tuple(type(processor).__name__ for processor in law.processors)
    rows = request.input_ids.shape[0]
    place = (model.execution, model.dtype, model.device, model.draft_vocabulary, model.threads)
    which = tuple(_key(model, draft) for draft in drafts)
    key = (which, rows, law.do_sample, names, place)
    with _lock:
        known = _tables.setdefault(model.model, {})
        times, tables, calls = known.get(key, (None, [], 0))
        if not tables or (times is not None and calls < _CALLS and times.disturbed()):
            found = measure(model, drafts, request)
            times = found if times is None or found is None else times.joined(found)
            tables = times.tables() if times else [analytic(model, draft) for draft in drafts]
            known[key] = times, tables, calls + 1
        return tables


def _key(model: Sublayers, draft: Draft) -> Any:
    """What a draft's costs are remembered by."""
    if isinstance(draft, Lookup):
        return "lookup"
    return draft.key if isinstance(draft, Drafter) else draft.resolve(model.num_layers)
