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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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

    @classmethod
    def of(cls, texts: Sequence[list[int]], differences: Mapping[int, Difference]) -> Comparison:
        """Of the texts of all prompts, and where those that differ do, by the prompt's number."""
        equal = [
            differences[number].position if number in differences else len(text)
            for number, text in enumerate(texts)
        ]
        found = tuple(replace(each, prompt=number) for number, each in differences.items())
        return cls(len(texts), sum(equal), found)

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
) -> Difference | None:
    """Where tokens that follow a prompt first differ, if they do.

    Args:
        ids: the prompt, (1, T), number `prompt`.
        scores: what the token after the ids (1, T + n) is chosen by, (V,).
    """
    if expected == got:
        return None
    pairs = zip(expected, got, strict=False)
    shorter = min(len(expected), len(got))
    equal = next((i for i, (left, right) in enumerate(pairs) if left != right), shorter)
    if equal == shorter:  # one goes on where the other ended: no score explains that
        left, right = (tokens[equal] if equal < len(tokens) else None for tokens in (expected, got))
        return Difference(prompt, equal, left, right, math.inf, 0.0)
    prefix = torch.cat([ids, ids.new_tensor([expected[:equal]])], dim=1)  # (1, T + equal)
    there = scores(prefix).cpu().double()  # (V,); not every device has float64
    left, right = expected[equal], got[equal]
    margin = float(there.max() - torch.min(there[left], there[right]))
    scale = float(there[there.isfinite()].abs().max())
    return Difference(prompt, equal, left, right, margin, _resolution(model, scale))


def _resolution(model: Sublayers, scale: float) -> float:
    """What rounding can do to scores of that size (module docstring)."""
    depth = 2 * math.sqrt(model.num_sublayers) * torch.finfo(model.dtype).eps
    return scale * (depth + 4 * torch.finfo(torch.float32).eps)
