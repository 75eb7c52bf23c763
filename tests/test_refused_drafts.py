"""Unusable drafts and trainings: one line, exit code 2, and no unfinished file."""

import hashlib
import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint
from commands import PROMPT, refused
from kinds import skip_of
from models import tiny_model
from safetensors.torch import save

from layerskip import SkipConfig, generate, load
from layerskip.model.draft_modules import save_trained
from layerskip.training import data, judging, stages


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"w{i} w{i + 7} w{3 * i}\n" for i in range(2, 12)))
    return path


# ---- Drafts ----


def trained_draft(kind, checkpoint, folder):
    """A skip config that names weights of a kind for a checkpoint, and their file."""
    skip = skip_of(kind, load(str(checkpoint)).model, folder)
    skip.save(folder / "skip.json")
    return folder / "skip.json", Path(skip.trained.weights)


def commands(checkpoint, prompts, skip):
    """Every command that takes a skip config, with this one."""
    output = prompts.parent / "output"
    return [
        ("generate", checkpoint, "--prompt", PROMPT, "--skip", skip),
        ("check", checkpoint, "--prompts", prompts, "--skip", skip),
        ("demo", checkpoint, "--skip", skip),
        ("benchmark", checkpoint, "--prompts", prompts, "--skip", skip, "--output", output),
    ]


@pytest.mark.parametrize("kind", ["exit-block", "heads"])
def test_files_of_trained_weights_that_are_not_the_ones(kind, checkpoint, prompts, tmp_path):
    skip, file = trained_draft(kind, checkpoint, tmp_path)
    whole = file.read_bytes()
    for name, content, words in (
        ("cut off", whole[:-40], "is cut off or changed (SHA-256 "),
        ("changed", whole[:-1] + bytes([whole[-1] ^ 1]), "is cut off or changed (SHA-256 "),
        ("missing", None, f"cannot read the trained draft {file}: No such file"),
    ):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        for command in commands(checkpoint, prompts, skip)[:: 1 if name == "missing" else 4]:
            assert words in refused(*command), (name, command)
    assert not (tmp_path / "output").exists()
    file.write_bytes(whole)
    ask = commands(checkpoint, prompts, skip)[0]
    assert "--low-precision 4 does not match" in refused(*ask, "--low-precision", 4)


def test_weights_of_another_base(checkpoint, prompts, tmp_path):
    other = save_checkpoint(tmp_path / "other", tiny_model("llama", dtype=torch.float32, seed=1))
    for kind in ("exit-block", "heads"):
        skip, _ = trained_draft(kind, other, tmp_path)
        for command in commands(checkpoint, prompts, skip)[:: 1 if kind == "heads" else 4]:
            assert "belongs to a model with other weights (weights-" in refused(*command)
        model, how = load(str(other)).model, {"skip": skip, "max_new_tokens": 4}
        generate(model, torch.tensor([[5, 9, 4]]), **how)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5)
        with pytest.raises(ValueError, match="belongs to a model with other weights"):
            generate(model, torch.tensor([[5, 9, 4]]), **how)
    assert not (tmp_path / "output").exists()


def test_files_that_hold_something_else(checkpoint, tmp_path):
    """The files match their hashes, but are of no use."""
    model = load(str(checkpoint)).model
    numbers = {"fuse.weight": torch.ones(3)}
    for kind, content, words in (
        ("streams", b"not safetensors", "is not a safetensors file"),
        ("streams", save(numbers), "holds no streams for this model"),
        ("heads", b"", "is not a safetensors file"),
    ):
        trained = save_trained(tmp_path / "draft", numbers, kind, model)
        (tmp_path / "draft").write_bytes(content)
        trained = replace(trained, hash=hashlib.sha256(content).hexdigest())
        SkipConfig(trained=trained).save(tmp_path / "skip.json")
        line = refused("generate", checkpoint, "--prompt", PROMPT, "--skip", tmp_path / "skip.json")
        assert words in line


def test_second_models_that_cannot_draft(checkpoint, tmp_path):
    """Other vocabularies are refused in `test_cli.py`."""
    ask = ("generate", checkpoint, "--prompt", PROMPT, "--assistant")
    assert "there is no folder" in refused(*ask, tmp_path / "none")
    other = save_checkpoint(tmp_path / "other")
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-400])
    assert f"cannot load the checkpoint in {other}" in refused(*ask, other)
    short = tiny_model("llama", dtype=torch.float32, max_position_embeddings=8)
    line = refused(*ask, save_checkpoint(tmp_path / "short", short))
    assert "the assistant cannot draft here" in line
    assert "at most 8 tokens" in line


