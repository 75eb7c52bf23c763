"""The keys and values of many drafts of one text in one pass, and their mask.

Shapes: B groups, G chains of a group, S places of the text, H key-value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerskip.cache.rows import RowCache


class ChainCache(RowCache):
    """Keys and values of many drafts at once: the text's up to each start, and each draft's own.

    A row of the buffers holds a group of chains that start in one text. The text's slots come
    first, then G slots for every step. The mask lets a chain see the text before its start and its
    own slot of each step, within the layer's window.

    Args:
        starts: place of each chain's first fed token, (B, G).
        steps: maximum number of tokens that a chain feeds.
    """

    def __init__(self, source: RowCache, texts: Tensor, starts: Tensor, steps: int) -> None:
        rows, self.group = starts.shape
        self.texts, self.starts, self.source = texts, starts, source
        self.places = int(starts.max())  # S
        super().__init__(rows, self.places + steps * self.group, source.windows)
        self.count = self.group
        self.in_step = False

    def advance(self, step: int) -> None:
        """Prepare for a pass that feeds token `step` of every chain."""
        self.start = self.places + step * self.group
        self.end = self.start + self.group

    def placed(self, device: Any) -> Tensor:
        """The places of the tokens fed next, for the rotary angles, (B, G)."""
        return (self.starts + self._fed() - 1).to(device)

    def _fed(self) -> int:
        return (self.end - self.places) // self.group

    def update(self, keys: Tensor, values: Tensor, layer: int) -> None:
        """Write one step's keys and values, (B, H, G, D) each."""
        if layer not in self.keys:
            self._open(layer, keys, values)
        self.keys[layer].narrow(2, self.start, self.group).copy_(keys)
        self.values[layer].narrow(2, self.start, self.group).copy_(values)

    def read(self, layer: int, window: int | None = None, sink: int = 0) -> tuple[Tensor, Tensor]:
        """All of a layer to attend to, (B, H, end, D) each; windows are masked."""
        if layer not in self.keys:  # a layer that no chain writes
            self._open(layer, self.source.keys[layer], self.source.values[layer])
        return self.keys[layer].narrow(2, 0, self.end), self.values[layer].narrow(2, 0, self.end)

    def _open(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Allocate a layer's buffers, like given keys and values, with the texts' slots."""
        for mine, theirs, like in (
            (self.keys, self.source.keys, keys),
            (self.values, self.source.values, values),
        ):
            shape = (self.rows, like.shape[1], self.slots, like.shape[3])
            mine[layer] = like.new_empty(shape)  # (B, H, S + J G, D), written before it is read
            for row, text in enumerate(self.texts.tolist()):  # copies once, without a gather
                mine[layer][row, :, : self.places] = theirs[layer][text, :, : self.places]

    def needs_mask(self, window: int | None) -> bool:
        """Always true: chains of a group must not see each other."""
        return True

    def seen(self, window: int | None, device: Any, sink: int = 0) -> Tensor:
        """The slots that each chain sees, (B, 1, G, end) bool."""
        steps = self._fed()
        starts = self.starts.to(device)[:, :, None]  # (B, G, 1)
        slots = torch.arange(self.places, device=device)  # (S,)
        text = slots < starts  # (B, G, S)
        alone = torch.eye(self.group, dtype=torch.bool, device=device)  # (G, G)
        chains = alone.repeat(1, steps)  # (G, steps G)
        if window is not None:
            place = self.placed(device)[:, :, None]  # (B, G, 1)
            text = text & ((slots > place - window) | (slots < sink))
            ages = torch.arange(steps - 1, -1, -1, device=device).repeat_interleave(self.group)
            chains = chains & ((ages < window) | (place - ages < sink))  # (B, G, steps G)
        return torch.cat([text, chains.expand(self.rows, -1, -1)], -1)[:, None]  # (B, 1, G, end)
