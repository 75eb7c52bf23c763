"""Products with plain weights: by BLAS or by oneDNN, whichever is faster.

On a CPU, BLAS is slow with the few rows that decoding and verifying have. So both are timed once
for each number of rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.model.joined import groups, together

Function = Callable[[Tensor], Tensor]
Linear = Callable[[Tensor, Tensor | None], Function]
"""Makes a function of inputs from a weight and a bias."""

SMALLEST_MODEL = 8 << 20
"""Bytes of all matrices beyond which they do not stay in cache between two passes."""
_COUNTS = (1, 2, 4, 8, 16)  # rows that products are timed with; the last also serves larger numbers
_SWEEPS = 3
_SAMPLE = 32 << 20  # bytes of each shape from which on no further matrix is timed
_LARGEST_TIMED = 128 << 20  # bytes of a matrix; of larger ones the first rows
_MARGIN = 0.97  # of the plain product's time: what another way has to stay below

_fastest: dict[tuple[Any, ...], tuple[Linear, ...]] = {}
_lock = threading.Lock()


def matrices(layers: nn.ModuleList, head: nn.Linear) -> list[Tensor]:
    """The matrices that a pass reads: of the layers (joined ones as one) and the head."""
    found: list[Tensor] = []
    inside: set[int] = set()
    for group in groups(layers):
        parts: list[Tensor] = [linear.weight for linear in group]
        whole = together(parts)
        if whole is not None:
            found.append(whole)
            inside.update(map(id, parts))
    rest = [p for p in layers.parameters() if p.dim() == 2 and id(p) not in inside]
    return [*found, *rest, head.weight]


def plain(weight: Tensor, bias: Tensor | None) -> Function:
    """The linear as it is."""
    linear = F.linear
    return lambda x: linear(x, weight, bias)


def onednn(weight: Tensor, bias: Tensor | None) -> Function:
    """The linear by oneDNN, without repacking the weight, as compiled code calls it on a CPU."""
    linear = torch.ops.mkldnn._linear_pointwise
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    return lambda x: linear(x, weight, bias, "none", [], "")


def compilable(weight: Tensor, bias: Tensor | None) -> Function:
    """The linear for compiled code: one token's product in plain loops on a CPU.

    Loops read memory faster than BLAS (1.25 to 1.4 times with float32 matrices of 1 to 64 MB on a
    Zen 4 core). In half precision, for several tokens, and when not compiled, it is `plain`.
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
    """The fastest linear for passes over these matrices, by the number of tokens in a pass.

    Measured once in a process for models of the same shapes, in about a second. There is a choice
    only in float32 on a CPU.
    """
    if (
        any(m.device.type != "cpu" or m.dtype is not torch.float32 for m in matrices)
        or sum(matrix.nbytes for matrix in matrices) < SMALLEST_MODEL
        or not _has_onednn()
    ):
        return plain
    key = (*(tuple(m.shape) for m in matrices), torch.get_num_threads())
    with _lock:
        if key not in _fastest:
            _fastest[key] = _measure(_pieces(matrices))
        ways = _fastest[key]
    return ways[0] if len(set(ways)) == 1 else partial(by_count, ways)


def by_count(ways: Sequence[Linear], weight: Tensor, bias: Tensor | None) -> Function:
    """A linear taken in the first way for 1 token, then for 2, 3 to 4, 5 to 8, ..., and more."""
    functions = [way(weight, bias) for way in ways]
    last, width = len(functions) - 1, weight.shape[1]

    def apply(x: Tensor) -> Tensor:
        count = x.numel() // width
        return functions[min((count - 1).bit_length(), last)](x)

    return apply


@torch.no_grad()
def _measure(matrices: Sequence[Tensor]) -> tuple[Linear, ...]:
    """The fastest way for each of `_COUNTS`: passes of all kinds in turn, the best of each."""
    ways: list[Linear] = [plain, onednn]
    made = [[way(matrix, None) for matrix in matrices] for way in ways]
    found = []
    for count in _COUNTS:
        inputs = [matrix.new_ones(1, count, matrix.shape[1]) for matrix in matrices]
        fastest = [float("inf")] * len(ways)
        for _ in range(_SWEEPS):
            for number, functions in enumerate(made):
                start = time.perf_counter()
                for function, x in zip(functions, inputs, strict=True):
                    function(x)
                fastest[number] = min(fastest[number], time.perf_counter() - start)
        fastest[0] *= _MARGIN
        found.append(ways[fastest.index(min(fastest))])
    return tuple(found)


def _pieces(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Some of these matrices, of every shape, to save time."""
    taken: dict[torch.Size, int] = {}
    found = []
    for matrix in matrices:
        if taken.setdefault(matrix.shape, 0) < _SAMPLE:
            rows = max(1, _LARGEST_TIMED // (matrix.shape[1] * matrix.element_size()))
            found.append(matrix.detach()[:rows])
            taken[matrix.shape] += found[-1].nbytes
    return found


def _has_onednn() -> bool:
    """Whether torch has oneDNN's linear; it does not promise to keep that operator."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    try:
        weight, x = torch.eye(3, 2), torch.ones(1, 1, 2)
        return torch.equal(onednn(weight, None)(x), F.linear(x, weight))
    except (AttributeError, RuntimeError):
        return False
