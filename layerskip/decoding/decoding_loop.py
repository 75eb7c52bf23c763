"""The life of texts on any target, live or recorded; a round is plan, draft, verify, judge, commit.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from layerskip.cache.branches import along, trunk
from layerskip.costs.speculation import draft_limit, remaining
from layerskip.decoding.controllers import Chooser, Controller, Offer, first_offer, signal_of
from layerskip.decoding.rounds import (
    DraftedTokens,
    Round,
    StepRequest,
    Target,
    VerifyResult,
    joint_source,
)
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.base import Proposal, State
from layerskip.texts.tokens import common_prefix

PLAIN = Proposal(0)
"""Nothing is drafted."""


class RowPlan(NamedTuple):
    """What a row drafts in a round, and from which source; a plain step has length 0."""

    source: int | None
    proposal: Proposal


class Outcome(NamedTuple):
    """The result of a round: plans, emitted tokens and the number of accepted ones, by row."""

    plans: Mapping[int, RowPlan]
    drafts: DraftedTokens
    verdict: VerifyResult
    emitted: Mapping[int, Sequence[int]]
    accepted: Mapping[int, int]

    def source(self, row: int) -> int | None:
        return self.plans[row].source if row in self.plans and self.drafts.tokens[row] else None


class Loop:
    """Texts on a target: they are seated, run their prompts, take part in rounds, and leave.

    `generate()` seats all rows and drains the loop; servers seat texts as they come; a replay gives
    a recorded target. The controller decides how long each row drafts in a round.

    Args:
        longest: maximum number of tokens of a row that a round verifies.
        keep: whether to keep the processed scores of emitted tokens.
        note_time: called after drafting, and after the target's pass.
    """

    def __init__(
        self,
        target: Target,
        controller: Controller,
        *,
        longest: int,
        keep: bool = False,
        note_time: Callable[[], None] = lambda: None,
    ) -> None:
        self.target, self.controller, self.longest = target, controller, longest
        self.batch, self.seats = target.batch, target.batch.seats
        self.keep, self.note_time = keep, note_time
        self.signal: str | None = None
        if controller.needs_confidence:
            # Margins are those of the target only if drafts share its noise.
            self.signal = signal_of(controller) if target.rule.shares_noise else "probability"
        self._chooser = controller if isinstance(controller, Chooser) else None
        self._proposals: Sequence[Mapping[int, Proposal]] = ()
        self._trees: Any = None  # of the round
        controller.reset(len(self.seats))

    @property
    def going(self) -> list[int]:
        """The rows of the next round."""
        return [row for row in self.batch.rows if not self.seats[row].finished]

    def seat(self, seat: Seat) -> None:
        """Give a row to another text, whose prompt has not been run."""
        self.batch.seat(seat)
        self.controller.forget(seat.row)

    def prefill(
        self, ends: Mapping[int, int] | None = None, read: Callable[[Tensor], None] | None = None
    ) -> Outcome:
        """Run prompts of joining rows up to given ends, or all of them (see `Passes.prefill`).

        The outcome has the first token of each row whose prompt is done.
        """
        before = {*self.batch.rows}
        raw = self.target.prefill(ends, read)
        self.note_time()
        rows = [row for row in self.batch.rows if row not in before]
        if not rows:
            return Outcome({}, DraftedTokens.of(len(self.seats)), VerifyResult([], []), {}, {})
        verdict = self.target.judge(raw, [(row, 0) for row in rows], keep=self.keep)
        return self._commit(rows, {}, None, verdict)

    def round(self) -> Outcome:
        """Run a round of the unfinished rows."""
        plans = self._plan(self.going)
        drafts = self._draft(plans)
        self.note_time()
        rows = [row for row in plans if not self.seats[row].finished]  # errors may have ended some
        if not rows:
            return Outcome(plans, drafts, VerifyResult([], []), {}, {})
        positions = drafts.positions(rows)
        raw = self.target.verify(drafts, positions)
        self.note_time()
        verdict = self.target.judge(raw, positions, drafts, keep=self.keep)
        return self._commit(rows, plans, drafts, verdict)

    def record(self, outcome: Outcome, index: int) -> Round:
        """What is kept of a round, except for scores and times."""
        rows, drafts = range(len(self.seats)), outcome.drafts
        return Round(
            index=index,
            tokens=tuple(tuple(outcome.emitted.get(row, ())) for row in rows),
            drafted=tuple(map(len, drafts.tokens)),
            accepted=tuple(outcome.accepted.get(row, 0) for row in rows),
            confidences=tuple(map(tuple, drafts.confidences)),
            signal=self.signal,
            finished=tuple(seat.finished for seat in self.seats),
            source=joint_source([outcome.source(row) for row in rows]),
            drafts=tuple(map(tuple, drafts.tokens)),
            parents=tuple(drafts.parents.get(row) for row in rows),
            steps=drafts.num_steps,
        )

    def leave(self, rows: Collection[int]) -> None:
        """Let rows go, finished or not."""
        self.target.leave(rows)

    def compact(self) -> bool:
        """Let finished rows go as soon as the others fit into half of a pass (see `remaining`)."""
        rows, going = [*self.batch.rows], self.going
        size = remaining(len(rows), len(going))
        if size == len(rows):
            return False
        done = [row for row in rows if self.seats[row].finished]
        done.sort(key=lambda row: self.seats[row].length)  # short rows have the least to attend to
        self.leave(done[size - len(going) :])
        return True

    def _plan(self, rows: Sequence[int]) -> dict[int, RowPlan]:
        controller, count = self.controller, len(self.batch.states)
        self._proposals = [
            {row: self._proposal(number, row) for row in rows}
            for number in range(count if self.longest else 0)
        ]
        context = sum(self.seats[row].length for row in rows) // len(rows)
        controller.begin(context, len(self.batch.rows))
        offers = [offer_of(each) for each in self._proposals]
        choice = (self._chooser.choose if self._chooser else first_offer)(offers)
        plans = {}
        for row in rows:
            source = choice.get(row) if isinstance(choice, Mapping) else choice
            most = 0 if source is None else offers[source].lengths[row]
            limit = min(controller.limit(row, most), most)
            proposal = PLAIN if source is None or not limit else self._proposals[source][row]
            if proposal.parents is not None:
                proposal = trunk_first(proposal.some(range(1, limit + 1)))
            elif proposal.tokens is not None:
                proposal = proposal._replace(tokens=proposal.tokens[:limit])
            plans[row] = RowPlan(source, proposal._replace(length=limit))
        if any(in_steps(each.proposal) for each in plans.values()):
            # Steps feed the other rows' tokens one at a time, as a chain.
            plans = {
                row: RowPlan(each.source, chained(each.proposal)) for row, each in plans.items()
            }
        return plans

    def _proposal(self, source: int, row: int) -> Proposal:
        target, batch, seat = self.target, self.batch, self.seats[row]
        of, size = batch.sources[source], batch.model.vocabulary
        longest = self.longest // target.rule.candidates  # of several tokens of a position
        most = draft_limit(longest, seat.left, batch.cache.slots - seat.length)
        proposal = batch.states[source].offer(row, min(most, of.longest or most))
        if not proposal.tokens:
            return proposal
        if not 0 <= min(proposal.tokens) <= max(proposal.tokens) < size:
            raise ValueError(
                f"the source {of.name} must propose token ids in 0..{size - 1}, the model's "
                f"vocabulary; got {[*proposal.tokens]}"
            )
        if proposal.parents is not None and (target.rule.trees or not target.branches):
            proposal = chained(proposal)
        if proposal.length > most:
            proposal = proposal.some(range(1, most + 1))
        return usable(proposal, seat, size)

    def _draft(self, plans: Mapping[int, RowPlan]) -> DraftedTokens:
        """Collect tokens that need no step, up to each row's limit, and take steps for the rest."""
        rule, trees = self.target.rule, None
        if rule.trees is not None:
            trees = rule.trees()
        elif self.signal == "margin":
            trees = self.controller.trees
        if not self.target.branches:
            trees = None
        self._trees = trees
        drafts = DraftedTokens.of(len(self.seats))
        stepping: dict[int, list[int]] = {}  # by source, the rows of its steps
        for row, plan in plans.items():
            if plan.source is None or not plan.proposal.length:
                continue
            if in_steps(plan.proposal):
                stepping.setdefault(plan.source, []).append(row)
            else:
                drafts.propose(row, plan.proposal)
                drafts.step_free.add(row)
        if len(stepping) > 1:
            raise ValueError(
                "at most one source of a round may take steps of a model; the controller chose "
                f"sources {', '.join(map(str, stepping))}"
            )
        for source, rows in stepping.items():
            state, ask = self.batch.states[source], StepRequest(source, self.signal)
            # Rows of a shared prefix cannot branch if they stop early, which depends on candidates.
            uneven = rule.trees is not None and len(rows) > 1 and state.prefix
            if trees is None or uneven:
                drafts.kept_steps = self._take_steps(drafts, ask, rows, plans)
            else:
                trees.begin([seat.eos for seat in self.seats], self.longest, state)
                ask = ask._replace(best=state.best if rule.trees is None else rule.candidates)
                drafts.kept_steps = self._take_steps(drafts, ask, rows, plans, trees.see)
                self._branch_out(drafts, rows, state, trees)
        return drafts

    def _take_steps(
        self,
        drafts: DraftedTokens,
        ask: StepRequest,
        drafting: Sequence[int],
        plans: Mapping[int, RowPlan],
        see: Callable[[int, Sequence[int], float], None] | None = None,
    ) -> int:
        """Draft chains in lockstep, each row as long as the controller says; returns the steps.

        If nothing needs the tokens before the target has seen them, they are not read, so that the
        host does not wait for the device. A draft may then run on past an end of text.
        """
        controller = self.controller
        while drafting and controller.draft_together(drafting):
            result = self.target.draft(drafts, drafting, ask)
            drafts.num_steps += 1
            going_on = []
            for i, row in enumerate(drafting):
                token, sure = None, 1.0
                if result is not None:
                    token = result.tokens[i][0]
                    if token < 0:
                        continue
                    drafts.tokens[row].append(token)
                    if ask.signal is not None:
                        sure = result.confidences[i]
                        drafts.confidences[row].append(sure)
                    if see is not None:
                        see(row, result.tokens[i], sure)
                drafts.lengths[row] += 1
                if (
                    token not in self.seats[row].eos
                    and drafts.lengths[row] < plans[row].proposal.length
                    and controller.keep_drafting(row, sure)
                ):
                    going_on.append(row)
            drafting = going_on
        return drafts.num_steps

    def _branch_out(
        self, drafts: DraftedTokens, rows: Sequence[int], state: State, trees: Any
    ) -> None:
        """Replace rows' chains by the trees that a controller's tree builder chooses."""
        # Branches follow all steps of a shared prefix; without one, all tokens are fed again.
        lengths, steps = {row: len(drafts.tokens[row]) for row in rows}, drafts.kept_steps
        chains = {row: n for row, n in lengths.items() if not state.prefix or n == steps}
        for row, tree in trees.choose(chains).items():
            if tree.length > lengths[row] and not state.prefix:
                drafts.kept_steps = 0
            drafts.propose(row, tree)
            drafts.chosen.add(row)

    def _commit(
        self,
        rows: Sequence[int],
        plans: Mapping[int, RowPlan],
        drafts: DraftedTokens | None,
        verdict: VerifyResult,
    ) -> Outcome:
        """Emit what was judged, and tell the target, the sources and the controller."""
        emitted: dict[int, Sequence[int]] = {}
        accepted: dict[int, int] = {}
        for row in rows:
            seat, tokens = self.seats[row], verdict.tokens[row]
            if seat.finished:
                continue
            emitted[row] = seat.emit(tokens)
            accepted[row] = min(len(tokens) - 1, len(emitted[row]))
            self.target.commit(row, emitted[row], drafts)
            if drafts is not None:
                self._learn(row, emitted[row])
                if self._trees is not None and in_steps(plans[row].proposal):
                    self._trees.learn(row, tokens)
                self.controller.update(row, len(drafts.tokens[row]), len(tokens) - 1)
        return Outcome(
            plans, drafts or DraftedTokens.of(len(self.seats)), verdict, emitted, accepted
        )

    def _learn(self, row: int, emitted: Sequence[int]) -> None:
        """Report to a controller that chooses how good step-free tokens were, used or not."""
        for number, proposals in enumerate(self._proposals if self._chooser else ()):
            proposal = proposals[row]
            if self._chooser and (tokens := proposal.tokens):
                if proposal.parents is None:
                    right = common_prefix(tokens, emitted)
                else:
                    right = len(along(proposal.parents, tokens, emitted))
                shown = min(len(tokens), len(emitted))
                self._chooser.learn(number, row, min(right + 1, shown), right)


