"""Describes the machine and software of a run: versions, processors, source revision."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
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
