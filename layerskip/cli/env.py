"""The env command: what this machine is, to paste into an issue."""

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
    """Versions, processors and devices, to paste into a bug report."""
    from layerskip.environment import environment, render
    from layerskip.model import extension

    if rebuild:
        try:
            extension.rebuild()
        except extension.Unavailable as reason:
            raise ValueError(str(reason)) from reason
    found = {**environment(), "native": extension.status()}
    print(render(found))
    if as_json:
        print(to_json(found))
