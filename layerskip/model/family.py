"""What differs between families of models, and the parts of a layer that follow from it.

Every family is declared in a file of the folder `families`. Backends read what is said here; none
asks for the name of a class.
Letters: B rows, T tokens, S slots, H hidden width, N query heads, K key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from layerskip.config import SINK
from layerskip.model.experts import Mixture


@dataclass(frozen=True)
class Family:
    """How the decoders of one model type differ from Llama's.

    What the fields cannot say, a subclass says by overriding a method.

    Attributes:
        name: the `model_type` of the text decoder.
        package: the package of its classes in `transformers.models`; by default its name.
        norms: the names of the norms before and after the attention, and before and after the
            MLP; "" for none.
        norm: the order in which a norm multiplies: normalise, cast, times weight ("llama");
            normalise, times (1 + weight), cast ("one plus"); normalise, times weight, cast
            ("wide").
        windows: which layers have a sliding window: "none", "all" (if `config.sliding_window` is
            set), or "by type" (as `config.layer_types` says).
        projections: the linears that make queries, keys and values; a layer may lack some.
        expansions: the linears that lead into the MLP.
        activation: the attribute of the MLP that holds its activation.
        positions: the attention is called with positions besides the angles.
        shares_keys: the attention is called with the keys of layers before it.
        softcap: the logits pass through `config.final_logit_softcapping`, if that is set.
        inputs, tail: layers have inputs of their own, and something follows their MLP even where
            that is left out (Gemma 4).
        encoder: the `model_type` of the encoder-decoder that it is a part of, whose layers have a
            cross attention (T5Gemma); "" for none.
        modules_only: the reason why only the library's modules can compute it; "" for none.
    """

    name: str
    package: str = ""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    norm: Literal["llama", "one plus", "wide"] = "llama"
    windows: Literal["none", "all", "by type"] = "none"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    expansions: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    positions: bool = False
    shares_keys: bool = False
    softcap: bool = False
    inputs: bool = False
    tail: bool = False
    encoder: str = ""
    modules_only: str = ""

    @property
    def home(self) -> str:
        """The module that its classes are written in."""
        package = self.package or self.name
        return f"transformers.models.{package}.modeling_{package}"

    def embed(self, decoder: Any, tokens: Tensor) -> Tensor:
        """Token ids (B, T) to the hidden states before the first layer, (B, T, H)."""
        hidden: Tensor = decoder.embed_tokens(tokens)
        return hidden

    def layer_type(self, config: Any, layer: int) -> str:
        """The type of a layer, which its window follows from."""
        if self.windows == "by type":
            return str(config.layer_types[layer])
        sliding = self.windows == "all" and config.sliding_window is not None
        return "sliding_attention" if sliding else "full_attention"

    def turns(self, attention: Any) -> bool:
        """Whether an attention turns its queries and keys by rotary angles."""
        return True

    def writes(self, attention: Any) -> bool:
        """Whether an attention has keys and values of its own."""
        return True

    def residual(self, layer: Any) -> float:
        """What the output of a sublayer is multiplied by."""
        return 1.0

    def divisor(self, config: Any) -> float:
        """What the logits are divided by."""
        return 1.0

    def score_cap(self, attention: Any) -> float | None:
        """The softcap of the attention's scores, if there is one."""
        return None

    def mixture(self, layer: Any) -> Mixture | None:
        """The mixture of experts of a layer; None where its MLP is dense."""
        return None


@dataclass(frozen=True)
class Conditional:
    """A class around a text decoder, whose prompts may have pictures.

    Attributes:
        name: its `model_type`.
        softcap: whether its logits pass through the decoder's softcap.
        types: the argument of `generate()` that marks the tokens of pictures.
    """

    name: str
    softcap: bool = True
    types: str = "mm_token_type_ids"

    def placeholders(self, config: Any) -> list[int]:
        """The tokens that embed as padding wherever no picture stands for them."""
        return []

    def two_way(self, text: Any) -> bool:
        """Whether tokens of a picture see each other, by the config of the text decoder."""
        return False

    def sees(self, same: Tensor, near: Tensor | None) -> Tensor | None:
        """Which tokens of its own picture a query sees, (B, 1, T, S) bool; None: only earlier ones.

        Args:
            same: the slots that are of the query's picture, (B, 1, T, S) bool.
            near: the slots in the layer's window, the same shape; None in full layers.
        """
        return same if near is None else same & near


