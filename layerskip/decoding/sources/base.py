"""The interface of sources of drafts: a `Source`, and its `State` in one batch.

Proposals never change the text, only the speed. `docs/sources.md` says how to write one.
Letters: R rows of a pass, T tokens, H hidden width of the target, V its vocabulary.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.acceptance import PRIOR
from layerskip.model.cache import RowCache
from layerskip.model.sublayers import Pass, Sublayers


class Batch:
    """What a state may read of its batch; only the engine changes it.

    Attributes:
        prompts: token ids of each row, without padding, (length,) each.
        emitted: the tokens that each row has emitted.
        rows: the rows that take part in passes, in order, and the place of each in a pass.
        lengths: per row, the tokens whose keys and values are exact. The row's last emitted token
            is not among them: the next pass feeds it.
        total, slots: the most tokens of a row, and of its keys and values.
        rotary: rotary angles of so many slots.
        cache: the target's keys and values; behind a row's `lengths` they are of rejected drafts.
    """

    model: Sublayers
    prompts: Sequence[Tensor]
    prompt_lengths: Sequence[int]
    emitted: Sequence[Sequence[int]]
    rows: Mapping[int, int]
    lengths: Sequence[int]
    total: int
    slots: int
    rotary: Any
    cache: RowCache

    @abstractmethod
    def tapped(
        self,
        tap: int,
        starts: Sequence[int],
        count: int,
        before: int = 0,
        rows: range | None = None,
    ) -> Tensor:
        """The target's hidden states after `tap` sublayers (see `State.tap`), (R, count, H).

        They begin at each row's token `starts`, or so many tokens `before` it.

        Args:
            rows: of a pass, if only some are asked for.
        """

    @abstractmethod
    def scores(
        self, row: int, offset: int, tokens: Sequence[int], raw: Sequence[float]
    ) -> Sequence[float]:
        """The scores of some tokens, the likeliest first, if these were the target's raw logits.

        They are of the position `offset` places behind the row's emitted tokens, by the request's
        law and the noise there: the target would draw the largest. There may be fewer scores than
        tokens, and none where the law is more than temperature, top-k and top-p.
        """


class Proposal(NamedTuple):
    """What a row may draft in its next round.

    Attributes:
        tokens: the tokens, if they take no pass of a model; else `State.step` is called.
        match: how many tokens the row's history has in common with the source of `tokens`.
        parents: if `tokens` have branches, what each one follows: the number of an earlier one,
            from 1 on, or 0, the row's last token. None: each follows the one before it.
        chances: if the source can tell, how likely each of `tokens` is to be accepted. They must
            not rise, as the first ones are drafted.
    """

    length: int
    tokens: Sequence[int] | None = None
    match: int | None = None
    parents: Sequence[int] | None = None
    chances: Sequence[float] | None = None

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        match: int,
        parents: Sequence[int] | None = None,
        chances: Sequence[float] | None = None,
    ) -> Proposal:
        """A proposal of tokens; parents that are a chain's are left out."""
        if parents is not None and [*parents] == [*range(len(parents))]:
            parents = None
        return cls(len(tokens), tokens, match, parents, chances)

    def some(self, nodes: Sequence[int]) -> Proposal:
        """Some of its tokens, by their numbers from 1 on, each with what it follows."""
        tokens, old = self.tokens or (), self.parents or range(len(self.tokens or ()))
        place = {0: 0} | {node: i for i, node in enumerate(nodes, 1)}
        parents = [place[old[node - 1]] for node in nodes]
        chances = None if self.chances is None else [self.chances[node - 1] for node in nodes]
        kept = [tokens[node - 1] for node in nodes]
        return Proposal.of(kept, self.match or 0, parents, chances)


