"""The passes of rounds: draft steps and verification.

Verification starts from the hidden states that drafting leaves at the end of the shared prefix.
Shapes: B rows, R rows of a pass, T tokens, D drafted tokens, H width, V vocabulary, N positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.cache.branches import Branches
from layerskip.cache.rows import on_device
from layerskip.decoding.places import in_inference_mode
from layerskip.decoding.prefill import Prefill
from layerskip.decoding.sources.base import State
from layerskip.model.opened_model import Pass
from layerskip.texts.tokens import common_prefix

Position = tuple[int, int]  # (row, tokens past the row's emitted ones)


class Passes(Prefill):
    """The rows of a batch in rounds; one of its sources takes the steps of a round.

    Attributes:
        fed: the tokens fed to the steps of this round, (R,) each.
        fed_tokens: the same on the host, (R, N), once read.
    """

    fed: Sequence[Tensor] = ()
    fed_tokens: Sequence[Sequence[int]] = ()
    _drafting: State | None = None  # of the current round
    _prefix = 0  # its shared prefix
    _steps = 0  # its number of steps, once verified
    # Per fed token, at the end of the prefix: states (R, 1, H) and the layers' own inputs.
    _boundary: Sequence[tuple[Tensor, Tensor | None]] = ()

    @property
    def runs_ahead(self) -> bool:
        """Whether a pass may begin before the host has read its tokens."""
        return self.model.backend.ahead and not self._taps

    def clear(self) -> None:
        super().clear()
        self._boundary = ()

    def _place(
        self, offset: int, count: int, parents: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Place a pass over `count` tokens of every row; the first is at its length + offset."""
        lengths = [self.seats[row].length for row in self.rows]
        starts = [length + offset for length in lengths]
        branches = None if parents is None else Branches(parents, offset)
        self.cache.place(starts, count, min(lengths), range(len(starts)), branches, lengths)

    def _feed(
        self, tokens: Tensor, offset: int, parents: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Pass]:
        """Run tokens (R, T) through the shared prefix, and keep their states (R, T, H)."""
        self._place(offset, tokens.shape[1], parents)
        hidden, step = self.model.feed(tokens, self.cache, self.rotary)
        hidden = self._carry(hidden, step, 0, self._prefix)
        self._boundary = (*self._boundary, (hidden, step.inputs))
        return hidden, step

    def tapped(
        self,
        tap: int,
        starts: Sequence[int],
        count: int,
        before: int = 0,
        rows: range | None = None,
    ) -> Tensor:
        """States at a tap, (R, count, H), from each row's position `starts` - `before` on."""
        place = 0 if rows is None else rows.start
        states = self._tapped[tap][place : place + len(starts)]
        first = on_device(starts, states.device)[:, None] + 1 - before  # (R, 1)
        slots = first + torch.arange(count, device=states.device)  # (R, count)
        places = torch.arange(len(states), device=states.device)[:, None]  # (R, 1)
        return states[places, slots.clamp(max=states.shape[1] - 1)]

    @in_inference_mode
    def draft_step(self, tokens: Tensor, offset: int, draft: int = 0) -> Tensor:
        """Feed each row's token (R,) at its length + offset to a draft; returns raw logits (R, V).

        Tokens outside the draft vocabulary have -inf. A round uses one source, with offsets 0, 1,
        2, ... without gaps.
        """
        state = self.states[draft]
        self._drafting, self._prefix = state, state.prefix
        self.fed, self.fed_tokens = [*self.fed[:offset], tokens], ()
        hidden, step = self._feed(tokens[:, None], offset)
        return state.step(tokens, hidden, step, offset)

    @in_inference_mode
    def verify(
        self,
        tokens: Tensor,
        positions: Sequence[Position],
        parents: Sequence[Sequence[int]] | None = None,
        ahead: int = 0,
    ) -> Tensor:
        """Raw target logits (N, V) at (ascending) positions of this round's tokens.

        Offset 0 is a row's last emitted token; the largest offset is the longest draft of any row.
        If drafts have branches, offsets are node numbers (see `branches`). `draft_step` may have
        fed one more token, after which nothing could be drawn.

        Args:
            tokens: the tokens of each row that no draft step was fed, (R, T). After draft steps
                this is the last drafted one, otherwise the last emitted one and the draft; short
                rows are padded with any token.
            parents: the node that each one follows, in the order of rows in a pass, (R, D + 1);
                needed if that is not always the one before.
            ahead: tokens that every row will emit before this round begins.
        """
        count = 1 + max(offset for _, offset in positions)
        kept = count - tokens.shape[1]
        self._steps = len(self._boundary)
        self._boundary = self._boundary[:kept]
        if kept:
            self._feed(tokens, kept, parents)
            states, inputs = zip(*self._boundary, strict=True)
            hidden = torch.cat(states, dim=1)  # (R, D + 1, H)
            of_layers = None if inputs[0] is None else torch.cat(inputs, dim=1)  # (R, D + 1, L, P)
            self._place(0, count, parents)
            step = Pass(self.model, self.cache, self.rotary, of_layers)
        else:
            self._prefix = 0
            self._place(ahead, count, parents)
            hidden, step = self.model.feed(tokens, self.cache, self.rotary)  # (R, D + 1, H)
        self._boundary = ()
        last = self.model.num_sublayers
        if len(positions) == len(self.rows) * count and not self._taps:
            return self.model.finish(hidden, step, range(self._prefix, last)).flatten(0, 1)
        # The head is large, so compute it only at the positions needed.
        wanted = [self.rows[row] * count + offset for row, offset in positions]
        hidden = self._carry(hidden, step, self._prefix, last).flatten(0, 1)  # (R * (D + 1), H)
        return self.model.logits(hidden[None, on_device(wanted, hidden.device)], step)[0]

    def tell(self, row: int, emitted: Sequence[int], steps: int = 0) -> None:
        """Report to the states which tokens a row has emitted in the prefill or a round."""
        for state in self.states:
            state.commit(row, emitted, steps if state is self._drafting else 0)

    def commit(self, row: int, emitted: Sequence[int], path: Sequence[int] = ()) -> None:
        """Keep a row's fed tokens before its last emitted one, which the next pass feeds."""
        seat, place, steps = self.seats[row], self.rows[row], self._steps
        if steps:  # count the steps that were fed the row's actual text
            if not self.fed_tokens:  # once for all rows, since this waits for the device
                self.fed_tokens = torch.stack([*self.fed], 1).tolist()
            steps = 1 + common_prefix(self.fed_tokens[place][1:], emitted[:-1])
        if path:
            self._keep_path(place, seat.length, path[: len(emitted) - 1])
        self.tell(row, emitted, steps)
        seat.length += len(emitted)

    @in_inference_mode
    def _keep_path(self, place: int, root: int, path: Sequence[int]) -> None:
        """Move the cache entries of a path's nodes to the slots that they have in a plain text."""
        self.cache.keep_path(place, root, path)
        at = [node + root + 1 for node in path]
        for states in self._tapped.values():
            states[place, root + 2 : root + 2 + len(at)] = states[place, at]