def in_steps(proposal: Proposal) -> bool:
    """Whether there are tokens to draft by steps."""
    return proposal.tokens is None and proposal.length > 0


def chained(proposal: Proposal) -> Proposal:
    """Reduce a proposal to its trunk, without branches."""
    return proposal if proposal.parents is None else proposal.some(trunk(proposal.parents))


def offer_of(proposals: Mapping[int, Proposal]) -> Offer:
    """Combine one source's proposals to all rows, as controllers see them."""
    matches = {row: each.match for row, each in proposals.items() if each.match is not None}
    chances = {row: each.chances for row, each in proposals.items() if each.chances is not None}
    return Offer({row: each.length for row, each in proposals.items()}, matches or None, chances)


def usable(proposal: Proposal, seat: Seat, vocabulary: int) -> Proposal:
    """Cut proposed tokens at an end of text, and before the first one that a grammar forbids."""
    tokens, parents, eos = proposal.tokens or (), proposal.parents, seat.eos
    if parents is None:
        end = next((i for i, token in enumerate(tokens, 1) if token in eos), len(tokens))
        end = min(end, seat.allowed(tokens[:end], vocabulary))
        return proposal if end == len(tokens) else proposal.some(range(1, end + 1))
    kept = {0}
    for node, parent in enumerate(parents, 1):
        if parent in kept and not (parent and tokens[parent - 1] in eos):
            kept.add(node)
    return proposal.some(sorted(kept)[1:])


def trunk_first(proposal: Proposal) -> Proposal:
    """Reorder a tree with its trunk first. If the trunk is accepted, no cache entry moves."""
    if proposal.parents is None:
        return proposal
    first = trunk(proposal.parents)
    return proposal.some([*first, *sorted({*range(1, proposal.length + 1)} - {*first})])
