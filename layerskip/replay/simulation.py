"""Rounds of decoding without a model: the engine's own code, run on a recorded target.

The target gives the results of drafts and target along the texts of a trace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from torch import Tensor

from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import Controller
from layerskip.decoding.decoding_loop import Loop
from layerskip.decoding.passes import Position
from layerskip.decoding.rounds import DraftedTokens, Round, StepRequest, StepResult, VerifyResult
from layerskip.decoding.sources.base import Proposal, State
from layerskip.replay.replayed_drafts import Replay, TextBatch
from layerskip.replay.token_draws import NOTHING
from layerskip.texts.tokens import common_prefix


class _Replayed(State):
    """A replayed source's state, which knows its drafts from every start of some texts."""

    def __init__(self, batch: TextBatch, replay: Replay, texts: Sequence[int]) -> None:
        super().__init__(batch)
        self.seats, self.longest = batch.seats, replay.longest

        def by_text(values: Tensor) -> list[list[Any]]:
            return [values[replay.texts[text]].tolist() for text in texts]

        self.tokens, self.margins = by_text(replay.tokens), by_text(replay.margins)
        self.confidences = by_text(replay.confidences)
        self.agreeing = by_text(replay.matches.cumprod(1).sum(1))
        offered = (replay.tokens >= 0) & (replay.ends.long().cumsum(1) == replay.ends)  # (N, J)
        self.lengths = by_text(offered.sum(1))
        self.matched = None if replay.matched is None else by_text(replay.matched)

    def offer(self, row: int, most: int) -> Proposal:
        if self.matched is None:
            return Proposal(min(most, self.longest or most))
        start = self.seats[row].start
        tokens = self.tokens[row][start][: min(most, self.lengths[row][start])]
        return Proposal.of(tokens, self.matched[row][start])


class RecordedTarget:
    """The texts of a trace as the target of rounds."""

    branches = False

    def __init__(self, sources: Sequence[Replay], texts: Sequence[int]) -> None:
        trace = sources[0].trace
        self.texts = [trace.texts[text] for text in texts]
        self.batch = batch = TextBatch(trace, self.texts)
        self.rule = batch.draws.rule
        batch.sources = [each.source for each in sources]
        self.drafts = [_Replayed(batch, each, texts) for each in sources]
        batch.states = self.drafts
        self.tokens = [text.tokens[text.prompt :].tolist() for text in self.texts]

    def draft(self, drafts: DraftedTokens, rows: Sequence[int], ask: StepRequest) -> StepResult:
        step, source = drafts.num_steps, self.drafts[ask.source]
        self._source = source
        sure = source.margins if ask.signal == "margin" else source.confidences
        starts = [(row, self.batch.seats[row].start) for row in rows]
        return StepResult(
            [[source.tokens[row][start][step]] for row, start in starts],
            [sure[row][start][step] for row, start in starts],
        )

    def prefill(self, ends: Any = None, read: Any = None) -> None:
        self.batch.rows = {row: row for row in range(len(self.texts))}

    def verify(self, drafts: DraftedTokens, positions: Sequence[Position]) -> None:
        pass

    def judge(
        self,
        raw: None,
        positions: Sequence[Position],
        drafts: DraftedTokens | None = None,
        *,
        keep: bool = False,
    ) -> VerifyResult:
        tokens: list[list[int]] = [[] for _ in self.texts]
        for row in dict.fromkeys(row for row, _ in positions):
            if drafts is None:
                tokens[row] = self.tokens[row][:1]
                continue
            start, drafted = self.batch.seats[row].start, drafts.tokens[row]
            following = self.tokens[row][start + 1 :]
            if row in drafts.step_free:
                agreeing = common_prefix(drafted, following)
            elif drafted:
                agreeing = min(len(drafted), self._source.agreeing[row][start])
            else:
                agreeing = 0
            tokens[row] = [*following, NOTHING][: agreeing + 1]
        return VerifyResult(tokens, [[*range(len(each))] for each in tokens])

    def commit(self, row: int, emitted: Sequence[int], drafts: DraftedTokens | None) -> None:
        self.batch.seats[row].follow()

    def leave(self, rows: Collection[int]) -> None:
        kept = (row for row in self.batch.rows if row not in rows)
        self.batch.rows = {row: place for place, row in enumerate(kept)}


def simulate(
    sources: Replay | Sequence[Replay],
    controller: Controller,
    texts: Sequence[int] = (0,),
    *,
    max_draft_length: int | None = None,
) -> Iterator[Round]:
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
    loop = Loop(target, controller, longest=longest)
    loop.prefill()
    for index in count(1):
        if not loop.going:
            return
        loop.compact()
        yield loop.record(loop.round(), index)


def cost_of(rounds: Iterable[Round], tables: Sequence[CostTable]) -> float:
    """The cost of rounds in target steps, by the costs of each source.

    A round of several rows costs as much as its longest draft, with the steps of one source.
    """
    total = 0.0
    for round_ in rounds:
        sources = round_.source if isinstance(round_.source, tuple) else (round_.source,)
        used = [tables[source] for source in sources if source is not None] or tables[:1]
        stepping = max(used, key=lambda table: table.draft)  # other sources need no steps
        total += stepping.round_cost(max(round_.drafted), round_.steps)
    return total
