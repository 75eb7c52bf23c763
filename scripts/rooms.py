"""The rooms of the code and their imports; `make architecture` draws them for their page."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import layerskip

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"


@cache
def modules() -> dict[str, Path]:
    """Every module of the three packages, and its file."""
    found = {}
    for package in ("layerskip", "search", "analysis"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "layerskip" else ("layerskip", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """The full names of everything that the source of `module` imports, also inside functions."""
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
    return f"{origin}.{name}"


@cache
def imports_of(module: str) -> set[str]:
    path = modules()[module]
    return imported(path.read_text(encoding="utf-8"), module, is_package=path.stem == "__init__")


def room(module: str) -> str:
    """The package or single file that contains a module."""
    return module.removeprefix("layerskip").removeprefix(".").partition(".")[0]


def arrows() -> dict[str, set[str]]:
    """By room, the rooms from which it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules().keys() - {"layerskip", "layerskip.__main__"}:
        ours = {name for name in imports_of(module) if name.startswith("layerskip.")}
        ours.discard("layerskip.__version__")  # a constant, which belongs to no room
        found[room(module)] |= {room(name) for name in ours} - {room(module)}
    return dict(found)


def reached(name: str, to: dict[str, set[str]]) -> set[str]:
    return to[name].union(*(reached(below, to) for below in to[name]))


def direct(to: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that no longer way implies."""
    return {name: to[name].difference(*(reached(each, to) for each in to[name])) for name in to}


def filled(page: str) -> str:
    """The page with its picture, and the last column of its table, as the imports are."""
    arrows_of, drawn = direct(arrows()), ""
    for name, below in sorted(arrows_of.items()):
        listed = ", ".join(f"`{each}`" for each in sorted(below)) or "nothing"
        page = re.sub(rf"(?m)^(\| `{name}` \|.*\|) .*? \|$", rf"\1 {listed} |", page)
        drawn += "".join(f"    {name} --> {each}\n" for each in sorted(below))
    return re.sub(r"(?s)(```mermaid\nflowchart TD\n).*?(?=```)", rf"\1{drawn}", page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
