"""The report command: turns files of measurements into a folder of pages; never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerskip.cli.flags import AsJson, Quiet, flag
from layerskip.cli.terminal import Talk, to_json


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|FOLDER",
            help="Run records (.jsonl), search.json, train.json, or folders that hold them.",
        ),
    ],
    output: Path = flag("Write the report to this folder.", "DIR", default=...),
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Make tables and plots from `benchmark`, `search` and `train`.

    Example: layerskip report run.jsonl --output report
    """
    from layerskip.analysis import write_report

    talk = Talk(quiet)
    talk.progress("drawing")
    summary = write_report(runs, output, talk.progress)
    talk.progress("")
    print(summary)
    talk.say(f"written to {output}; open {output / 'index.html'}")
    if as_json:
        print(to_json({"output": str(output), "summary": summary}))
