"""Rules that accept drafted tokens, and that turn scores into tokens.

The rejection rule is Algorithm 1 of Leviathan et al. 2023, also in Chen et al. 2023.
Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from layerskip.config.registry import named
from layerskip.decoding.noise import TILE


@dataclass(frozen=True)
class Rule:
    """How drafted tokens are accepted, and what that allows.

    Attributes:
        shares_noise: whether drafts are drawn with the target's noise, and accepted where they
            equal its own tokens; otherwise they have noise of their own.
        branches: whether drafts may branch.
        independent: whether a text is the same whatever is drafted for it, or decoded beside it.
        candidates: number of independent drafts of a position.
        trees: makes what arranges several candidates (see `layerskip.research.spectr`).
        choose: from p, q (V,), the candidates and a uniform number for each, (K,), returns the one
            that is accepted, or -1, and the distribution to draw from in that case, (V,).
    """

    name: str
    shares_noise: bool
    branches: bool
    independent: bool
    candidates: int = 1
    trees: Callable[[], Any] | None = None
    choose: Callable[[Tensor, Tensor, Sequence[int], Tensor], tuple[int, Tensor]] | None = None


COUPLED = Rule("coupled", shares_noise=True, branches=True, independent=True)
REJECTION = Rule("rejection", shares_noise=False, branches=False, independent=False)


def rule_of(acceptance: str, *, sampling: bool) -> Rule:
    """The rule of a request; greedy drafts are accepted where they equal the target's tokens."""
    if acceptance == "coupled" or not sampling:
        return COUPLED
    rule: Rule = REJECTION if acceptance == "rejection" else named("rule", acceptance)
    return rule


def largest(scores: Tensor) -> Tensor:
    """Token of the first maximum of scores (N, V), (N,); -1 if all are -inf, or one is NaN."""
    best, token = _best(scores)[0]
    return torch.where(best > float("-inf"), token, -1)[:, 0]


def with_margin(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`largest` of scores (N, V), and 1 - exp(-m), m its margin over the second-best, (N,) each."""
    (best, token), *searched = _best(scores)
    # The second-best is in one of the tensors in which the maximum was found.
    others = [values.scatter(1, place, -math.inf).amax(-1) for values, place in searched]  # (N,)
    negative = reduce(torch.maximum, others).sub_(best[:, 0])  # (N,), -m
    return torch.where(best > float("-inf"), token, -1)[:, 0], margins_of(negative)


def runners_up(scores: Tensor, best: Tensor, count: int) -> Tensor:
    """Tokens with the largest of scores (N, V) after `best` (N,), (N, up to count); -1: none."""
    others = scores.scatter(-1, best.clamp_min(0)[:, None], -math.inf)  # (N, V)
    if count == 1:
        return largest(others)[:, None]
    values, tokens = others.topk(min(count, scores.shape[-1]))
    return torch.where(values > -math.inf, tokens, -1)


def margins_of(negative: Tensor) -> Tensor:
    """1 - exp(-m) from -m, the second-best scores minus the best, in place, (N,)."""
    return negative.expm1_().neg_()


def _best(scores: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Largest of scores (N, V) and its token, (N, 1) each, and the tensors in which it was found.

    In large rows the part with the maximum is found first: on a CPU a maximum without its index is
    several times faster.
    """
    part = math.gcd(scores.shape[-1], 1024)
    if scores.numel() <= TILE or part < 64 or scores.device.type != "cpu":
        best, token = scores.max(-1, keepdim=True)
        return [(best, token), (scores, token)]
    parts = scores.unflatten(-1, (-1, part))  # (N, V / part, part)
    tops = parts.amax(-1)  # (N, V / part)
    best, where = tops.max(-1, keepdim=True)  # (N, 1) each
    inside = parts.gather(1, where[:, :, None].expand(-1, 1, part))[:, 0]  # (N, part)
    here = inside.argmax(-1, keepdim=True)  # (N, 1)
    return [(best, where * part + here), (tops, where), (inside, here)]


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q) for every token, (..., V); tokens that the draft cannot draw (q = 0) get 1."""
    return torch.where(q > 0, (p / q.clamp_min(torch.finfo(q.dtype).tiny)).clamp(max=1), 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ normalised, (..., V): the distribution of the correction after a rejection.

    If p = q, no rejection can happen. Rounding can leave no mass there; then p is returned.
    """
    excess = (p - q).clamp_min(0)  # (..., V)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass.clamp_min(torch.finfo(p.dtype).tiny), p)
