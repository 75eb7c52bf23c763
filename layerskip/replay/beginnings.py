"""Shares the first steps of drafts that begin with the same blocks.

A search follows hundreds of drafts from the same places. Drafts whose first blocks are the same, in
the same precision, compute the same states at the first token of a chain; these are kept.
Shapes: B groups, G chains of a group, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from layerskip.model.backend import Block
from layerskip.replay.chain_cache import ChainCache

EVERY = 6
"""Number of blocks between kept states."""
LIMIT = 2**26
"""Maximum number of values to keep; beyond it all are dropped."""


class Beginning(NamedTuple):
    """States (B, G, H) after some blocks, and the chains' own keys and values by layer."""

    hidden: Tensor
    keys: Mapping[int, tuple[Tensor, Tensor]]
    blocks: Sequence[Block]
    """Kept alive, since they are known by their identities."""


class Beginnings:
    """The kept states of drafts, by chains and by their first blocks."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, ...], Beginning] = {}
        self._numbers = 0

    def run(
        self,
        run: Callable[[Tensor, Sequence[Block]], Tensor],
        hidden: Tensor,
        blocks: Sequence[Block],
        cache: ChainCache,
        chains: Hashable,
    ) -> Tensor:
        """`run(hidden, blocks)` at the chains' first tokens, starting from the last kept states.

        Args:
            hidden: the input of the first block, (B, G, H).
            chains: identifies what these states depend on besides the blocks.
        """
        chains = chains, cache.slots, str(cache.texts.tolist()), str(cache.starts.tolist())
        names = [id(block) for block in blocks]
        ends = range(EVERY, len(blocks), EVERY)  # never includes the head
        keys: Mapping[int, tuple[Tensor, Tensor]] = {}
        done = 0
        while done + EVERY in ends and (chains, *names[: done + EVERY]) in self._kept:
            done += EVERY
        if done:
            hidden, keys, _ = self._kept[chains, *names[:done]]
            for layer, (key, value) in keys.items():
                cache.update(key, value, layer)
        for end in ends[done // EVERY :]:
            hidden = run(hidden, blocks[end - EVERY : end])
            made = {}
            if cache.end < cache.slots:  # another token follows, and reads them
                made = {layer: cache.own(layer) for layer in cache.keys if layer not in keys}
            keys = {**keys, **made}
            self._numbers += hidden.numel() + sum(2 * key.numel() for key, _ in made.values())
            if self._numbers > LIMIT:
                self._kept.clear()
                self._numbers = 0
            self._kept[chains, *names[:end]] = Beginning(hidden, keys, blocks[:end])
        return run(hidden, blocks[len(ends) * EVERY :])
