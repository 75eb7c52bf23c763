"""The steps of sources for many chains at once, for replays; nothing is drawn here.

A chain begins at a place of a text and feeds its own tokens. It sees what a draft there would see:
the text's keys and values before its start, and its own after it, in every cache of the source.
Letters: B groups, G chains of a group, P places of all texts, T tokens of a text, H hidden width, V
vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.decoding.sources.chain_cache import ChainCache
from layerskip.model.backend import Block
from layerskip.model.cache import RowCache
from layerskip.model.sublayers import Pass, Sublayers


class Text(Protocol):
    """A recorded text: token ids (T,), and the target's states behind every layer, (L, T', H)."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def states(self) -> Tensor: ...


class Texts(Protocol):
    """Recorded texts of a model, with its keys and values of all their tokens, a row each."""

    @property
    def model(self) -> Sublayers: ...
    @property
    def texts(self) -> Sequence[Text]: ...
    @property
    def cache(self) -> RowCache: ...

    def rotary(self, slots: int, model: Sublayers) -> Any:
        """Rotary angles of so many places, for drafts by a model."""


class Steps(ABC):
    """A source's steps for chains, and the state of the chains in progress."""

    longest: int | None = None

    def __init__(self, source: Texts, model: Sublayers, *caches: RowCache) -> None:
        self.source, self.model, self.texts = source, model, caches
        self.caches: list[ChainCache] = []
        self.carried: list[Tensor] = []  # (B, G, H) each, from step to step

    def begin(self, texts: Tensor, starts: Tensor, steps: int) -> None:
        """Begin chains in texts (B,) at places (B, G), of at most so many steps."""
        texts, starts = (each.to(self.model.device) for each in (texts, starts))
        self.caches = [ChainCache(each, texts, starts, steps) for each in self.texts]
        self.rotary = self.source.rotary(int(starts.max()) + steps, self.model)

    def raw(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        """Raw logits (B, G, V) of a step.

        Args:
            rows: their places among all P, (B, G), while a chain follows its text.
        """
        for cache in self.caches:
            cache.advance(step)
        return self.compute(step, tokens.to(self.model.device), rows.to(self.model.device))

    @abstractmethod
    def compute(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        """`raw`, after the caches are placed."""

    def regroup(self, chosen: Tensor, steps: int, fed: int) -> None:
        """Continue with some chains in other groups, as `ChainCache.regrouped`."""
        chosen = chosen.to(self.model.device)
        self.caches = [cache.regrouped(chosen, steps, fed) for cache in self.caches]
        self.carried = [each.flatten(0, 1)[chosen] for each in self.carried]

    def run(
        self,
        hidden: Tensor,
        blocks: Sequence[Block],
        cache: int = 0,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Run hidden states (B, G, H) through blocks that write a cache (see `Pass`)."""
        step = Pass(self.model, self.caches[cache], self.rotary, inputs)
        return self.model.backend.run(hidden, step, blocks)


def states_behind(source: Texts, tap: int) -> list[Tensor]:
    """The target's states of all tokens of every text after `tap` sublayers, (T, H) each."""
    model, states = source.model, []
    for text in source.texts:
        tokens = text.tokens.to(model.device)[None]  # (1, T)
        hidden, step = model.first_pass(tokens)
        states.append(model.run(hidden, step, range(tap))[0])
    return states


def read(
    source: Texts,
    states: Sequence[Tensor],
    blocks: Sequence[Block],
    window: int | None,
    fed: Callable[[Tensor, Tensor], Tensor],
) -> RowCache:
    """The keys and values of all texts in blocks with a cache of their own.

    Args:
        states: the target's states that the blocks read, (T, H) for each text.
        fed: the blocks' inputs, from tokens (1, T) and states (1, T, H).
    """
    model, caches = source.model, []
    for text, each in zip(source.texts, states, strict=True):
        tokens = text.tokens.to(model.device)[None]  # (1, T)
        count = tokens.shape[1]
        caches.append(RowCache(1, count, (window,)))
        caches[-1].place([0], count)
        step = Pass(model, caches[-1], model.rotary(count, count))
        model.backend.run(fed(tokens, each[None]), step, blocks)
    return stacked(caches)


def stacked(caches: list[RowCache]) -> RowCache:
    """One cache with a row for each of these, which are emptied layer by layer."""
    joint = RowCache(len(caches), max(cache.slots for cache in caches), caches[0].windows)
    for layer in list(caches[0].keys):
        for mine, theirs in ((joint.keys, "keys"), (joint.values, "values")):
            rows = [getattr(cache, theirs).pop(layer) for cache in caches]  # (1, H, T, D) each
            mine[layer] = torch.cat(
                [F.pad(row, (0, 0, 0, joint.slots - row.shape[2])) for row in rows]
            )
    return joint
