"""The supported model families, the parts of a model, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.model.rounded import rounded_bytes
from layerskip.model.wrappers import UnsupportedModelError, unwrapped


@dataclass(frozen=True)
class Family:
    """The differences between architectures that share one decoder shape.

    Attributes:
        package: in `transformers.models`.
        prefix: of the class names there.
        sandwich: each sublayer also ends with a norm (Gemma 2, Gemma 3).
        windows: which layers slide: "none", "all" (if `config.sliding_window` is set), or by
            `config.layer_types`.
        softcap: the logits pass through `config.final_logit_softcapping` (if set).
        rope_by_type: rotary angles differ between sliding and full layers (Gemma 3).
    """

    package: str
    prefix: str
    sandwich: bool = False
    windows: str = "none"
    softcap: bool = False
    rope_by_type: bool = False

    @property
    def home(self) -> str:
        """The module that its classes are written in."""
        return f"transformers.models.{self.package}.modeling_{self.package}"


FAMILIES = {
    "llama": Family("llama", "Llama"),
    "gemma": Family("gemma", "Gemma"),
    "gemma2": Family("gemma2", "Gemma2", sandwich=True, windows="by type", softcap=True),
    "gemma3_text": Family(
        "gemma3", "Gemma3", sandwich=True, windows="by type", softcap=True, rope_by_type=True
    ),
    "mistral": Family("mistral", "Mistral", windows="all"),
    "qwen2": Family("qwen2", "Qwen2", windows="by type"),
    "qwen3": Family("qwen3", "Qwen3", windows="by type"),
    "phi3": Family("phi3", "Phi3", windows="all"),
}
_ATTENTION = ("eager", "sdpa")


class Architecture:
    """A supported causal language model and its parts.

    Args:
        model: of a family in `FAMILIES`, or PEFT's wrapper of one.

    Attributes:
        decoder, layers: the modules whose parts are called one by one.
        eager: attention is the library's eager function, not torch's.
        windows: sliding window in tokens of each layer, or None for full attention.
        spread: layers lie on several devices; hidden states travel to them.
        dtype, device: of the embedding, where tokens come in and logits come out.

    Raises:
        UnsupportedModelError: naming what is not supported and what is.
        ValueError: the model is in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        model = unwrapped(model)
        config: Any = getattr(model, "config", None)
        kind = getattr(config, "model_type", type(model).__name__)
        if kind not in FAMILIES or not hasattr(model, "lm_head"):
            raise UnsupportedModelError(
                f"architecture {kind!r} ({type(model).__name__}) is not supported; supported are "
                f"the causal language models of {', '.join(sorted(FAMILIES))}"
            )
        if model.training:
            raise ValueError("model is in training mode, where dropout is drawn; call model.eval()")
        attention = config._attn_implementation
        if attention not in _ATTENTION:
            raise UnsupportedModelError(
                f"attention implementation {attention!r} is not supported; load the model with "
                f"attn_implementation={' or '.join(map(repr, _ATTENTION))}"
            )
        if getattr(config, "use_bidirectional_attention", False):
            raise UnsupportedModelError("bidirectional attention is not supported; decoders only")
        self._held: Any = model
        self._known = weakref.ref(model)
        self.config = config
        self.eager = attention == "eager"
        self.family = FAMILIES[kind]
        decoder: Any = model.get_submodule("model")
        self.decoder = decoder
        self.layers: Sequence[Any] = decoder.layers[: config.num_hidden_layers]
        self._check_hooks()
        self._check_rope()
        self.num_layers = len(self.layers)
        self.num_sublayers = 2 * self.num_layers
        self.layer_types = tuple(self._layer_type(i) for i in range(self.num_layers))
        self.windows = tuple(
            config.sliding_window if kind == "sliding_attention" else None
            for kind in self.layer_types
        )
        self.distinct_windows = tuple(dict.fromkeys(self.windows))
        self.vocabulary: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        embedding = decoder.embed_tokens
        self.dtype: torch.dtype = embedding.weight.dtype
        self.device: torch.device = device_of(embedding)
        ends = [decoder.norm, self.model.lm_head]
        places = {device_of(each) for each in [*ends, *(x.input_layernorm for x in self.layers)]}
        self.spread = len(places | {self.device}) > 1

    @property
    def model(self) -> Any:
        """The model; only a weak reference is kept (see `Sublayers.handle`)."""
        return self._known()

    def each_layer(self) -> Iterator[tuple[Any, int | None, str]]:
        """Every decoder layer, its sliding window and its layer type."""
        yield from zip(self.layers, self.windows, self.layer_types, strict=True)

    def weight_bytes(self, bits: int | None = None) -> dict[str, Any]:
        """Bytes of the weights that a pass reads: those of every sublayer, and of the head.

        Norms count with their sublayer or head. The embedding does not: a pass reads one row.

        Args:
            bits: of weights in low precision (see `layerskip.config.LowPrecision`); None: as the
                model has them.
        """

        def read(module: nn.Module) -> int:
            return read_bytes(module, bits)

        sublayers = []
        for layer in self.layers:
            own = [layer.self_attn, layer.input_layernorm]
            own += [layer.post_attention_layernorm] if self.family.sandwich else []
            attention = sum(map(read, own))
            sublayers += [attention, read(layer) - attention]
        return {"sublayers": sublayers, "head": read(self.decoder.norm) + read(self.model.lm_head)}

    @property
    def softcap(self) -> float | None:
        """The softcap of the final logits, if there is one."""
        return self.config.final_logit_softcapping if self.family.softcap else None

    def check_lengths(self, prompt_lengths: Sequence[int], total: int) -> None:
        """Refuse lengths whose positions the model cannot serve exactly.

        Args:
            prompt_lengths: tokens of each prompt, pads not counted.
            total: the longest sequence, prompt and new tokens together.

        Raises:
            ValueError: past the position limit, or across the switch of a longrope model.
        """
        if total > self.max_positions:
            raise ValueError(
                f"prompt plus new tokens must be at most {self.max_positions} tokens for this "
                f"model, got {total} (longest prompt: {max(prompt_lengths)}); shorten the prompt "
                "or lower max_new_tokens"
            )
        for parameters in self._rope_types():
            if parameters.get("rope_type") != "longrope":
                continue
            switch = parameters["original_max_position_embeddings"]
            if total > switch and min(prompt_lengths) <= switch:
                raise UnsupportedModelError(
                    f"longrope changes its angles at {switch} tokens; prompts of "
                    f"{min(prompt_lengths)} and {total} tokens in all lie on both sides of it; "
                    f"stay at or below {switch}, or start above it"
                )

    def _check_hooks(self) -> None:
        """Refuse hooks on modules that are never called as a whole: they would not run."""
        named = {f"layer {i}": layer for i, layer in enumerate(self.layers)}
        for name, module in {"the model": self.model, "the decoder": self.decoder, **named}.items():
            if foreign_hooks(module):
                raise UnsupportedModelError(
                    f"{name} ({type(module).__name__}) has forward hooks, which are not supported "
                    "there: it is never called as a whole; hook its self_attn, its mlp or a norm "
                    "instead, or remove the hooks"
                )

    def _check_rope(self) -> None:
        for parameters in self._rope_types():
            if "dynamic" in parameters.get("rope_type", "default"):
                raise UnsupportedModelError(
                    "rope type 'dynamic' is not supported: its angles depend on the length of the "
                    "whole batch, so cached keys and drafts would disagree; supported are "
                    "default, linear, llama3, yarn, and longrope on one side of its switch"
                )

    def _rope_types(self) -> Iterator[dict[str, Any]]:
        parameters = self.config.rope_parameters
        by_type = all(isinstance(value, dict) for value in parameters.values())
        yield from parameters.values() if by_type else [parameters]

    def _layer_type(self, layer: int) -> str:
        if self.family.windows == "by type":
            return str(self.config.layer_types[layer])
        sliding = self.family.windows == "all" and self.config.sliding_window is not None
        return "sliding_attention" if sliding else "full_attention"


def read_bytes(module: nn.Module, bits: int | None) -> int:
    """Bytes of a module's weights, as in `Architecture.weight_bytes`."""
    return sum(_bytes(weight, bits) for weight in module.parameters())


def _bytes(weight: Tensor, bits: int | None = None) -> int:
    """A weight's bytes in memory; with `bits`, of its rounded copy if that is smaller.

    For a weight packed by a subclass, the bytes of its parts.
    """
    packed = getattr(weight, "__tensor_flatten__", None)
    whole = (
        weight.nbytes
        if packed is None
        else sum(_bytes(getattr(weight, name)) for name in packed()[0])
    )
    if bits is None or weight.dim() != 2:
        return whole
    return min(whole, rounded_bytes(weight, bits))


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: its offloading hook's device, or its weights'."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):
        device = getattr(each, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


def foreign_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks other than the library's own.

    The library's collect outputs for `output_hidden_states` and stay, idle, after the first use.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(
        not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks
    )
