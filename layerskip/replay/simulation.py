"""Rounds of decoding without a model: the engine's own code, run on a recorded target.

Shapes: N starts, J steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from layerskip.costs.speculation import Costs, CostTable, draft_limit
from layerskip.decoding.controller import Controller
from layerskip.decoding.rounds import joint_source
from layerskip.decoding.speculator import Speculator
from layerskip.replay.recorded import RecordedTarget
from layerskip.replay.replayed_drafts import Replay


@dataclass(frozen=True)
class SimulatedRound:
    """Counts of one round by row, and the draft it used, as in the engine's `Round`.

    Attributes:
        context, rows: the controller's inputs at its start (see `Controller.begin`).
        steps: number of draft steps.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    source: int | tuple[int | None, ...] | None = None
    context: int = field(default=0, compare=False)
    rows: int = field(default=1, compare=False)
    steps: int = field(default=0, compare=False)


def simulate(
    sources: Replay | Sequence[Replay],
    controller: Controller,
    texts: Sequence[int] = (0,),
    *,
    max_draft_length: int | None = None,
) -> Iterator[SimulatedRound]:
    """Simulate decoding texts of the trace together, one row each, as the engine would.

    The controller is reset. The texts' ends and the request's limit apply as in decoding.

    Args:
        sources: replays of one trace, one for each draft that a round may use, in order.
        texts: numbers of the texts that share the batch and the controller.
        max_draft_length: maximum number of tokens per round; by default the replays' draft length.

    Raises:
        ValueError: `max_draft_length` exceeds the replayed length.
    """
    several = [sources] if isinstance(sources, Replay) else list(sources)
    replayed = min(each.draft_length for each in several)
    longest = replayed if max_draft_length is None else max_draft_length
    if not 0 <= longest <= replayed:
        raise ValueError(
            f"max_draft_length must be in 0..{replayed}, as far as was replayed; got {longest}"
        )
    target = RecordedTarget(several, texts)
    seats, rows = target.batch.seats, range(len(texts))
    speculator = Speculator(target, controller, seats, longest=longest)
    controller.reset(len(texts))
    while not all(seat.finished for seat in seats):
        speculator.compact()
        going = [row for row in target.rows if not seats[row].finished]
        context = sum(target.lengths[row] for row in going) // len(going)
        outcome = speculator.round()
        yield SimulatedRound(
            drafted=tuple(map(len, outcome.drafts.tokens)),
            accepted=tuple(outcome.accepted.get(row, 0) for row in rows),
            emitted=tuple(len(outcome.emitted.get(row, ())) for row in rows),
            source=joint_source([outcome.source(row) for row in rows]),
            context=context,
            rows=len(target.rows),
            steps=outcome.drafts.num_steps,
        )


def tokens_per_step(rounds: Iterable[SimulatedRound], costs: Costs | Sequence[Costs]) -> float:
    """Tokens emitted by all rows per target step; for one row that is the speedup over plain.

    A round of several rows costs as much as its longest draft, with the steps of one source.

    Args:
        costs: of the draft, or of each of several drafts, in order.
    """
    tables = costs if isinstance(costs, Sequence) else [costs]
    tokens, cost = 0, 0.0
    for round_ in rounds:
        tokens += sum(round_.emitted)
        cost += _cost(round_, [each.at(round_.context, round_.rows) for each in tables])
    return tokens / cost if cost else 1.0


def _cost(round_: SimulatedRound, tables: Sequence[CostTable]) -> float:
    sources = round_.source if isinstance(round_.source, tuple) else (round_.source,)
    used = [tables[source or 0] for source in sources if source is not None] or tables[:1]
    stepping = max(used, key=lambda table: table.draft)  # other sources need no steps
    return stepping.round_cost(max(round_.drafted), round_.steps)


def count_rounds(replay: Replay, draft_length: int, threshold: float = 0.0) -> list[int]:
    """Numbers of rounds by drafted tokens, 0..draft_length, with every text decoded alone.

    The rounds are those of `Confidence(threshold, draft_length)`; with threshold 0, those of
    `Fixed(draft_length)`. Fast, since stops are found for all starts at once.
    """
    if draft_length == 0:
        return [replay.trace.starts]  # plain steps
    counts = [0] * (draft_length + 1)
    agreeing = replay.matches.cumprod(1).sum(1)  # (N,)
    stops = replay.ends.clone()  # (N, J)
    if threshold > 0:
        # In double precision, like controllers; written so that NaN stops.
        stops |= ~(replay.confidences.double() >= threshold)
    stops = stops[:, :draft_length]
    nothing = replay.tokens[:, :draft_length] < 0  # stops before such a token, not after it
    first = torch.where(stops.any(1), stops.int().argmax(1), draft_length - 1)  # (N,)
    free = first + 1 - nothing.gather(1, first[:, None])[:, 0].int()  # (N,) lengths without a limit
    for text, rows in zip(replay.trace.texts, replay.texts, strict=True):
        lengths, agreed = free[rows].tolist(), agreeing[rows].tolist()
        start, asked = 0, replay.trace.max_new_tokens - 1 - text.starts
        while start < text.starts:
            left = text.starts - start
            drafted = min(lengths[start], draft_limit(draft_length, left + asked, draft_length + 1))
            counts[drafted] += 1
            start += min(agreed[start], drafted) + 1
    return counts
