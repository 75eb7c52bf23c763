"""What this project needs to know about `transformers` that is private there, or moves.

Names of arguments and classes change between releases. They are asked for here, by signature and by
presence, never by version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.hub import cached_file

__all__ = [  # asked of the library here, used elsewhere
    "BaseModelOutput",
    "CacheLayerMixin",
    "GenerateDecoderOnlyOutput",
    "LinearAttentionLayer",
]

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""All names that the argument and the output for a cache have had; a release has one or two."""


def classes_of(package: str) -> str:
    """The module of a package in `transformers.models` that defines the classes of its models."""
    return f"transformers.models.{package}.modeling_{package}"


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


def holds_tokens(cache: Any) -> bool:
    """Whether `generate()` hands over a cache that holds tokens, or that its caller gave it."""
    if cache is None or getattr(cache, "_is_user_defined", False):
        return cache is not None
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # with recurrent layers only, which count no tokens
        return bool(cache.has_previous_state())


def dropped_by_the_call(decoding: Any, name: str) -> Any:
    """Find an argument that the calling `model.generate()` received but did not pass on.

    transformers 5.23 drops `streamer`, whose readers would wait forever, and `assistant_model`.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_code is code and frame.f_locals.get("custom_generate") is decoding
    ):
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


def pad_token(config: GenerationConfig) -> int:
    """The pad token in a config that `generate()` has prepared; 0 if there is none."""
    token = getattr(config, "_pad_token_tensor", None)
    return 0 if token is None else int(token)


def file_of(source: str, name: str, revision: str | None = None, *, fetch: bool) -> Path | None:
    """A file of a folder or of a repository on the Hub; None if it is not there.

    Args:
        fetch: download it if it is not in the cache of downloads.
    """
    quiet = dict.fromkeys(("missing_entries", "connection_errors", "gated_repo"), False)
    how: dict[str, Any] = {f"_raise_exceptions_for_{what}": no for what, no in quiet.items()}
    how |= {"local_files_only": not fetch, "revision": revision}
    try:
        path = cached_file(source, name, **how) if source else None
    except (OSError, ValueError):  # neither a folder nor a repository name
        return None
    return None if path is None else Path(path)
