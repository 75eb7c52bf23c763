"""Speedups as ratios of totals, with bootstrap intervals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DRAWS = 4000
Ratio = tuple[float, float, float]
"""The ratio, and the ends of its 95% interval (NaN where there is none)."""


def ratio_of_totals(over: NDArray[np.float64], under: NDArray[np.float64]) -> Ratio:
    """sum(over) / sum(under), and its 95% bootstrap interval over units.

    Units are drawn with replacement, both sides of a unit together (paired), DRAWS times from a
    fixed seed; the interval's ends are the 2.5% and 97.5% quantiles. One unit has no interval: NaN.

    Args:
        over, under: seconds per token of the two methods, (units,) each, in one order.
    """
    if not len(over):
        return float("nan"), float("nan"), float("nan")
    ratio = float(over.sum() / under.sum())
    if len(over) == 1:
        return ratio, float("nan"), float("nan")
    drawn = np.random.default_rng(0).integers(0, len(over), (DRAWS, len(over)))  # (draws, units)
    ratios = over[drawn].sum(axis=1) / under[drawn].sum(axis=1)  # (draws,)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return ratio, float(low), float(high)
