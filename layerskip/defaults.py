"""The default sources of drafts, for a checkpoint without a skip config.

Two sources need no training, search or data. Lookups cost nothing. The model itself with its
weights in 8 bits needs memory for the copies, and pays where products with them are fast.
`expected-gain` finds out while decoding whether they pay on a text. Other sources that are given
are added.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from layerskip.config import SkipConfig
from layerskip.environment import free_memory
from layerskip.model.sublayers import Sublayers

SHARE = 0.5
"""The share of free memory that copies may take by default."""


class AutomaticDraft(NamedTuple):
    """The automatic draft of a model, besides lookups.

    Attributes:
        skip: the model in 8 bits; None if there are lookups only.
        reason: why there are lookups only, in words.
    """

    skip: SkipConfig | None
    reason: str | None


_decided: WeakKeyDictionary[nn.Module, dict[tuple[str, int | None, bool], AutomaticDraft]] = (
    WeakKeyDictionary()
)


def automatic_draft(
    model: Sublayers, memory: int | None = None, *, by_memory: bool = True
) -> AutomaticDraft:
    """The automatic draft of a model; decided once, so that it stays the same.

    Args:
        memory: bytes that copies of weights may take; by default SHARE of what is free.
        by_memory: False where the text depends on the drafts (under the rejection rule): then only
            the model and `memory` decide, not the free memory.
    """
    known = _decided.setdefault(model.model, {})
    key = model.execution, memory, by_memory
    if key not in known:
        known[key] = _decide(model, memory, by_memory)
    return known[key]


def _decide(model: Sublayers, memory: int | None, by_memory: bool) -> AutomaticDraft:
    skip = SkipConfig.low_precision(8)
    if model.execution != "native":
        reason = f"products with 8 bits are fast in native passes, and these are {model.execution}"
        return AutomaticDraft(None, reason)
    nbytes = model.weights.nbytes(skip)
    free = free_memory() if memory is None and by_memory else None
    limit = memory if free is None else int(SHARE * free)
    if limit is None or nbytes <= limit:
        return AutomaticDraft(skip, None)
    whose = "the limit" if free is None else "half of what is free"
    reason = f"copies of its weights would take {in_words(nbytes)}, {whose} is {in_words(limit)}"
    return AutomaticDraft(None, reason)


def in_words(nbytes: int) -> str:
    """Bytes as text, in GB or MB."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
