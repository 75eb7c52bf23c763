"""The report command: files of measurements to a folder to look at; never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerskip.cli.options import AsJson, Quiet, to_json
from layerskip.cli.terminal import Talk


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Records of runs (.jsonl), search.json of searches, train.json of trainings.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where to write it, whole.")],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Tables, plots and one page to look at, of what `benchmark`, `search` and `train` wrote."""
    from layerskip.analysis import write_report

    talk = Talk(quiet)
    talk.progress("drawing")
    summary = write_report(runs, output, talk.progress)
    talk.progress("")
    print(summary)
    talk.say(f"written to {output}; open {output / 'index.html'}")
    if as_json:
        print(to_json({"output": str(output), "summary": summary}))
