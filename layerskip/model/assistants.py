"""Gemma 4's official assistants: small decoders that draft from the target's keys and values.

An assistant has no keys of its own: each of its layers reads those of the target's last layer of
the same kind. A step takes the newest token, embedded by the target, and a hidden state h, and
returns logits and the h of the next step. The first h is the target's state after its final norm at
the position that drew the newest token. Every step uses the newest token's position.

transformers 5.23 cannot construct its own classes: their config looks for layers that write keys,
and finds none. The classes built here are the same with a working constructor; they load and save
the library's checkpoints.
Shapes: B rows, T tokens, K keys, G key-value heads, D head width, H target's width, V vocabulary.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from layerskip.families.known import ASSISTANTS
from layerskip.families.wrappers import UnsupportedModelError
from layerskip.library import classes_of
from layerskip.texts.tokens import plural


def is_assistant(config: Any) -> bool:
    """Whether a config belongs to an assistant."""
    return config.model_type in ASSISTANTS


def library_can_assist(config: Any) -> bool:
    """Whether the library's own assisted generation works with an assistant of this model.

    The library marks layers that pass on their keys; 5.23 marks none if no layers share keys, and
    earlier releases have no marks, and pass on all.
    """
    return "store" in getattr(config.get_text_config(), "kv_sharing_modes", ("store",))


class _WorkingAssistant:
    """Added to a library class: a working constructor, and a step that calls its layers.

    Attributes (the library's):
        model: the decoder; its embedding belongs to the head, tokens enter at `pre_projection`.
        pre_projection, post_projection: from [embedded token; h] to the decoder, and back to h.
        lm_head: the head over all tokens.
        masked_embedding: selects the tokens for which the head is computed; None: all.
    """

    def __init__(self, config: Any) -> None:
        config = copy.deepcopy(config)
        text = config.get_text_config()
        kind: Any = type(text)
        text.__class__ = _without_own_keys(kind)
        PreTrainedModel.__init__(self, config)  # type: ignore[arg-type]  # this is a mix-in
        drafts = ASSISTANTS[config.model_type]
        backbone = config.backbone_hidden_size
        self.model = _library_class(drafts.package, f"{drafts.prefix}TextModel")(text)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.pre_projection = nn.Linear(2 * backbone, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, backbone, bias=False)
        self.masked_embedding = None
        if config.use_ordered_embeddings:
            embedder = f"{drafts.prefix}AssistantMaskedEmbedder"
            self.masked_embedding = _library_class(drafts.name, embedder)(config)
        self.post_init()  # type: ignore[attr-defined]

    def step(
        self,
        embedded: Tensor,
        state: Tensor,
        keys: Mapping[str, tuple[Tensor, Tensor]],
        masks: Mapping[str, Tensor | None],
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Take a step of drafting; returns logits (B, T, V) and the next h (B, T, H).

        Args:
            embedded: newest tokens, as embedded by the target, (B, T, H).
            state: h, (B, T, H).
            keys: by layer type, keys and values of the target's cache, (B, G, K, D) each.
            masks: by layer type, added to scores, (B or 1, 1, T, K); None: all keys are read.
            positions: of the newest tokens, (B or 1, T).
        """
        hidden: Tensor = self.pre_projection(torch.cat([embedded, state], -1))
        rotary = {kind: self.model.rotary_emb(hidden, positions, kind) for kind in keys}
        for layer, kind in zip(self.model.layers, self.model.config.layer_types, strict=True):
            hidden = layer(
                hidden,
                shared_kv_states=keys,
                position_embeddings=rotary[kind],
                attention_mask=masks[kind],
                position_ids=positions,
            )
        hidden = self.model.norm(hidden)
        if self.masked_embedding is not None:
            logits = self.masked_embedding(hidden, self.lm_head.weight)
        else:
            logits = self.lm_head(hidden)
        return logits, self.post_projection(hidden)


def _library_class(package: str, name: str) -> Any:
    """Return a class of a package in `transformers.models`."""
    return vars(importlib.import_module(classes_of(package)))[name]


@cache
def _without_own_keys(config: type) -> type:
    """Return a text config's class whose layers all read keys written by others."""
    modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    return type(config.__name__, (config,), {"kv_sharing_modes": modes})


@cache
def assistant_class(model_type: str) -> Any:
    if model_type not in ASSISTANTS:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not one of the official assistants, "
            f"{', '.join(ASSISTANTS)}; an ordinary second model drafts, too, but has to be loaded "
            "first: assistant=AutoModelForCausalLM.from_pretrained(...)"
        )
    library = _library_class(model_type, f"{ASSISTANTS[model_type].prefix}AssistantForCausalLM")
    return type(library.__name__, (_WorkingAssistant, library), {"__module__": library.__module__})


def load_assistant(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> Any:
    """Load an assistant from a folder or a Hub id; `dtype` None: the checkpoint's own.

    Raises:
        UnsupportedModelError: the checkpoint is of another kind of model.
        ValueError: weights are missing.
    """
    config = AutoConfig.from_pretrained(path)
    model, report = assistant_class(config.model_type).from_pretrained(
        path, config=config, dtype=dtype or "auto", output_loading_info=True
    )
    lacking = sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])])
    if lacking:
        raise ValueError(
            f"the assistant {path} is incomplete: {plural(len(lacking), 'weight')} missing or of "
            f"another shape, {lacking[0]} first"
        )
    return model.eval()
