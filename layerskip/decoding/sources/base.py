"""The interface of draft sources: a `Source`, and its `State` in one batch.

Proposals never change the text, only the speed. `docs/sources.md` says how to write a source.
Shapes: R rows of a pass, T tokens, H hidden width of the target, V its vocabulary.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from layerskip.cache.rows import RowCache, on_device
from layerskip.config.skips import SkipConfig
from layerskip.decoding.acceptance import PRIOR
from layerskip.decoding.seats import Seat
from layerskip.model.opened_model import OpenedModel, Pass


class Batch:
    """The parts of a batch that a state may read; only the engine changes them.

    Attributes:
        seats: the text of each row.
        sources, states: the sources of drafts, and the state of each.
        rows: the rows that take part in passes, in order, with the place of each in a pass.
        total, slots: maximum number of tokens of a row, and of slots for its keys and values.
        rotary: rotary angles for that many slots.
        cache: the target's keys and values; after a row's `lengths` they are from rejected drafts.
    """

    model: OpenedModel
    seats: Sequence[Seat]
    sources: Sequence[Source]
    states: Sequence[State]
    rows: Mapping[int, int]
    total: int
    slots: int
    rotary: Any
    cache: RowCache

    @property
    def prompts(self) -> list[Tensor]:
        """Token ids of each row, without padding, (length,) each."""
        return [seat.prompt for seat in self.seats]

    @property
    def prompt_lengths(self) -> list[int]:
        return [seat.prompt_length for seat in self.seats]

    @property
    def emitted(self) -> list[list[int]]:
        """The tokens that each row has emitted."""
        return [seat.emitted for seat in self.seats]

    @property
    def lengths(self) -> list[int]:
        """Per row, the number of tokens with exact keys and values.

        The row's last emitted token is not among them: the next pass feeds it.
        """
        return [seat.length for seat in self.seats]

    def scores(
        self, row: int, offset: int, tokens: Sequence[int], raw: Sequence[float]
    ) -> Sequence[float]:
        """The scores of some tokens, likeliest first, if `raw` were the target's raw logits.

        They apply to the position `offset` places after the row's emitted tokens, with the
        request's law and the noise there: the target would draw the token with the largest. There
        may be fewer scores than tokens; none if the law is more than temperature, top-k and top-p,
        or if no tokens are drawn.
        """
        seat = self.seats[row]
        return () if seat.draws is None else seat.draws.scores((seat, offset), tokens, raw)

    def seat(self, seat: Seat) -> None:
        """Seat a text after all others, if texts come and go."""
        raise NotImplementedError(f"all rows of a {type(self).__name__} are seated at once")

    def tapped(
        self,
        tap: int,
        starts: Sequence[int],
        count: int,
        before: int = 0,
        rows: range | None = None,
    ) -> Tensor:
        """The target's hidden states after `tap` sublayers (see `State.tap`), (R, count, H).

        They begin at each row's token `starts`, or `before` tokens earlier.

        Args:
            rows: rows of a pass, if only some are needed.
        """
        raise NotImplementedError(f"a {type(self).__name__} keeps no hidden states")


class Proposal(NamedTuple):
    """What a row may draft in its next round.

    Attributes:
        tokens: the tokens, if they need no pass of a model; otherwise `State.step` is called.
        match: number of tokens that the row's history has in common with the origin of `tokens`.
        parents: if `tokens` branch, the node that each one follows: the number of an earlier one,
            from 1 on, or 0 for the row's last token. None: each follows the one before it.
        chances: if known, the probability that each of `tokens` is accepted. They must not
            increase, since the first tokens are drafted first.
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
        """Make a proposal of tokens; parents that form a chain are left out."""
        if parents is not None and [*parents] == [*range(len(parents))]:
            parents = None
        return cls(len(tokens), tokens, match, parents, chances)

    def some(self, nodes: Sequence[int]) -> Proposal:
        """Select tokens by their numbers from 1 on, each with the one that it follows."""
        tokens, old = self.tokens or (), self.parents or range(len(self.tokens or ()))
        place = {0: 0} | {node: i for i, node in enumerate(nodes, 1)}
        parents = [place[old[node - 1]] for node in nodes]
        chances = None if self.chances is None else [self.chances[node - 1] for node in nodes]
        kept = [tokens[node - 1] for node in nodes]
        return Proposal.of(kept, self.match or 0, parents, chances)


