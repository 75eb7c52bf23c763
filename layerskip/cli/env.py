"""The env command: this machine, and the models that are served."""

from __future__ import annotations

from layerskip.cli.flags import AsJson, switch
from layerskip.cli.terminal import to_json


def env(
    rebuild: bool = switch("--rebuild", "Build the native passes anew."), as_json: AsJson = False
) -> None:
    """Show versions, processors, devices and served architectures, to paste into a bug report."""
    from layerskip.environment import environment, render
    from layerskip.model import extension
    from layerskip.model.architectures import TABLE

    if rebuild:
        try:
            extension.rebuild()
        except extension.Unavailable as reason:
            raise ValueError(str(reason)) from reason
    facts = {**environment(), "native": extension.status(), "architectures": TABLE}
    print(render(facts))
    if as_json:
        print(to_json(facts))
