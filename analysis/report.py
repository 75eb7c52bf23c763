"""Knows how files of runs, searches and trainings become a folder, whole or not at all.

Numbers and looks are left to others.
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from layerskip.analysis import (
    plots,
    predictions,
    search_tables,
    search_verdict,
    tables,
    training_plots,
    training_verdict,
    trainings,
    verdict,
)
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
from layerskip.analysis.trainings import Comparison, Trainings, load_comparisons, load_trainings
from layerskip.files.comparisons import holds_comparison
from layerskip.files.records import redacted
from layerskip.files.searches import holds_search
from layerskip.files.trainings import holds_training
from layerskip.files.writing import replace_folder

MARK = ".layerskip-report.json"
"""A report's list of its own files: what tells a folder that may be replaced from a foreign one."""

TABLES: dict[str, Callable[[Run], pd.DataFrame]] = {
    "speedup": tables.speedup,
    "losslessness": tables.losslessness,
    "acceptance": tables.acceptance,
    "sources": tables.sources,
    "positions": tables.positions,
    "phases": tables.phases,
    "weights-read": tables.weights_read,
    "predictions": predictions.predictions,
    "repetition": tables.repetition,
    "exits": tables.exits,
    "what-if": predictions.what_if,
}
SEARCH_TABLES: dict[str, Callable[[Search], pd.DataFrame]] = {
    "search-finalists": search_tables.finalists,
    "search-sublayers": search_tables.sublayers,
    "search-trials": search_tables.trials,
}
Subject = Run | Search | Trainings | Comparison
TRAINING_TABLES: dict[str, Callable[[Trainings], pd.DataFrame]] = {
    "trainings": trainings.trainings,
    "training-curves": trainings.curves,
}
TRIALS = 20  # on the page, the best; all are in the CSV file


def write_report(
    files: Sequence[Path], output: Path, progress: Callable[[str], None] = lambda _: None
) -> str:
    """Write a report about files: index.html, tables as CSV, plots as SVG.

    It is built in a folder beside `output` and then renamed, so that `output` is never half there.
    An earlier report is replaced; any other folder that holds something is refused.

    Args:
        files: what `layerskip benchmark`, `layerskip search` and `layerskip train` wrote, and
            comparisons of drafts, told apart by what they hold.
        output: the folder to write.
        progress: told what is being done, in words.

    Returns:
        What the files say, in plain words: a paragraph for each.

    Raises:
        ValueError: no file, or one that is not what it must be; or `output` may not be written to.
    """
    found = _load([Path(file) for file in files])
    output = Path(output)
    _check_output(output)
    verdicts = found.verdicts()
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{output.name}.", dir=output.absolute().parent
        ) as folder:
            built = Path(folder) / "report"
            with mpl.rc_context(STYLE):
                sections = _Builder(built, len(files), progress).sections(found, verdicts)
            title = "Self-speculative decoding" if len(files) > 1 else sections[0].title
            _write(
                built / "index.html", page(title, sections, [visible(str(file)) for file in files])
            )
            own = sorted(str(p.relative_to(built)) for p in built.rglob("*") if p.is_file())
            _write(built / MARK, json.dumps({"files": own}, indent=0) + "\n")
            replace_folder(built, output)
    except OSError as error:
        raise ValueError(f"cannot write the report {output}: {error.strerror}") from error
    return verdict.words(verdicts)


@dataclass(frozen=True)
class _Found:
    """What the files hold."""

    runs: list[Run]
    searches: list[Search]
    trainings: list[Trainings]
    """One, of all files of trainings, or none."""
    comparisons: list[Comparison]

    def verdicts(self) -> list[verdict.Verdict]:
        """Of each, in the page's order."""
        return [
            *map(verdict.judge, self.runs),
            *map(search_verdict.judge, self.searches),
            *map(training_verdict.judge_comparison, self.comparisons),
            *map(training_verdict.judge_trainings, self.trainings),
        ]


def _load(files: Sequence[Path]) -> _Found:
    if not files:
        raise ValueError(
            "no run file given: name at least one file that `layerskip benchmark`, `layerskip "
            "search` or `layerskip train` wrote"
        )
    twice = [str(path) for path, n in Counter(file.resolve() for file in files).items() if n > 1]
    if twice:
        raise ValueError(f"run file {twice[0]} is given twice; name each file once")
    kinds: dict[str, list[Path]] = {name: [] for name in ("search", "training", "drafts", "run")}
    tests = {"search": holds_search, "training": holds_training, "drafts": holds_comparison}
    for file in files:
        _check_kind(file)
        kinds[next((name for name, test in tests.items() if test(file)), "run")].append(file)
    return _Found(
        load_runs(kinds["run"]),
        load_searches(kinds["search"]),
        [load_trainings(kinds["training"])] if kinds["training"] else [],
        load_comparisons(kinds["drafts"]),
    )


