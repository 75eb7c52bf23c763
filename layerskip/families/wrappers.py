"""Unwraps models from adapter libraries, and rejects wrappers that change prompts.

Adapters inside layers (such as LoRA) are part of the model and stay. Changes to a prompt on its way
to the decoder happen outside the layers; they would be lost, so they are rejected.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerskip.errors import LayerskipError


class UnsupportedModelError(LayerskipError):
    """This engine does not exactly support the model's architecture, or one of its settings."""


def config_of(model: Any) -> Any:
    """Return the configuration of a model.

    Raises:
        UnsupportedModelError: it has none.
    """
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model")
    return config


def unwrapped(model: Any) -> Any:
    """Return the `transformers` model in a PEFT wrapper, or the model itself.

    Raises:
        UnsupportedModelError: virtual tokens, prefixes or the like precede the prompt, or the model
            has a `prepare_inputs_for_generation` that is not the library's.
    """
    while True:
        _check_adapters(getattr(model, "peft_config", None))
        if not hasattr(model, "get_base_model"):
            break
        model = model.get_base_model()
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    maker = getattr(prepare, "__module__", None) or "transformers."
    if not maker.startswith("transformers."):
        raise UnsupportedModelError(
            f"prepare_inputs_for_generation of this {type(model).__name__} comes from {maker}, not "
            "from transformers, and what it adds (a tuned prompt or prefix, say) would be lost; "
            "remove it, or leave out layerskip"
        )
    return model


def peft() -> Any:
    """Import the library of adapters.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError("--lora needs peft, which is not installed: pip install peft") from error
    return peft


def merge_adapter(model: Any, folder: Path) -> None:
    """Merge a peft adapter into the weights of a model.

    Raises:
        ValueError: peft is not installed, or it cannot load the adapter or merge it here.
    """
    library = peft()
    try:
        library.PeftModel.from_pretrained(model, folder).merge_and_unload(safe_merge=True)
    except Exception as error:  # any error here is about the adapter
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(f"--lora {folder} cannot be merged into this model: {reason}") from error


def _check_adapters(configs: Any) -> None:
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        virtual = getattr(config, "is_prompt_learning", False)
        if virtual or getattr(config, "alora_invocation_tokens", None):
            kind = getattr(config, "peft_type", None) or type(config).__name__
            what = "virtual tokens in front of the prompt" if virtual else "an invocation sequence"
            raise UnsupportedModelError(
                f"adapter {name!r} ({getattr(kind, 'value', kind)}) works by {what}, which is not "
                "supported: supported are adapters of a model's own layers, such as LoRA; decode "
                "without layerskip, or remove the adapter"
            )
