"""What drafts for a checkpoint that nobody prepared.

Two sources need no training, no search and no data: what followed where the text said the same
before, which costs nothing, and the model itself with its weights in 8 bits, which costs the memory
of the copies and pays where products with them are fast. Whether either pays on a text is what
`expected-gain` finds out while it decodes. Whatever else is given drafts beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from layerskip.config import SkipConfig
from layerskip.environment import free_memory
from layerskip.model.sublayers import Sublayers

SHARE = 0.5
"""Of the free memory, what copies may take where nobody says."""


@dataclass(frozen=True)
class Unprepared:
    """How such a model drafts beside looking up.

    Attributes:
        skip: the model in 8 bits; None where its drafts are looked up only.
        nbytes: memory that copies of its weights take, or would take.
        reason: why it does not, in words.
    """

    skip: SkipConfig | None
    nbytes: int
    reason: str | None


_decided: WeakKeyDictionary[nn.Module, dict[tuple[str, int | None, bool], Unprepared]] = (
    WeakKeyDictionary()
)


def unprepared(
    model: Sublayers, memory: int | None = None, *, by_memory: bool = True
) -> Unprepared:
    """What drafts here without any set-up; decided once for a model, so that it stays the same.

    Args:
        memory: bytes that copies of weights may take; by default SHARE of what is free.
        by_memory: False where the text depends on what drafts (by the rejection rule): then what is
            free at the moment decides nothing, only the model and `memory`.
    """
    known = _decided.setdefault(model.model, {})
    key = model.execution, memory, by_memory
    if key not in known:
        known[key] = _decide(model, memory, by_memory)
    return known[key]


def _decide(model: Sublayers, memory: int | None, by_memory: bool) -> Unprepared:
    skip = SkipConfig.low_precision(8)
    if model.execution != "native":
        reason = f"products with 8 bits are fast in native passes, and these are {model.execution}"
        return Unprepared(None, 0, reason)
    nbytes = model.weights.nbytes(skip)
    free = free_memory() if memory is None and by_memory else None
    limit = memory if free is None else int(SHARE * free)
    if limit is None or nbytes <= limit:
        return Unprepared(skip, nbytes, None)
    whose = "the limit" if free is None else "half of what is free"
    reason = f"copies of its weights would take {in_words(nbytes)}, {whose} is {in_words(limit)}"
    return Unprepared(None, nbytes, reason)


def in_words(nbytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
