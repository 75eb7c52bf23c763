"""Describes the machine and software of a run: versions, processors, source revision."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from layerskip.version import __version__

PACKAGES = ("torch", "transformers", "optuna", "numpy", "pandas", "accelerate", "tokenizers")
"""Installed packages whose version can change what is generated, searched or reported."""


def environment() -> dict[str, Any]:
    """Collect facts about this machine for records and bug reports, as JSON values.

    Keys: `layerskip`, `python` and `packages` (versions; None if not installed), `platform`, `cpu`
    (`model`, usable `cores`, torch `threads`, the `instructions` that torch uses), `compiler` (the
    C++ compiler that native execution would call, or None), `devices` (`type`, `name`,
    `memory` in bytes or None), `git` (`revision` and `dirty` of the checkout that contains this
    package, else None).
    """
    import torch  # here, so that importing this module costs nothing

    devices: list[dict[str, Any]] = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        devices.append({"type": "cuda", "name": properties.name, "memory": properties.total_memory})
    if torch.backends.mps.is_available():
        devices.append({"type": "mps", "name": platform.machine(), "memory": None})
    usual = "clang++" if platform.system() == "Darwin" else "g++"
    return {
        "layerskip": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": cores(),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "compiler": shutil.which(os.environ.get("CXX", usual)),  # as `torch.compile` finds it
        "devices": devices,
        "git": git_revision(Path(__file__).parents[2]),
    }


def hardware(device: Any) -> str:
    """The name of a torch device's hardware."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()


def render(facts: dict[str, Any]) -> str:
    """Format the result of `environment()` as lines to read or to paste into an issue.

    A `native` entry says whether native passes are built; an `architectures` entry is the table of
    `layerskip.families.served_models`.
    """
    rows = [("layerskip", facts["layerskip"]), ("python", facts["python"])]
    rows += [(name, version or "not installed") for name, version in facts["packages"].items()]
    rows.append(("platform", facts["platform"]))
    cpu = facts["cpu"]
    threads = f"{cpu['threads']} torch thread{'s' if cpu['threads'] > 1 else ''}"
    rows.append(("cpu", f"{cpu['model']}, {cpu['cores']} cores, {threads}, {cpu['instructions']}"))
    rows.append(("compiler", facts["compiler"] or "none found"))
    if "native" in facts:
        rows.append(("native", facts["native"]))
    for device in facts["devices"]:
        memory = "" if device["memory"] is None else f", {device['memory'] / 2**30:.1f} GiB"
        rows.append(("device", f"{device['type']}: {device['name']}{memory}"))
    git = facts["git"]
    if git is not None:
        rows.append(("git", git["revision"] + (" with changes" if git["dirty"] else "")))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, *_architectures(facts.get("architectures"))])


def _architectures(table: dict[str, Any] | None) -> Iterator[str]:
    """Yield a paragraph for each support level and each refusal, wrapped to the terminal."""
    if table is None:
        return
    yield f"\narchitectures of transformers {table['transformers']}, and what may draft:"
    wide: dict[str, Any] = {"break_on_hyphens": False}
    wide["width"] = shutil.get_terminal_size().columns
    for how in dict.fromkeys([*table["drafts"], *table["served"].values()]):
        drafts = table["drafts"].get(how)
        yield from textwrap.wrap(how if drafts is None else f"{how}: {drafts}", **wide)
        names = " ".join(kind for kind, level in table["served"].items() if level == how)
        yield from textwrap.wrap(names, initial_indent="  ", subsequent_indent="  ", **wide)


def git_revision(root: Path) -> dict[str, Any] | None:
    """`revision` and `dirty` of the checkout with this root; None if it is not a checkout."""
    if not (root / ".git").exists():
        return None
    try:
        revision, status = (
            subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None  # git is not installed, or rejects this folder
    return {"revision": revision, "dirty": bool(status)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path:
    """`$LAYERSKIP_CACHE`, or `layerskip` in the user's cache folder."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("LAYERSKIP_CACHE") or Path(user, "layerskip"))


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes of main memory that are free for this process; None if unknown.

    On Linux: the machine's, or what remains of its container's limit.
    """
    limits = []
    with suppress(OSError, ValueError, KeyError):
        limits.append(1024 * _numbers(Path("/proc/meminfo"))["MemAvailable:"])
    with suppress(OSError, ValueError, KeyError):
        group = Path("/sys/fs/cgroup")
        most, held = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        # The kernel frees inactive file pages when memory is needed.
        limits.append(max(0, most - held + _numbers(group / "memory.stat")["inactive_file"]))
    return min(limits, default=None)


def _numbers(path: Path) -> dict[str, int]:
    """Parse a file with a name and a number in each line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


@cache
def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        with suppress(OSError, subprocess.CalledProcessError):
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()
