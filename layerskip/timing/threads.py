"""On how many threads of a CPU a model decodes fastest; knows no texts.

More threads than a pass can feed only wait for one another, and where other work has a core the
whole team waits for the thread that it keeps from running. So the number is measured, not guessed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from layerskip.decoding.passes import Session
from layerskip.model.sublayers import Sublayers

_BUDGET = 0.3  # seconds after which no further sweep starts
_SWEEPS = 5
_PASSES = 3  # of one number of threads in a row; the first finds a team that is only just made
_LONG = 0.1  # seconds a pass; one that long gains from every thread
_WORTH = 1.1  # times as fast as with fewer threads, or the cores are better left to others


@contextmanager
def cpu_threads(count: int | None) -> Iterator[int]:
    """So many threads of the CPU for torch, if said; as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def fitting_threads(model: Sublayers, *, now: Callable[[], float] = time.perf_counter) -> int:
    """The number of threads to decode one prompt on, at most torch's own; that one afterwards.

    Plain passes of one token with 1, 2, 4, ... threads by turns, for a fraction of a second. The
    smallest number counts that hardly any other beats. Torch's own number where there is nothing
    to choose: on another device, with compiled passes (each number would be compiled for), and
    where passes are so long that every thread pays.

    Args:
        now: the clock, in seconds.
    """
    most = torch.get_num_threads()
    if most == 1 or model.device.type != "cpu" or model.execution == "compiled":
        return most
    counts = [*(1 << power for power in range((most - 1).bit_length())), most]
    token = torch.tensor([0])  # (1,)
    session = Session(model, [], [token], max_new_tokens=1, max_draft_length=0)
    session.prefill()
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    with torch.no_grad(), cpu_threads(None):
        started = now()
        for _ in range(_SWEEPS):
            for count in reversed(counts):
                torch.set_num_threads(count)
                for number in range(_PASSES):
                    start = now()
                    session.verify(token[None], [(0, 0)])  # of a place that is never committed
                    if number:
                        seconds[count].append(now() - start)
                if count == most and min(seconds[most]) > _LONG:
                    return most
            if now() - started > _BUDGET:
                break
    typical = {count: statistics.median(times) for count, times in seconds.items()}
    best = min(typical.values())
    return next(count for count in counts if typical[count] <= _WORTH * best)