class Source(ABC):
    """A source of drafts, for any number of batches.

    Attributes:
        prior: the expected acceptance before any token is verified.
        longest: maximum number of tokens that it drafts in a round, if there is a limit.
        max_positions: maximum number of tokens of a row, if there is a limit.
        prefix: number of the target's first sublayers that its steps run exactly.
        per_step: number of tokens that the first of as many steps drafts; the others cost nothing.
        keeps_texts: whether what it learns from a text affects drafts for texts of other owners
            (`Seat.owner`). Servers accept it only where owners share what they remember.
        remembers: whether its drafts depend on earlier texts of the same owner. It is left out
            under rules by which texts depend on drafts.
        by_clock: whether its drafts depend on how long things take.
    """

    prior: float = PRIOR
    longest: int | None = None
    max_positions: int | None = None
    skip: SkipConfig | None = None
    prefix: int = 0
    per_step: int = 1
    keeps_texts = False
    remembers = False
    by_clock = False

    @property
    def name(self) -> str:
        """Its name in records and reports."""
        return type(self).__name__

    @property
    def words(self) -> str:
        """The origin of its drafts, in words for the user."""
        return f"by {self.name}"

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """An identifier of the source that does not keep weights alive.

        Costs are remembered under it; also in a file, if it is a string.
        """

    @abstractmethod
    def open(self, batch: Batch) -> State:
        """Create its state for a batch."""

    def step_bytes(self) -> Sequence[float]:
        """Bytes of the weights that a step reads; empty if tokens are drafted without steps."""
        return ()

    def key_bytes(self) -> Mapping[int | None, float]:
        """Bytes of keys and values per token that a step reads, as `Architecture.key_bytes`."""
        return {}

    def own_bytes(self) -> float:
        """Bytes of keys and values per token in its states' own caches."""
        return 0.0

    @property
    def step_free(self) -> bool:
        """Whether it drafts without passes of any model."""
        return not self.step_bytes()

    def timed(self) -> Source:
        """The source whose steps are timed in place of its own."""
        return self


class RowDrafts(Protocol):
    """Drafts without steps for one row."""

    def find(self, longest: int) -> Proposal:
        """Propose at most `longest` tokens for the row's next draft."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens that the row has emitted."""


