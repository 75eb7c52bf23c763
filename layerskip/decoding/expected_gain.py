"""The default controller: drafts while another token is expected to pay.

See `controller` for what a controller is, and `controllers` for the published rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from layerskip.costs.observed import MOST_SPARE, SPARE, HealingCosts, LaterCosts
from layerskip.costs.speculation import (
    Costs,
    CostTable,
    expected_tokens,
    optimal_draft_length,
    speedup,
)
from layerskip.decoding.acceptance import (
    PRIOR,
    Acceptance,
    CopyAcceptance,
    LaterAcceptance,
    bin_of,
)
from layerskip.decoding.controller import Choice, Controller, Offer

_RATE_WEIGHT = 10.0  # target steps
_RATE_DECAY = 0.98  # per target step
_PROBE_INTERVAL = 10.0  # plain steps per target step that a one-token draft adds to a round
_HOPE, _LEAST_GAIN = 0.9, 1.05  # an acceptance to hope for, and the speedup it has to promise
_BATCH_RATE = 0.25  # by how much a large batch has to gain, in tokens per target step
_LEAST_BESIDE = 0.02  # the least chance of a token that a step takes beside the likeliest
_SHOWN = 8  # known tokens of a round that is to show what many cost
AHEAD = 12  # tokens that a row may be before the slowest one, and is still as slow
_LOSS_ALLOWED = 2.0  # target steps per row
_LOSS_SHARE = 0.01  # target steps per token


class _Source:
    """One of the sources: its costs and its acceptance so far."""

    def __init__(self, costs: Costs, longest: int, prior: float) -> None:
        self.all_costs, self.most = costs, longest
        self.prior = prior
        self.costs: CostTable | None = None
        self.healing: HealingCosts | None = None  # once there are any

    def at(self, context: int, rows: int) -> None:
        """Take the costs of a round there."""
        costs = self.all_costs.at(context, rows)
        if costs is self.costs:
            return
        self.costs = costs
        found = self.all_costs
        found = found.found if isinstance(found, LaterCosts) else found
        self.healing = found if isinstance(found, HealingCosts) else None
        self.round_costs = [costs.round_cost(drafted) for drafted in range(self.most + 1)]
        self.step_costs = [after - before for before, after in pairwise(self.round_costs)]
        self.step = costs.draft
        self.wider = costs.verify_cost(2) - 1.0
        length = optimal_draft_length(_HOPE, costs, self.most)
        hope = speedup(_HOPE, length, costs.draft, costs.verify_cost)
        self.longest = self.most if hope >= _LEAST_GAIN else 0
        self.best = optimal_draft_length(self.prior, costs, self.most)  # if it is as expected

    def cost(self, steps: int, known: int) -> float:
        """What a round costs that took so many steps, where other rows knew `known` tokens."""
        longest = max(steps, known)
        return self.round_costs[longest] - (longest - steps) * self.step

    def reset(self, others: float) -> None:
        """Forget everything; `others` is the share of a batch that is not a row's own."""
        self.acceptance, self.copies = Acceptance(self.prior), CopyAcceptance()
        self.later = LaterAcceptance()
        self.others = LaterAcceptance()  # of known tokens; their confidences do not matter
        self.first_interval = max(2.0, _PROBE_INTERVAL * (1.0 + others) * self.step_costs[0])
        # A probe is due at once, since only the prior could advise against the first draft.
        self.probe_interval = self.first_interval
        self.unused = self.first_interval  # rounds since the last one that drafted from it


@dataclass(slots=True)
class _Row:
    """A row, and its round in progress."""

    losses: list[float]
    """By source, target steps spent beyond what plain decoding would have."""
    loss_allowed: float = _LOSS_ALLOWED
    tokens: float = 0.0
    """Emitted of late; and the target steps that they cost."""
    cost: float = 0.0
    emitted: int = 0
    """Tokens in all."""
    limit: int = 0
    survival: float = 1.0
    """P(all tokens drafted in this round are accepted)."""
    bins: list[int] = field(default_factory=list)
    """Bins of the confidences of this round's tokens."""
    told: bool = False
    """Whether `see_rank` was called."""


