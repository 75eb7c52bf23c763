"""The README's programs run as printed, and its links lead somewhere."""

import inspect
import json
import re
from pathlib import Path

import figures
import pytest
import run_files as made
import speed
from models import lively_model, prompt

import layerskip
from layerskip import SkipConfig
from layerskip.analysis.runs import load_runs
from layerskip.checkpoints import load
from layerskip.search import SearchResult, search

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


EXAMPLE = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


def test_the_program_runs(monkeypatch, capsys, tmp_path):
    """With a shipped model instead of one from the Hub."""
    monkeypatch.chdir(tmp_path)  # as with an installed wheel, outside a checkout
    assert PROGRAMS[0].count(EXAMPLE) == 1
    program = PROGRAMS[0].replace(EXAMPLE, repr(str(layerskip.shipped("demo-llama"))))
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "drafts: " in printed
    assert re.search(r"^[01]\.\d+ [1-9]\d*\.\d+$", printed, re.MULTILINE)  # the two rates


def test_the_controller_decodes():
    names = {}
    exec(compile(PROGRAMS[1], "README.md", "exec"), names)
    model, ids = lively_model("llama"), prompt(7)
    how = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    out = model.generate(
        ids, custom_generate=names["decoding"], return_dict_in_generate=True, **how
    )
    assert out.sequences.tolist() == model.generate(ids, **how).tolist()
    assert 0 < out.stats.num_draft_tokens < 6 * out.stats.num_rounds


def test_the_search_asks_for_what_there_is(monkeypatch, capsys, tmp_path):
    """The program that searches, without the search itself, which would take minutes."""
    searching = search

    def found(*arguments, **settings):
        inspect.signature(searching).bind(*arguments, **settings)
        skip = SkipConfig(num_layers=6, notes={"confirmed": {"speedup": 1.5}})
        return SearchResult(skip, None, (), None, {})

    monkeypatch.setattr("layerskip.search.pipeline.search", found)
    monkeypatch.chdir(tmp_path)
    assert len(PROGRAMS) == 3
    given = {"model": object(), "prompts": [], "others": []}
    exec(compile(PROGRAMS[2], "README.md", "exec"), given)
    assert "1.5" in capsys.readouterr().out
    assert SkipConfig.load(tmp_path / "skip.json").num_layers == 6


LINK = r"\]\((?!http)([^)#]+)|^\[[^\]]+\]: (\S+)"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    found = re.findall(LINK, page.read_text(encoding="utf-8"), re.MULTILINE)
    targets = [inline or reference for inline, reference in found]
    assert targets or page.name == "sources.md"
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_figures_are_those_of_records():
    """Every ratio in README names a record; `make figures` stores records and updates README."""
    stored = json.loads(figures.STORED.read_text()) if figures.STORED.exists() else {}
    _, lines = figures.told(README, stored)
    assert [line for line in lines if stored or "names no record" in line] == []


def test_figures_that_no_record_has_are_told_and_put_right(tmp_path):
    [run] = load_runs([made.write(tmp_path / "run.jsonl", made.made_up())])
    stored = {"run": figures.figures_of(run)}
    right = (
        "**1.15 (1.09-1.23)**<!-- run self/plain -->, 1.16 (1.09 to 1.24)"
        "<!-- run self/plain:decode --> and 1,134<!-- run self --> at T = 0.80, since 2.13"
    )
    assert figures.told(right, stored) == (right, [])
    wrong = right.replace("1.09-", "1.08-").replace("1,134", "999")
    assert figures.told(wrong, stored)[0] == right
    for text, words in (
        ("1.16 (1.09-1.23)<!-- run self/plain -->", "README says 1.16 1.09 1.23, records"),
        ("1.15 (1.08-1.23)<!-- run self/plain -->", "records ['1.15', '1.09', '1.23']"),
        ("1.15<!-- other self/plain -->", "other self/plain: README says 1.15, records none"),
        ("1.15 (1.09-1.23), all", "1.15 (1.09-1.23) names no record"),
    ):
        _, [line] = figures.told(text, stored)
        assert words in line


@pytest.fixture(scope="module")
def ratios():
    ratios = speed.measured(load("demo-llama"), repeats=1, tokens=20)
    assert all(ratio > 0 for ratio in ratios.values())
    return ratios


@pytest.mark.parametrize(("share", "code"), [(1.1, 0), (0.5, 1)])
def test_a_slow_machine_is_told_by_the_exit_code(
    ratios, tmp_path, monkeypatch, capsys, share, code
):
    monkeypatch.setattr(speed, "LIMITS", tmp_path / "floors.json")
    for told, flags, wanted in ((ratios, ["--write"], 0), ({"c": ratios["c"] / share}, [], code)):
        monkeypatch.setattr(speed, "measured", lambda *_, told=told: ratios | told)
        monkeypatch.setattr("sys.argv", ["speed", *flags])
        with pytest.raises(SystemExit) as stopped:
            speed.main()
        assert stopped.value.code == wanted
    assert ("BEYOND" in capsys.readouterr().out) == bool(code)