def _check_kind(file: Path) -> None:
    """Refuse a folder, and a JSON document of another kind, and say what was meant perhaps."""
    wanted = (
        "a report is made of records of runs (.jsonl), search.json, train.json, and comparisons"
    )
    if file.is_dir():
        inside = [name for name in ("train.json", "search.json") if (file / name).exists()]
        hint = f"name {file / inside[0]}" if inside else wanted
        raise ValueError(f"{file} is a folder; {hint}")
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # lines of records, or nothing that can be read
    if isinstance(document, dict) and not document.keys() & {"kind", "recipe"}:
        raise ValueError(f"{file} is none of its kinds: {wanted}")


class _Builder:
    """Writes the tables and plots of a report, and collects the sections of its page."""

    def __init__(self, folder: Path, subjects: int, progress: Callable[[str], None]) -> None:
        self.folder, self.subjects, self.progress = folder, subjects, progress
        (folder / "tables").mkdir(parents=True)
        (folder / "plots").mkdir()

    def sections(self, found: _Found, verdicts: Sequence[verdict.Verdict]) -> list[Section]:
        made, judged = [], iter(verdicts)
        if len(found.runs) > 1:
            table = Table("comparison", tables.comparison(found.runs))
            self.write(table)
            pictures = self.pictures(plots.overview_plots(found.runs))
            made.append(Section("All runs", "all-runs", {}, None, pictures, [table]))
        for number, run in enumerate(found.runs, 1):
            shown = [Table(name, make(run)) for name, make in TABLES.items()]
            pictures = self.pictures(plots.run_plots(run), run)
            slug = f"run-{number}"
            made.append(Section(run.label, slug, _facts(run), next(judged), pictures, shown))
        for number, search in enumerate(found.searches, 1):
            makers = SEARCH_TABLES | {"search-trials": _best_trials}
            shown = [Table(name, make(search)) for name, make in makers.items()]
            pictures = self.pictures(search_plots(search), search)
            facts, slug = _search_facts(search), f"search-{number}"
            made.append(Section(search.label, slug, facts, next(judged), pictures, shown))
        for number, each in enumerate(found.comparisons, 1):
            # nothing of what is not measured yet
            shown = [Table("drafts", trainings.drafts(each).dropna(axis=1, how="all"))]
            pictures = self.pictures(training_plots.comparison_plots(each), each)
            facts, slug = _drafts_facts(each), f"drafts-{number}"
            made.append(Section(each.label, slug, facts, next(judged), pictures, shown))
        for all_of in found.trainings:
            shown = [Table(name, make_it(all_of)) for name, make_it in TRAINING_TABLES.items()]
            pictures = self.pictures(training_plots.training_plots(all_of), all_of)
            facts = _training_facts(all_of)
            made.append(Section(all_of.label, all_of.slug, facts, next(judged), pictures, shown))
            for table in shown:
                self.write(table)
        for name, make in TABLES.items() if found.runs else ():
            self.write(Table(name, tables.together(found.runs, make)))
        for name, make_own in SEARCH_TABLES.items() if found.searches else ():
            self.write(Table(name, tables.together(found.searches, make_own, "search")))
        if found.comparisons:
            frame = tables.together(found.comparisons, trainings.drafts, "comparison")
            self.write(Table("drafts", frame))
        return made

    def write(self, table: Table) -> None:
        table.frame.to_csv(
            self.folder / "tables" / f"{table.name}.csv", index=False, errors="backslashreplace"
        )

    def pictures(self, drawn: Iterable[Plot], of: Subject | None = None) -> list[Picture]:
        """Save plots as SVG; nothing in the files depends on when they were made."""
        prefix = f"{of.slug}-" if of is not None and self.subjects > 1 else ""
        made = []
        for plot in drawn:
            self.progress(f"drawing {plot.title}")
            drawing = io.StringIO()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph")  # in scripts the font lacks
                plot.figure.savefig(drawing, format="svg", metadata={"Date": None})
            _write(self.folder / "plots" / f"{prefix}{plot.name}.svg", drawing.getvalue())
            made.append(Picture(plot.title, plot.alt, drawing.getvalue()))
        return made


