"""What rounds of any skip config cost, added up from the measured seconds of its parts.

The parts are those of a "cost" record: the search, which measures it, and the analysis, which reads
it from a file, price drafts by the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerskip.config import SINK, SkipConfig
from layerskip.costs.speculation import CostTable, rising

LOW_FACTS = ("low_bits", "low_head_bits", "healed")
AGAIN = "measure them again with this draft's low precision"


def low_facts(low: SkipConfig | None) -> dict[str, Any]:
    """What a record says of the drafts that its prices of low precision are of; None: it has none.

    The head's bits, where they are not those of the rest, and the hash of what heals them.
    """
    if low is None or low.low is None:
        return {}
    facts: dict[str, Any] = {"low_bits": low.low.bits}
    if low.low.head_bits not in (None, low.low.bits):
        facts["low_head_bits"] = low.low.head_bits
    return facts if low.trained is None else {**facts, "healed": low.trained.hash}


def step_seconds(record: Mapping[str, Any], context: int | None = None) -> float:
    """Seconds of one target step of the whole batch: a pass over one token of every row."""
    return float(_at(record, "passes", context)[0])


def cost_table(
    record: Mapping[str, Any],
    skip: SkipConfig,
    context: int | None = None,
    *,
    draft_vocabulary: int | None = None,
) -> CostTable:
    """c and v of any skip config, priced by the parts a round of it runs.

    A draft step runs the kept sublayers and the head over one token. Verification carries the last
    drafted token through the shared prefix alone, then all drafted tokens and the one before them
    through the rest of the model and the head. Sublayers in low precision have prices of
    their own, with what heals them. MLPs of fewer experts cost as much less as they read less, and
    attention with a window as much as with no more text than that.

    Args:
        record: what `layerskip.timing.sublayers.measure` returned; its `repeated` and `draft_rest`,
            which correct the draft's share, may be missing, `trimmed_head` where the vocabulary is
            whole, and what is `low` where nothing of the draft is.
        skip: for the record's number of layers.
        context: tokens before the round; between the record's contexts costs lie on a line, beyond
            them they stay. The middle of the record's contexts by default.
        draft_vocabulary: how many tokens the draft can draw, all by default; between the record's
            sizes the head's cost lies on a line, below them it stays.

    Raises:
        ValueError: a draft vocabulary, low precision or number of experts that the record does not
            know, or a trained module, which is none of the parts.
    """
    attention, mlp, head, rest = (
        _at(record, name, context) for name in ("attention", "mlp", "head", "rest")
    )
    layers = len(attention[0])
    skip = skip.resolve(layers)
    if skip.trained is not None and skip.trained.module:
        raise ValueError(
            f"costs of sublayers do not price {skip.trained.words}; time the whole draft, with "
            "layerskip.timing.tables.cost_tables"
        )
    prefix, counts = skip.shared_prefix(), record["counts"]
    sublayers = [  # [count][sublayer]
        [seconds for pair in zip(a, m, strict=True) for seconds in pair]
        for a, m in zip(attention, mlp, strict=True)
    ]
    step = sum(sublayers[0]) + head[0] + rest[0]
    near = _seen(record, skip, context)
    low, rounded = _low(record, skip, near), set(skip.rounded())
    read = _read(record, skip)
    drafted = list(sublayers[0])
    drafted[::2] = _at(record, "attention", near)[0]
    exact = sum(read[i] * drafted[i] for i in skip.kept() if i not in rounded)
    cheap = sum(read[i] * low[i] for i in rounded)
    share = (exact + cheap) / sum(sublayers[0])
    # a draft of everything repeats nothing sooner than a plain step does
    factor, draft_rest = 1.0, rest[0]
    # what is low was timed in drafts of everything low, which repeat as much as they do
    low_factor = 1.0
    if "repeated" in record:
        shares = [*_at(record, "repeated_shares", context), 1.0]
        factors = [*_at(record, "repeated", context), 1.0]
        factor = _on_line(shares, factors, share)
        timed = _on_line(shares, factors, sum(low) / sum(sublayers[0]))
        low_factor = factor / timed if timed > 0 else 1.0  # noise may leave nothing of a factor
    if "draft_rest" in record:
        draft_rest = _at(record, "draft_rest", context)
    if skip.low is not None and skip.low.head:
        cheap += _head(record, "low_", _at(record, "low_head", context), context, draft_vocabulary)
    else:
        exact += _head(record, "", head[0], context, draft_vocabulary)
    draft = factor * exact + low_factor * cheap + draft_rest
    shared = sum(sublayers[0][:prefix])
    verifies = [
        shared + sum(parts[prefix:]) + norm_and_head + around
        for parts, norm_and_head, around in zip(sublayers, head, rest, strict=True)
    ]
    return CostTable(draft / step, _verify(counts, verifies, step), "measured")


def passes_table(record: Mapping[str, Any], context: int | None = None) -> CostTable:
    """What looked-up drafts cost: nothing themselves, and whole passes that verify them.

    Args:
        record, context: as for `cost_table`.
    """
    passes = _at(record, "passes", context)
    return CostTable(0.0, _verify(record["counts"], passes, passes[0]), "measured")


def _verify(counts: Sequence[int], seconds: Sequence[float], step: float) -> tuple[float, ...]:
    """v of 1, 2, ... tokens, from the seconds of passes of some counts."""
    seconds = rising(seconds)  # a longer pass is never cheaper; where it looks so, that was noise
    counted = range(2, counts[-1] + 1)
    return (1.0, *(max(1.0, _on_line(counts, seconds, count) / step) for count in counted))


def _seen(record: Mapping[str, Any], skip: SkipConfig, context: int | None) -> float:
    """How many slots a draft's attention sees at a context."""
    every = _typical(record, context)
    return every if skip.window is None else min(every, skip.window + SINK)


