"""Which packages may import which, and which must not load torch."""

import ast
import builtins
import importlib
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest
import rooms
import transformers
from rooms import imported, imports_of, modules, room

import layerskip
from layerskip.serving.requests import Refusal
from layerskip.texts.grammars import GrammarLimit

ROOT = Path(__file__).parents[1]

# From the bottom: the packages (and single files) of each floor. A file imports from its own
# package and from lower floors. Packages on one floor do not import each other.
FLOORS = [
    {"version", "errors", "native", "library"},
    {"files"},
    {"texts", "config", "costs", "cache"},
    {"weights"},
    {"families"},
    {"backends"},
    {"model"},
    {"decoding"},
    {"timing"},
    {"api"},
    {"replay", "serving"},
    {"bench"},
    {"search", "training"},
    {"research"},
    {"cli"},
    {"__main__"},
]
ANALYSIS = {"analysis", "costs", "files", "config"}  # all that analysis may import
LIGHT = {"version", "errors", "files", "texts", "config", "costs"}  # rooms that do not load torch
HEAVY = {"torch", "transformers", "optuna", "pandas", "matplotlib"}


def allowed(module):
    """The rooms from which a module may import."""
    own = room(module)
    if own == "analysis":
        return ANALYSIS
    floor = next(index for index, rooms in enumerate(FLOORS) if own in rooms)
    return {own}.union(*FLOORS[:floor], {"analysis"} if own == "cli" else ())


def climbing(names, module):
    """The imports that `module` must not make."""
    ours = {name for name in names if name.partition(".")[0] == "layerskip"}
    ours.discard("layerskip.__version__")
    return {name for name in ours if room(name) not in allowed(module)}


def test_every_room_has_a_floor():
    rooms = {room(module) for module in modules()} - {"", "analysis"}
    assert rooms == set().union(*FLOORS)
    assert sum(map(len, FLOORS)) == len(rooms)  # each on one floor only


def test_the_page_of_rooms_names_their_imports():
    page = rooms.PAGE.read_text(encoding="utf-8")
    assert rooms.filled(page) == page, "run make architecture"
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)} == rooms.arrows().keys()
    drawn = re.findall(r"^    (\w+) --> (\w+)$", page, re.MULTILINE)
    assert {room for arrow in drawn for room in arrow} == rooms.arrows().keys()


def test_no_upward_imports():
    climbs = {m: climbing(imports_of(m), m) for m in modules().keys() - {"layerskip"}}
    assert {module: names for module, names in climbs.items() if names} == {}


# Modules that share their last name, for a reason that the name itself gives.
SHARED = {
    "base": "the interface that the other files of its room implement",
    "formats": "a room with one file for each format, of weights or of tool calls",
    **dict.fromkeys(("report", "search"), "the file of a command, and what it runs"),
}


def test_modules_and_classes_have_names_of_their_own():
    """No reader takes one for another."""
    named, defined = defaultdict(list), defaultdict(list)
    for module, path in modules().items():
        named[module.rpartition(".")[2]].append(module)
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(module)
    assert {name for name, where in named.items() if len(where) > 1} == {*SHARED}
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


LAWS = "layerskip.decoding.laws"


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        (
            LAWS,
            "from layerskip.timing.cost_tables import place",
            {"layerskip.timing.cost_tables.place"},
        ),
        (LAWS, "import layerskip.timing.cost_tables as e", {"layerskip.timing.cost_tables"}),
        (LAWS, "from ..api import generation", {"layerskip.api.generation"}),
        (LAWS, "from ..api.generation import decode", {"layerskip.api.generation.decode"}),
        (LAWS, "from layerskip import generate", {"layerskip.api.generation"}),
        (LAWS, "from layerskip import bench", {"layerskip.bench"}),
        (LAWS, "import layerskip", {"layerskip"}),
        (LAWS, "def f():\n    import layerskip.search", {"layerskip.search"}),
        (LAWS, "from layerskip.config.skips import SkipConfig\nimport torch", set()),
        (LAWS, "from layerskip import SkipConfig, __version__", set()),
        (LAWS, "from .engine import Decoder", set()),
        ("layerskip.backends.fused", "from ..decoding import laws", {"layerskip.decoding.laws"}),
        ("layerskip.api.generation", "from layerskip.timing.cost_tables import measure", set()),
        ("layerskip.api.generation", "import layerskip.search", {"layerskip.search"}),
        ("layerskip.training.exit_model", "from ..cli import main", {"layerskip.cli.main"}),
        ("layerskip.training.exit_model", "from ..replay import trace", set()),
        ("layerskip.bench.suite", "from ..search import space", {"layerskip.search.space"}),
        ("layerskip.search", "from ..cli import main", {"layerskip.cli.main"}),
        ("layerskip.search", "from .. import analysis", {"layerskip.analysis"}),
        ("layerskip.search", "from ..bench import runner", set()),
        ("layerskip.files.records", "from ..config import skips", {"layerskip.config.skips"}),
        (
            "layerskip.analysis",
            "from ..texts.prompts import Prompt",
            {"layerskip.texts.prompts.Prompt"},
        ),
        ("layerskip.analysis", "from ..config import SkipConfig", set()),
        ("layerskip.cli.report", "from layerskip.analysis import write_report", set()),
    ],
)
def test_the_check_catches_upward_imports(module, source, expected):
    is_package = module in ("layerskip.search", "layerskip.analysis")
    assert climbing(imported(source, module, is_package=is_package), module) == expected


