"""This project's cache behind the library's classes, for decoders that the library runs.

Letters: B rows, T tokens of a pass, E tokens that an encoder read, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from layerskip.model.cache import RowCache


class EncoderStates(NamedTuple):
    """What an encoder made of its texts, a row each.

    Attributes:
        states: (B, E, H).
        mask: 1 at real tokens, 0 at pads, (B, E).
        tokens: the token ids, (B, E), if they are known: drafts are looked up there.
    """

    states: Tensor
    mask: Tensor
    tokens: Tensor | None = None

    def of(self, rows: Any) -> EncoderStates:
        """Some of the rows."""
        return EncoderStates(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]


class Positions:
    """The positions of a pass, in the place of rotary angles.

    Args:
        total: the most tokens of a row; pads behind them are put on the last place.
    """

    def __init__(self, total: int, device: Any) -> None:
        self.total, self.device = total, device

    def at(self, cache: RowCache) -> Mapping[str, Tensor]:
        return {"positions": cache.placed(self.device).clamp(max=self.total - 1)}  # (B, T)


class LibraryCache(RowCache):
    """Keys and values as `RowCache`, of any widths.

    Args:
        encoded: what an encoder made of the rows' texts.

    Attributes:
        crossed: of an encoder-decoder, by layer the keys and values of `encoded`, (B, H, E, D).
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
        self.crossed: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, places: Sequence[int], length: int) -> int:
        if self.encoded is not None:
            self.encoded = self.encoded.of(list(places))
        for layer, (keys, values) in self.crossed.items():
            self.crossed[layer] = keys[list(places)], values[list(places)]
        return super().keep(places, length)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self._make(layer_idx, keys, values)
        return super().update(keys, values, layer_idx)

    def _make(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Make a layer's buffers; values may be narrower than keys (DeepSeek)."""
        for buffers, like in ((self.keys, keys), (self.values, values)):
            if layer not in buffers:
                self._allocate(buffers, layer, like.shape[1], like.shape[3], like)

    def write(
        self, rows: list[int], start: int, keys: Tensor, values: Tensor, layer: int
    ) -> tuple[Tensor, Tensor]:
        """As `update`, of some rows of the pass that all begin at one slot."""
        self._make(layer, keys, values)
        end = start + keys.shape[2]
        all_keys, all_values = map(self.taking_part, (self.keys[layer], self.values[layer]))
        all_keys[rows, :, start:end], all_values[rows, :, start:end] = keys, values
        return all_keys[rows, :, :end], all_values[rows, :, :end]

    def for_library(self, rows: list[int] | None = None, count: int | None = None) -> Cache:
        """This cache, or some of its rows, as the library's class for one pass."""
        numbers = range(len(self.windows))
        start = self.firsts[rows[0] if rows else 0]
        end = start + (count or self.count) if rows else self.end
        past = Cache(layers=[AttentionLayer(self, i, rows, start, end) for i in numbers])
        if self.encoded is None:
            return past
        return EncoderDecoderCache(past, Cache(layers=[_Crossed(self, i, rows) for i in numbers]))


class AttentionLayer(CacheLayerMixin):
    """One layer of a cache in one pass from one slot to another, for some rows or all.

    Where all rows take part they may begin anywhere, if masks and positions come from elsewhere.
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
        if self.rows is None:
            return self.cache.update(key_states, value_states, self.layer)
        return self.cache.write(self.rows, self.start, key_states, value_states, self.layer)

    def get_seq_length(self, *_: Any) -> int:
        return self.start

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self.end, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in early versions 5

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True


class _Crossed(DynamicLayer):
    """One layer's keys and values of an encoder's states, made once for all rows of a batch."""

    def __init__(self, cache: LibraryCache, layer: int, rows: list[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.layer, self.rows = cache, layer, rows
        if layer in cache.crossed:
            chosen = slice(None) if rows is None else rows
            self.keys, self.values = (each[chosen] for each in cache.crossed[layer])
            self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        if self.rows is None:
            self.cache.crossed[self.layer] = key_states, value_states
        return key_states, value_states
