"""The measuring loop: times and compares methods side by side on the same prompts.

The methods decode each batch in turn, in an order that rotates between repeats, so that other
activity on the machine affects all of them alike.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, TypeVar

import torch
from torch import Tensor

from layerskip.backends.captured import capture_seconds
from layerskip.bench.bandwidth import bytes_read
from layerskip.bench.batches import PromptBatch, one_by_one
from layerskip.bench.comparison import Judge
from layerskip.bench.methods import Clock, Decoded, Engine, Method, Task
from layerskip.costs.ratios import compared, decoding_totals, times_over
from layerskip.decoding.rounds import Round
from layerskip.files.records import Key

WARMUP_TOKENS = 16  # enough for every kind of step, and to load this prompt into the caches

T = TypeVar("T")
LOOP_TIMES = 3
LOOP_TOKENS = 24


@dataclass(frozen=True)
class Timed:
    """One call of a method; `repeat` is negative for a warm-up, which is shorter."""

    method: Method
    batch: PromptBatch
    repeat: int
    order: int
    """Its position among the methods of this repeat."""
    decoded: Decoded
    seconds: float
    first: float
    """Seconds from the start of the call to the first new tokens."""
    peak_memory: int | None
    """Bytes in addition to those in use before; None if the device does not report them."""


def device_clock(device: torch.device) -> Clock:
    """A clock in seconds that first waits for the device's pending work."""
    if device.type not in ("cuda", "mps"):
        return time.perf_counter
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.mps.synchronize

    def now() -> float:
        wait()
        return time.perf_counter()

    return now


def within(items: Iterable[T], until: float, least: int = 1) -> Iterator[T]:
    """Yield the first `least` items, and others while there is time for them.

    None starts that would end after `until` (of `time.monotonic`) if as long as the longest so far.
    """
    longest = 0.0
    for number, item in enumerate(items):
        began = time.monotonic()
        if number >= least and began + longest > until:
            return
        yield item
        longest = max(longest, time.monotonic() - began)


def interleaved(
    methods: Sequence[Method],
    batches: Sequence[PromptBatch],
    *,
    repeats: int,
    warmup: int,
    now: Clock,
    done: Container[Key] = (),
    until: float = math.inf,
    note: Callable[[str, float], None] = lambda _what, _share: None,
) -> Iterator[Timed]:
    """Run every method on every batch, warm-ups first, except for those in `done`.

    After the first repeat, none starts unless it ends `within` the time. The garbage collector is
    off during a call, and torch's random state is restored afterwards. `note` is called with the
    current activity, and the completed share.
    """
    turns = product(enumerate(batches), range(-warmup, repeats))
    with _quiet_collector(), torch.random.fork_rng(devices=_gpus(batches)):
        for (number, batch), repeat in within(turns, until, warmup + 1):
            served = [method for method in methods if batch.rows == 1 or not method.one_row]
            turn = (number + repeat) % len(served) if served else 0
            for order, method in enumerate((*served[turn:], *served[:turn])):
                of_method = (method.name, batch.names, batch.rows)
                left = [each for each in range(repeats) if (*of_method, each) not in done]
                if repeat in left or (repeat < 0 and left):
                    what = f"{', '.join(batch.names)}: {method.name}"
                    note(what, (number + max(0, repeat) / repeats) / len(batches))
                    yield _timed(method, batch, repeat, order, now)


def _gpus(batches: Sequence[PromptBatch]) -> set[torch.device]:
    return {batch.input_ids.device for batch in batches if batch.input_ids.is_cuda}


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Exempt present objects from the collections between calls."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _timed(method: Method, batch: PromptBatch, repeat: int, order: int, now: Clock) -> Timed:
    """Time a call, without any captures of passes."""
    while True:
        before = capture_seconds()
        timed = _once(method, batch, repeat, order, now)
        if capture_seconds() == before:
            return timed


