"""Tests of what the opened model says of itself; its arithmetic is tested by parity."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import prompt, tiny_model

from layerskip import LayerSkipDecoding, SkipConfig, fingerprint
from layerskip.costs.speculation import CostTable
from layerskip.model.sublayers import Sublayers, embed

COSTS = CostTable(0.2, (1.0, 1.1))


def test_a_fingerprint_is_the_same_in_every_dtype_and_folder() -> None:
    model = tiny_model("gemma2", dtype=torch.bfloat16)
    found = fingerprint(model)
    assert len(found) == 16
    model.name_or_path = "elsewhere"
    assert fingerprint(model.double()) == found


def test_fingerprints_tell_checkpoints_and_architectures_apart() -> None:
    one = tiny_model("llama")
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.norm.weight[3] += 0.1
    found = {fingerprint(model) for model in (one, other, tiny_model("mistral"))}
    assert len(found) == 3


@pytest.mark.parametrize("own", [True, False])
def test_the_hash_decides_whether_a_skip_config_is_foreign(own: bool) -> None:
    model = tiny_model("llama")
    model_hash = fingerprint(model) if own else "0123456789abcdef"
    skip = SkipConfig(attention=(3,), model="some/name", model_hash=model_hash)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ids = prompt(5)
        model.generate(ids, custom_generate=LayerSkipDecoding(skip, costs=COSTS), max_new_tokens=4)
    assert [str(w.message).startswith("this skip config") for w in caught] == [True] * (not own)


def test_execution_is_told() -> None:
    model = tiny_model("llama")
    assert Sublayers(model).execution == "fused"
    assert Sublayers(model, execution="modules").execution == "modules"
    with pytest.raises(ValueError, match="auto, modules, fused, compiled, got 'graphs'"):
        Sublayers(model, execution="graphs")


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_a_gemmas_embedding_is_scaled_wherever_the_library_does_it(family: str) -> None:
    # early versions 5 of transformers scale in the decoder, behind a plain embedding module
    model = tiny_model(family, dtype=torch.float32)
    decoder = model.get_submodule("model")
    tokens = prompt(5)
    new = embed(decoder, tokens)
    plain = torch.nn.Embedding(*decoder.embed_tokens.weight.shape, dtype=model.dtype)
    plain.weight = decoder.embed_tokens.weight
    decoder.embed_tokens = plain
    assert torch.equal(embed(decoder, tokens), new)
    assert not torch.equal(plain(tokens), new)


def test_a_llamas_embedding_is_not_scaled() -> None:
    decoder = tiny_model("llama").get_submodule("model")
    assert torch.equal(embed(decoder, prompt(5)), decoder.embed_tokens(prompt(5)))
