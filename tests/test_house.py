"""How many lines each room may have. To add lines, raise a number here, where a reviewer sees it.

Lines of code and comments count; blank lines do not. `docs/life-of-a-token.md` describes the rooms.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {
    "words: configs, drafts' weights, prompts, text": 1_021,
    "files": 1_092,
    "costs": 476,
    "timing": 715,
    "model": 7_023,
    "model/native": 4_936,
    "decoding": 3_333,
    "decoding/sources": 1_220,
    "doors": 1_922,
    "serving": 3_385,
    "bench": 1_989,
    "replay": 1_256,
    "research": 1_061,
    "training": 2_305,
    "cli": 3_213,
    "search": 2_055,
    "analysis": 2_266,
    "scripts": 745,
}
WHOLE = 40_013  # everything but tests, with C++
TESTS = 26_766
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
    """Numbers of lines of code and comments by room, and of tests."""
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
