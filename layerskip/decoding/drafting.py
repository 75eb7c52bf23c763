"""Drafts a round's tokens: those that are known, steps for the other rows, and trees of both.

Letters: R rows of a pass, N positions, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from layerskip.decoding.controller import Controller, Grower, Observer, signal_of
from layerskip.decoding.draws import DraftedTokens, Draws, certainty
from layerskip.decoding.growing import Place, Spread, chosen, learn
from layerskip.decoding.passes import Passes
from layerskip.decoding.planning import Plan
from layerskip.model.cache import on_device


class Drafter:
    """Drafts what rows plan, for as long as the controller says.

    Args:
        eos: of each row, tokens behind which nothing is drafted.
        longest: the most tokens of a row that a round verifies.

    Attributes:
        signal: of the confidences that the controller is told (see `Draws.draft`), if it is.
    """

    def __init__(
        self,
        passes: Passes,
        draws: Draws,
        controller: Controller,
        *,
        eos: Sequence[frozenset[int]],
        longest: int,
    ) -> None:
        self.passes, self.draws, self.controller = passes, draws, controller
        self.eos, self.longest = eos, longest
        self.signal: str | None = None
        if controller.needs_confidence:
            # under the rejection rule draft and target have different noise
            self.signal = "probability" if draws.rejection else signal_of(controller)
        self._observer = controller if isinstance(controller, Observer) else None

    @property
    def branches(self) -> bool:
        """Whether drafts may have any."""
        # processors would have to read a text for every branch, and the rejection rule is of one
        # draft
        return self.passes.model.branches and not self.draws.apart

    @property
    def _grower(self) -> Grower | None:
        controller = self.controller
        if self.branches and self.signal == "margin" and isinstance(controller, Grower):
            return controller if controller.branches else None
        return None

    def draft(self, plans: Mapping[int, Plan]) -> DraftedTokens:
        """Tokens that are known, up to each row's limit, and steps for the other rows."""
        places, emitted, device = self.passes.rows, self.draws.emitted, self.passes.model.device
        drafts = DraftedTokens(
            tokens=[[] for _ in emitted],
            confidences=[[] for _ in emitted],
            lengths=[0 for _ in emitted],
            fed=on_device([[emitted[row][-1]] for row in places], device),
        )
        drafting: dict[int, list[int]] = {}  # by source, the rows of its steps
        for row, plan in plans.items():
            if plan.source is None or not plan.limit:
                continue
            if plan.tokens is None:
                drafting.setdefault(plan.source, []).append(row)
                continue
            drafts.known.add(row)
            drafts.tokens[row] = list(plan.tokens)
            drafts.lengths[row] = len(plan.tokens)
            if plan.parents is not None:
                drafts.parents[row] = plan.parents
            for offset, token in enumerate(drafts.tokens[row]):
                self.draws.remember(row, offset, token)
        if len(drafting) > 1:
            raise ValueError(
                "one source at most of a round may have tokens that are not known beforehand; the "
                f"controller chose sources {', '.join(map(str, drafting))}"
            )
        steps = 0
        for source, rows in drafting.items():
            grower, state = self._grower, self.passes.states[source]
            if grower is not None and state.wide and not (drafts.known or self._observer):
                self._spread(grower, drafts, source, rows, plans)
                self._choose(grower, drafts, plans, dict.fromkeys(rows, 0))
                continue
            steps = drafts.num_steps = self._step(drafts, source, rows, plans)
            if grower is not None and drafts.said:
                # what is beside a chain comes behind all steps; without a prefix all is fed anew
                chains = {row: len(drafts.tokens[row]) for row in drafts.said}
                anew = not state.prefix
                fit = {row: n for row, n in chains.items() if anew or n == steps}
                self._choose(grower, drafts, plans, fit)
                more = any(drafts.lengths[row] > n for row, n in chains.items())
                steps = 0 if anew and more else steps
        count = 1 + max(drafts.lengths) - steps
        if count > 1:  # tokens that no step was fed
            drafts.fed = drafts.fed.repeat(1, count)  # (R, T)
            known = drafts.known | drafts.said.keys()
            some = [row for row in places if not steps or row in known]
            fed = [self._known(drafts, row, range(steps, steps + count)) for row in some]
            at = on_device([places[row] for row in some], device)  # (N,)
            drafts.fed[at] = on_device(fed, device)
        return drafts

    def _known(self, drafts: DraftedTokens, row: int, offsets: Iterable[int]) -> list[int]:
        """The tokens of a row at places after its last emitted one; the last again behind all."""
        tokens = [self.draws.emitted[row][-1], *drafts.tokens[row]]
        return [tokens[min(offset, len(tokens) - 1)] for offset in offsets]

    def _step(
        self, drafts: DraftedTokens, source: int, drafting: list[int], plans: Mapping[int, Plan]
    ) -> int:
        """Draft in lockstep, each row for as long as the controller says; the steps taken.

        Rows of known tokens feed these. If nothing needs the tokens before the target has seen
        them, they are not read, so that the host does not wait for the device. A draft may then run
        on behind an end of text.
        """
        controller, grower = self.controller, self._grower
        device = self.passes.model.device
        unread = not controller.needs_confidence and not self.draws.reads_history
        drafts.unread = unread
        places, known = self.passes.rows, sorted(drafts.known)
        steps = max(plans[row].limit for row in drafting)
        ends: dict[int, Place] = {}  # by row, what was said last
        state = self.passes.states[source]
        if known:
            ahead = [self._known(drafts, row, range(1, steps + 1)) for row in known]
            ahead_of = on_device(ahead, device)  # (N, steps)
            at = on_device([places[row] for row in known], device)  # (N,)
        for step in range(steps):
            if not (drafting and controller.draft_together(drafting)):
                return step
            last = drafts.fed[:, 0]  # (R,)
            raw = self.passes.draft_step(last, step, source)  # (R, V)
            here = None
            if len(drafting) < len(places):
                # processors cannot be called for the other rows: their histories are shorter
                here = on_device([places[row] for row in drafting], device)  # (N,)
                raw, last = raw[here], last[here]  # (N, V), (N,)
            positions = [(row, step) for row in drafting]
            drawn, confidences, others, laws = self.draws.draft(
                raw, positions, self.signal, best=1 if grower is None else state.best
            )
            drafts.steps.append((positions, drawn))
            drafts.laws.extend(laws)
            # the processors may forbid every token, and half precision may overflow
            fed = torch.where(drawn < 0, last, drawn)  # (N,)
            last = fed if here is None else drafts.fed[:, 0].index_copy(0, here, fed)
            drafts.fed = last[:, None]
            if known:
                drafts.fed = drafts.fed.index_copy(0, at, ahead_of[:, step : step + 1])
            tokens: Sequence[float | None] = [None] * len(drafting)
            sure = entropies = [1.0] * len(drafting)
            ranked: list[list[float]] = []
            if confidences is not None:
                more = [] if self._observer is None else [certainty(raw)[1]]
                more += [] if others is None or grower is None else others.unbind(1)
                tokens, sure, *ranked = on_host(drawn, confidences, *more)
                if self._observer is not None:
                    entropies = ranked.pop(0)
            elif not unread:
                (tokens,) = on_host(drawn)
            going_on = []
            for i, (row, token, chance, entropy) in enumerate(
                zip(drafting, tokens, sure, entropies, strict=True)
            ):
                if token is not None:
                    if token < 0:
                        continue
                    self.draws.remember(row, step, int(token))
                    drafts.tokens[row].append(int(token))
                    if confidences is not None:
                        drafts.confidences[row].append(chance)
                        if grower is not None:
                            best = int(token), *(int(rank[i]) for rank in ranked)
                            said = Place(chance, best, grower.rates(chance, len(best)))
                            before = ends.get(row)
                            if before is None:
                                drafts.said[row] = said
                            else:
                                before.precede(said, everywhere=state.everywhere)
                            ends[row] = said
                        if self._observer is not None:
                            self._observer.see_draft(row, chance, entropy)
                drafts.lengths[row] += 1
                if (
                    token not in self.eos[row]
                    and drafts.lengths[row] < plans[row].limit
                    and controller.keep_drafting(row, chance)
                ):
                    going_on.append(row)
            drafting = going_on
        return steps

    def _spread(
        self,
        grower: Grower,
        drafts: DraftedTokens,
        source: int,
        rows: Sequence[int],
        plans: Mapping[int, Plan],
    ) -> None:
        """Draft trees: every pass takes the likeliest tokens that have not been drafted on."""
        places, device = self.passes.rows, self.passes.model.device
        limits = {row: plans[row].limit for row in rows}
        spread = Spread(grower, limits, self.eos, self.longest + 1)
        state = self.passes.states[source]
        parents: list[list[int]] = [[] for _ in places]  # of what has been fed
        going = self.controller.draft_together(rows)
        while going:
            size, fed = spread.size, spread.fed
            tokens = []  # rows with fewer feed something that nothing follows
            for row, place in places.items():
                own, last = spread.front.get(row, []), self.draws.emitted[row][-1]
                idle = size - len(own)
                parents[place] += [*(each.parent for each in own), *[fed - 1] * idle]
                tokens.append([*((each.path or (last,))[-1] for each in own), *[last] * idle])
            feed = on_device(tokens, device)  # (R, T)
            if all(row == [*range(-1, fed)] for row in parents):  # no branches yet: a plain step
                raw = self.passes.draft_step(feed[:, 0], fed, source)[:, None]  # (R, 1, V)
            else:
                raw = self.passes.draft_step(feed, fed, source, parents)  # (R, T, V)
            asked = [
                (row, i, len(each.path))
                for row, own in spread.front.items()
                for i, each in enumerate(own)
            ]
            raw = raw.flatten(0, 1)  # (R * T, V)
            at = [places[row] * size + i for row, i, _ in asked]
            drawn, confidences, others, _ = self.draws.draft(
                raw if at == [*range(len(raw))] else raw[on_device(at, device)],  # (N, V)
                [(row, depth) for row, _, depth in asked],
                self.signal,
                best=state.best,
            )
            assert confidences is not None
            assert others is not None
            told = zip(asked, *on_host(drawn, confidences, *others.unbind(1)), strict=True)
            for (row, i, _), token, sure, *ranked in told:
                if spread.hear(row, i, [*map(int, (token, *ranked))], sure):
                    drafts.confidences[row].append(sure)
            going = spread.go_on()
        drafts.said |= spread.said
        drafts.num_steps, drafts.num_wide = spread.steps, spread.wide

    def _choose(
        self,
        grower: Grower,
        drafts: DraftedTokens,
        plans: Mapping[int, Plan],
        chains: Mapping[int, int],
    ) -> None:
        """Choose what to verify of rows (see `growing.chosen`)."""
        drafts.others |= {row: plans[row].others for row in chains if row in drafts.said}
        trees = chosen(grower, drafts.said, drafts.others, chains, self.eos, self.longest)
        for row, nodes in trees.items():
            drafts.tokens[row] = [node.token for node in nodes]
            drafts.lengths[row] = len(nodes)
            parents = [node.parent for node in nodes]
            if parents != [*range(len(nodes))]:
                drafts.parents[row] = parents

    def learn(self, drafts: DraftedTokens, row: int, tokens: Sequence[int]) -> None:
        """Tell the controller how good was what a draft said along a row's new tokens."""
        if (grower := self._grower) is not None:
            others = drafts.others.get(row, ())
            learn(grower, row, drafts.said.get(row), others, tokens, self.eos[row])


def on_host(*values: Tensor) -> list[list[float]]:
    """Tensors (n,) as numbers on the host: the only place where it waits for the device.

    From another device they are copied together as int64, floats as the bits of float32.
    """
    if len(values) == 1 or values[0].device.type == "cpu":
        return [each.tolist() for each in values]
    bits = [
        each.float().view(torch.int32).long() if each.is_floating_point() else each.long()
        for each in values
    ]
    pieces = torch.cat(bits).cpu().split([len(each) for each in values])
    return [
        (piece.int().view(torch.float32) if each.is_floating_point() else piece).tolist()
        for each, piece in zip(values, pieces, strict=True)
    ]
