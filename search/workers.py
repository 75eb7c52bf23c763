"""Additional processes for a search's study, each with its own model and trace."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layerskip.api.loading import encode, load
from layerskip.search.objective import OutOfTime
from layerskip.search.pipeline import Search
from layerskip.search.study import SamplerName
from layerskip.texts.prompts import Prompt
from layerskip.timing.threads import cpu_threads


@contextlib.contextmanager
def worker_processes(count: int, threads: int, **job: Any) -> Iterator[None]:
    """Run `work` in `count` processes with `threads` threads each; they end with this context."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    args = (max(1, threads), os.getpid(), time.time())
    started = [
        context.Process(target=work, args=args, kwargs=job, daemon=True) for _ in range(count)
    ]
    # A terminal's Ctrl-C reaches all processes. Those started while it is ignored ignore it for
    # good: workers end with their parent.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in started:
            process.start()
    finally:
        signal.signal(signal.SIGINT, before)
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
            warnings.warn(f"{failed} of {count} workers failed; the others continued", stacklevel=2)


def work(
    threads: int,
    parent: int,
    started: float,
    *,
    loading: Mapping[str, Any],
    prompts: Sequence[Prompt],
    sampler: SamplerName,
    trials: int | None,
    timeout: float | None,
    storage: str,
    study_name: str,
    cost: Mapping[str, Any],
    **how: Any,
) -> None:
    """Take part in the study until it is done, or the parent process is gone.

    Args:
        started: start of the search's time, in seconds since the epoch.
        loading: arguments of `layerskip.api.loading.load`.
        how: further arguments of `Search`.
    """

    class Orphaned(Exception):
        pass

    def look(_: Any) -> None:
        if os.getppid() != parent:
            raise Orphaned

    spent = time.time() - started
    until = math.inf if timeout is None else time.monotonic() + timeout - spent
    with cpu_threads(threads), contextlib.suppress(Orphaned, OutOfTime):
        loaded = load(**loading)
        traced = [encode(loaded.tokenizer, prompt) for prompt in prompts]
        steps = Search(loaded.model, traced, parts=frozenset(), until=until, **how)
        steps.open(storage, study_name)
        steps.price(cost)
        if timeout is not None:
            timeout = until - time.monotonic()
        if timeout is None or timeout > 0:
            steps.run(trials, sampler=sampler, timeout=timeout, on_trial=look)
