"""The env command: facts about this machine, and the supported architectures."""

from __future__ import annotations

from layerskip.cli.flags import AsJson, switch
from layerskip.cli.terminal import to_json


def env(
    rebuild: bool = switch("--rebuild", "Rebuild the native extension."), as_json: AsJson = False
) -> None:
    """Show versions, hardware and supported models for a bug report.

    Example: layerskip env --json
    """
    from layerskip.families.served_models import TABLE
    from layerskip.files.environment import environment, render
    from layerskip.native import extension

    if rebuild:
        try:
            extension.rebuild()
        except extension.Unavailable as reason:
            raise ValueError(str(reason)) from reason
    facts = {**environment(), "native": extension.status(), "architectures": TABLE}
    print(render(facts))
    if as_json:
        print(to_json(facts))
