"""The record of one round of decoding, and the counts over many rounds.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from layerskip.cache.branches import along


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
