"""Sets worth trying first: early exits, evenly spaced ones, near hidden states, a person's own.

What a hidden state shows of a layer ranks layers poorly and sets of layers worse, so that these
are places to start a search from and never its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from layerskip.config import SkipConfig
from layerskip.replay.trace import Trace

from .space import Space

SHARES = (0.2, 0.35, 0.5)
"""Shares of a space's switches that evenly spaced sets and those near hidden states leave out."""
LOW_EXITS = (0.125, 0.5, 0.8)
"""Shares of the layers that early exits in low precision run."""
FEW = (1, 2, 4, 8)
"""Switches that sets in low precision leave out: they lose more by each than they save."""


def standard(space: Space) -> dict[str, int]:
    """Names and masks of skipping nothing, every early exit and evenly spaced sets.

    With low precision also all in it, without the head, behind exact halves, and at some exits; of
    early exits alone all that there are. Of a mixture every number of experts, of long texts every
    window, in low precision where there is one.
    """
    found = {"none": 0}
    everything = space.low_mask(0) if space.bits else 0
    found |= {f"experts-{n}": everything | bit for n, bit in space.fewer_experts.items()}
    found |= {f"window-{n}": everything | bit for n, bit in space.narrower.items()}
    if space.bits:
        bits, low = f"{space.bits}-bits", space.low_mask(0)
        first = low & (1 << 2 * space.num_layers + space.num_layers // 2 * 2) - 1
        found |= {bits: low, f"{bits}-whole-head": low & ~(1 << 4 * space.num_layers)}
        found |= {f"{bits}-second-half": low & ~first}
        depths = sorted({round(share * space.num_layers) for share in LOW_EXITS} - {0})
        found |= {f"{bits}-exit-{e}": space.low_mask(space.exit_mask(e)) for e in depths[::-1]}
    exits = range(space.num_layers - 1, 0, -1)
    found |= {f"exit-{layer}": space.exit_mask(layer) for layer in exits}
    if space.kind == "exit" and space.bits:
        found |= {f"{bits}-exit-{layer}": space.low_mask(space.exit_mask(layer)) for layer in exits}
    switches = space.leaving_out
    for count in _counts(space):
        even = {round((i + 0.5) * len(switches) / count - 0.5) for i in range(count)}
        found[f"even-{count}"] = sum(switches[i] for i in even)
    return _distinct(space, found)


def given(space: Space, configs: Mapping[str, SkipConfig]) -> dict[str, int]:
    """Names and masks of a person's own configs, such as sets published with Draft & Verify.

    Raises:
        ValueError: a config is for another model, or is not in the space.
    """
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


def from_hidden_states(space: Space, hidden: torch.Tensor) -> dict[str, int]:
    """Names and masks of the cosine dynamic programming of CLaSp.

    `hidden` is (2L + 1, T, D): what enters sublayer i at each of T tokens, and at the end what
    leaves the last one, before the final norm.
    """
    counts, few = _counts(space), FEW if space.bits else ()
    switches = space.leaving_out
    most = min(len(switches), max([*counts, *few], default=0))
    nearest = cosine_sets(hidden, switches, most)
    low = {
        f"{space.bits}-bits-cosine-{count}": space.low_mask(nearest[count])
        for count in few
        if count <= most
    }
    return _distinct(space, low | {f"cosine-{count}": nearest[count] for count in counts})


@torch.no_grad()
def hidden_states(trace: Trace, tokens: int = 128) -> torch.Tensor:
    """What enters every sublayer, and leaves the last, at places spread over a trace's texts.

    Returns:
        (2L + 1, T, D) on the CPU, T at most about `tokens`.
    """
    model = trace.model
    every = -(-trace.starts // tokens)
    found: list[list[torch.Tensor]] = [[] for _ in range(model.num_sublayers + 1)]
    for text in trace.texts:
        hidden, step = model.first_pass(text.tokens.to(model.device)[None])  # (1, T, D)
        for index, states in enumerate(found):
            states.append(hidden[0, text.prompt :: every].float().cpu())
            if index < model.num_sublayers:
                hidden = model.run(hidden, step, (index,))
    return torch.stack([torch.cat(states) for states in found])


def cosine_sets(hidden: torch.Tensor, switches: Sequence[int], most: int) -> list[int]:
    """For each count 0..most, the mask of so many switches that bends the hidden state least.

    CLaSp (Chen et al. 2025, arXiv 2505.24196): D(i, j), the best cosine between the target's
    state after i sublayers and the draft's with j of its switches skipped, is the better of
    skipping (from D(i-1, j-1)) and running (from D(i-1, j)). Here a sublayer that runs adds to the
    draft's state what it added to the target's, so that no model is needed.
    """
    switch_at = {_first(switch): switch for switch in switches}
    states = hidden[:1].clone()  # (J, T, D): the draft's state, by switches skipped so far
    masks = [0]
    sublayer = 0
    while sublayer + 1 < len(hidden):
        switch = switch_at.get(sublayer, 0)
        after = sublayer + max(1, switch.bit_count())
        target = hidden[after]  # (T, D)
        run = states + (target - hidden[sublayer])  # (J, T, D)
        if switch:
            gain_run, gain_skip = (_cosine(state, target) for state in (run, states))  # (J,)
            chosen, chosen_masks = [run[0]], [masks[0]]
            for count in range(1, min(len(masks), most) + 1):
                skips = count == len(masks) or bool(gain_skip[count - 1] > gain_run[count])
                chosen.append(states[count - 1] if skips else run[count])
                chosen_masks.append(masks[count - 1] | switch if skips else masks[count])
            run, masks = torch.stack(chosen), chosen_masks
        states, sublayer = run, after
    return masks


def _cosine(states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cosine over tokens: (J, T, D) against (T, D) to (J,)."""
    return torch.nn.functional.cosine_similarity(states, target[None], dim=-1).mean(dim=-1)


def _first(switch: int) -> int:
    return (switch & -switch).bit_length() - 1


def _counts(space: Space) -> list[int]:
    return sorted({round(share * len(space.leaving_out)) for share in SHARES} - {0})


def _distinct(space: Space, found: Mapping[str, int]) -> dict[str, int]:
    """Those that the space holds, each mask under its first name."""
    first: dict[int, str] = {}
    for name, mask in found.items():
        if mask in space:
            first.setdefault(mask, name)
    return {name: mask for mask, name in first.items()}
