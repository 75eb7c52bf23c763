"""A model of a known family: the parts of its layers, their weights, and unsupported cases."""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.families.experts import Mixture
from layerskip.families.family import LayerParts, part_named
from layerskip.families.known import ASSISTANTS, CONDITIONAL, FAMILIES, unopened
from layerskip.families.wrappers import UnsupportedModelError, config_of, unwrapped
from layerskip.weights.rounded import rounded_bytes

_ATTENTION = ("eager", "sdpa")


class ModelFacts(ABC):
    """What costs and passes need to know of any decoder, whether or not its layers are known.

    Attributes:
        config: configuration of the text decoder.
        parts: every decoder layer; empty if they are not known.
        decoder, unembedding: the decoder and the head's linear layer, if its layers are known.
        softcap: the softcap of the final logits, or None.
        logits_divisor, logits_factor: what the logits are divided and multiplied by.
        wrapper: what a class around the decoder adds to it, or None.
        inputs_width: the width of each layer's own input (Gemma 4); 0 if layers have none.
        eager: whether attention is the library's eager function, not torch's.
        windows: sliding window in tokens of each layer, or None for full attention.
        encoder: whether this is the decoder of an encoder-decoder.
        spread: layers are on several devices, and hidden states move between them.
        dtype, device: of the embedding, which takes tokens and returns logits.
    """

    parts: Sequence[LayerParts]
    decoder: Any
    unembedding: Any
    softcap: float | None = None
    logits_divisor = logits_factor = 1.0
    inputs_width = 0
    windows: Sequence[int | None]
    encoder: bool
    spread: bool
    max_positions: int
    wrapper: Any = None

    def __init__(self, model: nn.Module, config: Any, num_layers: int, embedding: Any) -> None:
        self._held: Any = model
        self._reference = weakref.ref(model)
        self.config = config
        self.eager = config._attn_implementation == "eager"
        self.num_layers, self.num_sublayers = num_layers, 2 * num_layers
        self.vocabulary: int = config.vocab_size
        self.dtype: torch.dtype = embedding.weight.dtype
        self.device = device_of(embedding)

    @property
    def model(self) -> Any:
        """The model; only a weak reference is stored (see `OpenedModel.strong`)."""
        return self._reference()

    @property
    def mixtures(self) -> list[Mixture]:
        """The mixtures of experts in its layers, in order."""
        return [part.mixture for part in self.parts if part.mixture is not None]

    @property
    def first_reader(self) -> int:
        """The first layer from which on no layer has its own keys and values, or their number."""
        readers = sum(not part.writes for part in self.parts)
        return self.num_layers - readers

    @property
    def read_layers(self) -> list[int]:
        """The layers whose keys and values other layers read, in ascending order."""
        return sorted({part.keys for part in self.parts if not part.writes})

    def missed_keys(self, attention: Collection[int]) -> tuple[int, int] | None:
        """A layer whose attention is skipped and a kept one that reads its keys, or None."""
        out = {*attention}
        pairs = ((part.keys, part.number) for part in self.parts)
        return next((pair for pair in pairs if pair[0] in out and pair[1] not in out), None)

    @abstractmethod
    def weight_bytes(
        self, bits: int | None = None, *, tokens: int = 1, experts: int | None = None
    ) -> dict[str, Any]:
        """Bytes of the weights that a pass reads: for every sublayer, and for the head.

        Norms count with their sublayer or head. The embedding does not count, since a pass reads
        few of its rows. Of a mixture's experts, the expected number that the tokens use counts.

        Args:
            bits: of weights in low precision (see `config.LowPrecision`); None: as they are stored.
            tokens: number of tokens in the pass, all rows together.
            experts: number of experts per token in a draft; None: as many as the model.
        """

    def pass_bytes(self, counts: Sequence[int]) -> list[float]:
        """Bytes of all weights that a pass reads, for each number of tokens; see `weight_bytes`."""
        none, every = (
            sum(read["sublayers"]) + read["head"]
            for read in (self.weight_bytes(tokens=0), self.weight_bytes(tokens=sys.maxsize))
        )
        # Layers differ in the bytes of their experts, not in how many of them run.
        share = self.mixtures[0].share_read if self.mixtures else lambda _: 1.0
        return [none + share(count) * (every - none) for count in counts]

    @abstractmethod
    def key_bytes(
        self, layers: Iterable[int] | None = None, window: int | None = None
    ) -> dict[int | None, float]:
        """Bytes of keys and values per token that a pass through attentions reads, for one row.

        The result is keyed by the maximum number of tokens that the reading layers see, None for
        full attention. Layers that share keys and values read them separately.

        Args:
            layers: numbers of the layers whose attention runs; all by default.
            window: of a draft (`SkipConfig.window`).
        """

    def check_lengths(self, prompt_lengths: Sequence[int], total: int) -> None:
        """Raise an error for lengths whose positions the model cannot serve exactly.

        Args:
            prompt_lengths: tokens of each prompt, without pads.
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

    def _check_rope(self) -> None:
        for parameters in self._rope_types():
            # Hunyuan's checkpoints call angles "dynamic" that a fixed factor stretches.
            if "dynamic" in parameters.get("rope_type", "default") and "alpha" not in parameters:
                raise UnsupportedModelError(
                    "rope type 'dynamic' is not supported: its angles depend on the length of the "
                    "whole batch, so cached keys and drafts would disagree; supported are "
                    "default, linear, llama3, yarn, and longrope on one side of its switch"
                )

    def _rope_types(self) -> Iterator[dict[str, Any]]:
        parameters = getattr(self.config, "rope_parameters", None) or {}
        kinds = [value for value in parameters.values() if isinstance(value, dict)]
        yield from kinds or [parameters]  # by layer type, or one set for all layers


class Architecture(ModelFacts):
    """A causal language model that can be opened, and its parts.

    Args:
        model: of a family in `FAMILIES`, alone, inside one of `CONDITIONAL`, or wrapped by PEFT.

    Attributes:
        layers: the modules whose parts are called one by one.
        placeholders, blank: tokens that embed as `blank` wherever no picture replaces them.

    Raises:
        UnsupportedModelError: names what is not supported, and what is.
        ValueError: the model is in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        model = unwrapped(model)
        outer: Any = config_of(model)
        reason = unopened(outer)
        if reason is None and part_named(model, "lm_head") is None:
            reason = f"{type(model).__name__} has no head, so it is not a causal language model"
        if reason is not None:
            raise UnsupportedModelError(reason)
        if model.training:
            raise ValueError("model is in training mode, where dropout is drawn; call model.eval()")
        config: Any = outer.get_text_config(decoder=True)
        attention = config._attn_implementation
        if attention not in _ATTENTION:
            raise UnsupportedModelError(
                f"attention implementation {attention!r} is not supported; load the model with "
                f"attn_implementation={' or '.join(map(repr, _ATTENTION))}"
            )
        self._weight_bytes: dict[
            Any, dict[str, Any]
        ] = {}  # by arguments; a walk takes milliseconds
        self.family = FAMILIES[config.model_type]
        inner: Any = model.model
        self.wrapper = wrapper = CONDITIONAL.get(outer.model_type)
        decoder: Any = inner if wrapper is None else inner.language_model
        head: Any = model.lm_head
        self.encoder = bool(self.family.encoder)
        if self.encoder:
            decoder, head = inner.decoder, head.out_proj
        self.decoder, self.unembedding = decoder, head
        self.layers: Sequence[Any] = decoder.layers[: config.num_hidden_layers]
        super().__init__(model, config, len(self.layers), decoder.embed_tokens)
        self._check_calls(inner)
        self._check_rope()
        self.layer_types = tuple(
            self.family.layer_type(config, layer) for layer in range(self.num_layers)
        )
        self.windows = tuple(
            config.sliding_window if kind == "sliding_attention" else None
            for kind in self.layer_types
        )
        self.parts = tuple(self._parts())
        self.recurrent = any(part.recurrent is not None for part in self.parts)
        self.kinds = tuple(dict.fromkeys(part.kind for part in self.parts))
        named = [getattr(outer, name) for name in wrapper.placeholders] if wrapper else []
        self.placeholders = [token for token in named if token is not None]
        blank = None if wrapper is None else wrapper.blank
        self.blank: int = config.pad_token_id if blank is None else blank
        capped = self.family.softcap and (wrapper is None or wrapper.softcap)
        capped = capped and outer.model_type not in ASSISTANTS
        self.inputs_width = (self.family.inputs and config.hidden_size_per_layer_input) or 0
        self.softcap = config.final_logit_softcapping if capped else None
        self.logits_divisor, self.logits_factor = (
            float(getattr(config, name)) if name else 1.0
            for name in (self.family.divisor, self.family.multiplier)
        )
        self.max_positions: int = config.max_position_embeddings
        ends = [decoder.norm, self.unembedding, *(part.before or part.after for part in self.parts)]
        self.spread = len({device_of(each) for each in ends} | {self.device}) > 1

    def _parts(self) -> Iterator[LayerParts]:
        writers: dict[str, int] = {}  # by layer type, the last layer so far with its own keys
        for number, layer in enumerate(self.layers):
            kind = self.layer_types[number]
            part = self.parts_of(number, layer, self.windows[number], kind)
            if part.writes or kind not in writers:  # an assistant has no keys of its own
                writers[kind] = number
            yield replace(part, keys=writers[kind], tail=self.family.tail)

    def parts_of(self, number: int, layer: Any, window: int | None, kind: str) -> LayerParts:
        """Describe a decoder layer of this family, with its own keys and without a tail."""
        base = self.family.rotates(getattr(layer, "self_attn", None))
        kind = (kind if base is True else str(base)) if base else "nope"
        norms = (part_named(layer, name) for name in self.family.norms)
        norms = (None if isinstance(norm, nn.Identity) else norm for norm in norms)
        return LayerParts(self.family, number, layer, kind, window, number, *norms)

    def weight_bytes(
        self, bits: int | None = None, *, tokens: int = 1, experts: int | None = None
    ) -> dict[str, Any]:
        key = bits, tokens, experts
        if key not in self._weight_bytes:
            self._weight_bytes[key] = self._bytes_read(bits, tokens, experts)
        return self._weight_bytes[key]

    def _bytes_read(self, bits: int | None, tokens: int, experts: int | None) -> dict[str, Any]:
        def read(module: nn.Module) -> int:
            return read_bytes(module, bits)

        sublayers = []
        for part in self.parts:
            modules = (part.attention, part.before, part.after, *part.cross)
            attention = sum(read(each) for each in modules if each is not None)
            mlp, mixture = read(part.module) - attention, part.mixture
            if mixture is not None:
                share = mixture.share_read(tokens, experts)
                mlp -= read(mixture.experts) + read(mixture.router)
                mlp += round(share * _experts_bytes(mixture, bits))
                mlp += 0 if experts == 0 else read_bytes(mixture.router, None)  # stays exact
            sublayers += [attention, mlp]
        head = read(self.decoder.norm) + read(self.unembedding)
        return {"sublayers": sublayers, "head": head}

    def key_bytes(
        self, layers: Iterable[int] | None = None, window: int | None = None
    ) -> dict[int | None, float]:
        nbytes: dict[int | None, float] = defaultdict(float)
        for number in range(self.num_layers) if layers is None else layers:
            part = self.parts[number].narrowed(window)
            if part.recurrent is not None:
                continue
            seen = None if part.window is None else part.window + part.sink
            nbytes[seen] += 2 * math.prod(part.heads) * self.dtype.itemsize
        return dict(nbytes)

    def angles(self, like: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The library's rotary cosines and sines at positions (1, S), by kind of layer.

        Args:
            like: a tensor with the dtype and device of the result.
        """
        tables = {}
        for kind in self.kinds:
            turned = self.family.rotary(self.decoder, kind)
            # Angles by layer type may exist in some versions of transformers only (Olmo 3).
            by_type = "layer_type" in inspect.signature(turned.forward).parameters
            tables[kind] = turned(like, positions, *([kind] if by_type else []))
        return tables  # (1, S, R) each

    def check_lengths(self, prompt_lengths: Sequence[int], total: int) -> None:
        super().check_lengths(prompt_lengths, total)
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

    def _check_calls(self, inner: nn.Module) -> None:
        """Reject what would not run, since these modules are never called as a whole."""
        named = {f"layer {i}": layer for i, layer in enumerate(self.layers)}
        named |= {"the model": self.model, "its inner model": inner, "the decoder": self.decoder}
        for name, module in named.items():
            hooked = foreign_hooks(module)
            if hooked or own_forward(module):
                what = "forward hooks" if hooked else "a custom forward"
                raise UnsupportedModelError(
                    f"{name} ({type(module).__name__}) has {what}, which would not run there: it "
                    "is never called as a whole; hook its self_attn, its mlp or a norm instead, or "
                    "load the model as transformers defines it (trust_remote_code=False)"
                )


def read_bytes(module: nn.Module, bits: int | None) -> int:
    """Bytes of a module's weights, as for `Architecture.weight_bytes`."""
    return sum(_bytes(weight, bits) for weight in module.parameters())


def _bytes(weight: Tensor, bits: int | None = None) -> int:
    """A weight's bytes in memory; with `bits`, those of its rounded copy if that is smaller.

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


def _experts_bytes(mixture: Mixture, bits: int | None) -> int:
    """Bytes of all experts, as for `_bytes`."""
    whole, weights = read_bytes(mixture.experts, None), mixture.weights
    if bits is None or not weights:
        return whole
    return min(whole, sum(rounded_bytes(weight, bits) for weight in weights))


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module computes: its offloading hook's, or its weights'."""
    hook = vars(module).get("_hf_hook")
    for each in getattr(hook, "hooks", [hook]):
        device = getattr(each, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


def own_forward(module: nn.Module) -> bool:
    """Whether a module has another forward than the library gave its class.

    It may be compiled, or wrapped by accelerate.
    """
    if "forward" in vars(module):
        compiled = hasattr(module.forward, "_torchdynamo_orig_callable")
        return not compiled and "_hf_hook" not in vars(module)
    maker = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return not maker.__module__.startswith(("transformers.", "layerskip."))


def foreign_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks other than the library's own.

    The library's hooks collect outputs for `output_hidden_states`. After first use they stay, idle.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(
        not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks
    )