def _best_trials(search: Search) -> pd.DataFrame:
    return search_tables.best_trials(search, TRIALS)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def _facts(run: Run) -> dict[str, str]:
    """What the header says of model, law, machine and code."""
    header = run.header
    prompts = header["prompts"]
    facts = _setting(header)
    if run.synthetic:
        facts["Synthetic acceptance"] = run.synthetic
    if "passes" in header:
        facts["Passes"] = header["passes"]
    facts["Prompts"] = (
        f"{prompts['count']} ({prompts.get('name') or 'unnamed'}), {header['repeats']} repeats "
        f"after {header['warmup']} for warming up"
    )
    for method in run.drafting:
        costs = run.cost_table(method, run.batch_sizes[0])
        if costs is not None:
            verify = ", ".join(f"v({n}) = {costs.verify_cost(n):.2f}" for n in (2, 3, 5, 9))
            facts[f"Costs of {method}"] = f"c = {costs.draft:.3f}, {verify} ({costs.source})"
        if run.sources(method):
            facts[f"Drafts of {method}"] = run.methods[method].get("label") or method
    return facts


def _search_facts(search: Search) -> dict[str, str]:
    """What a search file says of its setting, its space and its study."""
    document = search.document
    prompts, space, trace, study = (
        document[name] for name in ("prompts", "space", "trace", "study")
    )
    ends = "free" if space["allow_ends"] else "kept"
    storage = "memory" if study["storage"] is None else redacted(study["storage"])
    seconds = ", ".join(f"{k} {v:.0f}" for k, v in document["seconds"].items() if v is not None)
    return _setting(document) | {
        "Prompts": f"{prompts['count']} ({prompts['name']}), {len(prompts['traced'])} traced, "
        f"{len(prompts['held_out'])} held out",
        "Space": f"{space['kind']}, {space['switches']} switches, {count_words(space['size'])} "
        f"sets, ends {ends}",
        "Trace": f"{trace['texts']} texts, {trace['starts']} starts, drafts of up to "
        f"{trace['draft_length']} tokens; a plain step costs "
        f"{1000 * document['step_seconds']:.3g} ms",
        "Study": f"{study['name']} in {storage}",
        "Seconds": seconds,
    }


def _drafts_facts(comparison: Comparison) -> dict[str, str]:
    """What a comparison of drafts says of its setting."""
    header = comparison.document
    prompts = header["prompts"]
    facts = _setting(header)
    if "passes" in header:
        facts["Passes"] = header["passes"]
    return facts | {"Prompts": f"{prompts['count']} ({prompts['name']})"}


def _training_facts(of: Trainings) -> dict[str, str]:
    """What trainings were made for, as far as their files say."""
    records = [each.record for each in of.each]
    models = dict.fromkeys(record.get("model") or record["base"] for record in records)
    warm = sorted({record["recipe"]["temperature"] for record in records})
    held = sorted({record["held_out"]["prompts"] for record in records})
    new = sorted({record["held_out"]["new_tokens"] for record in records})
    prompts, most = (" or ".join(map(str, numbers)) for numbers in (held, new))
    return {
        "Model": ", ".join(models),
        "Texts": f"sampled at T={' or '.join(f'{each:g}' for each in warm)}",
        "Judged on": f"{prompts} prompts kept apart, up to {most} new tokens each",
    }


def _setting(header: Mapping[str, Any]) -> dict[str, str]:
    """Model, law, machine and code, of runs and searches alike."""
    model, environment = header["model"], header["environment"]
    devices = [str(device.get("name")) for device in environment.get("devices") or []]
    cpu = (environment.get("cpu") or {}).get("model") or "unknown processor"
    git = environment.get("git") or {}
    packages = environment.get("packages") or {}
    code = {"layerskip": environment.get("layerskip"), "revision": git.get("revision")} | {
        name: packages.get(name) for name in ("torch", "transformers")
    }
    versions = ", ".join(f"{name} {version}" for name, version in code.items() if version)
    return {
        "Model": f"{model['name']}, {model['architecture']}, {model['num_layers']} layers, "
        f"{model['parameters'] / 1e6:,.1f} M parameters",
        "Law": f"{law_words(header['law'])}, up to {header['max_new_tokens']} new tokens",
        "Machine": f"{', '.join([*devices, str(cpu)])}; {machine_words(header)}",
        "Made": f"{header['created']}, {versions}{', code changed' if git.get('dirty') else ''}",
    }


def _check_output(output: Path) -> None:
    """Refuse what may not be replaced: files, and folders with what no report put there."""
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
