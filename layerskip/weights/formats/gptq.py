"""GPTQ: 4- or 8-bit integers in words along the inputs, in both versions of the format."""

from __future__ import annotations

from typing import Any

import torch

from layerskip.weights.formats.codes import Codes, Read, bits_of, unpacked_codes, width_of
from layerskip.weights.formats.tensors import FLOATS, Tensors

FORMATS = ("gptq", "gptq_v2")
"""The first version stores zeros minus one."""


def gptq(config: dict[str, Any]) -> Read:
    """Return a function that reads the matrices of a checkpoint.

    Raises:
        ValueError: the format is not supported.
    """
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if form not in FORMATS:
        raise ValueError(f"format {form!r} of GPTQ is not one of {', '.join(FORMATS)}")

    def read(tensors: Tensors, path: str, rows: int, columns: int) -> Codes | None:
        if f"{path}.qweight" not in tensors:
            return None
        words = tensors.take(f"{path}.qweight", (None, rows), torch.int32)
        bits = bits_of(len(words), columns)
        zeros = tensors.take(f"{path}.qzeros", (None, -(-rows * bits // 32)), torch.int32)
        if form == "gptq":  # added to whole words, so an overflow carries to the next code
            zeros = zeros + (0x11111111 if bits == 4 else 0x01010101)
        scales = tensors.take(f"{path}.scales", (len(zeros), rows), *FLOATS)
        groups = None
        if f"{path}.g_idx" in tensors:
            groups = tensors.take(f"{path}.g_idx", (columns,), torch.int32, torch.int64)
        return Codes(
            unpacked_codes(words.T, bits, columns),
            bits,
            scales.T,
            unpacked_codes(zeros, bits, rows).T,
            width_of(columns, len(scales), config.get("group_size")),
            groups,
        )

    return read
