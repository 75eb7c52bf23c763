"""Lossless self-speculative decoding with a subset of a model's own sublayers.

Names are imported when first used, so that what needs no torch (`layerskip.analysis`, the skip
config, `layerskip --help`) does not pay for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.config import DecodingOptions, LowPrecision, SkipConfig, Trained
    from layerskip.decoding.rounds import DecodingStats
    from layerskip.decoding.sources.base import Proposal, Source, State
    from layerskip.decoding.sources.lookup import Lookup
    from layerskip.generation import GenerationOutput, LayerSkipDecoding, decode, generate
    from layerskip.model.fingerprint import fingerprint
    from layerskip.model.joined import joined
    from layerskip.model.opening import release
    from layerskip.model.wrappers import UnsupportedModelError
    from layerskip.named import shipped
    from layerskip.vocabulary import check_vocabularies

__version__ = "0.1.0"

_HOME = {
    "DecodingOptions": "layerskip.config",
    "DecodingStats": "layerskip.decoding.rounds",
    "GenerationOutput": "layerskip.generation",
    "LayerSkipDecoding": "layerskip.generation",
    "Lookup": "layerskip.decoding.sources.lookup",
    "LowPrecision": "layerskip.config",
    "Proposal": "layerskip.decoding.sources.base",
    "SkipConfig": "layerskip.config",
    "Source": "layerskip.decoding.sources.base",
    "State": "layerskip.decoding.sources.base",
    "Trained": "layerskip.config",
    "UnsupportedModelError": "layerskip.model.wrappers",
    "check_vocabularies": "layerskip.vocabulary",
    "decode": "layerskip.generation",
    "fingerprint": "layerskip.model.fingerprint",
    "generate": "layerskip.generation",
    "joined": "layerskip.model.joined",
    "release": "layerskip.model.opening",
    "shipped": "layerskip.named",
}

__all__ = [
    "DecodingOptions",
    "DecodingStats",
    "GenerationOutput",
    "LayerSkipDecoding",
    "Lookup",
    "LowPrecision",
    "Proposal",
    "SkipConfig",
    "Source",
    "State",
    "Trained",
    "UnsupportedModelError",
    "check_vocabularies",
    "decode",
    "fingerprint",
    "generate",
    "joined",
    "release",
    "shipped",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
