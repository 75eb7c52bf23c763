"""The env command: what this machine is and which models are served, to paste into an issue."""

from __future__ import annotations

from typing import Annotated

import typer

from layerskip.cli.options import AsJson, to_json


def env(
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build the native passes anew.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Versions, processors, devices and architectures, to paste into a bug report."""
    from layerskip.environment import environment, render
    from layerskip.model import extension
    from layerskip.model.architectures import TABLE

    if rebuild:
        try:
            extension.rebuild()
        except extension.Unavailable as reason:
            raise ValueError(str(reason)) from reason
    found = {**environment(), "native": extension.status(), "architectures": TABLE}
    print(render(found))
    if as_json:
        print(to_json(found))
