"""Every language model of the library: it is served as the table says, and decodes correctly."""

import re
from pathlib import Path

import architectures
import pytest
import transformers
from marks import slow
from models import ragged
from packaging.version import Version
from small import EIGHT, NEW_TOKENS, alone, decoded, new_tokens, small_model

from layerskip.cli.env import render
from layerskip.families.served_models import DRAFTS, SERVED, TABLE, TRANSFORMERS
from layerskip.files.environment import environment
from layerskip.model.opened_models import open_model
from layerskip.weights.rounded import linears

ROOT = Path(__file__).parents[1]
UNBUILT = {  # why they are not built in a small size
    "emu3": "of another configuration than its text's",
    "gemma3n": "needs timm; gemma3n_text is the same",
    "llama4": "of another configuration than its text's; llama4_text is the same",
    "qwen3_5": "of another configuration than its text's; qwen3_5_text is the same",
    "qwen3_5_moe": "of another configuration than its text's; qwen3_5_moe_text is the same",
    "xglm": "the library's forward has no float64",
}
QUICK = ("gpt2", "gpt_neox", "opt", "phimoe", "starcoder2")
WHOLE = sorted({kind for kind, how in SERVED.items() if how.startswith("whole")} - {*UNBUILT})


@pytest.mark.thorough
def test_the_table_is_what_the_installed_library_is():
    """Names models that are new, gone or served differently. scripts/architectures.py fixes it.

    Older versions lack some of them.
    """
    found = architectures.served()
    installed, listed = Version(transformers.__version__), Version(TRANSFORMERS)
    changed = [
        f"{kind}: {SERVED.get(kind, 'not listed')} -> {found.get(kind, 'gone')}"
        for kind in sorted({*found} | ({*SERVED} if installed >= listed else set()))
        if found.get(kind) != SERVED.get(kind)
    ]
    if installed > listed:
        pytest.skip(f"transformers {installed}: {'; '.join(changed) or 'the same'}")
    assert changed == []


def test_the_table_is_of_the_newest_version_that_is_admitted():
    admitted = re.search(r'"transformers>=.*,<(.*)"', (ROOT / "pyproject.toml").read_text())
    newest = Version(TRANSFORMERS)
    assert f"{newest.major}.{newest.minor + 1}" == admitted[1]
    levels = {how for how in SERVED.values() if not how.startswith("refused: ")}
    assert levels == {*DRAFTS}


def test_the_page_of_models_says_what_the_table_says():
    page = " ".join((ROOT / "docs" / "models.md").read_text(encoding="utf-8").split())
    groups = {how: [kind for kind, own in SERVED.items() if own == how] for how in DRAFTS}
    refused = sum(how.startswith("refused: ") for how in SERVED.values())
    assert f"transformers {TRANSFORMERS}" in page
    opened, pictures = (" ".join(groups[how]) for how in ("opened", "opened, with pictures"))
    assert f"left out): {opened}; with pictures {pictures}; with an encoder t5gemma. - " in page
    assert groups["opened, with an encoder"] == ["t5gemma"]
    assert f"if you ask for them): {len(groups['whole'])} others, such as " in page
    assert f"with an encoder {len(groups['whole, with an encoder'])}, such as " in page
    assert f"**Refused**: {refused}, because of " in page


def test_the_table_fits_any_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = render(environment() | {"native": "built", "architectures": TABLE})
    assert max(map(len, text.splitlines())) <= 60
    said = text.partition("architectures of ")[2].split()
    assert all(said.count(kind) >= 1 for kind in SERVED)


@pytest.mark.parametrize("kind", [*QUICK, *slow(*(k for k in WHOLE if k not in QUICK))])
def test_a_whole_model_decodes_as_generate_does(kind):
    model = small_model(kind)
    assert open_model(model).execution == "whole"
    ids, mask = ragged((11, 7), seed=1)  # (B, W)
    ids[:, 6:] = ids[:, 1:6]  # so that lookups find something
    if model.config.is_encoder_decoder:  # the library's encoder sees the padding
        want = new_tokens(decoded(model, (ids, mask), enabled=False))
        how = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        out = model.generate(ids, attention_mask=mask, **how)
        assert out[:, -NEW_TOKENS:].tolist() == want
    else:
        want = alone(model, ids, mask)
    drafts = [{"lookup": True}]
    if [*linears(open_model(model).decoder)]:
        drafts.append({"skip": EIGHT, "lookup": False})
    drafted = 0
    for draft in drafts:
        out = decoded(model, (ids, mask), controller="fixed", max_draft_length=4, **draft)
        assert new_tokens(out) == want
        drafted += out.stats.num_draft_tokens
    assert drafted > 0
