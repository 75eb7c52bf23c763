"""The environment: JSON values, text to paste, the checkout's revision, and rebuilding."""

import json
import platform
import shutil
import subprocess
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from commands import run

import layerskip
import layerskip.files.environment as environment_module
from layerskip.cli.env import render
from layerskip.families.served_models import TABLE
from layerskip.files.environment import environment, git_revision
from layerskip.native import extension


def test_environment_is_json_and_true():
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["layerskip"] == layerskip.__version__
    assert found["python"] == platform.python_version()
    assert torch.__version__.startswith(found["packages"]["torch"])  # with +cu132, say, or not
    assert found["packages"]["transformers"] == metadata.version("transformers")
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["cpu"]["cores"] >= 1
    assert found["cpu"]["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert len([d for d in found["devices"] if d["type"] == "cuda"]) == torch.cuda.device_count()


def test_the_compiler_is_the_one_that_would_be_called(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["compiler"] is None
    mine = tmp_path / "my-c++"
    mine.touch(mode=0o755)
    monkeypatch.setenv("CXX", "my-c++")
    assert environment()["compiler"] == str(mine)


def test_render_says_every_version_and_device():
    found = environment() | {
        "packages": {"torch": "2.13.0", "optuna": None},
        "cpu": {"model": "Some CPU", "cores": 2, "threads": 1, "instructions": "AVX2"},
        "compiler": None,
        "devices": [
            {"type": "cuda", "name": "Some GPU", "memory": 80 * 2**30},
            {"type": "mps", "name": "arm64", "memory": None},
        ],
        "git": {"revision": "0123abcd", "dirty": True},
        "native": "not built yet, AVX2",
        "architectures": TABLE,
    }
    said = {tuple(line.split(maxsplit=1)) for line in render(found).splitlines()}
    assert said >= {
        ("layerskip", layerskip.__version__),
        ("torch", "2.13.0"),
        ("optuna", "not installed"),
        ("cpu", "Some CPU, 2 cores, 1 torch thread, AVX2"),
        ("compiler", "none found"),
        ("device", "cuda: Some GPU, 80.0 GiB"),
        ("device", "mps: arm64"),
        ("git", "0123abcd with changes"),
        ("native", "not built yet, AVX2"),
    }
    assert "0123abcd" not in render(found | {"git": None})


def test_the_state_of_native_passes_is_told_without_building_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert extension.status().startswith("none: no C++ compiler was found (no-such-compiler)")
    monkeypatch.setenv("CXX", "true")
    vectors = torch.backends.cpu.get_cpu_capability()
    assert extension.status() == f"not built yet, {vectors}: the first use builds them (a minute)"
    assert not list(tmp_path.iterdir())
    folder = extension.library_path().parent
    folder.mkdir(parents=True)
    (folder / f"{extension.NAME}.so").touch()
    said = ((None, "bfloat16 and bytes in tiles"), ("it has none", "no tiles: it has none"))
    for refused, tiles in said:
        module = SimpleNamespace(tiles_refusal=lambda refused=refused: refused)
        monkeypatch.setattr(extension, "extension", lambda module=module: module)
        assert extension.status() == f"built, {vectors}, {tiles}"
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    refused = "none: native passes are built on Linux and macOS, not Windows"
    assert extension.status() == f"{refused}. Passes use torch instead, which is slower"


def test_a_mac_is_told_what_it_gets(tmp_path, monkeypatch):
    """A Mac's c++ exists before the tools do, but fails. OpenMP's header comes from torch."""
    for name, value in (("PATH", tmp_path), ("TORCH_EXTENSIONS_DIR", tmp_path), ("CXX", "mac-c++")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(environment_module, "Path", lambda place: tmp_path / place.strip("/"))
    environment_module._cpu_model.cache_clear()
    for name, line in (("mac-c++", "exit 1"), ("sysctl", "echo Apple M2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    assert environment_module._cpu_model() == "Apple M2"
    environment_module._cpu_model.cache_clear()
    assert extension.status().startswith(
        "none: no C++ compiler works (mac-c++); run xcode-select --install. Passes use torch"
    )
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    for compiler, header in (("one", False), ("other", True)):
        (tmp_path / compiler).write_text("#!/bin/sh\necho Apple clang version 17\n")
        (tmp_path / compiler).chmod(0o755)
        monkeypatch.setenv("CXX", compiler)
        if header:
            (tmp_path / "include").mkdir()
            (tmp_path / "include" / "omp.h").touch()
        assert ("-fopenmp" in extension.flags()) == header
        thread = "" if header else ", one thread (torch brings no omp.h)"
        words = f"not built yet, NEON{thread}: the first use builds them (a minute)"
        assert extension.status() == words


def test_env_builds_anew_when_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(extension, "rebuild", lambda: asked.append(True))
    assert run("env").exit_code == 0
    assert not asked
    assert run("env", "--rebuild").exit_code == 0
    assert asked == [True]

    def fail():
        raise extension.Unavailable("no space")

    monkeypatch.setattr(extension, "rebuild", fail)
    result = run("env", "--rebuild")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == ["layerskip: error: no space"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_revision_tells_clean_from_dirty(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_revision(tmp_path) is None
    git("init")
    assert git_revision(tmp_path) is None  # there is no commit yet
    git("commit", "--allow-empty", "--no-gpg-sign", "-m", "First")
    assert git_revision(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "new.py").write_text("")
    assert git_revision(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": True}
