"""What a draft step and a verify pass cost on this machine, in target steps; the only clock.

A cost table is measured once per process for each (model, skip config, batch, kind of law), by
timing the phases of real rounds of fixed length. Where no clock may decide (the rejection rule's
text depends on the draft lengths) the analytic table of weight counts serves.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PrefixConstrainedLogitsProcessor

from layerskip.config import SkipConfig
from layerskip.costs.speculation import CostTable, rising
from layerskip.decoding.controllers import Controller
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.lookup import Found, Lookup, LookupRow
from layerskip.environment import hardware
from layerskip.model.sublayers import Sublayers

_LENGTHS = (0, 1, 2, 4, 8)  # drafted tokens of the rounds timed; v in between is interpolated
_TYPICAL_LENGTH = 4  # of the drafts that c is read off
_SWEEPS = 17  # the first one warms up; half as many leave twice the spread
_CONTEXT = 32  # tokens of the prompt that are used, at most
_BUDGET = 2.0  # seconds after which no further sweep starts

_tables: weakref.WeakKeyDictionary[nn.Module, dict[Any, CostTable]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Stopwatch(Controller):
    """A controller that drafts `length` tokens and notes when the last one was there."""

    needs_confidence = True

    def __init__(self, now: Callable[[], float], *, looked_up: bool = False) -> None:
        self.now = now
        self.looked_up = looked_up
        self.length = 0
        self.left = 0
        self.drafted = 0.0

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


def measure(
    model: Sublayers,
    draft: SkipConfig | Lookup,
    request: Request,
    *,
    now: Callable[[], float] = time.perf_counter,
) -> CostTable | None:
    """Time draft steps and verify passes on a short context of the request's first prompt.

    Every phase includes its law (without a user's own processors), its draw and the transfer to
    the host, as in decoding.

    Args:
        draft: whose; of drafts that are looked up only the verify passes cost anything.
        now: the clock, in seconds.

    Returns:
        The table, or None where the model's positions leave no room to measure.
    """
    rows = request.input_ids.shape[0]
    prompt = request.input_ids[0][request.attention_mask[0].bool()][:_CONTEXT]  # (T,)
    # an untimed plain step first: one that follows a long round finds other things in the caches
    order = (0, *_LENGTHS)
    growth = sum(length + 1 for length in order)
    sweeps = min(_SWEEPS, (model.max_positions - len(prompt) - max(_LENGTHS) - 2) // growth)
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
        max_new_tokens=sweeps * growth + max(_LENGTHS) + 2,
        eos=frozenset(),
        stop=None,
        keep_scores=False,
        keep_logits=False,
    )
    looked_up = isinstance(draft, Lookup)
    watch = Stopwatch(now, looked_up=looked_up)
    timed = _Echo() if looked_up else draft
    decoder = Decoder(model, timed, watch, probe, max_draft_length=max(_LENGTHS) + 1)
    rounds = decoder.rounds()
    next(rounds)
    drafts: list[float] = []
    totals: dict[int, list[float]] = {length: [] for length in _LENGTHS}
    for sweep in range(sweeps):
        for number, length in enumerate(order):
            watch.length = length
            start = now()
            next(rounds)
            if sweep and number:
                totals[length].append(now() - start)
                if length == _TYPICAL_LENGTH and not looked_up:
                    drafts.append((watch.drafted - start) / length)
        if not sweep:
            started = now()  # what the first one compiled is no part of the budget
        elif now() - started > _BUDGET:
            break
    return _table(
        typical(drafts) if drafts else 0.0, {length: typical(t) for length, t in totals.items()}
    )


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


def analytic(model: Sublayers, draft: SkipConfig | Lookup) -> CostTable:
    """The table of a machine limited by reading weights, from their bytes."""
    if isinstance(draft, Lookup):
        return CostTable(0.0, (1.0,), "analytic")
    skip = draft.resolve(model.num_layers)
    whole, rounded = model.weight_bytes(), set(skip.rounded())
    low = whole if skip.low is None else model.weight_bytes(skip.low.bits)
    head = low["head"] if skip.low is not None and skip.low.head else whole["head"]
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


def cost_table(model: Sublayers, draft: SkipConfig | Lookup, request: Request) -> CostTable:
    """The measured table, measured at the first call in this process and remembered."""
    law: Law = request.law
    names = tuple(type(processor).__name__ for processor in law.processors)
    rows = request.input_ids.shape[0]
    place = (model.execution, model.dtype, model.device, model.draft_vocabulary)
    which = draft.resolve(model.num_layers) if isinstance(draft, SkipConfig) else "lookup"
    key = (which, rows, law.do_sample, names, place)
    with _lock:
        tables = _tables.setdefault(model.model, {})
        if key not in tables:
            tables[key] = measure(model, draft, request) or analytic(model, draft)
        return tables[key]
