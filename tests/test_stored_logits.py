"""Logits stored in a file: its contents, refusals, and drafts that start from it."""

import json

import kinds
import numpy as np
import pytest
import torch
from commands import run
from models import All, lively_model
from safetensors.numpy import load, save

from layerskip import LogitLookup, StoredLogits
from layerskip.generation import generate
from layerskip.model.sublayers import Sublayers


def learnt(most=100, tokens=60):
    text = torch.randint(2, 24, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    laws = StoredLogits(most)
    laws.learn(kinds.model_of("llama"), text)
    return laws, text


def said(laws, context):
    suffix, place = laws.find(context)
    if not suffix:
        return 0, [], []
    return suffix, laws.tokens[place].tolist(), laws.logits[place].tolist()


def test_what_is_learnt_is_what_the_model_says():
    laws, text = learnt()
    with torch.no_grad():
        raw = kinds.model_of("llama")(torch.tensor([text])).logits[0]  # (T, V)
    for end in (3, 30, 60):
        suffix, tokens, logits = said(laws, text[:end])
        assert suffix == min(end, 4)
        want = raw[end - 1].float().sort(descending=True)
        assert tokens == want.indices.tolist()
        assert logits == pytest.approx(want.values.tolist(), rel=1e-5)


def test_long_texts_are_read_in_pieces_that_see_what_came_before(sizes):
    model, told = kinds.model_of("llama"), []
    sizes(piece_learnt=16)
    laws, text = StoredLogits(), (list(range(2, 24)) * 3)[:50]
    laws.learn(model, text, lambda *done: told.append(done))
    assert told == [(16, 50), (32, 50), (48, 50), (50, 50)]
    with torch.no_grad():
        raw = model(torch.tensor([text[16:48]])).logits[0]  # (T, V)
    assert said(laws, text[:48])[2] == pytest.approx(raw[-1].sort(descending=True).values.tolist())


@pytest.mark.parametrize("most", [7, 100])
def test_a_file_holds_what_was_kept(most, tmp_path):
    laws, text = learnt(most)
    laws.save(tmp_path / "laws")
    assert (tmp_path / "laws").stat().st_size < 272 * len(laws) + 1000
    again = StoredLogits.load(tmp_path / "laws")
    assert len(again) == len(laws) == min(most, 60)
    for end in range(1, 60):
        assert said(again, text[:end]) == said(laws, text[:end])
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "laws").read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["again", "laws"]


def test_drafts_begin_with_what_a_file_knows_and_leave_it_as_it_is(tmp_path):
    """The same text in fewer passes. The file's logits do not leak into other calls."""
    model, (ids, mask) = kinds.model_of("llama"), kinds.prompts()
    how = {"attention_mask": mask, "max_new_tokens": 40, "lookup": False}
    how |= {"draft_memory": 0, "controller": All(), "do_sample": True, "seed": 5, "top_k": 0}
    plain = generate(model, ids, enabled=False, **how).sequences
    laws = StoredLogits()
    for row in plain.tolist():
        laws.learn(model, row)
    laws.save(tmp_path / "laws")
    known = StoredLogits.load(tmp_path / "laws")
    size, passes = len(known), []
    for source in (LogitLookup(known=known), LogitLookup(known=known), LogitLookup()):
        out = generate(model, ids, sources=[source], **how)
        assert torch.equal(out.sequences, plain)
        passes.append(out.stats.num_rounds)
    assert passes[0] == passes[1] < 0.7 * passes[2]
    assert len(known) == size


def test_another_model_refuses_them_by_name(tmp_path):
    laws, _ = learnt()
    laws.save(tmp_path / "laws")
    with pytest.raises(ValueError, match=r"laws belong to a model with other weights \(weights-"):
        StoredLogits.load(tmp_path / "laws").check(Sublayers(kinds.model_of("qwen2")))
    with pytest.raises(ValueError, match="nothing has been learned"):
        StoredLogits().save(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"vocabulary, 0\.\.23, got 5 to 24"):
        laws.learn(kinds.model_of("llama"), [5, 24])


