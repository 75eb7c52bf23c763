"""A `transformers` decoder as 2L residual sublayers.

Sublayer 2i is the attention of layer i, sublayer 2i+1 its MLP, each with its norms and residual
add. The model is not changed: a backend computes with its weights or calls its modules.
Shapes: B rows, T tokens of a pass, H hidden width, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from layerskip.backends import captured, native_passes
from layerskip.backends.base import Backend, Block
from layerskip.backends.fused import Fused
from layerskip.backends.modules import Modules
from layerskip.cache.recurrent import RecurrentCache
from layerskip.cache.rows import RowCache
from layerskip.families import plain
from layerskip.families.architecture import Architecture
from layerskip.model.draft_weights import DraftWeights
from layerskip.model.opened_model import OpenedModel
from layerskip.native import extension
from layerskip.weights.stored import stored_weights

EXECUTIONS = ("auto", "modules", "fused", "native", "captured")
ASKED = "as asked for"


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
