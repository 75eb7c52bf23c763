"""A round: what is drafted, what the target returns, the record, and counts over many rounds.

`Target` is the interface of what drafts and verifies. Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from layerskip.cache.branches import ROOT, along, path_to
from layerskip.decoding.passes import Position
from layerskip.decoding.rules import Rule
from layerskip.decoding.sources.base import Batch, Proposal


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

    def propose(self, row: int, proposal: Proposal) -> None:
        self.tokens[row], self.lengths[row] = [*(proposal.tokens or ())], proposal.length
        if proposal.parents is not None:
            self.parents[row] = proposal.parents

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
        """Run prompts up to their ends, see `Passes.prefill`; returns logits after them, (r, V).

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


@dataclass(frozen=True)
class Round:
    """The results of one round by row; round 0 is the prefill and its first token.

    Attributes:
        tokens: emitted tokens per row, in order; empty for rows that had finished.
        drafted: number of drafted tokens per row.
        accepted: number of drafted tokens that were emitted, per row.
        drafts: the drafted tokens per row.
        parents: per row, what each drafted token follows (`Proposal.parents`); None: a chain.
        steps: number of draft steps of the batch.
        signal: the kind of confidence: "probability" of the draft (softmax of its raw logits at
            temperature 1), or "margin", 1 - exp(-m), where m is the margin between the draft's two
            best scores, including noise; None if the controller needs none.
        source: the number of the decoder's source that drafted; None if nothing was drafted; a
            number for each row if they differ.
        scores, logits: per row, (emitted, V) float32, if requested.
        times: the request's clock at the round's start, after drafting, after the target's pass,
            and at its end.
    """

    index: int
    tokens: tuple[tuple[int, ...], ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    confidences: tuple[tuple[float, ...], ...]
    finished: tuple[bool, ...]
    source: int | tuple[int | None, ...] | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    times: tuple[float, ...] | None = None
    signal: str | None = None
    drafts: tuple[tuple[int, ...], ...] = ()
    parents: tuple[Sequence[int] | None, ...] = ()
    steps: int = 0

    def taken(self, row: int) -> list[int]:
        """The node numbers, from 1 on, of the drafted tokens that a row has emitted."""
        parents, accepted = self.parents[row], self.accepted[row]
        if parents is None:
            return [*range(1, accepted + 1)]
        return along(parents, self.drafts[row], self.tokens[row])[:accepted]

    def source_of(self, row: int) -> int | None:
        return self.source[row] if isinstance(self.source, tuple) else self.source


@dataclass
class SourceCounts:
    """Counts of one of several sources, as in `DecodingStats`, and its name in records."""

    name: str = ""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass
class DecodingStats:
    """Counts of a decoding over all rows, from which rates are derived.

    Attributes:
        num_rounds: verify passes in which a row took part, summed over rows, without the prefill.
        num_drafts: those that drafted at least one token.
        accepted_per_position: entry j counts rounds whose draft token j + 1 was emitted.
        num_new_tokens: emitted tokens, including the first one of each row (from the prefill).
        num_known_tokens: prompt tokens whose keys and values were cached, not computed.
        num_compactions: how often finished rows were dropped from passes.
        seeds: the seed of each row's noise; empty for greedy decoding.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    sources: list[SourceCounts] = field(default_factory=list)
    num_new_tokens: int = 0
    num_sequences: int = 0
    num_known_tokens: int = 0
    num_compactions: int = 0
    seeds: tuple[int, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens (r); 0 if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens per verification of a draft, including the bonus token."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per target pass over all rounds, including those without a draft."""
        emitted = self.num_new_tokens - self.num_sequences
        return emitted / self.num_rounds if self.num_rounds else 0.0

    def add(self, round_: Round) -> None:
        """Count a round."""
        self.num_new_tokens += sum(map(len, round_.tokens))
        if round_.index == 0:
            self.num_sequences += len(round_.tokens)
            return
        rows = zip(round_.tokens, round_.drafted, round_.accepted, strict=True)
        for row, (tokens, drafted, accepted) in enumerate(rows):
            if not tokens:
                continue
            self.num_rounds += 1
            self.num_drafts += drafted > 0
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
            source = round_.source_of(row)
            if source is not None and drafted:
                counts = self.sources[source]
                counts.num_drafts += 1
                counts.num_draft_tokens += drafted
                counts.num_accepted_tokens += accepted
            self.accepted_per_position += [0] * (accepted - len(self.accepted_per_position))
            for position in range(accepted):
                self.accepted_per_position[position] += 1


def joint_source(sources: Sequence[int | None]) -> int | tuple[int | None, ...] | None:
    """The source of a round, or those of its rows if they differ; None if nothing was drafted."""
    used = {each for each in sources if each is not None}
    return tuple(sources) if len(used) > 1 else next(iter(used), None)
