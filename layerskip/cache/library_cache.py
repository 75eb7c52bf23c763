"""This project's cache in the form of the library's classes, for decoders run by the library.

Shapes: B rows, T tokens of a pass, E tokens that an encoder read, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicLayer, EncoderDecoderCache

from layerskip.cache.rows import RowCache
from layerskip.library import CacheLayerMixin


class EncoderStates(NamedTuple):
    """An encoder's output for its texts, one row each.

    Attributes:
        states: (B, E, H).
        mask: 1 at real tokens, 0 at pads, (B, E).
        tokens: the token ids, (B, E), if known, in which drafts are looked up.
    """

    states: Tensor
    mask: Tensor
    tokens: Tensor | None = None

    def of(self, rows: Any) -> EncoderStates:
        """Select rows."""
        return EncoderStates(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]


class Positions:
    """The positions of a pass, used instead of rotary angles.

    Args:
        total: maximum number of tokens in a row; pads after it get the last position.
    """

    def __init__(self, total: int, device: Any) -> None:
        self.total, self.device = total, device

    def at(self, cache: RowCache) -> Mapping[str, Tensor]:
        return {"positions": cache.placed(self.device).clamp(max=self.total - 1)}  # (B, T)


class LibraryCache(RowCache):
    """Keys and values of decoders that the library runs.

    Args:
        encoded: an encoder's output for the rows' texts.

    Attributes:
        crossed: for an encoder-decoder, the keys and values of `encoded` by layer, (B, H, E, D).
        unread: the rows whose part of `crossed` has not been computed.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        windows: Sequence[int | None],
        encoded: EncoderStates | None = None,
    ) -> None:
        super().__init__(rows, slots, windows)
        self.encoded = encoded
        self.partial = encoded is None
        self.crossed: dict[int, list[Tensor]] = {}
        self.unread = {*range(rows)}

    def _arrange(self, places: Sequence[int | None]) -> None:
        super()._arrange(places)
        if self.encoded is None:
            return
        before = [place or 0 for place in places]  # until it joins, a new row has any states
        self.encoded = self.encoded.of(before)
        for layer, crossed in self.crossed.items():
            self.crossed[layer] = [each[before] for each in crossed]
        self.unread = {row for row, place in enumerate(before) if place in self.unread}

    def join(self, place: int, encoded: EncoderStates) -> None:
        """Add a row after all others with an encoder's output for one text without pads.

        The outputs of the others are padded to its length, or cut to their own.
        """
        assert self.encoded is not None
        count = encoded.states.shape[1]
        others = int(self.encoded.mask[:place].sum(-1).max()) if place else 0
        more = max(count, others) - self.encoded.mask.shape[1]
        states = F.pad(self.encoded.states, (0, 0, 0, more))  # (B, E, H)
        mask = F.pad(self.encoded.mask, (0, more))  # (B, E)
        states[place, :count], mask[place] = encoded.states[0], 0
        mask[place, :count] = 1
        self.encoded = EncoderStates(states, mask)
        for layer, crossed in self.crossed.items():
            self.crossed[layer] = [F.pad(each, (0, 0, 0, more)) for each in crossed]
        self.unread.add(place)

    def encoded_of(self, rows: list[int] | None = None) -> EncoderStates:
        """An encoder's output for the rows of the pass, or for some of them."""
        assert self.encoded is not None
        return self.encoded.of(self.places(rows))

    def places(self, rows: list[int] | None = None) -> Any:
        """The places of the pass's rows, as a slice, or of some of them."""
        active = self.active
        return slice(active.start, active.stop) if rows is None else [active[row] for row in rows]

    def write(
        self, rows: list[int], start: int, keys: Tensor, values: Tensor, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Like `update`, for rows of the pass that all begin at one slot; returns what they see."""
        shapes = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
        all_keys, all_values = self.buffers(layer, *shapes, keys)
        end = start + keys.shape[2]
        all_keys[rows, :, start:end], all_values[rows, :, start:end] = keys, values
        return all_keys[rows, :, :end], all_values[rows, :, :end]

    def for_library(
        self, rows: list[int] | None = None, count: int | None = None, offset: int = 0
    ) -> Cache:
        """Wrap this cache, or some of its rows, as the library's class for one pass.

        Args:
            count, offset: some of the pass's tokens, if `rows` are given.
        """
        numbers = range(len(self.windows))
        start = self.firsts[rows[0] if rows else 0] + offset
        end = start + (count or self.count) if rows else self.end
        past = Cache(layers=[AttentionLayer(self, i, rows, start, end) for i in numbers])
        if self.encoded is None:
            return past
        return EncoderDecoderCache(past, Cache(layers=[_Crossed(self, i, rows) for i in numbers]))


class AttentionLayer(CacheLayerMixin):
    """One layer of a cache in one pass from one slot to another, for all rows or some.

    If all rows take part, they may begin anywhere; masks and positions are then given separately.
    """

    is_sliding = False

    def __init__(
        self, cache: LibraryCache, layer: int, rows: list[int] | None, start: int, end: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.layer, self.rows = cache, layer, rows
        self.start, self.end = start, end

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if self.rows is not None:
            return self.cache.write(self.rows, self.start, key_states, value_states, self.layer)
        self.cache.update(key_states, value_states, self.layer)
        return self.cache.read(self.layer)

    def get_seq_length(self, *_: Any) -> int:
        return self.start

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self.end, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True


class _Crossed(DynamicLayer):
    """One layer's keys and values of an encoder's states, made once for all rows of a batch."""

    def __init__(self, cache: LibraryCache, layer: int, rows: list[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.layer = cache, layer
        self.places = cache.places(rows)
        self.rows = {*range(cache.rows)[self.places]} if rows is None else {*self.places}
        if layer in cache.crossed and not self.rows & cache.unread:
            self.keys, self.values = (each[self.places] for each in cache.crossed[layer])
            self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys, self.values = made = key_states, value_states
        cache = self.cache
        if self.layer not in cache.crossed:
            zeros = [each.new_zeros(cache.rows, *each.shape[1:]) for each in made]
            cache.crossed[self.layer] = zeros
        for held, new in zip(cache.crossed[self.layer], made, strict=True):
            held[self.places] = new
        if self.layer == len(cache.windows) - 1:
            cache.unread -= self.rows
        return made
