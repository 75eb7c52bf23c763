"""Run files as a report uses them: methods, records, rounds, and times by prompt.

A *unit* is what one record timed: a prompt at batch size 1, otherwise a batch of prompts. Medians
are taken over a unit's repeats, means and intervals over units.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from layerskip.analysis.labels import labels_of, printable
from layerskip.costs.ratios import Totals, compared
from layerskip.costs.speculation import CostTable
from layerskip.files.records import costs_key, read_run

ALL = "all"
PHASES = ("draft", "verify", "other")
FREE = frozenset({"lookup", "laws"})
"""The sources whose drafts cost no draft step."""


class RoundRow(NamedTuple):
    """One row's part in one round: a line of `Run.rounds`."""

    record: int
    """The number of its record."""
    number: int
    """Its position in the record, from 0."""
    row: int
    batch_size: int
    category: str
    method: str
    drafted: int
    accepted: int
    emitted: int
    steps: int
    """Draft steps of the whole round."""
    source: int | None
    """The number of the source that drafted; None if nothing was drafted."""
    depth: int
    """Maximum number of drafted tokens that could be accepted; in a tree fewer than drafted."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run file: one model, one set of sampling settings, one machine."""

    label: str
    """The label that distinguishes this run from the others in a report."""
    header: dict[str, Any]
    records: Sequence[dict[str, Any]]
    sweeps: Sequence[dict[str, Any]]

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The header's entry for each method, by name, in its order."""
        return {method["name"]: method for method in self.header["methods"]}

    @property
    def measured(self) -> list[str]:
        """Names of the methods with records, in the header's order."""
        seen = {record["method"] for record in self.records}
        return [name for name in self.methods if name in seen]

    @property
    def drafting(self) -> list[str]:
        """Those of them that draft in this engine."""
        return [name for name in self.measured if self.methods[name]["kind"] == "self"]

    def sources(self, method: str) -> list[str]:
        """The sources of a drafting method, in the order of their numbers in rounds."""
        return list(self.methods[method]["sources"])

    @property
    def baseline(self) -> str:
        """Name of the method that speedups are over."""
        return str(self.header["baseline"])

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes with records, ascending."""
        return sorted({record["batch_size"] for record in self.records})

    @property
    def categories(self) -> list[str]:
        """Kinds of prompts, in the records' order; empty if there is only one."""
        kinds = list(dict.fromkeys(record["category"] or "other" for record in self.records))
        return kinds if len(kinds) > 1 else []

    @property
    def contexts(self) -> dict[str, int | None]:
        """Context lengths of prompts by category, ascending; {"all": None} if there are none."""
        by_category = {
            record["category"] if self.categories else ALL: record["context"]
            for record in self.records
            if record.get("context") is not None
        }
        return dict(sorted(by_category.items(), key=lambda item: item[1])) or {ALL: None}

    def cost_table(
        self, method: str, batch_size: int, context: int | None = None
    ) -> CostTable | None:
        """The header's costs of a `self` method in such batches, or None."""
        table = (self.methods[method].get("costs") or {}).get(costs_key(batch_size, context))
        return None if table is None else CostTable.from_dict(table)

    @cached_property
    def calls(self) -> pd.DataFrame:
        """One line per record: a method's call on a unit.

        `first` is the time to the first tokens in seconds; columns that begin with "decode" cover
        the time after them; `read` is bytes read then, and `memory` bytes per second of sweeps.
        """
        rows = []
        for record in self.records:
            seconds, tokens = record["seconds"], sum(record["new_tokens"])
            rows.append(
                {
                    "batch_size": record["batch_size"],
                    "method": record["method"],
                    "unit": "\n".join(record["prompts"]),
                    "category": record["category"] or "other",
                    "tokens": tokens,
                    "seconds": seconds["total"],
                    "decode_tokens": tokens - sum(record["first_tokens"]),
                    "decode_seconds": seconds["total"] - seconds["first"],
                    **{name: seconds[name] for name in ("first", *PHASES)},
                    "read": record.get("bytes_read"),
                    "memory": record.get("read_bandwidth"),
                    **compared([record]),
                    "texts": len(record["loops"]),
                    "repeated": sum(record["repeated_4grams"]),
                    "loops": sum(record["loops"]),
                }
            )
        return pd.DataFrame(rows).astype(dict.fromkeys((*PHASES, "read", "memory"), float))

    @cached_property
    def typical(self) -> pd.DataFrame:
        """One line per (batch size, method, unit): medians of `calls` over the unit's repeats."""
        grouped = self.calls.groupby(["batch_size", "method", "unit"], sort=False)
        medians = grouped.median(numeric_only=True)
        return medians.join(grouped["category"].first()).reset_index()

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A line for every `RoundRow` of the drafting methods, and whether a token was `rejected`.

        A round that was cut by an end of text rejects nothing.
        """
        drafting = set(self.drafting)
        rounds = [
            each
            for number, record in enumerate(self.records)
            if record["method"] in drafting
            for each in rounds_of(record, number)
        ]
        table = pd.DataFrame(rounds, columns=RoundRow._fields)
        refused = (table["accepted"] < table["depth"]) & (table["emitted"] > table["accepted"])
        return table.assign(rejected=refused)


def rounds_of(record: dict[str, Any], number: int) -> Iterator[RoundRow]:
    """The rounds of all rows of a record, without rows that had finished."""
    rounds = record["rounds"] or {"drafted": ()}
    place = record["batch_size"], record["category"] or "other", record["method"]
    for turn, drafted in enumerate(rounds["drafted"]):
        source = rounds["sources"][turn]
        by_row = source if isinstance(source, list) else [source] * len(drafted)
        steps = rounds["steps"][turn]
        depths = rounds["depths"][turn] if rounds.get("depths") else drafted
        for row, count in enumerate(drafted):
            accepted, emitted = (rounds[name][turn][row] for name in ("accepted", "emitted"))
            if emitted:
                counts = count, accepted, emitted, steps
                yield RoundRow(number, turn, row, *place, *counts, by_row[row], depths[row])


def totals(frame: pd.DataFrame, part: str = "") -> Totals:
    """The totals of lines of `Run.typical`, or of their "decode_" part."""
    names = (f"{part}tokens", f"{part}seconds")
    return Totals(*(frame[name].to_numpy(dtype=float) for name in names))


def load_runs(files: Sequence[Path]) -> list[Run]:
    """Read and check run files, and give each a label that distinguishes it.

    Raises:
        ValueError: a file is not valid; says which and why, in one line.
    """
    read = [read_run(Path(file)) for file in files]
    for run in read:
        _check(run.path, run.header, run.records)
        if run.cut_off:
            warnings.warn(
                f"the last line of {run.path} is cut off and left out: the run was stopped while "
                "it wrote; run the benchmark again with the same --output to complete it",
                stacklevel=2,
            )
    headers = [printable(run.header) for run in read]
    labels = labels_of(headers, files)
    return [
        Run(label, header, [printable(record) for record in run.records], run.sweeps)
        for run, header, label in zip(read, headers, labels, strict=True)
    ]


def _check(path: Path, header: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """Check what a report needs beyond the line-by-line checks of reading."""
    if not records:
        raise ValueError(
            f"run file {path} holds a header and no records: the benchmark stopped before its "
            "first measurement; run it again with the same --output to continue it"
        )
    if header["baseline"] not in {record["method"] for record in records}:
        raise ValueError(
            f"run file {path} has no record of its baseline {header['baseline']!r}: without it "
            "there is no speedup; measure it with the others (--method)"
        )
    for record in records:
        if not sum(record["new_tokens"]):
            raise ValueError(
                f"run file {path} has a record of method {record['method']!r} (prompts "
                f"{', '.join(record['prompts'])}) without new tokens; speeds per token need one"
            )
