"""Weights in the bytes of their file: tensors that unpack themselves where necessary.

A `Stored` replaces the parameter of an `nn.Linear` or `nn.Embedding`. Native passes read its bytes
(see `panels.h`), and embeddings unpack the rows of their tokens. Any other operation temporarily
unpacks the whole weight, so all code that computes with weights works, if slowly.
Letters: R rows, C columns, G groups of columns.
"""

from __future__ import annotations

import copy
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from layerskip.native.extension import extension, refusal

_WORDS = {"G4": "4-bit groups", "G8": "8-bit groups", "F8": "FP8"}
UNIT = 32
"""Columns that native passes unpack together; a stored row consists of whole units."""


@dataclass
class _Held:
    """A weight's bytes: the rows of its file, and maybe panels. Shared by all aliases."""

    rows: Tensor
    file: mmap.mmap | None = None  # the mapped file that holds the rows, if any
    panels: Tensor | None = None


class Stored(Tensor):
    """A weight (R, C) in the bytes of a file.

    It cannot be trained or changed in place.

    Attributes:
        format: a name in `panels.cpp`, a format of GGUF or one of codes in groups; or BF16.
        group: columns that share a scale, if the format leaves this open; else 0.
        order: (C,) int32, which column of the weight each column of the bytes is; None: in order.
    """

    format: str
    group: int
    order: Tensor | None
    _held: _Held

    @staticmethod
    def __new__(
        cls,
        data: Tensor | _Held,
        format: str,
        columns: int,
        dtype: torch.dtype,
        group: int = 0,
        order: Tensor | None = None,
        file: mmap.mmap | None = None,
    ) -> Stored:
        held = data if isinstance(data, _Held) else _Held(data, file)
        made: Stored = torch.Tensor._make_wrapper_subclass(
            cls, (len(held.rows), columns), dtype=dtype
        )
        made.format, made.group, made.order, made._held = format, group, order, held
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Stored({self.format}, {tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["bytes"], None  # as other packed tensors tell their parts

    @property
    def bytes(self) -> Tensor:
        """The rows of the file, (R, bytes of a row), uint8."""
        return self._held.rows

    @property
    def read(self) -> Tensor:
        """The bytes that native passes read: panels, made once, or the rows of the file."""
        held = self._held
        if self.format[0] != "Q":
            return held.rows
        if held.panels is None:
            held.panels = extension().arranged(held.rows, self.format, self.shape[1])
            if held.file is not None and hasattr(mmap, "MADV_DONTNEED"):
                held.file.madvise(mmap.MADV_DONTNEED)  # its pages are hardly read any more
        return held.panels

    def matrix(self, bias: Tensor | None = None) -> Any:
        """Return the matrix that native passes read."""
        if self.format == "BF16":
            return extension().Matrix(self.bytes.view(torch.bfloat16), bias)
        rows, columns = self.shape
        how: dict[str, Any] = {"format": self.format, "group": self.group, "order": self.order}
        return extension().Matrix(self.read.view(-1), bias, rows=rows, columns=columns, **how)

    def unpacked(self) -> Tensor:
        """Return the numbers, (R, C), in the weight's dtype."""
        if self.format == "BF16":
            return self.bytes.view(torch.bfloat16).to(self.dtype)
        if refusal() is None:
            layout = self.format, self.shape[1], self.group
            made: Tensor = extension().unpacked(self.bytes, *layout, self.order)
            return made.to(self.dtype)
        try:
            from gguf import GGMLQuantizationType, dequantize
        except ImportError as error:
            raise ValueError(f"{refusal()}; without native passes: pip install gguf") from error
        kind = GGMLQuantizationType[self.format]
        return torch.from_numpy(dequantize(self.bytes.numpy(), kind)).to(self.dtype)

    def align_to_cache_lines(self) -> None:
        """Copy plain numbers that lie across cache lines in a file."""
        if self.format in ("BF16", "F16", "F32") and self.bytes.data_ptr() % 64:
            self._held.rows = self.bytes.clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and isinstance(args[0], Stored):
            raise TypeError(
                "a weight that is read as its file stores it cannot be changed in place; load the "
                "model with packed=False"
            )
        kept = _KEPT.get(func)
        out = None if kept is None else kept(*args, **kwargs)
        if out is not None:
            return out
        return func(*tree_map(_unpacked, args), **tree_map(_unpacked, kwargs))


def stored_weights(model: nn.Module) -> list[Stored]:
    """The stored weights of a model, each once."""
    return [weight for weight in model.parameters() if isinstance(weight, Stored)]


def storage_words(model: nn.Module) -> str | None:
    """Describe how a model's weights are stored, with their sizes; None if none is stored."""
    taken: dict[str, int] = {}
    for weight in stored_weights(model):
        form = _WORDS.get(weight.format[:2], weight.format)
        taken[form] = taken.get(form, 0) + weight.bytes.nbytes
    if not taken:
        return None
    shares = sorted(taken.items(), key=lambda pair: -pair[1])
    words = ", ".join(f"{form} {nbytes / 1e6:.0f} MB" for form, nbytes in shares)
    return f"weights as they are stored: {words}"


def store_halves(model: nn.Module) -> bool:
    """Convert float32 weights to bfloat16 in place if no number changes.

    Native passes compute with them in float32: the same numbers, from half the bytes.

    Returns:
        Whether there were any.
    """
    made: dict[int, nn.Parameter] = {}  # by parameter, since modules may share it
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if id(weight) not in made and _holds_halves(module, weight):
            data = weight.detach().bfloat16().view(torch.uint8)  # (R, 2 C)
            stored = Stored(data, "BF16", weight.shape[1], weight.dtype)
            made[id(weight)] = nn.Parameter(stored, requires_grad=False)
    for module in [*model.modules()] if made else []:
        weight = module._parameters.get("weight")
        module._parameters["weight"] = made.get(id(weight), weight)
    return bool(made)


def _holds_halves(module: nn.Module, weight: Any) -> bool:
    if type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
        return False
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.is_meta:
        return False
    if weight.dtype is not torch.float32 or weight.device.type != "cpu" or weight.shape[1] % UNIT:
        return False
    rows = max(1, (1 << 22) // weight.shape[1])  # in parts, to use little memory
    some = weight.detach().contiguous().view(torch.int32).split(rows)
    return not any(bool((each & 0xFFFF).any()) for each in some)


def unpacked_model(model: nn.Module, most: float = math.inf) -> nn.Module:
    """A copy with stored weights unpacked; the model itself if they would exceed `most` bytes."""
    stored = stored_weights(model)
    if not stored or sum(each.numel() * each.itemsize for each in stored) > most:
        return model
    return unpacked_copy(model)


def unpacked_copy(model: nn.Module) -> nn.Module:
    """A copy with stored weights unpacked, as stored ones can be neither copied nor changed."""
    stored = stored_weights(model)
    made = {id(each): nn.Parameter(each.unpacked(), requires_grad=False) for each in stored}
    return copy.deepcopy(model, dict[int, Any](made))


def _unpacked(value: Any) -> Any:
    return value.unpacked() if isinstance(value, Stored) else value


def _derived(weight: Stored, rows: Any, dtype: torch.dtype | None = None) -> Stored:
    data = weight._held if rows is None else weight.bytes[rows]
    dtype = weight.dtype if dtype is None else dtype
    return Stored(data, weight.format, weight.shape[1], dtype, weight.group, weight.order)


def _alias(weight: Stored, **_: Any) -> Stored:
    return _derived(weight, None)


def _embedded(weight: Stored, tokens: Any, *_: Any, **__: Any) -> Tensor:
    rows = _derived(weight, tokens.reshape(-1)).unpacked()  # (tokens, C)
    return rows.view(*tokens.shape, -1)


def _indexed(weight: Any, which: Any) -> Stored | None:
    rows = which[0] if len(which) == 1 and isinstance(weight, Stored) else None
    return _derived(weight, rows) if rows is not None and rows.dim() == 1 else None


def _sliced(
    weight: Stored, dim: int = 0, first: Any = None, last: Any = None, step: int = 1
) -> Any:
    whole = dim == 0 or (not first and (last is None or last >= weight.shape[dim]) and step == 1)
    return _derived(weight, slice(first, last, step) if dim == 0 else None) if whole else None


def _converted(weight: Stored, dtype: Any = None, device: Any = None, **_: Any) -> Stored | None:
    kept = dtype in (None, torch.float32, torch.bfloat16)
    kept = kept and (device is None or torch.device(device).type == "cpu")
    return _derived(weight, None, dtype) if kept else None


_ATEN = torch.ops.aten
_KEPT: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _alias,
    _ATEN.alias.default: _alias,
    _ATEN.clone.default: _alias,
    _ATEN.embedding.default: _embedded,
    _ATEN.index.Tensor: _indexed,
    _ATEN.slice.Tensor: _sliced,
    _ATEN._to_copy.default: _converted,
}
"""Operations that need no unpacked weight. They return None if they need one after all."""
