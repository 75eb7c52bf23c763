"""Rounds of decoding without decoding: walks replays as a controller would.

Everything a round depends on is in the replays: what each draft would propose where it starts,
whether the target agrees, how sure the draft is. So the walk takes the engine's steps in the
engine's order and gives its counts; a cost table then prices them.
Letters: N starts, J steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from layerskip.costs.speculation import Costs, CostTable, draft_limit, remaining
from layerskip.decoding.controller import (
    Chooser,
    Controller,
    Observer,
    Offer,
    first_offer,
    signal_of,
)
from layerskip.decoding.rounds import joint_source
from layerskip.replay.drafts import Replay


@dataclass(frozen=True)
class SimulatedRound:
    """Counts of one round, row by row, and which draft it took, as in the engine's `Round`.

    Attributes:
        context, rows: what the controller was told at its start (see `Controller.begin`).
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    source: int | tuple[int | None, ...] | None = None
    context: int = field(default=0, compare=False)
    rows: int = field(default=1, compare=False)


class _Draft:
    """What one of the drafts would propose from every start of a text."""

    def __init__(self, replay: Replay, text: int, signal: str) -> None:
        rows = replay.texts[text]
        self.tokens = replay.tokens[rows].tolist()
        told = replay.margins if signal == "margin" else replay.confidences
        self.confidences = told[rows].tolist()
        self.entropies = replay.entropies[rows].tolist()
        self.ends = replay.ends[rows].tolist()
        self.agreeing = replay.matches[rows].cumprod(1).sum(1).tolist()
        self.looked_up = replay.found is not None
        self.longest = replay.longest
        if replay.found is not None:
            self.matches = replay.found[rows].tolist()
            ends = replay.ends[rows].long()  # (starts, J)
            offered = (replay.tokens[rows] >= 0) & (ends.cumsum(1) == ends)
            self.lengths = offered.sum(1).tolist()


class _Row:
    """One text on its way, from start to start."""

    def __init__(self, replays: Sequence[Replay], text: int, signal: str) -> None:
        self.trace = trace = replays[0].trace
        self.first = trace.offsets[text]
        self.prompt = trace.texts[text].prompt
        self.left = trace.texts[text].starts  # tokens still to come
        self.asked = trace.max_new_tokens - 1 - self.left  # by the request, beyond those
        self.start = 0
        self.drafts = [_Draft(replay, text, signal) for replay in replays]


def simulate(
    replays: Replay | Sequence[Replay],
    controller: Controller,
    texts: Sequence[int] = (0,),
    *,
    max_draft_length: int | None = None,
) -> Iterator[SimulatedRound]:
    """Rounds of decoding texts of the trace together, one row each, as the engine would.

    The controller is reset. The texts' end and the request's length hold as in decoding.

    Args:
        replays: of one trace, one for each of the drafts that a round may take, in their order.
        texts: numbers of the texts that share the batch, and the controller.
        max_draft_length: the most tokens any round drafts; the replays' draft length by default.

    Raises:
        ValueError: `max_draft_length` is beyond what was replayed.
    """
    several = [replays] if isinstance(replays, Replay) else list(replays)
    replayed = min(replay.draft_length for replay in several)
    longest = replayed if max_draft_length is None else max_draft_length
    if not 0 <= longest <= replayed:
        raise ValueError(
            f"max_draft_length must be in 0..{replayed}, as far as was replayed; got {longest}"
        )
    rows = [_Row(several, text, signal_of(controller)) for text in texts]
    controller.reset(len(rows))
    size = len(rows)
    while going := sum(row.left > 0 for row in rows):
        size = remaining(size, going)
        yield _round(rows, controller, longest, size)


def _round(rows: Sequence[_Row], controller: Controller, longest: int, size: int) -> SimulatedRound:
    going = {number: row for number, row in enumerate(rows) if row.left}
    context = sum(row.prompt + row.start for row in going.values()) // len(going)
    controller.begin(context, size)
    # the cache has a slot for every token and every draft, so that it never limits
    allowed = {
        number: draft_limit(longest, row.left + row.asked, longest + 1)
        for number, row in going.items()
    }
    chooser = controller if isinstance(controller, Chooser) else None
    offers = [_offer(going, allowed, source) for source in range(len(rows[0].drafts))]
    chosen = (chooser.choose if chooser else first_offer)(offers)
    sources: list[int | None] = [None] * len(rows)
    limits = [0] * len(rows)
    for number in going:
        sources[number] = chosen.get(number) if isinstance(chosen, Mapping) else chosen
        most = 0 if (source := sources[number]) is None else offers[source].lengths[number]
        limits[number] = min(controller.limit(number, most), most)
    drafted = _drafted(rows, controller, limits, sources)
    accepted, emitted = [0] * len(rows), [0] * len(rows)
    for number, row in going.items():
        agreeing, source = 0, sources[number]
        if source is not None:
            agreeing = min(drafted[number], row.drafts[source].agreeing[row.start])
        emitted[number] = min(agreeing + 1, row.left)
        accepted[number] = min(agreeing, emitted[number])
        for other, offer in enumerate(offers):
            known = min(offer.lengths[number], emitted[number])
            if chooser is not None and offer.matches is not None and known:
                right = min(known, row.drafts[other].agreeing[row.start])
                chooser.learn(other, number, min(right + 1, known), right)
        controller.update(number, drafted[number], agreeing)
        row.start += emitted[number]
        row.left -= emitted[number]
        if isinstance(controller, Observer) and row.left:
            last = row.first + row.start - 1  # the place that the last token was drawn behind
            sure, entropies = row.trace.certainties
            controller.see_target(number, sure[last], entropies[last])
    counts = tuple(drafted), tuple(accepted), tuple(emitted)
    return SimulatedRound(*counts, joint_source(sources, drafted), context, size)


