"""The tables of a report on runs.

Tokens per second of a method are all its tokens divided by all its seconds, where a unit (a prompt
at batch size 1) counts with the medians of its repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from itertools import product
from typing import Any, ParamSpec

import pandas as pd

from layerskip.analysis.runs import ALL, FREE, PHASES, Run, totals
from layerskip.costs.ratios import measured_speedup
from layerskip.costs.speculation import CostTable, speedup_bound

Line = dict[str, Any]
P = ParamSpec("P")


def tabled(lines: Callable[P, Iterator[Line]]) -> Callable[P, pd.DataFrame]:
    """Turn a function that yields the lines of a table into one that returns the table."""

    @wraps(lines)
    def table(*args: P.args, **settings: P.kwargs) -> pd.DataFrame:
        return pd.DataFrame(lines(*args, **settings))

    return table


def _groups(
    run: Run, frame: pd.DataFrame, *names: str
) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The non-empty parts of a table, by some of batch size, category and method.

    The first category is all of them.
    """
    values: dict[str, Sequence[Any]] = {
        "batch_size": run.batch_sizes,
        "category": [ALL, *run.categories],
        "method": run.measured,
    }
    for chosen in product(*(values[name] for name in names)):
        part, place = frame, dict(zip(names, chosen, strict=True))
        for name, value in place.items():
            if (name, value) != ("category", ALL):
                part = part[part[name] == value]
        if len(part):
            yield place, part


def comparisons(run: Run) -> list[str]:
    """The methods that speedups are over: the baseline, and generate() if it was measured."""
    library = [n for n in run.measured if run.methods[n]["kind"] == "generate"]
    return [run.baseline, *(name for name in library if name != run.baseline)]


@lru_cache(4)  # used by most tables and pictures of a run
@tabled
def speedup(run: Run) -> Iterator[Line]:
    """Speedups by batch size, category and method, over every method of `comparisons`.

    Over units that both methods have; prefill is the time to the first token, decode the rest.
    """
    for place, group in _groups(run, run.typical, "batch_size", "category"):
        by_method = {name: part.set_index("unit") for name, part in group.groupby("method")}
        for over, method in product(comparisons(run), run.measured):
            if not {over, method} <= by_method.keys():
                continue
            units = by_method[over].index.intersection(by_method[method].index, sort=False)
            if not len(units):
                continue
            faster, slower = by_method[method].loc[units], by_method[over].loc[units]
            whole = measured_speedup(totals(faster), totals(slower))
            later = ((faster["decode_tokens"] > 0) & (slower["decode_tokens"] > 0)).to_numpy()
            decode = measured_speedup(*(totals(t[later], "decode_") for t in (faster, slower)))
            rates = [each["tokens"] / each["seconds"] for each in (faster, slower)]
            yield {
                **place,
                "method": method,
                "over": over,
                "prompts": len(units),
                "tokens_per_second": totals(faster).rate,
                **dict(zip(("speedup", "low", "high"), whole, strict=True)),
                "mean_of_ratios": float((rates[0] / rates[1]).mean()),
                "prefill_speedup": _share(slower["first"].sum(), faster["first"].sum()),
                **dict(zip(_DECODE, decode, strict=True)),
                "first_ms": 1000 * faster["first"].mean(),
            }


_DECODE = ("decode_speedup", "decode_low", "decode_high")


def acceptance_of(rounds: pd.DataFrame) -> dict[str, float]:
    """Counts and rates of rounds.

    `alpha` is the maximum-likelihood acceptance of one draft token: accepted / (accepted +
    rejected), since a round rejects at most one token and later ones are not tested;
    `acceptance_rate` is accepted / drafted; `mean_acceptance_length` 1 + accepted / rounds with a
    draft; `tokens_per_pass` emitted / all rounds. Undefined rates are NaN.
    """
    drafts = int((rounds["drafted"] > 0).sum())
    counts = {name: int(rounds[name].sum()) for name in ("drafted", "accepted", "rejected")}
    drafted, accepted, rejected = counts.values()
    return {
        "rounds": len(rounds),
        "drafts": drafts,
        **counts,
        "alpha": _share(accepted, accepted + rejected),
        "acceptance_rate": _share(accepted, drafted),
        "mean_acceptance_length": 1 + _share(accepted, drafts),
        "tokens_per_pass": _share(rounds["emitted"].sum(), len(rounds)),
        "mean_draft_length": _share(drafted, len(rounds)),
    }


