"""The default sources of drafts, for a checkpoint without a skip config.

Two sources need no training, search or data. Lookups cost nothing. The model itself with its
weights in 8 bits needs memory for the copies, and pays where products with them are fast. Of long
texts it sees the first tokens and the last ones only: else it would read as many keys as the model.
`expected-gain` finds out while decoding whether they pay on a text. Other sources that are given
are added. Where only the way a model was loaded stands against 8 bits, a warning says what to do.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from layerskip.config import SINK, SkipConfig
from layerskip.environment import free_memory
from layerskip.model.sublayers import ASKED, Sublayers

WINDOW = 1024
"""Tokens that the model's own draft sees of a long text (`SkipConfig.window`)."""

SHARE = 0.5
"""The share of free memory that copies may take by default."""


class AutomaticDraft(NamedTuple):
    """The automatic draft of a model, besides lookups.

    Attributes:
        skip: the model in 8 bits, with a window if its texts may be longer; None if there are
            lookups only.
        reason: why there are lookups only, in words.
        loading: another way to load the model has such a draft; `reason` says which.
    """

    skip: SkipConfig | None
    reason: str | None
    loading: bool = False


_decided: WeakKeyDictionary[nn.Module, dict[tuple[str, int | None, bool], AutomaticDraft]] = (
    WeakKeyDictionary()
)
_warned: WeakSet[nn.Module] = WeakSet()


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


def warn_of_loading(model: Sublayers, found: AutomaticDraft) -> None:
    """Say, once for each model, what to load differently for drafts in 8 bits."""
    if found.loading and model.model not in _warned:
        _warned.add(model.model)
        warnings.warn(f"lookups are the only drafts: {found.reason}", stacklevel=2)


def _decide(model: Sublayers, memory: int | None, by_memory: bool) -> AutomaticDraft:
    sees = any(part.narrowed(WINDOW) is not part for part in model.parts)
    window = WINDOW if sees and model.max_positions > WINDOW + SINK else None
    skip = replace(SkipConfig.low_precision(8), window=window)
    if model.execution != "native":
        reason = _loaded_without(model)
        if reason is not None:
            return AutomaticDraft(None, reason, loading=memory != 0)
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


def _loaded_without(model: Sublayers) -> str | None:
    """Why a model has no native passes, and what to do, if that is up to how it was loaded."""
    if model.device.type != "cpu" or model.reason == ASKED:
        return None
    modules = [*model.model.modules()]
    if any(isinstance(getattr(each, "base_layer", None), nn.Module) for each in modules):
        return (
            "it has unmerged adapters (LoRA), and 8 bits are fast with plain weights only; merge "
            "them: model = model.merge_and_unload()"
        )
    packed = {
        type(weight).__name__
        for weight in model.model.parameters()
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor
    }
    config = getattr(model.model.config, "quantization_config", None)
    if packed or config is not None:
        of = f" ({', '.join(sorted(packed))})" if packed else ""
        return (
            f"its weights are quantised{of}, and 8 bits are fast with plain weights only; load it "
            "unquantised, with dtype='bfloat16'"
        )
    if model.dtype is torch.float16:
        return (
            "it is in float16, and 8 bits are fast in float32 or bfloat16 only; load it with "
            "dtype='bfloat16'"
        )
    return None


def in_words(nbytes: int) -> str:
    """Bytes as text, in GB or MB."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