# ---- Trainings ----


@pytest.fixture
def small(monkeypatch):
    """Few texts, and a judge that ends the command."""
    monkeypatch.setattr(data, "BATCH", 8)
    monkeypatch.setattr(stages, "bfloat16_is_fast", lambda device: False)

    def judge(*_, **__):
        raise ValueError("trained")

    monkeypatch.setattr(judging, "judge", judge)


def train(checkpoint, output, *flags):
    kind = () if "--draft" in flags else ("--draft", "exit-block")
    return refused("train", checkpoint, "--output", output, "--tokens", 3000, *kind, *flags)


@contextmanager
def room_for(nbytes):
    """Limit the size of files, so that writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small")
def test_a_full_disk_ends_every_stage_and_training_goes_on_behind_it(checkpoint, prompts, tmp_path):
    flags = ("--prompts", prompts, "--draft", "heads", "--loss", "kl")
    assert train(checkpoint, tmp_path / "whole", *flags) == "trained"
    work = tmp_path / "parts" / "work"
    for nbytes, file in (
        (100, "work/recipe.json"),
        (2000, "work/texts/00000.json"),
        (80_000, "work/checkpoint.pt"),
    ):
        with room_for(nbytes):
            line = train(checkpoint, tmp_path / "parts", *flags)
        assert line == f"[Errno 27] File too large: '{tmp_path / 'parts' / file}'"
        assert not (tmp_path / "parts" / file).exists()
        assert not list((tmp_path / "parts").rglob(".*.tmp"))
    (work / ".checkpoint.pt.1.tmp").write_bytes(b"left by a process that was killed")
    assert train(checkpoint, tmp_path / "parts", *flags) == "trained"
    assert not list(work.rglob(".*.tmp"))
    files = [tmp_path / each / "draft.safetensors" for each in ("parts", "whole")]
    ours, whole = (file.read_bytes() for file in files)
    assert ours == whole
    with room_for(1000), pytest.raises(OSError, match=r"too large: .*parts/draft.safetensors"):
        save_trained(files[0], {"weight": torch.ones(999)}, "heads", load(str(checkpoint)).model)
    assert files[0].read_bytes() == whole
    for file, words in (
        ("checkpoint.pt", "checkpoint.pt is cut off or changed; remove it"),
        ("texts/00000.json", "00000.json are cut off or changed; remove the file"),
    ):
        (work / "train.bin").unlink(missing_ok=True)  # made of those texts
        content = (work / file).read_bytes()
        (work / file).write_bytes(content[:-30])
        assert words in train(checkpoint, tmp_path / "parts", *flags)
        (work / file).write_bytes(content)


@pytest.mark.usefixtures("small")
def test_trainings_that_do_not_begin(checkpoint, tmp_path):
    output, path, texts = (tmp_path / each for each in ("output", "given.txt", "texts.jsonl"))
    for text, words in (
        ("", "given.txt are empty"),
        ("\n \n", "given.txt are empty"),
        ("w5 w6\n", "training needs at least 2 prompts, one of them held out"),
        ('{"prompt": 3}', "given.txt, line 1: prompt must be a string"),
    ):
        path.write_text(text)
        assert words in train(checkpoint, output, "--prompts", path)
    for text, words in (
        ("", "the texts hold 0 tokens, too few for 4 windows of 256 to train on and one to judge"),
        ('{"text": 3}', "texts.jsonl: line 1: text must be a string"),
        ('{"prompt": "w5"}', 'texts.jsonl: line 1: a line must be an object with "text"'),
        ('{"text": "w5 w6"}\n{"text": " "}\n{"text": "w7"}', "the texts hold 3 tokens, too few"),
    ):
        texts.write_text(text)
        assert words in train(checkpoint, output, "--texts", texts)
    assert "cannot read texts" in train(checkpoint, output, "--texts", tmp_path / "none")
    left = [each for each in tmp_path.rglob("*") if each.suffix in (".tmp", ".pt")]
    assert not left
    assert not list(tmp_path.rglob("draft.safetensors"))
