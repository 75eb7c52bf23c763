"""Products and norms of few tokens in Triton kernels, with weights as they are or rounded.

A sum has one order for any number of tokens.
Shapes: M tokens, H hidden width, R rows of all weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerskip.weights.rounded import GROUP, Rounded

Norm = tuple[Tensor | None, float, float]
"""The weight (H,) of a norm, its epsilon, and what is added to the weight."""
Weight = Tensor | Rounded


@triton.jit
def _halves(
    weight, steps, wide, real, start, groups, kind: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The numbers of rows in 4 bits: in the low halves of bytes, (ROWS, COLUMNS / 2), and the high.

    High ones stay where they are, so that the bytes of a word are converted together.
    """
    byte = start // 2 + tl.arange(0, COLUMNS // 2)
    inside = real[:, None] & (byte < groups * 16)[None, :]
    pairs = tl.load(weight + wide * (groups * 16) + byte[None, :], inside, 0)
    group = start // 32 + tl.arange(0, COLUMNS // 32)
    inside = real[:, None] & (group < groups)[None, :]
    by = tl.load(steps + wide * groups + group[None, :], inside, 0.0).to(kind)[:, :, None]
    low = (pairs & 15).to(kind) - 8
    high = ((pairs ^ -128) & -16).to(kind)  # 16 times as large
    low = tl.reshape(low, (ROWS, COLUMNS // 32, 16)) * by
    high = tl.reshape(high, (ROWS, COLUMNS // 32, 16)) * (by * 0.0625)
    return tl.reshape(low, (ROWS, COLUMNS // 2)), tl.reshape(high, (ROWS, COLUMNS // 2))


@triton.jit(do_not_specialize=["m"])
def _product(
    x, scale, w0, w1, w2, s0, s1, s2, b0, b1, b2, residual, out, m, h, groups, n0, n1, n2, epsilon,
    plus, by, BITS: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products of normalised inputs (M, H) with up to three weights, side by side (M, R)."""
    token = tl.program_id(0) * 16 + tl.arange(0, 16)
    block = tl.program_id(1)
    weight, steps, bias, count, first = w0, s0, b0, n0, 0
    if GATE == 0 and w1 is not None:
        blocks = tl.cdiv(n0, ROWS)
        if block >= blocks:
            weight, steps, bias, count, first, block = w1, s1, b1, n1, n0, block - blocks
            if w2 is not None:
                blocks = tl.cdiv(n1, ROWS)
                if block >= blocks:
                    weight, steps, bias, count = w2, s2, b2, n2
                    first, block = n0 + n1, block - blocks
    row = block * ROWS + tl.arange(0, ROWS)
    real, known = row < count, token < m
    sums = tl.zeros((ROWS, 16), tl.float32)
    others = tl.zeros((ROWS, 16), tl.float32)
    squares = tl.zeros((16,), tl.float32)
    wide, stride = row.to(tl.int64)[:, None], h
    kind: tl.constexpr = out.dtype.element_ty
    if BITS == 8:
        stride = groups * 32
    for start in range(0, h, COLUMNS):
        if BITS == 4:
            byte = start // 2 + tl.arange(0, COLUMNS // 2)
            column = byte // 16 * 32 + byte % 16
            where = x + token[None, :] * h + column[:, None]
            low_inputs = tl.load(where, (column < h)[:, None] & known[None, :], 0.0)
            high_inputs = tl.load(where + 16, (column + 16 < h)[:, None] & known[None, :], 0.0)
            low, high = _halves(weight, steps, wide, real, start, groups, kind, ROWS, COLUMNS)
            sums = tl.dot(low, low_inputs, sums, input_precision="ieee")
            sums = tl.dot(high, high_inputs, sums, input_precision="ieee")
            if GATE != 0:
                low, high = _halves(w1, s1, wide, real, start, groups, kind, ROWS, COLUMNS)
                others = tl.dot(low, low_inputs, others, input_precision="ieee")
                others = tl.dot(high, high_inputs, others, input_precision="ieee")
        else:
            column = start + tl.arange(0, COLUMNS)
            inside = column < h
            where = token[None, :] * h + column[:, None]
            inputs = tl.load(x + where, inside[:, None] & known[None, :], 0.0)  # (COLUMNS, 16)
            if scale is not None:
                floats = inputs.to(tl.float32)
                squares += tl.sum(floats * floats, 0)
                factor = tl.load(scale + column, inside, 0.0).to(tl.float32) + plus
                inputs = (floats * factor[:, None]).to(kind)
            place = wide * stride + column[None, :]
            mask = real[:, None] & inside[None, :]
            numbers = tl.load(weight + place, mask, 0).to(kind)
            sums = tl.dot(numbers, inputs, sums, input_precision="ieee")
            if GATE != 0:
                numbers = tl.load(w1 + place, mask, 0).to(kind)
                others = tl.dot(numbers, inputs, others, input_precision="ieee")
    if BITS == 8:
        sums *= tl.load(steps + row, real, 0.0).to(tl.float32)[:, None]
        if GATE != 0:
            others *= tl.load(s1 + row, real, 0.0).to(tl.float32)[:, None]
    if scale is not None:
        factor = tl.rsqrt(squares / h + epsilon)[None, :]
        sums *= factor
        others *= factor
    if b0 is not None:
        sums += tl.load(bias + row, real, 0.0).to(tl.float32)[:, None]
        if GATE != 0:
            others += tl.load(b1 + row, real, 0.0).to(tl.float32)[:, None]
    if GATE != 0:
        sums = sums.to(kind).to(tl.float32)
        if GATE == 1:
            sums *= tl.sigmoid(sums)
        else:  # sqrt(8 / pi)
            sums *= tl.sigmoid(1.5957691216057308 * (sums + 0.044715 * sums * sums * sums))
        sums = sums.to(kind).to(tl.float32) * others.to(kind).to(tl.float32)
    width = n0 + n1 + n2
    if GATE != 0:
        width = n0
    where = token[None, :].to(tl.int64) * width + (first + row)[:, None]
    mask = real[:, None] & known[None, :]
    if residual is not None:
        added = tl.load(residual + where, mask, 0.0).to(tl.float32)
        sums = added + by * sums.to(kind).to(tl.float32)
    tl.store(out + where, sums.to(kind), mask)


@triton.jit
def _normalised(x, scale, residual, out, h, epsilon, plus, by, WIDTH: tl.constexpr):
    """The norm of a token (H,), or `residual` plus `by` times it."""
    place = tl.program_id(0) * h + tl.arange(0, WIDTH)
    column = tl.arange(0, WIDTH)
    inside = column < h
    wide = tl.load(x + place, inside, 0.0).to(tl.float32)
    factor = tl.load(scale + column, inside, 0.0).to(tl.float32) + plus
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / h + epsilon) * factor
    wide = wide.to(out.dtype.element_ty).to(tl.float32)
    if residual is not None:
        wide = tl.load(residual + place, inside, 0.0).to(tl.float32) + by * wide
    tl.store(out + place, wide.to(out.dtype.element_ty), inside)


def product(
    x: Tensor,  # (M, H)
    modules: Sequence[tuple[Weight, Tensor | None]],  # weights and biases
    norm: Norm | None = None,
    residual: Tensor | None = None,  # (M, R)
    by: float = 1.0,
    gate: int = 0,
) -> Tensor:
    """Normalised inputs times weights, side by side, (M, R); or a gate times what it opens.

    Args:
        residual, by: what products are added to, and what they are multiplied by before.
        gate: 1 for SiLU, 2 for GELU (tanh), of the first product, times the second; 0 for none.
    """
    weights, biases = zip(*modules, strict=True)
    bits = weights[0].bits if isinstance(weights[0], Rounded) else 0
    block, warps = (32, 2) if bits else (16, 4)  # rows of a weight in one program
    if bits and norm is not None:  # it would be most of the work beside so few bytes
        x, norm = norms(x, norm), None
    data, steps = zip(*map(_read, weights), strict=True)
    counts = [*map(len, data), 0, 0][:3]
    width = counts[0] if gate else sum(counts)
    out = x.new_empty(len(x), width)  # (M, R)
    blocks = sum(-(-count // block) for count in counts[: 1 if gate else 3])
    rest = [None] * (3 - len(weights))
    scale, epsilon, plus = norm or (None, 0.0, 0.0)
    _product[-(-len(x) // 16), blocks](
        x, scale, *data, *rest, *steps, *rest, *biases, *rest, residual, out, len(x), x.shape[1],
        -(-x.shape[1] // GROUP), *counts, epsilon, plus, by, bits, gate, block,
        512 // x.dtype.itemsize, num_warps=warps,
    )  # fmt: skip
    return out


def norms(x: Tensor, norm: Norm, residual: Tensor | None = None, by: float = 1.0) -> Tensor:
    """The norms of tokens (M, H), or `residual` plus `by` times them."""
    out, width = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    _normalised[(len(x),)](x, norm[0], residual, out, x.shape[1], *norm[1:], by, width)
    return out


def _read(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """The numbers of a weight, and the steps between rounded ones."""
    if isinstance(weight, Rounded):
        return weight.data.view(torch.int8), weight.scales
    return weight, None
