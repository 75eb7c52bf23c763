"""Counts the lines that are not blank, by room; `make lines` prints them."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def room(path: Path) -> str:
    """The room of a source file, given by its path in the repository."""
    top, *rest = path.parts
    if top != "layerskip":
        return top
    if len(rest) == 1:
        return "top"
    return "native/csrc" if path.suffix != ".py" else rest[0]


def lines_by_room() -> Counter[str]:
    counts: Counter[str] = Counter()
    for top in ("layerskip", "search", "analysis", "scripts", "tests"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h"):
                lines = path.read_text(encoding="utf-8").splitlines()
                counts[room(path.relative_to(ROOT))] += sum(bool(line.strip()) for line in lines)
    return counts


if __name__ == "__main__":
    counts = lines_by_room()
    for name, count in sorted(counts.items()):
        print(f"{name:12} {count:6,}")
    print(f"{'all code':12} {counts.total() - counts['tests']:6,}")
