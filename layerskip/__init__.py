"""Lossless self-speculative decoding with a subset of a model's own sublayers.

Names are imported when first used, so that parts that do not need torch (`layerskip.analysis`, the
skip config, `layerskip --help`) do not load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.checkpoints import load as load
    from layerskip.config import DecodingOptions as DecodingOptions
    from layerskip.config import LowPrecision as LowPrecision
    from layerskip.config import SkipConfig as SkipConfig
    from layerskip.config import Trained as Trained
    from layerskip.decoding.rounds import DecodingStats as DecodingStats
    from layerskip.decoding.sources.base import Proposal as Proposal
    from layerskip.decoding.sources.base import Source as Source
    from layerskip.decoding.sources.base import State as State
    from layerskip.decoding.sources.lookup import Lookup as Lookup
    from layerskip.generation import GenerationOutput as GenerationOutput
    from layerskip.generation import LayerSkipDecoding as LayerSkipDecoding
    from layerskip.generation import decode as decode
    from layerskip.generation import generate as generate
    from layerskip.model.fingerprint import fingerprint as fingerprint
    from layerskip.model.opening import release as release
    from layerskip.model.wrappers import UnsupportedModelError as UnsupportedModelError
    from layerskip.named import shipped as shipped
    from layerskip.research.logit_lookup import LogitLookup as LogitLookup
    from layerskip.session import Session as Session
    from layerskip.vocabulary import check_vocabularies as check_vocabularies

__version__ = "0.1.0"

_NAMES = {
    "checkpoints": "load",
    "config": "DecodingOptions LowPrecision SkipConfig Trained",
    "decoding.rounds": "DecodingStats",
    "decoding.sources.base": "Proposal Source State",
    "decoding.sources.lookup": "Lookup",
    "generation": "GenerationOutput LayerSkipDecoding decode generate",
    "model.fingerprint": "fingerprint",
    "model.opening": "release",
    "model.wrappers": "UnsupportedModelError",
    "named": "shipped",
    "research.logit_lookup": "LogitLookup",
    "session": "Session",
    "vocabulary": "check_vocabularies",
}
"""By module."""
_HOME = {name: f"layerskip.{module}" for module in _NAMES for name in _NAMES[module].split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
