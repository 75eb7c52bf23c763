"""The env command: what this machine is, to paste into an issue."""

from __future__ import annotations

from layerskip.cli.options import AsJson, to_json


def env(as_json: AsJson = False) -> None:
    """Versions, processors and devices, to paste into a bug report."""
    from layerskip.environment import environment, render
    from layerskip.model.extension import status

    found = {**environment(), "native": status()}
    print(render(found))
    if as_json:
        print(to_json(found))
