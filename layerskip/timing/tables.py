"""The costs of draft steps and verify passes on this machine, in target steps.

Rounds of fixed length are timed once for each model, set of sources and kind of law, by number of
rows, behind a short context and a long one. In between, costs follow the bytes of keys and values.
They serve other processes through a small file (see `kept.py`). A call without costs spends little
time on measuring (`rounds.BUDGET`); the next calls continue, and times that other work on the
machine has disturbed are taken again. Under the rejection rule the text depends on draft lengths,
which a clock must not decide; there the costs are those of the bytes of weights and keys.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from layerskip.config import SkipConfig
from layerskip.costs.observed import HealingCosts, healing
from layerskip.costs.speculation import ContextCosts, CostTable, keys_read
from layerskip.decoding.engine import DraftOrSkip, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.sources import source_of
from layerskip.environment import hardware
from layerskip.model.sublayers import Sublayers
from layerskip.timing import kept, rounds
from layerskip.timing.analytic import Read, by_bytes
from layerskip.timing.rounds import CONTEXT, Kind, Seconds, Times, measure

_FAR = 4096  # tokens behind which costs are measured, too, where calls get near that
_KEYS = 2**28  # or fewer, so that keys and values take at most so many bytes
_LEAST = 256  # tokens; where fewer take those bytes, nothing is measured behind them
_NEAR = 0.25  # of that length: from there on it is measured
_MOST_ROWS = 32
_CALLS = 4  # that measure at most, while times are disturbed
_TRIES = 20  # calls that measure at most, while a kind of time is missing


class _Costs:
    """The costs of one kind of call: times, their file, calls that measured, tables."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.times: dict[Kind, Times] = {}
        self.file: Path | None = None
        self.read = False
        self.calls: dict[Kind, int] = {}
        self.asked: set[Kind] = set()  # measured by calls for just that
        self.tables: list[HealingCosts] | None = None
        self.guessed: dict[int, list[HealingCosts]] = {}  # by rows, until they are measured

    def wants(self, kind: Kind) -> bool:
        """Whether the next call is to measure these rounds, again or for the first time."""
        times = self.times.get(kind)
        done = times is not None and times.complete
        left = times is None or not done or times.disturbed()
        return left and self.calls.get(kind, 0) < (_CALLS if done else _TRIES)

    def measured(self) -> dict[Kind, Times]:
        """The times of which there is one of every sort, first those behind few tokens."""
        done = {kind: times for kind, times in sorted(self.times.items()) if times.complete}
        return {kind: times for kind, times in done.items() if Kind(kind.rows, CONTEXT) in done}