@tabled
def acceptance(run: Run) -> Iterator[Line]:
    """`acceptance_of` by batch size, category and drafting method, over all repeats."""
    for place, rounds in _groups(run, run.rounds, "batch_size", "category", "method"):
        yield place | acceptance_of(rounds)


@tabled
def sources(run: Run) -> Iterator[Line]:
    """The sources of drafts, for methods with several; "none" for plain steps."""
    for place, rounds in _groups(run, run.rounds, "batch_size", "category", "method"):
        names = run.sources(place["method"])
        for number, name in [*enumerate(names), (None, "none")] if len(names) > 1 else ():
            chosen = rounds["source"].isna() if number is None else rounds["source"] == number
            yield place | {"source": name, "share": chosen.mean()} | acceptance_of(rounds[chosen])


@tabled
def positions(run: Run) -> Iterator[Line]:
    """Acceptance by place in the draft, all batch sizes together.

    `tried`: rounds whose draft reached the position with all earlier tokens accepted; `accepted`:
    those whose token was also accepted; `acceptance`: their ratio; `reached`: rounds that drafted
    that far; `chain`: the share of those with all tokens up to the position accepted.
    """
    for place, rounds in _groups(run, run.rounds, "method"):
        for position in range(1, rounds["depth"].max() + 1):
            reached = rounds[rounds["depth"] >= position]
            accepted = int((reached["accepted"] >= position).sum())
            refused = reached["rejected"] & (reached["accepted"] == position - 1)
            tried = accepted + int(refused.sum())
            yield {
                **place,
                "position": position,
                "tried": tried,
                "accepted": accepted,
                "acceptance": _share(accepted, tried),
                "reached": len(reached),
                "chain": _share(accepted, len(reached)),
            }


@tabled
def phases(run: Run) -> Iterator[Line]:
    """Milliseconds per new token by phase; `rest` is the part of `total` outside the phases."""
    for place, calls in _groups(run, run.typical, "batch_size", "method"):
        spent = 1000 * calls[["first", *PHASES, "seconds"]].sum(min_count=1) / calls["tokens"].sum()
        *parts, total = spent
        # Medians of parts need not add up to the median of the whole; 0 is exact.
        rest = max(0.0, round(total - pd.Series(parts).sum(), 9))
        named = dict(zip(("prefill", *PHASES), parts, strict=True))
        yield place | named | {"rest": rest, "total": total}


@tabled
def decoding(run: Run) -> Iterator[Line]:
    """Speed after the first tokens and use of memory; `low` and `high` are the extreme calls."""
    frame = run.calls[run.calls["decode_tokens"] > 0]
    frame = frame.assign(
        prefill_seconds=frame["first"],
        tokens_per_second=frame["decode_tokens"] / frame["decode_seconds"],
        gigabytes_per_second=frame["read"] / frame["decode_seconds"] / 1e9,
        memory=frame["memory"] / 1e9,
    ).assign(share=lambda speeds: speeds["gigabytes_per_second"] / speeds["memory"])
    shown = ["prefill_seconds", "tokens_per_second", "gigabytes_per_second", "memory", "share"]
    for place, calls in _groups(run, frame, "batch_size", "category", "method"):
        if place["category"] not in run.contexts and run.contexts.keys() != {ALL}:
            continue  # calls at several contexts have no typical speed
        speeds = calls["tokens_per_second"]
        counted = {"context": run.contexts.get(place["category"]), "calls": len(calls)}
        ends = {"low": speeds.min(), "high": speeds.max()}
        yield place | counted | calls[shown].median().to_dict() | ends


