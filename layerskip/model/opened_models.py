"""Opens models (or uses them as a whole, see `whole`), and remembers them until they change.

Every call checks, in a millisecond or two, whether modules, their numbers (such as `scaling`),
hooks, forwards or the addresses of weights and buffers have changed. Changed numbers at the same
address need no new opening, since passes read weights in place, unless copies were made from them
(see `rounded`).
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from layerskip.backends import native_passes
from layerskip.families import plain
from layerskip.families.architecture import Architecture
from layerskip.families.wrappers import config_of, unwrapped
from layerskip.model.opened_model import OpenedModel
from layerskip.model.sublayers import Sublayers
from layerskip.model.whole import Whole, support
from layerskip.native import extension
from layerskip.weights.rounded import copies_of

_opened: WeakKeyDictionary[nn.Module, dict[str, tuple[list[Any], OpenedModel]]] = (
    WeakKeyDictionary()
)
_kept: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


def open_model(model: Any, execution: str = "auto") -> OpenedModel:
    """Open a model as `OpenedModel`, or as `Whole` if its sublayers are not known.

    Raises:
        UnsupportedModelError: neither is possible.
    """
    if support(unwrapped(model))[0] == "opened":
        return Sublayers(model, execution)
    return Whole(model, execution)


def runs_natively(model: Any) -> bool:
    """Whether `open_model` takes native passes, found without opening the model.

    Raises:
        UnsupportedModelError: the model cannot be opened.
    """
    if support(unwrapped(model))[0] != "opened":
        return False
    known = Architecture(model)
    return not (plain.refusal(known) or native_passes.refusal(known) or extension.refusal())


def sublayers_of(model: Any, execution: str = "auto") -> OpenedModel:
    """Return a model as `OpenedModel`, built again only if it has changed since the last call."""
    if isinstance(model, OpenedModel):
        return model
    model = unwrapped(model)
    state = _state(model)
    with _lock:
        before, opened = _opened.get(model, {}).get(execution, (None, None))
    if opened is None or before != state:
        opened = open_model(model, execution).weak()
        with _lock:
            _opened.setdefault(model, {})[execution] = (state, opened)
    return opened.strong()


def opened_of(model: Any) -> Sublayers:
    """Like `sublayers_of`, for callers that need the states between sublayers.

    Raises:
        ValueError: the model runs as a whole.
    """
    opened = sublayers_of(model)
    if isinstance(opened, Whole):
        raise ValueError(opened.refusal("it has no states between sublayers"))
    assert isinstance(opened, Sublayers)
    if opened.encoder or opened.recurrent:
        which = "encoder-decoders" if opened.encoder else "models with recurrent layers"
        raise ValueError(
            f"{which} are not supported here; their decoders draft "
            "with sublayers left out or rounded, by lookups, and by a second model"
        )
    return opened


def kept_for(model: nn.Module) -> dict[Any, Any]:
    """What callers keep for a model until it is released; it must not keep the model alive."""
    with _lock:
        return _kept.setdefault(model, {})


def release(model: Any) -> int:
    """Free the copies of a model's weights, and everything else that is kept for it.

    Decodings in progress keep what they use. The next call makes new copies.

    Returns:
        The size of the copies in bytes.
    """
    model = unwrapped(model.model if isinstance(model, OpenedModel) else model)
    with _lock:
        _opened.pop(model, None)
        _kept.pop(model, None)
    copies = copies_of(model)
    nbytes = copies.nbytes
    copies.forget_all()
    return nbytes


def _state(model: Any) -> list[Any]:
    """Everything on which an opening depends that can be checked cheaply."""
    state: list[Any] = [{**vars(config_of(model).get_text_config(decoder=True))}]
    state.append(copies_of(model).changes)
    state += [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    state.append(tuple(map(len, hooks)))
    for module in model.modules():
        attributes, kind = vars(module), type(module)
        state += (kind, kind.forward, attributes.get("forward"), attributes.get("_hf_hook"))
        state += (*attributes["_forward_hooks"], *attributes["_forward_pre_hooks"])  # by number
        # Scaling, epsilons, softcaps (blocks store them by value), and whether it is in training.
        state += [value for value in attributes.values() if type(value) in (bool, int, float)]
        for weight in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            if weight is not None:
                own = type(weight) in (nn.Parameter, Tensor) and not weight.is_meta
                state += (id(weight), weight.data_ptr() if own else 0)
    return state
