"""Costs of rounds for the sets of a space, added up from the parts in a "cost" record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.config.skips import SINK
from layerskip.costs.cost_model import interpolated
from layerskip.costs.speculation import CostTable
from layerskip.search.space import Space

Array = NDArray[np.float64]

LONGEST = 8
"""Maximum draft length that is priced."""


class Prices:
    """Draft and verify costs of a space's sets, in target steps, from the parts of a record.

    A draft step runs the kept sublayers and the head over one token. Verification runs the last
    drafted token alone through the shared prefix, then all drafted tokens and the one before them
    through the rest of the model and the head. MLPs with fewer experts cost less in proportion to
    what they read, and attention with a window as much as in a text of that length.
    Shapes: n sublayers, K the longest pass.

    Args:
        record: the result of `layerskip.timing.sublayer_costs.measure`.
        context: number of tokens before the round.

    Attributes:
        step: seconds of a target step of the whole batch: a pass over one token of every row.

    Raises:
        ValueError: the record does not price a number of experts or a draft vocabulary.
    """

    def __init__(self, space: Space, record: Mapping[str, Any], context: float) -> None:
        for number in space.numbers["experts"]:
            if str(number) not in record.get("experts", {}):
                raise ValueError(
                    f"these costs do not price drafts of {number} experts; measure them again on "
                    "this model"
                )
        if space.numbers["vocabulary"] and "vocabulary" not in record:
            raise ValueError(
                "these costs have no trimmed head, so that a draft vocabulary has no price; "
                "measure them again, on a model whose head is a plain weight"
            )
        self.space, self.record, self.context = space, record, context
        self.sublayers = 2 * space.num_layers
        self.exact = self._by_sublayer("attention", "mlp")  # (n,) seconds
        self.low = self._by_sublayer("low_attention", "low_mlp") if space.bits else self.exact
        keys = self._keys(None)
        beside = record["head"] + record["rest"]
        self.step = float(self.exact.sum() + keys.sum() + beside)
        tokens = range(1, 1 + int(max(tokens for tokens, _ in record["growth"])))
        growth, key_growth = (
            np.array([interpolated(dict(record[name]), n) for n in tokens])
            for name in ("growth", "key_growth")
        )
        carried = np.concatenate([[0.0], np.cumsum(self.exact + keys)])[:, None]  # (n + 1, 1)
        weights = np.concatenate([[0.0], np.cumsum(self.exact)])[:, None]
        read = np.concatenate([[0.0], np.cumsum(keys)])[:, None]
        fresh = weights[-1] - weights + beside
        passes = carried + growth * fresh + key_growth * (read[-1] - read)  # (n + 1, K)
        passes[:, 0] = self.step
        self.verify = np.maximum.accumulate(passes / self.step, axis=1)  # by shared prefix

    def table(self, mask: int) -> CostTable:
        """The costs of one set's rounds."""
        space, record, n = self.space, self.record, self.sublayers
        bits = np.array([mask >> bit & 1 for bit in range(2 * n + 1)])
        kept, low, low_head = 1 - bits[:n], bits[n : 2 * n], bits[2 * n]
        changed = np.maximum(bits[:n], low)  # (n,)
        read = np.ones(n)
        experts, window = space.number("experts", mask), space.number("window", mask)
        if experts is not None:
            read[1::2] = record["experts"][str(experts)]
            changed[1] = 1
        if window is not None:
            changed[0] = 1
        prefix = int(changed.argmax()) if changed.any() else n  # sublayers shared with the target
        head = record.get("low_head", record["head"]) if low_head else record["head"]
        if (vocabulary := space.number("vocabulary", mask)) is not None:
            head *= vocabulary / record["vocabulary"]
        sublayers = float((kept * read * (self.exact * (1 - low) + self.low * low)).sum())
        repeated = dict(record.get("repeated", [[1.0, 1.0]]))
        factor = interpolated(repeated, (sublayers + head) / (self.exact.sum() + record["head"]))
        keys = float((kept * self._keys(window)).sum())
        draft = factor * (sublayers + head) + keys + record["rest"]
        return self._table(float(draft / self.step), prefix)

    @property
    def passes(self) -> CostTable:
        """The costs of looked-up drafts: only the passes that verify them."""
        return self._table(0.0, 0)

    def _table(self, draft: float, prefix: int) -> CostTable:
        return CostTable(draft, tuple(map(float, self.verify[prefix])), "measured")

    @property
    def doubt(self) -> str:
        """How far the costs may be off, such as " ±4%"; empty if they do not say."""
        spread = self.record.get("spread")
        return "" if spread is None else f" ±{math.ceil(100 * spread)}%"

    def _by_sublayer(self, *names: str) -> Array:
        return np.stack([np.array(self.record[name]) for name in names], 1).ravel()

    def _keys(self, window: int | None) -> Array:
        """Seconds for the keys that each sublayer's pass over one token reads, (n,)."""
        most = math.inf if window is None else window + SINK
        seen = [min(self.context, most, own or math.inf) for own in self.record["windows"]]
        keys = np.zeros(self.sublayers)
        keys[::2] = np.array(self.record["keys"]) * np.array(seen)
        return keys
