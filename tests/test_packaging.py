"""The wheel holds the three packages under one name, the shipped models, and nothing else."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import layerskip

ROOT = Path(__file__).parents[1]
APART = {"layerskip/search": "search", "layerskip/analysis": "analysis"}
HERE = ROOT / "layerskip"
ROOMS = sorted(path.parent.relative_to(HERE).as_posix() for path in HERE.glob("*/**/__init__.py"))
PACKAGES = {"layerskip": "layerskip"} | {f"layerskip/{r}": f"layerskip/{r}" for r in ROOMS} | APART


def expected_files():
    """The names in the wheel of all code and package data of this checkout."""
    files = {"layerskip/py.typed", "layerskip/analysis/page.html.j2"}
    native = (HERE / "native/csrc").iterdir()
    files |= {f"layerskip/native/csrc/{path.name}" for path in native}
    for package, folder in PACKAGES.items():
        files |= {f"{package}/{path.name}" for path in (ROOT / folder).glob("*.py")}
    models = [path for path in (ROOT / "layerskip/models").rglob("*") if path.is_file()]
    return files | {path.relative_to(ROOT).as_posix() for path in models}


def test_packages_are_listed():
    folders = {ROOT / folder for folder in PACKAGES.values()}
    for folder in PACKAGES.values():
        assert {path.parent for path in (ROOT / folder).rglob("*.py")} <= folders
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {name.replace(".", "/") for name in tool["packages"]} == PACKAGES.keys()
    apart = {name.replace(".", "/"): folder for name, folder in tool["package-dir"].items()}
    assert apart == {"layerskip": "layerskip"} | APART


def test_type_checkers_see_every_package():
    for folder in ("search", "analysis"):
        assert (ROOT / "typings/layerskip" / folder).resolve() == ROOT / folder


def test_constraints_pin_what_is_declared():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    bounded = set()
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        requirement = Requirement(line)
        if requirement.name != "layerskip":  # its own extras
            assert pinned[requirement.name] in requirement.specifier
            bounded |= {requirement.name} if ",<" in line else set()
    assert bounded == {"huggingface_hub", "optuna", "pandas", "torch", "transformers", "typer"}


def test_one_version():
    assert metadata.version("layerskip") == layerskip.__version__


@pytest.mark.wheel
def test_wheel_holds_exactly_the_packages_and_the_models(tmp_path):
    source = tmp_path / "source"  # because building writes files beside the source
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("layerskip", *APART.values()):
        shutil.copytree(ROOT / folder, source / folder)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"layerskip-{layerskip.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = archive.read(f"{wheel.name.split('-py3')[0]}.dist-info/entry_points.txt")
    assert files == expected_files()
    assert b"layerskip = layerskip.cli.main:main" in entry_points
