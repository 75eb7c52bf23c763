"""A `transformers` decoder as 2L residual sublayers; knows no rounds, laws or skip policies.

Sublayer 2i is the attention of layer i, sublayer 2i+1 its MLP, each with its norms and residual
add. The library's own modules are called, never copied or patched, so quantised, adapted and
offloaded modules work, and the model stays as it was found. Plain weights take the lean path of
`fused.py`, which computes the same.
Letters: B rows, T tokens of a pass, H hidden width, S slots, R rotary width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.model import compiled
from layerskip.model import lean as fused
from layerskip.model.cache import RowCache, capacity
from layerskip.model.draft_head import TrimmedHead, spread, trimmed_head
from layerskip.model.products import Function, Linear, best_linear, compilable, matrices, plain
from layerskip.model.wrappers import UnsupportedModelError, unwrapped

Block = Callable[[Tensor, "Pass"], Tensor]
EXECUTIONS = ("auto", "modules", "fused", "compiled")
_HEAD, _DRAFT_HEAD = "head", "draft head"


@dataclass(frozen=True)
class Family:
    """What differs between the architectures that share one decoder shape.

    Attributes:
        sandwich: each sublayer has a norm behind it too (Gemma 2, Gemma 3).
        windows: which layers slide: "none", "all" (if `config.sliding_window` is set), or by
            `config.layer_types`.
        softcap: the logits pass through `config.final_logit_softcapping` (if set).
        rope_by_type: rotary angles differ between sliding and full layers (Gemma 3).
    """

    sandwich: bool = False
    windows: str = "none"
    softcap: bool = False
    rope_by_type: bool = False


FAMILIES = {
    "llama": Family(),
    "gemma": Family(),
    "gemma2": Family(sandwich=True, windows="by type", softcap=True),
    "gemma3_text": Family(sandwich=True, windows="by type", softcap=True, rope_by_type=True),
    "mistral": Family(windows="all"),
    "qwen2": Family(windows="by type"),
    "qwen3": Family(windows="by type"),
    "phi3": Family(windows="all"),
}
_ATTENTION = ("eager", "sdpa")


class Rotary:
    """Cosines and sines of every position of a call, by layer type: computed once, then sliced.

    Args:
        tables: layer type -> (cos, sin), each (1, S, R).
    """

    def __init__(self, tables: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.tables = tables

    def at(self, cache: RowCache) -> dict[str, tuple[Tensor, Tensor]]:
        """The tables at the positions of the pass the cache is placed for, (B or 1, T, R)."""
        if cache.in_step:
            window = slice(cache.start, cache.end)
            return {k: (cos[:, window], sin[:, window]) for k, (cos, sin) in self.tables.items()}
        return {
            k: (cos[0][cache.placed(cos.device)], sin[0][cache.placed(sin.device)])
            for k, (cos, sin) in self.tables.items()
        }


class Pass:
    """What every sublayer of one forward pass shares: rotary angles, masks, the cache.

    Attributes:
        compiled: the pass goes through compiled functions, as all do but those of a prefill.
    """

    def __init__(self, model: Sublayers, cache: RowCache, rotary: Rotary | fused.Rotary) -> None:
        self.cache = cache
        self.rotary = rotary
        self.compiled = model.execution == "compiled" and cache.settled
        if self.compiled:  # angles and masks are part of the functions
            self.slots = cache.placed(model.device)  # (B, T)
            return
        self.rope: Mapping[str, Any] = rotary.at(cache)
        # the eager kernel knows no causality of its own; sdpa does when it is given no mask
        always = model.eager and cache.count > 1
        # sdpa takes bool whatever dtype a layer has, and makes of it what `additive` is made of
        # once for all layers where they have one dtype
        bool_ = model.execution == "modules" and not model.eager
        dtype = torch.bool if bool_ else model.dtype
        self.masks: dict[int | None, Tensor | None] = {
            window: cache.mask(window, dtype, model.device)
            if always or cache.needs_mask(window)
            else None
            for window in model.distinct_windows
        }


class Sublayers:
    """A causal language model opened up into its sublayers.

    Args:
        model: a `transformers` causal language model of a family in `FAMILIES`, or PEFT's wrapper.
        execution: "modules" calls the library's modules, "fused" the lean path for plain weights,
            "compiled" the same in compiled functions, but for the prefill (with a warning the lean
            path where there is no compiler), "auto" the lean path where it can serve the model as
            it is now.

    Attributes:
        execution: the one taken, "modules", "fused" or "compiled".
        draft_vocabulary: how many tokens a draft can draw; `vocabulary` unless `trimmed`.

    Raises:
        UnsupportedModelError: naming what is not supported and what is.
        ValueError: "fused" or "compiled" was asked for and cannot serve this model; or training
            mode.
    """

    def __init__(self, model: nn.Module, execution: str = "auto") -> None:
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
        self.model = model
        self.config = config
        self.eager = attention == "eager"
        self.family = FAMILIES[kind]
        decoder: Any = model.get_submodule("model")
        self.decoder = decoder
        self.layers: Sequence[Any] = decoder.layers[: config.num_hidden_layers]
        self._check_hooks()
        self.num_layers = len(self.layers)
        self.num_sublayers = 2 * self.num_layers
        self.layer_types = tuple(self._layer_type(i) for i in range(self.num_layers))
        self.windows = tuple(
            config.sliding_window if kind == "sliding_attention" else None
            for kind in self.layer_types
        )
        self.distinct_windows = tuple(dict.fromkeys(self.windows))
        self.vocabulary: int = config.vocab_size
        self.draft_vocabulary = self.vocabulary
        self._draft_head: Function | None = None
        self.max_positions: int = config.max_position_embeddings
        self._check_rope()
        embedding = decoder.embed_tokens
        self.dtype: torch.dtype = embedding.weight.dtype
        self.device: torch.device = self._device_of(embedding)
        # with a model spread over devices, hidden states travel to the layer before the residual
        places = {self._device_of(layer.input_layernorm) for layer in self.layers}
        self._moves = len(places | {self.device}) > 1
        self.execution = self._resolve(execution, kind)
        self._linear: Linear = plain
        if self.execution == "compiled":
            self._linear = compilable
        elif self.execution == "fused":
            self._linear = best_linear(matrices(model))
        self.blocks: tuple[Block, ...] = tuple(
            block
            for layer, window, kind in zip(self.layers, self.windows, self.layer_types, strict=True)
            for block in self._layer_blocks(layer, window, kind)
        )
        self._head = (
            fused.head(model, self._linear)
            if self.execution != "modules"
            else lambda hidden: model.lm_head(decoder.norm(hidden))  # type: ignore[operator]
        )
        self._norm = fused.rms_norm(decoder.norm) if self.execution != "modules" else decoder.norm
        self._capped = _softcap(config.final_logit_softcapping if self.family.softcap else None)
        self._compiled: compiled.Compiled | None = None
        if self.execution == "compiled":
            whole = _in_turn(self._head, self._capped)
            blocks: dict[Hashable, Any] = dict(enumerate(self.blocks))
            self._compiled = compiled.Compiled(model, blocks | {_HEAD: whole, _DRAFT_HEAD: whole})

    def _resolve(self, execution: str, kind: str) -> str:
        if execution not in EXECUTIONS:
            raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}, got {execution!r}")
        if execution == "modules":
            return execution
        reason = fused.refusal(self.model, self.layers, kind)
        if execution != "auto" and reason is not None:
            raise ValueError(
                f"execution {execution!r} cannot serve this model: {reason}; "
                "use execution='auto' or 'modules'"
            )
        if execution == "compiled":
            reason = compiled.refusal(self.device.type)
            if reason is None:
                return execution
            compiled.warn_refusal(reason)
            return "fused"
        return "fused" if reason is None else "modules"

    def _layer_blocks(self, layer: Any, window: int | None, kind: str) -> tuple[Block, Block]:
        if self.execution == "modules":
            return self._attention(layer, window, kind), self._mlp(layer)
        sandwich = self.family.sandwich
        attend: Any = fused.attention(
            layer, window, kind, sandwich=sandwich, eager=self.eager, linear=self._linear
        )
        return attend, fused.mlp(layer, sandwich=sandwich, linear=self._linear)

    def _check_hooks(self) -> None:
        """Refuse hooks on modules that are opened up here and never called: they would be lost."""
        named = {f"layer {i}": layer for i, layer in enumerate(self.layers)}
        for name, module in {"the model": self.model, "the decoder": self.decoder, **named}.items():
            if fused.foreign_hooks(module):
                raise UnsupportedModelError(
                    f"{name} ({type(module).__name__}) has forward hooks, which are not supported "
                    "there: it is never called as a whole; hook its self_attn, its mlp or a norm "
                    "instead, or remove the hooks"
                )

    def _layer_type(self, layer: int) -> str:
        if self.family.windows == "by type":
            return str(self.config.layer_types[layer])
        sliding = self.family.windows == "all" and self.config.sliding_window is not None
        return "sliding_attention" if sliding else "full_attention"

    def _rope_types(self) -> dict[str, dict[str, Any]]:
        parameters = self.config.rope_parameters
        nested = all(isinstance(value, dict) for value in parameters.values())
        return parameters if nested else {"": parameters}

    def _check_rope(self) -> None:
        for parameters in self._rope_types().values():
            if "dynamic" in parameters.get("rope_type", "default"):
                raise UnsupportedModelError(
                    "rope type 'dynamic' is not supported: its angles depend on the length of the "
                    "whole batch, so cached keys and drafts would disagree; supported are "
                    "default, linear, llama3, yarn, and longrope on one side of its switch"
                )

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
        for parameters in self._rope_types().values():
            if parameters.get("rope_type") != "longrope":
                continue
            switch = parameters["original_max_position_embeddings"]
            if total > switch and min(prompt_lengths) <= switch:
                raise UnsupportedModelError(
                    f"longrope changes its angles at {switch} tokens; prompts of "
                    f"{min(prompt_lengths)} and {total} tokens in all lie on both sides of it; "
                    f"stay at or below {switch}, or start above it"
                )

    @staticmethod
    def _device_of(module: nn.Module) -> torch.device:
        """Where a module computes: its offloading hook's device, or its weights'."""
        hook = getattr(module, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        return torch.device(device) if device is not None else next(module.parameters()).device

    def _attention(self, layer: Any, window: int | None, kind: str) -> Block:
        attend, before = layer.self_attn, layer.input_layernorm
        after = layer.post_attention_layernorm if self.family.sandwich else None
        device = self._device_of(before) if self._moves else None

        def block(hidden: Tensor, step: Pass) -> Tensor:
            if device is not None:
                hidden = hidden.to(device)
            mask = step.masks[window]
            if mask is not None:  # an additive one in the layer's own dtype
                dtype = mask.dtype if mask.dtype is torch.bool else hidden.dtype
                mask = mask.to(hidden.device, dtype)
            out: Tensor = attend(
                hidden_states=before(hidden),
                position_embeddings=step.rope[kind],
                attention_mask=mask,
                past_key_values=step.cache,
            )[0]  # (B, T, H)
            if after is not None:
                out = after(out)
            return hidden + out  # (B, T, H)

        return block

    def _mlp(self, layer: Any) -> Block:
        mlp = layer.mlp
        sandwich = self.family.sandwich
        before = layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
        after = layer.post_feedforward_layernorm if sandwich else None
        device = self._device_of(before) if self._moves else None

        def block(hidden: Tensor, step: Pass) -> Tensor:
            if device is not None:
                hidden = hidden.to(device)
            out: Tensor = mlp(before(hidden))  # (B, T, H)
            if after is not None:
                out = after(out)
            return hidden + out  # (B, T, H)

        return block

    def new_cache(self, rows: int, slots: int) -> RowCache:
        """An empty cache for a batch."""
        return RowCache(rows, slots, self.windows)

    def rotary(self, slots: int, total: int) -> Rotary | fused.Rotary:
        """Rotary tables for `slots` positions; none past `total - 1`, the last real one."""
        size = slots if self._compiled is None else capacity(slots)  # those of padding, too
        positions = torch.arange(size, device=self.device).clamp_(max=total - 1)[None]  # (1, S)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        kinds = dict.fromkeys(self.layer_types)
        if self.family.rope_by_type:
            tables = {k: self.decoder.rotary_emb(like, positions, k) for k in kinds}
        else:
            table = self.decoder.rotary_emb(like, positions)  # (1, S, R) each
            tables = dict.fromkeys(kinds, table)
        if self.execution != "modules":
            return fused.Rotary(tables, self.layers[0].self_attn.head_dim)
        return Rotary(tables)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) to the hidden states before sublayer 0, (B, T, H)."""
        return embed(self.decoder, tokens)

    def run(self, hidden: Tensor, step: Pass, sublayers: Iterable[int]) -> Tensor:
        """Carry hidden states (B, T, H) through the given sublayers, in order."""
        if self._compiled is not None and step.compiled:
            return self._compiled.run(hidden, step, tuple(sublayers))
        for index in sublayers:
            hidden = self.blocks[index](hidden, step)
        return hidden

    def finish(
        self, hidden: Tensor, step: Pass, sublayers: Iterable[int], *, draft: bool = False
    ) -> Tensor:
        """`run`, and `logits` of what comes out, or `draft_logits`: (B, T, H) to (B, T, V)."""
        if self._compiled is not None and step.compiled:
            return self._compiled.run(hidden, step, (*sublayers, _DRAFT_HEAD if draft else _HEAD))
        hidden = self.run(hidden, step, sublayers)
        return self.draft_logits(hidden) if draft else self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm, head and softcap: (B, T, H) to raw logits (B, T, V)."""
        return self._capped(self._head(hidden))

    def trimmed(self, tokens: Sequence[int]) -> Sublayers:
        """The same opened model, with drafts that can draw these tokens only, but for less.

        A head that is not a plain weight stays whole, with a warning.

        Args:
            tokens: ids, each once; their rows are copied, once for each model and list.

        Raises:
            ValueError: the model does not have one of them.
        """
        if not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            beyond = max(tokens) if min(tokens) >= 0 else min(tokens)
            raise ValueError(
                f"draft_vocabulary must hold tokens in 0..{self.vocabulary - 1} for this model, "
                f"got {beyond}; rank this model's own, or leave draft_vocabulary out"
            )
        if len(tokens) == self.vocabulary:
            return self
        head: Any = self.model.get_submodule("lm_head")
        reason = fused.head_refusal(head)
        if reason is not None:
            warnings.warn(
                f"draft_vocabulary has no effect: lm_head {reason}; drafts use the whole head",
                UserWarning,
                stacklevel=2,
            )
            return self
        opened = copy(self)
        rows = trimmed_head(head, tuple(tokens))
        opened._draft_head = self.head_of(rows)
        opened.draft_vocabulary = len(tokens)
        if self._compiled is not None:
            project = self._linear(rows.weight, rows.bias)
            whole = partial(spread, tokens=rows.tokens, vocabulary=self.vocabulary)
            few = _in_turn(self._norm, project, self._capped, whole)
            opened._compiled = self._compiled.replaced(_DRAFT_HEAD, few)
        return opened

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """`logits` of a draft, (B, T, V): -inf for tokens outside of a trimmed vocabulary."""
        return self.logits(hidden) if self._draft_head is None else self._draft_head(hidden)

    def head_of(self, rows: TrimmedHead) -> Function:
        """`logits` of some rows of the head, -inf elsewhere: (B, T, H) to (B, T, V)."""
        norm, capped, project = self._norm, self._capped, self._linear(rows.weight, rows.bias)
        return lambda hidden: rows.spread(capped(project(norm(hidden))))


def _softcap(cap: float | None) -> Function:
    """The function between an unembedding and the logits."""
    if cap is None:
        return lambda logits: logits
    # the order of operations and the dtype are the library's
    return lambda logits: torch.tanh(logits / cap) * cap


def _in_turn(*functions: Function) -> Block:
    """A block of functions of hidden states, one after the other."""

    def block(hidden: Tensor, _: Pass) -> Tensor:
        for function in functions:
            hidden = function(hidden)
        return hidden

    return block


def embed(decoder: Any, tokens: Tensor) -> Tensor:
    """Token ids (B, T) to the hidden states before the first layer of a decoder, (B, T, H).

    A Gemma scales its embedding by sqrt(H). Where the library's embedding module does not do that
    itself (Gemma and Gemma 2 in early versions 5 of transformers), it is done here, as there.
    """
    hidden: Tensor = decoder.embed_tokens(tokens)  # (B, T, H)
    if not decoder.config.model_type.startswith("gemma") or hasattr(
        decoder.embed_tokens, "embed_scale"
    ):
        return hidden
    return hidden * torch.tensor(decoder.config.hidden_size**0.5, dtype=hidden.dtype)


def fingerprint(model: Any) -> str:
    """16 hex digits that tell checkpoints apart whatever folder they lie in: `model_hash`.

    Over the architecture's sizes and the final norm's weights, rounded to bfloat16 so that a
    checkpoint is the same in every dtype it is loaded in.
    """
    config = model.config
    norm: Tensor = model.get_submodule("model").norm.weight  # (H,)
    sizes = [config.model_type, config.vocab_size, config.hidden_size, config.intermediate_size]
    sizes += [config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads]
    digest = hashlib.sha256(repr(sizes).encode())
    if not norm.is_meta:  # offloaded: the sizes have to do
        digest.update(bytes(norm.detach().bfloat16().cpu().view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]
