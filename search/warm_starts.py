"""The first sets of a search, which are tried before a sampler proposes any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerskip.config.skips import SkipConfig
from layerskip.search.space import Space

WARM_STARTS = 10
"""Maximum number of sets to try before a sampler proposes one, besides the user's own."""
DEPTHS = (0.5, 0.25, 0.75)
"""Shares of the layers for early exits among the first sets."""
SHARES = (0.1, 0.25, 0.5)
"""Shares of the switches that the first sets skip, starting with the least influential."""


def warm_starts(space: Space, influence: Sequence[float]) -> dict[str, int]:
    """Names and masks of the sets to try first, at most WARM_STARTS.

    They are: everything in low precision, with every window and number of experts; some early
    exits; and sets without the least influential sublayers, exact and in low precision.
    """
    everything = space.low_mask(0) if space.bits else 0
    bits = f"{space.bits}-bits"
    masks = {bits: everything}
    masks |= {f"window-{n}": everything | bit for n, bit in space.numbers["window"].items()}
    masks |= {f"experts-{n}": everything | bit for n, bit in space.numbers["experts"].items()}
    switches = sorted(
        space.leaving_out,
        key=lambda mask: sum(value for n, value in enumerate(influence) if mask >> n & 1),
    )
    for depth, share in zip(DEPTHS, SHARES, strict=True):
        exit_layer = min(space.num_layers - 1, max(1, round(depth * space.num_layers)))
        count = max(1, round(share * len(switches)))
        for name, mask in (
            (f"exit-{exit_layer}", space.exit_mask(exit_layer)),
            (f"without-{count}", sum(switches[:count])),
        ):
            if space.bits:
                masks[f"{bits}-{name}"] = space.low_mask(mask)
            masks[name] = mask
    names: dict[int, str] = {}
    for name, mask in masks.items():
        if mask and mask in space:
            names.setdefault(mask, name)
    return {name: mask for mask, name in [*names.items()][:WARM_STARTS]}


def given(space: Space, configs: Mapping[str, SkipConfig]) -> dict[str, int]:
    """Names and masks of the user's own configs; ValueError if the space lacks one."""
    masks = {}
    for name, skip in configs.items():
        try:
            masks[name] = space.mask(skip)
        except ValueError as error:
            raise ValueError(f"skip config {name}: {error}") from error
        if masks[name] not in space:
            raise ValueError(
                f"skip config {name} is not in {space}; search a wider space (sublayer, with its "
                f"ends free), or leave it out"
            )
    return masks
