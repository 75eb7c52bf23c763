"""Rounds of decoding without decoding: walks replays as a controller would.

Everything a round depends on is in the replays: what each draft would propose where it starts,
whether the target agrees, how sure the draft is. So the walk takes the engine's steps in the
engine's order and gives its counts; a cost table then prices them.
Letters: N starts, J steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from layerskip.costs.speculation import Costs, CostTable, draft_limit, remaining
from layerskip.decoding.controller import Controller, Observer, signal_of
from layerskip.decoding.planning import Plan, Planner, in_common
from layerskip.decoding.rounds import joint_source
from layerskip.decoding.sources.base import Batch, Proposal, State
from layerskip.model.branches import along
from layerskip.replay.drafts import Replay
from layerskip.replay.live import Live, TextBatch
from layerskip.replay.stepping import ReplayDrafter, TextDraft


@dataclass(frozen=True)
class SimulatedRound:
    """Counts of one round, row by row, and which draft it took, as in the engine's `Round`.

    Attributes:
        context, rows: what the controller was told at its start (see `Controller.begin`).
        drafts: of rows whose drafted tokens were known without a step, or chosen behind all steps,
            what they drafted.
        steps, wide: draft steps, and the tokens of a row that they took beyond one each.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    source: int | tuple[int | None, ...] | None = None
    context: int = field(default=0, compare=False)
    rows: int = field(default=1, compare=False)
    drafts: Mapping[int, Plan] = field(default_factory=dict, compare=False)
    steps: int = field(default=0, compare=False)
    wide: int = field(default=0, compare=False)


class _Row:
    """One text on its way, from start to start."""

    def __init__(self, sources: Sequence[Replay | Live], text: int, signal: str) -> None:
        self.trace = trace = sources[0].trace
        self.first = trace.offsets[text]
        own = trace.texts[text]
        self.prompt, self.tokens = own.prompt, own.tokens[own.prompt :].tolist()
        self.left = own.starts  # tokens still to come
        self.asked = trace.max_new_tokens - 1 - self.left  # by the request, beyond those
        self.start = 0
        self.drafts = {
            number: TextDraft(each, text, signal)
            for number, each in enumerate(sources)
            if isinstance(each, Replay)
        }


class _Learners:
    """The states of sources that learn, in one batch of texts."""

    def __init__(self, sources: Sequence[Replay | Live], texts: Sequence[int]) -> None:
        trace = sources[0].trace
        self.batch = TextBatch(trace, [trace.texts[text] for text in texts])
        self.states: dict[int, State] = {
            number: each.source.open(cast(Batch, self.batch))
            for number, each in enumerate(sources)
            if isinstance(each, Live)
        }
        self._readers = [state for state in self.states.values() if state.reads_logits]
        self._logits = [trace.logits(trace.texts[text]) for text in texts if self._readers]
        firsts = [int(trace.texts[text].tokens[trace.texts[text].prompt]) for text in texts]
        self.go_on({row: [first] for row, first in enumerate(firsts)})

    def go_on(self, emitted: Mapping[int, Sequence[int]]) -> None:
        """Let rows emit tokens; the target has computed what is said there."""
        if self._readers:
            seen = [
                (row, tokens[:i]) for row, tokens in emitted.items() for i in range(len(tokens))
            ]
            before = {row: len(self.batch.emitted[row]) for row in emitted}
            raw = [self._logits[row][before[row] + len(drafted)] for row, drafted in seen]
            for state in self._readers:
                state.read(torch.stack(raw), seen)  # (N, V)
        for row, tokens in emitted.items():
            self.batch.emit(self.states.values(), row, tokens)

    def offer(self, source: int, row: int, most: int) -> Proposal:
        return self.batch.offer(self.states[source], row, most)


