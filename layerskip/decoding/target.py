"""The interface of a round's target, which drafts and verifies: a live model or a recorded one.

Letters: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from layerskip.decoding.draws import DraftedTokens
from layerskip.decoding.sources.base import Proposal, State

Mark = Callable[[], None]


class Ask(NamedTuple):
    """What is asked about the tokens of a draft step.

    Attributes:
        signal: the kind of confidence (see `Draws.draft`); None: none, and tokens need not be read.
    """

    source: int
    signal: str | None = None
    best: int = 1
    entropies: bool = False


class Said(NamedTuple):
    """What a draft step said behind each token: its best ones (-1: none), and how sure it was."""

    tokens: Sequence[Sequence[int]]
    confidences: Sequence[float]
    entropies: Sequence[float] = ()


class Verdict(NamedTuple):
    """What the target says in a round, or of prompts.

    Attributes:
        tokens: of every row, the drafted tokens up to the first rejected one, then the target's
            own, -1 where it has none.
        read: at which of the positions each of these was judged.
        raw: raw logits of the positions, (N, V); a recorded target has none.
        scores: processed scores (N, V), if they are kept.
    """

    tokens: list[list[int]]
    read: list[list[int]]
    raw: Tensor | None = None
    scores: Tensor | None = None


class Target(Protocol):
    """What a `Speculator` runs rounds on.

    Attributes:
        states: of each source, what says how it takes steps; None where its steps are recorded.
        rows, lengths: as of `Batch`.
        branches: whether drafts may have branches.
    """

    @property
    def states(self) -> Sequence[State | None]: ...
    @property
    def rows(self) -> Mapping[int, int]: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def branches(self) -> bool: ...

    def room(self, row: int) -> int:
        """How many slots a row has left."""

    def offer(self, source: int, row: int, most: int) -> Proposal:
        """What a source offers a row, at most so many tokens."""

    def allowed(self, row: int, tokens: Sequence[int]) -> int:
        """How many of a chain's tokens a row's grammars allow."""

    def draft(self, drafts: DraftedTokens, rows: Sequence[int], ask: Ask) -> Said | None:
        """Take a draft step behind each row's last token.

        Returns:
            What is said, row by row; None where nobody needs it before the target has seen it.
        """

    def verify(
        self, drafts: DraftedTokens, rows: Sequence[int], mark: Mark, *, keep: bool = False
    ) -> Verdict:
        """Verify what rows have drafted."""

    def commit(self, row: int, emitted: Sequence[int], drafts: DraftedTokens) -> None:
        """Go on behind what a row has emitted."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these (ascending) from further rounds."""