def _low(record: Mapping[str, Any], skip: SkipConfig, context: float) -> list[float]:
    """Seconds of every sublayer in a resolved config's low precision, over one token."""
    if skip.low is None:
        return []
    bits = record.get("low_bits")
    if bits != skip.low.bits:
        known = "no low precision" if bits is None else f"low precision of {bits} bits only"
        raise ValueError(
            f"these costs know {known}, so that {skip.low.bits} bits have no price; {AGAIN}"
        )
    head = record.get("low_head_bits", bits)
    if skip.low.head_bits not in (None, head):
        raise ValueError(
            f"these costs know a head in {head} bits only, so that {skip.low.head_bits} bits have "
            f"no price; {AGAIN}"
        )
    if skip.rounded() and (skip.trained and skip.trained.hash) != record.get("healed"):
        raise ValueError(f"these costs are of drafts that other weights heal, or none; {AGAIN}")
    pairs = zip(
        *(_at(record, f"low_{kind}", context) for kind in ("attention", "mlp")), strict=True
    )
    return [seconds for pair in pairs for seconds in pair]


def _read(record: Mapping[str, Any], skip: SkipConfig) -> list[float]:
    """By sublayer, the share of its bytes that a draft of so many experts reads."""
    known, layers = record.get("experts", {}), len(record["attention"][0][0])
    if skip.experts is None:
        return [1.0] * (2 * layers)
    if str(skip.experts) not in known:
        raise ValueError(
            f"these costs know drafts of {', '.join([*known, 'all'])} experts, so that "
            f"{skip.experts} have no price; measure them again on this model"
        )
    return [share for mlp in known[str(skip.experts)] for share in (1.0, mlp)]


def _head(
    record: Mapping[str, Any], low: str, whole: float, context: int | None, vocabulary: int | None
) -> float:
    """Seconds of a draft's head over one token, exact or `low_`, of so many tokens."""
    if vocabulary is None:
        return whole
    if f"{low}trimmed_head" not in record:
        raise ValueError(
            "these costs have no trimmed head, so that a draft vocabulary has no price; "
            "measure them again, on a model whose head is a plain weight"
        )
    sizes = [*record["head_sizes"], record["vocabulary"]]
    known = [*_at(record, f"{low}trimmed_head", context), whole]
    return float(_on_line(sizes, known, vocabulary))


def _at(record: Mapping[str, Any], name: str, context: float | None) -> Any:
    """A table of the record at a context."""
    return _on_line(record["contexts"], record[name], _typical(record, context))


def _typical(record: Mapping[str, Any], context: float | None) -> float:
    """A context, by default the middle of the record's."""
    contexts = record["contexts"]
    return (contexts[0] + contexts[-1]) / 2 if context is None else context


def _on_line(places: Sequence[float], values: Sequence[Any], place: float) -> Any:
    """Values, or nested lists of them, on straight lines between places; the last ones beyond."""
    place = min(max(place, places[0]), places[-1])
    high = next(i for i, known in enumerate(places) if known >= place)
    low = max(0, high - 1)
    part = 1.0 if high == low else (place - places[low]) / (places[high] - places[low])
    return _mix(values[low], values[high], part)


def _mix(low: Any, high: Any, part: float) -> Any:
    if isinstance(low, Sequence):
        return [_mix(a, b, part) for a, b in zip(low, high, strict=True)]
    return low + part * (high - low)
