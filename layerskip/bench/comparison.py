"""Two decodings that must agree, compared token by token: near-ties are told from faults.

Where they first differ, the target's own scores, from a fresh forward pass over the common prefix,
tell which it is: a near-tie is a position where both tokens lie within the resolution of the
highest score,

    resolution = max|score| * (2 sqrt(2L) eps(dtype) + 4 eps(float32)),

a random walk of one rounding error per sublayer, for each of the two passes compared, and the
float32 in which `generate()` and this engine both hold scores. Everything else is a fault. Knows
neither how texts come about nor what becomes of a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from layerskip.model.sublayers import Sublayers


@dataclass(frozen=True)
class Difference:
    """Where two decodings of a prompt first differ.

    Attributes:
        prompt: index of the prompt.
        position: index of the new token.
        expected, got: the two tokens; None where one decoding had ended.
        margin: how far the lower of the two lies below the highest score there; infinite where
            one decoding had ended, and null in JSON.
        resolution: what rounding can do to those scores.
    """

    prompt: int
    position: int
    expected: int | None
    got: int | None
    margin: float
    resolution: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference; otherwise it is a fault."""
        return self.margin <= self.resolution


@dataclass(frozen=True)
class Comparison:
    """Two ways to decode the same prompts.

    Attributes:
        prompts: how many were compared.
        tokens: new tokens that were equal, up to the first difference of each prompt.
        differences: of the prompts that differ.
    """

    prompts: int
    tokens: int
    differences: tuple[Difference, ...]

    @property
    def near_ties(self) -> int:
        return sum(difference.near_tie for difference in self.differences)

    @property
    def faults(self) -> int:
        return len(self.differences) - self.near_ties

    def to_dict(self) -> dict[str, Any]:
        differences = [
            asdict(d)
            | {"near_tie": d.near_tie, "margin": d.margin if math.isfinite(d.margin) else None}
            for d in self.differences
        ]
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "near_ties": self.near_ties,
            "faults": self.faults,
            "differences": differences,
        }


def first_difference(
    model: Sublayers,
    prompt: int,
    ids: Tensor,
    expected: list[int],
    got: list[int],
    scores: Callable[[Tensor], Tensor],
) -> tuple[int, Difference | None]:
    """How many leading tokens are equal, and what follows them if it differs.

    Args:
        scores: what the token after the ids (1, T) is chosen by, (V,).
    """
    if expected == got:
        return len(got), None
    pairs = zip(expected, got, strict=False)
    shorter = min(len(expected), len(got))
    equal = next((i for i, (left, right) in enumerate(pairs) if left != right), shorter)
    if equal == shorter:  # one goes on where the other ended: no score explains that
        left, right = (tokens[equal] if equal < len(tokens) else None for tokens in (expected, got))
        return equal, Difference(prompt, equal, left, right, math.inf, 0.0)
    prefix = torch.cat([ids, ids.new_tensor([expected[:equal]])], dim=1)  # (1, T + equal)
    there = scores(prefix).cpu().double()  # (V,); not every device has float64
    margin = float(there.max() - torch.min(there[expected[equal]], there[got[equal]]))
    scale = float(there[there.isfinite()].abs().max())
    return equal, Difference(
        prompt, equal, expected[equal], got[equal], margin, _resolution(model, scale)
    )


def _resolution(model: Sublayers, scale: float) -> float:
    """What rounding can do to scores of that size (module docstring)."""
    depth = 2 * math.sqrt(model.num_sublayers) * torch.finfo(model.dtype).eps
    return scale * (depth + 4 * torch.finfo(torch.float32).eps)