def _once(method: Method, batch: PromptBatch, repeat: int, order: int, now: Clock) -> Timed:
    device = batch.input_ids.device
    held = 0
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        # A GPU goes on while the host reads tokens, so it is not waited for during the call.
        inside = time.perf_counter if device.type == "cuda" else now
        start = now()
        decoded = method.decode(batch, repeat, inside, WARMUP_TOKENS if repeat < 0 else None)
        seconds = now() - start
    finally:
        if enabled:
            gc.enable()
    peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else None
    return Timed(method, batch, repeat, order, decoded, seconds, decoded.first - start, peak)


def try_out(methods: Sequence[Method], batches: Sequence[PromptBatch]) -> None:
    """Let every method decode a few tokens, so that errors come before a file is started."""
    for method in methods:
        batch = next((b for b in batches if b.rows == 1 or not method.one_row), None)
        if batch is not None:
            with torch.random.fork_rng(devices=_gpus([batch])):
                method.decode(batch, 0, time.perf_counter, 2)


def benchmark(
    model: Any,
    task: Task,
    methods: Sequence[Method],
    batches: Sequence[PromptBatch],
    *,
    write: Callable[[dict[str, Any]], None],
    text: Callable[[Sequence[int]], str] | None = None,
    now: Clock | None = None,
    bandwidth: Callable[[], float] | None = None,
    **how: Any,
) -> None:
    """Measure methods, and `write` records of calls as soon as all methods have had their turn.

    Args:
        methods: must include plain decoding, the baseline of every speedup.
        text: decodes tokens; if given, records include texts.
        bandwidth: called after every call; its result in bytes per second is part of the record.
        how: further arguments of `interleaved`.
    """
    now = now or device_clock(batches[0].input_ids.device)
    judge = Judge(model, task, methods)
    loop = interleaved(methods, batches, now=now, **how)
    for _, turn in groupby(loop, lambda timed: (timed.batch.names, timed.batch.rows, timed.repeat)):
        calls = [(each, bandwidth and bandwidth()) for each in turn if each.repeat >= 0]
        for timed, _ in calls:
            judge.learn(timed.method, timed.batch, timed.decoded.tokens)
        for timed, read in calls:
            record = record_of(timed, judge, text)
            write(record if read is None else {**record, "read_bandwidth": read})


def timed_drafts(
    drafts: Sequence[Engine], prompts: Sequence[Tensor], **how: Any
) -> tuple[float, dict[str, dict[str, Any]]]:
    """Time drafts in turn with plain decoding on prompts (1, T), from the first new token on.

    Args:
        drafts: the first is the default, with which the others are compared, too.
        how: further arguments of `benchmark`.

    Returns:
        Plain decoding's tokens per second; and by method, its speedup over plain decoding and
        (`over_default`) over the default, with 95% intervals over prompts, the numbers of `prompts`
        and `repeats`, its acceptance rate, and how many of its texts are those of plain decoding.
        NaN and {} if every text ends with its first token, so that there is nothing to time.
    """
    model, task = drafts[0].model, drafts[0].task
    methods, records = [Engine(model, task), *drafts], list[dict[str, Any]]()
    benchmark(model, task, methods, one_by_one(prompts), warmup=1, write=records.append, **how)
    records = [each for each in records if sum(each["new_tokens"]) > sum(each["first_tokens"])]
    if not records:
        return math.nan, {}
    plain, *totals = (decoding_totals(records, method.name) for method in methods)
    timed = {}
    for draft, its in zip(drafts, totals, strict=True):
        mine = [each for each in records if each["method"] == draft.name]
        proposed, accepted = (
            sum(sum(map(sum, each["rounds"][name])) for each in mine)
            for name in ("drafted", "accepted")
        )
        timed[draft.name] = {
            **times_over(its, plain),
            "over_default": times_over(its, totals[0]),
            "prompts": len(its.tokens),
            "repeats": 1 + max(each["repeat"] for each in records),
            "acceptance_rate": accepted / proposed if proposed else None,
            **compared(each for each in mine if each["repeat"] == 0),
        }
    return plain.rate, timed


