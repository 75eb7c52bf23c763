"""Chooses sets to try: a few to begin with, then the most promising by the surrogate."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from layerskip.config import SkipConfig
from layerskip.search.space import Space, changed
from layerskip.search.surrogate import Surrogate

WARM_STARTS = 10
"""Maximum number of sets to try before a model proposes one, besides the user's own."""
DEPTHS = (0.5, 0.25, 0.75)
"""Shares of the layers for early exits among the first sets."""
SHARES = (0.1, 0.25, 0.5)
"""Shares of the switches that the first sets skip, starting with the least influential."""
CLIMBS, STEPS, PAIRED = 4, 12, 12
"""Climbs per proposal, maximum moves per climb, and number of changes also combined in pairs."""


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


def propose(
    space: Space,
    surrogate: Surrogate,
    values: Mapping[int, float],
    rough: frozenset[int],
    taken: set[int],
    draw: random.Random,
) -> int | None:
    """The new set with the highest expected improvement found by climbs; None if there is none.

    Climbs start from the best sets and a random one, and change one switch at a time; the first
    move may change two.

    Args:
        values: speedups by mask; those of `rough` are estimated from few positions.
        taken: sets not to propose.
    """
    ranked = sorted(values, key=lambda mask: -values[mask]) or [0]
    surrogate.fit(values, rough)
    highest, chosen = -1.0, None
    for start in [*ranked[: CLIMBS - 1], draw.choice(ranked)]:
        at, reached = start, -1.0
        for step in range(STEPS):
            changes = space.changes(at)
            moves = [changed(at, change) for change in changes]
            if step == 0:
                gains = surrogate.improvement(moves)
                best = sorted(range(len(moves)), key=lambda i: -gains[i])[:PAIRED]
                moves += [
                    changed(moves[i], changes[j])
                    for number, i in enumerate(best)
                    for j in best[number + 1 :]
                    if changes[i][0] != changes[j][0]
                ]
            moves = [mask for mask in moves if space.runs(mask) and mask not in taken]
            if not moves:
                break
            gains = surrogate.improvement(moves)
            top = int(gains.argmax())
            if gains[top] <= reached:
                break
            at, reached = moves[top], float(gains[top])
        if at != start and reached > highest:
            highest, chosen = reached, at
    if chosen is None:
        return next((mask for mask in space.enumerate() if mask and mask not in taken), None)
    return chosen
