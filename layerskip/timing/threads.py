"""Finds the number of CPU threads on which a model decodes fastest; surplus ones only wait."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.model.opened_model import OpenedModel
from layerskip.timing.kept import file_for, keep, kept

_BUDGET = 0.3  # seconds after which no further sweep starts
_SWEEPS = 5
_PASSES = 3  # in a row with one number of threads; the first starts them and is not timed
_LONG = 0.1  # seconds; a pass this long gains from every thread
_WORTH = 1.1  # minimum factor of speed for more threads


@contextmanager
def cpu_threads(count: int | None) -> Iterator[int]:
    """Set torch's number of CPU threads, if given, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def fitting_threads(model: OpenedModel, *, now: Callable[[], float] = time.perf_counter) -> int:
    """The best number of threads for decoding one prompt, at most torch's own number.

    Times plain passes of one token with 1, 2, 4, ... threads in turn, for a fraction of a second or
    until the result is clear, and keeps the result for later processes. It takes the smallest
    number that is not clearly slower than another.
    It returns torch's own number on other devices, if passes are so long that every thread pays,
    and if other processes need the cores at the moment: that says nothing about later, and passes
    then use fewer threads by themselves.
    """
    most = torch.get_num_threads()
    if most == 1 or model.device.type != "cpu":
        return most
    file = file_for(model, "threads")
    before, _ = kept(file)
    if before in range(1, most + 1):
        return int(before)
    counts = [*(1 << power for power in range((most - 1).bit_length())), most]
    token = torch.tensor([0])  # (1,)
    if model.encoder:
        model = model.reading(model.encode(token[None], torch.ones_like(token[None])))
    passes = Passes(model, [], [Seat(token)], max_draft_length=0)
    passes.prefill()
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    with torch.no_grad(), cpu_threads(None):
        started = now()
        for _ in range(_SWEEPS):
            for count in reversed(counts):
                torch.set_num_threads(count)
                for number in range(_PASSES):
                    start = now()
                    passes.verify(token[None], [(0, 0)])  # at a position that is never committed
                    if number:
                        seconds[count].append(now() - start)
                with model.disturbed():
                    if model.limited:
                        return most
                if count == most and min(seconds[most]) > _LONG:
                    return most
            typical = {count: statistics.median(times) for count, times in seconds.items()}
            best = min(counts, key=typical.__getitem__)
            chosen = next(count for count in counts if typical[count] <= _WORTH * typical[best])
            fewer = [each for count in counts if count < chosen for each in seconds[count]]
            clear = chosen == best and len(seconds[best]) > _PASSES
            if clear and min(fewer, default=math.inf) > _WORTH * max(seconds[best]):
                break
            if now() - started > _BUDGET:
                break
    keep(file, chosen)
    return chosen
