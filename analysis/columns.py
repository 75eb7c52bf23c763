"""Knows which columns of a table are shown, under which heading and how rounded; no markup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

Cell = Callable[[Any], str]


@dataclass(frozen=True)
class Table:
    """A table: all of it goes to a CSV file, the columns of SHOWN onto the page."""

    name: str
    frame: pd.DataFrame


def _number(digits: int) -> Cell:
    return lambda value: f"{value:.{digits}f}"


_ONE, _TWO, _THREE, _WHOLE, _TEXT = _number(1), _number(2), _number(3), _number(0), str
_SHARE: Cell = "{:.0%}".format

COLUMNS: Mapping[str, tuple[str, Cell]] = {
    # what a line is of
    "batch_size": ("batch", _TEXT),
    "category": ("prompts", _TEXT),
    "prompts": ("n", _TEXT),
    "other_run": ("other run", _TEXT),
    "left_out": ("left out", _TEXT),
    "attention": ("attention of layers", _TEXT),
    "mlp": ("MLP of layers", _TEXT),
    "kind": ("proposed by", _TEXT),
    "origin": ("proposed by", _TEXT),
    "number": ("trial", _TEXT),
    "draft_length": ("draft length", _TEXT),
    "max_draft_length": ("up to", _WHOLE),
    # speeds
    "tokens_per_second": ("tokens/s", _ONE),
    "speedup": ("speedup", _TWO),
    "low": ("from", _TWO),
    "high": ("to", _TWO),
    "mean_of_ratios": ("mean of ratios", _TWO),
    "decode_speedup": ("decoding only", _TWO),
    "first_ms": ("first token, ms", _ONE),
    "other_speedup": ("other speedup", _TWO),
    "overlap": ("overlap", lambda value: "yes" if value else "no"),
    "forced_speedup": ("forced", _TWO),
    "predicted": ("predicted", _TWO),
    "held_out": ("held out", _TWO),
    "measured": ("measured", _TWO),
    "efficiency": ("efficiency", _TWO),
    "efficiency_a": ("first half", _TWO),
    "efficiency_b": ("second half", _TWO),
    "formula": ("formula at own length", _TWO),
    "best_length": ("best fixed length", _WHOLE),
    "best_formula": ("formula at best", _TWO),
    "of_best_fixed": ("of best fixed", _THREE),
    "best": ("best", _TWO),
    "best_trial": ("its trial", _WHOLE),
    # acceptance and costs
    "acceptance": ("acceptance", _TWO),
    "alpha": ("alpha", _TWO),
    "acceptance_rate": ("r", _TWO),
    "mean_acceptance_length": ("mean acceptance length", _TWO),
    "tokens_per_pass": ("tokens per target pass", _TWO),
    "mean_draft_length": ("mean draft length", _TWO),
    "chain": ("chain", _TWO),
    "agreement": ("agreement", _TWO),
    "match": ("match", _TWO),
    "calibration_error": ("calibration error", _TWO),
    "draft_cost": ("c", _THREE),
    "bound": ("bound 1/c", _ONE),
    "prefill": ("prefill", _THREE),
    "draft": ("draft", _THREE),
    "verify": ("verify", _THREE),
    "other": ("other", _THREE),
    "rest": ("not told apart", _THREE),
    "total": ("total", _THREE),
    "importance": ("importance", _THREE),
    "alone_speedup": ("speedup alone", _THREE),
    "alone_acceptance": ("acceptance alone", _THREE),
    "alone_cost": ("c alone", _THREE),
    # texts
    "near_ties": ("near-ties", _WHOLE),
    "equal": ("equal", _WHOLE),
    "faults": ("faults", _WHOLE),
    "repeated_4grams": ("repeated 4-grams", _SHARE),
    "share": ("share", _SHARE),
    "finalists": ("finalists", _WHOLE),
}
"""Heading and form of the columns, wherever they occur; the others are shown as they are called."""

_TOTALS = {"speedup": "ratio of totals"}
_PRICED = {"speedup": "priced speedup"}

SHOWN: Mapping[str, tuple[str, str, str, Mapping[str, str]]] = {
    "speedup": (
        "Speedup",
        "Ratio of totals is the headline: the sum over prompts of seconds per token (median over "
        "repeats) of one method over that of the other, with a 95% bootstrap interval over "
        "prompts (both methods of a prompt drawn together). The mean of the prompts' own ratios "
        "stands beside it. Decoding leaves the time to the first token out.",
        "batch_size category method over prompts tokens_per_second speedup low high "
        "mean_of_ratios decode_speedup first_ms",
        _TOTALS,
    ),
    "losslessness": (
        "Losslessness",
        "Texts compared with the baseline's, all repeats. A near-tie is a difference at a place "
        "where two scores are closer than the arithmetic resolves; anything else is a fault.",
        "method compared equal near_ties faults",
        {},
    ),
    "acceptance": (
        "Acceptance",
        "alpha = accepted / (accepted + rejected); r = accepted / drafted: three different things "
        "with tokens per target pass.",
        "batch_size category method rounds alpha acceptance_rate mean_acceptance_length "
        "tokens_per_pass mean_draft_length",
        {},
    ),
    "positions": (
        "Acceptance by draft position",
        "Acceptance of a token where all before it were accepted; chain: all up to it accepted.",
        "method position tried acceptance chain",
        {},
    ),
    "phases": (
        "Where the time goes",
        "Milliseconds per new token.",
        "batch_size method prefill draft verify other rest total",
        {},
    ),
    "predictions": (
        "Predicted and measured",
        "Decode speedup over the baseline. Predicted: the other half of the prompts' rounds "
        "priced with the cost table. Efficiency = measured / predicted, of all prompts and of "
        "each half alone. Formula: Leviathan's at alpha, for fixed draft lengths.",
        "batch_size category method predicted measured efficiency efficiency_a efficiency_b alpha "
        "formula best_length best_formula draft_cost bound",
        {},
    ),
    "controllers": (
        "Controllers",
        "Counted rounds of methods with one skip config, priced with one cost table.",
        "batch_size method controller speedup of_best_fixed mean_draft_length alpha",
        _PRICED,
    ),
    "repetition": (
        "Repetition",
        "Share of 4-grams that had occurred before in the same text: the more, the easier.",
        "category method texts repeated_4grams loops",
        {},
    ),
    "exits": (
        "Exits",
        "Agreement of an exit's most likely token with the target's, match under the law, and "
        "mean distance of confidence from matched share.",
        "exit agreement match calibration_error",
        {},
    ),
    "what-if": (
        "What if",
        "Simulated rounds over the trace, priced; costs from the measured parts of a pass, or "
        "scaled from a drafting method's table.",
        "exit draft_length threshold speedup acceptance mean_draft_length costs",
        {"speedup": "priced speedup", "acceptance": "r"},
    ),
    "repeatability": (
        "The same numbers twice?",
        "Runs of the same thing: do the intervals overlap?",
        "run other_run batch_size method speedup other_speedup overlap",
        {},
    ),
    "comparison": (
        "All runs",
        "Ratio of totals over each run's baseline, all prompts.",
        "run batch_size method prompts tokens_per_second speedup low high mean_of_ratios",
        _TOTALS,
    ),
    "search-finalists": (
        "Finalists",
        "Speedup over plain decoding. Predicted: replayed rounds, priced; on the traced prompts, "
        "and on those held out. Measured: on the clock, interleaved with plain decoding, with its "
        "95% interval. Efficiency = measured / predicted, held out where known.",
        "name role predicted held_out measured low high efficiency alpha draft_cost bound "
        "tokens_per_second acceptance_rate equal near_ties faults left_out attention mlp "
        "controller max_draft_length threshold",
        {"equal": "equal texts"},
    ),
    "search-origins": (
        "Where the trials came from",
        "Best: the highest priced speedup of each, forced where drafting does not pay. Copies: "
        "the same set again.",
        "kind trials share failed copies best best_trial finalists",
        {},
    ),
    "search-sublayers": (
        "Sublayers",
        "Importance: how much of the differences between trials the sampler puts down to a "
        "switch. Alone: the trial that leaves out nothing else, forced to draft.",
        "switch importance alone_speedup alone_acceptance alone_cost finalists",
        {"finalists": "finalists without it"},
    ),
    "search-trials": (
        "Best trials",
        "By priced speedup over plain decoding, no copies; all trials are in the CSV file. "
        "Forced: without turning off a draft that does not pay.",
        "number origin left_out attention mlp speedup forced_speedup acceptance draft_cost bound",
        {"speedup": "priced speedup", "acceptance": "alpha"},
    ),
}
LONG = 20  # rows from which on a table is folded away


def cells_of(table: Table) -> tuple[list[tuple[str, bool]], list[list[str]]]:
    """Headings, each with whether its column holds words, and rows as text; NaN is a dash."""
    _, _, wanted, special = SHOWN[table.name]
    names = [name for name in wanted.split() if name in table.frame]
    columns = [table.frame[name].tolist() for name in names]
    known = [COLUMNS.get(name, (name, _TEXT)) for name in names]
    heads = [
        (special.get(name, head), any(isinstance(value, str) for value in column))
        for name, (head, _), column in zip(names, known, columns, strict=True)
    ]
    formats = [how for _, how in known]
    rows = [
        ["–" if pd.isna(value) else how(value) for how, value in zip(formats, row, strict=True)]  # noqa: RUF001
        for row in zip(*columns, strict=True)
    ]
    return heads, rows
