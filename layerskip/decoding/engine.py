"""The loop: prefill, then rounds of draft, verify, accept, for rows that advance at their own pace.

Letters: B rows, N positions, K drafted tokens, V vocabulary, W width of the padded prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch.nn.functional as F
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.costs.speculation import remaining, round_sublayer_tokens
from layerskip.decoding.controller import Controller, completed
from layerskip.decoding.draws import DraftedTokens, Draws
from layerskip.decoding.known import KnownTexts
from layerskip.decoding.laws import Law
from layerskip.decoding.passes import Filling, Passes
from layerskip.decoding.rounds import DecodingStats, Round, SourceCounts, joint_source
from layerskip.decoding.sources.base import Source
from layerskip.decoding.speculator import Judged, Speculator
from layerskip.model.handed import Encoded
from layerskip.model.pictures import Pictures
from layerskip.model.sublayers import Sublayers

DraftOrSkip = SkipConfig | Source
"""A source of drafts, or a skip config, which stands for the source of its sublayers."""

Stop = Callable[[int, Tensor], bool]


@dataclass(frozen=True)
class Request:
    """What to decode, in token ids.

    Attributes:
        input_ids: prompts as `generate()` holds them, left-padded, (B, W).
        attention_mask: 1 at real tokens, 0 at pads, (B, W).
        max_new_tokens: tokens each row may grow by, at least 1.
        law: turns logits into the law, for draft and target alike.
        keys: noise-stream key of each row (`laws.stream_key`); unused where the law is greedy.
        rejection: accept by the rejection rule instead of coupled draws.
        eos: tokens that end a row.
        stop: asked after every emitted token with (row, that row's history (1, n)); True ends
            the row. Called in order, once per row and token.
        keep_scores, keep_logits: keep processed scores, raw logits of every emitted token in the
            rounds.
        pictures: in the prompts, if there are any.
        encoded: what an encoder has read; the prompts are then its decoder's.
        progress: told, after every pass over the prompts, how many of their tokens are done, and of
            how many.
        clock: read at the phases of every round, in seconds; None: rounds have no times.
    """

    input_ids: Tensor
    attention_mask: Tensor
    max_new_tokens: int
    law: Law
    keys: Sequence[int] = ()
    rejection: bool = False
    eos: frozenset[int] = frozenset()
    stop: Stop | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    pictures: Pictures | None = None
    encoded: Encoded | None = None
    progress: Callable[[int, int], None] | None = None
    clock: Callable[[], float] | None = None


class Decoder:
    """Decodes one request; iterate over `rounds()`, once.

    Args:
        model: the opened model.
        drafts: sources of drafts; each row of a round takes one of them.
        controller: decides how long to draft, and from what (see `Chooser`); it is reset here.
        request: what to decode.
        max_draft_length: the most tokens any round drafts; 0 is plain decoding.
        known: keys and values of earlier texts to start from, where those of this one are kept,
            too; not for texts with pictures, or of an encoder-decoder.

    Raises:
        TypeError: the controller lacks a part of the protocol.
        ValueError: lengths that the model's positions cannot hold; from `rounds()`, a law without
            any token to draw (NaN logits, or processors that forbid everything).
    """

    def __init__(
        self,
        model: Sublayers,
        drafts: DraftOrSkip | Sequence[DraftOrSkip],
        controller: Controller,
        request: Request,
        *,
        max_draft_length: int,
        known: KnownTexts | None = None,
    ) -> None:
        self.request = request
        self._weights: object = None  # that what is known is of
        self.known = known if request.pictures is None and request.encoded is None else None
        self.controller = controller = completed(controller)
        self.max_draft_length = max_draft_length
        rows, self.width = request.input_ids.shape
        self.rows = range(rows)
        self.device = model.device
        self.drafts = tuple(drafts) if isinstance(drafts, Sequence) else (drafts,)
        self.emitted: list[list[int]] = [[] for _ in self.rows]
        self.passes = Passes(
            model,
            self.drafts,
            [
                ids[mask.bool()]
                for ids, mask in zip(request.input_ids, request.attention_mask, strict=True)
            ],
            max_new_tokens=request.max_new_tokens,
            max_draft_length=max_draft_length,
            emitted=self.emitted,
            pictures=request.pictures,
        )
        self.finished = [False] * rows
        # pads and prompt, then emitted, then drafted tokens: what processors and criteria read
        slack = request.max_new_tokens + max_draft_length + 1
        self.history = F.pad(request.input_ids.to(self.device), (0, slack))  # (B, W + slack)
        self.draws = Draws(
            request.law,
            request.keys,
            rejection=request.rejection,
            history=self.history,
            width=self.width,
            prompt_lengths=self.passes.prompt_lengths,
            emitted=self.emitted,
            native=model.drawn,
            remembers=request.stop is not None or request.law.reads_history,
        )
        self.passes.draws = self.draws.few
        eos = [request.eos] * rows
        self._speculator = Speculator(
            self.passes, self.draws, controller, eos=eos, longest=max_draft_length
        )
        self.stats = DecodingStats(sources=[SourceCounts() for _ in self.drafts])
        self._times: list[float] = []  # of the round in progress
        controller.reset(rows)

    def rounds(self) -> Iterator[Round]:
        """Yield the prefill's round and every round after it, until all rows are finished."""
        try:
            yield self._first_round()
            index = 0
            while not all(self.finished):
                index += 1
                with self.passes.model.disturbed():
                    round_ = self._round(index)
                yield round_
        except GeneratorExit:  # between two rounds: what has been decoded is exact
            for row in self.rows:
                if not self.finished[row]:
                    self._keep_text(row, self.passes.lengths[row])
            raise

    def _first_round(self) -> Round:
        self._mark(begin=True)
        self._mark()
        raw = self._prefill()  # (B, V)
        self._mark()
        positions = [(row, 0) for row in self.rows]
        judged = self._speculator.judge(raw, positions, keep=self.request.keep_scores)
        return self._close(0, judged, [None for _ in self.rows], None, raw)

    def _prefill(self) -> Tensor:
        """The prefill, from what is known on; logits after the prompts, (B, V)."""
        passes, lengths = self.passes, self.passes.prompt_lengths
        filled: list[list[Filling]] = []
        marks: list[set[int]] = [set() for _ in self.rows]  # where to keep texts with windows
        if self.known is not None:
            self._weights = self.known.check(passes.model)
            window = passes.cache.window
            for row, length in enumerate(lengths):
                prompt = passes.prompts[row].tolist()
                parts, same = self.known.start(prompt, window, passes.needed)
                filled.append(parts)
                at = parts[-1].end if parts else 0
                self.stats.num_known_tokens += at
                if window:
                    marks[row] = {length} | ({same} if same > at else set())

        def reached() -> None:
            if self.request.progress is not None:
                self.request.progress(sum(passes.lengths), sum(lengths))
            for row, places in enumerate(marks):
                for place in sorted(each for each in places if each <= passes.lengths[row]):
                    places.remove(place)
                    self._keep_text(row, place)

        return passes.prefill(filled, reached)

    def _keep_text(self, row: int, length: int) -> None:
        if self.known is not None:
            self.known.keep(self._weights, self.passes, row, length)

    def _round(self, index: int) -> Round:
        self._mark(begin=True)
        self._compact()
        left = {
            row: self.request.max_new_tokens - len(self.emitted[row])
            for row in self.rows
            if not self.finished[row]
        }
        plans = self._speculator.plan(left, [state.offer for state in self.passes.states])
        drafts = self._speculator.draft(plans)
        self._mark()
        positions = drafts.positions(left)
        raw = self.passes.verify(drafts.fed, positions, drafts.branches(self.passes.rows))  # (N, V)
        self._mark()
        judged = self._speculator.judge(raw, positions, drafts, keep=self.request.keep_scores)
        sources = [plans[row].source if row in plans else None for row in self.rows]
        return self._close(index, judged, sources, drafts, raw)

    def _compact(self) -> None:
        """Drop finished rows if few others remain; some fill passes up (see `remaining`)."""
        rows = self.passes.rows
        going = [row for row in rows if not self.finished[row]]
        size = remaining(len(rows), len(going))
        if size == len(rows):
            return
        done = [row for row in rows if self.finished[row]]
        done.sort(key=self.passes.lengths.__getitem__)  # the shortest have the least to attend to
        kept = sorted([*going, *done[: size - len(going)]])
        self.stats.num_compactions += 1
        self.stats.compacted_bytes += self.passes.keep(kept)

    def _mark(self, *, begin: bool = False) -> None:
        """Note the time, if the request has a clock."""
        if begin:
            self._times.clear()
        if self.request.clock is not None:
            self._times.append(self.request.clock())

    def _checked(self, token: float, row: int) -> int:
        if token < 0:
            raise ValueError(
                f"row {row} has no token to draw after {len(self.emitted[row])} new tokens: its "
                "scores are NaN or all -inf; check the checkpoint and dtype for NaN logits, or "
                "the logits processors for forbidding every token"
            )
        return int(token)

    def _close(
        self,
        index: int,
        judged: Judged,
        sources: Sequence[int | None],
        drafts: DraftedTokens | None,
        raw: Tensor,
    ) -> Round:
        """Emit each row's tokens until it ends, update the counts, and commit the passes."""
        emitted: list[list[int]] = [[] for _ in self.rows]
        found = [[] for _ in self.rows] if drafts is None else drafts.tokens
        branches = {} if drafts is None else drafts.parents
        drafted, tokens, read = list(map(len, found)), judged.tokens, judged.read
        for row, candidates in enumerate(tokens):
            if not candidates:
                continue
            for token in map(self._checked, candidates, repeat(row)):
                self.draws.remember(row, 0, token)
                self.emitted[row].append(token)
                emitted[row].append(token)
                if self._ends(row, token):
                    self.finished[row] = True
                    break
            self.draws.forget(row, finished=self.finished[row])
            if drafts is None:
                self.passes.tell(row, emitted[row])
            else:
                self._speculator.commit(row, emitted[row], judged, drafts)
            if self.finished[row]:
                self._keep_text(row, self.passes.lengths[row])
        if drafts is not None:
            going = [row for row in self.rows if not self.finished[row]]
            self._speculator.show(raw, {row: read[row][len(emitted[row]) - 1] for row in going})
        accepted = [min(max(len(tokens[row]) - 1, 0), len(emitted[row])) for row in self.rows]
        scores = None if judged.scores is None else _by_row(judged.scores, read, emitted)
        logits = _by_row(raw, read, emitted) if self.request.keep_logits else None
        self._mark()
        round_ = Round(
            index=index,
            tokens=tuple(map(tuple, emitted)),
            drafted=tuple(drafted),
            accepted=tuple(accepted),
            confidences=tuple(map(tuple, drafts.confidences)) if drafts else ((),) * len(drafted),
            signal=self._speculator.signal,
            finished=tuple(self.finished),
            source=joint_source(sources, drafted),
            scores=scores,
            logits=logits,
            times=tuple(self._times) or None,
            drafts=tuple(map(tuple, found)),
            parents=tuple(branches.get(row) for row in self.rows),
            steps=0 if drafts is None else drafts.num_steps,
            wide=0 if drafts is None else drafts.num_wide,
        )
        self.stats.add(round_, lambda row: self._sublayer_tokens(round_, row, drafts))
        return round_

    def _sublayer_tokens(self, round_: Round, row: int, drafts: DraftedTokens | None) -> int:
        """Of a row's round."""
        source = round_.source_of(row)
        state = None if source is None else self.passes.states[source]
        prefix, kept = (0, 0) if state is None else (state.prefix, state.kept)
        steps = None  # as many as tokens
        if drafts is not None and row in drafts.said:
            steps = len(drafts.confidences[row])
        sublayers = self.passes.model.num_sublayers
        return round_sublayer_tokens(round_.drafted[row], kept, prefix, sublayers, steps)

    def _ends(self, row: int, token: int) -> bool:
        request, emitted = self.request, self.emitted[row]
        ended = token in request.eos or len(emitted) >= request.max_new_tokens
        if request.stop is not None:
            # called even at an end: criteria may count the tokens that they have seen
            seen = self.history[row : row + 1, : self.width + len(emitted)]  # (1, W + emitted)
            ended = request.stop(row, seen) or ended
        return ended


def _by_row(
    values: Tensor, read: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    """From values (N, V), those of the emitted tokens: per row (emitted, V)."""
    both = zip(read, emitted, strict=True)
    return tuple(values[places[: len(tokens)]].float() for places, tokens in both)
