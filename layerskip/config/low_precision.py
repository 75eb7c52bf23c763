"""Describes weights of a draft that differ from the model's: rounded or trained ones."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, replace
from reprlib import repr as shown
from typing import Any, Literal

from layerskip.config.registry import ALONE, REMOVED, TRAINED, TrainedKind
from layerskip.files import schema
from layerskip.files.schema import checked, index_set, integer, name_text, one_of


def _bits(value: Any, name: str) -> int:
    return int(one_of(8, 4)(integer()(value, name), name))


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecision:
    """The sublayers that a draft runs with rounded weights, and whether its head is rounded, too.

    A set contains layer indices, or is None for every sublayer that is not skipped. A trained
    module is rounded to `bits` if the head is.

    Raises:
        TypeError, ValueError: a value has the wrong type or is out of range.
    """

    bits: Literal[8, 4] = checked(_bits, 8)
    """Bits per weight: 8 with one scale per row, or 4 with one scale per 32 columns of a row."""
    attention: tuple[int, ...] | None = checked(index_set)
    mlp: tuple[int, ...] | None = checked(index_set)
    head: bool | Literal[8, 4] = checked(schema.head_bits, True)
    """Whether the head is rounded: to the same bits as the rest (True), or to this many bits."""

    def __post_init__(self) -> None:
        schema.check_fields(self)
        if self.head == self.bits:
            object.__setattr__(self, "head", True)

    @property
    def head_bits(self) -> int | None:
        if isinstance(self.head, bool):
            return self.bits if self.head else None
        return self.head

    def expanded(
        self, attention: frozenset[int], mlp: frozenset[int], num_layers: int
    ) -> LowPrecision | None:
        """Expand to explicit sets without skipped sublayers; None if nothing is rounded."""
        every = range(num_layers)
        low = replace(
            self,
            attention=tuple(set(every if self.attention is None else self.attention) - attention),
            mlp=tuple(set(every if self.mlp is None else self.mlp) - mlp),
        )
        return low if low.head or low.attention or low.mlp else None

    def words(self, kept: int | None = None) -> str:
        """Describe a resolved draft that keeps `kept` sublayers, or a module."""
        rounded = len(self.attention or ()) + len(self.mlp or ())
        bits = f"in {self.bits} bits"
        if kept in (None, rounded) and self.head_bits == self.bits:
            return bits
        sublayers = "" if kept in (None, rounded) else f"{rounded} of {kept} sublayers "
        head = "exact" if self.head_bits is None else f"in {self.head_bits}"
        return f"{sublayers}{bits}, head {head}"


def _kind(value: Any, name: str) -> str:
    if value in REMOVED:
        raise ValueError(f"{name} {shown(value)} was removed; {REMOVED[value]}")
    return str(one_of(*TRAINED)(value, name))


def _hash(value: Any, name: str) -> str:
    if len(name_text(value, name)) != 64 or set(value) - set("0123456789abcdef"):
        raise ValueError(f"{name} must be 64 hexadecimal digits, got {shown(value)}")
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Trained weights of a draft, and the model they belong to.

    They are those of a separate module that follows the draft's sublayers or replaces them.

    Raises:
        TypeError, ValueError: a value has the wrong type or is out of range.
    """

    kind: TrainedKind = checked(_kind, MISSING)
    weights: str = checked(name_text, MISSING, compare=False)
    """The safetensors file; in JSON, relative to the folder of the skip config's file."""
    hash: str = checked(_hash, MISSING)
    """SHA-256 of the file in 64 hexadecimal digits. It identifies the weights wherever they lie."""
    base: str = checked(name_text, MISSING)
    """`fingerprint` of the model they were trained for; no other model can use them."""

    @property
    def alone(self) -> bool:
        """Whether the module drafts without any of the model's sublayers."""
        return self.kind in ALONE

    @property
    def words(self) -> str:
        return TRAINED[self.kind]

    def words_with(self, low: LowPrecision | None) -> str:
        """Describe the module, with its bits and those of the head."""
        return self.words if low is None or low.head_bits is None else f"{self.words} {low.words()}"

    def __post_init__(self) -> None:
        schema.check_fields(self)
