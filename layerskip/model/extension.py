"""The C++ source of the native passes as a module, built once for a machine; knows no models.

It is built by torch's own extension loader, on first use, into the folder where torch keeps such
builds (`TORCH_EXTENSIONS_DIR`, else below `~/.cache`), under a name that is a hash of the source,
flags, compiler and versions. A child process compiles it and tries it, so that neither a broken
build nor a wrong instruction can take this process down. Whatever fails is a reason, not an error:
the lean path serves without.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from torch.utils import cpp_extension

NAME = "layerskip_native"
_SOURCE = Path(__file__).with_name("native.cpp")
_BESIDE = ("draws.h", "integers.cpp", "integers.h", "products.h")
_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}


class Unavailable(Exception):
    """There are no native passes on this machine, and why."""


@cache
def refusal() -> str | None:
    """Why there is no native module here, or None. The first time on a machine it is built."""
    try:
        extension()
    except Unavailable as reason:
        return str(reason)
    return None


@cache
def extension() -> Any:
    """The native module.

    Raises:
        Unavailable: it cannot be built or loaded.
    """
    try:
        folder = _folder()
        library = folder / f"{NAME}.so"
        if not library.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock")):  # other starts wait; a dead one lets go
                if not library.exists():
                    _build(folder)
        return load(library)
    except (OSError, ImportError) as error:
        raise Unavailable(f"native passes cannot be kept or loaded: {error}") from error


def status() -> str:
    """Whether the native module is there, in words. Builds and loads nothing."""
    vectors = torch.backends.cpu.get_cpu_capability()
    try:
        folder = _folder()
        if (folder / f"{NAME}.so").exists():
            return f"built, {vectors}"
        _check_tools(folder)
    except (Unavailable, OSError) as reason:
        return f"none: {reason}"
    return f"not built yet, {vectors}: the first use does, in half a minute"


def load(library: Path) -> Any:
    """A built library as a module."""
    loader = ExtensionFileLoader(NAME, str(library))
    spec = spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def flags() -> list[str]:
    """Compiler flags for the vectors that torch itself uses here."""
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    # -fopenmp for the compiler only: its functions come from the library that torch has loaded
    openmp = ["-fopenmp"] if platform.system() == "Linux" else []
    return ["-O3", "-w", *openmp, *vectors, *_FLAGS.get(capability, ())]


def _key() -> str:
    compiler = shutil.which(cpp_extension.get_cxx_compiler())
    parts = (torch.__version__, platform.python_version(), platform.machine(), compiler, *flags())
    digest = hashlib.sha256(repr(parts).encode())
    for source in (_SOURCE, *map(_SOURCE.with_name, _BESIDE)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    """Where the library lies, or would."""
    if platform.system() not in ("Linux", "Darwin"):
        raise Unavailable(f"native passes are built on Linux and macOS, not {platform.system()}")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / NAME / _key()


def _check_tools(folder: Path) -> None:
    """Refuse to build what failed before, and without tools."""
    failed = folder.with_suffix(".failed")
    if failed.exists():
        raise Unavailable(f"{failed.read_text().strip()} (to try again, delete {failed})")
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        raise Unavailable(f"no C++ compiler was found ({compiler}); install g++ or set CXX")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise Unavailable("Python's headers are missing; on Debian install python3-dev")


def _build(folder: Path) -> None:
    """Make a folder with the library in it, whole or not at all."""
    _check_tools(folder)
    if sys.stderr.isatty():
        sys.stderr.write("building the native passes for this machine, once, half a minute ...\n")
    with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", __name__, scratch, *flags()],
            env={**os.environ, "PATH": _path()},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = f"native passes could not be built: {_reason(done)}"
            failed = folder.with_suffix(".failed")
            failed.write_text(reason + "\n")
            raise Unavailable(f"{reason} (to try again, delete {failed})")
        made = Path(scratch, "made")
        made.mkdir()
        Path(scratch, f"{NAME}.so").rename(made / f"{NAME}.so")
        made.rename(folder)


def _path() -> str:
    """Where programs are found, ninja of the package among them."""
    import ninja

    return os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", os.defpath)])


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"the build ended by signal {-done.returncode}"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    # a compiler's, or with a capital an assembler's; not an exception's name
    told = [line for line in lines if re.search(r"\b[eE]rror:", line)] or lines[-1:]
    return " ".join((told or ["no message"])[0].split())[:300]


def _compile(folder: Path, options: list[str]) -> None:
    """Compile in a folder and try what came out: the child's part."""
    sources = [str(_SOURCE), str(_SOURCE.with_name("integers.cpp"))]
    module = cpp_extension.load(
        NAME, sources, extra_cflags=options, build_directory=str(folder), verbose=False
    )
    plan = module.Plan()
    norm = module.Norm(torch.ones(40), 1e-6, False)
    head = plan.head(before=norm, matrix=module.Matrix(torch.eye(40), None), softcap=1.0)
    plan.run(torch.ones(1, 3, 40), [head], [], [], [], [])


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), sys.argv[2:])