def _offer(going: Mapping[int, _Row], allowed: Mapping[int, int], source: int) -> Offer:
    """What a draft has to offer to the rows that are still going."""
    drafts = {number: row.drafts[source] for number, row in going.items()}
    if not all(draft.looked_up for draft in drafts.values()):
        most = {n: draft.longest or allowed[n] for n, draft in drafts.items()}
        return Offer({n: min(allowed[n], most[n]) for n in most}, None)
    starts = {number: row.start for number, row in going.items()}
    return Offer(
        {n: min(allowed[n], draft.lengths[starts[n]]) for n, draft in drafts.items()},
        {n: draft.matches[starts[n]] for n, draft in drafts.items()},
    )


def _drafted(
    rows: Sequence[_Row],
    controller: Controller,
    limits: Sequence[int],
    sources: Sequence[int | None],
) -> list[int]:
    """How many tokens each row drafts, in lockstep: a controller may learn from one for another."""
    drafts = [
        None if each is None else row.drafts[each] for row, each in zip(rows, sources, strict=True)
    ]
    drafted = [
        limit if each and each.looked_up else 0 for each, limit in zip(drafts, limits, strict=True)
    ]
    drafting = [n for n, limit in enumerate(limits) if limit > drafted[n]]
    while drafting and controller.draft_together(drafting):
        going_on = []
        for number in drafting:
            row, step, draft = rows[number], drafted[number], drafts[number]
            assert draft is not None
            if draft.tokens[row.start][step] < 0:  # nothing could be drawn
                continue
            drafted[number] += 1
            sure = draft.confidences[row.start][step] if controller.needs_confidence else 1.0
            if controller.needs_confidence and isinstance(controller, Observer):
                controller.see_draft(number, sure, draft.entropies[row.start][step])
            if (
                not draft.ends[row.start][step]
                and drafted[number] < limits[number]
                and controller.keep_drafting(number, sure)
            ):
                going_on.append(number)
        drafting = going_on
    return drafted


def tokens_per_step(rounds: Iterable[SimulatedRound], costs: Costs | Sequence[Costs]) -> float:
    """Tokens emitted by all rows per target step; for one row that is the speedup over plain.

    A round of several rows costs what its longest draft does, and its steps those of one source.

    Args:
        costs: of the draft; of several, those of each, in their order.
    """
    tables = costs if isinstance(costs, Sequence) else [costs]
    tokens, cost = 0, 0.0
    for round_ in rounds:
        tokens += sum(round_.emitted)
        cost += _cost(round_, [each.at(round_.context, round_.rows) for each in tables])
    return tokens / cost if cost else 1.0


def _cost(round_: SimulatedRound, tables: Sequence[CostTable]) -> float:
    if not isinstance(round_.source, tuple):
        return tables[round_.source or 0].round_cost(max(round_.drafted))
    longest: dict[int, int] = {}
    for source, count in zip(round_.source, round_.drafted, strict=True):
        if source is not None:
            longest[source] = max(count, longest.get(source, 0))
    stepping = max(longest, key=lambda source: tables[source].draft)  # the others' tokens are known
    return tables[stepping].round_cost(max(round_.drafted), longest[stepping])


def count_rounds(replay: Replay, draft_length: int, threshold: float = 0.0) -> list[int]:
    """Rounds by tokens drafted, 0..draft_length, of decoding every text of the trace alone.

    The rounds of `Confidence(threshold, draft_length)`; with threshold 0, those of
    `Fixed(draft_length)`. Fast: stops are found for all starts at once.
    """
    if draft_length == 0:
        return [replay.trace.starts]  # plain steps
    counts = [0] * (draft_length + 1)
    agreeing = replay.matches.cumprod(1).sum(1)  # (N,)
    stops = replay.ends.clone()  # (N, J)
    if threshold > 0:
        # in double, as controllers compare; written so that NaN stops
        stops |= ~(replay.confidences.double() >= threshold)
    stops = stops[:, :draft_length]
    nothing = replay.tokens[:, :draft_length] < 0  # drafted before, not with it
    first = torch.where(stops.any(1), stops.int().argmax(1), draft_length - 1)  # (N,)
    free = first + 1 - nothing.gather(1, first[:, None])[:, 0].int()  # (N,) drafted without a limit
    for text, rows in zip(replay.trace.texts, replay.texts, strict=True):
        lengths, agreed = free[rows].tolist(), agreeing[rows].tolist()
        start, asked = 0, replay.trace.max_new_tokens - 1 - text.starts
        while start < text.starts:
            left = text.starts - start
            drafted = min(lengths[start], draft_limit(draft_length, left + asked, draft_length + 1))
            counts[drafted] += 1
            start += min(agreed[start], drafted) + 1
    return counts
