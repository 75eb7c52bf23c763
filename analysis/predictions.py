"""Knows what rounds should have cost: counted rounds and one cost table; no other clock.

Predictions are of decoding, prefill left out, in target steps: a plain step costs 1.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from layerskip.analysis.runs import Round, Run, longest_drafts, rounds_of, totals, typical
from layerskip.analysis.tables import ALL, acceptance_of
from layerskip.config import SkipConfig
from layerskip.costs.pricing import cost_table
from layerskip.costs.ratios import measured_speedup
from layerskip.costs.speculation import CostTable, optimal_draft_length, speedup, speedup_bound

LONGEST = 16  # of the fixed draft lengths that the closed formula is asked about


@dataclass
class _Unit:
    """What one prompt (or batch) cost in target steps, and would have cost plainly."""

    category: str
    cost: float = 0.0
    steps: int = 0
    rounds: list[Round] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Target steps paid per target step that plain decoding would have taken."""
        return self.cost / self.steps


def price(run: Run, method: str, batch_size: int, costs: CostTable) -> dict[str, _Unit]:
    """Every unit's rounds of a method, priced; all repeats together.

    A round costs what its longest draft does, and plain decoding takes as many steps as its longest
    row has tokens after the first.
    """
    units: dict[str, _Unit] = {}
    for record in run.records:
        rounds = record.get("rounds")
        if rounds is None or (record["method"], record["batch_size"]) != (method, batch_size):
            continue
        steps = max(map(sum, zip(*rounds["emitted"], strict=True)), default=0)  # of the longest row
        if not steps:
            continue
        name = "\n".join(record["prompts"])
        unit = units.setdefault(name, _Unit(record["category"] or "other"))
        unit.steps += steps
        unit.cost += sum(
            costs.verify_cost(drafted + 1) if looked_up else costs.round_cost(drafted)
            for drafted, looked_up in longest_drafts(run.methods[method], rounds)
        )
        unit.rounds += rounds_of(record)
    return units


def predictions(run: Run) -> pd.DataFrame:
    """Predicted against measured decode speedups of the drafting methods, over the baseline.

    Units of each category are dealt into two halves. The rounds of each half, priced with the
    header's cost table, say what a token of the other half should cost, so that no prompt forecasts
    itself; `from` says so where one prompt is all there is. Columns: `predicted`; `measured` with
    `low` and `high`; `efficiency` = measured / predicted, of all units and, since the halves'
    errors cancel there, of each half alone (`efficiency_a`, `efficiency_b`); `formula`
    and `formula_length`: the closed formula at `alpha`, at the method's own draft length if that
    is fixed; `best_length` and `best_formula`: the same at the best fixed length; `draft_cost` (c)
    and `bound` (1 / c). Where drafts may be looked up, nothing is bound and no formula holds.
    """
    frame = typical(run)
    frame = frame[frame["decode_tokens"] > 0]
    rows = []
    for batch_size in run.batch_sizes:
        by_method = frame[frame["batch_size"] == batch_size].set_index("unit").groupby("method")
        seconds = {str(name): part for name, part in by_method}
        for method in run.drafting:
            costs = run.cost_table(method, batch_size)
            if costs is None or not {run.baseline, method} <= seconds.keys():
                continue
            plain, own = seconds[run.baseline], seconds[method]
            units = {
                name: unit
                for name, unit in price(run, method, batch_size, costs).items()
                if name in plain.index and name in own.index
            }
            for category in (ALL, *run.categories):
                asked = {n: u for n, u in units.items() if category in (ALL, u.category)}
                if asked:
                    forecast = _forecast(asked, plain, own)
                    rows.append(
                        {
                            "batch_size": batch_size,
                            "category": category,
                            "method": method,
                            **forecast,
                            **_formula(run, method, forecast["alpha"], costs),
                            "draft_cost": costs.draft,
                            "bound": float("nan")
                            if run.looks_up(method)
                            else speedup_bound(costs.draft),
                        }
                    )
    return pd.DataFrame(rows)


