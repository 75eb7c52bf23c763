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


_TWO, _THREE, _WHOLE, _TEXT, _SHARE = _number(2), _number(3), _number(0), str, "{:.0%}".format

SHOWN: Mapping[str, tuple[str, str, Mapping[str, tuple[str, Cell]]]] = {
    "speedup": (
        "Speedup",
        "Ratio of totals is the headline: the sum over prompts of seconds per token (median over "
        "repeats) of one method over that of the other, with a 95% bootstrap interval over prompts "
        "(both methods of a prompt drawn together). The mean of the prompts' own ratios stands "
        "beside it. Decoding leaves the time to the first token out.",
        {
            "batch_size": ("batch", _TEXT),
            "category": ("prompts", _TEXT),
            "method": ("method", _TEXT),
            "over": ("over", _TEXT),
            "prompts": ("n", _TEXT),
            "tokens_per_second": ("tokens/s", _number(1)),
            "speedup": ("ratio of totals", _TWO),
            "low": ("from", _TWO),
            "high": ("to", _TWO),
            "mean_of_ratios": ("mean of ratios", _TWO),
            "decode_speedup": ("decoding only", _TWO),
            "first_ms": ("first token, ms", _number(1)),
        },
    ),
    "losslessness": (
        "Losslessness",
        "Texts compared with the baseline's, all repeats. A near-tie is a difference at a place "
        "where two scores are closer than the arithmetic resolves; anything else is a fault.",
        {
            "method": ("method", _TEXT),
            "compared": ("compared", _TEXT),
            "equal": ("equal", _TEXT),
            "near_ties": ("near-ties", _TEXT),
            "faults": ("faults", _TEXT),
        },
    ),
    "acceptance": (
        "Acceptance",
        "alpha = accepted / (accepted + rejected); r = accepted / drafted: three different things "
        "with tokens per target pass.",
        {
            "batch_size": ("batch", _TEXT),
            "category": ("prompts", _TEXT),
            "method": ("method", _TEXT),
            "rounds": ("rounds", _TEXT),
            "alpha": ("alpha", _TWO),
            "acceptance_rate": ("r", _TWO),
            "mean_acceptance_length": ("mean acceptance length", _TWO),
            "tokens_per_pass": ("tokens per target pass", _TWO),
            "mean_draft_length": ("mean draft length", _TWO),
        },
    ),
    "positions": (
        "Acceptance by draft position",
        "Acceptance of a token where all before it were accepted; chain: all up to it accepted.",
        {
            "method": ("method", _TEXT),
            "position": ("position", _TEXT),
            "tried": ("tried", _TEXT),
            "acceptance": ("acceptance", _TWO),
            "chain": ("chain", _TWO),
        },
    ),
    "phases": (
        "Where the time goes",
        "Milliseconds per new token.",
        {
            "batch_size": ("batch", _TEXT),
            "method": ("method", _TEXT),
            "prefill": ("prefill", _THREE),
            "draft": ("draft", _THREE),
            "verify": ("verify", _THREE),
            "other": ("other", _THREE),
            "rest": ("not told apart", _THREE),
            "total": ("total", _THREE),
        },
    ),
    "predictions": (
        "Predicted and measured",
        "Decode speedup over the baseline. Predicted: the other half of the prompts' rounds priced "
        "with the cost table. Efficiency = measured / predicted, of all prompts and of each half "
        "alone. Formula: Leviathan's at alpha, for fixed draft lengths.",
        {
            "batch_size": ("batch", _TEXT),
            "category": ("prompts", _TEXT),
            "method": ("method", _TEXT),
            "predicted": ("predicted", _TWO),
            "measured": ("measured", _TWO),
            "efficiency": ("efficiency", _TWO),
            "efficiency_a": ("first half", _TWO),
            "efficiency_b": ("second half", _TWO),
            "alpha": ("alpha", _TWO),
            "formula": ("formula at own length", _TWO),
            "best_length": ("best fixed length", _WHOLE),
            "best_formula": ("formula at best", _TWO),
            "draft_cost": ("c", _THREE),
            "bound": ("bound 1/c", _number(1)),
        },
    ),
    "controllers": (
        "Controllers",
        "Counted rounds of methods with one skip config, priced with one cost table.",
        {
            "batch_size": ("batch", _TEXT),
            "method": ("method", _TEXT),
            "controller": ("controller", _TEXT),
            "speedup": ("priced speedup", _TWO),
            "of_best_fixed": ("of best fixed", _THREE),
            "mean_draft_length": ("mean draft length", _TWO),
            "alpha": ("alpha", _TWO),
        },
    ),
    "repetition": (
        "Repetition",
        "Share of 4-grams that had occurred before in the same text: the more, the easier.",
        {
            "category": ("prompts", _TEXT),
            "method": ("method", _TEXT),
            "texts": ("texts", _TEXT),
            "repeated_4grams": ("repeated 4-grams", _SHARE),
            "loops": ("loops", _TEXT),
        },
    ),
    "exits": (
        "Exits",
        "Agreement of an exit's most likely token with the target's, match under the law, and mean "
        "distance of confidence from matched share.",
        {
            "exit": ("exit", _TEXT),
            "agreement": ("agreement", _TWO),
            "match": ("match", _TWO),
            "calibration_error": ("calibration error", _TWO),
        },
    ),
    "what-if": (
        "What if",
        "Simulated rounds over the trace, priced; costs from the measured parts of a pass, or "
        "scaled from a drafting method's table.",
        {
            "exit": ("exit", _TEXT),
            "draft_length": ("draft length", _TEXT),
            "threshold": ("threshold", str),
            "speedup": ("priced speedup", _TWO),
            "acceptance": ("r", _TWO),
            "mean_draft_length": ("mean draft length", _TWO),
            "costs": ("costs", _TEXT),
        },
    ),
    "repeatability": (
        "The same numbers twice?",
        "Runs of the same thing: do the intervals overlap?",
        {
            "run": ("run", _TEXT),
            "other_run": ("other run", _TEXT),
            "batch_size": ("batch", _TEXT),
            "method": ("method", _TEXT),
            "speedup": ("speedup", _TWO),
            "other_speedup": ("other speedup", _TWO),
            "overlap": ("overlap", lambda value: "yes" if value else "no"),
        },
    ),
    "comparison": (
        "All runs",
        "Ratio of totals over each run's baseline, all prompts.",
        {
            "run": ("run", _TEXT),
            "batch_size": ("batch", _TEXT),
            "method": ("method", _TEXT),
            "prompts": ("n", _TEXT),
            "tokens_per_second": ("tokens/s", _number(1)),
            "speedup": ("ratio of totals", _TWO),
            "low": ("from", _TWO),
            "high": ("to", _TWO),
            "mean_of_ratios": ("mean of ratios", _TWO),
        },
    ),
    "search-finalists": (
        "Finalists",
        "Speedup over plain decoding. Predicted: replayed rounds, priced; on the traced prompts, "
        "and on those held out. Measured: on the clock, interleaved with plain decoding, with its "
        "95% interval. Efficiency = measured / predicted, held out where known.",
        {
            "name": ("name", _TEXT),
            "role": ("role", _TEXT),
            "predicted": ("predicted", _TWO),
            "held_out": ("held out", _TWO),
            "measured": ("measured", _TWO),
            "low": ("from", _TWO),
            "high": ("to", _TWO),
            "efficiency": ("efficiency", _TWO),
            "alpha": ("alpha", _TWO),
            "draft_cost": ("c", _THREE),
            "bound": ("bound 1/c", _number(1)),
            "tokens_per_second": ("tokens/s", _number(1)),
            "acceptance_rate": ("r", _TWO),
            "equal": ("equal texts", _WHOLE),
            "near_ties": ("near-ties", _WHOLE),
            "faults": ("faults", _WHOLE),
            "left_out": ("left out", _TEXT),
            "attention": ("attention of layers", _TEXT),
            "mlp": ("MLP of layers", _TEXT),
            "controller": ("controller", _TEXT),
            "max_draft_length": ("up to", _WHOLE),
            "threshold": ("threshold", str),
        },
    ),
    "search-origins": (
        "Where the trials came from",
        "Best: the highest priced speedup of each, forced where drafting does not pay. Copies: the "
        "same set again.",
        {
            "kind": ("proposed by", _TEXT),
            "trials": ("trials", _TEXT),
            "share": ("share", _SHARE),
            "failed": ("failed", _TEXT),
            "copies": ("copies", _TEXT),
            "best": ("best", _TWO),
            "best_trial": ("its trial", _WHOLE),
            "finalists": ("finalists", _TEXT),
        },
    ),
    "search-sublayers": (
        "Sublayers",
        "Importance: how much of the differences between trials the sampler puts down to a switch. "
        "Alone: the trial that leaves out nothing else, forced to draft.",
        {
            "switch": ("switch", _TEXT),
            "importance": ("importance", _THREE),
            "alone_speedup": ("speedup alone", _THREE),
            "alone_acceptance": ("acceptance alone", _THREE),
            "alone_cost": ("c alone", _THREE),
            "finalists": ("finalists without it", _WHOLE),
        },
    ),
    "search-trials": (
        "Best trials",
        "By priced speedup over plain decoding, no copies; all trials are in the CSV file. Forced: "
        "without turning off a draft that does not pay.",
        {
            "number": ("trial", _TEXT),
            "origin": ("proposed by", _TEXT),
            "left_out": ("left out", _TEXT),
            "attention": ("attention of layers", _TEXT),
            "mlp": ("MLP of layers", _TEXT),
            "speedup": ("priced speedup", _TWO),
            "forced_speedup": ("forced", _TWO),
            "acceptance": ("alpha", _TWO),
            "draft_cost": ("c", _THREE),
            "bound": ("bound 1/c", _number(1)),
        },
    ),
}
LONG = 20  # rows from which on a table is folded away


def cells_of(table: Table) -> tuple[list[tuple[str, bool]], list[list[str]]]:
    """Headings, each with whether its column holds words, and rows as text; NaN is a dash."""
    shown = {name: how for name, how in SHOWN[table.name][2].items() if name in table.frame}
    columns = [table.frame[name].tolist() for name in shown]
    heads = [
        (head, any(isinstance(value, str) for value in column))
        for (head, _), column in zip(shown.values(), columns, strict=True)
    ]
    formats = [how for _, how in shown.values()]
    rows = [
        ["–" if pd.isna(value) else how(value) for how, value in zip(formats, row, strict=True)]  # noqa: RUF001
        for row in zip(*columns, strict=True)
    ]
    return heads, rows
