"""EAGLE-3 heads: a decoder layer over hidden states from several depths of a target.

A head joins a token's embedding with a state of the token before it: first the combination of the
target's states at three depths by `fc`, then its own output (Li et al. 2025, arXiv 2503.01840). Its
logits may cover only the target's most frequent tokens. Folders are read and written in the format
of the `speculators` package; the format of EAGLE's authors can be read, too.
Shapes: R rows, T tokens, H width of the target, W of the head, N depths, D tokens that it drafts.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from layerskip.files.writing import replacing_folder, write_text
from layerskip.library import cache_name, classes_of
from layerskip.model.published_head import PublishedHead

_PREFIXES = {"llama": "Llama", "qwen3": "Qwen3"}
"""The library's classes, by type of the head's layers."""


class Eagle(PublishedHead):
    """A head, at first without weights.

    Args:
        config: as returned by `eagle_config`.

    Attributes:
        depths: numbers of target layers after which its states are read; None: the usual three.
    """

    kind = "EAGLE-3 head"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        values = dict(config["transformer_layer_config"])
        kind = values.pop("model_type", "llama")
        if kind not in _PREFIXES:
            raise ValueError(f"its layers must be those of llama or qwen3, got {kind!r}")
        prefix = _PREFIXES[kind]
        library = vars(importlib.import_module(classes_of(kind)))
        layer_type, norm = library[f"{prefix}DecoderLayer"], library[f"{prefix}RMSNorm"]
        self.config = config
        shape: Any = CONFIG_MAPPING[kind](**values)
        shape._attn_implementation = "sdpa"
        kinds = getattr(shape, "layer_types", None) or ["full_attention"]
        if shape.num_hidden_layers != 1 or kinds != ["full_attention"]:
            raise ValueError("only one layer with full attention is served")
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.target_width = config.get("target_hidden_size") or width
        self.vocabulary = shape.vocab_size
        self.depths: list[int] | None = config.get("eagle_aux_hidden_state_layer_ids")
        count = len(self.depths or range(3))
        self.residual_of_normed = bool(config.get("norm_before_residual"))
        self.feeds_normed = bool(config.get("norm_output"))
        with torch.device("meta"):
            self.add_ends(shape, config.get("draft_vocab_size"))
            self.fc = nn.Linear(count * self.target_width, width, bias=False)
            layer = layer_type(shape, 0)
            for name in ("q_proj", "k_proj", "v_proj"):  # inputs: the embedding and the state
                old = getattr(layer.self_attn, name)
                new = nn.Linear(2 * width, old.out_features, bias=old.bias is not None)
                setattr(layer.self_attn, name, new)
            layer.hidden_norm = norm(width, eps)
            self.layers = nn.ModuleList([layer])
            self.norm = norm(width, eps)
            self.input_norm = self.fc_norm = None
            if config.get("norm_before_fc"):
                self.input_norm = norm(count * self.target_width, eps)
            if config.get("fc_norm"):
                norms = [norm(self.target_width, eps) for _ in range(count)]
                self.fc_norm = nn.ModuleList(norms)
        # In a tuple, so that it stays in float32.
        self.angles = (library[f"{prefix}RotaryEmbedding"](shape),)
        self.cache_name = cache_name(layer.self_attn)
        self.eval().requires_grad_(False)

    def stored_name(self, name: str) -> str:
        return super().stored_name(name).replace("midlayer.", "layers.0.")

    def depths_in(self, num_layers: int) -> list[int]:
        return self.depths or [2, num_layers // 2, num_layers - 3]

    def join(self, states: Tensor) -> Tensor:
        """Combine the target's concatenated states of all depths: (R, T, N H) to (R, T, W)."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, states.chunk(len(self.fc_norm), -1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], -1)
        out: Tensor = self.fc(states)
        return out

    def forward(
        self, embedded: Tensor, states: Tensor, places: Tensor, mask: Tensor, cache: Any
    ) -> Tensor:
        """The next states, from tokens' embeddings and the states before them, (R, T, W) each.

        Args:
            places: positions of the tokens, (R or 1, T).
            mask: mask of the cache's slots, as the library's layers take it.
            cache: the library's cache, with one layer.
        """
        layer: Any = self.layers[0]
        angles = self.angles[0](embedded, places)
        normed = layer.hidden_norm(states)
        both = torch.cat([layer.input_layernorm(embedded), normed], -1)  # (R, T, 2 W)
        assert self.cache_name is not None
        attended, _ = layer.self_attn(
            both, position_embeddings=angles, attention_mask=mask, **{self.cache_name: cache}
        )
        hidden = (normed if self.residual_of_normed else states) + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.feeds_normed else hidden  # type: ignore[no-any-return]

    def normed(self, states: Tensor) -> Tensor:
        """The input of its own head, from `forward`'s states."""
        return states if self.feeds_normed else self.norm(states)


def read_config(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the config of what drafts, from a folder or the Hub, which is asked once.

    Raises:
        OSError: there is none.
        ValueError: the folder is one of `layerskip train`.
    """
    if (Path(source) / "trained.json").is_file():
        raise ValueError(
            f"{source} holds a draft of `layerskip train`; name it by --skip {source}/trained.json"
        )
    return PretrainedConfig.get_config_dict(source)[0]


def eagle_config(source: str | os.PathLike[str], config: dict[str, Any]) -> dict[str, Any] | None:
    """Convert the config of a head to that of `speculators`; None: it is no head's.

    Args:
        source: where it was read, for messages.

    Raises:
        ValueError: it is a draft of another kind, which the message names.
    """
    kind = config.get("speculators_model_type")
    named = " ".join(config.get("architectures") or ()).lower()
    if kind is None and "eagle" in named and "eagle3" not in named:
        kind = named
    if kind not in (None, "eagle3"):
        raise ValueError(
            f"{source} holds a head of kind {kind!r}; only eagle3 and dflash are read here"
        )
    if kind is None and "eagle3" in named:  # the format of EAGLE's authors
        more = config.get("eagle_config") or {}
        depths = config.get("eagle_aux_hidden_state_layer_ids")
        numbers = more.get("eagle_aux_hidden_state_layer_ids")  # here, numbers of the layers
        depths = [number + 1 for number in numbers] if numbers and not depths else depths
        config = config | {"transformer_layer_config": config | {"model_type": "llama"}}
        return config | {"eagle_aux_hidden_state_layer_ids": depths}
    return None if kind is None else config


def load_eagle(
    source: str | os.PathLike[str],
    config: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Eagle:
    """Load a head from a folder or a Hub id; `dtype` None: as it is stored.

    Args:
        config: what `read_config` returns, if it has been read.

    Raises:
        ValueError: there is no head, it is of another kind or incomplete; says which in one line.
    """
    config = eagle_config(source, config or read_config(source))
    if config is None:
        raise ValueError(f"{source} holds no EAGLE-3 head")
    return Eagle.loaded(source, config, dtype=dtype)


def save_eagle(head: Any, output: Path) -> None:
    """Write a head to a folder atomically, in the format of `speculators`."""
    reached = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
    reached[head.tokens.cpu()] = True
    weights = {name: weight.contiguous().cpu() for name, weight in head.state_dict().items()}
    if reached.all():
        del weights["d2t"]
    else:
        weights["t2d"] = reached
    text = json.dumps(dict(head.config), indent=2, allow_nan=False)
    with replacing_folder(output) as partial:
        data = save(weights, metadata={"format": "pt"})
        (partial / "model.safetensors").write_bytes(data)  # so that a full disk raises OSError
        write_text(partial / "config.json", text + "\n")
