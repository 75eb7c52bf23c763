"""Builds and loads the C++ module of the native passes, once per machine.

A wheel made by `make wheels` contains it, for one version of Python and torch. Otherwise torch's
extension loader builds it on first use, in the folder of such builds (`TORCH_EXTENSIONS_DIR`, else
below `~/.cache`), under a hash of the source, flags, compiler and versions. A child process
compiles and tests it. If that fails, the reason is stored, and the fused path is used; the build is
tried again after an hour, or on request.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch.utils import cpp_extension

NAME = "layerskip_native"
_HERE = Path(__file__).parent
_CODE = _HERE / "csrc"
_SOURCES = sorted((*_CODE.glob("*.cpp"), *_CODE.glob("*.h")))
FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    # On ARM, one instruction can multiply and add. A compiler must not choose where to use it:
    # results would depend on the surrounding code.
    "DEFAULT": ("-ffp-contract=off",),
}

BUILT = _HERE / "built"
"""The part of the package for a wheel's libraries: a folder per kind of vectors (`brought`)."""
RETRY_AFTER = 3600.0
"""Seconds before a failed build is tried again."""
WAIT = 180.0
"""Seconds to wait for another process that is building."""
_AGAIN = "to try again, run layerskip env --rebuild"
# Failures with a temporary cause, which a later build may not meet.
_PASSING_SIGNALS = ("SIGHUP", "SIGINT", "SIGKILL", "SIGTERM", "SIGXCPU")
_PASSING_WORDS = re.compile(
    r"\bkilled\b|no space left|disk quota|memoryerror|cannot allocate|memory exhausted"
    "|out of memory",
    re.IGNORECASE,
)


class Unavailable(Exception):
    """The reason why there are no native passes on this machine."""


@cache
def refusal() -> str | None:
    """Why there is no native module here, or None. The first call on a machine builds it."""
    try:
        extension()
    except Unavailable as reason:
        return str(reason)
    return None


@cache
def extension() -> Any:
    """Return the native module, building it if necessary; raises `Unavailable`."""
    return _opened(again=False)


def rebuild() -> None:
    """Build the native module again, whether or not it exists or has failed before.

    Raises:
        Unavailable: it cannot be built or loaded; an existing one stays.
    """
    _opened(again=True)


def _opened(*, again: bool) -> Any:
    try:
        if not again and brought().exists():
            return load(brought())
        library = library_path()
        if again or not library.exists():
            folder = library.parent
            _make(folder.parent)
            with FileLock(folder.with_suffix(".lock"), timeout=WAIT):  # released if its owner dies
                if again or not library.exists():
                    _build(folder, again)
        _check_owners(library)
        return load(library)
    except Timeout as error:
        raise Unavailable(
            f"another process has been building the native passes for more than {WAIT:.0f} s "
            f"({error.lock_file}); try again when it has ended"
        ) from error
    except (OSError, ImportError) as error:
        raise Unavailable(f"native passes cannot be kept or loaded: {error}") from error


def status() -> str:
    """Describe the native module and the CPU features it uses. Builds nothing."""
    vectors = torch.backends.cpu.get_cpu_capability()
    if vectors == "DEFAULT" and platform.machine() in ("aarch64", "arm64"):
        vectors = "NEON"
    if not _openmp():
        vectors += ", one thread (torch brings no omp.h)"
    try:
        library = library_path()
        if brought().exists() or library.exists():
            words = "bundled with the wheel" if brought().exists() else "built"
            refused = extension().tiles_refusal()
            tiles = "bfloat16 and bytes in tiles" if refused is None else f"no tiles: {refused}"
            return f"{words}, {vectors}, {tiles}"
        _check_failed(library.parent)
        _check_tools()
    except (Unavailable, OSError) as reason:
        return f"none: {reason}. Passes use torch instead, which is slower"
    return f"not built yet, {vectors}: the first use builds them (a minute)"


def load(library: Path) -> Any:
    loader = ExtensionFileLoader(NAME, str(library))
    spec = spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def _kind(capability: str | None) -> str:
    """The kind of vectors to build for: the given one, or torch's, if there are flags for it.

    For others (SVE on aarch64), the machine's usual kind (NEON there).
    """
    capability = capability or torch.backends.cpu.get_cpu_capability()
    return capability if capability in FLAGS else "DEFAULT"


def flags(capability: str | None = None) -> list[str]:
    """Compiler flags for vectors, by default for those that torch itself uses here."""
    kind = _kind(capability)
    vectors = [f"-DCPU_CAPABILITY={kind}", f"-DCPU_CAPABILITY_{kind}"]
    return ["-O3", "-w", *_openmp(), *vectors, *FLAGS[kind]]


def _openmp() -> list[str]:
    """OpenMP flags for the compiler only; the functions are in the library that torch loads."""
    if platform.system() != "Darwin":
        return ["-fopenmp"]
    header = Path(torch.__file__).parent / "include" / "omp.h"  # Apple's compiler has no header
    return ["-Xpreprocessor", "-fopenmp"] if header.exists() else []


def brought(capability: str | None = None) -> Path:
    """The path of a wheel's library for this Python, torch and source, existing or not.

    Args:
        capability: the kind of vectors, by default torch's here.
    """
    release = torch.__version__.partition("+")[0]  # CPU-only or not, the C++ is the same
    parts = (release, torch._C._GLIBCXX_USE_CXX11_ABI, platform.machine(), *flags(capability))
    digest = _digest(sys.implementation.cache_tag, *parts)
    return BUILT / f"{_kind(capability).lower()}-{digest}" / f"{NAME}.so"


