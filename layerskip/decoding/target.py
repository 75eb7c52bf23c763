"""The interface of a round's target, which drafts and verifies: a live model or a recording.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from layerskip.decoding.draws import DraftedTokens
from layerskip.decoding.passes import Position
from layerskip.decoding.rules import Rule
from layerskip.decoding.sources.base import Batch


class StepRequest(NamedTuple):
    """The request for tokens of a draft step.

    Attributes:
        signal: the kind of confidence (see `Draws.draft`); None: it and the tokens are not needed.
    """

    source: int
    signal: str | None = None
    best: int = 1


class StepResult(NamedTuple):
    """The result of a draft step: per token the best next ones (-1: none) and the confidence."""

    tokens: Sequence[Sequence[int]]
    confidences: Sequence[float]


class VerifyResult(NamedTuple):
    """The target's decisions in a round, or after prompts.

    Attributes:
        tokens: for every row, the drafted tokens up to the first rejected one, then the target's
            own; -1 if it has none.
        read: the position at which each of these was judged.
        raw: raw logits of the positions, (N, V); a recorded target has none.
        scores: processed scores (N, V), if they are kept.
    """

    tokens: list[list[int]]
    read: list[list[int]]
    raw: Tensor | None = None
    scores: Tensor | None = None


class Target(Protocol):
    """The target on which a `Loop` runs rounds.

    Attributes:
        batch: the texts, of which those in its `rows` take part in rounds.
        branches: whether drafts may branch now.
        rule: how drafts are accepted.
    """

    @property
    def batch(self) -> Batch: ...
    @property
    def branches(self) -> bool: ...
    @property
    def rule(self) -> Rule: ...

    def prefill(
        self, ends: Mapping[int, int] | None = None, read: Callable[[Tensor], None] | None = None
    ) -> Tensor | None:
        """Run prompts up to their ends, see `Prefill.prefill`; returns logits after them, (r, V).

        None: one has more tokens, or they are recorded.
        """

    def draft(
        self, drafts: DraftedTokens, rows: Sequence[int], ask: StepRequest
    ) -> StepResult | None:
        """Take a draft step after each row's last token.

        Returns:
            The result, row by row; None if nothing needs it before the target has seen it.
        """

    def verify(self, drafts: DraftedTokens, positions: Sequence[Position]) -> Tensor | None:
        """Run the drafts; returns raw logits (N, V) at these positions, None if recorded."""

    def judge(
        self,
        raw: Any,
        positions: Sequence[Position],
        drafts: DraftedTokens | None = None,
        *,
        keep: bool = False,
    ) -> VerifyResult:
        """Judge a round's drafts by these logits; without drafts, draw the tokens after prompts.

        Args:
            keep: whether to keep the processed scores.
        """

    def commit(self, row: int, emitted: Sequence[int], drafts: DraftedTokens | None) -> None:
        """Continue after the tokens that a row has emitted in a round, or after its prompt."""

    def leave(self, rows: Collection[int]) -> None:
        """Drop rows from further rounds."""
