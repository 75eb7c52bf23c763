"""DFlash drafters: a small network that drafts a whole block of tokens in one pass.

The block is the last token of a text and a number of mask tokens. All of them attend to each other,
and to keys that each layer makes of the target's hidden states at several depths, for every token
before the block (Chen et al. 2026, arXiv 2602.06036). The layers are those of the library's
`muse_glimmer_assistant`. Folders are in its format, in that of DFlash's authors (z-lab), or in that
of the `speculators` package.
Shapes: R rows, T tokens of a context, K tokens of a block, N depths, H width, S slots of a cache.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, Cache

from layerskip.cache.library_cache import AttentionLayer, LibraryCache
from layerskip.cache.rows import on_device
from layerskip.library import cache_name, classes_of
from layerskip.model.published_head import PublishedHead

LIBRARY = "muse_glimmer_assistant"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_NAMES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
"""Parts of the network, by their names in other folders than the library's."""


class BlockDrafter(PublishedHead):
    """A drafter, at first without weights.

    Args:
        config: of a folder for which `holds_blocks` is true.

    Attributes:
        network: the library's model.
        block: the number of tokens K in a block.
        mask: the mask token.
        first: the place in a block whose output drafts the first token.
        depths: numbers of target layers after which its states are read.
        scaled: whether it reads the target's embeddings with the target's scale.
    """

    kind = "DFlash drafter"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        of_library = config.get("model_type") == LIBRARY
        speculators = "speculators_model_type" in config
        own = {**config, **(config.get("dflash_config") or {})}
        layers = config["transformer_layer_config"] if speculators else config
        numbers = own["aux_hidden_state_layer_ids" if speculators else "target_layer_ids"]
        self.depths = [number + (not speculators) for number in numbers]
        self.block, self.mask = int(own["block_size"]), int(own["mask_token_id"])
        self.first = 0 if config.get("sample_from_anchor") else 1
        self.scaled, width = not speculators, layers["hidden_size"]
        self.target_width = config.get("target_hidden_size") or width
        self.vocabulary, self.num_layers = layers.get("vocab_size"), config.get("num_target_layers")
        values = {name: value for name, value in layers.items() if value is not None}
        values.setdefault("head_dim", width // layers["num_attention_heads"])
        values.setdefault("vocab_size", self.mask + 1)
        kinds = values.setdefault("layer_types", [_FULL] * layers["num_hidden_layers"])
        if _SLIDING in kinds and "sliding_window" not in values:
            raise ValueError("some layers have a sliding window, but its size is missing")
        values["target_layer_ids"] = numbers
        values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        values |= {"block_size": self.block, "mask_token_id": self.mask}
        values |= {"model_type": LIBRARY, "_attn_implementation": "sdpa"}
        shape: Any = CONFIG_MAPPING[LIBRARY].from_dict(values)
        causal = config.get("is_causal", own.get("causal"))
        sliding = not of_library and not config.get("sliding_window_non_causal")
        self.causal = {_FULL: bool(causal), _SLIDING: sliding if causal is None else bool(causal)}
        # The library counts the distances inside a window, the others its tokens.
        self.windows = {_FULL: None, _SLIDING: (shape.sliding_window or 0) + of_library}
        module = importlib.import_module(classes_of(LIBRARY))
        self._turned = module.apply_rotary_pos_emb
        with torch.device("meta"):
            self.add_ends(shape, config.get("draft_vocab_size"))
            self.network: Any = module.MuseGlimmerAssistantModel(shape)
            states = len(self.depths) * self.target_width
            self.network.encoder.fc = torch.nn.Linear(states, width, bias=False)
        self.cache_name = cache_name(self.network)
        self.eval().requires_grad_(False)

    def depths_in(self, num_layers: int) -> list[int]:
        return self.depths

    def stored_name(self, name: str) -> str:
        name = super().stored_name(name)
        for other, ours in _NAMES.items():
            name = name.replace(other, ours) if name.startswith(other) else name
        inside = name.partition(".")[0] in ("encoder", "layers", "norm")
        return f"network.{name}" if inside else name

    def load(self, source: str | os.PathLike[str], dtype: torch.dtype | None) -> None:
        super().load(source, dtype)
        # Angles stay in float32.
        self.network.rotary_emb = type(self.network.rotary_emb)(self.shape)

    def remember(self, states: Tensor, cache: LibraryCache) -> Tensor:
        """Add the keys of target states (R, T, N H), for which the cache is placed.

        Returns:
            The context (R, T, W) from which they are made.
        """
        context: Tensor = self.network.encoder(states)  # (R, T, W)
        angles = self.network.rotary_emb(context, cache.placed(context.device))
        for number, layer in enumerate(self.network.layers):
            attention = layer.self_attn
            shape = (*context.shape[:2], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
            values = attention.v_proj(context).view(shape).transpose(1, 2)  # (R, G, T, D)
            cache.update(self._turned(keys, keys, *angles)[1], values, number)
        return context

    def forward(self, embedded: Tensor, lengths: Sequence[int], cache: LibraryCache) -> Tensor:
        """Outputs (R, K, W) for blocks, from their embeddings (R, K, W).

        Args:
            lengths: number of tokens before each block, whose keys are in the cache.
        """
        device = embedded.device
        places = on_device(lengths, device)[:, None] + torch.arange(
            self.block, device=device
        )  # (R, K)
        cache.place([0] * len(places), max(lengths), rows=range(len(places)))
        layers: list[Any] = [
            _Beside(cache, i, None, 0, cache.end) for i in range(len(cache.windows))
        ]
        states = embedded.new_empty(len(places), 0, self.network.encoder.fc.in_features)
        out: Tensor = self.network(
            noise_embeds=embedded,
            context_hidden_states=states,
            attention_mask={kind: self._seen(kind, places, cache.end) for kind in self.windows},
            position_ids=places,
            **{str(self.cache_name): Cache(layers=layers)},
        )[0]
        return out

    def _seen(self, kind: str, places: Tensor, end: int) -> Tensor:
        """Whether each token of a block sees each slot, and then each of the block's tokens.

        (R, 1, K, S + K) bool, for layers of a kind and blocks at places (R, K).
        """
        slots = torch.arange(end, device=places.device).expand(len(places), -1)  # (R, S)
        there = torch.cat([slots, places], 1)  # (R, S + K)
        real = torch.cat([slots < places[:, :1], torch.ones_like(places, dtype=torch.bool)], 1)
        distance = places[:, :, None] - there[:, None]  # (R, K, S + K)
        seen, window = real[:, None].expand_as(distance), self.windows[kind]
        if window is not None:
            seen = seen & (distance.abs() < window)
        if self.causal[kind]:
            seen = seen & (distance >= 0)
        return seen[:, None]


class _Beside(AttentionLayer):
    """The keys and values of a cache's layer, and those of a block, which are not kept."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.read(self.layer)
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


def holds_blocks(config: Mapping[str, Any]) -> bool:
    """Whether a folder with this config holds a DFlash drafter."""
    if kind := config.get("speculators_model_type"):
        return bool(kind == "dflash")
    return config.get("model_type") == LIBRARY or "dflash_config" in config
