"""The rooms of the code and their imports; `make architecture` draws them for their page."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

import layerskip

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.svg"


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


def floor(name: str, to: dict[str, set[str]]) -> int:
    """How many rooms lie below a room, one above the other."""
    return max((1 + floor(below, to) for below in to[name]), default=0)


def reached(name: str, to: dict[str, set[str]]) -> set[str]:
    return to[name].union(*(reached(below, to) for below in to[name]))


def direct(to: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that no longer way implies."""
    return {name: to[name].difference(*(reached(each, to) for each in to[name])) for name in to}


def filled(page: str) -> str:
    """The page with the last column of its table of rooms as the imports are."""
    for name, below in direct(arrows()).items():
        listed = ", ".join(f"`{each}`" for each in sorted(below)) or "nothing"
        page = re.sub(rf"(?m)^(\| `{name}` \|.*\|) .*? \|$", rf"\1 {listed} |", page)
    return page


def draw(to: dict[str, set[str]]) -> Figure:
    """Draw the rooms by floor, with the direct arrows."""
    shown = direct(to)
    floors: dict[int, list[str]] = defaultdict(list)
    for name in sorted(to):
        floors[floor(name, to)].append(name)
    places: dict[str, tuple[float, float]] = {}
    for height in sorted(floors, reverse=True):
        names = floors[height]
        above = {
            name: [x for each, (x, _) in places.items() if name in shown[each]] for name in names
        }
        names.sort(key=lambda name: sum(above[name]) / max(1, len(above[name])))
        places |= {name: ((n + 0.5) / len(names) * 8, height) for n, name in enumerate(names)}
    figure = Figure(figsize=(8, 0.62 * len(floors)), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 8), ylim=(-0.5, len(floors) - 0.5))
    axes.axis("off")
    box = {"boxstyle": "round,pad=0.35", "facecolor": "#eef3f8", "edgecolor": "#59636e"}
    boxes = {
        name: axes.text(*place, name, ha="center", va="center", bbox=box, zorder=2)
        for name, place in places.items()
    }
    figure.draw_without_rendering()  # computes the boxes, at which arrows end
    for name, (x, y) in places.items():
        for below in sorted(shown[name]):
            across, down = places[below][0] - x, y - places[below][1]
            bend = 0.0 if down == 1 else -0.2 if across < 0 else 0.2 if across else 0.5
            ends = {"patchA": boxes[name].get_bbox_patch(), "patchB": boxes[below].get_bbox_patch()}
            how = {"arrowstyle": "-|>", "color": "#59636e", "shrinkA": 0, "shrinkB": 0}
            how |= ends | {"connectionstyle": f"arc3,rad={bend}"}
            axes.annotate("", places[below], (x, y), arrowprops=how, zorder=1)
    return figure


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    with mpl.rc_context({"svg.hashsalt": "layerskip", "font.family": ["DejaVu Sans"]}):
        draw(arrows()).savefig(PICTURE, metadata={"Date": None})
