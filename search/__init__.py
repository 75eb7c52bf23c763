"""Search for the sublayers that a draft skips or runs in low precision.

Names are imported when first used, so that importing the package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.search.pipeline import SearchResult, search

__all__ = ["SearchResult", "search"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("layerskip.search.pipeline"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
