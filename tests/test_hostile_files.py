"""Hostile files and token ids: one line, exit code 2, no hang, and little memory."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint
from commands import PROMPT, refused
from kinds import block_of, skip_of
from models import prompt, tiny_model
from safetensors.torch import save

import layerskip
from layerskip import Lookup, SkipConfig, Trained, fingerprint, load
from layerskip.files.schema import parse_characters
from layerskip.replay.trace import take_trace
from layerskip.texts.prompts import read_prompts


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(str(checkpoint)).model


def make(path, kind):
    """Put something in a file's place."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)  # a sparse file that takes no space


NO_FILES = {
    "pipe": "it is a pipe or a device",
    "device": "it is a pipe or a device",
    "folder": "Is a directory",
    "huge": "it has 1,099,511,627,776 bytes",
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_of_numbers_is_not_read(kind, checkpoint, model, tmp_path):
    skip = skip_of("exit-block", model, tmp_path)
    assert skip.trained is not None
    skip.save(tmp_path / "skip.json")
    ask = ("generate", checkpoint, "--prompt", PROMPT, "--skip", tmp_path / "skip.json")
    weights = Path(skip.trained.weights)
    make(weights, kind)
    assert f"cannot read the trained draft {weights}: {NO_FILES[kind]}" in refused(*ask)
    make(tmp_path / "skip.json", kind)
    reason = "No such file or directory" if kind == "folder" else NO_FILES[kind]  # in that folder
    assert f"skip.json: {reason}" in refused(*ask)
    make(tmp_path / "train.json", kind)
    line = refused("report", tmp_path / "train.json", "--output", tmp_path / "pages")
    assert ("holds none of these" if kind == "folder" else NO_FILES[kind]) in line


@pytest.mark.parametrize("kind", NO_FILES)
def test_a_report_on_a_folder_passes_over_what_is_no_file(kind, tmp_path):
    make(tmp_path / "run.jsonl", kind)
    line = refused("report", tmp_path, "--output", tmp_path / "pages")
    assert line.startswith(f"the folder {tmp_path} holds none of these")


def test_a_checkpoint_with_a_pipe_is_not_read(tmp_path):
    folder = save_checkpoint(tmp_path / "model")
    make(folder / "model.safetensors", "pipe")
    line = refused("generate", folder, "--prompt", PROMPT)
    assert "model.safetensors is not a regular file" in line


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.full((32, 64), float("nan")), "heads.0.weight is not finite"),
        (torch.full((32, 64), float("-inf")), "heads.0.weight is not finite"),
        (torch.ones(32, 64, dtype=torch.int32), "heads.0.weight is of dtype int32"),
        (torch.ones(32, 64, dtype=torch.bool), "heads.0.weight is of dtype bool"),
        (torch.ones(32, 64, dtype=torch.complex64), "heads.0.weight is of dtype complex64"),
        (torch.ones(32), "1 tensors are missing, unknown or of another shape, heads.0.weight"),
        (torch.tensor([1.0, float("nan")]), "tokens is not finite"),
    ],
)
def test_modules_that_are_no_numbers(value, words, checkpoint, model, tmp_path):
    path = tmp_path / "draft.safetensors"
    name = "tokens" if "tokens" in words else "heads.0.weight"
    data = save(block_of("heads", model).state_dict() | {name: value})
    path.write_bytes(data)
    number = hashlib.sha256(data).hexdigest()
    trained = Trained(kind="heads", weights=str(path), hash=number, base=fingerprint(model))
    skip = SkipConfig(trained=trained)
    with pytest.raises(ValueError, match=words):
        layerskip.generate(model, prompt(5), skip=skip, max_new_tokens=2)
    skip.save(tmp_path / "skip.json")
    flags = ("--prompt", PROMPT, "--skip", tmp_path / "skip.json")
    assert words in refused("generate", checkpoint, *flags)


HALVES = (rb'{"prompt": "a \ud800 b"}', rb'{"\udfff": 1}', b'"\xed\xa0\x80"', rb'["\uDC00\uD800"]')


@pytest.mark.parametrize("data", HALVES)
def test_halves_of_surrogate_pairs_are_no_json(data, tmp_path):
    with pytest.raises(ValueError, match=r"surrogate pair|not UTF-8"):
        parse_characters(data)
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"line 1: .*surrogate pair|not UTF-8"):
        read_prompts(path)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"surrogate pair|not UTF-8"):
        SkipConfig.load(path)


def test_whole_pairs_are_json():
    assert parse_characters(rb'{"\ud83d\ude00": "\ud83d\ude00 \\ud800"}') == {"😀": "😀 \\ud800"}
    assert parse_characters(json.dumps("😀", ensure_ascii=False)) == "😀"
    assert parse_characters("\ufeff[1]".encode()) == [1]


def test_prompts_that_are_no_text(checkpoint, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(HALVES[0])
    message = {"role": "user", "content": "\udcff"}
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [message]}))
    for flags in (("--prompt-file", path), ("--prompt-file", chat), ("--prompt", "caf\udce9")):
        assert "half of a surrogate pair" in refused("generate", checkpoint, *flags)
    make(tmp_path / "endless", "device")
    for flag in ("--prompt-file", "--lookup-file"):
        ask = (*(("--prompt", PROMPT) if flag == "--lookup-file" else ()), flag)
        line = refused("generate", checkpoint, *ask, tmp_path / "endless")
        assert "it has more than 268,435,456 bytes" in line


@pytest.mark.parametrize("token", [97, -1, 2**40])
def test_token_ids_outside_of_the_vocabulary(token):
    model = tiny_model("llama")
    ids = prompt(5)
    ids[0, 2] = token
    words = rf"token ids must be in 0\.\.96 for this model, got {token}"
    decoding = layerskip.LayerSkipDecoding(SkipConfig.early_exit(2))
    for ask in (
        lambda: layerskip.generate(model, ids, max_new_tokens=2),
        lambda: layerskip.Session(model).generate(ids, max_new_tokens=2),
        lambda: list(layerskip.decode(model, ids, max_new_tokens=2)),
        lambda: model.generate(ids, custom_generate=decoding, max_new_tokens=2),
        lambda: take_trace(model, [ids], max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    for lookup in (Lookup([[3, 4]]), Lookup([[3, 96]])):
        layerskip.generate(model, prompt(5), lookup=lookup, max_new_tokens=2)
    for texts in ("words", ["words"], [3, 4], [[1.5]]):
        with pytest.raises(TypeError, match="must be a list of token ids, got"):
            Lookup(texts)
    with pytest.raises(ValueError, match=rf"token ids.*, got {token}"):
        layerskip.generate(model, prompt(5), lookup=Lookup([[3, token]]), max_new_tokens=2)
    with pytest.raises(TypeError, match=r"must be int64 or int32, got a tensor of torch\.float"):
        layerskip.generate(model, prompt(5).float(), max_new_tokens=2)