@tabled
def losslessness(run: Run) -> Iterator[Line]:
    """Texts compared with the baseline's; methods that need not equal it have none."""
    for place, calls in _groups(run, run.calls, "category", "method"):
        yield place | calls[COMPARED].sum().to_dict()


@tabled
def repetition(run: Run) -> Iterator[Line]:
    """Mean share of 4-grams seen before in the same text, and texts that loop, by category."""
    for place, calls in _groups(run, run.calls, "category", "method"):
        texts, repeated, loops = calls[["texts", "repeated", "loops"]].sum()
        yield place | {
            "texts": int(texts),
            "repeated_4grams": repeated / texts,
            "loops": int(loops),
        }


@tabled
def predictions(run: Run) -> Iterator[Line]:
    """Decode speedups of drafting methods over the baseline: predicted from rounds, and measured.

    `bound` is 1 / c; NaN if drafts may be looked up, which costs nothing.
    """
    table = (
        speedup(run).query("over == @run.baseline").set_index(["batch_size", "category", "method"])
    )
    for place, rounds in _groups(run, run.rounds, *table.index.names):
        key = tuple(place.values())
        # Several contexts have no common price: their steps take different times.
        context = run.contexts.get(place["category"])
        costs = run.cost_table(place["method"], place["batch_size"], context)
        if costs is None or key not in table.index:
            continue
        predicted = gain(rounds, costs)
        measured, low, high = table.loc[key, [*_DECODE]]
        looks_up = not FREE.isdisjoint(run.sources(place["method"]))
        yield {
            **place,
            "predicted": predicted,
            "measured": measured,
            "low": low,
            "high": high,
            "efficiency": measured / predicted,
            "draft_cost": costs.draft,
            "bound": float("nan") if looks_up else speedup_bound(costs.draft / costs.per_step),
        }


def gain(rounds: pd.DataFrame, costs: CostTable) -> float:
    """The steps of plain decoding divided by the rounds' cost, in target steps.

    Rows draft in lockstep: a round costs as much as its longest draft, and plain decoding takes as
    many steps as its longest row has tokens after the first.
    """
    longest = rounds.groupby(["record", "number"])[["drafted", "steps"]].max()
    paid = sum(costs.round_cost(*map(int, counts)) for counts in longest.to_numpy())
    plain = rounds.groupby(["record", "row"])["emitted"].sum().groupby("record").max().sum()
    return float(plain / paid)


@tabled
def sweeps(run: Run) -> Iterator[Line]:
    """Predicted gain of replayed rounds for every exit and draft length.

    `agreement` is that of an exit's most likely token with the target's, `match` that of samples.
    """
    for sweep in run.sweeps:
        for entry in sweep["exits"]:
            costs = CostTable.from_dict(entry["costs"])
            shares = {name: entry[name] for name in ("exit", "agreement", "match")}
            for length, counts in zip(sweep["draft_lengths"], entry["rounds"], strict=True):
                rounds, drafted = sum(counts), sum(d * n for d, n in enumerate(counts))
                yield {
                    **shares,
                    "draft_length": length,
                    "acceptance_rate": _share(sweep["tokens"] - rounds, drafted),
                    "tokens_per_pass": sweep["tokens"] / rounds,
                    "speedup": sweep["tokens"] / costs.cost_of(counts),
                }


def exits(run: Run) -> pd.DataFrame:
    """The exits of sweeps, each at its best draft length."""
    table = sweeps(run)
    return table.loc[table.groupby("exit")["speedup"].idxmax()] if len(table) else table


