"""Modules trained to draft: their arithmetic over whole texts, and token by token."""

import pytest
import torch
from models import FAMILIES, lively_model, prompt, tiny_model

from layerskip.cache.rows import RowCache
from layerskip.model.draft_modules import Heads
from layerskip.model.opened_model import Pass
from layerskip.model.opened_models import Sublayers
from layerskip.research.blocks import ExitBlock, Layer, Streams

COUNT = 13  # more than a sliding window


def states(model, ids):
    """Hidden states of whole texts before and after every layer, (B, T, H) each."""
    embedded, step = model.first_pass(ids)
    found = [embedded]
    for layer in range(model.num_layers):
        found.append(model.run(found[-1], step, (2 * layer, 2 * layer + 1)))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_begins_with_one_of_the_models_computes_what_it_does(family):
    model = Sublayers(tiny_model(family), "modules")
    last = max(i for i, kind in enumerate(model.layer_types) if kind == Layer(model).kind)
    known = states(model, prompt(COUNT, rows=2))
    own = Layer(model)
    torch.testing.assert_close(own(known[last]), known[last + 1], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(own(known[0]), known[1])


@pytest.mark.parametrize("execution", ["modules", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_with_a_cache_it_computes_what_training_does(family, execution):
    model = Sublayers(lively_model(family), execution)
    layer, hidden = Layer(model), states(model, prompt(COUNT, rows=2))[-2]
    want = layer(hidden)
    cache = RowCache(2, COUNT, (layer.window,))
    rotary = model.rotary(COUNT, COUNT)
    blocks = layer.sublayers(model.backend)
    near = 1e-6 if execution == "modules" else 1e-5  # norms use float32
    with torch.no_grad():
        for first, count in ((0, 4), (4, 1), (5, 3), (8, 1), (9, 4)):
            cache.place([first] * 2, count)
            some = hidden[:, first : first + count]
            got = model.backend.run(some, Pass(model, cache, rotary), blocks)
            wanted = want[:, first : first + count]
            torch.testing.assert_close(got, wanted, rtol=near, atol=near)


def test_nothing_of_the_model_is_trained_or_shared():
    model = tiny_model("llama", dtype=torch.float32)
    model.requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    opened = Sublayers(model)
    features, embedded = torch.randn(2, 2, COUNT, model.config.hidden_size).unbind()
    for block in (ExitBlock(opened), Heads(opened), Streams(opened)):
        given = (features,) if isinstance(block, ExitBlock) else (features, embedded)
        optimizer = torch.optim.SGD(block.parameters(), lr=1.0)
        # any function of the head's logits will do as a loss
        model.lm_head(model.model.norm(block(*given))).square().mean().backward()
        assert all(weight.grad is not None for weight in block.parameters())
        optimizer.step()
        pointers = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
        assert not pointers & {w.untyped_storage().data_ptr() for w in model.parameters()}
    for name, weight in model.named_parameters():
        assert weight.grad is None
        assert torch.equal(weight, before[name])


def test_every_token_sees_only_what_stands_before_it():
    model = Sublayers(lively_model("gemma3"))
    features, embedded = torch.randn(2, 1, COUNT, 32, dtype=torch.float64).unbind()
    blocks = {"exit": ExitBlock(model), "heads": Heads(model, 3), "streams": Streams(model, 3)}
    # new heads pass their features on, as the model itself would
    assert torch.equal(blocks["heads"](features, embedded)[:, :, 1], features)
    for name, block in blocks.items():
        for weight in block.parameters():
            weight.data.add_(torch.randn_like(weight) / 20)
        given = (features,) if name == "exit" else (features, embedded)
        whole = block(*given)
        assert whole.shape == ((1, COUNT, 32) if name == "exit" else (1, COUNT, 3, 32))
        half = block(*(each[:, :6] for each in given))
        torch.testing.assert_close(whole[:, :6], half, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["gemma3", "mistral", "qwen2"])
def test_streams_see_the_text_before_them_and_each_other(family):
    """One pass over a text equals passes of one token, each followed by its temporary streams."""
    model = Sublayers(lively_model(family), "modules")
    block = Streams(model, 4)
    for weight in block.parameters():
        weight.data.add_(torch.randn_like(weight) / 5)
    features, embedded = torch.randn(2, 1, COUNT, 32, dtype=torch.float64).unbind()
    whole = block(features, embedded)  # (1, T, K, H)
    first = block.layer(block.join(features, embedded))
    torch.testing.assert_close(whole[:, :, 0], first, rtol=1e-9, atol=1e-9)
    cache = RowCache(1, COUNT + 4, (block.layer.window,))
    rotary, blocks = model.rotary(COUNT + 4, COUNT + 4), block.layer.sublayers(model.backend)
    fed = block.fed(features, embedded)  # (1, T, K, H)
    for place in range(COUNT):
        cache.place([place], 4)
        got = model.backend.run(fed[:, place], Pass(model, cache, rotary), blocks)
        torch.testing.assert_close(got, whole[:, place], rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        block.ahead.weight[0] += 1
    other = block(features, embedded)
    torch.testing.assert_close(other[:, :, 0], first, rtol=1e-9, atol=1e-9)
    for later in (1, 2, 3):  # later streams see stream 1
        assert not torch.allclose(other[:, :, later], whole[:, :, later])
