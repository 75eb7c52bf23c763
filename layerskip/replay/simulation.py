"""Rounds of decoding without decoding: walks a replay as a controller would; knows no model.

Everything a round depends on is in the replay: what would be drafted from where it starts, whether
the target agrees, how sure the draft is. So the walk takes the engine's steps in the engine's order
and gives its counts; a cost table then prices them.
Letters: N starts, J steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from layerskip.costs.speculation import CostTable, draft_limit
from layerskip.decoding.controllers import Controller, signal_of
from layerskip.replay.drafts import Replay


@dataclass(frozen=True)
class SimulatedRound:
    """Counts of one round, row by row, as in the engine's `Round`."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]


class _Row:
    """One text on its way, from start to start."""

    def __init__(self, replay: Replay, text: int, signal: str) -> None:
        rows = replay.texts[text]
        self.left = replay.trace.texts[text].starts  # tokens still to come
        self.asked = replay.trace.max_new_tokens - 1 - self.left  # by the request, beyond those
        self.start = 0
        self.tokens = replay.tokens[rows].tolist()
        told = replay.margins if signal == "margin" else replay.confidences
        self.confidences = told[rows].tolist()
        self.ends = replay.ends[rows].tolist()
        self.agreeing = replay.matches[rows].cumprod(1).sum(1).tolist()


def simulate(
    replay: Replay,
    controller: Controller,
    texts: Sequence[int] = (0,),
    *,
    max_draft_length: int | None = None,
) -> Iterator[SimulatedRound]:
    """Rounds of decoding texts of the trace together, one row each, as the engine would.

    The controller is reset. The texts' end and the request's length hold as in decoding.

    Args:
        texts: numbers of the texts that share the batch, and the controller.
        max_draft_length: the most tokens any round drafts; the replay's draft length by default.

    Raises:
        ValueError: `max_draft_length` is beyond what was replayed.
    """
    longest = replay.draft_length if max_draft_length is None else max_draft_length
    if not 0 <= longest <= replay.draft_length:
        raise ValueError(
            f"max_draft_length must be in 0..{replay.draft_length}, as far as was replayed; got "
            f"{longest}"
        )
    rows = [_Row(replay, text, signal_of(controller)) for text in texts]
    controller.reset(len(rows))
    while any(row.left for row in rows):
        yield _round(rows, controller, longest)


def _round(rows: Sequence[_Row], controller: Controller, longest: int) -> SimulatedRound:
    drafted = [0] * len(rows)
    limits = [0] * len(rows)
    for number, row in enumerate(rows):
        if row.left:
            # the cache has a slot for every token and every draft, so that it never limits
            allowed = draft_limit(longest, row.left + row.asked, longest + 1)
            limits[number] = min(controller.limit(number, allowed), allowed)
    drafting = [number for number, limit in enumerate(limits) if limit > 0]
    # in lockstep: a controller may learn from one row for another
    while drafting and controller.draft_together(drafting):
        going_on = []
        for number in drafting:
            row, step = rows[number], drafted[number]
            if row.tokens[row.start][step] < 0:  # nothing could be drawn
                continue
            drafted[number] += 1
            sure = row.confidences[row.start][step] if controller.needs_confidence else 1.0
            if (
                not row.ends[row.start][step]
                and drafted[number] < limits[number]
                and controller.keep_drafting(number, sure)
            ):
                going_on.append(number)
        drafting = going_on
    accepted, emitted = [0] * len(rows), [0] * len(rows)
    for number, row in enumerate(rows):
        if row.left:
            agreeing = min(drafted[number], row.agreeing[row.start])
            controller.update(number, drafted[number], agreeing)
            emitted[number] = min(agreeing + 1, row.left)
            accepted[number] = min(agreeing, emitted[number])
            row.start += emitted[number]
            row.left -= emitted[number]
    return SimulatedRound(tuple(drafted), tuple(accepted), tuple(emitted))


def tokens_per_step(rounds: Iterable[SimulatedRound], costs: CostTable) -> float:
    """Tokens emitted by all rows per target step; for one row that is the speedup over plain.

    A round of several rows costs what its longest draft does.
    """
    tokens, cost = 0, 0.0
    for round_ in rounds:
        tokens += sum(round_.emitted)
        cost += costs.round_cost(max(round_.drafted))
    return tokens / cost if cost else 1.0


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
