"""Reports on files of runs, searches and trainings: a folder with tables, plots and a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from layerskip.analysis import (
    drawing,
    exit_report,
    plots,
    run_tables,
    search_tables,
    training_tables,
    verdict,
)
from layerskip.analysis.labels import slug_of, visible
from layerskip.analysis.page import Section, page
from layerskip.analysis.runs import Run, load_runs
from layerskip.analysis.search_plots import search_plots
from layerskip.files.documents import kind_of
from layerskip.files.records import begins_as_run
from layerskip.files.writing import replacing_folder

MARK = ".layerskip-report.json"
"""A report's list of its own files, which identifies a folder that may be replaced."""


RUN_TABLES = (
    "results", "categories", "speedup", "losslessness", "acceptance", "sources", "positions",
    "phases", "decoding", "predictions", "repetition", "exits", "sweeps",
)  # fmt: skip
"""The functions of `run_tables` that a report calls, in the page's order."""


@dataclass(frozen=True)
class Subject:
    """The contents of a report for one kind of file; files have a `label`."""

    load: Callable[[Sequence[Path]], Sequence[Any]]
    judge: Callable[[Any], verdict.Verdict]
    plots: Callable[[Any], Sequence[drawing.Plot]]
    tables: Mapping[str, Callable[[Any], pd.DataFrame]]


def kinds() -> dict[str, Subject]:
    """By the name that `kind_of` gives files, in the page's order."""
    return {
        "run": Subject(
            load_runs,
            verdict.judge_run,
            plots.run_plots,
            {name: getattr(run_tables, name) for name in RUN_TABLES},
        ),
        "search": Subject(
            search_tables.load_searches,
            verdict.judge_search,
            search_plots,
            {"search-finalists": search_tables.finalists, "search-trials": search_tables.trials},
        ),
        "training": Subject(
            lambda files: [training_tables.load_trainings(files)],
            verdict.judge_trainings,
            lambda of: [plots.training_curve(of)],
            {"trainings": training_tables.trainings, "training-curves": training_tables.curves},
        ),
        "exits": Subject(
            exit_report.load_exit_trainings,
            exit_report.judge_exits,
            exit_report.exit_plots,
            {"exit-training": exit_report.exits},
        ),
    }


