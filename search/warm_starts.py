"""Sets worth trying first: early exits, evenly spaced ones, low precision, a person's own."""

from __future__ import annotations

from collections.abc import Mapping

from layerskip.config import SkipConfig

from .space import Space

SHARES = (0.2, 0.35, 0.5)
"""Shares of a space's switches that evenly spaced sets leave out."""
LOW_EXITS = (0.125, 0.5, 0.8)
"""Shares of the layers that early exits in low precision run."""


def standard(space: Space) -> dict[str, int]:
    """Names and masks of skipping nothing, every early exit and evenly spaced sets.

    With low precision also all in it, without the head, behind exact halves, and at some exits (in
    an `exit` space at all of them). For a mixture every number of experts, for long texts every
    window, in low precision where there is one. Each mask is under its first name.
    """
    masks = {"none": 0}
    everything = space.low_mask(0) if space.bits else 0
    masks |= {f"experts-{n}": everything | bit for n, bit in space.fewer_experts.items()}
    masks |= {f"window-{n}": everything | bit for n, bit in space.narrower.items()}
    exits = range(space.num_layers - 1, 0, -1)
    if space.bits:
        bits = f"{space.bits}-bits"
        first = everything & (1 << 2 * space.num_layers + space.num_layers // 2 * 2) - 1
        masks |= {bits: everything, f"{bits}-whole-head": everything & ~space.low_head}
        masks |= {f"{bits}-second-half": everything & ~first}
        depths = {round(share * space.num_layers) for share in LOW_EXITS} - {0}
        low_exits = exits if space.kind == "exit" else sorted(depths, reverse=True)
        masks |= {f"{bits}-exit-{e}": space.low_mask(space.exit_mask(e)) for e in low_exits}
    masks |= {f"exit-{layer}": space.exit_mask(layer) for layer in exits}
    switches = space.leaving_out
    for count in sorted({round(share * len(switches)) for share in SHARES} - {0}):
        even = {round((i + 0.5) * len(switches) / count - 0.5) for i in range(count)}
        masks[f"even-{count}"] = sum(switches[i] for i in even)
    names: dict[int, str] = {}
    for name, mask in masks.items():
        if mask in space:
            names.setdefault(mask, name)
    return {name: mask for mask, name in names.items()}


def given(space: Space, configs: Mapping[str, SkipConfig]) -> dict[str, int]:
    """Names and masks of a person's own configs; a ValueError where the space lacks one."""
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
