"""Pictures in prompts: their features, and which of their tokens see each other.

The library runs the vision tower before the engine is called. Only the prefill handles pictures:
afterwards, a picture consists of keys and values like any text.
Shapes: B rows, W width of the prompts, N features, T tokens of a pass, H hidden width, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerskip.families.family import Conditional


@dataclass(frozen=True)
class Pictures:
    """The pictures in the prompts of a batch.

    Attributes:
        features: the features that replace placeholders, row after row, (N, H).
        numbers: by slot, the number of its feature, -1 for none, (B, W).
        blocks: by slot, the number of the picture whose tokens see each other, -1 for text, (B, W).
            None: pictures are as causal as text.
    """

    features: Tensor
    numbers: Tensor
    blocks: Tensor | None = None

    @classmethod
    def of(
        cls, features: Tensor, placeholders: Tensor, mask: Tensor, two_way: Tensor | None
    ) -> Pictures:
        """Locate pictures in left-padded prompts.

        Args:
            features: of all placeholders, (N, H).
            placeholders: whether a token is a placeholder, (B, W) bool.
            mask: 0 at pads, (B, W).
            two_way: tokens of pictures that see each other, (B, W) bool; None: none.
        """
        numbers = (placeholders.flatten().cumsum(0) - 1).view_as(placeholders)
        numbers = numbers.masked_fill(~placeholders, -1)  # (B, W)
        blocks = None
        if two_way is not None:
            begins = two_way & ~F.pad(two_way, (1, 0))[:, :-1]
            blocks = (begins.cumsum(1) - 1).masked_fill(~two_way, -1)  # (B, W)
            blocks = _by_slot(blocks, mask)
        return cls(features, _by_slot(numbers, mask), blocks)

    def to(self, device: torch.device) -> Pictures:
        """Move the tensors to a device."""
        blocks = None if self.blocks is None else self.blocks.to(device)
        return Pictures(self.features.to(device), self.numbers.to(device), blocks)

    def some(self, rows: range) -> Pictures:
        """Select the pictures of neighbouring rows."""
        chosen = slice(rows.start, rows.stop)
        blocks = None if self.blocks is None else self.blocks[chosen]
        return Pictures(self.features, self.numbers[chosen], blocks)

    def over(self, hidden: Tensor, slots: Tensor) -> Tensor:
        """Replace placeholders by features in embedded tokens (B, T, H) at slots (B, T)."""
        numbers = self.numbers.gather(1, slots)  # (B, T)
        there = numbers >= 0
        return hidden.masked_scatter(there[..., None], self.features[numbers[there]].to(hidden))

    def blocks_of(self, slots: Tensor) -> Tensor | None:
        """The blocks, if any of the slots (B, T) of a pass is in one; otherwise None."""
        if self.blocks is None or not bool((self.blocks.gather(1, slots) >= 0).any()):
            return None
        return self.blocks

    def named(self, row: int, tokens: Sequence[int]) -> list[int]:
        """A row's first tokens. Placeholders get negative numbers, which are the same for equal
        pictures only."""
        named, numbers = list(tokens), self.numbers[row].tolist()
        places = [place for place in range(len(named)) if numbers[place] >= 0]
        for _, run in groupby(places, lambda place: numbers[place] - place):
            first, *others = run
            of = self.features[numbers[first] : numbers[first] + 1 + len(others)]  # (n, H)
            held = of.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            two_way = b"" if self.blocks is None else b"two-way"
            digest = blake2b(held + two_way, digest_size=16)
            for place in (first, *others):
                named[place] = -1 - int.from_bytes(digest.digest())
        return named

    @property
    def longest(self) -> int:
        """Tokens of the longest picture whose tokens see each other; 0 if there is none."""
        if self.blocks is None:
            return 0
        blocks = [row[row >= 0] for row in self.blocks]
        return max((int(row.bincount().max()) for row in blocks if len(row)), default=0)

    @property
    def inside(self) -> frozenset[int]:
        """Slots where a pass must not begin: inside a picture whose tokens see each other."""
        if self.blocks is None:
            return frozenset()
        goes_on = (self.blocks[:, 1:] >= 0) & (self.blocks[:, 1:] == self.blocks[:, :-1])
        return frozenset((1 + goes_on.any(0).nonzero().flatten()).tolist())


def _by_slot(values: Tensor, mask: Tensor) -> Tensor:
    """Convert left-padded values (B, W) to values by slot, without pads; -1 after the end."""
    rows = [row[real] for row, real in zip(values, mask.bool(), strict=True)]
    return pad_sequence(rows, batch_first=True, padding_value=-1)  # (B, W)


def seen_ahead(
    wrapper: Conditional, blocks: Tensor, slots: Tensor, end: int, window: int | None
) -> Tensor | None:
    """The slots before `end` that a query sees as part of its own picture, (B, 1, T, end) bool.

    Args:
        wrapper: the class around the decoder, since families differ.
        blocks: as in `Pictures`, (B, W).
        slots: of the queries, (B, T).
        window: of the layer.
    """
    query = blocks.gather(1, slots)[:, None, :, None]  # (B, 1, T, 1)
    same = (query >= 0) & (query == blocks[:, None, None, :end])  # (B, 1, T, end)
    near = None
    if window is not None:
        near = torch.arange(end, device=slots.device) > slots[:, None, :, None] - window
    return wrapper.sees(same, near)
