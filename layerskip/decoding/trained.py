"""Trained modules as drafts, and their states in a batch; knows no laws, no rounds, no training.

They read what the target computes on its way (see `Session.tapped`): a block behind an exit the
states there, which are exact for every token that stays; the others the target's last states, which
they have of no token that they draft themselves.
Letters: R rows of a pass, T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.followers import Drafter, Follower, in_chunks
from layerskip.model.backend import Block
from layerskip.model.blocks import ExitBlock, FeatureBlock, Heads, Layer, Streams
from layerskip.model.cache import RowCache
from layerskip.model.families import read_bytes
from layerskip.model.sublayers import Pass, Sublayers

if TYPE_CHECKING:
    from layerskip.decoding.passes import Session

_TOGETHER = 64  # tokens that streams see in the pass that drafts, at most


class TrainedDraft(Drafter):
    """A trained module of a model, by the skip config that names it.

    Attributes:
        block: the module.
        own: what a step runs of it and behind it, in one cache: its layer, if it has one, and the
            draft's head.
        prefix: sublayers of the target that a step goes through before it.
    """

    def __init__(self, model: Sublayers, skip: SkipConfig) -> None:
        assert skip.trained is not None
        self.model, self.skip = model, skip
        self.block, sublayers, _ = model.module(skip)
        self.own: list[Block] = [*sublayers, model.head_for(skip)]
        self.prefix = 0
        if isinstance(self.block, ExitBlock):
            self.prefix = skip.shared_prefix(model.num_layers)
            if len(skip.kept(model.num_layers)) > self.prefix:
                raise ValueError(
                    "an exit block stands behind an early exit: its skip config must have an "
                    "exit_layer, and leave out or round nothing before it"
                )
        if isinstance(self.block, Heads | Streams):
            self.longest = self.block.count
        self.max_positions = model.max_positions

    def open(self, session: Session) -> Follower:
        if isinstance(self.block, Heads):
            return _Heads(session, self, self.block)
        if isinstance(self.block, Streams):
            return _Streams(session, self, self.block)
        if isinstance(self.block, FeatureBlock):
            return _Features(session, self, self.block)
        return _Exit(session, self, self.block)

    @property
    def key(self) -> Hashable:
        return self.skip

    def step_bytes(self) -> Sequence[float]:
        model = self.model
        own = float(read_bytes(self.block, self.skip.module_bits))
        head = model.weight_bytes(self.skip.head_bits)["head"]
        rows = model.head_rows(self.skip)
        head *= (model.vocabulary if rows is None else len(rows.tokens)) / model.vocabulary
        before = model.weight_bytes()["sublayers"][: self.prefix]
        steps = self.longest or 1  # of one pass
        return [*before, own / steps, head / steps]


def as_drafter(model: Sublayers, draft: SkipConfig | Drafter) -> SkipConfig | Drafter:
    """A skip config that names a trained module, as what drafts; any other draft as it is.

    Raises:
        ValueError: the module is none of this model's, or does not fit its skip config.
    """
    if isinstance(draft, SkipConfig) and draft.trained and draft.trained.module:
        return TrainedDraft(model, draft)
    return draft


class _Layered(Follower):
    """A module with a decoder layer, whose keys and values lie in a cache of their own."""

    def __init__(self, session: Session, draft: TrainedDraft, layer: Layer) -> None:
        super().__init__(session)
        slots = session.model.backend.capacity(session.slots)
        self.cache = RowCache(len(session.prompts), slots, (layer.window,))
        self.own, self.blocks, self.head = draft.own, draft.own[:-1], draft.own[-1]

    @abstractmethod
    def inputs(self, starts: Sequence[int], tokens: Tensor) -> Tensor:
        """What the layer is fed with for tokens (R, T) from those places on, (R, T, H)."""

    def catch_up(self) -> Tensor:
        """See all tokens that are known, (R, H) behind the last ones."""
        starts, lasts, tokens = self.latest(self.missing())

        def run(chunk: Tensor, first: int) -> Tensor:
            places = [start + first for start in starts]
            return self.advance(self.inputs(places, chunk), places, self.blocks)

        last = in_chunks(tokens, lasts, run)  # (R, H)
        self.cache.settled = True
        return last

    def advance(self, inputs: Tensor, starts: Sequence[int], blocks: Sequence[Block]) -> Tensor:
        """Carry inputs (R, T, H) of tokens from those places on through the layer, or all of it."""
        session = self.session
        self.cache.place(starts, inputs.shape[1])
        step = Pass(session.model, self.cache, session.rotary)
        return session.model.backend.run(inputs, step, blocks)

    def places(self, offset: int) -> list[int]:
        """Where the token of a step so numbered lies in each row."""
        return [self.session.lengths[row] + offset for row in self.session.rows]

    def keep(self, places: Sequence[int], length: int) -> int:
        return self.cache.keep(places, length)


class _Exit(_Layered):
    def __init__(self, session: Session, draft: TrainedDraft, block: ExitBlock) -> None:
        super().__init__(session, draft, block.layer)
        self.prefix = self.tap = draft.prefix

    def inputs(self, starts: Sequence[int], tokens: Tensor) -> Tensor:
        return self.session.tapped(self.prefix, starts, tokens.shape[1])

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        if not offset:
            if self.missing() > 1:
                return self.head(self.catch_up()[None], None)[0]
            self.see()
        return self.advance(hidden, self.places(offset), self.own)[:, 0]


class _Features(_Layered):
    def __init__(self, session: Session, draft: TrainedDraft, block: FeatureBlock) -> None:
        super().__init__(session, draft, block.layer)
        self.block = block
        self.tap: int = session.model.num_sublayers
        self.feature: Tensor  # of the last token, (R, H)

    def inputs(self, starts: Sequence[int], tokens: Tensor) -> Tensor:
        features = self.session.tapped(self.tap, starts, tokens.shape[1], before=1)
        return self.block.join(features, self.session.model.embed(tokens))

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        if offset:
            inputs = self.block.join(self.feature[:, None], hidden)  # (R, 1, H)
            self.feature = self.advance(inputs, self.places(offset), self.blocks)[:, 0]
        else:
            self.feature = self.catch_up()  # (R, H)
        return self.head(self.feature[None], None)[0]

    def commit(self, row: int, emitted: int, steps: int) -> None:
        # what it saw of its own drafts was fed with its own features
        super().commit(row, emitted, min(steps, 1))


class _Streams(_Features):
    def __init__(self, session: Session, draft: TrainedDraft, block: Streams) -> None:
        super().__init__(session, draft, block)
        # a place behind the longest draft has no slot, and nobody asks for what stands there
        self.longest = self.count = min(block.count, session.slots - session.total - 1)
        self.streams = block.streams

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        if not offset:
            shortest = min(self.session.lengths[row] for row in self.session.rows) + 1
            if not self.cache.settled or self.missing() > min(shortest, _TOGETHER):
                self.catch_up()
            starts, _, known = self.latest(self.missing())
            features = self.session.tapped(self.tap, self.places(0), 1, before=1)  # (R, 1, H)
            ahead = self.streams(features, hidden)[:, 0, : self.count - 1]  # (R, up to K - 1, H)
            inputs = torch.cat([self.inputs(starts, known), ahead], 1)
            out = self.advance(inputs, starts, self.blocks)
            self.raw = self.head(out[:, -self.count :], None)  # (R, up to K, V)
        # the last step of a round may be asked for nothing that is drafted
        return self.raw[:, min(offset, self.count - 1)]


class _Heads(Follower):
    def __init__(self, session: Session, draft: TrainedDraft, block: Heads) -> None:
        super().__init__(session)
        self.block, self.longest = block, draft.longest
        (self.project,) = draft.own
        self.tap: int = session.model.num_sublayers

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        session = self.session
        if not offset:
            places = [session.lengths[row] for row in session.rows]
            features = session.tapped(self.tap, places, 1, before=1)  # (R, 1, H)
            # none of them knows what is drafted: one pass for all
            self.raw = self.project(self.block(features, hidden)[:, 0], None)  # (R, K, V)
        # the last step of a round may be asked for nothing that is drafted
        return self.raw[:, min(offset, self.raw.shape[1] - 1)]

    def keep(self, places: Sequence[int], length: int) -> int:
        return 0
