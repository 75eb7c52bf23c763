"""A second model with another tokenizer, which `transformers` calls universal assisted decoding.

The text is re-encoded with the second model's tokenizer, and what that drafts with the target's
(as SLEM of Timor et al. 2025, arXiv 2502.05202). The second model draws its tokens with the noise
that the target has for the same words.
Shapes: R rows of a pass, V vocabulary of the target, N that of the second model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.assistant import Assistant, AssistantState
from layerskip.decoding.sources.base import Batch, Proposal, Source, State
from layerskip.model.opened_model import OpenedModel, Pass
from layerskip.model.opened_models import sublayers_of
from layerskip.texts.retokenized import Retokenized, Spelling
from layerskip.texts.vocabulary import check_vocabularies

_BEST = 64  # tokens from which the second model draws one
_PASSES = 4  # maximum number of passes for a token
_ROOM = 2  # tokens of the second model for each of the target's that there is room for


class UniversalAssistant(nn.Module):
    """A second model whose tokenizer differs from the target's, to be given as `assistant`.

    Args:
        model: the second model, from `transformers`.
        tokenizer: the target's.
        assistant_tokenizer: the second model's.
    """

    def __init__(self, model: Any, tokenizer: Any, assistant_tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.spellings = Spelling(tokenizer), Spelling(assistant_tokenizer)

    def source(self, target: OpenedModel, tokens: Sequence[int] | None) -> Source:
        """The source that drafts with it, as of a `Drafter`.

        Raises:
            ValueError: it cannot go back in its text, or the drafts are limited to some tokens.
        """
        opened = sublayers_of(self.model)
        if opened.encoder or opened.recurrent or tokens is not None:
            raise ValueError(
                "a second model with another tokenizer must be a decoder without recurrent layers, "
                "as its text is encoded again, and drafts any token: leave draft_vocabulary out"
            )
        return Universal(opened, *self.spellings)


def fitting(model: Any, tokenizer: Any, assistant_tokenizer: Any) -> Any:
    """A second model as `assistant` takes it: itself if both tokenizers have the same tokens."""
    try:
        check_vocabularies(tokenizer, assistant_tokenizer)
    except ValueError:
        return UniversalAssistant(model, tokenizer, assistant_tokenizer)
    return model


class Universal(Assistant):
    """Drafts with a second model that has another tokenizer."""

    def __init__(self, model: OpenedModel, ours: Spelling, theirs: Spelling) -> None:
        self.model, self.ours, self.theirs = model, ours, theirs
        self._firsts: dict[int, int] = {}

    def open(self, batch: Batch) -> State:
        return _UniversalState(self, batch)

    @property
    def words(self) -> str:
        return f"{super().words}, with another tokenizer"

    def own_bytes(self) -> float:
        return _ROOM * super().own_bytes()

    def first(self, token: int) -> int:
        """The target's first token of a token's text."""
        if token not in self._firsts:
            self._firsts[token] = next(iter(self.ours.encode(self.theirs.text([token]))), 0)
        return self._firsts[token]


class _UniversalState(State):
    """The rows of a batch, with their texts in the second model's tokens."""

    def __init__(self, source: Universal, batch: Batch) -> None:
        super().__init__(batch)
        self.source = source
        self.texts = [Retokenized(source.ours, source.theirs) for _ in batch.seats]
        self.there = Batch()  # the parts that are read
        self.there.model = source.model
        self.there.seats = [Seat(torch.zeros(0)) for _ in batch.seats]
        self._make_room()
        self.drafting = AssistantState(source.model, self.there)
        self.caches = self.drafting.caches

    def _make_room(self) -> None:
        self.room = min(_ROOM * self.batch.slots, self.source.model.max_positions)
        self.there.slots = self.there.total = self.room

    def begin(self, row: int) -> None:
        self.texts[row] = Retokenized(self.source.ours, self.source.theirs)
        self.drafting.begin(row)

    def resized(self) -> None:
        self._make_room()
        self.drafting.resized()

    def offer(self, row: int, most: int) -> Proposal:
        return Proposal(most if len(self.texts[row].tokens) < self.room else 0)

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        batch = self.batch
        if not offset:
            self.passes, self.there.rows = 0, batch.rows
            self.room = min(self.there.slots, self.drafting.cache.slots)
            for row in batch.rows:
                self._follow(row)
        texts = [self.texts[row] for row in batch.rows]
        longest = max(self.there.seats[row].length for row in batch.rows)
        for _ in range(_PASSES):
            full = longest + self.passes >= self.room
            if full or all(text.settled(offset) for text in texts):
                break
            self._pass(hidden, step)
        size = batch.model.vocabulary
        raw = torch.full((len(texts), size), float("-inf"), dtype=batch.model.dtype)  # (R, V)
        for place, text in enumerate(texts):
            for token in text.offered[offset : offset + 1]:
                raw[place, token : token + 1] = 0.0
        return raw.to(batch.model.device)

    def _follow(self, row: int) -> None:
        """Bring a row's text up to date, with the number of first tokens whose keys stay."""
        batch, text, seen = self.batch, self.texts[row], self.drafting.seen
        seen[row] += max(0, len(text.drafted) - 1)  # all but the last were fed
        seat, there = batch.seats[row], self.there.seats[row]
        whole = [*seat.prompt.tolist(), *seat.emitted]
        seen[row] = min(seen[row], text.follow(whole[: seat.length + 1]))
        if len(text.tokens) >= self.room:
            text.ended, seen[row] = True, 0
        there.emitted = text.tokens[:1] if text.ended else text.tokens
        there.length = len(there.emitted) - 1

    def _pass(self, hidden: Tensor, step: Pass) -> None:
        """Feed every row's last token to the second model, and draw the next one."""
        texts = {row: self.texts[row] for row in self.batch.rows}
        last = [(text.drafted or text.tokens)[-1] for text in texts.values()]
        fed = torch.tensor(last, device=self.source.model.device)  # (R,)
        raw = self.drafting.step(fed, hidden, step, self.passes)  # (R, N)
        values, best = raw.float().topk(min(_BEST, raw.shape[1]))  # (R, n) each
        drawn = zip(texts.items(), best.tolist(), values.tolist(), strict=True)
        for (row, text), tokens, logits in drawn:
            ours = [self.source.first(token) for token in tokens]
            scores = self.batch.scores(row, len(text.offered), ours, logits) or logits
            text.draft(tokens[scores.index(max(scores))])
        self.passes += 1
