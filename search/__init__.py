"""Search for the sublayers to leave out; knows models and cost tables, not the command line.

Names are imported when first used, so that the package alone costs no import of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.search.finding import SearchResult
    from layerskip.search.whole import search

_HOME = {
    "SearchResult": "layerskip.search.finding",
    "search": "layerskip.search.whole",
}

__all__ = ["SearchResult", "search"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
