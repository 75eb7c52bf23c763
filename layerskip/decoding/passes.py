"""The passes of a batch: pieces of prompts, draft steps, and verification.

Several rows' prompts run in one pass, after what is known of them. Verification starts from the
hidden states that drafting leaves at the end of the shared prefix.
Shapes: B rows, r or R rows of a pass, T tokens, D drafted tokens, H width, V vocabulary,
N positions, n slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerskip.cache.branches import Branches
from layerskip.cache.rows import on_device
from layerskip.decoding.places import RowPlaces, in_inference_mode
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.base import State
from layerskip.model.opened_model import Pass
from layerskip.model.picture_features import Pictures
from layerskip.texts.tokens import common_prefix

Position = tuple[int, int]  # (row, tokens past the row's emitted ones)
Part = tuple[str, int]  # ("keys" or "values", layer), or ("tap", sublayers)


class Filling(NamedTuple):
    """Cached contents of a row's slots up to `end`, from an earlier text (see `Passes.parts`)."""

    end: int
    parts: Mapping[Part, Tensor]


class Passes(RowPlaces):
    """The rows of a batch: their prompts are run, after which they take part in rounds.

    One of the sources takes the steps of a round.

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

    # Prompts.

    @in_inference_mode
    def prefill(
        self,
        ends: Mapping[int, int] | None = None,
        reached: Callable[[], None] = lambda: None,
        read: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Run prompts of joining rows through the whole model, each from where it is to its end.

        Rows whose whole prompts have been run take part in rounds from then on. A model with
        recurrent layers ends a pass at the `store_points` of a text.

        Args:
            ends: by row, the number of prompt tokens to run up to; several rows run whole prompts.
                None: all joining rows run whole prompts.
            reached: called after every pass; may remove `store_points` that are reached.
            read: called with the logits after each of the tokens of a lone row, (T, V).

        Returns:
            Raw logits after the last token of every prompt, (r, V); None if there are more tokens.
        """
        if ends is None:
            ends = {row: self.seats[row].prompt_length for row in self.joining}
        rows, first = [*ends], len(self.rows)
        seats = [self.seats[row] for row in rows]
        if rows != self.joining[: len(rows)]:
            others = [row for row in self.joining if row not in ends]
            self._arrange([*self.rows, *rows, *others], first)
        tokens = pad_sequence([seat.prompt for seat in seats], batch_first=True)  # (r, T)
        count = sum(ends[seat.row] - seat.length for seat in seats)
        seen: list[Tensor] = []

        def run(chunk: Tensor, some: range, firsts: list[int]) -> Tensor:
            places = range(first + some.start, first + some.stop)
            lowest = min(min(seat.length, seat.prompt_length - 1) for seat in self.seats)
            hidden = self._run_prompts(chunk, places, firsts, lowest, through)
            for seat, begin in zip(seats[some.start : some.stop], firsts, strict=True):
                seat.length = min(begin + chunk.shape[1], seat.prompt_length)
            if read is not None:
                seen.append(hidden)
            reached()
            return hidden

        self.cache.prefilled = False
        through = self._through if read is None else self.model.num_sublayers
        pictures = [seat.pictures for seat in seats if seat.pictures is not None]
        states = self.model.in_chunks(
            *(tokens, [range(seat.length, ends[seat.row]) for seat in seats], run),
            inside=pictures[0].inside if pictures else (),
            ends_before=[seat.store_points for seat in seats] if self.model.recurrent else (),
            partial=self.cache.partial,
        )  # (r, H)
        done = all(seat.length == seat.prompt_length for seat in seats)
        logits: Tensor | None = None
        if read is not None:
            logits = self.model.logits(torch.cat(seen, 1))[0]  # (T, V)
            read(logits)
        elif done:
            logits = self._finish_prompts(states[:, None], range(first, first + len(rows)))
        self.cache.prefilled = True
        if not done or logits is None:
            return None
        self._arrange(self.seated, first + len(rows))
        for state in self.states:
            state.prompted(rows, count)
        for tap in {*self._tapped} - {*self._taps}:
            del self._tapped[tap]
        return logits[-len(rows) :]

    @property
    def _through(self) -> int:
        # Layers that only read other layers' keys are needed for the last tokens alone.
        return self.model.num_sublayers if self.needed else 2 * self.model.first_reader

    def _run_prompts(
        self, chunk: Tensor, places: range, firsts: list[int], lowest: int, through: int
    ) -> Tensor:
        """Run prompt tokens (r, T) at some places; returns states (r, T, H)."""
        self.cache.place(firsts, chunk.shape[1], lowest, places)
        hidden, step = self.model.feed(chunk, self.cache, self.rotary, self._pictures(places))
        taps = {tap for state in self.states for tap in state.prompt_taps}
        return self._carry(hidden, step, 0, through, sorted(taps.union(self._taps)))

    def _pictures(self, places: range) -> Pictures | None:
        """The pictures in the prompts at some places, which all are of one call, if of any."""
        seat: Seat = self.seats[self.seated[places.start]]
        if seat.pictures is None:
            return None
        return seat.pictures.some(range(seat.number, seat.number + len(places)))

    def _finish_prompts(self, states: Tensor, places: range) -> Tensor:
        """Logits (r, V) after the last prompt tokens at some places, from states (r, 1, H)."""
        through, every = self._through, self.model.num_sublayers
        if through < every:
            prompts = [self.seats[self.seated[place]].prompt for place in places]
            lasts = [len(prompt) - 1 for prompt in prompts]
            ends = torch.stack([prompt[-1:] for prompt in prompts])  # (r, 1)
            self.cache.place(lasts, 1, min(lasts), places)
            _, step = self.model.feed(ends, self.cache, self.rotary, self._pictures(places))
            states = self._carry(states, step, through, every)
        return self.model.logits(states.transpose(0, 1))[0]

    def end_of_piece(self, row: int, end: int) -> int:
        """Where to end a piece of a prompt that would end there: not inside of a picture."""
        seat = self.seats[row]
        inside = () if seat.pictures is None else seat.pictures.inside
        length, first = seat.prompt_length, seat.length
        if end not in inside:
            return min(end, length)
        later = next(each for each in range(end, length + 1) if each not in inside)
        if later - first <= self.piece:
            return later
        # leave the picture to the next piece
        return max(each for each in range(first + 1, end) if each not in inside)

    # Rounds.

    def _place(
        self, offset: int, count: int, parents: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Place a pass over `count` tokens of every row; the first is at its length + offset."""
        lengths = [self.seats[row].length for row in self.rows]
        starts = [length + offset for length in lengths]
        branches = None if parents is None else Branches(parents, offset)
        self.cache.place(starts, count, min(lengths), None, branches, lengths)

    def _feed(
        self, tokens: Tensor, offset: int, parents: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Pass]:
        """Run tokens (R, T) through the shared prefix, and keep their states (R, T, H)."""
        self._place(offset, tokens.shape[1], parents)
        hidden, step = self.model.feed(tokens, self.cache, self.rotary)
        hidden = self._carry(hidden, step, 0, self._prefix)
        self._boundary = (*self._boundary, (hidden, step.inputs))
        return hidden, step

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

    # Hidden states at taps.

    def _carry(
        self, hidden: Tensor, step: Pass, first: int, last: int, taps: Sequence[int] | None = None
    ) -> Tensor:
        """Run hidden states (r, T, H) through sublayers, and keep the states at taps."""
        for tap in self._taps if taps is None else taps:
            if first < tap <= last:
                hidden, first = self.model.run(hidden, step, range(first, tap)), tap
                self._keep_states(tap, hidden)
        return self.model.run(hidden, step, range(first, last))

    def _keep_states(self, tap: int, hidden: Tensor) -> None:
        states = self.cache.active_rows(self._states(tap, hidden))
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]  # (r, 1)
        states[rows, self.cache.placed(hidden.device) + 1] = hidden

    def _states(self, tap: int, like: Tensor) -> Tensor:
        if tap not in self._tapped:
            shape = self.cache.rows, self.cache.slots + 1, like.shape[-1]
            self._tapped[tap] = like.new_zeros(shape)  # (B, S + 1, H)
        return self._tapped[tap]

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

    # What earlier texts leave, and later ones start from.

    def tokens(self, row: int, length: int) -> list[int]:
        """A row's first tokens: its prompt, then the tokens it has emitted.

        Pictures have their own numbers (see `Pictures.named`).
        """
        seat = self.seats[row]
        prompt: list[int] = seat.prompt[:length].tolist()
        if seat.pictures is not None:
            prompt = seat.pictures.named(seat.number, prompt)
        return [*prompt, *seat.emitted[: length - len(prompt)]]

    def parts(self, row: int, first: int, end: int) -> Iterator[tuple[Part, Tensor]]:
        """Yield the contents of a row's slots `first` to `end` - 1 by name, as views (..., n, D).

        All end with the last slot; those of window layers may begin later than the first.
        """
        place, whole = self.place_of(row), max(first, self.seats[row].whole)
        for name, part in self.cache.parts(place, first, end):
            unknown = part.shape[-2] - end + whole if name[1] in self.cache.trimmed else 0
            yield name, part[..., max(0, unknown) :, :]
        for name in self.needed:
            yield name, self._tapped[name[1]][place, first + 1 : end + 1]  # (n, H)

    @property
    def needed(self) -> set[Part]:
        """The names in `parts` that drafts need for all prompt tokens."""
        states = (each for each in self.states if each.whole_prompts)
        return {("tap", tap) for each in states for tap in each.every_tap}

    @in_inference_mode
    def fill(self, filled: Mapping[int, Sequence[Filling]]) -> None:
        """Copy cached contents, in order, into the first slots of joining rows.

        Rows that are seated at once are filled at once.
        """
        for row, fillings in filled.items():
            self.seats[row].length = fillings[-1].end if fillings else 0
        places = {row: place for place, row in enumerate(self.seated)}
        self.cache.begin({places[row]: self.seats[row].length for row in filled})
        for row, fillings in filled.items():
            seat, place, first = self.seats[row], places[row], 0
            seat.whole = 0
            for end, parts in fillings:
                for (kind, number), held in parts.items():
                    if kind != "tap":
                        self.cache.fill(place, (kind, number), end, held)
                        if number in self.cache.trimmed and end - held.shape[-2] > first:
                            seat.whole = max(seat.whole, end - held.shape[-2])
                    elif number in self._taps:
                        states = self._states(number, held)
                        states[place, end + 1 - len(held) : end + 1] = held
                first = end
