"""What a model drafts with by itself, where nobody names a draft, and drafts in words.

The model with 8-bit weights needs memory for the copies, and pays where 8-bit products are fast; in
a long text it attends only to the first and last tokens, since it would otherwise read as many keys
as the model. Some checkpoints bring a head of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from layerskip.config.skips import SINK, SkipConfig
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.mtp import CheckpointHead
from layerskip.families.architecture import read_bytes
from layerskip.files.environment import free_memory
from layerskip.model import mtp_head
from layerskip.model.opened_model import OpenedModel
from layerskip.model.opened_models import ASKED, kept_for
from layerskip.model.published_head import PublishedHead
from layerskip.weights.stored import stored_weights

WINDOW = 1024
"""Window of the model's own default draft in a long text, in tokens (`SkipConfig.window`)."""

WORTH = 0.75
"""Maximum size of the default draft's copies, as a share of the stored weights' bytes."""

MEASURED = ("native",)
"""Passes with which 8 bits are the default, as they were measured; "captured" (a GPU) was not."""

SHARE = 0.5
"""Share of the free memory that copies may take by default."""


def skip_label(skip: SkipConfig, resolved: SkipConfig) -> str:
    """Describe a draft in a few words, from its config as given and as resolved."""
    if skip.trained is not None and skip.trained.alone:
        return skip.trained.words_with(skip.low)
    label = f"skip {len(skip.attention)} attention, {len(skip.mlp)} MLP"
    if not resolved.skipped():
        label = "whole model"
    elif skip.exit_layer is not None and not skip.attention and not skip.mlp:
        label = f"exit {skip.exit_layer}"
    low, vocabulary = resolved.low, skip.draft_vocabulary
    if low is not None and skip.trained is None:
        label += f", {low.words(len(resolved.kept()))}"
    if resolved.experts is not None:
        label += f", {resolved.experts} experts" if resolved.experts else ", no experts"
    label += "" if resolved.window is None else f", window {resolved.window}"
    label += "" if skip.trained is None else f", {skip.trained.words_with(low)}"
    return label if vocabulary is None else f"{label}, vocabulary {len(vocabulary)}"


class AutomaticDraft(NamedTuple):
    """What a model drafts with by itself by default, in addition to lookups.

    Attributes:
        skip: the model in 8 bits, with a window if its texts may be longer; None if not possible.
        reason: why not, in words.
        loading: whether loading the model as `reason` says would make it possible.
        head: the checkpoint's own head, if it has one that can draft.
        head_reason: why it cannot draft, in words; None if there is none.
    """

    skip: SkipConfig | None
    reason: str | None
    loading: bool = False
    head: mtp_head.Head | None = None
    head_reason: str | None = None


def automatic_draft(
    model: OpenedModel, memory: int | None = None, *, by_memory: bool = True
) -> AutomaticDraft:
    """Decide what a model drafts with by itself, once for how its passes run.

    Args:
        memory: bytes that copies of weights may take; by default SHARE of the free memory.
        by_memory: False if the text depends on the drafts (rejection rule). Then the model and
            `memory` decide alone, regardless of the free memory.

    Raises:
        ValueError: the checkpoint's own head is damaged.
    """
    kept, key = kept_for(model.model), (model.execution, memory, by_memory)
    if key not in kept:
        head, draft = _head(model, memory, by_memory), _rounded(model, memory, by_memory)
        if isinstance(head, str):
            kept[key] = draft._replace(head_reason=head)
        else:
            kept[key] = draft._replace(head=head)
    return kept[key]  # type: ignore[no-any-return]


def heads_of(model: OpenedModel, draft: AutomaticDraft) -> list[Source]:
    """The source for the checkpoint's own head, if there is one that drafts."""
    return [] if draft.head is None else [CheckpointHead(model, draft.head)]


def head_bits(model: OpenedModel, head: PublishedHead, memory: int | None) -> int | None:
    """The bits to which a head that others trained is rounded for a model; None: it stays exact.

    It is decided once for a head, since its copies then take of the free memory themselves.

    Args:
        memory: as for `automatic_draft`.
    """
    kept = kept_for(head)
    if model.execution not in kept:
        large = model.execution not in MEASURED or _too_large(read_bytes(head, 8), memory, True)
        kept[model.execution] = None if large else 8
    return kept[model.execution]  # type: ignore[no-any-return]


def _head(model: OpenedModel, memory: int | None, by_memory: bool) -> mtp_head.Head | str | None:
    """The checkpoint's own head, or why it cannot draft; None: there is none, or no memory."""
    without = model.parts and not (model.recurrent or model.mixtures)
    if without or model.encoder or memory == 0:
        return None
    found = mtp_head.find(model)
    if not isinstance(found, mtp_head.Found):
        return found
    reason = _too_large(found.size * model.dtype.itemsize, memory, by_memory)
    return reason or mtp_head.read(found, model.model.get_input_embeddings().weight)


def _too_large(nbytes: int, memory: int | None, by_memory: bool) -> str | None:
    """Return why copies of `nbytes` bytes are too large, or None if they are not."""
    free = free_memory() if memory is None and by_memory else None
    limit = memory if free is None else int(SHARE * free)
    if limit is None or nbytes <= limit:
        return None
    whose = "the limit" if free is None else "half of what is free"
    return f"copies of its weights would take {in_words(nbytes)}, {whose} is {in_words(limit)}"


def _rounded(model: OpenedModel, memory: int | None, by_memory: bool) -> AutomaticDraft:
    sees = any(part.narrows(WINDOW) for part in model.parts)
    window = WINDOW if sees and model.max_positions > WINDOW + SINK else None
    skip = replace(SkipConfig.low_precision(8), window=window)
    if model.execution not in MEASURED:
        reason = _loaded_without(model)
        if reason is not None:
            return AutomaticDraft(None, reason, loading=memory != 0)
        reason = f"8-bit products are fast in native passes only, and these are {model.execution}"
        if model.execution == "captured":
            reason = "8 bits were not measured on a GPU; ask for them with --low-precision 8"
        return AutomaticDraft(None, reason)
    whole, lower = (sum(each["sublayers"]) for each in map(model.weight_bytes, (None, 8)))
    if stored_weights(model.model) and lower > WORTH * whole:
        return AutomaticDraft(None, "its weights already take so few bits that 8 save too little")
    reason = _too_large(model.weights.nbytes(skip), memory, by_memory)
    return AutomaticDraft(skip if reason is None else None, reason)


def _loaded_without(model: OpenedModel) -> str | None:
    """Return why a model has no native passes and the remedy, if the way it was loaded is why."""
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
            "unquantised, with dtype='bfloat16', or by layerskip.load(path), which reads "
            "compressed-tensors, GPTQ, AWQ and FP8 as they are"
        )
    if model.dtype is torch.float16:
        return (
            "it is in float16, and 8 bits are fast in float32 or bfloat16 only; load it with "
            "dtype='bfloat16'"
        )
    return None


def in_words(nbytes: int) -> str:
    """Format a number of bytes in GB or MB."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
