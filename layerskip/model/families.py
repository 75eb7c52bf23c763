"""The model families that are opened into sublayers, and why others are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """The differences between architectures that share one decoder shape.

    Attributes:
        package: in `transformers.models`.
        prefix: of the class names there.
        inner: what follows the prefix in the names of attention and MLP.
        layout: where a sublayer's norms are: before it, around it (Gemma 2 to 4), or behind it
            (OLMo 2 and 3).
        norm: in which order a norm multiplies: normalise, cast, times weight ("llama"); normalise,
            times (1 + weight), cast ("one plus"); normalise, times weight, cast ("wide").
        windows: which layers slide: "none", "all" (if `config.sliding_window` is set), or by
            `config.layer_types`.
        softcap: the logits pass through `config.final_logit_softcapping` (if set).
        rope_by_type: rotary angles differ between sliding and full layers.
        positions: attention needs positions besides angles (Ministral 3).
        experts: where a mixture's experts are: in the MLP ("mlp"), or beside it ("beside").
    """

    package: str
    prefix: str
    inner: str = ""
    layout: Literal["before", "around", "behind"] = "before"
    norm: Literal["llama", "one plus", "wide"] = "llama"
    windows: Literal["none", "all", "by type"] = "none"
    softcap: bool = False
    rope_by_type: bool = False
    positions: bool = False
    experts: Literal["mlp", "beside"] | None = None

    @property
    def home(self) -> str:
        """The module that its classes are written in."""
        return f"transformers.models.{self.package}.modeling_{self.package}"


_GEMMA: dict[str, Any] = {"layout": "around", "windows": "by type", "softcap": True}
_GEMMA4: dict[str, Any] = {**_GEMMA, "inner": "Text", "norm": "wide", "rope_by_type": True}

FAMILIES = {
    "llama": Family("llama", "Llama"),
    "gemma": Family("gemma", "Gemma", norm="one plus"),
    "gemma2": Family("gemma2", "Gemma2", norm="one plus", **_GEMMA),
    "gemma3_text": Family("gemma3", "Gemma3", norm="one plus", rope_by_type=True, **_GEMMA),
    "gemma4_text": Family("gemma4", "Gemma4", experts="beside", **_GEMMA4),
    "gemma4_unified_text": Family("gemma4_unified", "Gemma4Unified", **_GEMMA4),
    "mistral": Family("mistral", "Mistral", windows="all"),
    "ministral": Family("ministral", "Ministral", windows="by type"),
    "ministral3": Family("ministral3", "Ministral3", windows="all", positions=True),
    "mixtral": Family("mixtral", "Mixtral", windows="all", experts="mlp"),
    "qwen2": Family("qwen2", "Qwen2", windows="by type"),
    "qwen3": Family("qwen3", "Qwen3", windows="by type"),
    "qwen3_moe": Family("qwen3_moe", "Qwen3Moe", windows="all", experts="mlp"),
    "phi3": Family("phi3", "Phi3", windows="all"),
    "granite": Family("granite", "Granite"),
    "smollm3": Family("smollm3", "SmolLM3", windows="by type"),
    "olmo2": Family("olmo2", "Olmo2", layout="behind", norm="wide"),
    "olmo3": Family(
        "olmo3", "Olmo3", layout="behind", norm="wide", windows="by type", rope_by_type=True
    ),
}
"""By the `model_type` of the text decoder."""
CONDITIONAL = ("gemma3", "gemma4", "gemma4_unified", "llava", "llava_next", "mistral3")
"""By `model_type`, classes around such a decoder, whose text is decoded as the decoder's own."""
ASSISTANTS = {"gemma4_assistant": "gemma4", "gemma4_unified_assistant": "gemma4_unified"}
"""Decoders without keys and values of their own, by `model_type`, and whose they draft for."""


def unopened(config: Any) -> str | None:
    """Why a model of this configuration is not opened into sublayers, or None."""
    kind = getattr(config, "model_type", None)
    text = None if config is None else config.get_text_config()
    inner = getattr(text, "model_type", None)
    if inner not in FAMILIES or (text is not config and kind not in (*CONDITIONAL, *ASSISTANTS)):
        return (
            f"architecture {kind!r} is not opened into sublayers; opened are the causal language "
            f"models of {', '.join(sorted(FAMILIES))}, and {', '.join(CONDITIONAL)} around them"
        )
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "bidirectional attention is not supported; decoders only"
    return None
