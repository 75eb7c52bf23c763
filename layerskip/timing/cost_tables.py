"""The costs of draft steps and verify passes on this machine, in target steps.

Rounds of fixed length are timed once per model and kind of law: with one row, with the call's
number of rows, and after a long context if the call nearly reaches that. They give the few numbers
of the cost model (see `costs/cost_model.py`). Other processes use them at once (see `kept.py`), and
correct them by their rounds. A call without costs spends little time on measuring, and the next
calls continue. Under the rejection rule the text depends on draft lengths, which no clock may
affect: there, costs follow from bytes read.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from layerskip.backends.captured import clock
from layerskip.config.skips import SkipConfig
from layerskip.costs.correction import CorrectedCosts, Corrections
from layerskip.costs.cost_model import READ, USUAL, Rates, TimingPoint, Traffic, fitted
from layerskip.costs.speculation import ContextCosts, CostTable, keys_read
from layerskip.decoding.engine import DraftOrSkip, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.base import Source
from layerskip.model.opened_model import OpenedModel
from layerskip.timing.kept import file_for, keep, kept, machine
from layerskip.timing.round_times import BUDGET, CONTEXT, Times, disturbed, quartile, time_rounds

_FAR = 4096  # tokens after which costs are also measured, if calls nearly reach that
_KEYS = 2**28  # maximum bytes of keys and values for that; otherwise fewer tokens
_LEAST = 256  # tokens; if fewer take those bytes, nothing is measured after them
_NEAR = 0.25  # share of that length from which on it is measured
_MOST_ROWS = 32
_CALLS = 4  # maximum number of calls that repeat a measurement while times are disturbed
_TRIES = 20  # maximum number of calls that repeat a measurement while some work is not timed
_SHARE = 0.05  # maximum share of a call's time spent on costs that were not requested
_TOKENS = 64  # tokens of a pass up to which a mixture's experts are counted
_DISTURBED_DAYS = 1.0  # days for which disturbed times are kept


def traffic_of(model: OpenedModel, draft: DraftOrSkip) -> Traffic:
    """The bytes that passes of a model and steps of a source read."""
    source = source_of(model, draft)
    prefix = model.weight_bytes()["sublayers"][: source.prefix] if source.prefix else ()
    return Traffic(
        model.pass_bytes(range(1, _TOKENS + 1 if model.mixtures else 2)),
        model.key_bytes(),
        math.fsum(source.step_bytes()),
        source.key_bytes(),
        math.fsum(prefix),
        source.per_step,
    )


def by_bytes(model: OpenedModel, draft: DraftOrSkip) -> ContextCosts:
    """The costs on a machine limited by reading weights and keys; nothing is timed."""
    traffic = traffic_of(model, draft)
    return ContextCosts(lambda context, rows: Rates().table(traffic, None, context, rows))


class _Calibration:
    """Times of one kind of calls on one model, and corrections by rounds."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.times: dict[TimingPoint, Times] | None = None
        self.file: Path | None = None
        self.calls: Counter[Any] = Counter()
        self.costs: dict[Hashable, ContextCosts] = {}  # by source, from the times
        self.corrections = Corrections()

    def measure(
        self,
        model: OpenedModel,
        sources: Sequence[Source],
        request: Request,
        seconds: float | None,
        now: Callable[[], float],
    ) -> list[ContextCosts]:
        """The costs of sources; times missing work, and disturbed work if costs are requested."""
        if self.times is None:
            self.file = file_for(model, kind_of(request.law))
            self.times = _read(self.file)
        rows = request.input_ids.shape[0]
        context = int(request.attention_mask.sum()) // rows + request.max_new_tokens
        stepping = [source for source in sources if not source.step_free]
        wanted = [
            (place, timed)
            for place in _places(model, rows, context)
            for timed in [stepping if place.context == CONTEXT else []]
            if self._wants(place, [source.key for source in timed], again=seconds is not None)
        ]
        if seconds is None:
            wanted = [] if model.limited else wanted[:1]  # later calls continue
            pass_seconds = model.pass_bytes([1])[0] / READ
            budget = min(BUDGET, _SHARE * request.max_new_tokens * pass_seconds)
        else:
            budget = seconds / max(1, len(wanted))
        for place, timed in wanted:
            self.calls[place, *(source.key for source in timed)] += 1
            times = self.times.setdefault(place, {})
            before = {work: list(each) for work, each in times.items()}
            time_rounds(
                model,
                timed,
                request,
                times,
                place=place,
                budget=budget,
                whole=seconds is not None,
                now=now,
            )
            _rescale(times, before)
        if wanted:
            self.corrections.reset()
            self.costs.clear()
            _write(self.file, self.times)
        missing = {
            each.key: traffic_of(model, each) for each in sources if each.key not in self.costs
        }
        if missing:
            table = self._rates(missing).table
            for key, traffic in missing.items():
                self.costs[key] = ContextCosts(partial(table, traffic, key))
        return [self.costs[source.key] for source in sources]

    def _wants(self, place: TimingPoint, sources: Sequence[Hashable], *, again: bool) -> bool:
        """Whether the next call should time rounds there, for the first time or again.

        Times of another process are not repeated: rounds correct them.
        """
        times, calls = (self.times or {}).get(place, {}), self.calls[place, *sources]
        works = [(None, 1), *((key, 0) for key in sources)]
        if all(times.get(work) for work in works):
            asked = {work: times[work] for work in times if work[0] is None or work in works}
            return again and 0 < calls < _CALLS and disturbed(asked)
        return calls < _TRIES

    def _rates(self, traffic: Mapping[Hashable, Traffic]) -> Rates:
        """Rates from the times so far; assumed ones until a plain step has been timed."""
        seconds = {
            place: {work: quartile(each) for work, each in times.items() if each}
            for place, times in (self.times or {}).items()
            if times.get((None, 1))
        }
        return (
            fitted(seconds, traffic) if TimingPoint(1, CONTEXT) in seconds else Rates(growth=USUAL)
        )


