"""Opened models (or whole ones, see `whole`), remembered until the model changes.

Every call checks, in about a millisecond, whether modules, hooks, forwards or the places of weights
have changed. Changed numbers in the same place need no new opening: passes read weights where they
lie, and copies of weights check for changes themselves (see `rounded`).
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from layerskip.model.rounded import copies_of
from layerskip.model.sublayers import Sublayers
from layerskip.model.t5gemma import T5Gemma
from layerskip.model.whole import Whole, level
from layerskip.model.wrappers import unwrapped

_CONFIG = (
    *("_attn_implementation", "num_hidden_layers", "sliding_window", "max_position_embeddings"),
    *("final_logit_softcapping", "vocab_size"),
)

_known: WeakKeyDictionary[nn.Module, dict[str, tuple[list[Any], Sublayers]]] = WeakKeyDictionary()
_lock = threading.Lock()


def open_model(model: Any, execution: str = "auto") -> Sublayers:
    """A model as `Sublayers`, or `Whole` if its sublayers are not known.

    Raises:
        UnsupportedModelError: it can be served in neither way.
    """
    if level(unwrapped(model))[0] == "opened":
        kind = unwrapped(model).config.model_type
        return T5Gemma(model, execution) if kind == "t5gemma" else Sublayers(model, execution)
    return Whole(model, execution)


def sublayers_of(model: Any, execution: str = "auto") -> Sublayers:
    """A model as `Sublayers`, built again only if it has changed since the last call."""
    if isinstance(model, Sublayers):
        return model
    model = unwrapped(model)
    state = _state(model)
    with _lock:
        before, found = _known.get(model, {}).get(execution, (None, None))
    if found is None or before != state:
        found = open_model(model, execution).let_go()
        with _lock:
            _known.setdefault(model, {})[execution] = (state, found)
    found.weights.refresh()
    return found.handle()


def opened_of(model: Any) -> Sublayers:
    """`sublayers_of`, for what needs the states between sublayers.

    Raises:
        ValueError: the model is served whole.
    """
    found = sublayers_of(model)
    if isinstance(found, Whole):
        raise ValueError(found.refusal("it has no states between sublayers"))
    return found


def release(model: Any) -> int:
    """Free the copies of a model's weights, and everything else that is kept for it.

    Decodings in progress keep what they use. The next call makes new copies.

    Returns:
        The bytes of the copies.
    """
    model = unwrapped(model.model if isinstance(model, Sublayers) else model)
    with _lock:
        _known.pop(model, None)
    copies = copies_of(model)
    nbytes = copies.nbytes
    copies.forget_all()
    return nbytes


def _state(model: Any) -> list[Any]:
    """What an opening depends on, as far as it can be checked cheaply."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    found: list[Any] = [getattr(config, name, None) for name in _CONFIG]
    found += [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    found.append(tuple(map(len, hooks)))
    modules = [model]
    while modules:
        own = vars(modules[-1])
        kind = type(modules.pop())
        found += (kind, kind.forward, own.get("forward"), own["training"])
        found += (*own["_forward_hooks"], *own["_forward_pre_hooks"])  # by number
        found.append(own.get("_hf_hook"))
        for weight in own["_parameters"].values():
            if weight is not None:
                plain = type(weight) is nn.Parameter and not weight.is_meta
                found += (id(weight), weight.data_ptr() if plain else 0)
        modules += (part for part in own["_modules"].values() if part is not None)
    return found
