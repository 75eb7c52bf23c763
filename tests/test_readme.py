"""Programs of the README and the guides run as printed, and all links lead somewhere."""

import inspect
import json
import re
from pathlib import Path

import figures
import pytest
import run_files as made
import speed
import way_in
from models import lively_model, prompt
from way_in import program

from layerskip import SkipConfig, load, shipped
from layerskip.analysis.runs import load_runs
from layerskip.search import SearchResult, search

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def test_the_program_runs(monkeypatch, capsys, tmp_path):
    """With a shipped model instead of one from the Hub."""
    monkeypatch.chdir(tmp_path)  # as with an installed wheel, outside a checkout
    code = program(way_in.README, way_in.MODEL)
    exec(code.replace(way_in.MODEL, str(shipped("demo-llama"))), {})
    printed = capsys.readouterr().out
    assert "drafts: " in printed
    assert re.search(r"^[01]\.\d+ [1-9]\d*\.\d+$", printed, re.MULTILINE)  # the two rates


def test_the_controller_decodes():
    own = {}
    exec(program(ROOT / "docs/sources.md", "class Careful"), own)
    model, ids = lively_model("llama"), prompt(7)
    how = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, custom_generate=own["decoding"], return_dict_in_generate=True, **how)
    assert out.sequences.tolist() == model.generate(ids, **how).tolist()
    assert 0 < out.stats.num_draft_tokens < 6 * out.stats.num_rounds


def test_the_search_asks_for_what_there_is(monkeypatch, capsys, tmp_path):
    """The program that searches, without the search itself, which would take minutes."""

    def found(*arguments, **settings):
        inspect.signature(search).bind(*arguments, **settings)
        skip = SkipConfig(num_layers=6, notes={"confirmed": {"speedup": 1.5}})
        return SearchResult(skip, None, (), None, {})

    monkeypatch.setattr("layerskip.search.pipeline.search", found)
    monkeypatch.chdir(tmp_path)
    code = program(ROOT / "docs/searching.md", "import search")
    exec(code, {"model": 0, "prompts": [], "others": []})
    assert "1.5" in capsys.readouterr().out
    assert SkipConfig.load(tmp_path / "skip.json").num_layers == 6


LINK = r"\]\((?!http)([^)#]*)#?([^)]*)\)|^\[[^\]]+\]: ([^\s#]+)#?(\S*)"


def anchors(page):
    headings = re.findall(r"^#+ (.*)", page.read_text().lower(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings]


def test_links_lead_somewhere():
    for page in PAGES:
        found = re.findall(LINK, page.read_text(), re.MULTILINE)
        assert found, page
        for inline, inner, reference, outer in found:
            target, anchor = page.parent / (inline or reference or page.name), inner or outer
            assert target.exists(), (page, target)
            assert not anchor or anchor in anchors(target), (page, target, anchor)


def test_figures_are_those_of_records():
    """Every ratio in README names a record; `make figures` stores records and updates README."""
    readme, stored = (ROOT / "README.md").read_text(), json.loads(figures.STORED.read_text())
    assert figures.filled(readme, stored) == (readme, [])


def test_figures_that_no_record_has_are_told_and_put_right(tmp_path):
    [run] = load_runs([made.write(tmp_path / "run.jsonl", made.made_up())])
    stored = {"run": figures.figures_of(run)}
    right = (
        "**1.15 (1.09-1.23)**<!-- run self/plain -->, 1.16 (1.09 to 1.24)"
        "<!-- run self/plain:decode --> and 1,134<!-- run self --> at T = 0.80, since 2.13"
    )
    assert figures.filled(right, stored) == (right, [])
    wrong = right.replace("1.09-", "1.08-").replace("1,134", "999")
    assert figures.filled(wrong, stored)[0] == right
    for text, words in (
        ("1.16 (1.09-1.23)<!-- run self/plain -->", "README says 1.16 1.09 1.23, records"),
        ("1.15 (1.08-1.23)<!-- run self/plain -->", "records ['1.15', '1.09', '1.23']"),
        ("1.15<!-- other self/plain -->", "other self/plain: README says 1.15, records none"),
        ("1.15 (1.09-1.23), all", "1.15 (1.09-1.23) names no record"),
    ):
        _, [line] = figures.filled(text, stored)
        assert words in line


def test_a_slow_machine_is_told_by_the_exit_code(tmp_path, monkeypatch, capsys):
    ratios = speed.measured(load("demo-llama"), repeats=1, tokens=20)
    assert all(ratio > 0 for ratio in ratios.values())
    monkeypatch.setattr(speed, "LIMITS", tmp_path / "floors.json")
    fine, slow = ({"c": ratios["c"] / share} for share in (1.1, 0.5))
    for told, flags, code in ((ratios, ["--write"], 0), (fine, [], 0), (slow, [], 1)):
        monkeypatch.setattr(speed, "measured", lambda *_, told=told: ratios | told)
        monkeypatch.setattr("sys.argv", ["speed", *flags])
        with pytest.raises(SystemExit) as stopped:
            speed.main()
        assert stopped.value.code == code
        assert ("BEYOND" in capsys.readouterr().out) == bool(code)