class Source(ABC):
    """A source of drafts, for any number of batches.

    Attributes:
        prior: the expected acceptance before any token was verified.
        max_positions: the most tokens that a row may have, if there is a limit.
        prefix: how many of the target's first sublayers its steps run exactly.
        keeps_texts: whether it keeps what it learns from the texts of a batch for later batches.
    """

    prior: float = PRIOR
    longest: int | None = None
    max_positions: int | None = None
    skip: SkipConfig | None = None
    prefix: int = 0
    keeps_texts = False

    @property
    def name(self) -> str:
        """What records and reports call it."""
        return type(self).__name__

    @property
    def words(self) -> str:
        """Where its drafts come from, for a person to read."""
        return f"by {self.name}"

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Identifies the source without keeping weights alive.

        Costs are remembered under it; in a file, if it is a string.
        """

    @abstractmethod
    def open(self, batch: Batch) -> State:
        """Its state in a batch."""

    def step_bytes(self) -> Sequence[float]:
        """Bytes of the weights that a step reads; empty if tokens are drafted without steps."""
        return ()

    def key_bytes(self) -> Mapping[int | None, float]:
        """Bytes of a token's keys and values that a step reads, as `Architecture.key_bytes`."""
        return {}

    def own_bytes(self) -> float:
        """Bytes of a token's keys and values in its states' own caches."""
        return 0.0

    @property
    def step_free(self) -> bool:
        """Whether its tokens are drafted without a pass of any model."""
        return not self.step_bytes()

    def timed(self) -> Source:
        """The source to time in its place, which always has something to offer."""
        return self


class RowDrafts(Protocol):
    """Drafts for one row without steps."""

    def find(self, longest: int) -> Proposal:
        """What the row may draft next, at most so many tokens."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens that the row has emitted."""


class State:
    """A source's state for the rows of one batch.

    Attributes:
        prefix: how many of the target's first sublayers its steps run; their states are exact, and
            verification starts from them.
        tap: the batch keeps hidden states after so many sublayers for it; None: nowhere.
        taps: further such places.
        whole_prompts: whether those of prompts' tokens before the last are needed, too.
        best: how many of the best tokens of a place may be verified, where branches are asked for.
        everywhere: whether what it says of a place is the same, whatever was drafted before it.
        reads_logits: whether `read` is called.
    """

    prefix = 0
    tap: int | None = None
    taps: Sequence[int] = ()
    whole_prompts = True
    longest: int | None = None
    best = 2
    everywhere = False
    reads_logits = False
    caches: Sequence[RowCache] = ()

    def __init__(self, batch: Batch) -> None:
        # weakly: a batch holds its states, and a cycle would delay the release of its cache
        self._batch = weakref.ref(batch)

    @property
    def batch(self) -> Batch:
        batch = self._batch()
        assert batch is not None
        return batch

    @property
    def every_tap(self) -> list[int]:
        return [tap for tap in (self.tap, *self.taps) if tap is not None]

    def offer(self, row: int, most: int) -> Proposal:
        """What a row may draft in its next round, at most so many tokens."""
        return Proposal(min(most, self.longest or most))

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        """Raw logits (R, V) after a token of the round, for offers without tokens.

        Args:
            tokens: each row's last emitted token at first, then its drafted ones, (R,).
            hidden: their states after the `prefix`, (R, 1, H), computed by the pass `step`.
            offset: how many tokens of the round came before.
        """
        raise NotImplementedError(f"{type(self).__name__} offers no tokens and has no step")

    def read(self, raw: Tensor, seen: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Reports what the target has computed in a round, of the prefill its last logits.

        Called before `commit`, if asked for.

        Args:
            raw: its raw logits, (N, V).
            seen: each one's row, and the drafted tokens that it has seen behind those that the row
                had emitted.
        """

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        """Reports the tokens that a row has emitted, at first those of the prefill.

        Called before the row's entry in `batch.lengths` changes; `batch.emitted` holds them.

        Args:
            steps: how many of its own steps the round took, as far as they were fed the row's text;
                0 where another source drafted.
        """

    def begin(self, row: int) -> None:
        """Called when another text takes the row; only where rows join and leave."""

    @property
    def nbytes(self) -> int:
        """About how many bytes its lookup tables take."""
        return 0

    def resized(self) -> None:
        """Called after `batch.slots` has changed; only where rows join and leave."""

    def keep(self, places: Sequence[int], length: int) -> None:
        """Drop all rows but those at these places of a pass, as `RowCache.keep`."""
        for cache in self.caches:
            cache.keep(places, length)


class RowsState(State):
    """The state of a source that keeps something of its own for each row.

    Args:
        start: makes that of a row, by its number, when a text takes the row.
    """

    def __init__(self, batch: Batch, start: Callable[[int], RowDrafts]) -> None:
        super().__init__(batch)
        self.start = start
        self.rows = [start(row) for row in range(len(batch.prompts))]

    def begin(self, row: int) -> None:
        self.rows[row] = self.start(row)

    def offer(self, row: int, most: int) -> Proposal:
        return self.rows[row].find(most)

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        self.rows[row].extend(emitted)
