"""Opens models into their sublayers, and remembers them until they change.

A `transformers` decoder is 2L residual sublayers. Sublayer 2i is the attention of layer i, sublayer
2i+1 its MLP, each with its norms and residual add. The model is not changed: a backend computes
with its weights or calls its modules. A model whose sublayers are not known is used as a whole.

Every call checks, in a millisecond or two, whether modules, their numbers (such as `scaling`),
hooks, forwards or the addresses of weights and buffers have changed. Changed numbers at the same
address need no new opening, since passes read weights in place, unless copies were made from them
(see `rounded`).
Shapes: B rows, T tokens of a pass, H hidden width, S slots, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from layerskip.backends import captured, native_passes
from layerskip.backends.base import Backend, Block
from layerskip.backends.fused import Fused
from layerskip.backends.modules import Modules
from layerskip.cache.recurrent import RecurrentCache
from layerskip.cache.rows import RowCache
from layerskip.families import plain
from layerskip.families.architecture import Architecture
from layerskip.families.wrappers import config_of, unwrapped
from layerskip.model.draft_weights import DraftWeights
from layerskip.model.opened_model import OpenedModel
from layerskip.model.whole import Whole, support
from layerskip.native import extension
from layerskip.weights.rounded import copies_of
from layerskip.weights.stored import stored_weights

EXECUTIONS = ("auto", "modules", "fused", "native", "captured")
ASKED = "as asked for"

_opened: WeakKeyDictionary[nn.Module, dict[str, tuple[list[Any], OpenedModel]]] = (
    WeakKeyDictionary()
)
_kept: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


class Sublayers(Architecture, OpenedModel):
    """A causal language model opened up into its sublayers.

    Args:
        model: a causal language model of a family in `families.FAMILIES`, or PEFT's wrapper of one.
        execution: "modules" calls the library's modules, "fused" takes the fused path for plain
            weights, "native" does the same in one call per pass on a CPU, "captured" replays it as
            CUDA graphs on a GPU (either falls back to the fused path with a warning if it is not
            available), "auto" takes the fastest one that supports the model as it is now.

    Raises:
        UnsupportedModelError: names what is not supported, and what is.
        ValueError: "fused", "native" or "captured" is requested but the model's modules must be
            called; or the model is in training mode.
    """

    def __init__(self, model: nn.Module, execution: str = "auto") -> None:
        super().__init__(model)
        self.branches = not (self.encoder or self.recurrent)
        self._compute_with(*_backend(self, execution), DraftWeights)

    def chosen(self, sublayers: Iterable[int]) -> list[Block]:
        return [self.blocks[index] for index in sublayers]

    def normed(self, states: Tensor) -> Tensor:
        return self.decoder.norm(states)  # type: ignore[no-any-return]

    def own_cache(self, rows: int, slots: int) -> RowCache:
        if not any(part.writes for part in self.parts):
            raise ValueError(
                "this model has no keys and values of its own: it drafts for another model; give "
                "that one as the model, and this one as its assistant"
            )
        slots = self.backend.capacity(slots)
        trims, zeros = self.backend.trims, self.backend.zeros
        if self.recurrent:
            return RecurrentCache(rows, slots, self.windows)
        return RowCache(rows, slots, self.windows, trims=trims, zeros=zeros)


def _backend(model: Architecture, execution: str) -> tuple[Backend, str | None]:
    """The requested backend, or the best one for "auto", and why there is no faster one."""
    if execution not in EXECUTIONS:
        raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}, got {execution!r}")
    gpu = model.device.type == "cuda"
    if execution == "modules":
        return Modules(model), ASKED
    reason = plain.refusal(model)
    if reason is not None:
        if execution == "auto":
            return Modules(model), reason
        raise ValueError(
            f"execution {execution!r} cannot serve this model: {reason}; "
            "use execution='auto' or 'modules'"
        )
    stored = bool(stored_weights(model.model))
    if execution in ("fused", "captured") and stored:
        raise ValueError(
            f"execution {execution!r} cannot serve this model: its weights are read as their file "
            "stores them, by native passes; load it with packed=False, or use execution='auto'"
        )
    if execution == "fused":
        return Fused(model), ASKED
    if execution == "captured" or (execution == "auto" and gpu and not stored):
        reason = captured.refusal(model)
        if reason is None:
            return captured.Captured(model), None
        if execution == "captured":
            native_passes.warn_refusal(reason)
        return Fused(model), reason
    reason = native_passes.refusal(model)
    if reason is None:
        reason = extension.refusal()
    elif execution == "auto" and not stored:
        return Fused(model), reason
    if reason is None:
        return native_passes.Native(model), None
    native_passes.warn_refusal(reason)
    return Modules(model) if stored else Fused(model), reason


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
