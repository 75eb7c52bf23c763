"""Tensors of a checkpoint's safetensors files, by name."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from layerskip.files.reading import read_file
from layerskip.library import file_of

_FILE = "model.safetensors"
_INDEX = f"{_FILE}.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Tensors:
    """The tensors of a checkpoint's safetensors files, each mapped when requested.

    Args:
        source: a folder, or a Hub repository, read from its cache, or downloaded with `fetch`.

    Attributes:
        files: the file of each tensor; empty if there are none.

    Raises:
        ValueError: the files cannot be read.
    """

    def __init__(
        self, source: str | Path, revision: str | None = None, *, fetch: bool = False
    ) -> None:
        self.files = _files(str(source), revision, fetch)
        self._opened = functools.cache(_opened)  # thousands of experts would take a while

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def tensor(self, name: str) -> Tensor:
        return self._found(name, "get_tensor")  # type: ignore[no-any-return]

    def slice(self, name: str) -> Any:
        """A tensor's shape and dtype, in the library's words."""
        return self._found(name, "get_slice")

    def _found(self, name: str, how: str) -> Any:
        try:
            return getattr(self._opened(self.files[name]), how)(name)
        except SafetensorError as error:  # an index may name the wrong file
            raise ValueError(f"cannot read {name} in {self.files[name]}: {error}") from error

    def take(self, name: str, shape: tuple[int | None, ...] | None, *dtypes: torch.dtype) -> Tensor:
        """Return a tensor in one of some dtypes.

        Args:
            shape: None as a length allows any length; None as the shape allows any shape.

        Raises:
            ValueError: it is missing, or has another shape or dtype.
        """
        if name not in self:
            raise ValueError(f"{name} is missing")
        tensor = self.tensor(name)
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


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _files(source: str, revision: str | None, fetch: bool) -> dict[str, Path]:
    index, single = (file_of(source, name, revision, fetch=fetch) for name in (_INDEX, _FILE))
    try:
        if index is not None:
            inside = json.loads(read_file(index))["weight_map"].items()
            parts = {Path(file).name for _, file in inside} if fetch else ()
            for part in parts:  # download them next to the index
                file_of(source, part, revision, fetch=fetch)
            return {name: index.parent / Path(file).name for name, file in inside}
        if single is not None:
            return dict.fromkeys(_opened(single).keys(), single)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"cannot read {index or single}: {error}") from error
    return {}
