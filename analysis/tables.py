"""The tables of a report on runs: speedups, acceptance, phases, losslessness, predictions.

Every function takes one run and returns one table. Tokens a second of a method are all its tokens
over all its seconds, a unit (a prompt at batch size 1) counting with the medians of its repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from layerskip.analysis.runs import (
    ALL,
    PHASES,
    Round,
    Run,
    calls,
    longest_drafts,
    totals,
    typical,
)
from layerskip.config import SkipConfig
from layerskip.costs.pricing import cost_table
from layerskip.costs.ratios import measured_speedup
from layerskip.costs.speculation import CostTable, speedup_bound


def comparisons(run: Run) -> list[str]:
    """What speedups are over: the baseline, and the library's own generate() where measured."""
    library = [n for n in run.measured if run.methods[n]["kind"] == "generate"]
    return [run.baseline, *(name for name in library if name != run.baseline)]


def speedup(run: Run) -> pd.DataFrame:
    """Speedups by batch size, category and method, over every method of `comparisons`.

    Over units that both methods have. Columns: `prompts` (units), `tokens_per_second` (of the whole
    call), `speedup` with `low` and `high` (ratio of totals, see `measured_speedup`),
    `mean_of_ratios` (mean of the units' own ratios), `prefill_speedup` (of the time to the first
    token alone), `decode_speedup` with `decode_low` and `decode_high` (of the tokens behind the
    first and the time after it), `first_ms` (mean milliseconds to the first token).
    """
    frame = typical(run)
    rows = []
    for (batch_size, category), group in _groups(run, frame):
        by_method = {name: part.set_index("unit") for name, part in group.groupby("method")}
        for over in comparisons(run):
            for method in run.measured:
                if method not in by_method or over not in by_method:
                    continue
                ours, theirs = by_method[method], by_method[over]
                units = [unit for unit in theirs.index if unit in ours.index]
                if not units:
                    continue
                a, b = theirs.loc[units], ours.loc[units]
                own, others = totals(b), totals(a)
                whole = measured_speedup(own, others)
                later = ((a["decode_tokens"] > 0) & (b["decode_tokens"] > 0)).to_numpy()
                decode = measured_speedup(totals(b[later], "decode_"), totals(a[later], "decode_"))
                rates = [each.tokens / each.seconds for each in (own, others)]
                rows.append(
                    {
                        "batch_size": batch_size,
                        "category": category,
                        "method": method,
                        "over": over,
                        "prompts": len(units),
                        "tokens_per_second": own.rate,
                        "speedup": whole[0],
                        "low": whole[1],
                        "high": whole[2],
                        "mean_of_ratios": float((rates[0] / rates[1]).mean()),
                        "prefill_speedup": _share(a["first"].sum(), b["first"].sum()),
                        "decode_speedup": decode[0],
                        "decode_low": decode[1],
                        "decode_high": decode[2],
                        "first_ms": 1000 * b["first"].mean(),
                    }
                )
    return pd.DataFrame(rows)


def acceptance_of(rounds: Iterable[Round]) -> dict[str, float]:
    """Counts and rates of rounds.

    `alpha` is the maximum-likelihood acceptance of one draft token: accepted / (accepted +
    rejected), where a round rejects at most one token and those behind it were never asked;
    `acceptance_rate` is accepted / drafted; `mean_acceptance_length` 1 + accepted / rounds that
    drafted; `tokens_per_pass` emitted / all rounds. Rates of nothing are NaN.
    """
    rounds = list(rounds)
    drafts = sum(r.drafted > 0 for r in rounds)
    drafted = sum(r.drafted for r in rounds)
    accepted = sum(r.accepted for r in rounds)
    rejected = sum(r.rejected for r in rounds)
    return {
        "rounds": len(rounds),
        "drafts": drafts,
        "drafted": drafted,
        "accepted": accepted,
        "rejected": rejected,
        "alpha": _share(accepted, accepted + rejected),
        "acceptance_rate": _share(accepted, drafted),
        "mean_acceptance_length": 1 + _share(accepted, drafts),
        "tokens_per_pass": _share(sum(r.emitted for r in rounds), len(rounds)),
        "mean_draft_length": _share(drafted, len(rounds)),
    }


