"""The target of rounds, which drafts and verifies: its interface, and what it is given and returns.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from layerskip.cache.branches import ROOT, path_to
from layerskip.decoding.passes import Position
from layerskip.decoding.rules import Rule
from layerskip.decoding.sources.base import Batch


@dataclass
class DraftedTokens:
    """The tokens drafted in a round, by row.

    Attributes:
        step_free, chosen: rows whose tokens were drafted without steps, and after all steps.
        parents: for rows with branches, the node that each token follows (`Proposal.parents`).
        num_steps: number of draft steps.
        kept_steps: number of these steps whose states verification reuses.
        steps: for every draft step of chains, its positions, and the tokens drawn there, -1 for
            none, (N,).
        laws: for the rejection rule, the draft's distribution (V,) at every position of all steps.
        unread: whether no token has been read from the device yet.
    """

    tokens: list[list[int]]
    confidences: list[list[float]]
    lengths: list[int]
    step_free: set[int] = field(default_factory=set)
    chosen: set[int] = field(default_factory=set)
    parents: dict[int, Sequence[int]] = field(default_factory=dict)
    num_steps: int = 0
    kept_steps: int = 0
    steps: list[tuple[list[Position], Tensor]] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    unread: bool = False

    @classmethod
    def of(cls, rows: int) -> DraftedTokens:
        return cls([[] for _ in range(rows)], [[] for _ in range(rows)], [0] * rows)

    def propose(self, row: int, tokens: Sequence[int], parents: Sequence[int] | None) -> None:
        self.tokens[row], self.lengths[row] = list(tokens), len(tokens)
        if parents is not None:
            self.parents[row] = parents

    def token(self, position: Position) -> int:
        """The token drafted at a position; -1 if there is none, or it has not been read yet."""
        row, offset = position
        return self.tokens[row][offset] if offset < len(self.tokens[row]) else -1

    def before(self, row: int, offset: int) -> list[int]:
        """The drafted tokens on the path to a node, including its own; node 0 is the last token."""
        tokens, parents = self.tokens[row], self.parents.get(row)
        if parents is None:
            return tokens[:offset]
        return [tokens[node - 1] for node in path_to(parents, offset)]

    def positions(self, rows: Iterable[int]) -> list[Position]:
        """The positions to verify: that of each drafted token, and the one after the last."""
        return [(row, offset) for row in rows for offset in range(self.lengths[row] + 1)]

    def branches(self, rows: Iterable[int]) -> list[list[int]] | None:
        """The parent of each token of a pass, by row (see `Passes.verify`); None for chains."""
        if not self.parents:
            return None
        followed, most = [], max(self.lengths)
        for row in rows:
            parents = self.parents.get(row, ())
            followed.append([ROOT, *parents, *range(len(parents), most)])
        return followed

    def nodes(self, positions: Sequence[Position]) -> list[int]:
        """The node of each position, all of a row with branches, which have the depth instead."""
        seen: Counter[int] = Counter()
        nodes = []
        for row, offset in positions:
            nodes.append(seen[row] if row in self.parents else offset)
            seen[row] += 1
        return nodes

    def at(self, positions: Sequence[Position]) -> list[int]:
        """The index of each position among those of all steps, -1 for none."""
        places = {position: i for i, position in enumerate(chain(*(at for at, _ in self.steps)))}
        return [places.get(position, -1) for position in positions]


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
