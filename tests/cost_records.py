"""Made-up "cost" records: what sublayers would cost on machines that drafts like, or do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def cost_record(
    layers: int = 6,
    *,
    attention: float | Sequence[float] = 1e-3,
    mlp: float | Sequence[float] = 1e-3,
    head: float = 5e-4,
    rest: float = 5e-4,
    growth: float = 0.03,
    by_context: float = 0.0,
    trimmed: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Seconds per sublayer, head and rest; each further token of a pass adds `growth` of them.

    Args:
        attention, mlp: of each layer alike, or one by one.
        by_context: part that attention costs more at the longer of the two contexts.
        trimmed: seconds of heads by their rows, for a vocabulary of 97.
    """
    counts, contexts = list(range(1, 10)), [16, 64]
    more = [1 + growth * (count - 1) for count in counts]
    own = {
        name: [value] * layers if isinstance(value, float) else list(value)
        for name, value in (("attention", attention), ("mlp", mlp))
    }
    record: dict[str, Any] = {"kind": "cost", "batch_size": 1, "contexts": contexts}
    record |= {"counts": counts, "attention": [], "mlp": [], "head": [], "rest": [], "passes": []}
    for longer in (1.0, 1.0 + by_context):
        parts = {
            "attention": [[seconds * longer * m for seconds in own["attention"]] for m in more],
            "mlp": [[seconds * m for seconds in own["mlp"]] for m in more],
            "head": [head * m for m in more],
            "rest": [rest * m for m in more],
        }
        sums = zip(*parts.values(), strict=True)
        for name, value in parts.items():
            record[name].append(value)
        record["passes"].append([sum(a) + sum(m) + h + r for a, m, h, r in sums])
    if trimmed:
        record |= {"vocabulary": 97, "head_sizes": list(trimmed)}
        record["trimmed_head"] = [list(trimmed.values())] * len(contexts)
    return record


MACHINES = {
    "reads weights": cost_record(),
    "free verification": cost_record(growth=0.0, rest=1e-5, head=1e-5),
    "dear verification": cost_record(growth=0.4),
    "dear heads": cost_record(head=6e-3),
    "trimmed heads": cost_record(head=6e-3, trimmed={6: 3e-4, 12: 7e-4, 24: 1.5e-3, 48: 3e-3}),
    "dear rest": cost_record(rest=2e-2),
    "cheap ends": cost_record(attention=[1e-4, 2e-3, 3e-3, 1e-3, 5e-4, 1e-4], mlp=4e-4, growth=0.1),
    "long contexts": cost_record(by_context=3.0, growth=0.06),
}
"""By what is special about them."""
