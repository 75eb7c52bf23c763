"""Key-value buffers of a batch, with a length per row.

There is one buffer per attention layer, written by position. To roll back, the engine lowers a
row's length; the slots behind it are overwritten before anything reads them. Keys and values are
copied when the buffers grow (by half, and by at least 256 slots) and when `keep` drops rows. So
buffers hold less than twice the slots in use (beyond the first few hundred), and one layer's once
more while they are copied.
Letters: B rows, H key-value heads, S slots, T tokens of a pass, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MORE = 256  # slots that buffers grow by, at least


def on_device(values: Sequence[Any], device: Any) -> Tensor:
    """Integers as a tensor on a device; the host does not wait for the device's pending work."""
    return torch.tensor(values).to(device, non_blocking=True)


def rounded_up(slots: int) -> int:
    """A number of slots rounded up to one of few sizes; beyond 256 by at most a quarter."""
    unit = 1 << max(6, slots.bit_length() - 3)
    return -(-slots // unit) * unit


def capacity(slots: int) -> int:
    """Slots to allocate. One is always free, as full buffers would be another case to compile."""
    return rounded_up(slots) + 1


class RowCache:
    """Keys and values of a batch whose rows advance at different rates.

    The attention modules of `transformers` call `update(keys, values, layer_idx)` and nothing
    else, so where to write is state, set by `place` before a pass. Slot equals position: each
    row's first real token lies in slot 0, whatever padding stood before it.

    Args:
        rows: number of rows B.
        slots: the most slots that a row will ever use.
        windows: per layer, the sliding window in tokens, or None for full attention. Buffers are
            full length all the same (that is the memory price of rollback); windows are masked.

    Attributes:
        size: slots S that the buffers have now: more than any pass has used so far, or all.
    """

    def __init__(self, rows: int, slots: int, windows: Sequence[int | None]) -> None:
        self.rows = rows
        self.slots = slots
        self.size = 0
        self.windows = tuple(windows)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.firsts: list[int] = []  # of each row, the first slot of the pass
        self.start = 0  # the same, where all rows share it
        self.end = 0  # one past the last slot any row writes in this pass
        self.count = 0  # T
        self.in_step = True  # all rows write the same slots
        self._index: dict[Any, Tensor] = {}  # by device, (B, T) slots; none where rows are in step
        self.settled = False  # the prompts are in: passes are short, and worth compiling

    def place(self, starts: Sequence[int], count: int) -> None:
        """Say where the next pass writes: row b into slots starts[b] .. starts[b] + count - 1."""
        self.end = max(starts) + count
        if self.end > self.slots:
            raise ValueError(f"cache has {self.slots} slots per row, a pass needs {self.end}")
        self.reserve(self.end)
        self.count = count
        self.firsts = list(starts)
        self.start = starts[0]
        self._index.clear()
        self.in_step = all(start == self.start for start in starts)
        if not self.in_step:
            first = torch.tensor(starts)[:, None]  # (B, 1)
            self._index["cpu"] = first + torch.arange(count)  # (B, T)

    def reserve(self, slots: int) -> None:
        """Make room for so many slots; buffers that are too small also get half as many again."""
        if slots >= self.size and self.size < self.slots:
            more = capacity(slots + max(slots // 2, _MORE))
            length, self.size = self.size, min(more, self.slots)
            self._renew(slice(None), length)

    def _renew(self, places: slice | list[int], length: int) -> int:
        """Move rows, up to a length, into new buffers, layer by layer; returns the bytes copied."""
        copied = 0
        for buffers in (self.keys, self.values):
            for layer, old in buffers.items():
                new = old.new_zeros(
                    self.rows, old.shape[1], self.size, old.shape[3]
                )  # (B, H, S, D)
                moved = old[places, :, :length]  # (B, H, length, D)
                new[:, :, :length] = moved
                buffers[layer] = new
                copied += moved.nbytes
        return copied

    def placed(self, device: Any) -> Tensor:
        """The slots that the next pass writes, (B, T)."""
        if self.in_step:
            return torch.arange(self.start, self.end, device=device).repeat(self.rows, 1)
        if device not in self._index:
            self._index[device] = self._index["cpu"].to(device, non_blocking=True)
        return self._index[device]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values (B, H, T, D); return all that may be attended to."""
        all_keys, all_values = self.buffers(layer_idx, (keys.shape[1], keys.shape[3]), keys)
        if self.in_step:
            all_keys.narrow(2, self.start, self.count).copy_(keys)
            all_values.narrow(2, self.start, self.count).copy_(values)
        else:
            rows = torch.arange(self.rows, device=keys.device)[:, None]  # (B, 1)
            index = self.placed(keys.device)
            all_keys[rows, :, index] = keys.transpose(1, 2)
            all_values[rows, :, index] = values.transpose(1, 2)
        return self.read(layer_idx)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """What a layer's keys and values are in this pass, for layers that read another's."""
        window, first = self.windows[layer], 0
        if self.in_step and self.count == 1 and window is not None:
            first = max(0, self.end - window)  # `needs_mask` counts on this slice
        keys, values = self.keys[layer], self.values[layer]
        return keys.narrow(2, first, self.end - first), values.narrow(2, first, self.end - first)

    def buffers(self, layer: int, heads: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's whole keys and values, (B, H, S, D) each, for heads (H, D)."""
        if layer not in self.keys:
            # zeros, not empty: a masked slot still multiplies, and 0 * NaN is NaN
            shape = (self.rows, heads[0], self.size, heads[1])
            self.keys[layer] = like.new_zeros(shape)  # (B, H, S, D)
            self.values[layer] = like.new_zeros(shape)  # (B, H, S, D)
        return self.keys[layer], self.values[layer]

    def keep(self, places: Sequence[int], length: int) -> int:
        """Keep only the rows at `places` (ascending), up to a length, and free the others.

        Returns:
            The bytes copied.
        """
        self.rows = len(places)
        return self._renew(list(places), length)

    def needs_mask(self, window: int | None) -> bool:
        """Whether attention in this pass needs a mask beyond what `update` already leaves out.

        A single token of rows in step sees exactly what `update` returns, and a pass that starts
        at slot 0 is plainly causal, unless a window is shorter than the pass.
        """
        if not self.in_step:
            return True
        if self.count == 1:
            return False
        return self.start > 0 or (window is not None and self.end > window)

    def seen(self, window: int | None, device: Any) -> Tensor:
        """Which slots each query of the pass sees, (B or 1, 1, T, end) bool."""
        if self.in_step:
            queries = torch.arange(self.start, self.end, device=device)[None]  # (1, T)
        else:
            queries = self.placed(device)  # (B, T)
        return causal(queries, torch.arange(self.end, device=device), window)

    def mask(self, window: int | None, dtype: torch.dtype, device: Any) -> Tensor:
        """`seen` as the attention mask of a dtype: bool as it is, otherwise `additive`."""
        mask = self.seen(window, device)  # (B or 1, 1, T, end)
        return mask if dtype is torch.bool else additive(mask, dtype)


def causal(queries: Tensor, slots: Tensor, window: int | None) -> Tensor:
    """(B, 1, T, S) bool for queries at slots (B, T): whether they see each of some slots (S,)."""
    queries = queries[:, None, :, None]  # (B, 1, T, 1)
    past = slots <= queries  # (B, 1, T, S)
    return past if window is None else past & (slots > queries - window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as a mask to add: 0 where a query sees a slot, else the dtype's minimum."""
    out = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return out.masked_fill_(~mask, torch.finfo(dtype).min)
