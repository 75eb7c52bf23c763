"""Sources of drafts, one file per kind, and the choice of a source for a given draft."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from layerskip.config.registry import named
from layerskip.config.skips import SkipConfig
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.dflash import DFlash
from layerskip.decoding.sources.eagle import EagleHead
from layerskip.decoding.sources.official import Official
from layerskip.decoding.sources.sublayer_draft import SublayerDraft, TrainedDraft
from layerskip.families.known import ASSISTANTS
from layerskip.model.assistants import is_assistant, load_assistant
from layerskip.model.block_drafter import BlockDrafter, holds_blocks
from layerskip.model.eagle_head import Eagle, eagle_config, load_eagle, read_config
from layerskip.model.opened_model import OpenedModel


@runtime_checkable
class Drafter(Protocol):
    """A drafter loaded from a checkpoint that makes its own source for a target."""

    def source(self, target: OpenedModel, tokens: Sequence[int] | None) -> Source: ...


HEADS = (Eagle, BlockDrafter, Drafter)
"""What drafts for a model but is no model itself."""


def source_of(model: OpenedModel, draft: SkipConfig | Source) -> Source:
    """Return the source for a skip config; a source is returned unchanged.

    Raises:
        ValueError: a skip config does not fit the model, or names a module of another one.
    """
    if isinstance(draft, Source):
        return draft
    skip = draft.resolve(model.num_layers)
    if skip.trained is not None:
        return TrainedDraft(model, skip)
    return SublayerDraft(model, skip)


def drafter_of(source: str | os.PathLike[str]) -> Callable[..., Any] | None:
    """What loads an official assistant or a head that others trained; None: it is another model.

    Args:
        source: a folder or a Hub id, whose config is asked for once.

    Raises:
        OSError: there is no config.
        ValueError: it is a draft of another kind.
    """
    config = read_config(source)
    if config.get("model_type") in ASSISTANTS:
        return partial(load_assistant, source)
    if "medusa_num_heads" in config:
        return partial(named("drafter", "medusa"), source, config)
    if holds_blocks(config):
        return partial(BlockDrafter.loaded, source, config)
    if eagle_config(source, config) is None:
        return None
    return partial(load_eagle, source, config)


def load_drafter(
    source: str | os.PathLike[str], *, dtype: torch.dtype, device: torch.device
) -> Any:
    """Load an official assistant or a head that others trained from a folder or a Hub id.

    Raises:
        ValueError: as for `load_assistant`, `load_eagle`, `BlockDrafter.loaded` and `load_medusa`.
    """
    read = drafter_of(source) or partial(load_assistant, source)  # which says what it misses
    return read(dtype=dtype).to(device)


def second_model(
    target: OpenedModel,
    model: OpenedModel | Eagle | BlockDrafter | Drafter,
    tokens: Sequence[int] | None = None,
    bits: int | None = None,
) -> Source:
    """Return the source for a second model, the target's official assistant, or a head for it.

    Args:
        tokens: the only tokens to draft; None: all.
        bits: as for `Published`; only for EAGLE-3 heads and DFlash drafters.

    Raises:
        ValueError: the official assistant or the head belongs to another model.
    """
    if isinstance(model, Drafter):
        return model.source(target, tokens)
    if isinstance(model, Eagle):
        return EagleHead(target, model, tokens, bits)
    if isinstance(model, BlockDrafter):
        return DFlash(target, model, tokens, bits)
    if is_assistant(model.model.config):
        return Official(target, model, tokens)
    if tokens is not None:
        both = min(model.vocabulary, target.vocabulary)
        model = model.trimmed([token for token in tokens if token < both])
    return Assistant(model)