def record_of(
    timed: Timed, judge: Judge, text: Callable[[Sequence[int]], str] | None = None
) -> dict[str, Any]:
    batch, decoded = timed.batch, timed.decoded
    seconds: dict[str, float | None] = {"total": timed.seconds, "first": timed.first}
    seconds |= dict.fromkeys(("draft", "verify", "other"))
    rounds: dict[str, Any] | None = None
    if decoded.rounds is not None:
        after = decoded.rounds[1:]
        if not batch.input_ids.is_cuda:
            marks = [each.times for each in after if each.times is not None]
            draft = sum(drafted - start for start, drafted, _, _ in marks)
            verify = sum(verified - drafted for _, drafted, verified, _ in marks)
            # The rest: of the rounds, and of the call after them.
            other = max(0.0, timed.seconds - timed.first - draft - verify)
            seconds |= {"draft": draft, "verify": verify, "other": other}
        names = ("source", "drafted", "accepted", "confidences", "steps")
        rounds = dict[str, Any]({name: [getattr(each, name) for each in after] for name in names})
        rounds["sources"] = rounds.pop("source")
        rounds["emitted"] = [[len(tokens) for tokens in each.tokens] for each in after]
        rounds["signal"] = decoded.rounds[0].signal
        if any(parents for each in after for parents in each.parents):
            rounds["depths"] = [[depth(each, row) for row in range(batch.rows)] for each in after]
    comparison = judge.compare(timed.method, [(batch, decoded.tokens)])
    differing = () if comparison is None else comparison.differences
    wrong = {difference.prompt for difference in differing}
    record = {
        "kind": "record",
        "method": timed.method.name,
        "prompts": list(batch.names),
        "category": batch.category,
        "context": batch.context,
        "batch_size": batch.rows,
        "repeat": timed.repeat,
        "order": timed.order,
        "prompt_tokens": batch.attention_mask.sum(-1).tolist(),
        "new_tokens": [len(tokens) for tokens in decoded.tokens],
        "seconds": seconds,
        "first_tokens": decoded.first_tokens,
        "bytes_read": bytes_read(judge.opened, timed.method, batch, decoded),
        "rounds": rounds,
        "peak_memory": timed.peak_memory,
        "repeated_4grams": [repeated_share(tokens) for tokens in decoded.tokens],
        "loops": [loops(tokens) for tokens in decoded.tokens],
        "equal": None if comparison is None else [row not in wrong for row in range(batch.rows)],
        "differences": [{"row": each.prompt, **each.to_dict()} for each in differing],
    }
    if text is not None:
        record["texts"] = [text(tokens) for tokens in decoded.tokens]
        prompts = zip(batch.input_ids, batch.attention_mask, strict=True)
        record["prompt_texts"] = [text(ids[mask.bool()].tolist()) for ids, mask in prompts]
    return record


def depth(round_: Round, row: int) -> int:
    """Maximum number of tokens that a row could have accepted: the longest path in its draft."""
    parents = round_.parents[row]
    if parents is None:
        return round_.drafted[row]
    taken = round_.taken(row)
    depths = {taken[-1] if taken else 0: len(taken)}
    for node, parent in enumerate(parents, 1):
        if parent in depths:
            depths[node] = depths[parent] + 1
    return max(depths.values())


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of the text's 4-grams that occurred in it before; 0 if it has none."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def loops(tokens: Sequence[int]) -> bool:
    """Whether the text ends in a block that occurs at least `LOOP_TIMES` times in a row.

    Together the blocks must have at least `LOOP_TOKENS` tokens.
    """
    text = list(tokens)
    for period in range(1, len(text) // LOOP_TIMES + 1):
        span = max(LOOP_TIMES * period, LOOP_TOKENS)
        if span <= len(text) and text[-span:-period] == text[period - span :]:
            return True
    return False
