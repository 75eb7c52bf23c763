"""Who may import whom: the floors of the code base, and what must stay free of torch."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import layerskip

ROOT = Path(__file__).parents[1]

# A file imports only from floors below its own; the words (0), and from the doors (5) upwards, also
# from their own floor.
# Every file has a line here. A name taken from `layerskip` itself counts as its home module.
FLOORS = {
    "layerskip.config": 0,
    "layerskip.pricing": 0,
    "layerskip.records": 0,
    "layerskip.roofline": 0,
    "layerskip.searches": 0,
    "layerskip.speculation": 0,
    "layerskip.weights": 0.5,  # below what reads them
    "layerskip.cache": 1,
    "layerskip.fused": 1,
    "layerskip.compiled": 1.5,  # above what it compiles
    "layerskip.laws": 1,
    "layerskip.vocabulary": 1,
    "layerskip.sublayers": 2,
    "layerskip.controllers": 3,
    "layerskip.passes": 3,
    "layerskip.training": 3,
    "layerskip.engine": 4,
    "layerskip.rounds": 3,
    "layerskip.benchmark": 5,
    "layerskip.checking": 5,
    "layerskip.costs": 5,
    "layerskip.demo": 5,
    "layerskip.environment": 5,
    "layerskip.generation": 5,
    "layerskip.lawtest": 5,
    "layerskip.loading": 5,
    "layerskip.methods": 5,
    "layerskip.prompts": 5,
    "layerskip.analysis": 6,  # and nothing but floor 0
    "layerskip.analysis.canvas": 6,
    "layerskip.analysis.columns": 6,
    "layerskip.analysis.model_plots": 6,
    "layerskip.analysis.page": 6,
    "layerskip.analysis.plots": 6,
    "layerskip.analysis.predictions": 6,
    "layerskip.analysis.report": 6,
    "layerskip.analysis.runs": 6,
    "layerskip.analysis.search_plots": 6,
    "layerskip.analysis.search_tables": 6,
    "layerskip.analysis.search_verdict": 6,
    "layerskip.analysis.tables": 6,
    "layerskip.analysis.verdict": 6,
    "layerskip.search": 6,
    "layerskip.search.moves": 6,
    "layerskip.search.sampler": 6,
    "layerskip.search.seeds": 6,
    "layerskip.search.space": 6,
    "layerskip.search.study": 6,
    "layerskip.search.cost": 6,
    "layerskip.search.exits": 6,
    "layerskip.search.replay": 6,
    "layerskip.search.simulation": 6,
    "layerskip.search.trace": 6,
    "layerskip.search.chains": 6,
    "layerskip.search.drawing": 6,
    "layerskip.search.following": 6,
    "layerskip.search.finalists": 6,
    "layerskip.search.finding": 6,
    "layerskip.search.objective": 6,
    "layerskip.planning": 6,
    "layerskip.terminal": 6,
    "layerskip.flags": 6,
    "layerskip.__main__": 7,
    "layerskip.cli": 7,
    "layerskip.benchmarking": 7,
    "layerskip.searching": 7,
    "layerskip.workers": 6,
    "layerskip.measuring": 7,
    "layerskip": 8,  # lazily
}
HEAVY = {"torch", "transformers", "optuna", "pandas", "matplotlib"}


def modules() -> dict[str, Path]:
    """Every module of the three packages and its file."""
    found = {}
    for package in ("layerskip", "search", "analysis"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "layerskip" else ("layerskip", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Full names of everything that the source of `module` imports, inside functions too."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            names |= {_home(origin, alias.name) for alias in node.names}
    return names


def _home(origin: str, name: str) -> str:
    if origin == "layerskip" and name in layerskip.__all__:
        return layerskip._HOME[name]
    if origin == "layerskip" and name == "__version__":
        return "layerskip.__version__"  # a constant, on no floor
    return f"{origin}.{name}" if f"{origin}.{name}" in FLOORS else origin


def upward(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """The imports that `module` may not make."""
    ours = imported(source, module, is_package=is_package) & FLOORS.keys()
    floor = FLOORS[module]
    if module.startswith("layerskip.analysis"):
        return {n for n in ours if FLOORS[n] > 0 and not n.startswith("layerskip.analysis")}
    return {n for n in ours if FLOORS[n] > floor or (FLOORS[n] == floor and 0 < floor < 5)}


def test_every_file_has_a_floor():
    assert modules().keys() <= FLOORS.keys()
    assert {"layerskip", "layerskip.config", "layerskip.search"} <= modules().keys()


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_upward_imports(module):
    path = modules()[module]
    is_package = path.name == "__init__.py"
    assert upward(path.read_text(encoding="utf-8"), module, is_package=is_package) == set()


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("layerskip.laws", "from layerskip.engine import Engine", {"layerskip.engine"}),
        ("layerskip.laws", "import layerskip.engine as e", {"layerskip.engine"}),
        ("layerskip.laws", "from . import engine", {"layerskip.engine"}),
        ("layerskip.laws", "from .engine import Engine", {"layerskip.engine"}),
        ("layerskip.laws", "from layerskip import generate", {"layerskip.generation"}),
        ("layerskip.laws", "import layerskip", {"layerskip"}),
        ("layerskip.laws", "def f():\n    import layerskip.cache", {"layerskip.cache"}),
        ("layerskip.laws", "from layerskip.config import SkipConfig\nimport torch", set()),
        ("layerskip.laws", "from layerskip import SkipConfig, __version__", set()),
        ("layerskip.generation", "from layerskip.costs import measure", set()),
        ("layerskip.generation", "import layerskip.search", {"layerskip.search"}),
        ("layerskip.search", "from ..cli import main", {"layerskip.cli"}),
        ("layerskip.search", "from ..engine import Engine", set()),
        ("layerskip.analysis", "from ..prompts import Prompt", {"layerskip.prompts"}),
        ("layerskip.analysis", "from ..config import SkipConfig", set()),
    ],
)
def test_the_check_catches_upward_imports(module, source, expected):
    is_package = module in ("layerskip.search", "layerskip.analysis")
    assert upward(source, module, is_package=is_package) == expected


def third_party(module: str) -> set[str]:
    path = modules()[module]
    names = imported(path.read_text(encoding="utf-8"), module, is_package=path.stem == "__init__")
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"layerskip"}


def test_the_lowest_floor_needs_only_the_standard_library():
    assert {m: third_party(m) for m in modules() if FLOORS.get(m) == 0 and third_party(m)} == {}
    assert "torch" in third_party("layerskip.laws")


def test_every_third_party_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    assert set().union(*map(third_party, modules())) <= declared


def loaded_by(*arguments: str) -> set[str]:
    """Top-level names of all that a fresh interpreter imports when run like this."""
    command = [sys.executable, "-X", "importtime", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "tests")
    lines = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("layerskip", HEAVY),
        ("layerskip.config", HEAVY),
        ("layerskip.prompts", HEAVY),
        ("layerskip.environment", HEAVY),
        ("layerskip.analysis", {"torch", "transformers"}),
    ],
)
def test_light_imports_stay_light(module, unwanted):
    loaded = loaded_by("-c", f"import {module}")
    assert "layerskip" in loaded
    assert loaded & unwanted == set()


def test_help_is_light():
    loaded = loaded_by("-m", "layerskip", "--help")
    assert "typer" in loaded
    assert loaded & HEAVY == set()


def test_the_check_catches_torch():
    assert "torch" in loaded_by("-c", "import layerskip.laws")


def test_exports_come_from_their_homes():
    assert sorted(layerskip._HOME) == layerskip.__all__
    assert set(layerskip.__all__) <= set(dir(layerskip))
    for name, home in layerskip._HOME.items():
        assert getattr(layerskip, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        layerskip.nothing  # noqa: B018
