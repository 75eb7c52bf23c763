"""The README's program runs as printed, and its links lead somewhere."""

import inspect
import re
from pathlib import Path

import expectations
import pytest
from models import lively_model, prompt

from layerskip import LayerSkipDecoding, SkipConfig
from layerskip.search import SearchResult, search

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_program_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)  # as with an installed wheel, outside of a checkout
    exec(compile(PROGRAMS[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("def fib(n):")
    assert re.search(r"^0\.\d+ [1-9]\.\d+$", printed, re.MULTILINE)  # the two rates


def test_the_controller_decodes():
    names = {"LayerSkipDecoding": LayerSkipDecoding, "skip": SkipConfig.early_exit(3)}
    exec(compile(PROGRAMS[1], "README.md", "exec"), names)
    model, ids = lively_model("llama"), prompt(7)
    how = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    out = model.generate(
        ids, custom_generate=names["decoding"], return_dict_in_generate=True, **how
    )
    assert out.sequences.tolist() == model.generate(ids, **how).tolist()
    assert 0 < out.stats.num_draft_tokens < 6 * out.stats.num_rounds


def test_the_search_asks_for_what_there_is(monkeypatch, capsys, tmp_path):
    """The other program, but for the minutes of the search itself."""
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


def test_what_is_computed_for_gemma_4_is_what_the_page_says():
    page = (ROOT / "docs" / "gemma4.md").read_text(encoding="utf-8")
    for table in expectations.tables():
        assert table in page, "docs/gemma4.md is not what scripts/expectations.py prints"
