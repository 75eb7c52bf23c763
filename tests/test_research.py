"""The research package: no core file imports `layerskip.research` or names its contents."""

from pathlib import Path
from typing import get_args

import pytest

from layerskip.config import registry
from layerskip.training.students import RATES

PACKAGE = Path(registry.__file__).parents[1]
REGISTRY = Path(registry.__file__)
RESEARCH = [*(PACKAGE / "research").glob("*.py")]
ROOMS = [PACKAGE, *(PACKAGE.parent / room for room in ("search", "analysis"))]
NAMES = {REGISTRY, PACKAGE / "__init__.py"}  # these may name them
CORE = {path for room in ROOMS for path in room.rglob("*.py")} - {*NAMES, *RESEARCH}
WORDS = {
    "losses": '"kl" "tvd++" TVD tvd_plus',
    "trees": "GrownTrees TreeGain LaterAcceptance see_rank",
    "blocks": "ExitBlock Streams ExitState StreamsState",
    "stored logits": "LogitLookup logit_lookup",
}


@pytest.mark.parametrize("what", WORDS)
def test_no_core_file_names_what_is_research(what):
    assert [
        f"{path}:{number} {word}"
        for path in CORE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in WORDS[what].split()
        if word in line
    ] == []


def test_research_has_these_words():
    """Otherwise the test above could pass because a word is misspelt."""
    held = "\n".join(path.read_text(encoding="utf-8") for path in (*NAMES, *RESEARCH))
    assert [word for words in WORDS.values() for word in words.split() if word not in held] == []


def test_every_name_stands_for_something():
    for role, names in registry.PLACES.items():
        assert all(registry.named(role, name) for name in names)
    assert registry.PLACES["controller"].keys() >= set(registry.CONTROLLERS)
    assert tuple(registry.PLACES["loss"]) == get_args(registry.LossName)
    assert tuple(RATES) == get_args(registry.StudentName)
