"""Real checkpoints: the same texts, up to near-ties, in every way to decode.

`make checkpoints` puts them in the folder `checkpoints`; without them, these tests are skipped.
"""

import json
from pathlib import Path

import pytest
import torch
from commands import document, run
from models import generated, ragged
from ties import partings

from layerskip import SkipConfig, generate
from layerskip.api.loading import encode, load
from layerskip.config.shipped import MADE, SPEC_BENCH, made
from layerskip.decoding.noise import stream_key
from layerskip.texts.prompts import read_prompts
from layerskip.weights.stored import stored_weights

pytestmark = pytest.mark.checkpoint

ROOT = Path(__file__).parents[1]
CHATS = {"smollm2": True, "gemma3-270m": False}
NEW_TOKENS = 32
TEMPERATURE = 0.8
RESOLUTION = 1e-4  # of scores, as in test_parity.py


@pytest.fixture(scope="module", params=MADE)
def loaded(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        try:
            made(request.param)
        except ValueError as error:
            pytest.skip(str(error))
        return load(request.param)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


PLAIN = {"enabled": False}
LEAST_LAYER = {"smollm2": 3, "gemma3-270m": 14}
"""The layer whose absence draws change least on."""


def questions(name):
    """Three prompts of Spec-Bench, from three categories."""
    chosen = read_prompts(SPEC_BENCH)[::12]
    return [prompt.as_chat() if CHATS[name] else prompt for prompt in chosen]


def test_drafted_texts_are_the_plain_ones_and_those_of_transformers(loaded):
    rows = [encode(loaded.tokenizer, prompt)[0] for prompt in questions(loaded.name)]
    ids, mask = ragged(tuple(map(len, rows)))  # (3, W) each
    for row, tokens in enumerate(rows):
        ids[row, mask[row].bool()] = tokens
    skip = SkipConfig(attention=[LEAST_LAYER[loaded.name]], mlp=[LEAST_LAYER[loaded.name]])
    how = {"skip": skip, "lookup": False, "controller": "fixed", "max_draft_length": 4}

    def decode(sample, settings):
        law = {"temperature": TEMPERATURE, "top_k": 0} if sample else {}
        law |= {"do_sample": sample, "max_new_tokens": NEW_TOKENS}
        return generated(loaded.model, (ids, mask), settings, **law)

    library, plain, drafted = decode(False, None), decode(False, PLAIN), decode(False, how)
    gaps = partings(loaded.model, mask, plain.sequences, library.sequences)
    gaps += partings(loaded.model, mask, drafted.sequences, library.sequences)
    plain, sampled = decode(True, PLAIN | {"seed": 4}), decode(True, how | {"seed": 4})
    keys = [stream_key(4, row) for row in range(len(rows))]
    noisy = {"keys": keys, "temperature": TEMPERATURE}
    gaps += partings(loaded.model, mask, sampled.sequences, plain.sequences, **noisy)
    assert max(gaps, default=0) < RESOLUTION
    assert len(gaps) <= 1  # of nine comparisons
    for output in (drafted, sampled):
        assert 0 < output.stats.num_accepted_tokens < output.stats.num_draft_tokens


def test_the_check_passes(loaded, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "2, 4,")))
    flags = ["--prompts", prompts, "--max-new-tokens", 12, "--json"]
    flags += ["--chat"] if CHATS[loaded.name] else []
    assert document(run("check", loaded.name, *flags))["passed"]


def test_an_answer_ends():
    if not (ROOT / "checkpoints/smollm2").is_dir():
        pytest.skip("no checkpoints/smollm2")
    question = "What is the capital of France?"
    found = document(run("generate", "smollm2", "--chat", "--prompt", question, "--json"))
    assert found["text"] == "The capital of France is Paris."
    assert found["token_ids"][-1] == load("smollm2").tokenizer.eos_token_id


def test_the_gguf_beside_a_folder_says_what_the_folder_says(loaded):
    assert loaded.folder is not None
    (file,) = loaded.folder.glob("*.gguf")
    packed = load(str(file))
    stored = sum(weight.bytes.nbytes for weight in stored_weights(packed.model))
    assert stored > 0.95 * (file.stat().st_size - 12e6)  # the rest are a vocabulary and norms
    for prompt in questions(loaded.name):
        ids = encode(loaded.tokenizer, prompt)
        assert torch.equal(encode(packed.tokenizer, prompt), ids)
        texts = [
            generate(model, ids, max_new_tokens=NEW_TOKENS, **how, **law).sequences
            for law in ({"do_sample": False}, {"do_sample": True, "seed": 5})
            for model in (loaded.model, packed.model)
            for how in (PLAIN, {})
        ]
        assert all(torch.equal(each, texts[0]) for each in texts[:4])
        assert all(torch.equal(each, texts[4]) for each in texts[4:])
