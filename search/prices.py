"""Costs of rounds for the sets of a space, added up from the parts in a "cost" record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.config import SINK
from layerskip.costs.model import on_line
from layerskip.costs.speculation import CostTable
from layerskip.search.space import Space

Array = NDArray[np.float64]

LONGEST = 8
"""Maximum draft length that is priced."""


def bits_of(masks: Sequence[int], count: int) -> Array:
    """The first bits of masks, (M, count)."""
    size = -(-count // 8)
    whole = (1 << 8 * size) - 1
    data = b"".join((mask & whole).to_bytes(size, "little") for mask in masks)
    packed = np.frombuffer(data, np.uint8).reshape(len(masks), size)
    return np.unpackbits(packed, axis=1, bitorder="little")[:, :count].astype(float)


class Prices:
    """Draft and verify costs of a space's sets, in target steps, from the parts of a record.

    A draft step runs the kept sublayers and the head over one token. Verification runs the last
    drafted token alone through the shared prefix, then all drafted tokens and the one before them
    through the rest of the model and the head. MLPs with fewer experts cost less in proportion to
    what they read, and attention with a window as much as in a text of that length.
    Shapes: M sets, n sublayers, K the longest pass.

    Args:
        record: the result of `layerskip.timing.sublayers.measure`.
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
            np.array([on_line(dict(record[name]), n) for n in tokens])
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
        draft, prefix = self._drafts([mask])
        return self._table(float(draft[0]), prefix[0])

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

    def __call__(self, masks: Sequence[int]) -> tuple[Array, Array]:
        """Costs of a draft step (M,), and of passes over 1, 2, ... tokens (M, LONGEST + 1)."""
        draft, prefix = self._drafts(masks)
        return draft, self.verify[prefix, : LONGEST + 1]

    def _drafts(self, masks: Sequence[int]) -> tuple[Array, NDArray[np.int64]]:
        """Costs of a draft step (M,), and the number of sublayers that each set shares (M,)."""
        space, record, n = self.space, self.record, self.sublayers
        bits = bits_of(masks, 2 * n + 1)
        kept, low, low_head = 1 - bits[:, :n], bits[:, n : 2 * n], bits[:, 2 * n]
        changed = np.maximum(1 - kept, low)  # (M, n)
        read = np.ones((len(masks), n))
        for number, bit in space.numbers["experts"].items():
            rows = np.array([bool(mask & bit) for mask in masks])
            read[rows, 1::2] = record["experts"][str(number)]
            changed[rows, 1] = 1.0
        keys = np.tile(self._keys(None), (len(masks), 1))
        for number, bit in space.numbers["window"].items():
            rows = np.array([bool(mask & bit) for mask in masks])
            keys[rows] = self._keys(number)
            changed[rows, 0] = 1.0
        prefix = np.where(changed.any(1), changed.argmax(1), n)
        head = np.where(low_head > 0, record.get("low_head", record["head"]), record["head"])
        for number, bit in space.numbers["vocabulary"].items():
            share = number / record["vocabulary"]
            head = head * [share if mask & bit else 1.0 for mask in masks]
        sublayers = (kept * read * (self.exact * (1 - low) + self.low * low)).sum(1)
        repeated = dict(record.get("repeated", [[1.0, 1.0]]))
        whole = self.exact.sum() + record["head"]
        factor = np.array([on_line(repeated, part / whole) for part in sublayers + head])
        draft = factor * (sublayers + head) + (kept * keys).sum(1) + record["rest"]
        return draft / self.step, prefix

    def _by_sublayer(self, *names: str) -> Array:
        return np.stack([np.array(self.record[name]) for name in names], 1).ravel()

    def _keys(self, window: int | None) -> Array:
        """Seconds for the keys that each sublayer's pass over one token reads, (n,)."""
        most = math.inf if window is None else window + SINK
        seen = [min(self.context, most, own or math.inf) for own in self.record["windows"]]
        keys = np.zeros(self.sublayers)
        keys[::2] = np.array(self.record["keys"]) * np.array(seen)
        return keys
