"""Speedups of one method over another, with confidence intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS = 4000
Ratio = tuple[float, float, float]
"""The ratio, and the ends of its 95% interval (NaN if there is none)."""


class Totals(NamedTuple):
    """A method's new tokens for every prompt (or batch of prompts), and their total time."""

    tokens: NDArray[np.float64]  # (units,)
    seconds: NDArray[np.float64]  # (units,)

    @property
    def rate(self) -> float:
        """All tokens divided by all seconds: a text of one token counts as one token."""
        return float(self.tokens.sum() / self.seconds.sum())


def measured_speedup(method: Totals, over: Totals) -> Ratio:
    """Tokens per second of `method` over those of `over`, and the 95% bootstrap interval.

    Both have the same prompts in the same order. For the interval, prompts are drawn with
    replacement, both methods of a prompt together (paired), DRAWS times from a fixed seed; its ends
    are the 2.5% and 97.5% quantiles. With one prompt the interval is NaN, with none the ratio, too.
    """
    units = len(method.tokens)
    ratio = method.rate / over.rate if units else math.nan
    if units < 2:
        return ratio, math.nan, math.nan
    drawn = np.random.default_rng(0).integers(0, units, (DRAWS, units))  # (draws, units)
    rates = [
        each.tokens[drawn].sum(axis=1) / each.seconds[drawn].sum(axis=1) for each in (method, over)
    ]  # (draws,) each
    low, high = np.quantile(rates[0] / rates[1], [0.025, 0.975])
    return ratio, float(low), float(high)


def times_over(method: Totals, over: Totals) -> dict[str, float | None]:
    """The same as JSON values, with the rate; None for a missing end."""
    faster, *ends = measured_speedup(method, over)
    low, high = (None if np.isnan(end) else end for end in ends)
    return {"speedup": faster, "low": low, "high": high, "tokens_per_second": method.rate}


def decoding_totals(records: Sequence[dict[str, Any]], name: str) -> Totals:
    """A method's tokens and seconds after the first new token, since drafts affect no prefill.

    Each prompt counts with the medians of its repeats; prompts are sorted by id.
    """
    repeats: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for each in records:
        if each["method"] == name:
            tokens = sum(each["new_tokens"]) - sum(each["first_tokens"])
            seconds = each["seconds"]["total"] - each["seconds"]["first"]
            repeats[tuple(each["prompts"])].append((tokens, seconds))
    medians = np.array([np.median(each, axis=0) for _, each in sorted(repeats.items())])
    return Totals(*medians.reshape(-1, 2).T)


def compared(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Counts of texts compared with the baseline's: equal ones, near-ties, and faults.

    A text is a near-tie if rounding explains all of its differences.
    """
    texts = equal = ties = 0
    for record in records:
        equal_rows = record["equal"] or []
        excused = {each["row"] for each in record["differences"] if each["near_tie"]}
        excused -= {each["row"] for each in record["differences"] if not each["near_tie"]}
        texts, equal = texts + len(equal_rows), equal + sum(equal_rows)
        ties += sum(not same and row in excused for row, same in enumerate(equal_rows))
    return {"compared": texts, "equal": equal, "near_ties": ties, "faults": texts - equal - ties}
