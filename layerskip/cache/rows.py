"""Key-value buffers of a batch, with a length per row.

There is one buffer per attention layer, written by position. To roll back, the engine lowers a
row's length; the slots after it are overwritten before anything reads them. Keys and values are
copied when the buffers grow (by a sixteenth or 256 slots; by half, to one of few sizes, where
passes are captured for each size) and when `keep` drops rows.
Layers with a sliding window may keep fewer slots: those from a common base on. When their buffers
are full, the base moves up to what the shortest row still sees. If rows join and leave (`open`),
each row has its own base, and rows move within the buffers.
Shapes: B rows, H key-value heads, S slots, T tokens of a pass, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.cache.branches import Branches
from layerskip.cache.pages import Pages

SPARE = 256  # minimum number of slots by which buffers grow
STRIPE = 32  # bases are a multiple of this: native passes sum slots in groups of this size


def on_device(values: Sequence[Any], device: Any) -> Tensor:
    """Integers as a tensor on a device. The host does not wait for the device's pending work."""
    return torch.tensor(values).to(device, non_blocking=True)


def rounded_up(slots: int, least: int = 64) -> int:
    """Round a number of slots up to one of few sizes: by less than `least`, or by a quarter."""
    unit = max(least, 1 << max(0, slots.bit_length() - 3))
    return -(-slots // unit) * unit


def capacity(slots: int) -> int:
    """Slots to allocate where passes are captured. One is always free, for padding."""
    return rounded_up(slots, SPARE) + 1


class RowCache:
    """Keys and values of a batch whose rows advance at different rates.

    Attention modules of `transformers` give only keys, values and a layer to write. So the place
    to write is a state, set by `place` before a pass. Slot equals position: each row's first real
    token is in slot 0, whatever padding preceded it.

    Args:
        slots: maximum number of slots that a row will ever use.
        windows: per layer, the sliding window in tokens, or None for full attention.
        trims: buffers may have any size, and window layers drop what no later pass will see.
        zeros: makes the buffers, as `Pages.zeros` does.

    Attributes:
        size: the present number of slots S in buffers.
        trimmed: the layers whose buffers have `span` slots, from each row's slot in `bases` on.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        windows: Sequence[int | None],
        *,
        trims: bool = False,
        zeros: Callable[..., Tensor] | None = None,
    ) -> None:
        self.rows = rows
        self.slots = slots
        self.size = 0
        self.windows = tuple(windows)
        self.bases, self.span = [0] * rows, 0
        self.in_place = False  # whether rows move within the buffers, see `open`
        self._rolls, self._behind = 0, 0  # see `open`
        self._window = max((window for window in windows if window is not None), default=0)
        self.trims = trims
        self.trimmed = {i for i, window in enumerate(windows) if window is not None and trims}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._zeros = zeros or Pages().zeros
        self.firsts: list[int] = []  # first slot of each row in the pass
        self.settled: list[int] = []  # number of tokens of each that are sure to stay
        self.active = range(rows)  # the rows of the pass
        self.end = 0  # one past the last slot that any row writes in this pass
        self.top = 0  # the maximum of `end` over all passes
        self.count = 0  # T
        self.in_step = True  # whether rows write the same slots of equal bases, as chains
        self.branches: Branches | None = None  # of the pass, if it has branches
        self._index: dict[Any, Tensor] = {}  # by device, (B, T) slots; empty if rows are in step
        self.partial = True  # whether a pass may cover only some rows
        self.prefilled = False  # prompts are done: passes are short, and worth capturing

    def place(
        self,
        starts: Sequence[int],
        count: int,
        lowest: int = 0,
        rows: range | None = None,
        branches: Branches | None = None,
        settled: Sequence[int] | None = None,
    ) -> None:
        """Set where the next pass writes: row b into slots starts[b] .. starts[b] + count - 1.

        Args:
            lowest: no later pass will begin before this slot.
            rows: the rows of the pass; None: the first ones, as many as `starts`.
            branches: the trees of the tokens, if they are not chains.
            settled: for each row of the pass, the number of tokens that are sure to stay in the
                text; None: all those before the pass.
        """
        self.active = range(len(starts)) if rows is None else rows
        self.end = max(starts) + count
        if self.end > self.slots:
            raise ValueError(f"cache has {self.slots} slots per row, a pass needs {self.end}")
        self.top = max(self.top, self.end)
        self.reserve(self.end)
        self.count = count
        self.firsts, self.settled = list(starts), list(starts if settled is None else settled)
        self._trim(min(lowest, *starts))
        self._index.clear()
        self.branches = branches
        even = len({*starts}) == 1 and (not self.trimmed or len({*self.first_slots()}) == 1)
        self.in_step = branches is None and even
        if not self.in_step:
            first = torch.tensor(starts)[:, None]  # (B, 1)
            self._index["cpu"] = first + torch.arange(count)  # (B, T)

    def reserve(self, slots: int) -> None:
        """Make room for this many slots; buffers that are too small get some spare ones, too."""
        if slots >= self.size and self.size < self.slots:
            more = slots + max(slots // (16 if self.trims else 2), SPARE)
            more = more + 1 if self.trims else capacity(more)
            length, self.size = self.size, min(more, self.slots)
            self._renew({*self.keys} - self.trimmed, slice(None), 0, length)

    def _trim(self, lowest: int) -> None:
        """Make room for the pass in the buffers of trimmed layers, or shrink them in time."""
        if not self.trimmed:
            return
        if self._rolls:
            for place, first in zip(self.active, self.firsts, strict=True):
                if first + self.count > self.bases[place] + self.span:
                    self._shift(place, first - self._behind)
            return
        # One slot more than the first query sees, since an assistant begins one earlier.
        base = max(self.base, (lowest - self._window) // STRIPE * STRIPE)
        needed = self.top - base  # other rows may be ahead of this pass
        span = min(needed + max(needed // 8, SPARE // 4), self.slots - base)
        if self.end > self.base + self.span or 5 * span < 4 * self.span:
            first, held = base - self.base, self.span
            self.bases, self.span = [base] * self.rows, span
            self._renew({*self.keys} & self.trimmed, slice(None), first, min(held - first, span))

    def _renew(
        self, layers: Collection[int], places: slice | list[int], first: int, count: int
    ) -> None:
        """Move some slots of rows into new buffers, layer by layer."""
        for layer in layers:
            for buffers in (self.keys, self.values):
                old = buffers[layer]
                shape = (self.rows, old.shape[1], self.held(layer)[1], old.shape[3])
                new = self._zeros(shape, old)  # (B, H, S, D)
                moved = old[places, :, first : first + max(0, count)]  # (B, H, count, D)
                new[: len(moved), :, : moved.shape[2]] = moved
                buffers[layer] = new

    def open(self, span: int = 0, behind: int = 0) -> None:
        """Let rows join and leave: from now on `resize` sets the size of the buffers.

        Window layers keep `span` slots, or all if there are fewer, with a base per row. When a pass
        needs slots beyond them, its row drops all but those from `behind` slots before the pass on.
        Without a span they keep all slots.
        """
        self.in_place, self._rolls, self._behind = True, span, behind
        if not span:
            self.trimmed.clear()

    def begin(self, ends: Mapping[int, int]) -> None:
        """Begin with rows that are filled up to a slot each, by place; passes continue there."""
        if not self.in_place:
            if any(ends.values()):  # buffers must begin where passes read
                self.place([*ends.values()], 1, min(ends.values()))
            return
        for place, end in ends.items():
            window = max(0, end - self._window) if self.trimmed else 0
            self.bases[place] = window // STRIPE * STRIPE

    def _shift(self, place: int, base: int) -> None:
        base = max(base // STRIPE * STRIPE, self.bases[place])
        by, self.bases[place] = base - self.bases[place], base
        for buffers in (self.keys, self.values):
            for layer in {*buffers} & self.trimmed:
                row = buffers[layer][place]  # (H, S, D)
                row[:, : max(0, self.span - by)] = row[:, by:].clone()

    @property
    def base(self) -> int:
        return min(self.bases, default=0)

    def held(self, layer: int, place: int = 0) -> tuple[int, int]:
        """The first slot of a row in a layer's buffers, and the number of slots they have."""
        return (self.bases[place], self.span) if layer in self.trimmed else (0, self.size)

    def first_slots(self, layer: int | None = None) -> list[int]:
        """First slots of the pass's rows in the buffers of one layer, or of trimmed layers."""
        if layer is not None and layer not in self.trimmed:
            return [0] * len(self.active)
        return [self.bases[place] for place in self.active]

    def borrow(self, other: RowCache, layers: Mapping[int, int]) -> None:
        """Share another cache's buffers without copying: for some layers, its layer of each."""
        self.rows, self.size, self.top = other.rows, other.size, other.top
        self.bases, self.span = [*other.bases], other.span
        self.trimmed = {layer for layer, theirs in layers.items() if theirs in other.trimmed}
        for layer, theirs in layers.items():
            self.keys[layer], self.values[layer] = other.keys[theirs], other.values[theirs]

    def active_rows(self, buffer: Tensor) -> Tensor:
        """A view of the rows of a buffer (B, ...) that take part in the pass."""
        rows = self.active
        return buffer if len(rows) == self.rows else buffer[rows.start : rows.stop]

    def placed(self, device: Any) -> Tensor:
        """The slots that the next pass writes, (B, T)."""
        if self.in_step:
            slots = torch.arange(self.firsts[0], self.end, device=device)  # (T,)
            return slots.expand(len(self.firsts), -1)
        if device not in self._index:
            self._index[device] = self._index["cpu"].to(device, non_blocking=True)
        return self._index[device]

    def positions(self, device: Any) -> Tensor:
        """The positions of the pass's tokens, which determine their angles, (B, T)."""
        if self.branches is None:
            return self.placed(device)
        first = self.branches.first
        depths = on_device(self.branches.depths, device)  # (B, N)
        return self.placed(device)[:, :1] - first + depths[:, first:]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> None:
        """Write this pass's keys and values, (B, H, T, D) each."""
        shapes = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
        all_keys, all_values = self.buffers(layer, *shapes, keys)
        bases = self.first_slots(layer)
        if self.in_step:
            first = self.firsts[0] - bases[0]
            all_keys.narrow(2, first, self.count).copy_(keys)
            all_values.narrow(2, first, self.count).copy_(values)
        else:
            rows = torch.arange(len(keys), device=keys.device)[:, None]  # (B, 1)
            index = self.placed(keys.device) - on_device(bases, keys.device)[:, None]  # (B, T)
            all_keys[rows, :, index] = keys.transpose(1, 2)
            all_values[rows, :, index] = values.transpose(1, 2)

    def read(self, layer: int, window: int | None = None, sink: int = 0) -> tuple[Tensor, Tensor]:
        """A layer's keys and values in this pass, with a window and a sink as for `causal`."""
        window = window or self.windows[layer]
        place, count = 0, self._extent() if layer in self.trimmed else self.end
        if self.in_step and self.count == 1 and window is not None:
            place = max(0, count - window)  # `needs_mask` counts on this slice
        halves = [self.active_rows(each) for each in (self.keys[layer], self.values[layer])]
        if 0 < sink < place:
            keys, values = (
                torch.cat([each[:, :, :sink], each[:, :, place:count]], 2) for each in halves
            )
            return keys, values
        place = 0 if sink else place
        keys, values = (each.narrow(2, place, count - place) for each in halves)
        return keys, values

    def _extent(self) -> int:
        """Maximum number of slots of trimmed layers that the pass's rows use."""
        rows = zip(self.firsts, self.first_slots(), strict=True)
        return max(first - base for first, base in rows) + self.count

    def buffers(
        self, layer: int, keys: tuple[int, int], values: tuple[int, int], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A layer's complete keys and values in a pass, (B, H, S, D) each, for heads (H, D).

        Values may be narrower than keys (DeepSeek). `like` has their dtype and device.
        """
        if layer not in self.keys:
            self._allocate(self.keys, layer, *keys, like)
            self._allocate(self.values, layer, *values, like)
        keys_of, values_of = self.keys[layer], self.values[layer]
        if len(self.active) < self.rows:
            return self.active_rows(keys_of), self.active_rows(values_of)
        return keys_of, values_of  # without a call, since a pass asks for every layer's

    def _allocate(
        self, buffers: dict[int, Tensor], layer: int, heads: int, width: int, like: Tensor
    ) -> None:
        # Zeros rather than empty: a masked slot is still multiplied, and 0 * NaN is NaN.
        shape = (self.rows, heads, self.held(layer)[1], width)
        buffers[layer] = self._zeros(shape, like)  # (B, H, S, D)

    def parts(self, place: int, first: int, end: int) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """Yield a row's slots first .. end - 1: keys and values by layer, views (H, n, D).

        Those of trimmed layers may begin later; all end with the last slot.
        """
        for name, buffers in (("keys", self.keys), ("values", self.values)):
            for layer, buffer in buffers.items():
                base = self.held(layer, place)[0]
                slots = slice(max(first - base, 0), max(end - base, 0))
                yield (name, layer), buffer[place, :, slots]

    def fill(self, place: int, part: tuple[str, int], end: int, held: Tensor) -> None:
        """Write `parts` (H, n, D) into a row's slots before `end`, as far as buffers reach."""
        name, layer = part
        buffers = self.keys if name == "keys" else self.values
        if layer not in buffers:
            self._allocate(buffers, layer, held.shape[0], held.shape[2], held)
        last = max(0, end - self.held(layer, place)[0])
        count = min(last, held.shape[1])
        buffers[layer][place, :, last - count : last] = held[:, held.shape[1] - count :]

    def _arrange(self, places: Sequence[int | None]) -> None:
        """Give each row what is kept for the row at the given place, apart from buffers.

        A new row has the place None.
        """
        self.rows = len(places)
        self.bases = [0 if place is None else self.bases[place] for place in places]

    def keep(self, places: Sequence[int], length: int) -> None:
        """Let place i have the row that is now at places[i], up to a length; drop all others.

        Of an open cache, rows that keep their place keep all slots.
        """
        if self.in_place:
            moves = [(place, to) for to, place in enumerate(places) if place != to]
            if moves:
                old, new = map(list, zip(*moves, strict=True))
                self._arrange([*places, *range(len(places), self.rows)])
                for buffer in (*self.keys.values(), *self.values.values()):
                    buffer[new, :, :length] = buffer[old, :, :length]
            return
        self._arrange(places)
        self.top = length
        whole, some = {*self.keys} - self.trimmed, {*self.keys} & self.trimmed
        self._renew(whole, list(places), 0, length)
        self._renew(some, list(places), 0, length - self.base)

    def resize(self, rows: int, slots: int, kept: int) -> None:
        """Change an open cache to `rows` rows and `slots` slots; the first `kept` rows stay."""
        length, span = min(self.size, slots), self.span
        self.slots, self.size = slots, slots
        self.span = min(self._rolls, slots)
        self._arrange([*range(kept), *[None] * (rows - kept)])
        self._renew({*self.keys} - self.trimmed, slice(kept), 0, length)
        self._renew({*self.keys} & self.trimmed, slice(kept), 0, min(span, self.span))

    def keep_path(self, place: int, root: int, path: Sequence[int]) -> None:
        """Move the entries of a tree's nodes on a path to their slots without other branches.

        The path contains the numbers of the nodes after the root, ascending; `root` is a slot.
        """
        if list(path) == list(range(1, len(path) + 1)):
            return
        slots = torch.tensor([path, range(1, len(path) + 1)]) + root  # (2, n), from and to
        moved: dict[Any, Tensor] = {}  # by first slot and device, so that each is sent there once
        for buffers in (self.keys, self.values):
            for layer, buffer in buffers.items():
                base, row = self.held(layer, place)[0], buffer[place]  # (H, S, D)
                key = base, row.device
                if key not in moved:
                    moved[key] = (slots - base).to(row.device, non_blocking=True)
                nodes, to = moved[key]  # (n,) each
                row.index_copy_(1, to, row.index_select(1, nodes))  # what is selected is a copy

    def reusable(self, place: int, length: int) -> int:
        """The number of a row's first tokens, at most `length`, that a later text can reuse."""
        return length

    def store_points(self, length: int, same: int) -> set[int]:
        """The numbers of tokens after which a prompt of this length is worth storing.

        Args:
            same: tokens that it has in common with a stored text.
        """
        return {length, same} if self.window else {length}

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's state besides keys and values."""
        return 0

    @property
    def window(self) -> int:
        """The longest window of layers that need not keep every slot; 0 if there are none."""
        return self._window if self.trimmed else 0

    def needs_mask(self, window: int | None) -> bool:
        """Whether attention in this pass needs a mask in addition to what `update` leaves out.

        A single token of rows in step sees exactly what `update` returns. A pass that starts at
        slot 0 is plainly causal, unless a window is shorter than the pass.
        """
        if not self.in_step:
            return True
        if self.count == 1:
            return False
        return self.firsts[0] > 0 or (window is not None and self.end > window)

    def first(self, window: int | None, sink: int = 0) -> int:
        """The first slot that masks of window layers cover; those with a sink cover all.

        If rows have separate bases, that of the first row.
        """
        trimmed = window is not None and not sink and self.trimmed
        return self.first_slots()[0] if trimmed else 0

    def seen(self, window: int | None, device: Any, sink: int = 0) -> Tensor:
        """Whether each query sees each slot from its row's first on, (B or 1, 1, T, S) bool."""
        if self.in_step:
            queries = torch.arange(self.firsts[0], self.end, device=device)[None]  # (1, T)
        else:
            queries = self.positions(device)  # (B, T)
        slots = torch.arange(self.first(window, sink), self.end, device=device)  # (S,)
        if window is not None and not sink and self.trimmed and not self.in_step:
            bases = on_device(self.first_slots(), device)[:, None]  # (B, 1)
            slots = bases + torch.arange(self._extent(), device=device)  # (B, S)
        if self.branches is None:
            return causal(queries, slots, window, sink)
        sees = self.branches.sees[:, self.branches.first :].to(device)  # (B, T, N)
        return causal_on_paths(queries, slots, window, sink, sees)


def causal(queries: Tensor, slots: Tensor, window: int | None, sink: int = 0) -> Tensor:
    """Whether queries at slots (B, T) see each of the given slots, (B, 1, T, S) bool.

    The slots are (S,), (B, S) or (B, T, S).

    Args:
        window: number of most recent slots that a query sees, including its own; None: all.
        sink: number of first slots that it sees in addition.
    """
    queries = queries[:, None, :, None]  # (B, 1, T, 1)
    if slots.dim() > 1:
        slots = slots.reshape(len(slots), 1, -1, slots.shape[-1])  # (B, 1, 1 or T, S)
    past = slots <= queries  # (B, 1, T, S)
    if window is None:
        return past
    near = slots > queries - window
    return past & (near | (slots < sink) if sink else near)


def causal_on_paths(
    queries: Tensor, slots: Tensor, window: int | None, sink: int, sees: Tensor
) -> Tensor:
    """`causal`, where a row's slots from its root on belong to a tree's nodes.

    Args:
        queries: positions of nodes, (B, T).
        slots: (S,) or (B, S).
        sees: whether the path of each has each node of the tree, (B, T, N).
    """
    depths = sees.long().cumsum(-1) - 1  # (B, T, N)
    root = (queries - depths[..., -1])[:, :1]  # (B, 1)
    node = slots - root  # (B, S), below 0 before the root
    before, inside = (node < 0)[:, None], (node < sees.shape[-1])[:, None]  # (B, 1, S)
    at = node.clamp(0, sees.shape[-1] - 1)[:, None].expand(-1, sees.shape[1], -1)  # (B, T, S)
    slots = slots.expand_as(node)[:, None]  # (B, 1, S)
    places = torch.where(before, slots, root[..., None] + depths.gather(2, at))  # (B, T, S)
    known = before | (sees.gather(2, at) & inside)  # shorter rows have fewer slots
    return causal(queries, places, window, sink) & known[:, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to an additive one: 0 where a query sees a slot, else the minimum."""
    out = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return out.masked_fill_(~mask, torch.finfo(dtype).min)
