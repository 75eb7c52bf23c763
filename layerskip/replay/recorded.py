"""A recorded target: the results of drafts and target along the texts of a trace."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from layerskip.decoding.draws import DraftedTokens
from layerskip.decoding.passes import Position
from layerskip.decoding.sources.base import Proposal, State
from layerskip.decoding.target import StepRequest, StepResult, VerifyResult
from layerskip.replay.replayed_drafts import Replay, TextBatch
from layerskip.replay.token_draws import NOTHING
from layerskip.texts.tokens import common_prefix


class _TextDraft:
    """The proposals of a replayed draft from every start of a text."""

    def __init__(self, replay: Replay, text: int) -> None:
        rows = replay.texts[text]
        tokens, ends = replay.tokens[rows], replay.ends[rows]  # (starts, J)
        self.tokens = tokens.tolist()
        self.margins = replay.margins[rows].tolist()
        self.confidences = replay.confidences[rows].tolist()
        self.agreeing = replay.matches[rows].cumprod(1).sum(1).tolist()
        self.longest = replay.longest
        self.match = None if replay.matched is None else replay.matched[rows].tolist()
        offered = (tokens >= 0) & (ends.long().cumsum(1) == ends)
        self.lengths = offered.sum(1).tolist()

    def offer(self, start: int, most: int) -> Proposal:
        if self.match is None:
            return Proposal(min(most, self.longest or most))
        return Proposal.of(self.tokens[start][: min(most, self.lengths[start])], self.match[start])


class _Replayed(State):
    """The state of a source that was replayed from every start of the texts."""

    def __init__(self, batch: TextBatch, texts: Sequence[_TextDraft]) -> None:
        super().__init__(batch)
        self.seats, self.texts = batch.seats, texts

    def offer(self, row: int, most: int) -> Proposal:
        return self.texts[row].offer(self.seats[row].start, most)


class RecordedTarget:
    """The texts of a trace as the target of rounds."""

    branches = False

    def __init__(self, sources: Sequence[Replay], texts: Sequence[int]) -> None:
        trace = sources[0].trace
        self.texts = [trace.texts[text] for text in texts]
        self.batch = batch = TextBatch(trace, self.texts)
        self.rule = batch.draws.rule
        self.drafts = [[_TextDraft(each, text) for text in texts] for each in sources]
        batch.sources = [each.source for each in sources]
        batch.states = [_Replayed(batch, each) for each in self.drafts]
        self.tokens = [text.tokens[text.prompt :].tolist() for text in self.texts]

    def draft(self, drafts: DraftedTokens, rows: Sequence[int], ask: StepRequest) -> StepResult:
        step, tables = drafts.num_steps, self.drafts[ask.source]
        self._source = ask.source
        places = [(tables[row], self.batch.seats[row].start) for row in rows]
        kind = "margins" if ask.signal == "margin" else "confidences"
        return StepResult(
            [[draft.tokens[start][step]] for draft, start in places],
            [getattr(draft, kind)[start][step] for draft, start in places],
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
                agreeing = min(len(drafted), self.drafts[self._source][row].agreeing[start])
            else:
                agreeing = 0
            tokens[row] = [*following, NOTHING][: agreeing + 1]
        return VerifyResult(tokens, [[*range(len(each))] for each in tokens])

    def commit(self, row: int, emitted: Sequence[int], drafts: DraftedTokens | None) -> None:
        self.batch.seats[row].follow()

    def leave(self, rows: Collection[int]) -> None:
        kept = (row for row in self.batch.rows if row not in rows)
        self.batch.rows = {row: place for place, row in enumerate(kept)}