_costs: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Costs]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _measured(times: Mapping[Kind, Sequence[Seconds]], read: Read, number: int) -> ContextCosts:
    """The costs of a source from what was measured, in seconds, behind few tokens or many.

    A pass takes a + b x (bytes of the keys and values it reads). Where b is not known, keys are
    taken to cost what weights do. A pass over several rows takes as long as one over as many tokens
    of other rows, and what every row costs beside its tokens. That is told by the passes over as
    many tokens in the next smaller and the next larger number of rows that were measured.
    """

    def known(rows: int, context: int) -> Seconds:
        low, *others = sorted(kind for kind in times if kind.rows == rows)
        near, weight = times[low][number], times[low][number].passes[0] / read.step
        far = times[others[-1]][number] if others else None

        def more(keys: Mapping[int | None, float], end: int) -> float:
            return rows * max(0.0, keys_read(keys, end) - keys_read(keys, low.context))

        def at(keys: Mapping[int | None, float], first: float, last: float | None) -> float:
            if last is None:
                return first + weight * more(keys, context)
            spread = more(keys, others[-1].context)
            return first + max(0.0, last - first) * more(keys, context) / max(spread, 1.0)

        counts = range(1, len(near.passes) + 1)
        return Seconds(
            at(read.draft_keys, near.draft, far and far.draft) if near.draft else 0.0,
            [at(read.keys, near.over(count), far and far.over(count)) for count in counts],
        )

    def table(context: int, rows: int) -> CostTable:
        sizes = sorted({kind.rows for kind in times})
        few = max((size for size in sizes if size <= rows), default=sizes[0])
        many = min((size for size in sizes if size >= rows), default=few)
        low, high = known(few, context), known(many, context)
        counts = range(1, max(len(low.passes), len(high.passes)) + 1)
        if rows > many:  # than were measured
            part = rows / few
            seconds = [low.over(part * count) for count in counts]
            draft = low.draft * low.over(part) / low.over(1)
        else:
            part = (rows - few) / (many - few) if many > few else 0.0
            beside = high.over(1) - low.over(many / few)
            seconds = [
                low.over(rows * count / few) + part * beside
                if rows * count <= many
                else high.over(rows * count / many) - (1 - part) * beside
                for count in counts
            ]
            draft = low.draft + part * (high.draft - low.draft)
            # times that other work has disturbed may lie on lines that fall below all of them
            least = min(low.over(1), high.over(1))
            seconds = [max(least, each) for each in seconds]
        return Seconds(draft, seconds).table()

    return ContextCosts(table)


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
) -> list[HealingCosts]:
    """The costs of each source, measured at the first calls and remembered.

    Rounds of one row and of as many rows as the call has are timed, and such rounds behind a long
    context where the call gets near that. While times are disturbed the next calls measure, too,
    and all their times count together, so that a long-lived process does not keep what one bad
    moment gave. Until there is a time of every sort, costs are those of the bytes read.

    Args:
        seconds: to spend on measuring now, at least two sweeps; for callers that want costs.
    """
    law: Law = request.law
    rows = request.input_ids.shape[0]
    context = int(request.attention_mask.sum()) // rows + request.max_new_tokens
    kind = (law.do_sample, law.warp is not None, law.reads_history)
    place = (model.execution, model.dtype, model.device, model.weights.vocabulary, model.threads)
    sources = [source_of(model, draft) for draft in drafts]
    keys = [source.key for source in sources]
    with _lock:
        costs = _costs.setdefault(model.model, {}).setdefault((*keys, kind, place), _Costs())
    with costs.lock:  # for this kind of call only
        if not costs.read:
            costs.read = True
            costs.file = kept.file_of(model, machine(model), keys, kind)
            for saved in () if costs.file is None else kept.read(costs.file):
                known = Kind(saved.pop("rows"), saved.pop("context"))
                costs.times[known], costs.calls[known] = Times(**saved), _CALLS
        wanted = [each for each in _kinds(model, rows, context) if costs.wants(each)]
        if seconds is None:  # who asked for costs before wants no call to take its time for them
            wanted = [each for each in wanted if each not in costs.asked and not model.limited]
        budget, started = rounds.BUDGET if seconds is None else seconds, time.perf_counter()
        for number, each in enumerate(wanted):
            left = budget + started - time.perf_counter()
            asked = {"budget": left / (len(wanted) - number), **each._asdict()}
            if seconds is None:
                asked |= {"whole": False, "turn": 3 * costs.calls.get(each, 0)}
            found = measure(model, sources, request, **asked)
            costs.calls[each] = costs.calls.get(each, 0) + 1
            if seconds is not None:
                costs.asked.add(each)
            if found is not None:
                before = costs.times.get(each)
                costs.times[each] = found if before is None else before.merged(found)
                costs.tables = None
        measured = costs.measured()
        if costs.tables is None and measured:
            if wanted:
                quiet = {kind: times for kind, times in measured.items() if not times.disturbed()}
                kept.write(costs.file, quiet)
            seconds_of = {each: times.seconds() for each, times in measured.items()}
            costs.tables = healing(
                _measured(seconds_of, Read.of(model, source), number)
                for number, source in enumerate(sources)
            )
        if costs.tables is None and rows not in costs.guessed:
            costs.guessed[rows] = healing(by_bytes(model, source, rows) for source in sources)
        return costs.tables or costs.guessed[rows]


def _kinds(model: Sublayers, rows: int, context: int) -> Iterator[Kind]:
    """The rounds whose times tell the costs of a batch that gets so long."""
    # what an encoder has read is read for the rows that there are
    many = 1 if model.read else min(_MOST_ROWS, 1 << (rows - 1).bit_length())
    yield from (Kind(each, CONTEXT) for each in sorted({1, many}))
    # compiled passes would be compiled anew, and the library's own caches have no free slots
    token = 0.0 if model.execution in ("compiled", "whole") else keys_read(model.key_bytes(), _FAR)
    if token:
        far = min(_FAR, model.max_positions * 3 // 4, int(_KEYS * _FAR / (many * token)))
        if far >= _LEAST and context >= _NEAR * far:
            yield Kind(many, far)