def simulate(
    sources: Replay | Live | Sequence[Replay | Live],
    controller: Controller,
    texts: Sequence[int] = (0,),
    *,
    max_draft_length: int | None = None,
) -> Iterator[SimulatedRound]:
    """Rounds of decoding texts of the trace together, one row each, as the engine would.

    The controller is reset. The texts' end and the request's length hold as in decoding.

    Args:
        sources: of one trace, one for each of the drafts that a round may take, in their order:
            replays, and sources that learn in every round.
        texts: numbers of the texts that share the batch, and the controller.
        max_draft_length: the most tokens any round drafts; the replays' draft length by default.

    Raises:
        ValueError: `max_draft_length` is beyond what was replayed.
    """
    several = [sources] if isinstance(sources, Replay | Live) else list(sources)
    replayed = min(each.draft_length for each in several)
    longest = replayed if max_draft_length is None else max_draft_length
    if not 0 <= longest <= replayed:
        raise ValueError(
            f"max_draft_length must be in 0..{replayed}, as far as was replayed; got {longest}"
        )
    rows = [_Row(several, text, signal_of(controller)) for text in texts]
    learners = None
    if any(isinstance(each, Live) for each in several):
        learners = _Learners(several, texts)
    controller.reset(len(rows))
    planner = Planner(controller)
    drafter = ReplayDrafter(several[0].trace, controller, [row.drafts for row in rows], longest)
    size = len(rows)
    while going := sum(row.left > 0 for row in rows):
        size = remaining(size, going)
        yield _round(rows, planner, drafter, learners, range(len(several)), size)


def _round(
    rows: Sequence[_Row],
    planner: Planner,
    drafter: ReplayDrafter,
    learners: _Learners | None,
    sources: range,
    size: int,
) -> SimulatedRound:
    controller, longest = planner.controller, drafter.longest
    going = {number: row for number, row in enumerate(rows) if row.left}
    context = sum(row.prompt + row.start for row in going.values()) // len(going)
    # the cache has a slot for every token and every draft, so that it never limits
    allowed = {
        number: draft_limit(longest, row.left + row.asked, longest + 1)
        for number, row in going.items()
    }

    def offer(source: int, number: int, row: _Row) -> Proposal:
        if source in row.drafts:
            return row.drafts[source].offer(row.start, allowed[number])
        assert learners is not None
        return learners.offer(source, number, allowed[number])

    proposals = [
        {number: offer(source, number, row) for number, row in going.items()} for source in sources
    ]
    plans = planner.plan(going, proposals, context=context, size=size)
    found = drafter.draft(plans, [row.start for row in rows])
    drafted = found.counts
    accepted, emitted = [0] * len(rows), [0] * len(rows)
    said: dict[int, list[int]] = {}
    for number, row in going.items():
        plan, following = found.plans.get(number, plans[number]), row.tokens[row.start + 1 :]
        agreeing = 0
        if plan.parents is not None and plan.tokens is not None:
            agreeing = len(along(plan.parents, plan.tokens, following))
        elif plan.tokens is not None:
            agreeing = in_common(plan.tokens, following)
        elif plan.source is not None and drafted[number]:
            agreeing = min(drafted[number], row.drafts[plan.source].agreeing[row.start])
        emitted[number] = min(agreeing + 1, row.left)
        accepted[number] = min(agreeing, emitted[number])
        said[number] = following[: emitted[number]]
        planner.learn(number, said[number])
        drafter.learn(found, number, following[: agreeing + 1])
        controller.update(number, drafted[number], agreeing)
        row.start += emitted[number]
        row.left -= emitted[number]
        if isinstance(controller, Observer) and row.left:
            last = row.first + row.start - 1  # the place that the last token was drawn behind
            sure, entropies = row.trace.certainties
            controller.see_target(number, sure[last], entropies[last])
    if learners is not None:
        learners.go_on(said)
    counts = tuple(drafted), tuple(accepted), tuple(emitted)
    chosen = [plans[number].source if number in plans else None for number in range(len(rows))]
    source = joint_source(chosen, drafted)
    return SimulatedRound(*counts, source, context, size, found.plans, found.steps, found.wide)


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
    sources = round_.source if isinstance(round_.source, tuple) else (round_.source,)
    used = [tables[source or 0] for source in sources if source is not None] or tables[:1]
    stepping = max(used, key=lambda table: table.draft)  # the others' tokens are known
    return stepping.round_cost(max(round_.drafted), round_.steps, round_.wide)


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
