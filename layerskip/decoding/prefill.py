"""Runs prompts: pieces of those of several rows in one pass, after what is known of them.

Shapes: r rows of a pass, T tokens, H width, n slots, D width of a part, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerskip.decoding.places import RowPlaces, in_inference_mode
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.following import in_chunks
from layerskip.model.opened_model import Pass
from layerskip.model.picture_features import Pictures

Part = tuple[str, int]  # ("keys" or "values", layer), or ("tap", sublayers)


class Filling(NamedTuple):
    """Cached contents of a row's slots up to `end`, from an earlier text (see `Prefill.parts`)."""

    end: int
    parts: Mapping[Part, Tensor]


class Prefill(RowPlaces):
    """Rows whose prompts are run through the whole model, after which they take part in rounds."""

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
        states = in_chunks(
            *(self.model, tokens, [range(seat.length, ends[seat.row]) for seat in seats], run),
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
