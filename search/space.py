"""The spaces of drafts that can be searched: what runs of a model, and in which precision.

A draft is an int, the `mask`. For a model of L layers, bit i < 2L says that sublayer i (2 * layer
for attention, 2 * layer + 1 for the MLP) is skipped, bit 2L + i that it runs in low precision, and
bit 4L that the head does. Above these are bits for numbers of experts, fewer than the model's, for
windows of attention, and for draft vocabularies; at most one of each is set.

A space consists of switches. Each determines its own few bits, so that masks and parameters
correspond one to one: no two trials of a study with different parameters mean the same draft
(except if no MLP runs, which contains the experts, or no attention, which has windows).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from itertools import count
from operator import or_
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution

from layerskip.config.skips import LowPrecision, SkipConfig
from layerskip.files.schema import integer

KINDS = ("exit", "layer", "sublayer")
EXACT, LOW, OUT, ALL = "exact", "low", "out", "all"
"""Choices of a switch with three; a switch with two has False and True (skipped)."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The skip configs that a search may propose for a model of `num_layers` layers.

    Skipping nothing belongs to every space. `exit`: early exits only. `layer`: any whole layers.
    `sublayer`: attention and MLP blocks separately. Unless `allow_ends`, the first layer always
    runs and the last is skipped only as a whole, so that every early exit is in every space. With
    `bits`, everything that runs may also run in low precision, including the first layer and the
    head; an `exit` does so as a whole. If layers read other layers' keys, exits before those are
    only in spaces of kind `exit`.
    """

    kind: str
    num_layers: int
    allow_ends: bool = False
    bits: Literal[8, 4] | None = None
    """Bits of low precision; None: everything that runs is exact."""
    read: tuple[int, ...] = ()
    """Layers whose keys other layers read: only an `exit` skips their attention."""
    experts: tuple[int, ...] = ()
    """Numbers of a mixture's experts that a draft may run instead of the model's; in an `exit`
    space it runs as many as the model."""
    windows: tuple[int, ...] = ()
    """Windows that a draft may have (`SkipConfig.window`); in an `exit` space it has none."""
    vocabularies: tuple[int, ...] = ()
    """Numbers of tokens that a draft may be limited to, the most frequent ones."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"space must be one of {', '.join(KINDS)}, got {self.kind!r}")
        integer(1)(self.num_layers, "num_layers")
        if self.bits is not None:
            LowPrecision(bits=self.bits)  # raises for other values

    @cached_property
    def switches(self) -> dict[str, dict[Any, int]]:
        """By parameter name, the choices and the bits of each, in layer order."""
        numbers: dict[str, dict[Any, int]] = {
            name: {ALL: 0, **{str(number): bit for number, bit in bits.items()}}
            for name, bits in self.numbers.items()
            if bits
        }
        if self.kind == "exit":
            exits = {str(e): self.exit_mask(e) for e in range(self.num_layers, 0, -1)}
            low = {f"{name} {LOW}": self.low_mask(m) for name, m in exits.items() if self.bits}
            return {"exit": exits | low} | numbers
        last = self.num_layers - 1
        switches: dict[str, dict[Any, int]] = {}
        for layer in range(self.num_layers):
            attention, mlp = 1 << 2 * layer, 2 << 2 * layer
            parts = {f"attention.{layer}": attention, f"mlp.{layer}": mlp}
            if self.kind == "layer" or (layer == last and not self.allow_ends):
                parts = {f"layer.{layer}": attention | mlp}
            stays = layer == 0 and not self.allow_ends
            for name, part in parts.items():
                needed = layer in self.read and bool(part & attention)
                out = {} if stays or needed else {OUT if self.bits else True: part}
                if self.bits:
                    switches[name] = {EXACT: 0, LOW: part << 2 * self.num_layers, **out}
                elif out:
                    switches[name] = {False: 0, **out}
        if self.bits:
            switches["head"] = {EXACT: 0, LOW: self.low_head}
        return switches | numbers

    @cached_property
    def numbers(self) -> dict[str, dict[int, int]]:
        """For experts, window and vocabulary: by number, the mask that sets only that number."""
        named = {"experts": self.experts, "window": self.windows, "vocabulary": self.vocabularies}
        bits = (self.low_head << place for place in count(1))
        masks = {name: dict(zip(numbers, bits, strict=False)) for name, numbers in named.items()}
        return masks | ({"experts": {}, "window": {}} if self.kind == "exit" else {})

    def number(self, name: str, mask: int) -> int | None:
        """The number that a mask chooses for `name`; None: all."""
        return next((number for number, bit in self.numbers[name].items() if mask & bit), None)

    @property
    def leaving_out(self) -> list[int]:
        """For switches that can skip something, the mask that does, in layer order."""
        return [value for c in self.switches.values() for k, value in c.items() if k in (OUT, True)]

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's form of the parameters: the choices of every switch."""
        return {
            name: CategoricalDistribution(tuple(choices)) for name, choices in self.switches.items()
        }

    @cached_property
    def size(self) -> int:
        """The number of configs in the space, computed without listing them."""
        every = math.prod(map(len, self.switches.values()))
        if sum(self.leaving_out) < self._every:
            return every
        # If nothing runs there is no draft, whatever the head, the experts and the window.
        kept = [c for c in self.switches.values() if OUT not in c and True not in c]
        return every - math.prod(map(len, kept))

    def __contains__(self, mask: int) -> bool:
        return self._choices(mask) is not None

    def _choices(self, mask: int) -> dict[str, Any] | None:
        """The choice of each switch; None if nothing runs, or a mask has other bits."""
        if self.left_out(mask) == self._every:
            return None
        chosen = {}
        for name, choices in self.switches.items():
            bits = reduce(or_, choices.values())
            labels = {value: label for label, value in choices.items()}
            if mask & bits not in labels:
                return None
            chosen[name] = labels[mask & bits]
            mask &= ~bits
        return None if mask else chosen

    @property
    def _every(self) -> int:
        return (1 << 2 * self.num_layers) - 1

    @property
    def low_head(self) -> int:
        """The mask with only the head in low precision."""
        return 1 << 4 * self.num_layers

    def left_out(self, mask: int) -> int:
        """The bits of a mask that skip something."""
        return mask & self._every

    def exit_mask(self, exit_layer: int) -> int:
        """The mask of an early exit; skips nothing for `num_layers`."""
        return (1 << 2 * self.num_layers) - (1 << 2 * exit_layer)

    def low_mask(self, mask: int) -> int:
        """The same skipped parts, with everything that runs in low precision."""
        out = self.left_out(mask)
        return out | (self._every ^ out) << 2 * self.num_layers | self.low_head

    def mask(self, skip: SkipConfig) -> int:
        """The mask of a config, whether or not it is in the space.

        Raises:
            ValueError: it has another model or precision than the space, or a trained module.
        """
        skip = skip.resolve(self.num_layers)
        if skip.low is not None and self.bits is not None:
            if skip.low.bits != self.bits:
                raise ValueError(f"it runs sublayers in {skip.low.bits} bits, not in {self.bits}")
            if skip.low.head_bits not in (None, self.bits):
                raise ValueError(
                    f"it runs the head in {skip.low.head_bits} bits, not in {self.bits}"
                )
        if skip.trained is not None:
            raise ValueError(f"it is a trained draft of kind {skip.trained.kind}; leave it out")
        mask = sum(1 << sublayer for sublayer in skip.skipped())
        mask |= sum(1 << sublayer for sublayer in skip.rounded()) << 2 * self.num_layers
        mask |= self.low_head if skip.low is not None and skip.low.head else 0
        for name, number, words in (
            ("experts", skip.experts, "it runs {} experts"),
            ("window", skip.window, "it sees {} slots"),
        ):
            fewer = self.numbers[name]
            if number is not None and number not in fewer:
                allowed = f"{', '.join(map(str, fewer))} or all" if fewer else "all only"
                raise ValueError(f"{words.format(number)}, and the space has {allowed}")
            mask |= 0 if number is None else fewer[number]
        return mask

    def skip_config(self, mask: int) -> SkipConfig:
        """The resolved config of a mask, for all tokens."""

        def layers(bits: int) -> tuple[int, ...]:
            return tuple(layer for layer in range(self.num_layers) if bits >> 2 * layer & 1)

        rounded = mask >> 2 * self.num_layers
        skip = SkipConfig(
            attention=layers(mask),
            mlp=layers(mask >> 1),
            low=LowPrecision(
                bits=self.bits or 8,
                attention=layers(rounded),
                mlp=layers(rounded >> 1),
                head=bool(mask & self.low_head),
            ),
            experts=self.number("experts", mask),
            window=self.number("window", mask),
        )
        return skip.resolve(self.num_layers)

    def params(self, mask: int) -> dict[str, Any]:
        """The parameters of a mask; ValueError if it is not in the space."""
        if (choices := self._choices(mask)) is None:
            raise ValueError(f"{self.skip_config(mask)} is not in {self}")
        return choices

    def from_params(self, params: Mapping[str, Any]) -> int:
        """The mask of a trial's parameters, which may be a set where nothing runs."""
        return sum(choices[params[name]] for name, choices in self.switches.items())

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        given = {name: each for name, each in asdict(self).items() if each not in (None, ())}
        return {name: [*v] if isinstance(v, tuple) else v for name, v in given.items()}

    def __str__(self) -> str:
        words = f"the {self.kind} space of {self.num_layers} layers"
        if self.bits:
            words += f", in {self.bits} bits or exactly"
        for name, numbers in self.numbers.items():
            words += f", {name} {', '.join(map(str, numbers))} or all" if numbers else ""
        return f"{words}, ends free" if self.allow_ends else words
