"""Tensors of a checkpoint folder, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Tensors:
    """The tensors of a folder's safetensors files, each mapped when requested."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            names = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise ValueError(f"it needs a file {name}, which is not there")
        self._files: dict[str, Any] = {}
        for name in names:
            file: Any = safe_open(folder / name, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, shape: tuple[int | None, ...] | None, *dtypes: torch.dtype) -> Tensor:
        """Return a tensor in one of some dtypes.

        Args:
            shape: None as a length allows any length; None as the shape allows any shape.

        Raises:
            ValueError: it is missing, or has another shape or dtype.
        """
        if name not in self._files:
            raise ValueError(f"{name} is missing")
        tensor: Tensor = self._files[name].get_tensor(name)
        there = tuple(tensor.shape)
        wanted = there if shape is None else shape
        fits = len(wanted) == len(there)
        if not fits or any(a not in (None, b) for a, b in zip(wanted, there, strict=True)):
            sizes = ", ".join("any" if each is None else str(each) for each in wanted)
            raise ValueError(f"{name} must have shape ({sizes}), got {there}")
        if tensor.dtype not in dtypes:
            raise ValueError(
                f"{name} must be in {' or '.join(map(str, dtypes))}, got {tensor.dtype}"
            )
        return tensor
