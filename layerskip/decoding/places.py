"""The rows of a batch: the place that each has in the caches of a model and of its drafts.

Places 0 .. R - 1 belong to the rows in rounds, later ones to rows whose prompts have not been run.
Either all rows are seated at once, in buffers that grow with their texts and shrink when rows
leave; or rows come and go (`open_seats`), in buffers of a size that `resize` sets.
Shapes: B rows, S slots, H width.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, MutableSequence, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from layerskip.cache.library_cache import LibraryCache
from layerskip.cache.rows import STRIPE, RowCache
from layerskip.config.skips import SkipConfig
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.assistant import Assistant, slot_bytes, state_bytes
from layerskip.decoding.sources.base import Batch, Source
from layerskip.model.opened_model import OpenedModel

PIECE = 256  # minimum number of prompt tokens per pass if there are windows
Method = TypeVar("Method", bound=Callable[..., Any])


def in_inference_mode(method: Method) -> Method:
    """Run a pass in inference mode, which makes small kernels cheaper; not for modules."""

    @wraps(method)
    def run(self: RowPlaces, *args: Any, **how: Any) -> Any:
        if self.model.execution in ("modules", "whole"):
            return method(self, *args, **how)
        with torch.inference_mode():
            return method(self, *args, **how)

    return cast(Method, run)


class RowPlaces(Batch):
    """The rows of one batch on one model with any number of sources.

    Args:
        seats: the texts of the rows, which are seated in this order.

    Attributes:
        seated: the row at each place of the caches, including those that are not in rounds yet.
        piece: maximum number of prompt tokens of a row per pass, if rows come and go.
        moves: how many times rows have changed places.
    """

    def __init__(
        self,
        model: OpenedModel,
        drafts: Sequence[SkipConfig | Source],
        seats: MutableSequence[Seat],
        *,
        max_draft_length: int,
    ) -> None:
        self.model = model
        self.seats: MutableSequence[Seat] = seats
        for row, seat in enumerate(seats):
            seat.row = row
            seat.to(model.device)
        self.total = max((seat.prompt_length + seat.limit for seat in seats), default=0)
        model.check_lengths(self.prompt_lengths, self.total)
        # D + 1 spare slots, since shorter drafts are padded at their end
        self.slack = max_draft_length + 1
        self.slots = self.total + self.slack
        self.cache = model.new_cache(len(seats), self.slots)
        self.cache.reserve(max(self.prompt_lengths, default=0))
        self.rotary = model.rotary(self.slots, self.total)
        self.seated = [*range(len(seats))]
        self.rows: dict[int, int] = {}
        self.moves = 0
        self.sources = [source_of(model, draft) for draft in drafts]
        self.states = [source.open(self) for source in self.sources]
        self._taps = sorted({tap for each in self.states for tap in each.every_tap})
        self._tapped: dict[int, Tensor] = {}  # (B, S + 1, H) each, by slot as in the cache

    @property
    def joining(self) -> list[int]:
        """The rows that are not in rounds yet."""
        return self.seated[len(self.rows) :]

    def place_of(self, row: int) -> int:
        return self.seated.index(row)

    def seat(self, seat: Seat) -> None:
        """Seat a text after all others, with nothing computed yet; only with open seats."""
        row, encoded = seat.row, seat.encoded
        seat.to(self.model.device)
        self.seats[row] = seat
        self.seated.append(row)
        if encoded is not None:
            assert isinstance(self.cache, LibraryCache)
            assert encoded.tokens is not None
            self.cache.join(len(self.seated) - 1, encoded)
            self.model.read = [*self.model.read[:row], *encoded.tokens, *self.model.read[row + 1 :]]
        for state in self.states:
            state.begin(row)

    def leave(self, rows: Collection[int]) -> None:
        """Drop rows from further passes.

        With open seats, the last row in rounds fills each place, and the last joining one its own.
        """
        if not self.cache.in_place:
            kept = [row for row in self.seated if row not in rows]
            self._arrange(kept, sum(row in self.rows for row in kept))
            return
        seated, active = [*self.seated], len(self.rows)
        for row in rows:
            place = seated.index(row)
            if place < active:
                active -= 1
                seated[place], place = seated[active], active
            last = seated.pop()
            if place < len(seated):
                seated[place] = last
        self._arrange(seated, active)

    @in_inference_mode
    def _arrange(self, seated: Sequence[int], active: int) -> None:
        """Seat only these rows, in this order; the first `active` ones are those in rounds."""
        self.moves += 1
        before = {row: place for place, row in enumerate(self.seated)}
        places = [before[row] for row in seated]
        moved = [(to, place) for to, place in enumerate(places) if to != place]
        if moved or (not self.cache.in_place and len(places) < len(before)):
            moving = [seated[to] for to, _ in moved] if self.cache.in_place else seated
            length = max((self.seats[row].length for row in moving), default=0)
            for tap, states in self._tapped.items():
                if self.cache.in_place:
                    to, old = map(list, zip(*moved, strict=True))
                    states[to, : length + 1] = states[old, : length + 1]
                else:
                    self._tapped[tap] = states[places]
            self.cache.keep(places, length)
            for state in self.states:
                state.keep(places, length)
        self.seated = [*seated]
        self.rows = {row: place for place, row in enumerate(seated[:active])}

    # Rows that come and go.

    def open_seats(self, total: int) -> None:
        """Let rows come and go from now on; the present rows become free seats.

        In window layers every row has slots for its own window and a piece of a prompt. So a text
        may join at slot 0 at any time, whatever the positions of the others.
        """
        self.model.check_lengths([1], total)
        self.total = total
        window = self.cache.window
        self.piece = min(max(PIECE, window // 2), 2 * PIECE) if window else sys.maxsize
        behind = window + self.slack
        # A pass may begin up to a stripe after its base.
        span = behind + max(self.piece, self.slack) + STRIPE if window else 0
        self._span = -(-span // STRIPE) * STRIPE
        self.cache.open(self._span, behind)
        for cache in self._caches[1:]:
            cache.open()
        self.clear()
        model = self.model
        second = [each.model for each in self.sources if isinstance(each, Assistant)]
        self._backends = [each.backend for each in (model, *second)]
        per_token = slot_bytes(model)
        full = per_token.pop(None, 0.0) if window else math.fsum(per_token.values())
        self._window_bytes = math.fsum(per_token.values()) if window else 0.0
        of_sources = math.fsum(each.own_bytes() for each in self.sources)
        self._tap_bytes = float(len(self._taps) * model.config.hidden_size * model.dtype.itemsize)
        self._slot_bytes = full + of_sources + self._tap_bytes
        self._row_bytes = self._tap_bytes + sum(map(state_bytes, (model, *second)))

    @property
    def _caches(self) -> list[RowCache]:
        return [self.cache, *(each for state in self.states for each in state.caches)]

    def nbytes(self, rows: int, slots: int, encoder_length: int = 0) -> int:
        """Bytes of keys, values and states; those of an encoder's token count as one."""
        slots = self._capacity(slots)  # and one more at taps
        inside = min(slots, self._span) * self._window_bytes
        own = (slots + encoder_length) * self._slot_bytes
        return round(rows * (own + inside + self._row_bytes))

    @property
    def encoder_length(self) -> int:
        """The number of encoder tokens stored per row."""
        encoded = getattr(self.cache, "encoded", None)
        return 0 if encoded is None else encoded.states.shape[1]

    def clear(self) -> None:
        self.seated, self.rows, self.slots = [], {}, 0
        for cache in self._caches:
            cache.rows = 0
            cache.keys.clear()
            cache.values.clear()
        self._tapped.clear()

    @in_inference_mode
    def resize(self, rows: int, slots: int) -> None:
        """Change the number of places and of slots; seated rows keep theirs."""
        self.moves += 1
        size, kept = self._capacity(slots), len(self.seated)
        for cache in self._caches:
            cache.resize(rows, size, kept)
        for tap, old in self._tapped.items():
            new = old.new_zeros(rows, size + 1, old.shape[2])  # (B, S + 1, H)
            least = min(old.shape[1], size + 1)
            new[:kept, :least] = old[:kept, :least]
            self._tapped[tap] = new
        self.rotary = self.model.rotary(slots, min(slots, self.total))
        self.slots = slots
        for state in self.states:
            state.resized()

    def _capacity(self, slots: int) -> int:
        return max(each.capacity(slots) for each in self._backends)
