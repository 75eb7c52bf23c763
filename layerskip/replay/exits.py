"""What each early exit is worth, from one trace: agreement, calibration, the what-if table.

No clock is read here: prices come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from layerskip.config import SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.laws import Law
from layerskip.model.opening import opened_of
from layerskip.replay.drafts import replay
from layerskip.replay.simulation import count_rounds
from layerskip.replay.trace import DRAFT_LENGTH, Trace, take_trace
from layerskip.requests import end_tokens, warpers

DRAFT_LENGTHS = tuple(range(1, DRAFT_LENGTH + 1))
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)
BINS = 10  # of confidence

Progress = Callable[[str, float], None]


def law_of(settings: Mapping[str, Any]) -> Law:
    """The law of a record's `law` block, for one row: temperature, top-k, top-p, in that order."""
    if not settings["do_sample"]:
        return Law(do_sample=False, rows=1)
    chosen = (settings.get(name) for name in ("temperature", "top_k", "top_p"))
    return Law(warpers(*chosen), do_sample=True, rows=1)


def exit_trace(
    model: Any,
    prompts: Sequence[torch.Tensor],
    *,
    names: Sequence[str],
    law: Mapping[str, Any],
    max_new_tokens: int = 64,
    progress: Progress = lambda _what, _share: None,
) -> dict[str, Any]:
    """The "trace" record of a model on held-out prompts.

    Args:
        model: a causal language model, or one opened as `Sublayers`.
        prompts: token ids without pads, (T,) or (1, T) each; `names` are their ids.
        law: the record's `law` block: do_sample, temperature, top_p, top_k, seed, acceptance; text
            i is drawn from seed + i.
    """
    opened = opened_of(model)
    seed = law.get("seed") or 0
    trace = take_trace(
        opened,
        prompts,
        max_new_tokens=max_new_tokens,
        law=law_of(law),
        seeds=[seed + number for number in range(len(prompts))],
        eos=end_tokens(opened.model),
        acceptance=law.get("acceptance") or "coupled",
        progress=progress,
    )
    return {
        "kind": "trace",
        "prompts": list(names),
        "tokens": sum(text.emitted for text in trace.texts),
        "context": trace.context,
        "law": dict(law),
        "exits": agreement(trace),
        "what_if": what_if(trace, progress=progress),
    }


def agreement(trace: Trace) -> list[dict[str, Any]]:
    """Per exit 1..L-1, over all starts: agreement of the likeliest tokens, match, calibration.

    Match is with the text, under the trace's law and accept rule: when greedy, agreement.
    Calibration: of the drafted tokens whose confidence lies in a bin, how many, their mean
    confidence, and how many matched.
    """
    following = torch.cat([text.following[: text.starts] for text in trace.texts])  # (N,)
    tables = zip(*trace.exits, strict=True)  # by kind, then by text
    drafted, sure, *_, likeliest = (
        torch.cat([t[:, : text.starts] for t, text in zip(table, trace.texts, strict=True)], dim=1)
        for table in tables
    )  # (L, N) each
    matches, confidences = drafted == following, sure.double()
    agrees = likeliest == likeliest[-1] if trace.law.do_sample else matches  # (L, N)
    bins = (confidences * BINS).long().clamp(0, BINS - 1)
    bins[~confidences.isfinite()] = BINS  # in none
    return [
        {
            "exit": row + 1,
            "agreement": float(agrees[row].double().mean()),
            "match": float(matches[row].double().mean()),
            "confidence": [
                _bin(number, confidences[row], matches[row], bins[row] == number)
                for number in range(BINS)
            ],
        }
        for row in range(trace.model.num_layers - 1)
    ]


def _bin(
    number: int, confidences: torch.Tensor, matches: torch.Tensor, mine: torch.Tensor
) -> dict[str, Any]:
    """A bin's entry of the calibration table, of those tokens (N,) that are in it."""
    count = int(mine.sum())
    return {
        "low": number / BINS,
        "high": (number + 1) / BINS,
        "count": count,
        "mean": float(confidences[mine].mean()) if count else None,
        "matched": int(matches[mine].sum()),
    }


def default_exits(num_layers: int) -> tuple[int, ...]:
    """Every exit of the first half of the layers, and every second one behind it."""
    half = num_layers // 2
    return (*range(1, half + 1), *range(half + 2, num_layers, 2))


def what_if(
    trace: Trace,
    exits: Sequence[int] | None = None,
    draft_lengths: Sequence[int] = DRAFT_LENGTHS,
    thresholds: Sequence[float] = THRESHOLDS,
    *,
    progress: Progress = lambda _what, _share: None,
) -> dict[str, Any]:
    """Exact counts of decoding the trace's texts with every exit, draft length and threshold.

    A cell is what the `confidence` controller would have done (threshold 0: `fixed`), text by text.

    Returns:
        The axes and, by [exit][draft length][threshold], totals of rounds, drafted and emitted
        tokens; `lengths` adds [d], the rounds that drafted d = 0, 1, ... tokens, which is what any
        cost table needs for the exact price.
    """
    exits = default_exits(trace.model.num_layers) if exits is None else exits
    lengths = []
    for number, layer in enumerate(exits):
        progress("what-if table", number / len(exits))
        replayed = replay(trace, SkipConfig.early_exit(layer), max(draft_lengths))
        lengths.append([[count_rounds(replayed, d, t) for t in thresholds] for d in draft_lengths])

    def each(total: Callable[[Sequence[int]], int]) -> list[list[list[int]]]:
        return [[[total(counts) for counts in row] for row in rows] for rows in lengths]

    return {
        "exits": list(exits),
        "draft_lengths": list(draft_lengths),
        "thresholds": list(thresholds),
        "rounds": each(sum),
        "drafted": each(lambda counts: sum(d * n for d, n in enumerate(counts))),
        "emitted": each(lambda _: trace.starts),  # whatever is drafted: the text is the target's
        "lengths": lengths,
    }


def best_exit(table: Mapping[str, Any], costs: Callable[[int], CostTable]) -> tuple[int, float]:
    """The exit of the what-if cell of the highest predicted speedup, and that speedup.

    Of equals the shallowest. `costs` returns the cost table of an exit layer.
    """
    speedups = []
    for layer, lengths, emitted in zip(
        table["exits"], table["lengths"], table["emitted"], strict=True
    ):
        prices = costs(layer)
        for counts, tokens in zip(chain(*lengths), chain(*emitted), strict=True):
            spent = sum(n * prices.round_cost(drafted) for drafted, n in enumerate(counts))
            speedups.append((layer, tokens / spent))
    if not speedups:
        raise ValueError("the what-if table has no exits; give at least one")
    return max(speedups, key=lambda pair: pair[1])