def _rounds_by_category(run: Run) -> Iterator[tuple[dict[str, Any], list[Round]]]:
    """Rounds by batch size, drafting method and category, all repeats together."""
    for batch_size in run.batch_sizes:
        for method in run.drafting:
            by_category: dict[str, list[Round]] = defaultdict(list)
            for record, rounds in run.rounds(method, batch_size):
                by_category[ALL] += rounds
                if run.categories:
                    by_category[record["category"] or "other"] += rounds
            for category, rounds in by_category.items():
                yield {"batch_size": batch_size, "category": category, "method": method}, rounds


def acceptance(run: Run) -> pd.DataFrame:
    """`acceptance_of` by batch size, category and drafting method, over all repeats."""
    rows = [place | acceptance_of(rounds) for place, rounds in _rounds_by_category(run)]
    return pd.DataFrame(rows)


def sources(run: Run) -> pd.DataFrame:
    """What drafts came from, by batch size, category and method; methods with several sources.

    `share`: of all rounds; those that drafted nothing have the source "none". Acceptance as in
    `acceptance_of`.
    """
    rows = []
    for place, rounds in _rounds_by_category(run):
        names = run.sources(place["method"])
        for number, name in [*enumerate(names), (None, "none")] if len(names) > 1 else ():
            own = [each for each in rounds if each.source == number]
            counted = {"source": name, "share": _share(len(own), len(rounds))}
            rows.append(place | counted | acceptance_of(own))
    return pd.DataFrame(rows)


def sizes(run: Run) -> pd.DataFrame:
    """Tokens a pass by how many were drafted, all batch sizes; empty where no method drafts trees.

    `branching`: the share of the rounds whose tokens had branches; `depth`: how many could be
    accepted, on average; `accepted` of them; `tokens_per_pass` emitted.
    """
    rows = []
    every = {method: run.all_rounds(method) for method in run.drafting}
    trees = any(each.tree for rounds in every.values() for each in rounds)
    for method, rounds in every.items() if trees else ():
        for size in sorted({each.drafted for each in rounds}):
            own = [each for each in rounds if each.drafted == size]
            rows.append(
                {
                    "method": method,
                    "drafted": size,
                    "rounds": len(own),
                    "branching": _share(sum(each.tree is not None for each in own), len(own)),
                    "depth": _share(sum(each.depth for each in own), len(own)),
                    "accepted": _share(sum(each.accepted for each in own), len(own)),
                    "tokens_per_pass": _share(sum(each.emitted for each in own), len(own)),
                }
            )
    return pd.DataFrame(rows)


def positions(run: Run) -> pd.DataFrame:
    """Acceptance by place in the draft, all batch sizes together.

    `tried`: rounds whose draft reached the position with all before it accepted; `accepted`: those
    of them whose token was accepted too; `acceptance`: their ratio; `reached`: rounds that drafted
    so far; `chain`: the share of those with all tokens up to the position accepted.
    """
    rows = []
    for method in run.drafting:
        rounds = run.all_rounds(method)
        for position in range(1, max((r.depth for r in rounds), default=0) + 1):
            reached = [r for r in rounds if r.depth >= position]
            accepted = sum(r.accepted >= position for r in reached)
            tried = accepted + sum(r.accepted == position - 1 and r.rejected for r in reached)
            rows.append(
                {
                    "method": method,
                    "position": position,
                    "tried": tried,
                    "accepted": accepted,
                    "acceptance": _share(accepted, tried),
                    "reached": len(reached),
                    "chain": _share(accepted, len(reached)),
                }
            )
    return pd.DataFrame(rows)


def phases(run: Run) -> pd.DataFrame:
    """Milliseconds per new token by phase, of every batch size and method.

    `prefill` is the time to the first token, spread over all tokens; `rest` is what the phases
    leave of `total`: all of the decoding, for methods that do not tell phases apart.
    """
    frame = typical(run)
    rows = []
    for batch_size in run.batch_sizes:
        for method in run.measured:
            own = frame[(frame["batch_size"] == batch_size) & (frame["method"] == method)]
            if not len(own):
                continue
            spent = own[["seconds", "first", *PHASES]].sum(min_count=1) / own["tokens"].sum()
            parts = {"prefill": 1000 * spent["first"]} | {
                name: 1000 * spent[name] for name in PHASES
            }
            known = sum(value for value in parts.values() if not pd.isna(value))
            rows.append(
                {
                    "batch_size": batch_size,
                    "method": method,
                    **parts,
                    # medians of parts need not add up to the median of the whole; 0 is exact
                    "rest": max(0.0, round(1000 * spent["seconds"] - known, 9)),
                    "total": 1000 * spent["seconds"],
                }
            )
    return pd.DataFrame(rows)


