"""How the weights of plain linears lie in memory and are read from it; knows no sublayers.

Two things spare a small model much of its decoding time. Projections of the same input are joined:
their rows lie in one storage, of which the modules' parameters become views, so that memory does
not double, `state_dict()` stays and one product replaces several. And on a CPU, matrices that do
not stay in its cache between two passes are streamed into it before BLAS reads them: its kernels
for few rows wait for memory far longer than a plain sum over the matrix does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]
Linear = Callable[[Tensor, Tensor | None], Function]
"""Makes a function of inputs from a weight and a bias."""

LARGEST = 2 << 20
"""Bytes of a matrix up to which it may be streamed: it has to fit a core's cache."""
SMALLEST_MODEL = 8 << 20
"""Bytes of all matrices from which on they do not stay in cache between two passes."""
_SWEEPS = 4

_holders: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_worth: dict[tuple[Any, ...], bool] = {}
_lock = threading.Lock()


# ---------------------------------------------------------------------------------------------
# Joining.


def hold(model: nn.Module) -> None:
    """Keep a plain-weight decoder's projections joined until as many calls of `release`."""
    with _lock:
        _holders[model] = _holders.get(model, 0) + 1
        for group in _groups(model):
            _join(group)


def release(model: nn.Module) -> None:
    """Undo `hold`: after the last one every parameter has a storage of its own again."""
    with _lock:
        left = _holders.get(model, 0) - 1
        if left > 0:
            _holders[model] = left
        elif _holders.pop(model, 0):
            for group in _groups(model):
                _part(group)


def together(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor of all rows of parts that lie one behind the other in one storage, else None."""
    first = parts[0]
    if first is None:
        return None
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if (
            part is None
            or part.untyped_storage().data_ptr() != storage
            or part.storage_offset() != end
            or not part.is_contiguous()
            or part.shape[1:] != first.shape[1:]
        ):
            return None
        end += part.numel()
    rows = sum(part.shape[0] for part in parts if part is not None)
    shape = (rows, *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def matrices(model: Any) -> list[Tensor]:
    """What a pass over one token reads: matrices of the layers, joined ones as one; the head."""
    found: list[Tensor] = []
    inside: set[int] = set()
    for group in _groups(model):
        parts: list[Tensor] = [linear.weight for linear in group]
        whole = together(parts)
        if whole is not None:
            found.append(whole)
            inside.update(map(id, parts))
    rest = [p for p in model.model.layers.parameters() if p.dim() == 2 and id(p) not in inside]
    return [*found, *rest, model.lm_head.weight]


def _groups(model: Any) -> Iterator[tuple[nn.Linear, ...]]:
    """Linears of a decoder that read the same input."""
    for layer in model.model.layers:
        for module, names in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj")),
            (layer.mlp, ("gate_proj", "up_proj")),
        ):
            if all(hasattr(module, name) for name in names):
                yield tuple(getattr(module, name) for name in names)


def _tensors(group: Sequence[nn.Linear]) -> Iterator[Sequence[Tensor]]:
    yield [linear.weight for linear in group]
    biases = [linear.bias for linear in group if linear.bias is not None]
    if len(biases) == len(group):
        yield biases


def _join(group: Sequence[nn.Linear]) -> None:
    for parts in _tensors(group):
        # what shares its storage with something else is left as it is
        alone = all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
        if alone and len({part.untyped_storage().data_ptr() for part in parts}) == len(parts):
            whole = torch.cat([part.data for part in parts])  # (sum of rows, ...)
            for part, view in zip(parts, whole.split([len(p) for p in parts]), strict=True):
                part.data = view


def _part(group: Sequence[nn.Linear]) -> None:
    for parts in _tensors(group):
        if together(parts) is not None:
            for part in parts:
                part.data = part.data.clone()


# ---------------------------------------------------------------------------------------------
# Streaming.


def plain(weight: Tensor, bias: Tensor | None) -> Function:
    """The linear as it is."""
    linear = F.linear
    return lambda x: linear(x, weight, bias)


def streamed(weight: Tensor, bias: Tensor | None) -> Function:
    """The linear, its weight brought into the cache first."""
    linear, stream = F.linear, weight.detach().sum

    def apply(x: Tensor) -> Tensor:
        stream()
        return linear(x, weight, bias)

    return apply


def compilable(weight: Tensor, bias: Tensor | None) -> Function:
    """The linear for code that is compiled: one token's product in plain loops on a CPU.

    They read memory faster than its BLAS does (1.25 to 1.4 times with float32 matrices of 1 to 64
    MB on a Zen 4 core). In half precision, for several tokens, and not compiled, it is `plain`.
    """
    linear = F.linear
    loops = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)

    def apply(x: Tensor) -> Tensor:
        if not (loops and torch.compiler.is_compiling() and x.numel() == x.shape[-1]):
            return linear(x, weight, bias)
        out = (x[..., None, :] * weight).sum(-1)  # (..., rows)
        return out if bias is None else out + bias

    return apply


def best_linear(matrices: Sequence[Tensor]) -> Linear:
    """`streamed` where it makes a pass over these matrices faster on this machine, else `plain`.

    Measured once in a process for models of the same shapes, in some tens of milliseconds.
    """
    sizes = [matrix.nbytes for matrix in matrices]
    if (
        any(m.device.type != "cpu" or m.dtype is not torch.float32 for m in matrices)
        or max(sizes) > LARGEST
        or sum(sizes) < SMALLEST_MODEL
    ):
        return plain
    key = (*(tuple(m.shape) for m in matrices), torch.get_num_threads())
    with _lock:
        if key not in _worth:
            _worth[key] = _faster(matrices)
    return streamed if _worth[key] else plain


@torch.no_grad()
def _faster(matrices: Sequence[Tensor]) -> bool:
    """Whether streaming pays: passes of both kinds in turn, the fastest of each compared."""
    inputs = [matrix.new_ones(1, 1, matrix.shape[1]) for matrix in matrices]
    ways = [[make(matrix, None) for matrix in matrices] for make in (plain, streamed)]
    fastest = [float("inf"), float("inf")]
    for _ in range(_SWEEPS):
        for number, functions in enumerate(ways):
            start = time.perf_counter()
            for function, x in zip(functions, inputs, strict=True):
                function(x)
            fastest[number] = min(fastest[number], time.perf_counter() - start)
    return fastest[1] < fastest[0]