class State:
    """A source's state for the rows of one batch.

    Attributes:
        prefix: number of the target's first sublayers that its steps run; their states are exact,
            and verification starts from them.
        tap: the batch keeps hidden states after this many sublayers for it; None: it keeps none.
        taps: further such places.
        prompt_taps: places whose states are kept only until `prompted` has been called.
        whole_prompts: whether states of prompt tokens before the last are needed, too.
        best: how many of the best tokens at a position may be verified if branches are requested.
        everywhere: whether its result at a position is the same whatever was drafted before.
        reads_logits: whether `read` is called.
    """

    prefix = 0
    tap: int | None = None
    taps: Sequence[int] = ()
    prompt_taps: Sequence[int] = ()
    whole_prompts = True
    best = 2
    everywhere = False
    reads_logits = False
    caches: Sequence[RowCache] = ()

    def __init__(self, batch: Batch) -> None:
        # A weak reference: a batch holds its states, and a cycle would keep its cache alive.
        self._batch = weakref.ref(batch)

    @property
    def batch(self) -> Batch:
        batch = self._batch()
        assert batch is not None
        return batch

    @property
    def every_tap(self) -> list[int]:
        return [tap for tap in (self.tap, *self.taps) if tap is not None]

    def places(self, offset: int = 0) -> list[int]:
        """The place in each row of a pass of the token that step `offset` of the round feeds."""
        batch = self.batch
        return [batch.seats[row].length + offset for row in batch.rows]

    def prompted(self, rows: Sequence[int], tokens: int) -> None:
        """The prompts of rows have been run, now with so many tokens in all.

        States at `prompt_taps` can be read; those of tokens that were in the cache are zeros.
        """

    def offer(self, row: int, most: int) -> Proposal:
        """Propose at most `most` tokens for the row's next round."""
        return Proposal(most)

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        """Raw logits (R, V) after a token of the round, for proposals without tokens.

        Args:
            tokens: each row's last emitted token at first, then its drafted ones, (R,).
            hidden: their states after the `prefix`, (R, 1, H), computed by the pass `step`.
            offset: number of earlier tokens in the round.
        """
        raise NotImplementedError(f"{type(self).__name__} offers no tokens and has no step")

    def read(self, raw: Tensor, seen: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Receive the target's logits of a round; of the prefill, its last ones.

        Called before `commit` if `reads_logits` is set.

        Args:
            raw: the raw logits, (N, V).
            seen: for each, the row and the drafted tokens that it has seen after the row's emitted
                ones.
        """

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        """Receive the tokens that a row has emitted, first those of the prefill.

        Called before the row's entry in `batch.lengths` changes; `batch.emitted` contains them.

        Args:
            steps: number of the source's steps in the round that were fed the row's actual text; 0
                if another source drafted.
        """

    def begin(self, row: int) -> None:
        """Another text takes the row's place. Called only if rows join and leave."""

    def end(self, row: int) -> None:
        """The row's text has ended, or was abandoned with what it has."""

    @property
    def nbytes(self) -> int:
        """The approximate size of its lookup tables in bytes."""
        return 0

    def resized(self) -> None:
        """`batch.slots` has changed. Called only if rows join and leave."""

    def keep(self, places: Sequence[int], length: int) -> None:
        """Drop all rows except those at these places of a pass, as `RowCache.keep`."""
        for cache in self.caches:
            cache.keep(places, length)


class RowsState(State):
    """The state of a source that has an object for each row.

    Args:
        start: makes the object of a row, by its number, when a text takes the row.
    """

    def __init__(self, batch: Batch, start: Callable[[int], RowDrafts]) -> None:
        super().__init__(batch)
        self.start = start
        self.rows = [start(row) for row in range(len(batch.seats))]

    def begin(self, row: int) -> None:
        self.rows[row] = self.start(row)

    def offer(self, row: int, most: int) -> Proposal:
        return self.rows[row].find(most)

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        self.rows[row].extend(emitted)


class AtOnce(State):
    """A state whose first step of a round drafts all tokens; later steps return what that said."""

    everywhere = True
    raw: Tensor  # of the round, (R, K, V)

    @abstractmethod
    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Raw logits of all tokens of a round, (R, K, V), from the arguments of its first step."""

    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        if not offset:
            self.raw = self.draft(tokens, hidden)
        # A round's last step may follow the last draft.
        return self.raw[:, min(offset, self.raw.shape[1] - 1)]


class Following(State):
    """A state with its own keys and values, which catches up with the batch when it drafts.

    It costs nothing while other sources draft. A rollback only lowers a length: the slots of
    rejected drafts are overwritten before anything reads them.

    Args:
        model: the model whose sublayers or states it needs, and which says how long passes are.
        cache: its keys and values.

    Attributes:
        seen: for each row, the number of first tokens that it has seen.
    """

    def __init__(self, batch: Batch, model: OpenedModel, cache: RowCache) -> None:
        super().__init__(batch)
        self.model, self.cache, self.caches = model, cache, [cache]
        self.seen = [0] * len(batch.seats)

    def begin(self, row: int) -> None:
        self.seen[row] = 0

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        if steps:  # the last emitted token has not been fed yet
            self.seen[row] = self.batch.seats[row].length + steps

    def missing(self) -> int:
        """The number of tokens for a round's first step to see, including the last emitted one."""
        seats = self.batch.seats
        return max(1, *(seats[row].length + 1 - self.seen[row] for row in self.batch.rows))

    def see(self) -> None:
        for row in self.batch.rows:
            self.seen[row] = self.batch.seats[row].length + 1

    def latest(self, count: int) -> tuple[list[int], list[range], Tensor]:
        """The last `count` tokens of every row, or all if it has fewer; marks them as seen.

        Returns:
            For each row of a pass, the position of the first of them, and the indices of those that
            were missing; and the tokens, (R, T), padded at the end.
        """
        batch = self.batch
        starts, missing, tokens = [], [], []
        for row in batch.rows:
            seat = batch.seats[row]
            end = seat.length + 1
            first, prompt = max(0, end - count), seat.prompt_length
            some = seat.prompt[first:].tolist()
            some += seat.emitted[max(0, first - prompt) : end - prompt]
            starts.append(first)
            missing.append(range(min(self.seen[row], end - 1) - first, end - first))
            tokens.append(some + some[-1:] * (count - len(some)))
            self.seen[row] = end
        return starts, missing, on_device(tokens, batch.model.device)

    def feed(self, tokens: Tensor, places: Sequence[int], rows: range) -> Tensor:
        """Run tokens (r, T) of some rows of a pass from those places on; returns (r, T, H)."""
        raise NotImplementedError(f"{type(self).__name__} feeds no tokens")

    def catch_up(self) -> Tensor:
        """Feed all tokens not seen yet; returns the states after the last ones, (R, H)."""
        starts, missing, tokens = self.latest(self.missing())
        if not self.cache.partial:  # seeing tokens again changes nothing
            missing = [range(each.stop) for each in missing]

        def run(chunk: Tensor, rows: range, firsts: list[int]) -> Tensor:
            places = [starts[row] + first for row, first in zip(rows, firsts, strict=True)]
            return self.feed(chunk, places, rows)

        last = self.model.in_chunks(tokens, missing, run, partial=self.cache.partial)  # (R, H)
        self.cache.prefilled = True
        return last
