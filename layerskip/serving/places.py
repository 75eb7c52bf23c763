"""`Passes` whose rows join and leave: the places of one cache, and who lies there.

Rows in rounds lie in places 0 .. n - 1 in no order. Behind them lie those that join: their prompts
are run in pieces while the others go on.
Letters: B places, T tokens, H width, V vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.decoding.passes import Filling, Passes, in_inference_mode
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.model.cache import LINE
from layerskip.model.sublayers import Sublayers

_PIECE = 256  # tokens of a prompt that are run at a time, at least, where there are windows


class Places(Passes):
    """The passes of a batch with a fixed number of seats, some of which are taken.

    Of layers with windows every row holds those of its own window and a piece of a prompt, so that
    a text may join at slot 0 at any time, whatever the others have come to.

    Args:
        drafts: the model's own sublayers, its trained modules, or second models.
        seats: the numbers of rows: 0 .. seats - 1.
        total: the most tokens of a row.

    Attributes:
        most: tokens of a piece of a prompt.
    """

    def __init__(
        self,
        model: Sublayers,
        drafts: Sequence[Source],
        *,
        seats: int,
        total: int,
        max_draft_length: int,
    ) -> None:
        self.written: list[list[int]] = [[] for _ in range(seats)]
        super().__init__(
            model,
            drafts,
            [torch.zeros(1, dtype=torch.long)] * seats,
            max_new_tokens=1,
            max_draft_length=max_draft_length,
            emitted=self.written,
        )
        model.check_lengths([1], total)
        self.total = total
        window = self.cache.window
        self.most = min(max(_PIECE, window // 2), 2 * _PIECE) if window else sys.maxsize
        behind = window + max_draft_length + 1
        # and a pass may begin a line behind its base
        span = behind + max(self.most, max_draft_length + 1) + LINE if window else 0
        self._span = -(-span // LINE) * LINE
        self.cache.roll(self._span, behind)
        self._caches = [self.cache, *(each for state in self.states for each in state.caches)]
        self.clear()
        for cache in self._caches[1:]:
            cache.trimmed.clear()
        self._backends = [
            model.backend,
            *(each.model.backend for each in drafts if isinstance(each, Assistant)),
        ]
        per_token = model.key_bytes(part.number for part in model.parts if part.writes)
        full = per_token.pop(None, 0.0) if window else math.fsum(per_token.values())
        self._window_bytes = math.fsum(per_token.values()) if window else 0.0
        own = math.fsum(each.own_bytes() for each in drafts)
        self._tap_bytes = float(len(self._taps) * model.config.hidden_size * model.dtype.itemsize)
        self._slot_bytes = full + own + self._tap_bytes

    def nbytes(self, rows: int, slots: int) -> int:
        """Bytes of keys, values and states at taps of so many rows."""
        slots = self._capacity(slots)  # and one more at taps
        inside = min(slots, self._span) * self._window_bytes
        return round(rows * (slots * self._slot_bytes + inside + self._tap_bytes))

    def clear(self) -> None:
        """Give all places up, with whatever lies there and is left of a round."""
        self.rows, self.slots = {}, 0
        for cache in self._caches:
            cache.rows = 0
            cache.keys.clear()
            cache.values.clear()
        self._tapped.clear()
        self._boundary.clear()

    @in_inference_mode
    def resize(self, rows: int, slots: int, kept: int) -> None:
        """Make so many places of so many slots; the first `kept` of them stay as they are."""
        size = self._capacity(slots)
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

    def sit(self, row: int, prompt: Sequence[int]) -> None:
        """Begin to join."""
        self.prompts[row] = torch.tensor(prompt, device=self.model.device)  # (T,)
        self.prompt_lengths[row], self.lengths[row] = len(prompt), 0
        self.written[row].clear()
        for state in self.states:
            state.begin(row)

    @in_inference_mode
    def fill(self, row: int, place: int, filled: Sequence[Filling]) -> None:
        """Fill in what is known of a joining row's prompt."""
        self.lengths[row] = filled[-1].end if filled else 0
        self.cache.begin(place, self.lengths[row])
        for part in filled:
            self._fill(place, part)

    @in_inference_mode
    def piece(self, row: int, place: int, most: int) -> Tensor | None:
        """Run the next tokens of a joining row's prompt; logits (1, V) behind the last of all."""
        model, cache, rows = self.model, self.cache, range(place, place + 1)
        first, length = self.lengths[row], self.prompt_lengths[row]
        tokens = self.prompts[row][None, first : first + most]  # (1, T)
        every = model.num_sublayers
        # layers that only read others' keys are needed for the last token alone
        through = every if self.needed else 2 * model.first_reader
        cache.settled = False
        cache.place([first], tokens.shape[1], rows=rows)
        hidden, step = model.feed(tokens, cache, self.rotary)
        hidden = self._carry(hidden, step, 0, through)[:, -1:]  # (1, 1, H)
        self.lengths[row] += tokens.shape[1]
        if self.lengths[row] == length and through < every:
            cache.place([length - 1], 1, rows=rows)
            _, step = model.feed(tokens[:, -1:], cache, self.rotary)
            hidden = self._carry(hidden, step, through, every)
        cache.settled = True
        self._steps = 0  # what is told of the first token is not of the last round
        return model.logits(hidden)[0] if self.lengths[row] == length else None

    @in_inference_mode
    def move(self, source: int, place: int, length: int) -> None:
        """Copy the first slots of one place to another."""
        for cache in self._caches:
            cache.move(source, place, length)
        for states in self._tapped.values():
            states[place, : length + 1] = states[source, : length + 1]

    @in_inference_mode
    def exchange(self, one: int, other: int, length: int) -> None:
        """Exchange the first slots of two places."""
        for cache in self._caches:
            cache.exchange(one, other, length)
        for states in self._tapped.values():
            states[[one, other], : length + 1] = states[[other, one], : length + 1]
