"""A second model as the draft, and its state in a batch; knows no laws, no rounds, no tokenizers.

Whatever it drafts, the text is the target's: a model of another vocabulary only drafts badly. That
both mean the same by a token is for those to check who have the tokenizers (see
`layerskip.vocabulary`).
Letters: R rows of a pass, T tokens, H hidden width, V vocabulary of the target.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from layerskip.decoding.followers import Drafter, Follower, in_chunks
from layerskip.model.sublayers import Pass, Sublayers

if TYPE_CHECKING:
    from layerskip.decoding.passes import Session


class Assistant(Drafter):
    """A second model of the target's vocabulary, with its own way to compute passes.

    Heads may be padded differently: tokens that only one of the models has are not drafted.

    Args:
        model: opened; where it is `trimmed`, drafts have few tokens.
    """

    def __init__(self, model: Sublayers) -> None:
        self.model = model
        self.max_positions = model.max_positions

    def open(self, session: Session) -> Follower:
        """What follows the rows of a batch.

        Raises:
            ValueError: the second model's positions cannot hold the batch.
        """
        return _Second(self.model, session)

    @property
    def key(self) -> Hashable:
        model = self.model
        return (weakref.ref(model.model), model.execution, model.dtype, model.draft_vocabulary)

    def step_bytes(self) -> Sequence[float]:
        read = self.model.weight_bytes()
        head = read["head"] * self.model.draft_vocabulary / self.model.vocabulary
        return [*read["sublayers"], head]


def common(raw: Tensor, target: Sublayers) -> Tensor:
    """An assistant's raw logits (..., any) as a draft's of the target, (..., V)."""
    missing = target.vocabulary - raw.shape[-1]
    raw = raw.to(target.device, target.dtype)
    return F.pad(raw, (0, missing), value=float("-inf")) if missing else raw


def known(tokens: Tensor, assistant: Sublayers, target: Sublayers) -> Tensor:
    """Tokens of the target on the assistant's device; any other in place of those it lacks."""
    tokens = tokens.to(assistant.device)
    if assistant.vocabulary < target.vocabulary:
        tokens = tokens.clamp(max=assistant.vocabulary - 1)
    return tokens


class _Second(Follower):
    """A second model's keys and values."""

    def __init__(self, model: Sublayers, session: Session) -> None:
        super().__init__(session)
        try:
            model.check_lengths(session.prompt_lengths, session.total)
        except ValueError as error:
            raise ValueError(f"the assistant cannot draft here: {error}") from error
        self.model = model
        self.cache = model.new_cache(len(session.prompts), session.slots)
        self.rotary = model.rotary(session.slots, session.total)
        self.blocks = [*model.blocks, model.draft_head]

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        session, model = self.session, self.model
        count = 1 if offset else self.missing()
        if count > 1:
            return common(self._catch_up(count), session.model)
        if not offset:
            self.see()
        starts = [session.lengths[row] + offset for row in session.rows]
        embedded = model.embed(known(tokens, model, session.model)[:, None])  # (R, 1, H)
        raw = model.backend.run(embedded, self._place(starts, 1), self.blocks)
        return common(raw[:, 0], session.model)

    def keep(self, places: Sequence[int], length: int) -> int:
        return self.cache.keep(places, length)

    def _catch_up(self, count: int) -> Tensor:
        """See the last `count` tokens of every row; raw logits behind the last one, (R, any)."""
        model = self.model
        starts, lasts, tokens = self.latest(count)

        def run(chunk: Tensor, first: int) -> Tensor:
            step = self._place([start + first for start in starts], chunk.shape[1])
            return model.run(model.embed(chunk), step, range(model.num_sublayers))

        last = in_chunks(known(tokens, model, self.session.model), lasts, run)  # (R, H)
        self.cache.settled = True
        return model.draft_head(last[None], None)[0]

    def _place(self, starts: Sequence[int], count: int) -> Pass:
        self.cache.place(starts, count)
        return Pass(self.model, self.cache, self.rotary)
