"""Knows how files of runs and searches become a folder, whole or not at all.

Numbers and looks are left to others.
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from layerskip.analysis import plots, predictions, search_tables, search_verdict, tables, verdict
from layerskip.analysis.canvas import STYLE, Plot
from layerskip.analysis.columns import Table
from layerskip.analysis.page import Picture, Section, page
from layerskip.analysis.runs import (
    Run,
    count_words,
    law_words,
    load_runs,
    machine_words,
    visible,
)
from layerskip.analysis.search_plots import search_plots
from layerskip.analysis.search_tables import Search, load_searches
from layerskip.files.records import redacted
from layerskip.files.searches import holds_search
from layerskip.files.writing import replace_folder

MARK = ".layerskip-report.json"
"""A report's list of its own files: what tells a folder that may be replaced from a foreign one."""

TEXTS = 3  # prompts whose texts are shown, where the run kept them
LONGEST_TEXT = 4000  # characters of them

TABLES: dict[str, Callable[[Run], pd.DataFrame]] = {
    "speedup": tables.speedup,
    "losslessness": tables.losslessness,
    "acceptance": tables.acceptance,
    "positions": tables.positions,
    "phases": tables.phases,
    "predictions": predictions.predictions,
    "controllers": predictions.controllers,
    "repetition": tables.repetition,
    "exits": tables.exits,
    "what-if": predictions.what_if,
    "calibration": tables.calibration,
    "sublayers": tables.sublayers,
}
NOT_ON_THE_PAGE = ("calibration", "sublayers")  # their plots are

SEARCH_TABLES: dict[str, Callable[[Search], pd.DataFrame]] = {
    "search-finalists": search_tables.finalists,
    "search-origins": search_tables.origins,
    "search-sublayers": search_tables.sublayers,
    "search-trials": search_tables.trials,
}
TRIALS = 20  # on the page, the best; all are in the CSV file


def write_report(
    files: Sequence[Path], output: Path, progress: Callable[[str], None] = lambda _: None
) -> str:
    """Write a report about files: index.html, tables as CSV, plots as SVG.

    It is built in a folder beside `output` and then renamed, so that `output` is never half there.
    An earlier report is replaced; any other folder that holds something is refused.

    Args:
        files: what `layerskip benchmark` and `layerskip search` wrote, told apart by what they
            hold.
        output: the folder to write.
        progress: told what is being done, in words.

    Returns:
        What the files say, in plain words: a paragraph for each.

    Raises:
        ValueError: no file, or one that is not what it must be; or `output` may not be written to.
    """
    runs, searches = _load([Path(file) for file in files])
    output = Path(output)
    _check_output(output, files)
    verdicts = [*map(verdict.judge, runs), *map(search_verdict.judge, searches)]
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{output.name}.", dir=output.absolute().parent
        ) as folder:
            built = Path(folder) / "report"
            _build(runs, searches, verdicts, [str(file) for file in files], built, progress)
            replace_folder(built, output)
    except OSError as error:
        raise ValueError(f"cannot write the report {output}: {error.strerror}") from error
    return visible(verdict.words(verdicts), lines=True)


def _load(files: Sequence[Path]) -> tuple[list[Run], list[Search]]:
    if not files:
        raise ValueError(
            "no run file given: name at least one file that `layerskip benchmark` or `layerskip "
            "search` wrote"
        )
    twice = [str(path) for path, n in Counter(file.resolve() for file in files).items() if n > 1]
    if twice:
        raise ValueError(f"run file {twice[0]} is given twice; name each file once")
    searches = [file for file in files if holds_search(file)]
    return load_runs([file for file in files if file not in searches]), load_searches(searches)


