"""The default controller: drafts as long as another token is expected to pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layerskip.costs.correction import MOST_SPARE, SPARE
from layerskip.costs.speculation import Costs, CostTable
from layerskip.decoding.acceptance import PRIOR, SourceGain, bin_of
from layerskip.decoding.controllers import AHEAD, Choice, Controller, Offer

_RATE_WEIGHT = 10.0  # target steps
_RATE_DECAY = 0.98  # per target step
BATCH_RATE = 0.25  # gain that a large batch must reach, in tokens per target step
_SHOWN = 8  # looked-up tokens of a round that measures the cost of many
_LOSS_ALLOWED = 2.0  # target steps per row
_LOSS_SHARE = 0.01  # target steps per token


@dataclass(slots=True)
class _Row:
    """A row, and its current round."""

    losses: list[float]  # by source: target steps spent in excess of plain decoding
    loss_allowed: float = _LOSS_ALLOWED
    tokens: float = 0.0  # recently emitted
    cost: float = 0.0  # of these, in target steps
    emitted: int = 0  # in total
    limit: int = 0
    survival: float = 1.0  # P(all tokens drafted in this round are accepted)
    bins: list[int] = field(default_factory=list)  # confidence bins of this round's tokens


@dataclass(slots=True)
class Progress:
    """The state of a round, shared by its rows."""

    offers: Sequence[Offer] = ()
    source: int | None = None
    cut: int = 0  # how many tokens of a looked-up draft are worth their price
    lookups: dict[int, int] = field(default_factory=dict)  # by row, used instead of steps
    looked_up: int = 0  # the longest draft of those rows
    rows: list[int] = field(default_factory=list)
    judges: list[int] = field(default_factory=list)  # the rows whose gains and costs decide
    steps: int = 0
    probing: bool = False
    seeing: bool = False  # whether the round is meant to measure a cost
    began: float = 0.0  # time of the choice
    drafted: float = 0.0  # time after `noted` steps
    noted: int = 0
    ended: float = 0.0  # time of the last row's report
    accepted: dict[int, int] = field(default_factory=dict)  # by row that has reported


class ExpectedGain(Controller):
    """Drafts while the expected gain of another token exceeds its price.

    With d tokens drafted, another is drafted iff P(all d accepted) * P(next accepted) exceeds
    (c + v(d + 2) - v(d + 1)) * S, where S is the running rate in tokens per target step, never
    below 1 since plain decoding is always possible. This is the optimum of a renewal-reward process
    (Dinkelbach): it maximises expected tokens per expected cost. As v may jump, the gain is that of
    the best of all later stops, not only of the next token. The rows of a batch share the estimated
    probabilities. S forgets over about 50 target steps, as stretches of text differ.

    Rows draft in lockstep: the batch drafts on iff the total gain of its rows exceeds the price,
    which all of them pay. A batch takes as long as its slowest row, so only the slowest rows count:
    those with the fewest tokens so far, or at most 12 more. S is theirs, too. They gain less than
    the mean, and measured costs of a batch are off by a tenth; so S is never below 1 + (1 - 1/B)/4
    for B rows. Probes of a batch reveal more, and are up to half as frequent.

    Of several sources, a round uses the one whose best stop has the highest expected gain: tokens
    minus S times their cost. The controller learns about lookups in every round, used or not, by
    the number of tokens they have in common with the history; about other sources only when used.
    If a batch takes a model's steps, rows draft looked-up tokens instead where that gains more.

    It never drafts from a source that would gain less than a twentieth with nine of ten tokens
    accepted. If no draft is expected to gain, it decodes plainly and probes with a model's draft
    now and then: at first, at once again after a probe that paid, half as often after one that did
    not. It does the same while a row is behind plain decoding by more than 2 target steps plus 1%
    of its tokens: then expectations were wrong, or other rows won what it lost. The row furthest
    behind then decides alone, and drafts only from sources that have not cost it anything so far.

    Args:
        costs: the costs of the source, or of each of several. For lookups c is 0.
        priors: the prior acceptance of each source (`Source.prior`); `PRIOR` by default.
        ahead: how many tokens a row may be ahead of the slowest one and still count.
        now: a clock in seconds. With it, rounds correct the costs that can be corrected (see
            `costs/correction.py`), and a few rounds are used to measure work not seen yet.
        reads_confidence: whether the host reads the confidence of every drafted token. Otherwise
            the mean acceptance so far decides, so that a GPU drafts without waiting for the host.
    """

    signal = "margin"  # on real texts it predicts acceptance better than the probability does

    def __init__(
        self,
        costs: Costs | Sequence[Costs],
        max_draft_length: int = 12,
        *,
        priors: Sequence[float] | None = None,
        ahead: float = AHEAD,
        now: Callable[[], float] | None = None,
        reads_confidence: bool = True,
    ) -> None:
        self.needs_confidence = reads_confidence
        self._now, self._place = now, (0, 1)
        tables = list(costs) if isinstance(costs, Sequence) else [costs]
        self.max_draft_length = max_draft_length
        self._ahead = ahead
        expected = [PRIOR] * len(tables) if priors is None else priors
        self._sources = [
            SourceGain(table, max_draft_length, prior)
            for table, prior in zip(tables, expected, strict=True)
        ]
        self.reset(1)

    def reset(self, rows: int) -> None:
        self._rows = [_Row([0.0] * len(self._sources)) for _ in range(rows)]
        self._round = Progress()
        self._begun, self._first = False, (0.0, 0.0)
        if all(isinstance(source.all_costs, CostTable) for source in self._sources):
            self.begin(0, rows)  # other costs may have to be measured first

    def begin(self, context: int, rows: int) -> None:
        self._end_round()
        self._place = context, rows
        for source in self._sources:
            source.begin(context, rows)
        if not self._begun:
            self._begun = True
            self._start()

    def _start(self) -> None:
        """Set all estimates to the values that costs and priors imply."""
        others = 1.0 - 1.0 / len(self._rows)
        self._least_rate = 1.0 + BATCH_RATE * others
        for source in self._sources:
            source.reset(others)
        # Lookups have no prior.
        best = [source.first_rate() for source in self._sources if source.step > 0.0]
        tokens, cost = max(best, key=lambda each: each[0] / each[1], default=(1.0, 1.0))
        self._first = _RATE_WEIGHT * tokens, _RATE_WEIGHT * cost
        for number in range(len(self._rows)):
            self.forget(number)
        self._update_rate(self._rows)

    def _update_rate(self, rows: Sequence[_Row]) -> None:
        rate = sum(row.tokens for row in rows) / sum(row.cost for row in rows)
        self.rate = max(self._least_rate, rate)

    def forget(self, row: int) -> None:
        tokens, cost = self._first
        self._rows[row] = _Row([0.0] * len(self._sources), tokens=tokens, cost=cost)

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

    def learn(self, draft: int, row: int, shown: int, right: int) -> None:
        offer = self._round.offers[draft]
        if row in offer.chances:
            return  # the source has its own expectations
        match = (offer.matches or {})[row]
        for depth in range(shown):
            self._sources[draft].copies.observe(match + depth, depth < right)

    def limit(self, row: int, allowed: int) -> int:
        round_, state = self._round, self._rows[row]
        state.limit = allowed
        if round_.source is not None:
            number = round_.lookups.get(row, round_.source)
            longest = self._sources[number].longest or 2 * round_.seeing
            state.limit = min(allowed, longest)
            if self._is_looked_up(number):
                state.limit = min(state.limit, round_.cut)
                self._count(row, state.limit)
        state.survival = 1.0
        state.bins.clear()
        return state.limit

    def keep_drafting(self, row: int, confidence: float) -> bool:
        if math.isnan(confidence):
            return False
        state = self._rows[row]
        if not self.needs_confidence:  # nor is a step's end known, which the host does not see
            state.survival *= self._drafting.acceptance.next
            return True
        confidence_bin = bin_of(confidence)
        if self._now is not None:
            self._round.drafted, self._round.noted = self._now(), self._round.steps
        state.bins.append(confidence_bin)
        state.survival *= self._drafting.acceptance.given_confidence[confidence_bin]
        return True

    def draft_together(self, rows: Sequence[int]) -> bool:
        goes_on = not self._round.steps or self._pays(rows)
        self._round.steps += goes_on
        return goes_on

    def update(self, row: int, drafted: int, accepted: int) -> None:
        state, round_ = self._rows[row], self._round
        if self._now is not None:
            round_.ended = self._now()
        round_.accepted[row] = accepted
        self._count(row, drafted)
        cost = self._drafting.cost(round_.steps, round_.looked_up)
        decay = _RATE_DECAY**cost
        state.tokens = state.tokens * decay + accepted + 1
        state.cost = state.cost * decay + cost
        state.emitted += accepted + 1
        number = round_.lookups.get(row, round_.source or 0)
        state.losses[number] += cost - accepted - 1
        state.loss_allowed += _LOSS_SHARE * (accepted + 1)
        if not self._is_looked_up(number):  # `learn` counts looked-up tokens
            self._learn_steps(row, drafted, accepted)

    def _is_looked_up(self, number: int) -> bool:
        """Whether a source drafts without steps in this round."""
        return self._round.offers[number].matches is not None

    def _learn_steps(self, row: int, drafted: int, accepted: int) -> None:
        bins = self._rows[row].bins
        for position in range(min(drafted, accepted + 1)):
            confidence_bin = bins[position] if position < len(bins) else None
            self._drafting.acceptance.observe(confidence_bin, position < accepted)

    def _count(self, row: int, drafted: int) -> None:
        """Count a row's drafted tokens in the cost of the round."""
        if row in self._round.lookups:
            self._round.looked_up = max(self._round.looked_up, drafted)
        else:
            self._round.steps = max(self._round.steps, drafted)

    @property
    def _drafting(self) -> SourceGain:
        """The source of the current round; any source for a plain step."""
        return self._sources[self._round.source or 0]

    def _decide(self, offers: Sequence[Offer]) -> int | None:
        """Choose the source with the highest expected gain, or one that is due for a probe.

        Sets `judges`, `cut` and `lookups`, unless there is nothing to draft.
        """
        if not any(any(offer.lengths.values()) for offer in offers):
            return None
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
        instead = self._best_lookups(offers) if several else {}
        for number, offer in enumerate(offers):
            if late and self._rows[last].losses[number] > 0.0:
                continue
            gain, cut, lookups = self._promise(self._sources[number], offer, instead)
            if gain > gained:
                best, gained, round_.cut, round_.lookups = number, gain, cut, lookups
        if self._now is not None and not late and self._should_probe(offers, gained):
            return self._round.source
        if best is not None:
            return best
        for number, (offer, source) in enumerate(zip(offers, self._sources, strict=True)):
            allowed = min(max(offer.lengths.values()), source.longest)
            if offer.matches is None and allowed and source.unused >= source.probe_interval:
                round_.probing = True
                return number
        return None

    def _best_lookups(self, offers: Sequence[Offer]) -> dict[int, tuple[int, list[float]]]:
        """By row, the lookup with the highest expected gain, if any, and its `expected` tokens."""
        best: dict[int, tuple[int, list[float]]] = {}
        for number, offer in enumerate(offers):
            for row in self._round.rows if offer.matches is not None else ():
                expected = self._sources[number].expected(offer, row)
                if expected[-1] > (best[row][1][-1] if row in best else 0.0):
                    best[row] = number, expected
        return best

    def _promise(
        self, source: SourceGain, offer: Offer, instead: Mapping[int, tuple[int, list[float]]]
    ) -> tuple[float, int, dict[int, int]]:
        """The best stop of a source: its expected gain, number of tokens, and `lookups`."""
        judges = self._round.judges
        expected = {row: source.expected(offer, row) for row in judges}
        price = len(judges) * self.rate
        if len(judges) == 1:  # the same in a fraction of the time, for which a GPU would wait
            pairs = zip(expected[judges[0]], source.round_costs, strict=False)
            gains = [tokens - price * (cost - 1.0) for tokens, cost in pairs]
            return max(gains), gains.index(max(gains)), {}
        best, cut, chosen = 0.0, 0, dict[int, int]()
        for drafted in range(1, max(map(len, expected.values()))):
            total, lookups = 0.0, dict[int, int]()
            for row, tokens in expected.items():
                value = tokens[min(drafted, len(tokens) - 1)]
                if offer.matches is None and row in instead:
                    lookup, theirs = instead[row]
                    other = theirs[min(drafted, len(theirs) - 1)]
                    if other > value:
                        value, lookups[row] = other, lookup
                total += value
            gain = total - price * (source.round_costs[drafted] - 1.0)
            # If no row takes steps, this is the lookups' own gain.
            if gain > best and len(lookups) < len(judges):
                best, cut, chosen = gain, drafted, lookups
        if chosen:
            more, cut = self._longer(source, cut, [instead[row][1] for row in chosen])
            best += more
        return best, cut, chosen

    def _longer(
        self, source: SourceGain, drafted: int, expected: Sequence[list[float]]
    ) -> tuple[float, int]:
        """What lookups gain beyond a round's steps, and how many of their tokens to verify."""
        gain = best = 0.0
        cut, price = drafted, len(self._round.judges) * self.rate
        for longer in range(drafted + 1, max(map(len, expected))):
            gain += sum(each[longer] - each[longer - 1] for each in expected if longer < len(each))
            gain -= price * source.verify_costs[longer - 1]
            if gain > best:
                best, cut = gain, longer
        return best, cut

    def _pays(self, rows: Sequence[int]) -> bool:
        """Whether drafting on to some later stop has a higher expected gain than stopping now."""
        round_, source = self._round, self._drafting
        judges = round_.judges
        states = [self._rows[row] for row in rows if row in judges]
        gain, survival = 0.0, 1.0
        for drafted in range(round_.steps, max((state.limit for state in states), default=0)):
            survival *= source.acceptance.next
            alive = sum(state.survival for state in states if state.limit > drafted)
            cost = source.step_costs[drafted]
            if drafted < round_.looked_up:
                cost -= source.verify_costs[drafted]
            gain += survival * alive - len(judges) * self.rate * cost
            if gain > 0.0:
                return True
        return False

    def _end_round(self) -> None:
        """Learn from the reports of the round's rows."""
        round_, source = self._round, self._drafting
        if not round_.rows:
            return
        if round_.ended:
            self._report_times(round_, source)
        for each in self._sources:
            each.unused += each is not source or round_.steps == 0
        if round_.steps:
            accepted = sum(round_.accepted.get(row, 0) for row in round_.judges)
            extra = source.cost(round_.steps, round_.looked_up) - 1.0
            paid = accepted > len(round_.judges) * self.rate * extra
            source.used(probing=round_.probing, paid=paid)
        self._round = Progress()

    def _should_probe(self, offers: Sequence[Offer], gained: float) -> bool:
        """Whether to use the round to time a kind of work that was not timed recently.

        Sets `source` and `cut`. `gained` is the best choice's expected gain over a plain step.
        """
        round_, rows = self._round, self._place[1]
        costs = self._sources[0].corrected
        if costs is None:
            return False
        corrections, price = costs.corrections, len(round_.judges) * self.rate
        shown: list[tuple[float, int | None, int]] = []  # loss, source, number of tokens
        for number, (offer, source) in enumerate(zip(offers, self._sources, strict=True)):
            looked_up = offer.matches is not None
            most = min(max(offer.lengths.values()), source.most)
            length = min(most, _SHOWN if looked_up else 1)
            costs = source.corrected
            if not length or not costs or costs.has_times(rows, length + 1 if looked_up else 0):
                continue
            if not (looked_up or self.needs_confidence):
                continue  # steps are not timed
            expected = (source.expected(offer, row, length)[-1] for row in round_.judges)
            loss = source.round_costs[length] - 1.0 + (gained - sum(expected)) / price
            shown.append((loss, number, length))
        if gained > 0.0 and corrections.needs_plain(rows):
            # If plain steps were timed before, work that was never timed comes first.
            shown.append((gained / price + corrections.has_times((rows, None, 1)), None, 0))
        for loss, chosen, length in shown:
            if loss <= corrections.spare:
                corrections.spare -= max(0.0, loss)
                round_.source, round_.cut, round_.lookups = chosen, length, {}
                round_.seeing = True
                return True
        return False

    def _report_times(self, round_: Progress, source: SourceGain) -> None:
        """Report the round's times to the cost model, where the phases can be told apart."""
        costs = source.corrected
        if costs is None:
            return
        costs.corrections.spare = min(MOST_SPARE, costs.corrections.spare + SPARE)
        seconds = round_.ended - round_.began
        if round_.steps and source.step:
            if not round_.noted:
                return
            noted, steps = map(source.passes, (round_.noted, round_.steps))
            step = (round_.drafted - round_.began) / noted
            costs.see(*self._place, 0, step)
            seconds -= steps * step
        costs.see(*self._place, 1 + max(round_.steps, round_.looked_up), seconds)
