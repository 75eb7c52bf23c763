"""Knows which columns of a table are shown, under which heading and how rounded; no markup."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class Table:
    """A table: all of it goes to a CSV file, the columns of SHOWN onto the page."""

    name: str
    frame: pd.DataFrame


HEADINGS = {
    "acceptance_rate": "r",
    "accepted_1": "accepted",
    "accepted_2": "2nd",
    "accepted_3": "3rd",
    "accepted_4": "4th",
    "alone_cost": "c alone",
    "at_one_1": "at T=1",
    "batch_size": "batch",
    "best_formula": "formula at best length",
    "bound": "bound 1/c",
    "category": "prompts",
    "draft_cost": "c",
    "decode_low": "decode from",
    "decode_high": "decode to",
    "efficiency_a": "of one half",
    "efficiency_b": "of the other",
    "first_ms": "first token, ms",
    "forced_speedup": "forced",
    "formula": "formula at own length",
    "gigabytes_per_second": "GB/s",
    "greedy_1": "greedy",
    "greedy_measured": "greedy, measured",
    "high": "to",
    "low": "from",
    "megabytes": "MB of a target pass",
    "memory": "memory, GB/s",
    "mlp": "MLP",
    "near_ties": "near-ties",
    "overlap_before": "overlap before",
    "own_megabytes": "MB",
    "prompts": "n",
    "rest": "not told apart",
    "tokens_per_pass": "tokens per target pass",
    "tokens_per_second": "tokens/s",
}
"""Headings that say more than the column's name; the others are the name's words."""

SHOWN: Mapping[str, tuple[str, str, str]] = {
    "speedup": (
        "Speedup",
        "Tokens a second are all tokens over all seconds, a prompt counting with the medians of "
        "its repeats; the speedup is their ratio, with a 95% bootstrap interval over prompts (both "
        "methods of a prompt drawn together). The mean of the prompts' own ratios stands beside "
        "it. Prefill: the time to the first token alone; decode: what comes after it.",
        "batch_size category method over prompts tokens_per_second speedup low high "
        "mean_of_ratios prefill_speedup decode_speedup decode_low decode_high first_ms",
    ),
    "losslessness": (
        "Losslessness",
        "Texts compared with the baseline's, all repeats. A near-tie is a difference at a place "
        "where two scores are closer than the arithmetic resolves; anything else is a fault.",
        "method compared equal near_ties faults",
    ),
    "acceptance": (
        "Acceptance",
        "alpha = accepted / (accepted + rejected); r = accepted / drafted: three different things "
        "with tokens per target pass.",
        "batch_size category method rounds alpha acceptance_rate mean_acceptance_length "
        "tokens_per_pass mean_draft_length",
    ),
    "sources": (
        "Sources of drafts",
        "One a round, chosen for what it promises. Share: of all rounds; none: a plain step.",
        "batch_size category method source share alpha acceptance_rate mean_acceptance_length "
        "mean_draft_length",
    ),
    "positions": (
        "Acceptance by draft position",
        "Acceptance of a token where all before it were accepted; chain: all up to it accepted.",
        "method position tried acceptance chain",
    ),
    "phases": (
        "Where the time goes",
        "Milliseconds per new token.",
        "batch_size method prefill draft verify other rest total",
    ),
    "weights-read": (
        "Weights read",
        "Weights (no cache, no activations) that passes behind the first token read a second, each "
        "once a pass, beside what sweeps over a large buffer read on the same threads between the "
        "calls. Medians. Weights that a cache keeps between passes can make the share exceed 1.",
        "batch_size method megabytes gigabytes_per_second memory share",
    ),
    "predictions": (
        "Predicted and measured",
        "Decode speedup over the baseline. Predicted: the other half of the prompts' rounds "
        "priced with the cost table. Efficiency = measured / predicted, of all prompts and of "
        "either half alone. Formula: Leviathan's at alpha, for fixed draft lengths.",
        "batch_size category method predicted measured efficiency efficiency_a efficiency_b alpha "
        "formula best_length best_formula draft_cost bound",
    ),
    "repetition": (
        "Repetition",
        "Share of 4-grams that had occurred before in the same text: the more, the easier.",
        "category method texts repeated_4grams loops",
    ),
    "exits": (
        "Exits",
        "Agreement of an exit's most likely token with the target's, match under the law, and "
        "mean distance of confidence from matched share.",
        "exit agreement match calibration_error",
    ),
    "what-if": (
        "What if",
        "Simulated rounds over the trace, priced by the measured parts of a pass. Acceptance: r.",
        "exit draft_length threshold speedup acceptance mean_draft_length",
    ),
    "comparison": (
        "All runs",
        "Ratio of totals over the run's baseline, all prompts.",
        "run batch_size method prompts tokens_per_second speedup low high mean_of_ratios",
    ),
    "search-finalists": (
        "Finalists",
        "Speedup over plain decoding. Predicted: replayed rounds, priced; on the traced prompts, "
        "and on those held out. Measured: on the clock, interleaved with plain decoding, with its "
        "95% interval. Efficiency = measured / predicted, held out where known.",
        "name role predicted held_out measured low high efficiency alpha draft_cost bound "
        "tokens_per_second acceptance_rate equal near_ties faults left_out attention mlp rounded "
        "lookup controller max_draft_length threshold",
    ),
    "search-sublayers": (
        "Sublayers",
        "Importance: how much of the differences between trials the sampler puts down to a "
        "switch. Alone: the trial that leaves out nothing else, forced to draft. Finalists: those "
        "that leave it out.",
        "switch importance alone_speedup alone_acceptance alone_cost finalists",
    ),
    "search-trials": (
        "Best trials",
        "By priced speedup over plain decoding, no copies; all trials are in the CSV file. "
        "Forced: without turning off a draft that does not pay. Acceptance: alpha.",
        "number origin left_out attention mlp rounded speedup forced_speedup acceptance "
        "draft_cost bound",
    ),
    "trainings": (
        "Trainings",
        "Overlap with the target's law: of the first drafted token, before training and after it, "
        "on windows kept apart. Accepted: share of all places of held-out texts whose first 1, 2, "
        "3, 4 drafted tokens are accepted with shared noise. Predicted by the formula at the best "
        "draft length; measured beside lookups, with its 95% interval; before: measured, what "
        "drafted before. It pays where it is faster by more than prompts differ.",
        "draft of pays measured low high before predicted draft_cost accepted_1 accepted_2 "
        "accepted_3 accepted_4 greedy overlap_before overlap loss seed tokens minutes parameters "
        "own_megabytes",
    ),
    "training-curves": (
        "Curves",
        "Loss, and overlap of each step of the draft, on windows kept apart.",
        "draft tokens loss step overlap",
    ),
    "drafts": (
        "Drafts",
        "Accepted: share of all places of the target's texts whose first 1, 2, 3, 4 drafted tokens "
        "are accepted, with shared noise; greedy, and at temperature 1, the first alone. Offered: "
        "share of places where a lookup finds anything. Predicted by the formula at the best fixed "
        "length, of mixtures by simulated rounds; measured: decoding, all drafts and plain in "
        "turn, with the 95% interval over prompts.",
        "draft measured low high predicted draft_cost accepted_1 accepted_2 accepted_3 accepted_4 "
        "greedy_1 at_one_1 offered greedy_measured own_megabytes parameters tokens minutes "
        "equal near_ties faults",
    ),
}
"""By table: title, note, and the columns shown, in order."""

LONG = 20  # rows from which on a table is folded away


def columns_of(table: Table) -> list[tuple[str, bool, list[str]]]:
    """Of each column shown: heading, whether it holds words, and cells as text; NaN is a dash."""
    _, _, wanted = SHOWN[table.name]
    return [
        (HEADINGS.get(name, name.replace("_", " ")), *_cells(table.frame[name].tolist()))
        for name in wanted.split()
        if name in table.frame
    ]


def _cells(values: list[object]) -> tuple[bool, list[str]]:
    """Fractions of a column have equally many decimals, so that its largest shows 3 digits."""
    words = any(isinstance(value, str) for value in values)
    numbers = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    digits = 0
    if any(not number.is_integer() for number in numbers):
        most = max(map(abs, numbers))
        digits = max(0, 2 - math.floor(math.log10(most)))
    return words, [
        "–" if pd.isna(v) else f"{v:,.{digits}f}" if isinstance(v, float) else _whole(v)  # noqa: RUF001
        for v in values
    ]


def _whole(value: object) -> str:
    """A cell that is no fraction: words, or a count with its thousands apart."""
    counted = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if counted else str(value)