def _build(
    runs: Sequence[Run],
    searches: Sequence[Search],
    verdicts: Sequence[verdict.Verdict],
    files: Sequence[str],
    folder: Path,
    progress: Callable[[str], None],
) -> None:
    (folder / "tables").mkdir(parents=True)
    (folder / "plots").mkdir()

    def pictures(drawn: Iterable[Plot], of: Run | Search | None = None) -> list[Picture]:
        prefix = f"{of.slug}-" if of is not None and len(runs) + len(searches) > 1 else ""
        return [_draw(plot, prefix, folder, progress) for plot in drawn]

    sections = []
    if len(runs) > 1:
        everything = [
            Table("comparison", tables.comparison(list(runs))),
            Table("repeatability", tables.repeatability(list(runs))),
        ]
        for table in everything:
            _write_table(table, folder)
        drawn = pictures(plots.overview_plots(runs))
        sections.append(Section("All runs", "all-runs", {}, None, drawn, everything))
    for number, (run, judged) in enumerate(zip(runs, verdicts, strict=False), 1):
        progress(f"drawing {run.label}")
        own = [
            Table(name, make(run)) for name, make in TABLES.items() if name not in NOT_ON_THE_PAGE
        ]
        sections.append(
            Section(
                title=run.label,
                slug=f"run-{number}",
                facts=_facts(run),
                verdict=judged,
                pictures=pictures(plots.run_plots(run), run),
                tables=own,
                texts=_texts(run),
            )
        )
    for number, (search, judged) in enumerate(zip(searches, verdicts[len(runs) :], strict=True), 1):
        progress(f"drawing {search.label}")
        shown = SEARCH_TABLES | {"search-trials": lambda s: search_tables.best_trials(s, TRIALS)}
        sections.append(
            Section(
                title=search.label,
                slug=f"search-{number}",
                facts=_search_facts(search),
                verdict=judged,
                pictures=pictures(search_plots(search), search),
                tables=[Table(name, make(search)) for name, make in shown.items()],
            )
        )
    for name, make in TABLES.items() if runs else ():
        _write_table(Table(name, tables.together(runs, make)), folder)
    for name, make_own in SEARCH_TABLES.items() if searches else ():
        _write_table(Table(name, tables.together(searches, make_own, "search")), folder)
    title = _title(runs, searches)
    _write(folder / "index.html", page(title, sections, files))
    own_files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    _write(folder / MARK, json.dumps({"files": own_files}, indent=0) + "\n")


def _title(runs: Sequence[Run], searches: Sequence[Search]) -> str:
    if not searches:
        words = "Self-speculative decoding, measured"
        return words if len(runs) > 1 else f"{words}: {runs[0].label}"
    if runs:
        return "Self-speculative decoding, searched and measured"
    words = "Which sublayers to skip"
    return words if len(searches) > 1 else f"{searches[0].label}: {words.lower()}"


def _draw(plot: Plot, prefix: str, folder: Path, progress: Callable[[str], None]) -> Picture:
    """Save a plot as SVG; nothing in the file depends on when it was made."""
    progress(f"drawing {plot.title}")
    drawing = io.StringIO()
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # names in scripts the font lacks
        plot.figure.savefig(drawing, format="svg", metadata={"Date": None})
    svg = drawing.getvalue()
    _write(folder / "plots" / f"{prefix}{plot.name}.svg", svg)
    return Picture(plot.title, plot.alt, svg)


def _write_table(table: Table, folder: Path) -> None:
    table.frame.to_csv(
        folder / "tables" / f"{table.name}.csv", index=False, errors="backslashreplace"
    )


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def _facts(run: Run) -> dict[str, str]:
    """What the header says of model, law, machine and code."""
    header = run.header
    prompts = header["prompts"]
    facts = _setting(header)
    if run.synthetic:
        facts["Synthetic acceptance"] = run.synthetic
    facts["Prompts"] = (
        f"{prompts['count']} ({prompts.get('name') or 'unnamed'}), {header['repeats']} repeats "
        f"after {header['warmup']} for warming up"
    )
    facts["Measured"] = f"{header['created']}, {_code(header['environment'])}"
    for method in run.drafting:
        costs = run.cost_table(method, run.batch_sizes[0])
        if costs is not None:
            verify = ", ".join(f"v({n}) = {costs.verify_cost(n):.2f}" for n in (2, 3, 5, 9))
            facts[f"Costs of {method}"] = f"c = {costs.draft:.3f}, {verify} ({costs.source})"
    return facts


