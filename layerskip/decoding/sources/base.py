"""What may draft: a `Source`, and its `State` in one batch.

A source proposes tokens for the rows of a batch. What it proposes never changes the text, only the
pace. The loop, the passes, the timing and the replays ask these two classes and nothing else, so
that a new kind of source is one new file, perhaps a user's own: `docs/sources.md` has one.
Letters: R rows of a pass, T tokens, H hidden width of the target, V its vocabulary.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.acceptance import PRIOR
from layerskip.decoding.sources.steps import Steps, Texts
from layerskip.model.sublayers import Pass, Sublayers


class Batch(Protocol):
    """What a state may read of the batch that it drafts for; all of it is the engine's to change.

    Attributes:
        model: the target.
        prompts: token ids of each row, pads left out, (length,) each.
        emitted: tokens that each row has emitted.
        rows: the rows that passes carry, in their order, and the place of each in a pass.
        lengths: per row, the tokens whose keys and values are exact; the row's last emitted token
            is not among them, it is fed by the next pass.
        total, slots: the most tokens of a row, and of its keys and values.
        rotary: the target's angles of all places.
    """

    @property
    def model(self) -> Sublayers: ...
    @property
    def prompts(self) -> Sequence[Tensor]: ...
    @property
    def prompt_lengths(self) -> Sequence[int]: ...
    @property
    def emitted(self) -> Sequence[Sequence[int]]: ...
    @property
    def rows(self) -> Mapping[int, int]: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def total(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def rotary(self) -> Any: ...

    def tapped(self, tap: int, starts: Sequence[int], count: int, before: int = 0) -> Tensor:
        """The target's states behind so many sublayers, which a state has asked for (`State.tap`),
        (R, count, H), from each row's token at `starts` on, or tokens `before` that."""


class Proposal(NamedTuple):
    """What a row may draft in its next round.

    Attributes:
        length: tokens, at most.
        tokens: which, where they are known without a pass of any model; else `State.step` is asked.
        match: of known tokens, how many the row's history has in common with where they come from.
    """

    length: int
    tokens: Sequence[int] | None = None
    match: int | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], match: int) -> Proposal:
        """Tokens that are known."""
        return cls(len(tokens), tokens, match)


class Offer(NamedTuple):
    """The proposals of one source to all rows, as controllers see them.

    Attributes:
        lengths: by row, for every row that is not finished, the most tokens; 0 for none.
        matches: by row, `Proposal.match`; None where tokens are not known before they are drawn.
    """

    lengths: Mapping[int, int]
    matches: Mapping[int, int] | None


class Source(ABC):
    """What may draft, for any number of batches.

    Attributes:
        prior: the share of its tokens that are expected to be accepted before any was verified.
        longest: tokens that it drafts in a round at most, if there is a limit.
        max_positions: tokens that a row may have, at most, if there is a limit.
        skip: the skip config that it is made of, if there is one.
        exit_layer: the number of the model's first layers that are all it runs, if that is so.
    """

    prior: float = PRIOR
    longest: int | None = None
    max_positions: int | None = None
    skip: SkipConfig | None = None
    exit_layer: int | None = None

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Tells it from others, and keeps no weights alive; costs are remembered by it, in a file
        where it is a string."""

    @abstractmethod
    def open(self, batch: Batch) -> State:
        """Its state in a batch."""

    def step_bytes(self) -> Sequence[float]:
        """Bytes of the weights that one of its steps reads; none where tokens are known."""
        return ()

    @property
    def known(self) -> bool:
        """Whether its tokens are known without a pass of any model."""
        return not self.step_bytes()

    def timed(self) -> Source:
        """What stands in for it where costs are timed: it always has something to offer."""
        return self

    def steps(self, texts: Texts, *, follow: bool) -> Steps:
        """What its steps compute for many chains at once, for replays along recorded texts.

        Sources of known tokens need none.

        Args:
            follow: whether chains are left where they leave their texts.

        Raises:
            TypeError: there are none.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be replayed, as it has no steps; allowed are the "
            "library's own sources, and those whose tokens are known"
        )


class State:
    """What a source holds for the rows of one batch.

    Attributes:
        prefix: sublayers of the target, from the front, that its steps go through first; what they
            compute there is exact, and verification goes on from it.
        kept: sublayers of the target that its steps go through in all.
        tap: behind so many sublayers the batch keeps hidden states for it; None: nowhere.
        longest: as of the source, in this batch.
    """

    prefix = 0
    kept = 0
    tap: int | None = None
    longest: int | None = None

    def __init__(self, batch: Batch) -> None:
        # weakly: a batch holds its states, and a circle would keep its cache until it is collected
        self._batch = weakref.ref(batch)

    @property
    def batch(self) -> Batch:
        """The batch, which lives for as long as the state is asked for anything."""
        batch = self._batch()
        assert batch is not None
        return batch

    def offer(self, row: int, most: int) -> Proposal:
        """What a row may draft in its next round, of so many tokens at most."""
        return Proposal(min(most, self.longest or most))

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        """Raw logits (R, V) behind a token of the round, where offers hold no tokens.

        Args:
            tokens: of each row the last emitted one at first, then those that it drafts, (R,).
            hidden: they behind the `prefix`, (R, 1, H), and the pass `step` that took them there.
            offset: how many tokens of the round came before.
        """
        raise NotImplementedError(f"{type(self).__name__} offers no tokens and has no step")

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        """A row has emitted tokens, at first those of the prefill.

        Told before the batch's length of the row moves; `batch.emitted` holds them already.

        Args:
            steps: those of its own that the round took, 0 where others drafted.
        """

    def keep(self, places: Sequence[int], length: int) -> int:
        """Leave all rows but those at these places of a pass behind, as `RowCache.keep`."""
        return 0
