"""What a draft step and a verify pass cost on this machine, in target steps; the only clock.

A cost table is measured once per process for each (model, skip config, batch, kind of law), by
timing the phases of real rounds of fixed length. Where no clock may decide (the rejection rule's
text depends on the draft lengths) the analytic table of weight counts serves.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrefixConstrainedLogitsProcessor

from layerskip.config import SkipConfig
from layerskip.engine import Decoder, Request
from layerskip.laws import Law
from layerskip.speculation import CostTable
from layerskip.sublayers import Sublayers

_LENGTHS = (0, 1, 2, 4, 8)  # drafted tokens of the rounds timed; v in between is interpolated
_SWEEPS = 9  # the first one warms up
_CONTEXT = 32  # tokens of the prompt that are used, at most
_BUDGET = 2.0  # seconds after which no further sweep starts

_tables: weakref.WeakKeyDictionary[nn.Module, dict[Any, CostTable]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Stopwatch:
    """A controller that drafts `length` tokens and notes when each phase of a round ends."""

    needs_confidence = True

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.length = 0
        self.times: list[float] = []

    def reset(self, rows: int) -> None:
        pass

    def limit(self, row: int, allowed: int) -> int:
        if row == 0:
            self.times = [self.now()]
        # one more than wanted, so that `keep_drafting` is asked after the last one too
        return self.length + 1 if self.length else 0

    def keep_drafting(self, row: int, confidence: float) -> bool:
        if row == 0:
            self.times.append(self.now())
        return len(self.times) <= self.length

    def update(self, row: int, drafted: int, accepted: int) -> None:
        if row == 0:
            self.times.append(self.now())


def measure(
    model: Sublayers,
    skip: SkipConfig,
    request: Request,
    *,
    now: Callable[[], float] = time.perf_counter,
) -> CostTable | None:
    """Time draft steps and verify passes on a short context of the request's first prompt.

    Every phase includes its law (without a user's own processors), its draw and the transfer to
    the host, as in decoding.

    Args:
        now: the clock, in seconds.

    Returns:
        The table, or None where the model's positions leave no room to measure.
    """
    rows = request.input_ids.shape[0]
    prompt = request.input_ids[0][request.attention_mask[0].bool()][:_CONTEXT]  # (T,)
    growth = sum(length + 1 for length in _LENGTHS)
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
    )
    watch = _Stopwatch(now)
    decoder = Decoder(model, skip, watch, probe, max_draft_length=max(_LENGTHS) + 1)
    rounds = decoder.rounds()
    next(rounds)
    drafts: list[float] = []
    verifies: dict[int, list[float]] = {length: [] for length in _LENGTHS}
    started = now()
    for sweep in range(sweeps):
        for length in _LENGTHS:
            watch.length = length
            next(rounds)
            spans = [end - start for start, end in pairwise(watch.times)]
            if sweep:
                drafts += spans[:-1]
                verifies[length].append(spans[-1])
        if sweep and now() - started > _BUDGET:
            break
    return _table(_typical(drafts), {length: _typical(v) for length, v in verifies.items()})


def _typical(seconds: list[float]) -> float:
    """Lower quartile: other work on the machine only ever adds to a time."""
    return sorted(seconds)[len(seconds) // 4]


def _table(draft: float, verifies: dict[int, float]) -> CostTable:
    """The table in target steps from seconds; between measured lengths v is a straight line."""
    step = verifies[0]
    verify = [1.0]
    for (low, low_seconds), (high, high_seconds) in pairwise(sorted(verifies.items())):
        for length in range(low + 1, high + 1):
            part = (length - low) / (high - low)
            seconds = low_seconds + part * (high_seconds - low_seconds)
            # a longer pass is never cheaper; where it looks so, that was noise
            verify.append(max(verify[-1], seconds / step))
    return CostTable(draft / step, tuple(verify), "measured")


def analytic(model: Sublayers, skip: SkipConfig) -> CostTable:
    """The table of a machine limited by reading weights, from parameter counts."""
    sizes = [
        float(sum(parameter.numel() for parameter in block.parameters()))
        for layer in model.layers
        for block in (layer.self_attn, layer.mlp)
    ]
    head: Tensor = model.model.get_parameter("lm_head.weight")
    return CostTable.analytic(skip.kept(model.num_layers), sizes, float(head.numel()))


def cost_table(model: Sublayers, skip: SkipConfig, request: Request) -> CostTable:
    """The measured table, measured at the first call in this process and remembered."""
    law: Law = request.law
    names = tuple(type(processor).__name__ for processor in law.processors)
    rows = request.input_ids.shape[0]
    place = (model.execution, model.dtype, model.device)
    key = (skip.resolve(model.num_layers), rows, law.do_sample, names, place)
    with _lock:
        tables = _tables.setdefault(model.model, {})
        if key not in tables:
            tables[key] = measure(model, skip, request) or analytic(model, skip)
        return tables[key]
