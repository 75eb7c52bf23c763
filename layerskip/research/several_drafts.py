"""Published accept rules for several drafts of one place: SpecTr, and without replacement.

Decoding drafts one token for a place, or the best few under shared noise; these rules are for
drafts that are drawn, and say how many of them would be accepted.
Letters: N places, K drafts of a place, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from layerskip.decoding.rules import residual

_HALVINGS = 24  # of the interval in which a division is searched


class AcceptTests(NamedTuple):
    """The tests of a place's drafts, which take turns until one of them passes.

    Attributes:
        chances: of each draft to pass, if those before it have not, (N, K).
        correction: the distribution of the token that is drawn if none has passed, (N, V).
    """

    chances: Tensor
    correction: Tensor

    @property
    def passed(self) -> Tensor:
        """The chance that one of the first 1, 2, ... K drafts passes, (N, K)."""
        return 1 - (1 - self.chances).cumprod(-1)


def k_seq(p: Tensor, q: Tensor, drafts: Tensor) -> AcceptTests:
    """K-SEQ of SpecTr (Sun et al. 2023, arXiv 2310.15141, Algorithm 2), drafts drawn independently.

    With the division g in 1..K a draft x passes with min(1, p(x) / (g q(x))). Let b be the sum of
    min(q, p / g), one draft's chance. The correction is then drawn from p - min(q, p / g) (1 -
    (1 - b)^K) / b, normalised, which is a distribution if 1 - (1 - b)^K <= g b. The least such g
    accepts most: at least 1 - 1/e of what any rule can.

    Args:
        p, q: distributions of target and draft, (N, V).
        drafts: drawn from q with replacement, (N, K).
    """
    count = drafts.shape[-1]
    division = _division(p, q, count)  # (N, 1)
    passing = torch.minimum(q, p / division)  # (N, V), by q and then passing one test
    one = passing.sum(-1, keepdim=True)  # (N, 1)
    weight = torch.where(one > 0, _any(one, count) / one.clamp_min(_tiny(q)), float(count))
    chances = _share(passing.gather(-1, drafts), q.gather(-1, drafts))
    return AcceptTests(chances, residual(p, weight * passing))


def k_seq_chance(p: Tensor, q: Tensor, count: int) -> Tensor:
    """The chance that one of so many independent drafts passes under `k_seq`, (N,)."""
    one = torch.minimum(q, p / _division(p, q, count)).sum(-1)
    return _any(one, count)


def without_replacement(p: Tensor, q: Tensor, drafts: Tensor) -> AcceptTests:
    """Recursive rejection: each draft is drawn from q without those before it.

    Yang et al. 2024 (arXiv 2401.06706, Algorithm 2), Jeon et al. 2024 (RSD, arXiv 2402.14160),
    Sequoia (Chen et al. 2024, arXiv 2402.12374, Algorithm 2). The rejection rule, again and again:
    draft x_i passes with min(1, p_i(x_i) / q_i(x_i)); after it p_{i+1} is (p_i - q_i)+, normalised,
    and q_{i+1} is q_i without x_i, normalised. A draft that q_i cannot draw never passes, so
    that drafts drawn again do no harm.

    Args:
        p, q: distributions of target and draft, (N, V).
        drafts: drawn from q without replacement, in order, (N, K); of a Gumbel top-K.
    """
    chances = []
    for token in drafts.split(1, -1):  # (N, 1)
        chance = q.gather(-1, token)  # (N, 1)
        chances.append(_share(torch.minimum(p.gather(-1, token), chance), chance))
        p = torch.where(chance > 0, residual(p, q), p)
        rest = q.scatter(-1, token, 0.0)  # (N, V)
        q = rest / rest.sum(-1, keepdim=True).clamp_min(_tiny(q))
    return AcceptTests(torch.cat(chances, -1), p)


def _division(p: Tensor, q: Tensor, count: int) -> Tensor:
    """The least g in 1..K with 1 - (1 - b(g))^K <= g b(g), from above, (N, 1)."""
    low, high = p.new_ones(*p.shape[:-1], 1), p.new_full((*p.shape[:-1], 1), count)
    for _ in range(_HALVINGS if count > 1 else 0):
        middle = (low + high) / 2
        one = torch.minimum(q, p / middle).sum(-1, keepdim=True)  # (N, 1)
        fits = _any(one, count) <= middle * one
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high


def _any(one: Tensor, count: int) -> Tensor:
    """The chance that one of so many passes, each with the chance `one`."""
    return 1 - (1 - one.clamp(max=1)) ** count


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp_min(_tiny(whole)), 0.0).clamp(max=1)


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny
