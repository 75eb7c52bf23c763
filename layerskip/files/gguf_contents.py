"""GGUF files: their metadata, and the location of their tensors.

A file is not trusted. All counts, lengths and offsets are compared with its size before anything is
read or allocated for them. Big-endian files and version 1 are refused.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Numbers and bytes of a block, for each supported tensor format."""

_FORMATS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"}
_FORMATS |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16"}
_REFUSED = {10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
_REFUSED |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0"}
_REFUSED |= {35: "TQ2_0", 39: "MXFP4"}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_KEPT = 4096  # maximum number of elements of an array that are read


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        shape: as in torch, rows first.
        format: a key of `BLOCKS`.
        offset, nbytes: its location in the file.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Contents:
    """The contents of a file.

    Attributes:
        metadata: by key. For arrays of strings and long arrays, the length, unless asked for.
        data: the file, mapped; changes stay in memory.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    data: mmap.mmap


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, whole: Collection[str]) -> None:
        self.path, self.data, self.whole, self.at = path, data, whole, 0

    def refusal(self, words: str) -> ValueError:
        return ValueError(f"{self.path} is not a readable GGUF file: {words}")

    def skip(self, count: int, what: str) -> int:
        """Skip `count` bytes; returns the position where they begin."""
        start, left = self.at, len(self.data) - self.at
        if count > left:
            raise self.refusal(
                f"{what} at byte {start} needs {count:,} bytes, and {left:,} are left; it may be "
                "cut off: download it again"
            )
        self.at += count
        return start

    def count(self, least: int, what: str) -> int:
        """Read a number of items that take at least `least` bytes each."""
        number: int = self.number("Q", what)
        if number * least > len(self.data) - self.at:
            raise self.refusal(f"it claims {number:,} {what}, more than its bytes can hold")
        return number

    def number(self, form: str, what: str) -> Any:
        at = self.skip(struct.calcsize(form), what)
        return struct.unpack_from(f"<{form}", self.data, at)[0]

    def string(self, what: str) -> str:
        length = self.count(1, f"bytes of {what}")
        at = self.skip(length, what)
        try:
            return self.data[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise self.refusal(f"{what} at byte {at} is not UTF-8") from error

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            raise self.refusal(f"{key} has values of an unknown kind, {kind}")
        of = self.number("I", key)
        if of == _STRING:
            count = self.count(8, f"strings of {key}")
            if key in self.whole:
                return [self.string(key) for _ in range(count)]
            for _ in range(count):
                self.skip(self.count(1, f"bytes of {key}"), key)
            return count
        if of not in _SCALARS:
            raise self.refusal(f"{key} is an array of an unknown kind, {of}")
        width = struct.calcsize(_SCALARS[of])
        count = self.count(width, f"numbers of {key}")
        at = self.skip(count * width, key)
        if count > _KEPT and key not in self.whole:
            return count
        return list(struct.unpack_from(f"<{count}{_SCALARS[of]}", self.data, at))

    def named(self, count: int, what: str, read: Callable[[str], Any]) -> dict[str, Any]:
        """Read items with distinct names."""
        things: dict[str, Any] = {}
        for _ in range(count):
            name = self.string(f"the name of {what}")
            if name in things:
                raise self.refusal(f"it has {name} twice")
            things[name] = read(name)
        return things

    def entry(self, name: str) -> tuple[tuple[int, ...], str, int, int]:
        """Read shape, format, offset among the tensors, and bytes."""
        dimensions = self.number("I", name)
        if dimensions > _MOST_DIMENSIONS:
            raise self.refusal(f"{name} has {dimensions:,} dimensions, more than 4")
        shape = tuple(self.number("Q", name) for _ in range(dimensions))[::-1]
        kind, offset = self.number("I", name), self.number("Q", name)
        if kind not in _FORMATS:
            form = _REFUSED.get(kind, f"number {kind}")
            raise ValueError(
                f"{self.path}: {name} is in format {form}, which is not supported; supported are "
                f"{', '.join(BLOCKS)}; quantise the model to one of these, such as Q4_K_M"
            )
        form = _FORMATS[kind]
        numbers, nbytes = BLOCKS[form]
        if not shape or 0 in shape or shape[-1] % numbers:
            raise self.refusal(f"{name} of shape {shape} does not fit blocks of {numbers} numbers")
        return shape, form, offset, math.prod(shape) // numbers * nbytes


def read_gguf(path: Path, whole: Collection[str] = ()) -> Contents:
    """Read a file's metadata, and map it without reading any tensor.

    Args:
        whole: keys of arrays that are read completely.

    Raises:
        ValueError: it is not a GGUF file, is incomplete or one part of several, contradicts itself,
            or uses a format that is not supported.
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise ValueError(f"{path} is not a GGUF file: it is empty") from error
    reader = _Reader(path, data, whole)
    if data[: reader.skip(4, "its first word") + 4] != b"GGUF":
        raise reader.refusal("its first four bytes are not GGUF")
    version = reader.number("I", "its version")
    if version not in (2, 3):
        raise reader.refusal(f"its version must be 2 or 3, of a little-endian file, got {version}")
    tensor_count, key_count = reader.count(24, "tensors"), reader.count(13, "metadata keys")
    metadata = reader.named(
        key_count, "a key", lambda key: reader.value(reader.number("I", key), key)
    )
    if (parts := metadata.get("split.count", 0)) not in (0, 1):
        number = metadata.get("split.no")
        number = number + 1 if isinstance(number, int) else "?"
        raise ValueError(
            f"{path} is part {number} of {parts} of a split file; join the parts with llama.cpp's "
            "llama-gguf-split --merge FIRST-PART OUTPUT, and give that file"
        )
    entries = reader.named(tensor_count, "a tensor", reader.entry)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise reader.refusal(f"general.alignment must be in 1..{1 << 20}, got {alignment!r}")
    start = -(-reader.at // alignment) * alignment
    tensors = {}
    for name, (shape, form, offset, nbytes) in entries.items():
        if start + offset + nbytes > len(data):
            raise reader.refusal(
                f"{name} should lie at bytes {start + offset:,} to {start + offset + nbytes:,} of "
                f"{len(data):,}; it may be cut off: download it again"
            )
        tensors[name] = Entry(name, shape, form, start + offset, nbytes)
    return Contents(path, metadata, tensors, data)
