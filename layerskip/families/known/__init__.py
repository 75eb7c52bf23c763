"""Families of models whose sublayers are known: one file per family or kind of family.

To add a family, add a file to this folder that makes a `Family`; nothing else names it.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from transformers import PretrainedConfig

from layerskip.families.family import AssistantFamily, Conditional, Family

Declared = TypeVar("Declared", Family, Conditional, AssistantFamily)
_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]


def _declared(kind: type[Declared]) -> dict[str, Declared]:
    """Collect everything of a kind that the files of this folder define, by name."""
    everything = (value for file in _FILES for value in vars(file).values())
    return {value.name: value for value in everything if isinstance(value, kind)}


FAMILIES = _declared(Family)
"""Families by the `model_type` of the text decoder."""
CONDITIONAL = _declared(Conditional)
"""Classes around such decoders that also take pictures, by `model_type`."""
ASSISTANTS = _declared(AssistantFamily)
"""Decoders that draft from another model's keys and values, by `model_type`."""


def unopened(config: Any) -> str | None:
    """Why a model with this configuration is not opened into sublayers, or None."""
    if not isinstance(config, PretrainedConfig):
        return f"{type(config).__name__} is not a transformers model"
    kind = config.model_type
    text = config.get_text_config(decoder=True)
    family = FAMILIES.get(text.model_type)
    around = {*CONDITIONAL, *ASSISTANTS, family and family.encoder}
    if family is None or (text is not config and kind not in around):
        decoders = sorted(name for name, family in FAMILIES.items() if not family.encoder)
        return (
            f"the sublayers of architecture {kind!r} are not known; known are those of the causal "
            f"language models {', '.join(decoders)}, and of {', '.join(CONDITIONAL)} around them"
        )
    if two_way(text):
        return "bidirectional attention is not supported; decoders only"
    return None


def two_way(text: Any) -> bool:
    """Whether a configuration's text decoder has bidirectional attention."""
    # Only some of the library's configurations have this attribute.
    return getattr(text, "use_bidirectional_attention", None) in (True, "all")
