"""Matrices of codes in groups: their values, and their layout for native passes.

Shapes: R rows, C columns, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from layerskip.weights.formats.tensors import FLOATS, Tensors
from layerskip.weights.stored import UNIT, Stored

_POWERS = torch.float8_e8m0fnu  # of two
_SUFFIXES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Codes:
    """A matrix of codes. A number is (code - zero) * scale, rounded to the dtype of the scales.

    Attributes:
        codes: (R, C), uint8 or float8_e4m3fn.
        bits: bits of a code, 4 or 8.
        scales: (R, G), in float32, bfloat16 or float16.
        zeros: (R, G), whole numbers in 0..256; None for FP8.
        width: number of columns in a group; the last group may be smaller.
        groups: (C,), the group of each column, if that is not column // width.
    """

    codes: Tensor
    bits: int
    scales: Tensor
    zeros: Tensor | None
    width: int
    groups: Tensor | None = None

    def weight(self, dtype: torch.dtype, *, packed: bool) -> Tensor:
        """Return the matrix: a `Stored` if possible and `packed` is set, otherwise its numbers.

        Raises:
            ValueError: its parts do not fit together, or a number is not finite.
        """
        rows, columns = self.codes.shape
        shape = (rows, -(-columns // self.width))
        if self.scales.shape != shape or (self.zeros is not None and self.zeros.shape != shape):
            raise ValueError(
                f"its scales and zeros must have shape {shape}, got {tuple(self.scales.shape)}"
                + ("" if self.zeros is None else f" and {tuple(self.zeros.shape)}")
            )
        if self.scales.dtype not in _SUFFIXES:
            raise ValueError(
                f"its scales must be in {', '.join(map(str, _SUFFIXES))}, got {self.scales.dtype}"
            )
        if not (self.scales.isfinite() & (self.scales != 0)).all():
            raise ValueError("a scale is zero or not finite")
        if self.codes.dtype != torch.uint8 and self.codes.float().isnan().any():
            raise ValueError("a code is NaN")
        if self.groups is not None and not ((self.groups >= 0) & (self.groups < shape[1])).all():
            raise ValueError(f"its g_idx must be in 0..{shape[1] - 1}")
        most = self.scales.float().abs().amax() * 512  # an upper bound of all numbers
        if most > torch.finfo(self.scales.dtype).max and not self.numbers().isfinite().all():
            raise ValueError("a number is not finite")
        stored = self._stored(dtype) if packed else None
        return self.numbers().to(dtype) if stored is None else stored

    def numbers(self) -> Tensor:
        """The values of the codes, (R, C), in the dtype of the scales."""
        columns = torch.arange(self.codes.shape[1])
        groups = columns // self.width if self.groups is None else self.groups.long()
        values = self.codes.to(self.scales.dtype)
        if self.zeros is not None:
            values = values - self.zeros.to(self.scales.dtype)[:, groups]
        return values * self.scales[:, groups]

    def _stored(self, dtype: torch.dtype) -> Stored | None:
        """The layout for native passes; None if groups are unequal, extreme or not whole units."""
        columns = self.codes.shape[1]
        least, most = self.scales.float().abs().aminmax()
        if least < 2.0**-100 or most > 2.0**100:  # products would round differently
            return None
        if self.width % UNIT or columns % self.width:
            return None
        codes, order = self.codes, None
        even = torch.arange(columns, dtype=torch.int32) // self.width
        if self.groups is not None and not torch.equal(self.groups.int(), even):
            order = _order(self.groups.int().numpy().tobytes())
            if not torch.equal(self.groups.int()[order], even):
                return None
            codes = codes[:, order]
        if self.bits == 4:
            halves = codes.unflatten(1, (-1, 2, UNIT // 2))
            codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)  # (R, C / 2)
        parts = [codes, self.scales]
        if self.zeros is not None:  # all formats except FP8
            parts.append(self.zeros.to(self.scales.dtype))
        data = torch.cat([_bytes(each) for each in parts], 1)
        kind = "G" if self.codes.dtype == torch.uint8 else "F"
        form = f"{kind}{self.bits}-{_SUFFIXES[self.scales.dtype]}"
        return Stored(data, form, columns, dtype, self.width, order)


Read = Callable[[Tensors, str, int, int], Codes | None]
"""Reads a linear layer's weight (rows, columns) by its path; None if it is not packed."""