def changed(laws, path, **arrays):
    laws.save(path)
    found = load(path.read_bytes()) | arrays
    path.write_bytes(save({name: each for name, each in found.items() if each is not None}))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"tokens": None}, "it lacks tokens"),
        ({"schema": np.zeros(3, np.uint8)}, "its schema is not"),
        ({"model": np.zeros(3, np.uint8)}, "does not name a model"),
        ({"logits": np.zeros((2, 2), np.float32)}, "other shapes"),
        ({"logits": np.zeros((60, 24), np.float64)}, "other dtypes"),
        ({"tokens": np.full((60, 24), -1, np.int32)}, "negative tokens"),
        ({"logits": np.full((60, 24), np.nan, np.float32)}, "not finite"),
        ({"logits": np.arange(60 * 24, dtype=np.float32).reshape(60, 24)}, "descending order"),
    ],
)
def test_damaged_files_are_refused_in_a_line(arrays, words, tmp_path):
    changed(learnt()[0], tmp_path / "laws", **arrays)
    with pytest.raises(ValueError, match=words):
        StoredLogits.load(tmp_path / "laws")


def test_files_that_are_none_are_refused_in_a_line(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a safetensors file"):
        StoredLogits.load(tmp_path / "text")
    with pytest.raises(ValueError, match=r"cannot read the logits .*: No such file"):
        StoredLogits.load(tmp_path / "missing")
    changed(learnt()[0], tmp_path / "laws", tokens=np.full((60, 24), 99, np.int32))
    with pytest.raises(ValueError, match=r"hold token 99, the model has 0\.\.23"):
        StoredLogits.load(tmp_path / "laws").check(Sublayers(kinds.model_of("llama")))


@pytest.mark.thorough
def test_the_command_line_makes_keeps_and_refuses_them(tmp_path):
    laws, text = str(tmp_path / "laws"), tmp_path / "text"
    text.write_text("Once there was a fox. " * 9)
    lean = ["--execution", "fused", "--threads", "1"]

    made = run("laws", "--text", str(text), "--output", laws, "--json", *lean)
    assert made.exit_code == 0, made.output
    size = len(StoredLogits.load(laws))
    ask = ["generate", "--prompt", "Once there", "-n", "12", "--controller", "fixed", *lean]
    ask += ["--low-precision", "none", "--json", "--laws"]
    found = run(*ask, laws)
    assert found.exit_code == 0, found.output
    assert '"laws"' in found.output
    assert len(StoredLogits.load(laws)) == size
    fresh = str(tmp_path / "fresh")
    assert run(*ask, fresh, "--keep-laws").exit_code == 0
    assert len(StoredLogits.load(fresh)) > 0
    prompts, told = tmp_path / "prompts", []
    prompts.write_text("Once there\nA fox\n")
    for number, more in enumerate(([], ["--laws", laws])):
        output = tmp_path / f"answers{number}"
        how = ["--output", str(output), "-n", "12", "--controller", "fixed", *lean]
        found = run("run", "demo-llama", str(prompts), *how, *more)
        assert found.exit_code == 0, found.output
        rows = map(json.loads, output.read_text().splitlines())
        told.append({row["id"]: row["token_ids"] for row in rows})
    assert told[0] == told[1]
    for args, words in (
        (["generate", "demo-gemma2", *ask[1:], laws], "belong to a model with other weights"),
        ([*ask, fresh + "x"], "cannot read the logits"),
        ([*ask[:-1], "--keep-laws"], "--keep-laws needs a file to add to"),
        (["serve", "--laws", laws, "--keep-laws"], "serve may run in several processes"),
        (["laws", "--text", laws, "--output", fresh], "is not UTF-8"),
    ):
        refused = run(*args)
        assert refused.exit_code == 2
        assert words in refused.output


def test_of_families_with_windows_and_short_positions():
    laws = StoredLogits()
    laws.learn(lively_model("gemma3", max_position_embeddings=16), [*range(2, 60)])
    assert len(laws) == 58
