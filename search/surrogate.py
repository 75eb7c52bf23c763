"""A Gaussian process over sets of sublayers, and the expected speedup of each.

The cost of a draft is known; its acceptance is not. So the process models the *damage* of a set,
-log of its acceptance: nearly a sum over what is skipped or rounded. Its kernel has four parts: a
multiple of the damage predicted by the influence of sublayers, an effect of each sublayer alone,
effects of sets that differ in few sublayers, and effects of early exits by depth, as a model may
have been trained to exit. An expected speedup is that of the closed formula, averaged over the
damage.
Shapes: N sets tried, M sets asked for, F bits of a mask, n sublayers, K draft lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from layerskip.search.prices import Array, bits_of
from layerskip.search.space import Space

WORST = 2.5
"""Damage from which on sets count as equally bad."""
NOISE = 1e-4
"""Variance of exact values, since no kernel is right; estimates from few positions ROUGH times."""
ROUGH = 20.0
OF_SETS, OF_TAILS = (0.1, 0.4), 0.25
"""Length scales: for sets in differing influence, for exits in depth, both as shares."""
GRID: tuple[Any, ...] = (*product((1.0, 3.0, 6.0), (0.05, 0.2, 0.6), (0.0, 0.5), OF_SETS),)
"""Sizes of the kernel's parts to try; the likeliest is used."""

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(7)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def speedups(damage: Array, draft: Array, verify: Array) -> Array:
    """Speedup over plain decoding at the best draft length; all arguments broadcast.

    Args:
        damage: -log of the probability that a drafted token is accepted, (...).
        draft: cost of a draft step, (...).
        verify: of passes over 1, 2, ... tokens, (..., K + 1).
    """
    right = np.exp(-np.clip(damage, 0.0, None))[..., None]  # (..., 1)
    lengths = np.arange(1, verify.shape[-1])  # (K,)
    tokens = np.cumsum(right ** np.arange(verify.shape[-1]), -1)[..., 1:]  # (..., K)
    gained: Array = (tokens / (lengths * draft[..., None] + verify[..., 1:])).max(-1)
    return gained


def damage_of(speedup: Array, draft: Array, verify: Array) -> Array:
    """The damage at which the formula gives a speedup, in 0..WORST, by bisection."""
    low, high = np.zeros_like(speedup), np.full_like(speedup, WORST)
    for _ in range(40):
        middle = (low + high) / 2
        better = speedups(middle, draft, verify) > speedup
        low, high = np.where(better, middle, low), np.where(better, high, middle)
    return (low + high) / 2


class _Features(NamedTuple):
    """The kernel's inputs for M masks: bits, those before an exit's tail, and tail lengths."""

    bits: Array  # (M, F)
    body: Array  # (M, F)
    tail: Array  # (M,)


class Surrogate:
    """The process, fitted to the speedups of the sets tried so far.

    Args:
        prices: costs of sets' draft steps (M,), and of passes over 1, 2, ... tokens (M, K + 1).
        influence: how much skipping each sublayer changes, in any unit, (n,).
    """

    def __init__(
        self,
        space: Space,
        prices: Callable[[Sequence[int]], tuple[Array, Array]],
        influence: Sequence[float],
    ) -> None:
        self.prices, self.sublayers = prices, 2 * space.num_layers
        size = max(bits.bit_length() for bits in space.fields.values())  # F
        known = np.asarray(influence, dtype=float) + 1e-12
        rest = np.full(max(0, size - self.sublayers), 0.1 / self.sublayers)  # small for rounding
        self.foretold = np.concatenate([known / known.sum(), rest])[:size]  # (F,)
        self.sizes = (self.foretold + 1 / self.sublayers) / 2  # (F,)

    def fit(self, values: Mapping[int, float], rough: frozenset[int] = frozenset()) -> None:
        """Fit to speedups by mask, `rough` ones estimated from few positions."""
        masks = list({0: 1.0, **values})  # the whole model is always right
        speedup = np.array([values.get(mask, 1.0) for mask in masks])
        draft, verify = self.prices(masks)
        damage = np.where(np.array(masks) == 0, 0.0, damage_of(speedup, draft, verify))  # (N,)
        noise = NOISE * np.array([ROUGH if mask in rough else 1.0 for mask in masks])
        self.tried, self.best = self._features(masks), max(values.values(), default=1.0)
        likeliest: float = -math.inf
        for sizes in GRID:
            kernel = self._kernel(self.tried, self.tried, *sizes)
            root = np.linalg.cholesky(kernel + np.diag(noise))
            half = np.linalg.solve(root, damage)  # (N,)
            variance = float(half @ half) / len(masks) + 1e-9
            fit = -0.5 * len(masks) * math.log(variance) - float(np.log(np.diag(root)).sum())
            if fit > likeliest:
                likeliest, self.chosen, chosen = fit, sizes, root
                self.half, self.variance = half, variance
        self.whitened = np.linalg.inv(chosen)  # (N, N)

    def improvement(self, masks: Sequence[int]) -> Array:
        """The expected improvement of each set over the best one tried, (M,)."""
        here = self._features(masks)
        explained = self.whitened @ self._kernel(self.tried, here, *self.chosen)  # (N, M)
        own, sets, tails, _ = self.chosen
        prior = 4 * (here.bits @ self.foretold) ** 2 + sets**2 + tails**2 * (here.tail > 0)
        prior += 4 * own**2 * (here.body * self.sizes**2).sum(1)
        spread = np.sqrt(np.clip(self.variance * (prior - (explained**2).sum(0)), 1e-12, None))
        damage = (self.half @ explained)[:, None] + spread[:, None] * _NODES  # (M, nodes)
        draft, verify = self.prices(masks)
        gained = speedups(damage, draft[:, None], verify[:, None])  # (M, nodes)
        expected: Array = (np.clip(gained - self.best, 0.0, None) * _WEIGHTS).sum(1)
        return expected

    def _features(self, masks: Sequence[int]) -> _Features:
        bits = bits_of(masks, len(self.foretold))
        out = bits[:, : self.sublayers]
        tail = np.cumprod(out[:, ::-1], 1).sum(1) // 2 * 2  # (M,) whole layers
        body = bits.copy()
        body[:, : self.sublayers] *= np.arange(out.shape[1]) < out.shape[1] - tail[:, None]
        return _Features(bits, body, tail)

    def _kernel(
        self, a: _Features, b: _Features, own: float, sets: float, tails: float, scale: float
    ) -> Array:
        """Covariance of the damage of sets, (N, M)."""
        foretold = 4 * np.outer(a.bits @ self.foretold, b.bits @ self.foretold)
        alone = 4 * own**2 * (a.body * self.sizes**2) @ b.body.T
        differing = (a.bits @ self.sizes)[:, None] + b.bits @ self.sizes
        differing = differing - 2 * (a.bits * self.sizes) @ b.bits.T
        apart = np.abs(a.tail[:, None] - b.tail) / (OF_TAILS * self.sublayers)
        both = (a.tail > 0)[:, None] & (b.tail > 0)
        alike: Array = sets**2 * np.exp(-differing / scale) + tails**2 * both * np.exp(-apart)
        return foretold + alone + alike
