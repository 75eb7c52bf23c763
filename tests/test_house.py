"""How many lines there may be. To add lines, raise a number here, where a reviewer sees it."""

from lines import lines_by_room

CODE = 42_485  # everything but tests, with C++
TESTS = 28_546


def test_the_house_keeps_to_its_lines():
    counts = lines_by_room()
    assert counts.pop("tests") <= TESTS
    assert sum(counts.values()) <= CODE
