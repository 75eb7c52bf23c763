"""The env command: facts about this machine, and the supported architectures."""

from __future__ import annotations

from typing import Any

from layerskip.cli.flags import AsJson, switch
from layerskip.cli.terminal import to_json, two_columns, wrap
from layerskip.texts.tokens import plural


def env(
    rebuild: bool = switch("--rebuild", "Rebuild the native extension."), as_json: AsJson = False
) -> None:
    """Show versions, hardware and supported models for a bug report.

    Example: layerskip env --json
    """
    from layerskip.families.served_models import TABLE
    from layerskip.files.environment import environment
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


def render(facts: dict[str, Any]) -> str:
    """Format the facts as lines to read, or to paste into an issue."""
    rows = [("layerskip", facts["layerskip"]), ("python", facts["python"])]
    rows += [(name, version or "not installed") for name, version in facts["packages"].items()]
    rows.append(("platform", facts["platform"]))
    cpu, git, table = facts["cpu"], facts["git"], facts["architectures"]
    threads = plural(cpu["threads"], "torch thread")
    rows.append(("cpu", f"{cpu['model']}, {cpu['cores']} cores, {threads}, {cpu['instructions']}"))
    rows += [("compiler", facts["compiler"] or "none found"), ("native", facts["native"])]
    for device in facts["devices"]:
        memory = "" if device["memory"] is None else f", {device['memory'] / 2**30:.1f} GiB"
        rows.append(("device", f"{device['type']}: {device['name']}{memory}"))
    if git is not None:
        rows.append(("git", git["revision"] + (" with changes" if git["dirty"] else "")))
    lines = [two_columns(rows), ""]
    lines.append(
        wrap(f"architectures of transformers {table['transformers']}, and what may draft:")
    )
    for how in dict.fromkeys([*table["drafts"], *table["served"].values()]):
        drafts = table["drafts"].get(how)
        lines.append(wrap(how if drafts is None else f"{how}: {drafts}"))
        names = (kind for kind, level in table["served"].items() if level == how)
        lines.append(wrap(f"  {' '.join(names)}"))
    return "\n".join(lines)
