"""FP8 (E4M3) in blocks, or with one scale per matrix, as transformers itself stores it."""

from __future__ import annotations

from typing import Any

from layerskip.model.formats.codes import Codes, Read, byte_codes
from layerskip.model.formats.tensors import Tensors


def fp8(config: dict[str, Any]) -> Read:
    """Return a function that reads the matrices of a checkpoint."""

    def read(tensors: Tensors, path: str, rows: int, columns: int) -> Codes | None:
        names = [f"{path}.weight{part}" for part in ("", "_scale_inv", "_zero_point")]
        block = config.get("weight_block_size")
        return byte_codes(tensors, names, rows, columns, block) if names[1] in tensors else None

    return read
