"""Which cases run by default: every pair of values of every matrix, also of new ones."""

import math
from itertools import combinations, product

import pytest
from covering import covering

pytest_plugins = ["pytester"]

MATRIX = """
import pytest

@pytest.mark.parametrize("sizes", [1, 2])
@pytest.mark.parametrize(("name", "number"), [("a", 1), ("b", 2), ("c", 1)])
@pytest.mark.parametrize("way", {ways})
def test_matrix(way, name, number, sizes):
    pass

@pytest.mark.parametrize("name", list("abcdefgh"))
@pytest.mark.parametrize("way", [1, 2])
def test_two_parameters(way, name):
    pass

@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["a", pytest.param("b", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("way", [1, 2])
def test_marked(way, name, size):
    pass
"""


@pytest.mark.parametrize(
    ("sizes", "strength"), [((5, 3, 4, 2, 2), 2), ((4, 3, 3, 2), 3), ((3,), 1)]
)
def test_few_cases_hold_every_combination(sizes, strength):
    axes = [range(10 * n, 10 * n + size) for n, size in enumerate(sizes)]
    cases, least = covering(*axes, strength=strength), 1
    for some in combinations(range(len(axes)), strength):
        wanted = set(product(*(axes[n] for n in some)))
        assert {tuple(case[n] for n in some) for case in cases} == wanted
        least = max(least, math.prod(sizes[n] for n in some))
    assert least <= len(cases) <= 1.2 * least


@pytest.mark.parametrize("ways", [["x", "y"], ["x", "y", "new"]])
def test_a_new_value_runs_by_default_beside_every_other(pytester, ways):
    pytester.makeconftest(
        "from covering import leave_pairs\n"
        "def pytest_collection_modifyitems(items): leave_pairs(items)\n"
    )
    pytester.makeini("[pytest]\nmarkers = thorough: not by default")
    pytester.makepyfile(MATRIX.format(ways=ways))
    items, _ = pytester.inline_genitems("--collect-only", "-p", "no:cacheprovider")
    run = {"test_matrix": [], "test_two_parameters": [], "test_marked": []}
    for item in items:
        if item.get_closest_marker("thorough") is None:
            run[item.originalname].append(item.callspec.params)

    axes = {"way": ways, "name": ["a", "b", "c"], "sizes": [1, 2]}
    for some in combinations(axes, 2):
        wanted = set(product(*(axes[name] for name in some)))
        assert {tuple(params[name] for name in some) for params in run["test_matrix"]} == wanted
    assert len(run["test_matrix"]) < 6 * len(ways)
    assert len(run["test_two_parameters"]) == 16  # all
    assert {params["name"] for params in run["test_marked"]} == {"a"}
