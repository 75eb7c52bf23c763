"""Drafts a round's tokens: those that are known, steps in lockstep for the other rows, and what
may be right where these are wrong.

Letters: R rows of a pass, N positions, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from layerskip.decoding.controller import Controller, Grower, Observer
from layerskip.decoding.draws import DraftedTokens, Drawn, certainty
from layerskip.decoding.passes import Passes, Position
from layerskip.decoding.planning import Joined, Node, Plan, beside, conditional, in_common
from layerskip.model.branches import along
from layerskip.model.cache import on_device


class Drawing(Protocol):
    """What draws drafted tokens of several rows: `Draws`, or those of texts that join and leave."""

    @property
    def emitted(self) -> Sequence[Sequence[int]]: ...
    @property
    def apart(self) -> bool: ...
    @property
    def reads_history(self) -> bool: ...
    def remember(self, row: int, offset: int, token: int) -> None: ...
    def draft(
        self,
        raw: Tensor,
        positions: Sequence[Position],
        signal: str | None = None,
        *,
        seconds: bool = False,
    ) -> Drawn: ...


class Drafter:
    """Drafts what rows plan, for as long as the controller says.

    Args:
        eos: of each row, tokens behind which nothing is drafted.
        signal: of the confidences that the controller is told (see `Draws.draft`).
        longest: the most tokens of a row that a round verifies.
    """

    def __init__(
        self,
        passes: Passes,
        draws: Drawing,
        controller: Controller,
        *,
        eos: Sequence[frozenset[int]],
        signal: str | None,
        longest: int,
    ) -> None:
        self.passes, self.draws, self.controller = passes, draws, controller
        self.eos, self.signal, self.longest = eos, signal, longest
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
            steps = self._step(drafts, source, rows, plans)
            if self._grower is not None and steps:
                steps = self._widen(self._grower, drafts, plans, steps)
        count = 1 + max(drafts.lengths) - steps
        if count > 1:  # tokens that no step was fed
            drafts.fed = drafts.fed.repeat(1, count)  # (R, T)
            known = drafts.known | drafts.parents.keys()
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
            drawn, confidences, seconds, laws = self.draws.draft(
                raw, positions, self.signal, seconds=grower is not None
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
            others: Sequence[float] = [-1] * len(drafting)
            if confidences is not None:
                more = [] if self._observer is None else [certainty(raw)[1]]
                more += [] if seconds is None or grower is None else [seconds]
                tokens, sure, *told = on_host(drawn, confidences, *more)
                if self._observer is not None:
                    entropies = told.pop(0)
                if told:
                    (others,) = told
            elif not unread:
                (tokens,) = on_host(drawn)
            going_on = []
            for row, token, chance, entropy, other in zip(
                drafting, tokens, sure, entropies, others, strict=True
            ):
                if token is not None:
                    if token < 0:
                        continue
                    self.draws.remember(row, step, int(token))
                    drafts.tokens[row].append(int(token))
                    if confidences is not None:
                        drafts.confidences[row].append(chance)
                        if grower is not None:
                            both = int(token), int(other)
                            drafts.chains.setdefault(row, []).append(both)
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

    def _widen(
        self, grower: Grower, drafts: DraftedTokens, plans: Mapping[int, Plan], steps: int
    ) -> int:
        """Verify tokens beside the rows' chains, and behind them, where the controller says so.

        These are the second-best ones, and what other sources know.

        Returns:
            How many of the tokens to verify steps have been fed.
        """
        (source,) = {plans[row].source for row in drafts.chains}
        assert source is not None
        state = self.passes.states[source]
        trees: dict[int, list[Node]] = {}
        for row, chain in drafts.chains.items():
            ranks = grower.ranks(row, drafts.confidences[row])
            drafts.others[row] = plans[row].others
            joined = [
                Joined(
                    each, conditional(each) or grower.copied(number, row), grower.instead(number)
                )
                for number, each in plans[row].others
            ]
            places = [list(zip(*each, strict=False)) for each in zip(chain, ranks, strict=True)]
            # what is beside a chain comes behind all steps; without a prefix all is fed anew
            if len(chain) == steps or not state.prefix:
                trees[row] = beside(
                    places,
                    self.longest - len(chain),
                    joined,
                    everywhere=state.everywhere,
                    ends=self.eos[row],
                )
        if not any(trees.values()):
            return steps
        width = grower.widen(
            {
                row: (len(drafts.chains[row]), [node.chance for node in nodes])
                for row, nodes in trees.items()
            }
        )
        for row, nodes in trees.items():
            tokens = drafts.tokens[row]
            if kept := nodes[: max(0, width - len(tokens))]:
                drafts.parents[row] = [*range(len(tokens)), *(node.parent for node in kept)]
                tokens += [node.token for node in kept]
                drafts.lengths[row] = len(tokens)
        return steps if state.prefix or not drafts.parents else 0

    def learn(self, drafts: DraftedTokens, row: int, tokens: Sequence[int]) -> None:
        """Tell the controller how good a row's chain was, and what was second-best or known."""
        if self._grower is None or row not in drafts.chains:
            return
        best, seconds = zip(*drafts.chains[row], strict=True)
        right = in_common(best, tokens)
        wrong = right < len(best)
        self._grower.see_second(row, right, wrong and seconds[right] == tokens[right])
        for number, each in drafts.others[row] if wrong else ():
            known, parents = each.tokens or (), each.parents or range(each.length)
            path = along(parents, known, tokens[:right])
            if len(path) == right:
                at = path[-1] if path else 0
                here = [token for token, own in zip(known, parents, strict=True) if own == at]
                if here and best[right] not in here:
                    self._grower.see_instead(number, tokens[right] in here)


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