def _search_facts(search: Search) -> dict[str, str]:
    """What a search file says of its setting, its space and its study."""
    document = search.document
    prompts, space, trace, study = (
        document[name] for name in ("prompts", "space", "trace", "study")
    )
    ends = "" if space["kind"] == "exit" else f", ends {'free' if space['allow_ends'] else 'kept'}"
    budget = "" if space["budget"] is None else f", at most {space['budget']} sublayers left out"
    storage = "memory" if study["storage"] is None else redacted(study["storage"])
    took = {
        "trace": "trace",
        "cost": "costs",
        "trials": "trials",
        "confirm": "timing the finalists",
    }
    seconds = document["seconds"]
    facts = _setting(document)
    facts["Prompts"] = (
        f"{prompts['count']} ({prompts['name']}), {len(prompts['traced'])} traced, "
        f"{len(prompts['held_out'])} held out"
    )
    facts["Space"] = (
        f"{space['kind']}, {space['switches']} switches, {count_words(space['size'])} sets"
        f"{ends}{budget}"
    )
    facts["Trace"] = (
        f"{trace['texts']} texts, {trace['starts']} starts, drafts of up to "
        f"{trace['draft_length']} tokens; a plain step costs "
        f"{1000 * document['step_seconds']:.3g} ms"
    )
    facts["Study"] = f"{study['name']} in {storage}"
    facts["Seconds"] = ", ".join(
        f"{words} {seconds[name]:.0f}" for name, words in took.items() if seconds[name] is not None
    )
    facts["Searched"] = f"{document['created']}, {_code(document['environment'])}"
    return facts


def _setting(header: Mapping[str, Any]) -> dict[str, str]:
    """Model, law and machine, of runs and searches alike."""
    model = header["model"]
    devices = [str(device.get("name")) for device in header["environment"].get("devices") or []]
    cpu = header["environment"].get("cpu") or {}
    machine = ", ".join([*devices, str(cpu.get("model") or "unknown processor")])
    return {
        "Model": f"{model['name']}, {model['architecture']}, {model['num_layers']} layers, "
        f"{model['parameters'] / 1e6:,.1f} M parameters",
        "Law": f"{law_words(header['law'])}, up to {header['max_new_tokens']} new tokens",
        "Machine": f"{machine}; {machine_words(header)}",
    }


def _code(environment: dict[str, Any]) -> str:
    packages = environment.get("packages") or {}
    words = f"layerskip {environment.get('layerskip')}"
    git = environment.get("git")
    if git:
        words += f" ({str(git['revision'])[:10]}{', changed' if git['dirty'] else ''})"
    known = [f"{n} {packages[n]}" for n in ("torch", "transformers") if packages.get(n)]
    return ", ".join([words, *known])


def _texts(run: Run) -> list[tuple[str, str, str]]:
    """A few prompts and what followed, of the last drafting method, where the run kept them."""
    method = (run.drafting or [run.baseline])[-1]
    found: dict[str, tuple[str, str, str]] = {}
    for record in run.records:
        if record["method"] != method or not record.get("texts"):
            continue
        prompts = record.get("prompt_texts") or [""] * len(record["texts"])
        for name, prompt, text in zip(record["prompts"], prompts, record["texts"], strict=False):
            found.setdefault(name, (name, prompt[:LONGEST_TEXT], text[:LONGEST_TEXT]))
    return list(found.values())[:TEXTS]


def _check_output(output: Path, files: Sequence[Path]) -> None:
    """Refuse what may not be replaced: files, foreign folders, and folders with the input."""
    if not output.exists():
        return
    if not output.is_dir() or output.is_symlink():
        raise ValueError(f"cannot write the report {output}: it is not a folder; name another one")
    try:
        own = set(json.loads((output / MARK).read_text(encoding="utf-8"))["files"]) | {MARK}
        inside = {str(p.relative_to(output)) for p in output.rglob("*") if not p.is_dir()}
    except (OSError, ValueError, KeyError, TypeError):
        own, inside = set(), {path.name for path in output.iterdir()}
    foreign = sorted(inside - own)
    if foreign:
        raise ValueError(
            f"the folder {output} holds {foreign[0]}, which no report put there; give a new folder "
            "or an earlier report's"
        )