def _read(file: Path | None) -> dict[TimingPoint, Times]:
    """Read the times by place; empty if the file is old or broken, and will be replaced."""
    times: dict[TimingPoint, Times] = {}
    lines, days = kept(file)
    try:
        for rows, context, source, tokens, seconds in lines or ():
            if not 0.0 < seconds < 1e6:
                return {}
            place = times.setdefault(TimingPoint(int(rows), int(context)), {})
            place.setdefault((source, int(tokens)), []).append(float(seconds))
    except (ValueError, TypeError):
        return {}
    return {} if days > _DISTURBED_DAYS and any(map(disturbed, times.values())) else times


def _write(file: Path | None, times: Mapping[TimingPoint, Times]) -> None:
    """Keep times: undisturbed ones as their typical value twice, others as the quickest two."""
    lines = [
        [*place, source, tokens, each]
        for place, works in times.items()
        for (source, tokens), seconds in works.items()
        if source is None or isinstance(source, str)
        for each in (
            sorted(seconds)[:2] if disturbed({(None, 1): seconds}) else 2 * [quartile(seconds)]
        )
    ]
    if lines:
        keep(file, lines)


def _rescale(times: Times, before: Times) -> None:
    """Scale the new times to the pace of earlier ones, since the machine's speed varies."""
    old, plain = before.get((None, 1), []), times.get((None, 1), [])
    new = plain[len(old) :]
    if old and new:
        pace = quartile(old) / quartile(new)
        for work, each in times.items():
            earlier = len(before.get(work, []))
            each[earlier:] = [pace * seconds for seconds in each[earlier:]]


_calibrations: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Calibration]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def kind_of(law: Law) -> tuple[bool, ...]:
    """The properties of a law that affect the time of a round."""
    return law.do_sample, law.warp is not None, law.reads_history


def cost_tables(
    model: OpenedModel,
    drafts: Sequence[DraftOrSkip],
    request: Request,
    *,
    seconds: float | None = None,
    now: Callable[[], float] = clock,
) -> list[CorrectedCosts]:
    """The costs of each source, measured when first requested, and corrected by rounds.

    Args:
        seconds: time to spend on measuring now, at least two sweeps, if the caller needs costs.
    """
    where = (model.execution, model.dtype, model.device, model.weights.vocabulary, model.threads)
    sources = [source_of(model, draft) for draft in drafts]
    with _lock:
        of_model = _calibrations.setdefault(model.model, {})
        calibration = of_model.setdefault((kind_of(request.law), where), _Calibration())

    @cache
    def measured() -> list[ContextCosts]:
        with calibration.lock:
            return calibration.measure(model, sources, request, seconds, now)

    def later(number: int, context: int, rows: int) -> CostTable:
        return measured()[number].at(context, rows)

    if seconds is None:
        costs = [ContextCosts(partial(later, number)) for number in range(len(sources))]
    else:
        costs = measured()  # they contain only numbers, and outlive their models
    return [
        CorrectedCosts(each, calibration.corrections, source.key)
        for each, source in zip(costs, sources, strict=True)
    ]


def place(model: OpenedModel, rows: int) -> dict[str, Any]:
    """The conditions under which a cost table is valid, as JSON values for a skip config."""
    return {**machine(model), "batch_size": rows, "draft_vocabulary": model.weights.vocabulary}


def stored(skip: SkipConfig, model: OpenedModel, rows: int) -> CostTable | None:
    """The costs in a skip config; None if it has none, or they are for other conditions.

    Raises:
        ValueError, TypeError: they are not a cost table.
    """
    if skip.costs is None:
        return None
    here = place(model, rows)
    there = {"draft_vocabulary": model.vocabulary, **skip.costs}  # all tokens unless stated
    elsewhere = {name: there[name] for name in here if there.get(name, here[name]) != here[name]}
    if elsewhere:
        warnings.warn(
            "the skip config's costs are ignored, since they were measured for "
            f"{', '.join(f'{name} {value}' for name, value in elsewhere.items())}; here it is "
            f"{', '.join(str(here[name]) for name in elsewhere)}",
            stacklevel=2,
        )
        return None
    return CostTable.from_dict({"source": "given"} | skip.costs)


def _places(model: OpenedModel, rows: int, context: int) -> Iterator[TimingPoint]:
    """The places where rounds are timed for a batch whose texts reach this length."""
    # With an encoder, only the present rows have encoder states.
    many = 1 if model.read else min(_MOST_ROWS, 1 << (rows - 1).bit_length())
    yield from (TimingPoint(each, CONTEXT) for each in sorted({1, many}))
    # The library's own caches have no free slots.
    token = 0.0 if model.execution == "whole" else keys_read(model.key_bytes(), _FAR)
    if token:
        far = min(_FAR, model.max_positions * 3 // 4, int(_KEYS * _FAR / (many * token)))
        if far >= _LEAST and context >= _NEAR * far:
            yield TimingPoint(many, far)
