"""Weights and bytes that a decoder reads, from its sizes alone; refuses to know torch.

At batch 1 a decoding step reads every weight once and does two operations with each, so that the
time of a step is at least bytes / bandwidth. These formulas count the bytes of a model of given
sizes, and say what a draft costs at that limit. Machines measured are below it: compare, do not
substitute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a Llama-like decoder: gated MLP, grouped-query attention; norms are left out."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: Any) -> DecoderShape:
        """The sizes in a `transformers` configuration (or anything with its names)."""
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
        )

    @property
    def attention(self) -> int:
        """Weights of one attention sublayer: Q and O, K and V."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def mlp(self) -> int:
        """Weights of one MLP sublayer: gate, up, down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def head(self) -> int:
        """Weights of the unembedding, read in every step (the embedding gives one row only)."""
        return self.hidden_size * self.vocab_size

    @property
    def weights(self) -> int:
        """Weights a decoding step reads: all layers and the head."""
        return self.num_layers * (self.attention + self.mlp) + self.head

    def kv_bytes(self, tokens: int, bytes_per_value: float = 2.0) -> float:
        """Bytes of the keys and values of `tokens` cached tokens."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * tokens * bytes_per_value

    def draft_cost(
        self, attention: int, mlp: int | None = None, head_fraction: float = 1.0
    ) -> float:
        """c of a draft that keeps `attention` attention and `mlp` MLP sublayers, from bytes.

        `mlp` defaults to `attention` (whole layers: an early exit at E keeps E of each);
        `head_fraction` is the share of the vocabulary that the draft's head reads.
        """
        mlp = attention if mlp is None else mlp
        kept = attention * self.attention + mlp * self.mlp + head_fraction * self.head
        return kept / self.weights