@tabled
def results(run: Run) -> Iterator[Line]:
    """The headline numbers, one line per method; `times X` is the speedup over X."""
    for row in headlines(run):
        if row["task"] not in (None, ALL):
            continue
        kept = ("batch_size", "context", "method", "tokens_per_second")
        line = {name: row[name] for name in kept}
        for over, ends in row["speedups"].items():
            names = (f"times {over}{end}" for end in ("", *ENDS))
            line |= dict(zip(names, ends, strict=True))
        for part in ("prefill", "decode"):
            line[part] = row[f"{part}_speedups"].get(run.baseline)
        line |= {name: row[name] for name in ("acceptance_rate", "repeated_4grams")}
        yield line | {"same_text": same_text(row)}


def same_text(counts: Mapping[str, Any]) -> str | None:
    """The counts of `COMPARED` in words; None if nothing was compared."""
    same = [f"{counts['equal']}/{counts['compared']}"] if counts.get("compared") else []
    same += [f"{counts[n]} {n.replace('_', '-')}" for n in COMPARED[2:] if counts.get(n)]
    return ", ".join(same) or None


@tabled
def categories(run: Run) -> Iterator[Line]:
    """By kind of prompt, the speedup of each method over the baseline (`of METHOD`)."""
    table = speedup(run)
    first = (table["over"] == run.baseline) & (table["batch_size"] == run.batch_sizes[0])
    for category, part in table[first].groupby("category", sort=False) if run.categories else ():
        line: Line = {"category": category, "prompts": int(part["prompts"].max())}
        for row in part[part["method"] != run.baseline].to_dict("records"):
            line |= {f"of {row['method']}{end}": row[name] for end, name in _NAMED_ENDS.items()}
        yield line


ENDS = (" low", " high")
"""Suffixes of a column's name in the names of its interval's columns."""
_NAMED_ENDS = {"": "speedup", " low": "low", " high": "high"}


def headlines(run: Run) -> list[dict[str, Any]]:
    """The headline numbers by batch size, context or task, and method, as JSON values."""
    tasks = run.header["prompts"].get("tasks")
    shown = [ALL, *run.categories] if tasks else [*run.contexts]
    rates, repeats, texts = (
        {(row.get("batch_size"), row["category"], row["method"]): row for row in _rows(table(run))}
        for table in (acceptance, repetition, losslessness)
    )
    rows: dict[tuple[int, str, str], dict[str, Any]] = {}
    for row in _rows(speedup(run)):
        size, category, method = place = row["batch_size"], row["category"], row["method"]
        if category not in shown:
            continue
        whole = None, category, method  # all batch sizes together
        entry = rows.setdefault(
            place,
            {
                "method": method,
                "kind": run.methods[method]["kind"],
                "batch_size": size,
                "context": run.contexts.get(category),
                "task": category if tasks else None,
                "tokens_per_second": row["tokens_per_second"],
                **dict[str, Any](speedups={}, prefill_speedups={}, decode_speedups={}),
                "acceptance_rate": rates.get(place, {}).get("acceptance_rate"),
                **{name: repeats[whole][name] for name in ("repeated_4grams", "loops")},
                **{name: texts[whole][name] for name in COMPARED},
            },
        )
        entry["speedups"][row["over"]] = [row[name] for name in ("speedup", "low", "high")]
        for part in ("prefill_speedup", "decode_speedup"):
            entry[f"{part}s"][row["over"]] = row[part]
    return list(rows.values())


COMPARED = ["compared", "equal", "near_ties", "faults"]


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, with None instead of NaN."""
    rows: list[dict[str, Any]] = table.astype(object).where(table.notna(), None).to_dict("records")
    return rows


def comparison(runs: Sequence[Run]) -> pd.DataFrame:
    """All runs' speedups over their baselines, all categories together, one run after another."""
    parts = []
    for run in runs:
        table = speedup(run)
        table = table[(table["category"] == ALL) & (table["over"] == run.baseline)]
        table.insert(0, "run", run.label)
        parts.append(table)
    return pd.concat(parts, ignore_index=True)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
