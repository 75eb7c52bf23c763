"""What rounds of any skip config cost, added up from the parts in a "cost" record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from layerskip.config import SINK, SkipConfig
from layerskip.costs.model import on_line
from layerskip.costs.speculation import CostTable

LOW_FACTS = ("low_bits", "low_head_bits", "healed")
AGAIN = "measure them again with this draft's low precision"


def low_facts(low: SkipConfig | None) -> dict[str, Any]:
    """What a record says of the low precision that it prices: bits, and the hash of what heals it.

    The head's bits are there where they are not those of the rest.
    """
    if low is None or low.low is None:
        return {}
    facts: dict[str, Any] = {"low_bits": low.low.bits}
    if low.low.head_bits not in (None, low.low.bits):
        facts["low_head_bits"] = low.low.head_bits
    return facts if low.trained is None else {**facts, "healed": low.trained.hash}


def step_seconds(record: Mapping[str, Any], context: float | None = None) -> float:
    """Seconds of one target step of the whole batch: a pass over one token of every row."""
    return _Pass(record, context).seconds(1)


class _Pass:
    """A pass of the whole model behind a context; None: the middle of the record's."""

    def __init__(self, record: Mapping[str, Any], context: float | None) -> None:
        self.record = record
        contexts = record["contexts"]
        self.context = (contexts[0] + contexts[-1]) / 2 if context is None else context
        pairs = zip(record["attention"], record["mlp"], strict=True)
        self.weights = [seconds for pair in pairs for seconds in pair]  # by sublayer
        self.keys = self.keys_of(None)

    def keys_of(self, window: int | None) -> list[float]:
        """Seconds of the keys that each sublayer's pass over one token reads."""
        most = math.inf if window is None else window + SINK
        seen = (min(self.context, most, own or math.inf) for own in self.record["windows"])
        keys = (each * tokens for each, tokens in zip(self.record["keys"], seen, strict=True))
        return [seconds for each in keys for seconds in (each, 0.0)]

    def seconds(self, tokens: int, prefix: int = 0) -> float:
        """Of a pass over `tokens` tokens of a row; one of them passes the first `prefix` ones."""
        growth, key_growth = (
            on_line(dict(self.record[name]), tokens) for name in ("growth", "key_growth")
        )
        fresh = sum(self.weights[prefix:]) + self.record["head"] + self.record["rest"]
        carried = sum(self.weights[:prefix]) + sum(self.keys[:prefix])
        return float(carried + growth * fresh + key_growth * sum(self.keys[prefix:]))

    def table(self, draft: float, prefix: int = 0) -> CostTable:
        """The costs of rounds whose draft steps take so many seconds each."""
        step, verify = self.seconds(1), [1.0]
        for tokens in range(2, int(max(tokens for tokens, _ in self.record["growth"])) + 1):
            verify.append(max(verify[-1], self.seconds(tokens, prefix) / step))
        return CostTable(draft / step, tuple(verify), "measured")


def cost_table(
    record: Mapping[str, Any],
    skip: SkipConfig,
    context: float | None = None,
    *,
    draft_vocabulary: int | None = None,
) -> CostTable:
    """c and v of any skip config, priced by the parts that a round of it runs.

    A draft step runs the kept sublayers and the head over one token. Verification carries the last
    drafted token through the shared prefix alone, then all drafted tokens and the one before them
    through the rest of the model and the head. MLPs of fewer experts cost as much less as they read
    less, and attention with a window as much as with no more text than that.

    Args:
        record: what `layerskip.timing.sublayers.measure` returned.
        context: tokens before the round. The middle of the record's contexts by default.
        draft_vocabulary: how many tokens the draft can draw, all by default.

    Raises:
        ValueError: a draft vocabulary, low precision or number of experts that the record does not
            have, or a trained module, which is none of the parts.
    """
    whole = _Pass(record, context)
    skip = skip.resolve(len(record["attention"]))
    if skip.trained is not None and skip.trained.module:
        raise ValueError(
            f"costs of sublayers do not price {skip.trained.words}; time the whole draft, with "
            "layerskip.timing.tables.cost_tables"
        )
    low, read, rounded = _low(record, skip), _read(record, skip), set(skip.rounded())
    sublayers = sum(read[i] * (low if i in rounded else whole.weights)[i] for i in skip.kept())
    low_head = skip.low is not None and skip.low.head
    head = record["low_head" if low_head else "head"] * _share(record, draft_vocabulary)
    keys = whole.keys_of(skip.window)
    # a short draft repeats its sublayers sooner than a plain step does
    repeated = dict(record.get("repeated", [[1.0, 1.0]]))
    factor = on_line(repeated, (sublayers + head) / (sum(whole.weights) + record["head"]))
    draft = factor * (sublayers + head) + sum(keys[i] for i in skip.kept()) + record["rest"]
    return whole.table(draft, skip.shared_prefix())


def passes_table(record: Mapping[str, Any], context: float | None = None) -> CostTable:
    """What looked-up drafts cost: only the passes that verify them."""
    return _Pass(record, context).table(0.0)


def _low(record: Mapping[str, Any], skip: SkipConfig) -> list[float]:
    """Seconds of every sublayer in a resolved config's low precision, over one token."""
    if skip.low is None:
        return []
    bits = record.get("low_bits")
    if bits != skip.low.bits:
        having = "no low precision" if bits is None else f"low precision of {bits} bits only"
        raise ValueError(
            f"these costs know {having}, so that {skip.low.bits} bits have no price; {AGAIN}"
        )
    head = record.get("low_head_bits", bits)
    if skip.low.head_bits not in (None, head):
        raise ValueError(
            f"these costs know a head in {head} bits only, so that {skip.low.head_bits} bits have "
            f"no price; {AGAIN}"
        )
    if skip.rounded() and (skip.trained and skip.trained.hash) != record.get("healed"):
        raise ValueError(f"these costs are of drafts that other weights heal, or none; {AGAIN}")
    pairs = zip(record["low_attention"], record["low_mlp"], strict=True)
    return [seconds for pair in pairs for seconds in pair]


def _read(record: Mapping[str, Any], skip: SkipConfig) -> list[float]:
    """By sublayer, the share of its bytes that a draft of so many experts reads."""
    shares, layers = record.get("experts", {}), len(record["attention"])
    if skip.experts is None:
        return [1.0] * (2 * layers)
    if str(skip.experts) not in shares:
        raise ValueError(
            f"these costs know drafts of {', '.join([*shares, 'all'])} experts, so that "
            f"{skip.experts} have no price; measure them again on this model"
        )
    return [share for mlp in shares[str(skip.experts)] for share in (1.0, mlp)]


def _share(record: Mapping[str, Any], vocabulary: int | None) -> float:
    """The share of the head that a draft of so many tokens reads."""
    if vocabulary is None:
        return 1.0
    if "vocabulary" not in record:
        raise ValueError(
            "these costs have no trimmed head, so that a draft vocabulary has no price; "
            "measure them again, on a model whose head is a plain weight"
        )
    return float(vocabulary / record["vocabulary"])
