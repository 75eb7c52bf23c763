"""The files of runs as a report reads them: methods, records, rounds, and times by prompt.

A *unit* is what one record timed: a prompt at batch size 1, a batch of prompts otherwise. Medians
are taken over a unit's repeats, means and intervals over units.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from layerskip.analysis.labels import labels_of, printable, slug_of
from layerskip.costs.ratios import Totals
from layerskip.costs.speculation import CostTable
from layerskip.files.records import costs_key, read_run

ALL = "all"
PHASES = ("draft", "verify", "other")
KNOWN = frozenset({"lookup", "laws"})
"""The sources whose drafts cost nothing."""


@dataclass(frozen=True)
class Tree:
    """Drafted tokens with branches, numbered from 1 on.

    Attributes:
        parents: which one each follows; 0: the last token of the text.
        taken: those that were accepted, in order.
        words: each one's text, where the record has it.
    """

    parents: Sequence[int]
    taken: Sequence[int]
    words: Sequence[str] | None = None

    @property
    def end(self) -> int:
        """The last one that was accepted; 0: none was."""
        return self.taken[-1] if self.taken else 0

    @property
    def depths(self) -> list[int]:
        """How far the text's last token and each of these are from it."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return found


@dataclass(frozen=True)
class Round:
    """One row's part in one round: tokens drafted, accepted and emitted; and from what."""

    drafted: int
    accepted: int
    emitted: int
    source: int | None = None
    """The number of the method's source that it drafted from; None: it drafted nothing."""
    tree: Tree | None = None
    """What it drafted, where that had branches."""

    @property
    def depth(self) -> int:
        """How many of the drafted tokens could be accepted, at most."""
        return self.drafted if self.tree is None else max(self.tree.depths)

    @property
    def rejected(self) -> bool:
        """Whether a drafted token was refused; a round that an end of text cut tells nothing."""
        if self.tree is not None and self.tree.end not in self.tree.parents:
            return False  # nothing was drafted behind what was accepted
        return self.accepted < self.drafted and self.emitted > self.accepted


@dataclass(frozen=True)
class Run:
    """One run file: one model, one law, one machine."""

    label: str
    """What tells this run from the others of a report, in words."""
    slug: str
    """The same as a file name."""
    header: dict[str, Any]
    records: Sequence[dict[str, Any]]
    traces: Sequence[dict[str, Any]]
    costs: Sequence[dict[str, Any]]

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """What the header says of each method, by name, in its order."""
        return {method["name"]: method for method in self.header["methods"]}

    @property
    def measured(self) -> list[str]:
        """Names of the methods with records, in the header's order."""
        seen = {record["method"] for record in self.records}
        return [name for name in self.methods if name in seen]

    @property
    def drafting(self) -> list[str]:
        """Those of them that draft with the model's own sublayers in this engine."""
        return [name for name in self.measured if self.methods[name]["kind"] == "self"]

    def sources(self, method: str) -> list[str]:
        """What a drafting method drafts from, as its rounds number them."""
        return list(self.methods[method]["sources"])

    def looks_up(self, method: str) -> bool:
        """Whether drafts of a method may be looked up, which no cost of a draft step bounds."""
        return not KNOWN.isdisjoint(self.sources(method))

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
        """Kinds of prompts, in the records' order; none where there is only one."""
        kinds = list(dict.fromkeys(record["category"] or "other" for record in self.records))
        return kinds if len(kinds) > 1 else []

    @property
    def contexts(self) -> dict[str, int | None]:
        """The contexts that prompts were joined or cut to, by their category; ascending.

        Where there is one kind of prompts only, the category is "all", and its context may be None.
        """
        found = {
            record["category"] if self.categories else ALL: record.get("context")
            for record in self.records
        }
        known = {name: context for name, context in found.items() if context is not None}
        return dict(sorted(known.items(), key=lambda item: item[1])) or {ALL: None}

    @property
    def num_layers(self) -> int:
        return int(self.header["model"]["num_layers"])

    def cost_table(
        self, method: str, batch_size: int, context: int | None = None
    ) -> CostTable | None:
        """The header's costs of a `self` method in such batches; None where it holds none."""
        table = (self.methods[method].get("costs") or {}).get(costs_key(batch_size, context))
        if table is None:
            return None
        return CostTable(float(table["draft"]), tuple(table["verify"]), table["source"])

    def rounds(self, method: str, batch_size: int) -> Iterator[tuple[dict[str, Any], list[Round]]]:
        """A method's records that hold rounds, each with its rounds, those of all rows."""
        for record in self.records:
            if (record["method"], record["batch_size"]) == (method, batch_size):
                rounds = rounds_of(record)
                if rounds:
                    yield record, rounds

    def all_rounds(self, method: str) -> list[Round]:
        """A method's rounds, of all batch sizes."""
        found = chain.from_iterable(self.rounds(method, size) for size in self.batch_sizes)
        return [each for _, rounds in found for each in rounds]


