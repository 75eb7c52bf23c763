"""The differences between families of models, and the parts of a layer that follow from them.

Every family is declared in `known.py`. Backends read these declarations; none
checks the name of a class.
Shapes: B rows, T tokens, S slots, H hidden width, N query heads, K key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from layerskip.config.skips import SINK
from layerskip.families.experts import Mixture
from layerskip.library import classes_of


@dataclass(frozen=True)
class Family:
    """How the decoders of one model type differ from Llama's.

    Attributes:
        name: the `model_type` of the text decoder.
        package: the package of its classes in `transformers.models`; by default its name.
        norms: the names of the norms before and after the attention, and before and after the
            MLP; "" for none.
        norm: the order in which a norm multiplies: normalise, cast, times weight ("llama");
            normalise, times (1 + weight), cast ("one plus"); normalise, times weight, cast
            ("wide").
        last_norm: the same of the norm before the head; "" if it is like the others.
        windows: which layers have a sliding window: "none", "all" (if `config.sliding_window` is
            set), or "by type" (as `config.layer_types` says).
        projections: the linear layers for queries, keys and values; a layer may lack some.
        gate: the linear layer whose sigmoid multiplies what the attention has read; "" for none.
            If it is that of the queries, each head's queries are followed by its gate.
        recurrent: the module of a layer that has a recurrent state in place of keys; "" for none.
        head_norms: the norms of queries, keys and values; a layer may lack some.
        late_norms: whether they follow the rotation instead of preceding it.
        query_factor: the attribute of the attention by which normed queries are multiplied; "" for
            1.
        pairs: whether a rotation turns neighbouring numbers of a head, rather than a number of its
            first half with one of its second half.
        mlp: the MLP module of a layer.
        expansions: the linear layers at the input of the MLP.
        gated: whether the first of them, activated, multiplies the second; otherwise there is one.
        activation: the attribute of the MLP that holds its activation.
        positions: whether the attention is called with positions in addition to the angles.
        shares_keys: whether the attention is called with the keys of earlier layers, and lacks its
            own if its `is_kv_shared_layer` is set.
        rotates: whether an attention rotates queries and keys; a number is the base of its angles,
            if that differs between layers.
        rotary: a decoder's module that makes these angles, by the base.
        residual: the attribute of a layer by which outputs of sublayers are multiplied; "" for 1.
        score_cap: the attribute of the attention with the softcap of its scores; "" for none.
        softcap: whether the logits pass through `config.final_logit_softcapping`, if set.
        divisor, multiplier: the attributes of the config by which logits are divided, and
            multiplied before their softcap; "" for 1.
        embed: the hidden states before the first layer, (B, T, H), of a decoder's token ids (B, T).
        mixture: the mixture of experts of a layer; None if its MLP is dense.
        inputs, tail: whether layers have their own inputs, and whether something follows their MLP
            even if the MLP is skipped (Gemma 4).
        encoder: the `model_type` of the encoder-decoder that contains it, whose layers have a
            cross attention (T5Gemma); "" for none.
        modules_only: the reason why only the library's modules can compute it; "" for none.
    """

    name: str
    package: str = ""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    norm: Literal["llama", "one plus", "wide"] = "llama"
    last_norm: Literal["", "llama", "one plus", "wide"] = ""
    windows: Literal["none", "all", "by type"] = "none"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate: str = ""
    recurrent: str = ""
    head_norms: tuple[str, str, str] = ("q_norm", "k_norm", "v_norm")
    late_norms: bool = False
    query_factor: str = ""
    pairs: bool = False
    mlp: str = "mlp"
    expansions: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True
    activation: str = "act_fn"
    positions: bool = False
    shares_keys: bool = False
    rotates: Callable[[Any], float] = lambda attention: True
    rotary: Callable[[Any, str], Any] = lambda decoder, kind: decoder.rotary_emb
    residual: str = ""
    score_cap: str = ""
    softcap: bool = False
    divisor: str = ""
    multiplier: str = ""
    embed: Callable[[Any, Tensor], Tensor] = lambda decoder, tokens: decoder.embed_tokens(tokens)
    mixture: Callable[[Any], Mixture | None] = lambda layer: None
    inputs: bool = False
    tail: bool = False
    encoder: str = ""
    modules_only: str = ""

    @property
    def norm_of_head(self) -> str:
        """The order in which the norm before the head multiplies."""
        return self.last_norm or self.norm

    @property
    def home(self) -> str:
        """The module that defines its classes."""
        return classes_of(self.package or self.name)

    def layer_type(self, config: Any, layer: int) -> str:
        """The type of a layer, which determines its window."""
        if self.windows == "by type":
            return str(config.layer_types[layer])
        sliding = self.windows == "all" and config.sliding_window is not None
        return "sliding_attention" if sliding else "full_attention"


@dataclass(frozen=True)
class Conditional:
    """A class around a text decoder whose prompts may contain pictures.

    Attributes:
        name: its `model_type`.
        softcap: whether its logits pass through the decoder's softcap.
        types: the argument of `generate()` that marks the tokens of pictures.
        placeholders: the attributes of its config with tokens that embed as another one wherever
            no picture replaces them.
        blank: that other token; None for padding.
        two_way: whether tokens of a picture see each other, by the text decoder's config.
        in_full, past_windows: whether they do so in layers with full attention, and beyond the
            window of other layers.
    """

    name: str
    softcap: bool = True
    types: str = "mm_token_type_ids"
    placeholders: tuple[str, ...] = ()
    blank: int | None = None
    two_way: Callable[[Any], bool] = lambda text: False
    in_full: bool = True
    past_windows: bool = False

    def sees(self, same: Tensor, near: Tensor | None) -> Tensor | None:
        """Which tokens of its own picture a query sees, (B, 1, T, S) bool; None: only earlier ones.

        Args:
            same: the slots of the query's picture, (B, 1, T, S) bool.
            near: the slots in the layer's window, same shape; None in layers with full attention.
        """
        if near is None:
            return same if self.in_full else None
        return same if self.past_windows else same & near


@dataclass(frozen=True)
class AssistantFamily:
    """A decoder without its own keys and values that drafts for another model.

    Attributes:
        name: its `model_type`.
        package: the package of the decoder's classes in `transformers.models`.
        prefix: the common prefix of its class names.
    """

    name: str
    package: str
    prefix: str


def part_named(module: nn.Module, name: str) -> Any:
    """The part of a module with that name, or None."""
    return module._modules.get(name)


@dataclass(frozen=True)
class LayerParts:
    """A decoder layer, and the wiring of its two sublayers.

    Attributes:
        family: the family of the layer.
        number: the number of the layer.
        module: the library's layer.
        kind: the rotary table that it uses; "nope" if it uses none.
        window: its sliding window in tokens, or None for full attention.
        keys: the layer in the cache whose keys and values it attends to; in an assistant the first
            layer of its kind, which stands for the target's.
        before, after: the norms around the attention, or None.
        pre, post: the norms around the MLP, or None.
        tail: whether the layer's own input or a scalar follows even a skipped MLP (Gemma 4).
        sink: in a draft, the number of first slots seen in addition to the window (`narrowed`).
    """

    family: Family
    number: int
    module: Any
    kind: str
    window: int | None
    keys: int
    before: Any
    after: Any
    pre: Any
    post: Any
    tail: bool = False
    sink: int = 0

    @property
    def attention(self) -> Any:
        """The attention module, or the recurrent one in its place."""
        return self.module.self_attn if self.recurrent is None else self.recurrent

    @property
    def recurrent(self) -> Any:
        """The module with a recurrent state, or None."""
        return part_named(self.module, self.family.recurrent)

    @property
    def modules(self) -> list[tuple[str, Any]]:
        """Its modules by name, without the recurrent one, which is always called."""
        own = self.family.recurrent
        named = self.module.named_modules()
        return [each for each in named if not own or each[0].partition(".")[0] != own]

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and buffers of these modules, except those of a router in float32."""
        mixture = self.mixture
        wide = {*mixture.router.modules()} if mixture is not None and mixture.wide else {None}
        modules = [module for _, module in self.modules if module not in wide]
        return [each for m in modules for each in (*m.parameters(False), *m.buffers(False))]

    @property
    def cross(self) -> list[Any]:
        """The cross attention and the norms before and after it, if the decoder has one."""
        if not self.family.encoder:
            return []
        layer = self.module
        norms = layer.pre_cross_attn_layernorm, layer.post_cross_attn_layernorm
        return [layer.cross_attn, *norms]

    @property
    def mlp(self) -> Any:
        """The MLP module, which in most families contains the mixture."""
        return part_named(self.module, self.family.mlp)

    @property
    def heads(self) -> tuple[int, int]:
        """The number and width of the key heads that its attention reads."""
        attention = self.attention
        heads = attention.config.num_attention_heads // attention.num_key_value_groups
        return heads, attention.head_dim

    @property
    def projections(self) -> list[Any]:
        """The linear layers for queries, keys and values; in Gemma 4 the last may be missing."""
        parts = (part_named(self.attention, name) for name in self.family.projections)
        return [part for part in parts if part is not None]

    @property
    def head_norms(self) -> tuple[Any, Any, Any]:
        """The norms of queries, keys and values, or None."""
        q, k, v = (part_named(self.attention, name) for name in self.family.head_norms)
        return q, k, v

    @property
    def gate(self) -> Any:
        """The linear layer whose sigmoid multiplies what the attention has read, or None."""
        return part_named(self.attention, self.family.gate)

    @property
    def sinks(self) -> Tensor | None:
        """The score of a slot without a value, for each head (N,), or None."""
        sinks: Tensor | None = getattr(self.attention, "sinks", None)
        return sinks

    @property
    def joined(self) -> bool:
        """Whether the gate is part of the linear layer for queries."""
        return self.gate is not None and self.family.gate == self.family.projections[0]

    @property
    def query_factor(self) -> float:
        """The factor applied to normed queries."""
        name = self.family.query_factor
        return float(getattr(self.attention, name)) if name else 1.0

    @property
    def expansions(self) -> list[Any]:
        """The linear layers at the input of a dense MLP."""
        return [part_named(self.dense, name) for name in self.family.expansions]

    @property
    def activation(self) -> Any:
        """The activation of a dense MLP."""
        return part_named(self.dense, self.family.activation)

    @property
    def mixture(self) -> Mixture | None:
        """Its mixture of experts, if it has one."""
        return self.family.mixture(self.module)

    @property
    def dense(self) -> Any:
        """Its dense MLP, perhaps in parallel with a mixture, or None."""
        mixture = self.mixture
        return self.mlp if mixture is None else mixture.shared

    @property
    def writes(self) -> bool:
        """Whether it has its own keys and values."""
        return not (self.family.shares_keys and self.attention.is_kv_shared_layer)

    @property
    def residual(self) -> float:
        """The factor applied to the output of a sublayer."""
        name = self.family.residual
        return float(getattr(self.module, name)) if name else 1.0

    @property
    def score_cap(self) -> float | None:
        """The softcap of the attention's scores, or None."""
        name = self.family.score_cap
        return getattr(self.attention, name) if name else None

    def narrows(self, window: int | None) -> bool:
        """Whether it sees less in a draft with a window (`SkipConfig.window`)."""
        if self.recurrent is not None:
            return False
        return window is not None and (self.window is None or window < self.window)

    def narrowed(self, window: int | None) -> LayerParts:
        """The same layer in a draft with a window."""
        if not self.narrows(window):
            return self
        # A layer with a sliding window was trained without the first slots.
        return replace(self, window=window, sink=SINK if self.window is None else 0)
