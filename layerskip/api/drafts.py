"""Chooses the draft sources of a model, for every public interface alike.

A skip config describes a draft by the model itself; of several, the controller chooses one in each
round. They share one KV cache and one copy of rounded weights, and verification starts from the
hidden states that the chosen draft shares with the model. Without a skip config, two sources need
no training, search or data. Lookups cost nothing, and stay beside named drafts. The model with
8-bit weights needs memory for the copies, and pays where 8-bit products are fast; in a long text it
attends only to the first and last tokens, since it would otherwise read as many keys as the model.
`expected-gain` finds out during decoding whether they pay. Other given sources are added. A warning
says what to do if only the way a model was loaded rules out 8 bits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from layerskip.api.settings import Settings
from layerskip.config.registry import ADAPTIVE
from layerskip.config.skips import SINK, SkipConfig
from layerskip.decoding.sources import second_model, source_of
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.lookup import Lookup
from layerskip.decoding.sources.mtp import CheckpointHead
from layerskip.files.environment import free_memory
from layerskip.model import mtp_head
from layerskip.model.assistants import load_assistant
from layerskip.model.eagle_head import Eagle, eagle_config, load_eagle
from layerskip.model.opened_models import sublayers_of
from layerskip.model.sublayers import ASKED, Sublayers
from layerskip.model.whole import Whole
from layerskip.texts.vocabulary import warn_of_vocabularies
from layerskip.weights.stored import storage_words, stored_weights

WINDOW = 1024
"""Window of the model's own default draft in a long text, in tokens (`SkipConfig.window`)."""

WORTH = 0.75
"""Maximum size of the default draft's copies, as a share of the stored weights' bytes."""

SHARE = 0.5
"""Share of the free memory that copies may take by default."""


@dataclass(frozen=True)
class Drafts:
    """The draft sources of a model.

    Attributes:
        model: the target; the head that its own draft reads may be trimmed to a vocabulary.
        sources: in the order of their numbers in rounds. Without any, decoding is plain.
        skips: the skip configs of the model's own drafts, which are the last sources.
        reason: why the model does not draft in 8 bits by default.
    """

    model: Sublayers
    sources: Sequence[Source] = ()
    skips: Sequence[SkipConfig] = ()
    reason: str | None = None

    @property
    def names(self) -> list[str]:
        """The names of the sources in records."""
        return [source.name for source in self.sources]

    @property
    def words(self) -> list[str]:
        """A description of each source, with the memory taken by weights copied for it."""
        lines = [source.words for source in self.sources]
        first = len(lines) - len(self.skips)
        for number, skip in enumerate(self.skips, first):
            lines[number] = skip_label(skip, skip.resolve(self.model.num_layers))
            if len(self.skips) > 1:
                lines[number] = f"{self.sources[number].name}: {lines[number]}"
            if nbytes := self.model.weights.nbytes(skip):
                lines[number] += f" ({in_words(nbytes)} of memory)"
        return lines


def choose_drafts(
    model: Sublayers, settings: Settings, *, rejection: bool = False, warn: bool = True
) -> Drafts:
    """Make the draft sources of a model, including copies of weights that they need.

    Args:
        rejection: texts depend on their drafts, so drafts must not depend on the free memory.
        warn: whether to warn if the model could draft in 8 bits, had it been loaded differently.

    Raises:
        ValueError: a source does not fit the model.
    """
    if not settings.enabled:
        return Drafts(model)
    lookup = lookup_of(settings, rejection=rejection)
    sources: list[Source] = [*([] if lookup is None else [lookup]), *settings.sources]
    if settings.assistant is not None:
        sources.append(_second_model(model, settings))
    skips, reason = settings.skips, None
    if settings.automatic:
        head, _ = own_head(model, settings.draft_memory, by_memory=not rejection)
        sources += [] if head is None else [head]
        chosen = automatic_draft(model, settings.draft_memory, by_memory=not rejection)
        skips, reason = () if chosen.skip is None else (chosen.skip,), chosen.reason
        silent = not warn or sources != [lookup] or model.model in _warned
        if chosen.loading and not silent:  # warn once per model
            _warned.add(model.model)
            warnings.warn(f"lookups are the only drafts: {reason}", stacklevel=2)
    if skips and settings.draft_vocabulary is not None:
        model = model.trimmed(settings.draft_vocabulary)
    for number, skip in enumerate(skips, 1):
        sources.append(source := source_of(model, without_origin(model, skip)))
        if len(skips) > 1:
            source.name = f"{source.name} {number}"  # type: ignore[misc]
    return Drafts(model, sources, skips, reason)