def decoding(run: Run) -> pd.DataFrame:
    """Speed behind the first tokens and use of memory, by batch size, category and method.

    Medians over calls, of each context where there are several. Columns: `context`, `calls`,
    `prefill_seconds` (to the first tokens),
    `tokens_per_second` with `low` and `high` (of the slowest and the fastest call),
    `gigabytes_per_second` (weights, keys and values that passes read), `memory` (the same of
    sweeps between the calls), `share` (the one over the other).
    """
    frame = calls(run)
    frame = frame[frame["decode_tokens"] > 0]
    frame = frame.assign(
        tokens_per_second=frame["decode_tokens"] / frame["decode_seconds"],
        gigabytes_per_second=frame["read"] / frame["decode_seconds"] / 1e9,
        memory=frame["memory"] / 1e9,
        prefill_seconds=frame["first"],
    ).assign(share=lambda known: known["gigabytes_per_second"] / known["memory"])
    rows = []
    for (batch_size, category), group in _groups(run, frame):
        if category not in run.contexts and run.contexts.keys() != {ALL}:
            continue  # calls at several contexts have no typical speed
        for method, own in group.groupby("method", sort=False):
            speeds = own["tokens_per_second"]
            rows.append(
                {
                    "batch_size": batch_size,
                    "category": category,
                    "method": method,
                    "context": run.contexts.get(category),
                    "calls": len(own),
                    **{name: own[name].median() for name in _MEDIANS},
                    "low": speeds.min(),
                    "high": speeds.max(),
                }
            )
    return pd.DataFrame(rows)


_MEDIANS = (*("prefill_seconds", "tokens_per_second", "gigabytes_per_second", "memory", "share"),)


def _by_category(run: Run) -> Iterator[tuple[dict[str, str], list[dict[str, Any]]]]:
    """A method's records, all of them and those of each category, all batch sizes together."""
    for category, method in product((ALL, *run.categories), run.measured):
        own = [
            record
            for record in run.records
            if record["method"] == method and category in (ALL, record["category"] or "other")
        ]
        if own:
            yield {"category": category, "method": method}, own


def losslessness(run: Run) -> pd.DataFrame:
    """Texts compared with the baseline's, by category: `equal`, `near_ties`, `faults`.

    A text that differs without a near-tie to show for it is a fault. Methods whose law promises no
    equal text have `compared` 0.
    """
    rows = []
    for place, records in _by_category(run):
        compared = equal = ties = 0
        for record in records:
            excused = {d["row"] for d in record["differences"] if d["near_tie"]}
            excused -= {d["row"] for d in record["differences"] if not d["near_tie"]}
            for row, same in enumerate(record["equal"] or ()):
                if same is not None:
                    compared += 1
                    equal += bool(same)
                    ties += not same and row in excused
        faults = compared - equal - ties
        rows.append(
            place | {"compared": compared, "equal": equal, "near_ties": ties, "faults": faults}
        )
    return pd.DataFrame(rows)


def repetition(run: Run) -> pd.DataFrame:
    """Mean share of 4-grams seen before in the same text, and texts that loop, by category."""
    rows = []
    for place, records in _by_category(run):
        shares = [share for record in records for share in record["repeated_4grams"]]
        loops = sum(sum(record["loops"]) for record in records)
        mean = float(np.mean(shares))
        rows.append(place | {"texts": len(shares), "repeated_4grams": mean, "loops": loops})
    return pd.DataFrame(rows)


