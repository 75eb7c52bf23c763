"""How many lines each room may have: who needs more raises a number here, where a reviewer sees it.

Lines of code and comments count, blank ones do not. Rooms are those of `docs/life-of-a-token.md`.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {
    "words: configs, drafts' weights, prompts, text": 1_044,
    "files": 1_058,
    "costs": 455,
    "timing": 761,
    "model": 6_808,
    "model/native": 4_327,
    "decoding": 3_385,
    "decoding/sources": 1_217,
    "doors": 1_919,
    "serving": 3_565,
    "bench": 1_954,
    "replay": 1_391,
    "research": 1_240,
    "training": 2_405,
    "cli": 3_247,
    "search": 2_091,
    "analysis": 2_360,
    "scripts": 795,
}
WHOLE = 39_816  # all but tests, C++ included
TESTS = 26_455
WORDS = ("config", "draft_weights", "environment", "named", "pictures", "prompts", "registry")
WORDS += ("text",)


def room(path):
    """The room of a source file, given by its path in the repository."""
    top, *rest = path.parts
    if top != "layerskip":
        return top
    if path.suffix != ".py":
        return "model/native"
    if len(rest) == 1:
        return next(iter(ROOMS)) if path.stem in WORDS else "doors"
    return "decoding/sources" if rest[:2] == ["decoding", "sources"] else rest[0]


def lines():
    """Lines of code and comments by room, tests among them."""
    counts = dict.fromkeys([*ROOMS, "tests"], 0)
    for top in ("layerskip", "search", "analysis", "scripts", "tests"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h"):
                text = path.read_text(encoding="utf-8")
                filled = (line for line in text.splitlines() if line.strip())
                counts[room(path.relative_to(ROOT))] += len([*filled])
    return counts


def test_no_room_is_fuller_than_its_table_says():
    counts = lines()
    assert all(counts.values())
    assert {name: counts[name] for name, most in ROOMS.items() if counts[name] > most} == {}


def test_the_house_keeps_to_its_lines():
    counts = lines()
    assert counts.pop("tests") <= TESTS
    assert sum(counts.values()) <= WHOLE
