"""Formats with one code per byte, as transformers saves them: FP8 (E4M3), and torchao's.

FP8 has a scale per block or per matrix. torchao has integers of up to 8 bits, and FP8.
"""

from __future__ import annotations

import re
from typing import Any

from layerskip.weights.formats.codes import Codes, Read, byte_codes
from layerskip.weights.formats.tensors import Tensors


def fp8(config: dict[str, Any]) -> Read:
    """Return a function that reads the matrices of a checkpoint."""

    def read(tensors: Tensors, path: str, rows: int, columns: int) -> Codes | None:
        names = [f"{path}.weight{part}" for part in ("", "_scale_inv", "_zero_point")]
        block = config.get("weight_block_size")
        return byte_codes(tensors, names, rows, columns, block) if names[1] in tensors else None

    return read


def torchao(config: dict[str, Any]) -> Read:
    """Return a function that reads the matrices of a checkpoint.

    Raises:
        ValueError: its 4-bit weights are packed for one kind of device.
    """
    if re.search("int4_?weight", str(config.get("quant_type")), re.IGNORECASE):
        raise ValueError(
            "torchao's 4-bit weights are packed for one kind of device, and are not supported; "
            "supported are its 8-bit integers (Int8WeightOnlyConfig, IntxWeightOnlyConfig) and FP8"
        )

    def read(tensors: Tensors, path: str, rows: int, columns: int) -> Codes | None:
        names = [f"{path}._weight_{part}" for part in ("qdata", "scale", "zero_point")]
        return byte_codes(tensors, names, rows, columns) if names[0] in tensors else None

    return read