@dataclass(frozen=True)
class Assistant:
    """A decoder without keys and values of its own, which drafts for a model.

    Attributes:
        name: its `model_type`.
        package: the package of the decoder's classes in `transformers.models`.
        prefix: what the names of its classes begin with.
    """

    name: str
    package: str
    prefix: str


def part_named(module: nn.Module, name: str) -> Any:
    """The part of a module by that name; None where the module has none."""
    return module._modules.get(name)


@dataclass(frozen=True)
class LayerParts:
    """A decoder layer, and how its two sublayers are wired.

    Attributes:
        family: what the layer is one of.
        number: the number of the layer.
        module: the library's layer.
        kind: which of the rotary tables it turns by; "nope" if it does not turn.
        window: its sliding window in tokens, or None for full attention.
        keys: the layer whose keys and values it attends to, in the cache; in an assistant the
            first layer of its kind, which stands for the target's.
        before, after: the norms around the attention, None for none.
        pre, post: the norms around the MLP, None for none.
        tail: something follows the MLP, even where that is left out (Gemma 4): the layer's own
            input, a scalar.
        sink: of a draft, how many of the first slots are seen beside the window (see `narrowed`).
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
        """The attention module."""
        return self.module.self_attn

    @property
    def cross(self) -> list[Any]:
        """The cross attention and the norms before and after it, of a decoder that has one."""
        if not self.family.encoder:
            return []
        layer = self.module
        norms = layer.pre_cross_attn_layernorm, layer.post_cross_attn_layernorm
        return [layer.cross_attn, *norms]

    @property
    def mlp(self) -> Any:
        """The MLP module."""
        return self.module.mlp

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads of keys its attention reads, and how wide they are."""
        attention = self.attention
        heads = attention.config.num_attention_heads // attention.num_key_value_groups
        return heads, attention.head_dim

    @property
    def projections(self) -> list[Any]:
        """The linears that make queries, keys and values; Gemma 4 may lack the last ones."""
        parts = (part_named(self.attention, name) for name in self.family.projections)
        return [part for part in parts if part is not None]

    @property
    def head_norms(self) -> tuple[Any, Any, Any]:
        """The norms of queries, keys and values; None for none."""
        q, k, v = (part_named(self.attention, f"{name}_norm") for name in "qkv")
        return q, k, v

    @property
    def expansions(self) -> list[Any]:
        """The linears that lead into a dense MLP."""
        return [part_named(self.mlp, name) for name in self.family.expansions]

    @property
    def activation(self) -> Any:
        """The activation of a dense MLP."""
        return part_named(self.mlp, self.family.activation)

    @property
    def mixture(self) -> Mixture | None:
        """Its mixture of experts, if it has one."""
        return self.family.mixture(self.module)

    @property
    def dense(self) -> bool:
        """Whether it has a dense MLP, perhaps beside a mixture."""
        mixture = self.mixture
        return mixture is None or mixture.beside

    @property
    def writes(self) -> bool:
        """Whether it has keys and values of its own."""
        return self.family.writes(self.attention)

    @property
    def residual(self) -> float:
        """What the output of a sublayer is multiplied by."""
        return self.family.residual(self.module)

    @property
    def score_cap(self) -> float | None:
        """The softcap of the attention's scores, if there is one."""
        return self.family.score_cap(self.attention)

    def narrowed(self, window: int | None) -> LayerParts:
        """The same for a draft with a window (`SkipConfig.window`)."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        # a layer that slides is used to texts without their first slots
        return replace(self, window=window, sink=SINK if self.window is None else 0)