def _forecast(units: dict[str, _Unit], plain: pd.DataFrame, own: pd.DataFrame) -> dict[str, Any]:
    """Predicted and measured speedup of units; `plain` and `own` are parts of `typical`."""
    names = list(units)
    measured, low, high = measured_speedup(
        totals(own.loc[names], "decode_"), totals(plain.loc[names], "decode_")
    )
    halves = [half for half in _halves(units) if half]
    rates, alphas, alone = [], [], []  # of the halves, by the other one's rounds
    for half, others in zip(halves, halves[::-1], strict=True):
        rate = float(np.mean([units[name].rate for name in others]))
        rates += [rate] * len(half)
        alphas.append(acceptance_of(r for name in others for r in units[name].rounds)["alpha"])
        alone.append(
            rate * totals(own.loc[half], "decode_").rate / totals(plain.loc[half], "decode_").rate
        )
    predicted = len(names) / sum(rates)
    known = [alpha for alpha in alphas if not np.isnan(alpha)]
    return {
        "predicted": predicted,
        "measured": measured,
        "low": low,
        "high": high,
        "efficiency": measured / predicted,
        "efficiency_a": alone[0],
        "efficiency_b": alone[-1],
        "from": "the other half" if len(halves) > 1 else "the same prompt",
        "alpha": float(np.mean(known)) if known else float("nan"),
    }


def _halves(units: dict[str, _Unit]) -> tuple[list[str], list[str]]:
    """Units dealt in turn, each category by itself, the odd ones out to the shorter half."""
    halves: tuple[list[str], list[str]] = ([], [])
    by_category: dict[str, list[str]] = defaultdict(list)
    for name, unit in units.items():
        by_category[unit.category].append(name)
    for members in by_category.values():
        first = len(halves[0]) > len(halves[1])
        for number, name in enumerate(members):
            halves[(number + first) % 2].append(name)
    return halves


def _formula(run: Run, method: str, alpha: float, costs: CostTable) -> dict[str, float]:
    """The closed formula at the method's length, if that is fixed, and at the best one."""
    found = dict.fromkeys(
        ("formula_length", "formula", "best_length", "best_formula"), float("nan")
    )
    if np.isnan(alpha) or run.looks_up(method):
        return found
    best = optimal_draft_length(alpha, costs, LONGEST)
    found["best_length"] = best
    found["best_formula"] = speedup(alpha, best, costs.draft, costs.verify_cost)
    settings = run.methods[method]
    if settings["controller"] == "fixed" and settings["max_draft_length"]:
        length = settings["max_draft_length"]
        found["formula_length"] = length
        found["formula"] = speedup(alpha, length, costs.draft, costs.verify_cost)
    return found


def what_if(run: Run) -> pd.DataFrame:
    """The traces' simulated rounds of every exit, draft length and threshold, priced.

    `speedup` is emitted / cost of the rounds, by the tokens drafted in them and the run's cost line
    at batch size 1, NaN without one; `acceptance` is (emitted - rounds) / drafted.
    """
    parts = next((cost for cost in run.costs if cost["batch_size"] == 1), None)
    rows = []
    for number, trace in enumerate(run.traces):
        table = trace["what_if"]
        for i, layer in enumerate(table["exits"]):
            costs = None if parts is None else cost_table(parts, SkipConfig.early_exit(layer))
            for j, length in enumerate(table["draft_lengths"]):
                for k, threshold in enumerate(table["thresholds"]):
                    rounds, drafted, emitted = (
                        table[name][i][j][k] for name in ("rounds", "drafted", "emitted")
                    )
                    gain = float("nan")
                    if costs is not None and rounds:
                        counts = enumerate(table["lengths"][i][j][k])
                        gain = emitted / sum(n * costs.round_cost(d) for d, n in counts if n)
                    rows.append(
                        {
                            "trace": number,
                            "exit": layer,
                            "draft_length": length,
                            "threshold": threshold,
                            "speedup": gain,
                            "mean_draft_length": drafted / rounds if rounds else float("nan"),
                            "acceptance": (emitted - rounds) / drafted if drafted else float("nan"),
                        }
                    )
    return pd.DataFrame(rows)
