"""Controllers and sources that an installed package adds, by entry points."""

import pytest
from checkpoints import save_checkpoint
from commands import PROMPT, document, process, refused, run
from models import lively_model, prompt

import layerskip
from layerskip.config import registry

MODULE = """
from pathlib import Path

from layerskip import Lookup
from layerskip.decoding.controllers import Controller

Path(__file__).with_name("imported").touch()


class TwoAtMost(Controller):
    def __init__(self, max_draft_length=2):
        self.most = max_draft_length

    def limit(self, row, allowed):
        return min(self.most, allowed)


def guesses():
    return Lookup([[5, 7, 9, 5, 7, 9]])


def of_model(model):
    return Lookup([[*range(model.num_layers)]])
"""
POINTS = """
[layerskip.controllers]
two-at-most = added_drafts:TwoAtMost
fixed = nowhere:Fixed
broken = nowhere:Broken

[layerskip.sources]
guesses = added_drafts:guesses
of-model = added_drafts:of_model
no-source = added_drafts:Path
broken = added_drafts:Missing
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of an installed package with entry points."""
    about = tmp_path / "added_drafts-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: added-drafts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    (tmp_path / "added_drafts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of processes
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(tmp_path / "tiny")


def test_names_are_those_of_the_package_behind_ours(package):
    own, added = (
        registry.CONTROLLERS + registry.LEARNT,
        ("guesses", "of-model", "no-source", "broken"),
    )
    assert registry.names("controller") == (*own, "two-at-most", "broken")
    assert registry.names("source") == (*registry.PLACES["source"], *added)
    assert registry.names("loss") == tuple(registry.PLACES["loss"])
    assert registry.named("controller", "fixed").__module__ == "layerskip.decoding.controllers"
    assert not (package / "imported").exists()


def test_python_takes_them_by_name(package):
    model, how = lively_model("llama"), {"max_new_tokens": 30, "do_sample": False}
    plain = layerskip.generate(model, prompt(9), enabled=False, **how)
    sources = ["guesses", layerskip.Lookup(), "of-model", "logit-lookup"]
    for most in (None, 1):
        settings = {"controller": "two-at-most", "max_draft_length": most, "lookup": False}
        out = layerskip.generate(model, prompt(9), sources=sources, **settings, **how)
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert len(out.stats.sources) == 4
        drafted = [max(each.drafted) for each in out.rounds]
        assert max(drafted) <= (most or 2)
    with pytest.warns(UserWarning, match="threshold has no effect on the controller 'two-at"):
        layerskip.generate(model, prompt(9), threshold=0.5, sources=sources, **settings, **how)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"controller": "broken"}, "the controller broken .nowhere:Broken. .* ModuleNotFound"),
        ({"sources": "broken"}, "the source broken .added_drafts:Missing. .* AttributeError"),
        ({"sources": ["no-source"]}, "the source no-source must make a layerskip.Source, got"),
        ({"sources": "guess"}, "source must be one of .*, guesses, .*, got 'guess'"),
        ({"controller": "two"}, "controller must be one of fixed, .*two-at-most.*, got 'two'"),
    ],
)
def test_what_cannot_be_used_is_named(package, settings, match):
    with pytest.raises(ValueError, match=match):
        layerskip.generate(lively_model("llama"), prompt(5), max_new_tokens=3, **settings)


def test_the_command_line_takes_them_by_name(package, folder):
    with process("generate", "--help") as helped:
        shown, _ = helped.communicate()
    assert "two-at-most" in shown
    assert "guesses" in shown
    assert not (package / "imported").exists()
    ask = ("generate", folder, "--prompt", PROMPT, "-n", 8)
    given = process(*ask, "--controller", "two-at-most", "--source", "guesses", "--json", "--quiet")
    plain = document(run(*ask, "--no-draft", "--json"))
    out, errors = given.communicate()
    assert given.returncode == 0, errors
    assert f'"text": "{plain["text"]}"' in out
    assert "source broken" in refused(*ask, "--source", "broken")
    named = document(run(*ask, "--source", "of-model", "--no-lookup", "--json"))
    assert named["sources"][0]["name"] == "lookup"
    assert named["text"] == plain["text"]