def predictions(run: Run) -> pd.DataFrame:
    """Decode speedups of drafting methods over the baseline: what rounds promised, and the clock.

    Columns: `predicted` (the steps that plain decoding takes over the rounds' price by the header's
    cost table), `measured` with `low` and `high`, `efficiency` (measured / predicted), `draft_cost`
    (c), and `bound` (1 / c; NaN where drafts may be looked up, which costs nothing).
    """
    table, rows = speedup(run), []
    for line in table[table["over"] == run.baseline].to_dict("records"):
        place = {name: line[name] for name in ("batch_size", "category", "method")}
        method, batch_size = line["method"], line["batch_size"]
        if method not in run.drafting:
            continue
        # over several contexts there is no price: their steps cost different seconds
        costs = run.cost_table(method, batch_size, run.contexts.get(line["category"]))
        if costs is None:
            continue
        paid, plain = price(run, method, batch_size, costs, line["category"])
        if paid:
            bound = float("nan") if run.looks_up(method) else speedup_bound(costs.draft)
            rows.append(
                {
                    **place,
                    "predicted": plain / paid,
                    "measured": line["decode_speedup"],
                    "low": line["decode_low"],
                    "high": line["decode_high"],
                    "efficiency": line["decode_speedup"] * paid / plain,
                    "draft_cost": costs.draft,
                    "bound": bound,
                }
            )
    return pd.DataFrame(rows)


def price(
    run: Run, method: str, batch_size: int, costs: CostTable, category: str = ALL
) -> tuple[float, int]:
    """What a method's rounds cost, in target steps, and the steps that plain decoding would take.

    A round costs what its longest draft does, and plain decoding takes as many steps as its longest
    row has tokens after the first.
    """
    paid, plain = 0.0, 0
    for record in run.records:
        rounds = record["rounds"]
        if rounds is None or (record["method"], record["batch_size"]) != (method, batch_size):
            continue
        if category in (ALL, record["category"] or "other"):
            plain += max(map(sum, zip(*rounds["emitted"], strict=True)), default=0)
            paid += sum(
                costs.round_cost(*counts) for counts in longest_drafts(run.methods[method], rounds)
            )
    return paid, plain


def exits(run: Run) -> pd.DataFrame:
    """The traces' exits: how often each is right, and what it would gain at its best settings.

    Columns: `agreement` (of its most likely token with the target's), `match` (under the law), and
    of the draft length and threshold with the highest price: `speedup` (tokens over the cost of the
    simulated rounds by the run's cost line at batch size 1; NaN without one), `draft_length`,
    `threshold`, `acceptance` (r).
    """
    parts = next((cost for cost in run.costs if cost["batch_size"] == 1), None)
    rows = []
    for number, trace in enumerate(run.traces):
        best = {}
        for i, layer in enumerate(trace["what_if"]["exits"]):
            if parts is not None:
                costs = cost_table(parts, SkipConfig.early_exit(layer))
                cells = _simulated(trace["what_if"], i, costs)
                best[layer] = max(cells, key=lambda cell: cell["speedup"], default={})
        for entry in trace["exits"]:
            known = {name: entry[name] for name in ("exit", "agreement", "match")}
            rows.append({"trace": number, **known, **best.get(entry["exit"], {})})
    columns = ("speedup", "draft_length", "threshold", "acceptance")
    frame = pd.DataFrame(rows)
    return frame.reindex(columns=[*frame.columns.difference(columns, sort=False), *columns])


def _simulated(what_if: dict[str, Any], exit_: int, costs: CostTable) -> Iterator[dict[str, float]]:
    """Simulated rounds of an exit at every draft length and threshold, priced."""
    for j, length in enumerate(what_if["draft_lengths"]):
        for k, threshold in enumerate(what_if["thresholds"]):
            rounds, drafted, emitted, counts = (
                what_if[name][exit_][j][k] for name in ("rounds", "drafted", "emitted", "lengths")
            )
            if rounds:
                paid = sum(n * costs.round_cost(d) for d, n in enumerate(counts) if n)
                yield {
                    "speedup": emitted / paid,
                    "draft_length": length,
                    "threshold": threshold,
                    "acceptance": _share(emitted - rounds, drafted),
                }


def comparison(runs: Sequence[Run]) -> pd.DataFrame:
    """All runs' speedups over their baselines, all categories together, one below the other."""
    parts = []
    for run in runs:
        table = speedup(run)
        table = table[(table["category"] == ALL) & (table["over"] == run.baseline)]
        table.insert(0, "run", run.label)
        parts.append(table)
    return pd.concat(parts, ignore_index=True)


def _groups(run: Run, frame: pd.DataFrame) -> Iterable[tuple[tuple[int, str], pd.DataFrame]]:
    """The parts of a table by batch size, and all or one category of prompts."""
    for batch_size in run.batch_sizes:
        part = frame[frame["batch_size"] == batch_size]
        yield (batch_size, ALL), part
        for category in run.categories:
            yield (batch_size, category), part[part["category"] == category]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