def load_runs(files: Sequence[Path]) -> list[Run]:
    """Read and check run files, and name each by what tells it from the others.

    Raises:
        ValueError: a file is missing, unreadable, truncated, of another schema, without records,
            or contradicts itself. Says which and why, in one line.
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
        Run(
            label=label,
            slug=slug_of(label, number),
            header=header,
            records=[printable(record) for record in run.records],
            traces=run.traces,
            costs=run.costs,
        )
        for number, (run, header, label) in enumerate(zip(read, headers, labels, strict=True))
    ]


def calls(run: Run) -> pd.DataFrame:
    """One row per record: a method's call on a unit.

    Columns: `category`; `tokens` and `seconds`, of the whole call; `first` (seconds to the first
    tokens), `decode_tokens` and `decode_seconds` (of what came after them); `draft`, `verify`,
    `other` (seconds); `read` (bytes, after the first tokens), `memory` (bytes a second).
    """
    rows = []
    for record in run.records:
        seconds, tokens = record["seconds"], sum(record["new_tokens"])
        spent = {name: _known(seconds.get(name)) for name in ("first", *PHASES)}
        rows.append(
            {
                "batch_size": record["batch_size"],
                "method": record["method"],
                "unit": "\n".join(record["prompts"]),
                "category": record["category"] or "other",
                "tokens": tokens,
                "seconds": seconds["total"],
                "decode_tokens": tokens - sum(record["first_tokens"]),
                "decode_seconds": seconds["total"] - spent["first"],
                **spent,
                "read": _known(record.get("bytes_read")),
                "memory": _known(record.get("read_bandwidth")),
            }
        )
    return pd.DataFrame(rows)


def typical(run: Run) -> pd.DataFrame:
    """One row per (batch size, method, unit): medians of `calls` over the unit's repeats."""
    grouped = calls(run).groupby(["batch_size", "method", "unit"], sort=False)
    medians = grouped.median(numeric_only=True)
    return medians.join(grouped["category"].first()).reset_index()


def totals(frame: pd.DataFrame, part: str = "") -> Totals:
    """Of rows of `typical`: the whole calls, or their part "decode_"."""
    names = (f"{part}tokens", f"{part}seconds")
    return Totals(*(frame[name].to_numpy(dtype=float) for name in names))


def _known(number: float | None) -> float:
    return math.nan if number is None else float(number)


def rounds_of(record: dict[str, Any]) -> list[Round]:
    """The rounds of all rows; a row that had finished emitted nothing and is left out."""
    rounds = record.get("rounds")
    if rounds is None:
        return []
    counts = zip(rounds["drafted"], rounds["accepted"], rounds["emitted"], strict=True)
    rows = (
        Round(drafted, accepted, emitted, source, _tree(rounds, number, row))
        for number, (round_, found) in enumerate(zip(counts, rounds["sources"], strict=True))
        for row, (drafted, accepted, emitted, source) in enumerate(
            zip(*round_, _by_row(found, len(round_[0])), strict=True)
        )
    )
    return [row for row in rows if row.emitted > 0]


def _tree(rounds: dict[str, Any], number: int, row: int) -> Tree | None:
    """What a row drafted in a round, if that had branches."""
    if rounds.get("parents") is None or rounds["parents"][number][row] is None:
        return None
    words = rounds.get("drafts")
    parents, taken = (rounds[name][number][row] for name in ("parents", "taken"))
    return Tree(parents, taken, None if words is None else words[number][row])


def _by_row(source: int | list[int | None] | None, rows: int) -> list[int | None]:
    """The source of each row of a round, which names one for all or those of each."""
    return source if isinstance(source, list) else [source] * rows


def longest_drafts(method: dict[str, Any], rounds: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Of each round of a record, as `CostTable.round_cost` takes it: drafted, steps, wide.

    Rows draft in lockstep, so that a round costs what its longest drafts do. Where steps are not
    told, as in old records, there are as many as tokens; looked-up ones take none.
    """
    names = method.get("sources")
    longest = [*map(max, rounds["drafted"])]
    steps, wide = rounds.get("steps"), rounds.get("wide") or [0] * len(longest)
    if steps is None:
        steps = [
            max(
                count if source is None or names is None or names[source] not in KNOWN else 0
                for count, source in zip(drafted, _by_row(sources, len(drafted)), strict=True)
            )
            for drafted, sources in zip(rounds["drafted"], rounds["sources"], strict=True)
        ]
    return [*zip(longest, steps, wide, strict=True)]


def _check(path: Path, header: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """What a report needs beyond what reading has checked line by line."""
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
    for method in header["methods"]:
        needed = {"skipped", "num_kept", "controller", "sources"} - method.keys()
        if method["kind"] == "self" and needed:
            raise ValueError(
                f"run file {path} does not say {', '.join(sorted(needed))} of its method "
                f"{method['name']!r}; a method of kind 'self' needs them"
            )
    for record in records:
        if not sum(record["new_tokens"]):
            raise ValueError(
                f"run file {path} has a record of method {record['method']!r} (prompts "
                f"{', '.join(record['prompts'])}) without new tokens; speeds per token need one"
            )