def third_party(module):
    names = {name.partition(".")[0] for name in imports_of(module)}
    return names - sys.stdlib_module_names - {"layerskip"}


def test_the_words_need_no_torch():
    words = {m: third_party(m) for m in modules() if room(m) in LIGHT}
    assert words.pop("layerskip.files.environment") == {"torch"}  # imported when it is called
    assert words.pop("layerskip.texts.pictures") == {"PIL"}
    assert words.pop("layerskip.texts.vocabulary") == {"torch"}
    assert words.pop("layerskip.texts.grammars") == {"torch", "numpy", "llguidance"}
    assert words.pop("layerskip.files.locking") == {"filelock"}
    assert {module: names for module, names in words.items() if names - {"numpy"}} == {}
    assert "torch" in third_party(LAWS)


def test_every_third_party_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [extras[name] for name in extras if name not in ("test", "checkpoints", "dev")]
    requirements = [*project["dependencies"], *chain(*needed)]
    declared = {re.split(r"\W", requirement)[0] for requirement in requirements}
    others = {"PIL", "triton", "markupsafe"}  # they come with pillow, torch and Jinja2
    found = set().union(*map(third_party, modules())) - others
    assert found <= {name.lower() for name in declared} - {"pillow"}


UNUSED = """
    optuna pandas sklearn matplotlib torchvision torchaudio datasets peft ray llguidance
    transformers.image_processing_utils transformers.video_processing_utils
    transformers.feature_extraction_sequence_utils transformers.models.auto.processing_auto
    transformers.trainer transformers.pipelines
    layerskip.bench layerskip.replay layerskip.research layerskip.serving layerskip.training
    layerskip.timing.sublayer_costs layerskip.search layerskip.analysis
"""
"""What continuing a text needs nothing of: each takes time to import."""


def test_continuing_a_text_imports_only_what_it_needs():
    """Other processors, losses and trainers of the library would double the time to start."""
    code = (
        "import sys; from layerskip.cli.main import app\n"
        "try: app()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "generate", "demo-llama", "--prompt=a", "-n2", "--quiet"]
    names = set(subprocess.run(command, capture_output=True, text=True).stderr.split())
    assert {"layerskip.api.loading", "transformers.models.llama.modeling_llama"} <= names
    assert sorted(names & {*UNUSED.split()}) == []


SEAM = "layerskip.library"  # what is private in transformers, or moves, is asked there
# Names that are private in other packages, and the modules beside the seam that use them.
PRIVATE = {
    "_C": {"native.extension"},
    "_GLIBCXX_USE_CXX11_ABI": {"native.extension"},
    "_attn_implementation": {
        "bench.comparison",
        "families.architecture",
        "model.eagle_head",
        "model.whole",
    },
    "_buffers": {"weights.formats.building"},
    "_forward_hooks": {"families.architecture"},
    "_forward_pre_hooks": {"families.architecture"},
    "_global_forward_hooks": {"model.opened_models", "families.plain"},
    "_global_forward_pre_hooks": {"model.opened_models", "families.plain"},
    "_is_avx512_bf16_supported": {"training.stages"},
    "_is_stateful": {"model.whole"},
    "_make_wrapper_subclass": {"weights.stored"},
    "_parameters": {"backends.norms", "weights.stored"},
    "_pytree": {"weights.stored"},
    "_schema": {"weights.stored"},
    "_storage": {"search.study"},
    "_supports_sdpa": {"bench.comparison"},
    "_to_copy": {"weights.stored"},
}


def inner_names(source, module):
    """What a source uses of transformers beside its public names, such as modules inside it."""
    names = imported(source, module)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    listed = {name for name in transformers.__all__ if not name.islower()} | {"logging"}
    names = {name for name in names if re.match(r"transformers\.\w", name)}
    return {name for name in names if name.split(".")[1] not in listed}


def test_only_the_seam_knows_the_inside_of_transformers():
    sources = {name: path.read_text("utf-8") for name, path in modules().items()}
    found = {name: inner_names(source, name) for name, source in sources.items()}
    assert len(found.pop(SEAM)) >= 4
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from transformers import DynamicCache, logging\nlogging.set_verbosity_error()", set()),
        ("import transformers\ntransformers.GenerationConfig.from_pretrained('x')", set()),
        ("from transformers.cache_utils import Cache", {"transformers.cache_utils.Cache"}),
        ("from transformers import cache_utils", {"transformers.cache_utils"}),
        ("import transformers\ntransformers.cache_utils", {"transformers.cache_utils"}),
        ("import_module(f'transformers.models.{name}')", {"transformers.models."}),
    ],
)
def test_the_check_catches_the_inside_of_transformers(source, expected):
    assert inner_names(source, "layerskip.api.generation") == expected


