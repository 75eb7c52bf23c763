"""Lossless self-speculative decoding with a subset of a model's own sublayers.

Names are imported when first used, so that parts that do not need torch (`layerskip.analysis`, the
skip config, `layerskip --help`) do not load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from layerskip.version import __version__ as __version__

if TYPE_CHECKING:
    from layerskip.api.generation import GenerationOutput as GenerationOutput
    from layerskip.api.generation import LayerSkipDecoding as LayerSkipDecoding
    from layerskip.api.generation import decode as decode
    from layerskip.api.generation import generate as generate
    from layerskip.api.loading import load as load
    from layerskip.api.session import Session as Session
    from layerskip.config.shipped import shipped as shipped
    from layerskip.config.skips import DecodingOptions as DecodingOptions
    from layerskip.config.skips import LowPrecision as LowPrecision
    from layerskip.config.skips import SkipConfig as SkipConfig
    from layerskip.config.skips import Trained as Trained
    from layerskip.decoding.rounds import DecodingStats as DecodingStats
    from layerskip.decoding.sources.base import Proposal as Proposal
    from layerskip.decoding.sources.base import Source as Source
    from layerskip.decoding.sources.base import State as State
    from layerskip.decoding.sources.lookup import Lookup as Lookup
    from layerskip.decoding.sources.universal import UniversalAssistant as UniversalAssistant
    from layerskip.errors import LayerskipError as LayerskipError
    from layerskip.families.wrappers import UnsupportedModelError as UnsupportedModelError
    from layerskip.model.opened_models import release as release
    from layerskip.research.logit_lookup import LogitLookup as LogitLookup
    from layerskip.texts.vocabulary import check_vocabularies as check_vocabularies
    from layerskip.weights.fingerprint import fingerprint as fingerprint

_NAMES = {
    "api.loading": "load",
    "config.skips": "DecodingOptions LowPrecision SkipConfig Trained",
    "decoding.rounds": "DecodingStats",
    "decoding.sources.base": "Proposal Source State",
    "decoding.sources.lookup": "Lookup",
    "decoding.sources.universal": "UniversalAssistant",
    "api.generation": "GenerationOutput LayerSkipDecoding decode generate",
    "weights.fingerprint": "fingerprint",
    "errors": "LayerskipError",
    "model.opened_models": "release",
    "families.wrappers": "UnsupportedModelError",
    "config.shipped": "shipped",
    "research.logit_lookup": "LogitLookup",
    "api.session": "Session",
    "texts.vocabulary": "check_vocabularies",
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
