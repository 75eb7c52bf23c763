"""The spaces that a search walks: sets of sublayers; knows no model, no trial and no value.

A set of skipped sublayers is an int, the `mask`: bit i is sublayer i (2 * layer for attention,
2 * layer + 1 for the MLP). A `layer` or `sublayer` space is made of switches, each of which leaves
out its own few sublayers, so that masks and parameters stand one to one: no two trials of a study
with different parameters mean the same draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from layerskip.config import SkipConfig
from layerskip.files.schema import integer, optional

KINDS = ("exit", "layer", "sublayer")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The skip configs that a search may propose for a model of `num_layers` layers.

    Skipping nothing belongs to every space. `exit`: early exits only. `layer`: any whole layers.
    `sublayer`: attention and MLP blocks one by one. Unless `allow_ends`, the first layer always
    runs and the last is left out only whole: a draft without it is an early exit (of fewer or more
    layers), perhaps with gaps, and every early exit is in every space.

    Raises:
        TypeError, ValueError: a field has the wrong type or is out of range.
    """

    kind: str
    num_layers: int
    allow_ends: bool = False
    budget: int | None = None
    """Sublayers left out at most, 1 or more; None for any number."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"space must be one of {', '.join(KINDS)}, got {self.kind!r}")
        integer(1)(self.num_layers, "num_layers")
        optional(integer(1))(self.budget, "budget")

    @cached_property
    def switches(self) -> dict[str, int]:
        """Parameter names and the mask that each leaves out, in layer order; none for `exit`."""
        last = self.num_layers - 1
        found = {}
        for layer in range(self.num_layers):
            attention, mlp = 1 << 2 * layer, 2 << 2 * layer
            if self.kind == "exit" or (layer == 0 and not self.allow_ends):
                continue
            if self.kind == "layer" or (layer == last and not self.allow_ends):
                found[f"layer.{layer}"] = attention | mlp
            else:
                found |= {f"attention.{layer}": attention, f"mlp.{layer}": mlp}
        return found

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's form of the parameters: True where a switch leaves its sublayers out.

        An `exit` space has the one parameter `exit`, from 1 to `num_layers` (skips nothing).
        """
        if self.kind == "exit":
            return {"exit": IntDistribution(1, self.num_layers)}
        return {name: CategoricalDistribution((False, True)) for name in self.switches}

    @cached_property
    def size(self) -> int:
        """How many configs the space has, counted without listing them."""
        if self.kind == "exit":
            return sum(1 for _ in self.enumerate())
        counts = {0: 1}  # sublayers left out: sets that leave out so many
        for mask in self.switches.values():
            for skipped, sets in sorted(counts.items(), reverse=True):
                more = skipped + mask.bit_count()
                counts[more] = counts.get(more, 0) + sets
        most = min(2 * self.num_layers - 1, self.budget or 2 * self.num_layers)
        return sum(sets for skipped, sets in counts.items() if skipped <= most)

    def enumerate(self) -> Iterator[int]:
        """Every mask of the space once, those of few switches first."""
        if self.kind == "exit":
            masks = (self.exit_mask(e) for e in range(self.num_layers, 0, -1))
            yield from (mask for mask in masks if mask in self)
            return
        switches = self.switches.values()
        for count in range(len(switches) + 1):
            for chosen in combinations(switches, count):
                if sum(chosen) in self:  # disjoint, so that the sum is the union
                    yield sum(chosen)

    def __contains__(self, mask: int) -> bool:
        if not 0 <= mask < (1 << 2 * self.num_layers) - 1:  # all sublayers left out is no draft
            return False
        if self.budget is not None and mask.bit_count() > self.budget:
            return False
        if self.kind == "exit":
            return mask in {self.exit_mask(e) for e in range(1, self.num_layers + 1)}
        return sum(switch for switch in self.switches.values() if mask & switch == switch) == mask

    def exit_mask(self, exit_layer: int) -> int:
        """The mask of an early exit; of skipping nothing for `num_layers`."""
        return (1 << 2 * self.num_layers) - (1 << 2 * exit_layer)

    def mask(self, skip: SkipConfig) -> int:
        """The mask of a config, whether the space holds it or not; ValueError for another model."""
        return sum(1 << sublayer for sublayer in skip.skipped(self.num_layers))

    def skip_config(self, mask: int) -> SkipConfig:
        """The resolved config that leaves out the sublayers of `mask`."""
        layers = range(self.num_layers)
        return SkipConfig(
            attention=tuple(layer for layer in layers if mask >> 2 * layer & 1),
            mlp=tuple(layer for layer in layers if mask >> 2 * layer & 2),
        ).resolve(self.num_layers)

    def params(self, mask: int) -> dict[str, Any]:
        """The parameters of a mask that the space holds.

        Raises:
            ValueError: the space does not hold it.
        """
        if mask not in self:
            raise ValueError(f"{self.skip_config(mask)} is not in {self}")
        if self.kind == "exit":
            return {"exit": self.num_layers - mask.bit_count() // 2}
        return {name: bool(mask & switch) for name, switch in self.switches.items()}

    def from_params(self, params: Mapping[str, Any]) -> int:
        """The mask of a trial's parameters; those that the space does not know do not count.

        Parameters may name a set that the space does not hold: over the budget, say.
        """
        if self.kind == "exit":
            return self.exit_mask(params["exit"])
        return sum(switch for name, switch in self.switches.items() if params[name])

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; equal dicts are equal spaces."""
        return asdict(self)

    def __str__(self) -> str:
        words = f"the {self.kind} space of {self.num_layers} layers"
        if self.allow_ends:
            words += ", ends free"
        return words if self.budget is None else f"{words}, at most {self.budget} sublayers"
