"""Early exits, of a training (a table, a picture and a few sentences) or of a check (a picture)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.ticker import MaxNLocator

from layerskip.analysis.drawing import STYLE, Plot, finished, lines, listed, new_axes
from layerskip.analysis.labels import distinct_labels, printable, ranged
from layerskip.analysis.run_tables import number
from layerskip.analysis.verdict import Verdict
from layerskip.files.trainings import LARGEST_RISE, read_exit_training, rise

QUALITIES = ("loss", "agreement", "accepted", "overlap")


@dataclass(frozen=True)
class ExitTrainingFile:
    """The file of a training of exits."""

    label: str
    record: Mapping[str, Any]


def load_exit_trainings(files: Sequence[Path]) -> list[ExitTrainingFile]:
    """Read and check files.

    Raises:
        ValueError: a file is not valid; says which and why, in one line.
    """
    records = [printable(read_exit_training(file)) for file in files]
    labels = distinct_labels(
        [f"Exits of {record['model'] or record['base']}" for record in records]
    )
    return [ExitTrainingFile(*each) for each in zip(labels, records, strict=True)]


def exits(of: ExitTrainingFile) -> pd.DataFrame:
    """A line for each exit, before and after training."""
    return pd.DataFrame(
        {"exit": int(after["exit"])}
        | {f"{name}_{when}": row[name] for name in QUALITIES for when, row in pair.items()}
        for before, after in zip(of.record["before"], of.record["after"], strict=True)
        for pair in [{"before": before, "after": after}]
    )


def exit_plots(of: ExitTrainingFile) -> list[Plot]:
    """How often each early exit's token is accepted, before and after training."""
    table = exits(of)[:-1]  # the last exit is always accepted
    times = {f"accepted_{when}": f"{when} training" for when in ("before", "after")}
    both = table.rename(columns=times).melt("exit", [*times.values()], "training", "accepted")
    return [_by_depth(both, "training")]


def draw_agreement(drafts: Sequence[Mapping[str, Any]]) -> str:
    """How often each early exit of `check --exits` is right, by law, as SVG."""
    exact = [{"exit": each["exit"], **each["right"]} for each in drafts if each["bits"] is None]
    table = pd.DataFrame(exact).melt("exit", var_name="law", value_name="accepted")
    with mpl.rc_context(STYLE):
        return _by_depth(table, "law").svg


def _by_depth(table: pd.DataFrame, by: str) -> Plot:
    """The column `accepted` over `exit`, with a line for each value of another column."""
    axes = new_axes(3.6)
    words = lines(axes, table, by, "exit", "accepted", "{exit}: {accepted:.2f}")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    alt = f"Share of an exit's drafted tokens that the model accepts, by exit. {words}."
    title = "Accepted tokens by exit"
    return finished(axes, "exits", title, alt, "layers before the exit", "share accepted")


def judge_exits(of: ExitTrainingFile) -> Verdict:
    """Whether the model stayed as good, and the result for its best exit."""
    record, verdict = of.record, Verdict(of.label)
    risen, before = rise(record), record["before"][-1]["loss"]
    if risen > LARGEST_RISE and record["recipe"]["init"] != "random":
        verdict.faults.append(
            f"The model's own loss rose by {risen:.3f} nats, more than {LARGEST_RISE:g}: train "
            "again with a larger --keep or a smaller --rate."
        )
    row = exits(of).query(f"exit == {record['best']}")
    verdict.lines.append(
        listed(row, "Exit {exit}: {accepted_after:.3f} accepted (before: {accepted_before:.3f}); ")
        + f"the model's own loss is {before + risen:.3f} (before: {before:.3f})."
    )
    names = {"trained": "that exit with lookups", "before": "the usual draft"}
    verdict.lines += [
        f"Measured: {names.get(name, name)} is "
        f"{ranged(timed['speedup'], number(timed['low']), number(timed['high']))} times as fast as "
        "plain decoding."
        for name, timed in record["timed"].items()
    ]
    return verdict
