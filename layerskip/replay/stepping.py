"""What rows draft in a simulated round, along replays: the engine's `Drafter` without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layerskip.decoding.controller import Controller, Grower, Observer, signal_of
from layerskip.decoding.growing import Others, Place, Spread, chosen, learn
from layerskip.decoding.planning import Plan
from layerskip.decoding.sources.base import Proposal
from layerskip.replay.drafts import Path, Replay, Said
from layerskip.replay.trace import Trace


class TextDraft:
    """What one of the drafts would propose from every start of a text."""

    def __init__(self, replay: Replay, text: int, signal: str) -> None:
        self.replay, rows = replay, replay.texts[text]
        self.first = rows.start
        self.tokens = replay.tokens[rows].tolist()
        self.others = replay.others[rows].tolist()
        told = replay.margins if signal == "margin" else replay.confidences
        self.confidences = told[rows].tolist()
        self.entropies = replay.entropies[rows].tolist()
        self.ends = replay.ends[rows].tolist()
        self.agreeing = replay.matches[rows].cumprod(1).sum(1).tolist()
        self.longest = replay.longest
        self.found = None if replay.found is None else replay.found[rows].tolist()
        if replay.found is not None:
            ends = replay.ends[rows].long()  # (starts, J)
            offered = (replay.tokens[rows] >= 0) & (ends.cumsum(1) == ends)
            self.lengths = offered.sum(1).tolist()

    def offer(self, start: int, most: int) -> Proposal:
        """What it may draft from a start, at most so many tokens."""
        if self.found is None:
            return Proposal(min(most, self.longest or most))
        return Proposal.of(self.tokens[start][: min(most, self.lengths[start])], self.found[start])

    def said(self, start: int, path: Path) -> Said:
        """As `Replay.said`."""
        return self.replay.said(self.first + start, path)


@dataclass
class Drafted:
    """What rows have drafted, as `DraftedTokens`.

    Attributes:
        counts: tokens of each row.
        plans: of rows whose tokens were known, or chosen behind all steps, these.
    """

    counts: list[int]
    plans: dict[int, Plan]
    said: dict[int, Place] = field(default_factory=dict)
    others: dict[int, Others] = field(default_factory=dict)
    steps: int = 0
    wide: int = 0


class ReplayDrafter:
    """Drafts what rows plan, for as long as the controller says.

    Args:
        drafts: of each row, by source.
        longest: the most tokens of a row that a round verifies.
    """

    def __init__(
        self,
        trace: Trace,
        controller: Controller,
        drafts: Sequence[Mapping[int, TextDraft]],
        longest: int,
    ) -> None:
        self.controller, self.drafts = controller, drafts
        self.longest = longest
        self.starts: Sequence[int] = ()
        self.ends = [trace.eos] * len(drafts)
        self.observer = controller if isinstance(controller, Observer) else None
        self.grower = grower_of(trace, controller)

    def draft(self, plans: Mapping[int, Plan], starts: Sequence[int]) -> Drafted:
        """Tokens that are known, up to each row's limit, and steps for the other rows.

        Args:
            starts: where each row is in its text.
        """
        self.starts = starts
        known = {row: plan for row, plan in plans.items() if plan.tokens and plan.limit}
        found = Drafted([0] * len(self.drafts), known)
        for row, plan in known.items():
            found.counts[row] = len(plan.tokens or ())
        drafting: dict[int, list[int]] = {}  # by source, the rows of its steps
        for row, plan in plans.items():
            if plan.source is not None and plan.limit and plan.tokens is None:
                drafting.setdefault(plan.source, []).append(row)
        for source, rows in drafting.items():
            grower = self.grower
            state = None if grower is None else self.drafts[rows[0]][source].replay.state
            if grower and state and state.wide and not (known or self.observer):
                self._spread(grower, found, source, rows, plans)
                self._choose(grower, found, plans, dict.fromkeys(rows, 0))
                continue
            self._step(found, source, rows, plans, everywhere=bool(state and state.everywhere))
            if grower and state:
                chains = {row: found.counts[row] for row in found.said}
                anew = not state.prefix
                fit = {row: n for row, n in chains.items() if anew or n == found.steps}
                self._choose(grower, found, plans, fit)
        return found

    def _step(
        self,
        found: Drafted,
        source: int,
        drafting: Sequence[int],
        plans: Mapping[int, Plan],
        *,
        everywhere: bool,
    ) -> None:
        """Draft in lockstep: a controller may learn from one row for another."""
        controller, grower = self.controller, self.grower
        ends: dict[int, Place] = {}  # by row, what was said last
        while drafting and controller.draft_together(drafting):
            step, found.steps = found.steps, found.steps + 1
            going_on = []
            for row in drafting:
                draft, start = self.drafts[row][source], self.starts[row]
                token = draft.tokens[start][step]
                if token < 0:  # nothing could be drawn
                    continue
                found.counts[row] += 1
                sure = draft.confidences[start][step] if controller.needs_confidence else 1.0
                if grower is not None:
                    best = token, *draft.others[start][step]
                    said = Place(sure, best, grower.rates(sure, len(best)))
                    if row in ends:
                        ends[row].precede(said, everywhere=everywhere)
                    else:
                        found.said[row] = said
                    ends[row] = said
                if controller.needs_confidence and self.observer is not None:
                    self.observer.see_draft(row, sure, draft.entropies[start][step])
                if (
                    not draft.ends[start][step]
                    and found.counts[row] < plans[row].limit
                    and controller.keep_drafting(row, sure)
                ):
                    going_on.append(row)
            drafting = going_on

    def _spread(
        self,
        grower: Grower,
        found: Drafted,
        source: int,
        rows: Sequence[int],
        plans: Mapping[int, Plan],
    ) -> None:
        limits = {row: plans[row].limit for row in rows}
        spread = Spread(grower, limits, self.ends, self.longest + 1)
        going = self.controller.draft_together(rows)
        while going:
            for row, own in spread.front.items():
                for number, each in enumerate(own):
                    said = self.drafts[row][source].said(self.starts[row], each.path)
                    spread.hear(row, number, *said)
            going = spread.go_on()
        found.said, found.steps, found.wide = spread.said, spread.steps, spread.wide

    def _choose(
        self,
        grower: Grower,
        found: Drafted,
        plans: Mapping[int, Plan],
        chains: Mapping[int, int],
    ) -> None:
        found.others |= {row: plans[row].others for row in chains if row in found.said}
        trees = chosen(grower, found.said, found.others, chains, self.ends, self.longest)
        for row, nodes in trees.items():
            tokens, parents = [each.token for each in nodes], [each.parent for each in nodes]
            chain = parents == [*range(len(nodes))]
            own = Plan(plans[row].source, len(nodes), tokens, None if chain else parents)
            found.counts[row], found.plans[row] = len(nodes), own

    def learn(self, found: Drafted, row: int, tokens: Sequence[int]) -> None:
        """Tell the controller how good was what a draft said along a row's new tokens."""
        if self.grower is not None:
            others = found.others.get(row, ())
            learn(self.grower, row, found.said.get(row), others, tokens, self.ends[row])


def grower_of(trace: Trace, controller: Controller) -> Grower | None:
    """The controller, where drafts of its rounds may have branches."""
    told = controller.needs_confidence and signal_of(controller) == "margin"
    if told and trace.branches and isinstance(controller, Grower):
        return controller if controller.branches else None
    return None