@lru_cache(maxsize=16)
def _order(groups: bytes) -> Tensor:
    """Columns ordered by group, (C,) int32; one tensor shared by all matrices with equal groups."""
    each = torch.frombuffer(bytearray(groups), dtype=torch.int32)
    return torch.argsort(each, stable=True).int()


def _bytes(rows: Tensor) -> Tensor:
    return rows.reshape(-1).contiguous().view(torch.uint8).view(len(rows), -1)


def unpacked_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Extract 4- or 8-bit codes from words, lowest bits first: (N, W) int32 to (N, count)."""
    codes = _bytes(words)  # (N, 4 W)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)  # (N, 8 W)
    return codes[:, :count]


def bits_of(words: int, count: int) -> int:
    """The number of bits per code if `words` 32-bit words contain `count` codes.

    Raises:
        ValueError: it is neither 4 nor 8.
    """
    for bits in (4, 8):
        if words == -(-count * bits // 32):
            return bits
    raise ValueError(f"{count} codes in {words} words have neither 4 nor 8 bits each")


def width_of(columns: int, groups: int, size: int | None = None) -> int:
    """The number of columns in a group: `size` if that gives `groups` groups.

    Raises:
        ValueError: the groups do not divide the columns.
    """
    if size and size > 0 and -(-columns // size) == groups:
        return size
    if groups < 1 or columns % groups:
        raise ValueError(f"{groups} groups do not divide {columns} columns")
    return columns // groups


def spread(
    scales: Tensor, rows: int, columns: int, block: Sequence[int] | None = None
) -> tuple[Tensor, int]:
    """Expand scales to rows' groups, (R, G); also returns the number of columns in a group.

    Args:
        scales: one for all, one per row (R,), per group (R, G), or per block.
        block: rows and columns of a block.

    Raises:
        ValueError: they have another shape.
    """
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, 1), columns
    if block and tuple(scales.shape) == (-(-rows // block[0]), -(-columns // block[1])):
        return scales.repeat_interleave(block[0], 0)[:rows], block[1]
    if len(scales) != rows or scales.dim() > 2:
        raise ValueError(f"its scales {tuple(scales.shape)} fit no matrix ({rows}, {columns})")
    scales = scales.view(rows, -1)
    return scales, width_of(columns, scales.shape[1])


def byte_codes(
    tensors: Tensors,
    names: Sequence[str],
    rows: int,
    columns: int,
    block: Sequence[int] | None = None,
) -> Codes:
    """A matrix with one code per byte: int8, or FP8 (E4M3).

    Args:
        names: of its codes, its scales and its zeros, which are optional.
        block: rows and columns of a block, if there is one scale per block.

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    codes = tensors.take(names[0], (rows, columns), torch.int8, torch.float8_e4m3fn)
    scales = tensors.take(names[1], None, *FLOATS, _POWERS)
    scales = scales.float() if scales.dtype == _POWERS else scales
    scales, width = spread(scales, rows, columns, block)
    zeros = None
    if codes.dtype == torch.int8:
        codes = codes.view(torch.uint8) ^ 128
        zeros = torch.full(scales.shape, 128, dtype=torch.int16)
    if names[2] in tensors:
        given = tensors.take(names[2], None, torch.int8, torch.float8_e4m3fn)
        if zeros is not None:
            zeros = zeros + spread(given.short(), rows, columns, block)[0]
        elif given.float().any():
            raise ValueError(f"{names[2]} must be zero with FP8")
    return Codes(codes, 8, scales, zeros, width)
