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

import torch
from transformers.utils import logging as chatter

from layerskip.bench.methods import Task
from layerskip.checkpoints import encode, load
from layerskip.config import SkipConfig
from layerskip.model.joined import join
from layerskip.prompts import Prompt
from layerskip.search.finding import Search
from layerskip.search.space import Space


@dataclass(frozen=True)
class Asked:
    """What a worker needs to know to take part in a study; pickled for processes of its own."""

    model: str
    device: str
    dtype: str
    trust_remote_code: bool
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

    chatter.set_verbosity_error()
    chatter.disable_progress_bar()  # its terminal is another process's
    with cpu_threads(threads), contextlib.suppress(Orphaned):
        loaded = load(
            asked.model,
            device=asked.device,
            dtype=asked.dtype,
            trust_remote_code=asked.trust_remote_code,
        )
        join(loaded.model)  # for good: nobody else has this model
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


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[int]:
    """So many threads of the CPU for torch; as many as before afterwards."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
