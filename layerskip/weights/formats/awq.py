"""AWQ: 4-bit integers in words along the outputs, in the order of its matrix kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerskip.weights.formats.codes import Codes, Read, unpacked_codes, width_of
from layerskip.weights.formats.tensors import FLOATS, Tensors

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # position of each output in a word


def awq(config: dict[str, Any]) -> Read:
    """Return a function that reads the matrices of a checkpoint.

    Raises:
        ValueError: the format is not supported.
    """
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm" or config.get("bits", 4) != 4:
        raise ValueError(
            f"AWQ version {version!r} with {config.get('bits', 4)} bits is not supported; "
            "supported is 'gemm' with 4 bits"
        )

    def read(tensors: Tensors, path: str, rows: int, columns: int) -> Codes | None:
        if f"{path}.qweight" not in tensors:
            return None
        words = tensors.take(f"{path}.qweight", (columns, rows // 8), torch.int32)
        zeros = tensors.take(f"{path}.qzeros", (None, rows // 8), torch.int32)
        scales = tensors.take(f"{path}.scales", (len(zeros), rows), *FLOATS)
        width = width_of(columns, len(scales), config.get("group_size"))
        return Codes(_transposed(words), 4, scales.T, _transposed(zeros), width)

    return read


def _transposed(words: Tensor) -> Tensor:
    """Transpose the codes (N, 8 W) in words (N, W): (8 W, N)."""
    codes = unpacked_codes(words, 4, 8 * words.shape[1]).view(len(words), -1, 8)
    return codes[:, :, _PLACES].flatten(1).T
