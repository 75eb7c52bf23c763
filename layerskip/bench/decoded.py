"""Records of a benchmark as times of decoding alone; knows no methods and no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def seconds_per_token(records: Sequence[dict[str, Any]], name: str) -> NDArray[np.float64]:
    """Of a method's decoding on each prompt, the median of the repeats, (prompts,).

    From the first new token on: no draft changes what a prompt costs. No record may be of a text
    that ended with its first token.
    """
    seconds: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for each in records:
        if each["method"] == name:
            after = sum(each["new_tokens"]) - sum(each["first_tokens"])
            spent = each["seconds"]["total"] - each["seconds"]["first"]
            seconds[tuple(each["prompts"])].append(spent / after)
    return np.array([np.median(times) for _, times in sorted(seconds.items())])
