"""compressed-tensors: 4- or 8-bit integers, packed in words or one per byte, and FP8 (E4M3)."""

from __future__ import annotations

from typing import Any

import torch

from layerskip.weights.formats.codes import Codes, Read, bits_of, byte_codes, spread, unpacked_codes
from layerskip.weights.formats.tensors import FLOATS, Tensors

FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
"""Supported formats; "mixed-precision" has one of the others for each group of modules."""


def compressed(config: dict[str, Any]) -> Read:
    """Return a function that reads the matrices of a checkpoint.

    Raises:
        ValueError: the format is not supported.
    """
    groups = [*(config.get("config_groups") or {}).values()]
    for form in (config.get("format"), *(each.get("format") for each in groups)):
        if form not in (*FORMATS, "mixed-precision", None):
            raise ValueError(
                f"format {form!r} of compressed-tensors is not one of {', '.join(FORMATS)}"
            )
    sparse = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
    if config.get("transform_config") or sparse:
        raise ValueError("sparse or transformed compressed-tensors weights are not supported")
    blocks = [(each.get("weights") or {}).get("block_structure") for each in groups]
    block = next(filter(None, blocks), None)

    def read(tensors: Tensors, path: str, rows: int, columns: int) -> Codes | None:
        if f"{path}.weight_packed" in tensors:
            return _packed(tensors, path, rows, columns)
        names = [f"{path}.weight{part}" for part in ("", "_scale", "_zero_point")]
        return byte_codes(tensors, names, rows, columns, block) if names[1] in tensors else None

    return read


def _packed(tensors: Tensors, path: str, rows: int, columns: int) -> Codes:
    shape = tensors.take(f"{path}.weight_shape", (2,), torch.int64, torch.int32).tolist()
    if shape != [rows, columns]:
        raise ValueError(f"its weight_shape must be {[rows, columns]}, got {shape}")
    words = tensors.take(f"{path}.weight_packed", (rows, None), torch.int32)
    bits = bits_of(words.shape[1], columns)
    scales = tensors.take(f"{path}.weight_scale", None, *FLOATS)
    scales, width = spread(scales, rows, columns)
    zero, order = f"{path}.weight_zero_point", f"{path}.weight_g_idx"
    zeros = torch.full(scales.shape, 1 << bits - 1, dtype=torch.int16)
    if zero in tensors:  # words contain several rows
        given = tensors.take(zero, (-(-rows * bits // 32), scales.shape[1]), torch.int32)
        zeros = unpacked_codes(given.T, bits, rows).T  # (R, G)
    groups = None
    if order in tensors:
        groups = tensors.take(order, (columns,), torch.int32, torch.int64)
        groups = None if (groups == -1).all() else groups  # -1: never set
    return Codes(unpacked_codes(words, bits, columns), bits, scales, zeros, width, groups)