def without_origin(model: Sublayers, skip: SkipConfig) -> SkipConfig:
    """Return a skip config that fits the model, without where it was searched.

    Warns if that was another model; what is returned does not warn again.

    Raises:
        ValueError: it does not fit the model.
    """
    own_hash = model.weights.fingerprint() if skip.model_hash else None
    name = getattr(model.model, "name_or_path", None) or None
    foreign = skip.matches(name, own_hash) is False
    origin = f"this skip config was searched on {skip.model or 'another model'}, not on {name}"
    try:
        skip.resolve(model.num_layers)
    except ValueError as error:
        raise ValueError(f"{error}; {origin}" if foreign else str(error)) from error
    if foreign:
        warnings.warn(f"{origin}: the output stays exact, but it may be slower", stacklevel=3)
    return replace(skip, model=None, model_hash=None)


def lookup_of(settings: Settings, *, rejection: bool = False) -> Lookup | None:
    """Return the source of lookups: beside all other drafts, unless they are turned off.

    Beside named drafts under the rejection rule, where texts depend on drafts, they must be asked
    for, so that a skip config without a word about lookups keeps its texts.
    """
    asked = settings.lookup
    if asked is None:
        asked = settings.automatic or not rejection
    return Lookup() if asked is True else asked or None


def _second_model(target: Sublayers, settings: Settings) -> Source:
    """Return the second model as a source, limited to the draft vocabulary."""
    if isinstance(settings.assistant, str | os.PathLike):
        read = load_assistant if eagle_config(settings.assistant) is None else load_eagle
        loaded = read(settings.assistant, dtype=target.dtype)
        settings.assistant = loaded.to(target.device)  # load once for all calls
    if isinstance(settings.assistant, Eagle):
        return second_model(target, settings.assistant, settings.draft_vocabulary)
    opened = sublayers_of(settings.assistant, settings.execution)
    if opened.encoder:
        opened = opened.reading_of(target)
    source = second_model(target, opened, settings.draft_vocabulary)
    if isinstance(source, Assistant):
        warn_of_vocabularies(target.model, opened.model)
    return source


def explain_drafts(model: Any, settings: Settings) -> str:
    """List what drafts for a model, and why nothing better does; one item per line."""
    opened = sublayers_of(model, settings.execution)
    lines = [f"passes: {opened.describe()}"]
    if words := storage_words(opened.model):
        lines.append(words)
    if each := opened.cache_bytes(1000):
        lines.append(f"keys and values: {in_words(round(each))} per 1,000 tokens of text")
    if not settings.enabled:
        return "\n".join([*lines, "drafts: none, as enabled is False"])
    rejection = settings.acceptance == "rejection"
    drafts = choose_drafts(opened, settings, rejection=rejection, warn=False)
    lines += [f"drafts: {words}" for words in drafts.words]
    lines.append(f"controller: {controller_words(settings)}")
    if settings.automatic:
        _, reason = own_head(opened, settings.draft_memory, by_memory=not rejection)
        lines += [] if reason is None else [f"no drafts by the checkpoint's own head: {reason}"]
    if drafts.reason is not None:
        lines.append(f"no drafts by the model in 8 bits: {drafts.reason}")
    name = getattr(opened.model, "name_or_path", "")
    hint = exits_hint(opened, name, drafts.skips, likely=drafts.reason is not None)
    lines += [] if hint is None else [hint]
    if not opened.exact:
        lines.append(
            "texts equal those of plain decoding up to near-ties: passes are not native, and "
            "libraries sum in another order when a batch has other sizes"
        )
    return "\n".join(lines)