def write_report(
    files: Sequence[Path], output: Path, progress: Callable[[str], None] = lambda _: None
) -> str:
    """Write a report about files: index.html, tables as CSV, plots as SVG.

    It is built in a folder next to `output` and then renamed, so `output` is never incomplete. An
    earlier report is replaced; any other folder that is not empty is refused.

    Args:
        files: files written by `layerskip benchmark`, `layerskip search` and `layerskip train`.
        progress: called with a description of the current activity.

    Returns:
        The results in plain words: a paragraph for each file.

    Raises:
        ValueError: there is no file, a file is not valid, or `output` cannot be written to.
    """
    files, output = [Path(file) for file in files], Path(output)
    files = [each for file in files for each in (_inside(file) if file.is_dir() else [file])]
    by_kind = _by_kind(files)
    subjects_of = [
        (name, kind, kind.load(by_kind[name])) for name, kind in kinds().items() if name in by_kind
    ]
    _check_output(output)
    verdicts = [kind.judge(subject) for _, kind, subjects in subjects_of for subject in subjects]
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(output) as built:
            for inner in ("tables", "plots"):
                (built / inner).mkdir()
            sections = _sections(built, subjects_of, verdicts, len(files) > 1, progress)
            title = "Self-speculative decoding" if len(files) > 1 else sections[0].title
            _write(
                built / "index.html", page(title, sections, [visible(str(file)) for file in files])
            )
            written = sorted(str(p.relative_to(built)) for p in built.rglob("*") if p.is_file())
            _write(built / MARK, json.dumps({"files": written}, indent=0) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write the report {output}: {error.strerror}") from error
    return verdict.words(verdicts)


def _inside(folder: Path) -> list[Path]:
    """The files in a folder from which reports are made."""
    named = [path for path in (folder / "search.json", folder / "train.json") if path.exists()]
    lines = [path for path in sorted(folder.glob("*.jsonl")) if path.is_file()]
    runs = [path for path in lines if begins_as_run(path)]
    if not named + runs:
        raise ValueError(f"the folder {folder} holds none of these: {WANTED}")
    return named + runs


WANTED = "a report is made of records of runs (.jsonl), search.json and train.json"


def _by_kind(files: Sequence[Path]) -> dict[str, list[Path]]:
    if not files:
        raise ValueError(
            "no run file given: name at least one file that `layerskip benchmark`, `layerskip "
            "search` or `layerskip train` wrote"
        )
    twice = [str(path) for path, n in Counter(file.resolve() for file in files).items() if n > 1]
    if twice:
        raise ValueError(f"run file {twice[0]} is given twice; name each file once")
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        kind = kind_of(file)
        if kind == "other":
            raise ValueError(f"{file} cannot be reported: {WANTED}")
        by_kind.setdefault(kind, []).append(file)
    return by_kind


def _sections(
    folder: Path,
    subjects_of: Sequence[tuple[str, Subject, Sequence[Any]]],
    verdicts: Sequence[verdict.Verdict],
    several: bool,
    progress: Callable[[str], None],
) -> list[Section]:
    """The page's sections; writes their tables and plots on the way."""
    made, judged = [], iter(verdicts)
    for name, kind, subjects in subjects_of:
        if name == "run" and len(subjects) > 1:
            together = {"comparison": run_tables.comparison(subjects)}
            _write_table(folder, "comparison", together["comparison"])
            made.append(Section("All runs", "all-runs", "runs", subjects, None, [], together))
        frames: dict[str, list[pd.DataFrame]] = {table: [] for table in kind.tables}
        for number, subject in enumerate(subjects, 1):
            shown = {table: make(subject) for table, make in kind.tables.items()}
            for table, frame in shown.items():
                labelled = frame.copy()
                labelled.insert(0, name, subject.label)
                frames[table].append(labelled)
            prefix = f"{slug_of(subject.label, number)}-" if several else ""
            pictures = []
            with mpl.rc_context(drawing.STYLE):
                for plot in kind.plots(subject):
                    progress(f"drawing {plot.title}")
                    _write(folder / "plots" / f"{prefix}{plot.name}.svg", plot.svg)
                    pictures.append(plot)
            if name == "run":
                shown = {table: _headlines(subject, table, shown[table]) for table in shown}
            place = subject.label, f"{name}-{number}", name, subject
            made.append(Section(*place, next(judged), pictures, shown))
        for table_name, each in frames.items():
            _write_table(folder, table_name, pd.concat(each, ignore_index=True))
    return made


def _headlines(run: Run, table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The part of a table shown on the page: all prompts together, or each context length."""
    if "category" not in frame or table == "categories":
        return frame
    return frame[frame["category"].isin([*run.contexts])]


def _write_table(folder: Path, name: str, frame: pd.DataFrame) -> None:
    frame.to_csv(folder / "tables" / f"{name}.csv", index=False, errors="backslashreplace")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def _check_output(output: Path) -> None:
    """Refuse to replace files, or folders with contents that are not from a report."""
    if not output.name:
        raise ValueError(f"the report {output} cannot replace this folder; name one inside it")
    if not output.exists():
        return
    if not output.is_dir() or output.is_symlink():
        raise ValueError(f"cannot write the report {output}: it is not a folder; name another one")
    try:
        ours = set(json.loads((output / MARK).read_text(encoding="utf-8"))["files"]) | {MARK}
        inside = {str(p.relative_to(output)) for p in output.rglob("*") if not p.is_dir()}
    except (OSError, ValueError, KeyError, TypeError):
        ours, inside = set(), {path.name for path in output.iterdir()}
    foreign = sorted(inside - ours)
    if foreign:
        raise ValueError(
            f"the folder {output} holds {foreign[0]}, which no report put there; give a new folder "
            "or an earlier report's"
        )