def test_private_names_of_other_packages_are_listed():
    # public, although they look private
    own, read = {"_asdict", "_exit", "_fields", "_replace"}, defaultdict(set)
    for module, path in modules().items():
        names = {part for name in imports_of(module) for part in name.split(".")}
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                    own.add(node.attr)
        for name in names:
            if re.match("_[A-Za-z]", name) and module != SEAM:
                read[name].add(module.removeprefix("layerskip."))
    assert {name: where for name, where in read.items() if name not in own} == PRIVATE


def loaded_by(*arguments):
    """Top-level names of everything that a fresh interpreter imports with these arguments."""
    command = [sys.executable, "-X", "importtime", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "tests")
    lines = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("layerskip", HEAVY),
        ("layerskip.config.skips", HEAVY),
        ("layerskip.texts.prompts", HEAVY),
        ("layerskip.config.shipped", HEAVY),
        ("layerskip.files.environment", HEAVY),
        ("layerskip.search", HEAVY),
        ("layerskip.analysis", {"torch", "transformers"}),
    ],
)
@pytest.mark.wheel
def test_light_imports_stay_light(module, unwanted):
    loaded = loaded_by("-c", f"import {module}")
    assert "layerskip" in loaded
    assert loaded & unwanted == set()


@pytest.mark.wheel
def test_help_is_light():
    loaded = loaded_by("-m", "layerskip", "--help")
    assert "typer" in loaded
    assert loaded & HEAVY == set()


@pytest.mark.wheel
def test_the_check_catches_torch():
    assert "torch" in loaded_by("-c", f"import {LAWS}")


def test_exports_come_from_their_homes():
    assert sorted(layerskip._HOME) == layerskip.__all__
    assert set(layerskip.__all__) <= set(dir(layerskip))
    for name, home in layerskip._HOME.items():
        assert getattr(layerskip, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        layerskip.nothing  # noqa: B018


def test_own_errors_have_one_base():
    internal = {"Unavailable", "Orphaned"}  # caught where they are raised, never a caller's
    built_in = {name for name, kind in vars(builtins).items() if _is_error(kind)}
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    own = {name for name, each in bases.items() if each & built_in}
    assert own - internal == {"LayerskipError"}
    for each in (layerskip.UnsupportedModelError, GrammarLimit, Refusal):
        assert issubclass(each, layerskip.LayerskipError)
    assert issubclass(layerskip.LayerskipError, ValueError)


def _is_error(kind):
    return isinstance(kind, type) and issubclass(kind, BaseException)


def test_no_test_module_imports_another():
    """Shared code belongs in modules without tests, so that no test runs twice."""
    tests = Path(__file__).parent
    names = {path.stem for path in tests.glob("test_*.py")}
    for path in tests.glob("*.py"):
        parts = {
            p for name in imported(path.read_text("utf-8"), "tests.x") for p in name.split(".")
        }
        assert parts & names == set(), path.name
