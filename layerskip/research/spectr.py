"""SpecTr's K-SEQ: the rejection rule for several independent drafts of a position.

K tokens are drawn from the draft's distribution q and tried in turn. Token x is accepted with
probability min(1, p(x) / (r q(x))), where r solves 1 - (1 - b)^K = r b with b = sum min(q, p / r).
If none is accepted, the token is drawn from what is left of p. So it follows the target's p,
whatever q is (Sun et al. 2023, arXiv 2310.15141, Algorithm 3 and Theorem 2).
Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.decoding.rules import Rule
from layerskip.decoding.sources.base import Proposal

CANDIDATES = 3
"""Number of drafts of a position."""
_HALVINGS = 40  # of the interval that contains r


def divisor(p: Tensor, q: Tensor, count: int) -> tuple[float, float]:
    """The r of `count` tokens drawn from q (V,) for p (V,), and the b that belongs to it."""
    low, high = 1.0, float(count)
    for _ in range(_HALVINGS if count > 1 else 0):
        middle = (low + high) / 2
        one = float(torch.minimum(q, p / middle).sum())
        low, high = (middle, high) if 1 - (1 - one) ** count > middle * one else (low, middle)
    return high, float(torch.minimum(q, p / high).sum())


def acceptance(p: Tensor, q: Tensor, count: int) -> float:
    """The probability that one of `count` tokens drawn from q is accepted for p, (V,) each."""
    return 1 - (1 - divisor(p, q, count)[1]) ** count


def optimal_acceptance(p: Tensor, q: Tensor, count: int) -> float:
    """The most that any rule accepts: the optimal transport from p to `count` draws of q.

    By max-flow and min-cut it is the minimum of p(B) + 1 - q(B)^K over all sets B of tokens. It is
    concave in both measures, so a set of the tokens with the smallest p / q attains it.
    """
    order = (p / q.clamp_min(torch.finfo(q.dtype).tiny)).argsort()
    cuts = p[order].cumsum(0) + 1 - q[order].cumsum(0) ** count  # (V,)
    return min(1.0, float(cuts.min()))


def k_seq(p: Tensor, q: Tensor, tokens: Sequence[int], uniforms: Tensor) -> tuple[int, Tensor]:
    """Accept one of K tokens drawn from q (V,), or none.

    Args:
        p: the target's distribution, (V,).
        uniforms: a random number for each token, (K,).

    Returns:
        The token, or -1; and the distribution to draw from in that case, (V,).
    """
    p, q, count = p.double(), q.double(), len(tokens)
    r, one = divisor(p, q, count)
    here = torch.tensor(tokens, device=p.device)
    chances = p[here] / (r * q[here]).clamp_min(torch.finfo(q.dtype).tiny)  # (K,)
    lucky = (uniforms < chances).tolist()
    share = (1 - (1 - one) ** count) / one if one else 0.0
    left = (p - share * torch.minimum(q, p / r)).clamp_min(0)  # (V,)
    mass = float(left.sum())
    # Rounding can leave no mass where all is accepted; then p is returned.
    return tokens[lucky.index(True)] if any(lucky) else -1, left / mass if mass > 0 else p


class CandidateTrees:
    """A round's trees: a chain, and after each of its nodes all candidates of the next position.

    How many candidates a position has must not depend on them, so all have the same number.
    """

    def begin(self, ends: Sequence[frozenset[int]], longest: int, state: Any) -> None:
        self.drawn: dict[int, list[Sequence[int]]] = {}

    def see(self, row: int, tokens: Sequence[int], confidence: float) -> None:
        self.drawn.setdefault(row, []).append(tokens)

    def choose(self, chains: Mapping[int, int]) -> Mapping[int, Proposal]:
        """By row, the tokens to verify, those of its chain first."""
        trees = {}
        for row, drawn in self.drawn.items():
            if row in chains:
                further = [(token, node) for node, each in enumerate(drawn) for token in each[1:]]
                tokens = [each[0] for each in drawn] + [token for token, _ in further]
                parents = [*range(len(drawn)), *(node for _, node in further)]
                trees[row] = Proposal.of(tokens, 0, parents)
        return trees

    def learn(self, row: int, tokens: Sequence[int]) -> None:
        """Nothing is learnt."""


SPECTR = Rule(
    "spectr",
    shares_noise=False,
    branches=True,
    independent=False,
    candidates=CANDIDATES,
    trees=CandidateTrees,
    choose=k_seq,
)