def exits_hint(
    model: Sublayers, name: str, skips: Sequence[SkipConfig], *, likely: bool = False
) -> str | None:
    """Return what to type to find the best exit, if that is likely to help.

    It is where the name says so, as those of the published LayerSkip checkpoints do, and no exit
    drafts yet. Exits of ordinary models gain nothing, and models do not say how they were trained.

    Args:
        likely: whether to return it whatever the name, since no draft in 8 bits does as well.
    """
    if isinstance(model, Whole) or model.encoder or model.num_layers < 2:
        return None
    if any(skip.skipped(model.num_layers) for skip in skips):
        return None
    if not likely and "layerskip" not in PurePath(name).name.lower():
        return None
    return f"trained to exit early? layerskip check {name or 'MODEL'} --exits"


def controller_words(settings: Settings) -> str:
    """Describe the controller, and those settings that differ from its defaults."""
    how = settings.controller
    if not isinstance(how, str):
        return type(how).__name__
    names = ("max_draft_length", "threshold")
    given = {name: getattr(settings, name) for name in names}
    given |= ADAPTIVE | settings.adaptive if how == "adaptive-threshold" else {}
    words = [f"{name} {value}" for name, value in given.items() if value is not None]
    return ", ".join([how, *words])


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
    """The default draft by the model itself, in addition to lookups.

    Attributes:
        skip: the model in 8 bits, with a window if its texts may be longer; None if not possible.
        reason: why there is none, in words.
        loading: whether loading the model as `reason` says would make such a draft possible.
    """

    skip: SkipConfig | None
    reason: str | None
    loading: bool = False


_decided: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_warned: WeakSet[nn.Module] = WeakSet()


def _once(decide: Callable[..., Any], model: Sublayers, memory: int | None, by_memory: bool) -> Any:
    """Decide something once about a model and how its passes run, so that it never changes."""
    decided = _decided.setdefault(model.model, {})
    key = decide, model.execution, memory, by_memory
    if key not in decided:
        decided[key] = decide(model, memory, by_memory)
    return decided[key]


def automatic_draft(
    model: Sublayers, memory: int | None = None, *, by_memory: bool = True
) -> AutomaticDraft:
    """Return the automatic draft of a model.

    Args:
        memory: bytes that copies of weights may take; by default SHARE of the free memory.
        by_memory: False if the text depends on the drafts (rejection rule). Then the model and
            `memory` decide alone, regardless of the free memory.
    """
    draft: AutomaticDraft = _once(_automatic, model, memory, by_memory)
    return draft


def own_head(
    model: Sublayers, memory: int | None = None, *, by_memory: bool = True
) -> tuple[CheckpointHead | None, str | None]:
    """Return the source for the checkpoint's own draft head, or the reason why it cannot draft.

    The head is searched for and read only once. Arguments are those of `automatic_draft`.

    Raises:
        ValueError: the head is damaged.
    """
    if not isinstance(model, Whole) or model.encoder or memory == 0:
        return None, None
    head = _once(_head, model, memory, by_memory)
    return (CheckpointHead(model, head), None) if isinstance(head, mtp_head.Head) else (None, head)


def _head(model: Whole, memory: int | None, by_memory: bool) -> mtp_head.Head | str | None:
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


def _automatic(model: Sublayers, memory: int | None, by_memory: bool) -> AutomaticDraft:
    sees = any(part.narrows(WINDOW) for part in model.parts)
    window = WINDOW if sees and model.max_positions > WINDOW + SINK else None
    skip = replace(SkipConfig.low_precision(8), window=window)
    if model.execution != "native":
        reason = _loaded_without(model)
        if reason is not None:
            return AutomaticDraft(None, reason, loading=memory != 0)
        reason = f"8-bit products are fast in native passes only, and these are {model.execution}"
        return AutomaticDraft(None, reason)
    whole, lower = (sum(each["sublayers"]) for each in map(model.weight_bytes, (None, 8)))
    if stored_weights(model.model) and lower > WORTH * whole:
        return AutomaticDraft(None, "its weights already take so few bits that 8 save too little")
    reason = _too_large(model.weights.nbytes(skip), memory, by_memory)
    return AutomaticDraft(skip if reason is None else None, reason)


def _loaded_without(model: Sublayers) -> str | None:
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
