"""The processes that share a study: what each is asked, how it begins; knows no flags, no files.

Each loads the model and takes the trace for itself; what they share is the study, with its trials,
seeds and costs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from layerskip.bench.methods import Task
from layerskip.checkpoints import encode, load
from layerskip.config import SkipConfig
from layerskip.prompts import Prompt
from layerskip.search.finding import Search
from layerskip.search.space import Space
from layerskip.timing.threads import cpu_threads


@dataclass(frozen=True)
class Asked:
    """What a worker needs to know to take part in a study; pickled for processes of its own."""

    loading: Mapping[str, Any]
    """Arguments of `layerskip.checkpoints.load`."""
    traced: tuple[Prompt, ...]
    task: Task
    space: Space
    trials: int | None
    timeout: float | None
    given: Mapping[str, SkipConfig]
    storage: str
    study_name: str
    cost: Mapping[str, Any]


def work(asked: Asked, threads: int, parent: int, started: float) -> None:
    """A process that takes part in the study until it is done, or its parent is gone.

    `started` is when the search's time began to count, in seconds since the epoch.
    """

    class Orphaned(Exception):
        pass

    def look(_at: Any) -> None:
        if os.getppid() != parent:
            raise Orphaned

    with cpu_threads(threads), contextlib.suppress(Orphaned):
        loaded = load(**asked.loading)
        traced = [encode(loaded.tokenizer, prompt) for prompt in asked.traced]
        going = Search(loaded.model, traced, task=asked.task, space=asked.space)
        going.open(asked.storage, asked.study_name, asked.given)
        going.price(asked.cost)
        timeout = None if asked.timeout is None else asked.timeout - (time.time() - started)
        if timeout is None or timeout > 0:
            going.run(asked.trials, timeout=timeout, told=look)


@contextlib.contextmanager
def sharing(asked: Asked, count: int, threads: int) -> Iterator[None]:
    """So many processes that share the study, gone when this ends."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    asking = (asked, max(1, threads), os.getpid(), time.time())
    started = [context.Process(target=work, args=asking, daemon=True) for _ in range(count)]
    with _ignored(signal.SIGINT):  # a terminal's Ctrl-C reaches them all; theirs is to be ended
        for process in started:
            process.start()
    try:
        yield
    except BaseException:
        for process in started:
            process.terminate()
        raise
    finally:
        for process in started:
            process.join()
        failed = sum(process.exitcode not in (0, -signal.SIGTERM) for process in started)
        if failed:
            warnings.warn(f"{failed} of {count} workers failed; the others went on", stacklevel=2)


@contextlib.contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    """A signal is ignored meanwhile, and for good by processes that are started meanwhile."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
