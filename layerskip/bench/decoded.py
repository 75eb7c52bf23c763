"""The time that decoding alone took, out of a benchmark's records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerskip.costs.ratios import Totals


def decoding_totals(records: Sequence[dict[str, Any]], name: str) -> Totals:
    """A method's tokens and seconds from the first new token on: no draft changes the prefill.

    A prompt counts with the medians of its repeats; prompts are sorted by their ids.
    """
    found: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for each in records:
        if each["method"] == name:
            tokens = sum(each["new_tokens"]) - sum(each["first_tokens"])
            seconds = each["seconds"]["total"] - each["seconds"]["first"]
            found[tuple(each["prompts"])].append((tokens, seconds))
    medians = np.array([np.median(repeats, axis=0) for _, repeats in sorted(found.items())])
    return Totals(*medians.reshape(-1, 2).T)