def _digest(*parts: Any) -> str:
    """A hash of what a build depends on, and of all source files."""
    digest = hashlib.sha256(repr(parts).encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _key() -> str:
    compiler = shutil.which(cpp_extension.get_cxx_compiler())
    version = None if compiler is None else _version(compiler)
    versions = (torch.__version__, platform.python_version(), platform.machine())
    return _digest(*versions, compiler, version, *flags())


@cache
def _version(compiler: str) -> str | None:
    """First line of `compiler --version`: a compiler update causes a new build."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.splitlines()), None)


def library_path() -> Path:
    """The path of the library for this source, compiler and machine, existing or not."""
    if platform.system() not in ("Linux", "Darwin"):
        raise Unavailable(f"native passes are built on Linux and macOS, not {platform.system()}")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / NAME / _key() / f"{NAME}.so"


def _make(folder: Path) -> None:
    """Make a folder that no other user can write to, and missing parent folders."""
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def _check_owners(library: Path) -> None:
    """Reject a library that another user could have written or replaced."""
    library = library.resolve()
    for place, path in enumerate((library, *library.parents)):
        facts = path.stat()
        above = place > 3  # library, folder of this build, folder of all, root
        foreign = not above and facts.st_uid not in (0, os.geteuid())
        shared = facts.st_mode & stat.S_ISVTX if above else False  # as in /tmp: only owners move it
        if foreign or (not shared and _others_write(facts)):
            raise Unavailable(
                f"native passes are not loaded from where other users can write: {path} (owner "
                f"{facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):o}); run chmod go-w on it, or "
                "set TORCH_EXTENSIONS_DIR to a folder of your own"
            )


def _others_write(facts: os.stat_result) -> bool:
    """Whether a mode lets other users write; a group with only this user does not count."""
    import grp
    import pwd

    if facts.st_mode & stat.S_IWOTH or not facts.st_mode & stat.S_IWGRP:
        return bool(facts.st_mode & stat.S_IWOTH)
    try:
        group, user = grp.getgrgid(facts.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:  # the group or user has no name here
        return True
    return group.gr_name != user.pw_name or bool({*group.gr_mem} - {user.pw_name})


def _check_failed(folder: Path) -> None:
    failed = folder.with_suffix(".failed")
    age = time.time() - failed.stat().st_mtime if failed.exists() else RETRY_AFTER
    if age < RETRY_AFTER:
        minutes = math.ceil((RETRY_AFTER - age) / 60)
        raise Unavailable(f"{failed.read_text().strip()} ({_AGAIN}, or wait {minutes} minutes)")


def _check_tools() -> None:
    compiler = cpp_extension.get_cxx_compiler()
    path = shutil.which(compiler)
    if platform.system() == "Darwin" and (path is None or _version(path) is None):
        # On a Mac, c++ always exists, but only asks for the tools until they are installed.
        raise Unavailable(f"no C++ compiler works ({compiler}); run xcode-select --install")
    if path is None:
        raise Unavailable(f"no C++ compiler was found ({compiler}); install g++ or set CXX")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise Unavailable("Python's headers are missing; on Debian install python3-dev")


def _build(folder: Path, again: bool) -> None:
    """Build the library, and move its folder into place atomically."""
    import ninja

    path = os.environ.get("PATH", os.defpath)
    failed = folder.with_suffix(".failed")
    if not again:
        _check_failed(folder)
    _check_tools()
    if sys.stderr.isatty():
        sys.stderr.write("building the native passes for this machine, once (about a minute) ...\n")
    with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", __name__, scratch, *flags()],
            env={**os.environ, "PATH": f"{ninja.BIN_DIR}{os.pathsep}{path}"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = f"native passes could not be built: {_reason(done)}"
            if not _passing(done):
                failed.write_text(reason + "\n")
            raise Unavailable(f"{reason} ({_AGAIN})")
        made = Path(scratch, "made")
        made.mkdir(mode=0o700)
        library = Path(scratch, f"{NAME}.so").rename(made / f"{NAME}.so")
        library.chmod(0o700)
        if folder.exists():  # processes that have loaded it can continue to use it
            folder.rename(Path(scratch, "before"))
        made.rename(folder)
    failed.unlink(missing_ok=True)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"the build ended by signal {-done.returncode}"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    # Errors of a compiler, or of an assembler (capitalised), but no exception names.
    errors = [line for line in lines if re.search(r"\b[eE]rror:", line)] or lines[-1:]
    return " ".join((errors or ["no message"])[0].split())[:300]


def _passing(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a build failed for lack of memory or disk space, or because it was stopped."""
    if done.returncode < 0 and signal.Signals(-done.returncode).name in _PASSING_SIGNALS:
        return True
    return _PASSING_WORDS.search(done.stdout + done.stderr) is not None


def compiled(folder: Path, options: list[str], **how: Any) -> Any:
    """Compile in a folder and return the module."""
    sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
    return cpp_extension.load(
        NAME, sources, extra_cflags=options, build_directory=str(folder), verbose=False, **how
    )


def _compile(folder: Path, options: list[str]) -> None:
    """Compile in a folder and test the result. Run by the child process."""
    module = compiled(folder, options)
    plan = module.Plan()
    for dtype in (torch.float32, torch.bfloat16):
        matrix = module.Matrix(torch.eye(40, dtype=dtype), None)
        norm = module.Norm(torch.ones(40, dtype=dtype), 1e-6, "llama")
        head = plan.add("head", before=norm, inputs=[matrix], softcap=1.0)
        plan.run(torch.ones(1, 3, 40, dtype=dtype), [head], [], [], [], [])


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), sys.argv[2:])
