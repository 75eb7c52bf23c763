"""What this project needs to know about `transformers` that is private there, or moves.

Names of arguments and classes change between releases. They are asked for here, by signature and by
presence, never by version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""All names that the argument and the output for a cache have had; a release has one or two."""


def cache_name(forward: nn.Module | Callable[..., Any]) -> str | None:
    """The name of the argument in which a forward takes a cache; None if its signature has none.

    Args:
        forward: the forward, or a module, whose class has it.
    """
    function = type(forward).forward if isinstance(forward, nn.Module) else forward
    named = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in named), None)


def cache_in(named: Mapping[str, Any]) -> Any:
    """The cache among arguments by name, or in the output of a forward; None if there is none."""
    return next((named[name] for name in CACHE_NAMES if name in named), None)


def begun(cache: Any) -> bool:
    """Whether `generate()` hands over a cache that holds tokens, or that its caller gave it."""
    if cache is None or getattr(cache, "_is_user_defined", False):
        return cache is not None
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # with recurrent layers only, which count no tokens
        return bool(cache.has_previous_state())