@dataclass(slots=True)
class _Round:
    """The state of a round that its rows share."""

    offers: Sequence[Offer] | None = None
    """The sources' offers; None if the engine asked for no choice."""
    source: int | None = 0
    cut: int = 0
    """How many tokens of a looked-up draft are worth their price."""
    lookups: dict[int, int] = field(default_factory=dict)
    """The source of rows that draft known tokens beside the source's steps."""
    known: int = 0
    """The longest draft of those rows."""
    rows: list[int] = field(default_factory=list)
    judges: list[int] = field(default_factory=list)
    """The rows whose gains and costs decide."""
    steps: int = 0
    wide: int = 0
    """How many tokens of a row they took, beyond one each."""
    probing: bool = False
    seeing: bool = False
    """Whether it is to show what something costs."""
    began: float = 0.0
    """When it was chosen, when so many steps (`noted`) were taken, and when a row last reported."""
    drafted: float = 0.0
    noted: int = 0
    ended: float = 0.0
    accepted: dict[int, int] = field(default_factory=dict)
    """By row, for the rows that have reported."""


class ExpectedGain(Controller):
    """Drafts while the expected gain of another token exceeds its price.

    With d tokens drafted, another is drafted iff P(all d accepted) * P(next accepted) exceeds
    (c + v(d + 2) - v(d + 1)) * S, where S is the running rate in tokens per target step, never
    below 1 since plain decoding is always there. This is the optimum of a renewal-reward process
    (Dinkelbach): it maximises expected tokens per expected cost. As v may jump, the gain is that of
    the best stop among all later ones, not only of the next token. The probabilities are learned
    during the call, and shared by the rows of the batch. S forgets over about 50 target
    steps: a token is worth what its neighbours cost, and stretches differ. The longest draft only
    matters in loops; costs past the measured lengths are extrapolated.

    Rows draft in lockstep, so that a step for one is a step for all: the batch drafts on iff the
    gains of its rows together exceed the price, which all of them pay. A batch takes as long as its
    slowest row, so that only the slowest rows count: those with the fewest tokens so far, or at
    most 12 more. S is theirs, too. They gain less than the mean, and measured costs of a batch are
    off by a tenth. So S is never below 1 + (1 - 1/B)/4 for B rows. Probes of a batch tell more,
    and are up to half as frequent.

    Of several sources a round takes the one whose best stop promises most: expected tokens less S
    times their cost. It learns about lookups in every round, used or not, by how many tokens they
    have in common with the history; about other sources only when they are used. Where a batch
    takes the steps of a model, rows draft what they look up instead if that promises more.

    It never drafts from a source that would gain less than a twentieth with nine tokens of ten
    accepted. If no draft is expected to gain, it decodes plainly and probes with a model's draft
    now and then: again at once after a probe that paid, half as often after one that did not. The
    first round is such a probe. It does the same while a row is behind plain decoding by more than
    2 target steps and 1% of its tokens: then expectations were wrong, or other rows won what it
    lost. As a batch takes as long as its slowest row, the row furthest behind then decides alone,
    and drafts only from sources that have not cost it anything so far.

    Args:
        costs: the costs of the source, or of each of several. For lookups c is 0.
        priors: the prior acceptance of each source (`Source.prior`); `PRIOR` by default.
        ahead: how many tokens a row may be before the slowest one and still count; where rows join
            and leave, all do.
        branches: whether trees are drafted, with second-best tokens, where these are expected to
            pay: each by its chance and what another token in a pass costs.
        now: a clock in seconds. With it rounds correct costs that heal (see `observed.py`), and a
            few rounds are spent on work that was not seen yet. None: no costs are corrected.

    Raises:
        ValueError: not as many priors as costs.
    """

    needs_confidence = True
    signal = "margin"  # on real texts it predicts acceptance better than the probability does

    def __init__(
        self,
        costs: Costs | Sequence[Costs],
        max_draft_length: int = 12,
        *,
        priors: Sequence[float] | None = None,
        ahead: float = AHEAD,
        branches: bool = False,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.branches = branches
        self._now, self._place = now, (0, 1)
        tables = list(costs) if isinstance(costs, Sequence) else [costs]
        self.max_draft_length = max_draft_length
        self._ahead = ahead
        expected = [PRIOR] * len(tables) if priors is None else priors
        self._sources = [
            _Source(table, max_draft_length, prior)
            for table, prior in zip(tables, expected, strict=True)
        ]
        self.reset(1)

    def reset(self, rows: int) -> None:
        self._rows = [_Row([0.0] * len(self._sources)) for _ in range(rows)]
        self._round = _Round()
        self._begun, self._first = False, (0.0, 0.0)
        if all(isinstance(source.all_costs, CostTable) for source in self._sources):
            self.begin(0, rows)  # other costs may have to be measured first

    def begin(self, context: int, rows: int) -> None:
        self._end_round()
        self._place = context, rows
        for source in self._sources:
            source.at(context, rows)
        if not self._begun:
            self._begun = True
            self._start()

    def _start(self) -> None:
        """Expect what costs and priors say."""
        others = 1.0 - 1.0 / len(self._rows)
        self._least_rate = 1.0 + _BATCH_RATE * others
        for source in self._sources:
            source.reset(others)
        # lookups have no prior
        models = [each for each in self._sources if each.costs and each.costs.draft > 0.0]
        best = [(expected_tokens(s.prior, s.best), s.round_costs[s.best]) for s in models]
        tokens, cost = max(best, key=lambda each: each[0] / each[1], default=(1.0, 1.0))
        self._first = _RATE_WEIGHT * tokens, _RATE_WEIGHT * cost
        for number in range(len(self._rows)):
            self.forget(number)
        self._update_rate(self._rows)

    def _update_rate(self, rows: Sequence[_Row]) -> None:
        """Take the rate of some rows."""
        rate = sum(row.tokens for row in rows) / sum(row.cost for row in rows)
        self.rate = max(self._least_rate, rate)

    def forget(self, row: int) -> None:
        losses = [0.0] * len(self._sources)
        tokens, cost = self._first
        self._rows[row] = _Row(losses, tokens=tokens, cost=cost)

    def choose(self, offers: Sequence[Offer]) -> Choice:
        if len(offers) != len(self._sources):
            raise ValueError(
                f"expected-gain needs costs for each of {len(offers)} drafts, got "
                f"{len(self._sources)}; give one table for each, in their order"
            )
        self._end_round()
        self._round.rows = list(offers[0].lengths)
        self._round.offers = offers
        source = self._round.source = self._decide(offers)
        lookups = self._round.lookups
        if self._now is not None:
            self._round.began = self._now()
        return {row: lookups.get(row, source) for row in self._round.rows} if lookups else source

    def learn(self, draft: int, row: int, known: int, right: int) -> None:
        offers = self._round.offers or ()
        if row in offers[draft].chances:
            return  # its source has its own expectations
        match = (offers[draft].matches or {})[row]
        for depth in range(known):
            self._sources[draft].copies.observe(match + depth, depth < right)

    def limit(self, row: int, allowed: int) -> int:
        round_, state = self._round, self._rows[row]
        if round_.offers is None:  # no choice: there is one source
            if row in round_.rows:
                self._end_round()
            round_ = self._round
            round_.rows.append(row)
        state.limit = allowed
        if round_.source is not None:
            number = round_.lookups.get(row, round_.source)
            longest = self._sources[number].longest or 2 * round_.seeing
            state.limit = min(allowed, longest)
            if round_.offers and round_.offers[number].matches is not None:
                state.limit = min(state.limit, round_.cut)
                self._count(row, state.limit)
        state.survival, state.told = 1.0, False
        state.bins.clear()
        return state.limit

    def keep_drafting(self, row: int, confidence: float) -> bool:
        if math.isnan(confidence):
            return False
        state = self._rows[row]
        confidence_bin = bin_of(confidence)
        if self._now is not None:
            self._round.drafted, self._round.noted = self._now(), self._round.steps
        state.bins.append(confidence_bin)
        state.survival *= self._taken.acceptance.given_confidence[confidence_bin]
        return True

    def draft_together(self, rows: Sequence[int]) -> bool:
        """Whether rows that may draft on are worth another step of the whole batch."""
        round_ = self._round
        if round_.steps:
            goes_on = self._pays(rows)
        elif round_.offers is None:
            lengths = {row: self._rows[row].limit for row in round_.rows}
            goes_on = self._decide([Offer(lengths, None)]) is not None
        else:
            goes_on = True
        round_.steps += goes_on
        return goes_on

    def rates(self, confidence: float, count: int) -> Sequence[float]:
        confidence_bin, source = bin_of(confidence), self._taken
        best = source.acceptance.given_confidence[confidence_bin]
        later = source.later.given_wrong(confidence_bin, count - 1)
        return best, *((1.0 - best) * rate for rate in later)

    def expand(self, rows: Mapping[int, Sequence[float]]) -> int:
        round_, source = self._round, self._taken
        judged = [rows[row] for row in round_.judges if row in rows]
        price = len(round_.judges) * self.rate
        right = source.acceptance.next
        beside = (1.0 - right) * source.later.mean
        likely = sum(chances[0] for chances in judged if chances)
        # another token in a step is taken to cost what it does in a pass of the target
        wider = source.step * source.wider
        width, gain, alive = 1, 0.0, likely
        for width in range(1, max(map(len, judged), default=0) + 1):
            more = right * sum(chances[width] for chances in judged if len(chances) > width)
            nodes = min(round_.steps + round_.wide + width, source.most) - 1
            least = price * (wider + source.step_costs[nodes] - source.step)
            # it takes the place of the last token on the likeliest path that fits
            last = likely * right ** (source.most - nodes)
            if more <= max(least, last, _LEAST_BESIDE * len(judged)):
                break
            gain += more - price * wider
        for steps in range(round_.steps, source.most):
            cost = source.step_costs[min(steps + round_.wide, source.most - 1)]
            gain += alive * right - price * cost
            gain += max(0.0, alive * beside - price * (cost - source.step))
            alive *= right
            if gain > 0.0:
                round_.steps += 1
                round_.wide += width - 1
                return width
        return 0

    def copied(self, draft: int, row: int) -> Sequence[float]:
        offer, copies = (self._round.offers or ())[draft], self._sources[draft].copies
        match = (offer.matches or {})[row]
        return [copies.acceptance(match + depth) for depth in range(offer.lengths[row])]

    def instead(self, draft: int) -> float:
        return self._sources[draft].others.mean

    def widen(self, rows: Mapping[int, tuple[int, Sequence[float]]]) -> int:
        round_, source = self._round, self._taken
        width = max(round_.known, *(chain for chain, _ in rows.values()))
        longest = max(len(chances) for _, chances in rows.values())
        judged = [chances for row, (_, chances) in rows.items() if row in round_.judges]
        gain = best = 0.0
        for wider in range(width + 1, min(longest, source.most) + 1):
            gain += sum(chances[wider - 1] for chances in judged if len(chances) >= wider)
            cost = source.step_costs[wider - 1] - source.step
            gain -= len(round_.judges) * self.rate * cost
            if gain > best:
                best, round_.known = gain, wider
        return max(width, round_.known)

    def see_rank(self, row: int, confidence: float, rank: int | None) -> None:
        confidence_bin, source = bin_of(confidence), self._taken
        self._rows[row].told = True
        source.acceptance.observe(confidence_bin, rank == 0)
        if rank != 0:
            source.later.observe(confidence_bin, rank)

    def see_instead(self, draft: int, right: bool) -> None:
        self._sources[draft].others.observe(0, 1 if right else None)

    def update(self, row: int, drafted: int, accepted: int) -> None:
        state, round_, source = self._rows[row], self._round, self._taken
        if self._now is not None:
            round_.ended = self._now()
        round_.accepted[row] = accepted
        if not state.told:
            self._count(row, drafted)
        cost = source.cost(round_.steps, round_.known) + round_.wide * source.step * source.wider
        decay = _RATE_DECAY**cost
        state.tokens = state.tokens * decay + accepted + 1
        state.cost = state.cost * decay + cost
        state.emitted += accepted + 1
        number = round_.lookups.get(row, round_.source or 0)
        state.losses[number] += cost - accepted - 1
        state.loss_allowed += _LOSS_SHARE * (accepted + 1)
        if state.told or (round_.offers and round_.offers[number].matches is not None):
            return  # `see_rank` has counted its places; `learn` counts looked-up tokens
        for position in range(min(drafted, accepted + 1)):
            confidence_bin = state.bins[position] if position < len(state.bins) else None
            source.acceptance.observe(confidence_bin, position < accepted)

    def _count(self, row: int, drafted: int) -> None:
        """Count a row's draft of so many tokens in what the round costs."""
        if row in self._round.lookups:
            self._round.known = max(self._round.known, drafted)
        else:
            self._round.steps = max(self._round.steps, drafted)

    @property
    def _taken(self) -> _Source:
        """The source of the round in progress; for a plain step any."""
        return self._sources[self._round.source or 0]

    def _decide(self, offers: Sequence[Offer]) -> int | None:
        """The source that promises most, or is due for a probe.

        Sets `judges`, `cut` and `lookups`.
        """
        round_ = self._round
        losses = {row: sum(self._rows[row].losses) for row in round_.rows}
        last = max(round_.rows, key=losses.__getitem__)
        late = losses[last] > self._rows[last].loss_allowed
        slowest = min(self._rows[row].emitted for row in round_.rows)
        slow = [row for row in round_.rows if self._rows[row].emitted <= slowest + self._ahead]
        round_.judges = [last] if late else slow
        self._update_rate([self._rows[row] for row in round_.judges])
        best, gained = None, 0.0
        several = len(round_.judges) > 1 and any(offer.matches is None for offer in offers)
        known = self._looked_up(offers) if several else {}
        for number, offer in enumerate(offers):
            if late and self._rows[last].losses[number] > 0.0:
                continue
            gain, cut, lookups = self._promise(number, offer, known)
            if gain > gained:
                best, gained, round_.cut, round_.lookups = number, gain, cut, lookups
        if self._now is not None and not late and self._to_see(offers, gained):
            return self._round.source
        if best is not None:
            return best
        for number, offer in enumerate(offers):
            source = self._sources[number]
            allowed = min(max(offer.lengths.values()), source.longest)
            if offer.matches is None and allowed and source.unused >= source.probe_interval:
                round_.probing = True
                return number
        return None

    def _to_see(self, offers: Sequence[Offer], gained: float) -> bool:
        """Whether the round is to show what was not seen of late, for less than may be spared.

        Sets `source` and `cut`.

        Args:
            gained: tokens that the best choice is expected to gain over a plain step.
        """
        round_, rows = self._round, self._place[1]
        healing = self._sources[0].healing
        if healing is None:
            return False
        observed, price = healing.observed, len(round_.judges) * self.rate
        shown: list[tuple[float, int | None, int]] = []  # for what loss, of which source, how many
        for number, source in enumerate(self._sources):
            known = offers[number].matches is not None
            most = min(max(offers[number].lengths.values()), source.most)
            length = min(most, _SHOWN if known else 1)
            healing = source.healing
            if not length or not healing or healing.knows(rows, length + 1 if known else 0):
                continue
            expected = (
                self._expected(number, offers[number], row, length)[-1] for row in round_.judges
            )
            loss = source.round_costs[length] - 1.0 + (gained - sum(expected)) / price
            shown.append((loss, number, length))
        if gained > 0.0 and observed.needs_plain(rows):
            # where it was seen before, what was never seen comes first
            shown.append((gained / price + observed.knows((rows, None, 1)), None, 0))
        for loss, chosen, length in shown:
            if loss <= observed.spare:
                observed.spare -= max(0.0, loss)
                round_.source, round_.cut, round_.lookups = chosen, length, {}
                round_.seeing = True
                return True
        return False

    def _expected(
        self, number: int, offer: Offer, row: int, longest: int | None = None
    ) -> list[float]:
        """Tokens of a row that are expected to be accepted, of 0, 1, 2, ... that it may draft.

        Args:
            longest: the most tokens; by default as many as may pay.
        """
        source, matches = self._sources[number], offer.matches
        most = min(offer.lengths[row], source.longest if longest is None else longest)
        if row in offer.chances:
            return [0.0, *accumulate(offer.chances[row][:most])]
        survival, found = 1.0, [0.0]
        for drafted in range(most):
            if matches is None:
                survival *= source.acceptance.next
            else:
                survival *= source.copies.acceptance(matches[row] + drafted)
            found.append(found[-1] + survival)
        return found

    def _looked_up(self, offers: Sequence[Offer]) -> dict[int, tuple[int, list[float]]]:
        """By row, the lookup that promises most, and its `_expected`, if it has any."""
        found: dict[int, tuple[int, list[float]]] = {}
        for number, offer in enumerate(offers):
            for row in self._round.rows if offer.matches is not None else ():
                expected = self._expected(number, offer, row)
                if expected[-1] > (found[row][1][-1] if row in found else 0.0):
                    found[row] = number, expected
        return found

    def _promise(
        self, number: int, offer: Offer, known: Mapping[int, tuple[int, list[float]]]
    ) -> tuple[float, int, dict[int, int]]:
        """The best stop of a source: its expected gain, its number of tokens, and `lookups`.

        Args:
            known: what rows may draft instead of a model's tokens (see `_looked_up`).
        """
        source, judges = self._sources[number], self._round.judges
        expected = {row: self._expected(number, offer, row) for row in judges}
        price = len(judges) * self.rate
        best, cut, chosen = 0.0, 0, dict[int, int]()
        for drafted in range(1, max(map(len, expected.values()))):
            total, lookups = 0.0, dict[int, int]()
            for row, own in expected.items():
                value = own[min(drafted, len(own) - 1)]
                if offer.matches is None and row in known:
                    other, theirs = known[row]
                    instead = theirs[min(drafted, len(theirs) - 1)]
                    if instead > value:
                        value, lookups[row] = instead, other
                total += value
            gain = total - price * (source.round_costs[drafted] - 1.0)
            # without a row that takes steps this is the lookups' own promise
            if gain > best and len(lookups) < len(judges):
                best, cut, chosen = gain, drafted, lookups
        if chosen:
            more, cut = self._longer(source, cut, [known[row][1] for row in chosen])
            best += more
        return best, cut, chosen

    def _longer(
        self, source: _Source, drafted: int, expected: Sequence[list[float]]
    ) -> tuple[float, int]:
        """What known drafts gain beyond a round's steps, and how far they are to be verified."""
        gain = best = 0.0
        cut, price = drafted, len(self._round.judges) * self.rate
        for longer in range(drafted + 1, max(map(len, expected))):
            gain += sum(each[longer] - each[longer - 1] for each in expected if longer < len(each))
            gain -= price * (source.step_costs[longer - 1] - source.step)
            if gain > best:
                best, cut = gain, longer
        return best, cut

    def _end_round(self) -> None:
        """Learn from what the rows of the round have reported."""
        round_, taken, self._round = self._round, self._taken, _Round()
        if not round_.rows:
            return
        if round_.ended:
            self._heal(round_, taken)
        for source in self._sources:
            if source is not taken or round_.steps == 0:
                source.unused += 1
        if round_.steps == 0:
            return
        taken.acceptance.estimate()
        taken.unused = 0.0
        won = sum(round_.accepted.get(row, 0) for row in round_.judges)
        extra = (
            taken.cost(round_.steps, round_.known) - 1.0
        )  # steps of two tokens counted as of one
        if not round_.probing:
            taken.probe_interval = taken.first_interval
        elif won > len(round_.judges) * self.rate * extra:
            taken.unused = taken.probe_interval  # it paid: look again at once
        else:
            taken.probe_interval *= 2

    def _heal(self, round_: _Round, source: _Source) -> None:
        """Report what the round took, where that can be told."""
        healing = source.healing
        if healing is None:
            return
        healing.observed.spare = min(MOST_SPARE, healing.observed.spare + SPARE)
        seconds = round_.ended - round_.began
        if round_.steps and source.step:
            if not round_.noted or round_.wide:
                return
            step = (round_.drafted - round_.began) / round_.noted
            healing.see(*self._place, 0, step)
            seconds -= round_.steps * step
        healing.see(*self._place, 1 + max(round_.steps, round_.known), seconds)

    def _pays(self, rows: Sequence[int]) -> bool:
        """Whether some stop later than now is expected to gain over stopping now."""
        round_, source = self._round, self._taken
        judges = round_.judges
        states = [self._rows[row] for row in rows if row in judges]
        gain, survival = 0.0, 1.0
        for drafted in range(round_.steps, max((state.limit for state in states), default=0)):
            survival *= source.acceptance.next
            alive = sum(state.survival for state in states if state.limit > drafted)
            cost = source.step_costs[drafted] if drafted >= round_.known else source.step
            gain += survival * alive - len(judges) * self.rate * cost
            if gain > 0.0:
                return True
        return False
