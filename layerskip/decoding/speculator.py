"""What rounds have in common, whoever emits their texts: plan, draft, judge, commit and learn.

Letters: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from layerskip.costs.speculation import draft_limit
from layerskip.decoding.drafting import Drafter, on_host
from layerskip.decoding.draws import DraftedTokens, certainty
from layerskip.decoding.passes import Position
from layerskip.decoding.planning import Plan, Planner, usable
from layerskip.decoding.sources.base import Proposal
from layerskip.model.branches import along, depths
from layerskip.model.cache import on_device

Offering = Callable[[int, int], Proposal]


class Judged(NamedTuple):
    """What the target says in a round, or the prefill, of positions' raw logits (N, V).

    Attributes:
        tokens: of every row, the drafted tokens up to the first rejected one, then the target's
            own, -1 where it has none.
        read: at which of the positions each of these was judged.
        scores: processed scores (N, V), if they are kept.
    """

    tokens: list[list[int]]
    read: list[list[int]]
    scores: Tensor | None


class Speculator(Drafter):
    """A `Drafter` that also plans rounds, and judges what they have drafted."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._planner = Planner(self.controller)

    def plan(self, left: Mapping[int, int], offers: Sequence[Offering]) -> dict[int, Plan]:
        """What each row drafts in a round.

        Args:
            left: by row, how many tokens it may still emit.
            offers: of every source, what it offers a row, at most so many tokens.
        """
        passes = self.passes

        def found(offer: Offering, row: int) -> Proposal:
            most = draft_limit(self.longest, left[row], passes.cache.slots - passes.lengths[row])
            allowed = partial(self.draws.allowed, row, vocabulary=passes.model.vocabulary)
            return usable(offer(row, most), allowed, eos=self.eos[row], branches=self.branches)

        proposals = [{row: found(offer, row) for row in left} for offer in offers]
        context = sum(passes.lengths[row] for row in left) // len(left)
        return self._planner.plan(left, proposals, context=context, size=len(passes.rows))

    def judge(
        self,
        raw: Tensor,
        positions: Sequence[Position],
        drafts: DraftedTokens | None = None,
        *,
        keep: bool = False,
    ) -> Judged:
        """Judge a round's drafts, or the prefill, by raw logits (N, V).

        Args:
            keep: whether to keep the scores.
        """
        places = positions
        if drafts is not None and drafts.parents:  # draws go by depth
            deep = {row: depths(parents) for row, parents in drafts.parents.items()}
            places = [(row, deep[row][at] if row in deep else at) for row, at in positions]
        verdict = self.draws.judge(raw, places, drafts, keep=keep)
        accepted = [] if verdict.accepted is None else [verdict.accepted]
        steps = drafts.steps if drafts is not None and drafts.unread else []
        target, *others = on_host(verdict.drawn, *accepted, *(drawn for _, drawn in steps))
        flags = others.pop(0) if accepted else []
        rows = range(len(self.draws.emitted))
        drafted: list[list[int]] = [[] for _ in rows] if drafts is None else drafts.tokens
        for (at, _), step in zip(steps, others, strict=True):
            for (row, offset), token in zip(at, step, strict=True):
                draft = drafted[row]
                ended = draft and draft[-1] in self.eos[row]
                if token >= 0 and offset == len(draft) and not ended:
                    draft.append(int(token))
        branches = {} if drafts is None else drafts.parents
        tokens: list[list[int]] = [[] for _ in rows]
        read: list[list[int]] = [[] for _ in rows]
        here = [0 for _ in rows]  # the last node of each one's path; -1 behind the first rejected
        for i, (row, node) in enumerate(positions):
            if here[row] != node:
                continue
            token, draft = int(target[i]), drafted[row]
            if row in branches:
                here[row] = next(iter(along(branches[row], draft, [token], node)), -1)
            else:
                own = draft[node] if node < len(draft) else -1
                stays = own >= 0 and bool(flags[i] if flags else own == token)
                token, here[row] = (own, node + 1) if stays else (token, -1)
            tokens[row].append(token)
            read[row].append(i)
        if self.passes.reads_logits:
            seen = [(r, () if drafts is None else drafts.before(r, node)) for r, node in positions]
            self.passes.read(raw, seen)
        return Judged(tokens, read, verdict.scores)

    def commit(
        self, row: int, emitted: Sequence[int], judged: Judged, drafts: DraftedTokens
    ) -> None:
        """Commit a row's emitted tokens, and tell the controller how good its drafts were."""
        drafted, tokens = drafts.tokens[row], judged.tokens[row]
        path: Sequence[int] = ()
        if row in drafts.parents:
            path = along(drafts.parents[row], drafted, emitted)
        self.passes.commit(row, emitted, path)
        self._planner.learn(row, emitted)
        self.learn(drafts, row, tokens)
        self.controller.update(row, len(drafted), len(tokens) - 1)

    def show(self, raw: Tensor, last: Mapping[int, int]) -> None:
        """Tell a controller that looks at laws those of rows' last tokens, behind their commits.

        Args:
            last: by row, at which of raw logits (N, V) that token was judged.
        """
        if self._observer is not None and last:
            at = on_device([*last.values()], raw.device)  # (R,)
            for row, *seen in zip(last, *on_host(*certainty(raw[at])), strict=True):
                self._observer.see_target(row, *seen)
