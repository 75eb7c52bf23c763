"""Joined and streamed weights: the same model, the same tokens, and everything given back."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cost_records import cost_record
from models import FEW_FAMILIES, prompt, tiny_model
from test_fused import assert_agree
from torch import nn
from transformers import AutoModelForCausalLM

import layerskip
from layerskip import LayerSkipDecoding, SkipConfig
from layerskip.model import weights
from layerskip.model.sublayers import Sublayers
from layerskip.search import search

SKIP = SkipConfig.early_exit(2)


@contextmanager
def joined(model: nn.Module) -> Iterator[None]:
    weights.hold(model)
    try:
        yield
    finally:
        weights.release(model)


def storages(model: nn.Module) -> int:
    """Bytes of all storages that the parameters lie in, and of the parameters themselves."""
    found = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in found.values())


def places(model: nn.Module) -> int:
    return len({p.untyped_storage().data_ptr() for p in model.parameters()})


def decode(model: Any, decoding: Any) -> list[int]:
    tokens = model.generate(
        prompt(9), custom_generate=decoding, do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    return tokens[0].tolist()


@pytest.mark.parametrize("way", [weights.streamed, weights.onednn])
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_joined_weights_compute_the_same_in_every_way(family, way, monkeypatch):
    dtype = torch.float64
    if way is weights.onednn:
        dtype = torch.float32
        if not weights._has_onednn():
            pytest.skip("this torch has no oneDNN")
    model = tiny_model(family, dtype=dtype)
    modules = Sublayers(model, "modules")
    monkeypatch.setattr("layerskip.model.sublayers.best_linear", lambda _: way)
    with joined(model):
        groups = list(weights._groups(model))
        assert len(groups) == (0 if family == "phi3" else 2 * len(model.model.layers))
        for group in groups:
            for parts in weights._tensors(group):
                assert weights.together(parts).shape[0] == sum(map(len, parts))
        lean = Sublayers(model)
        for rows, ragged in ((1, False), (3, False), (3, True)):
            assert_agree(modules, lean, rows=rows, ragged=ragged)
    for group in groups:
        assert all(weights.together(parts) is None for parts in weights._tensors(group))
    assert_agree(modules, Sublayers(model))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_a_decoding_object_joins_once_and_gives_back(family, tmp_path):
    model = tiny_model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bytes_before, places_before = storages(model), places(model)
    identities = [id(p) for p in model.parameters()]

    def unchanged() -> None:
        assert [id(p) for p in model.parameters()] == identities
        assert storages(model) == bytes_before
        state = model.state_dict()
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], value) for name, value in before.items())

    def saved(name: str) -> None:
        model.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").state_dict()
        assert all(torch.equal(again[key], value) for key, value in before.items())

    want = model.generate(prompt(9), do_sample=False, max_new_tokens=12, pad_token_id=0)[0]
    saved("before")
    with LayerSkipDecoding(SKIP) as decoding, LayerSkipDecoding(SKIP) as second:
        assert decode(model, decoding) == want.tolist()
        assert places(model) < places_before
        pointers = [p.data_ptr() for p in model.parameters()]
        assert decode(model, decoding) == decode(model, second) == want.tolist()
        assert [p.data_ptr() for p in model.parameters()] == pointers
        unchanged()
        saved("during")
        second.close()
        assert [p.data_ptr() for p in model.parameters()] == pointers  # the first still holds them
    assert places(model) == places_before
    unchanged()
    saved("after")
    assert decode(model, LayerSkipDecoding(SKIP)) == want.tolist()
    gc.collect()
    assert places(model) == places_before  # so does the end of an object


def test_weights_are_parted_after_an_error():
    model = tiny_model("llama")
    count = places(model)

    def broken(_: Any, __: Any) -> Any:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), LayerSkipDecoding(SKIP) as decoding:
        model.generate(
            prompt(5), custom_generate=decoding, max_new_tokens=4, logits_processor=[broken]
        )
    assert places(model) == count


def test_what_need_not_be_joined_is_left_alone():
    model = tiny_model("llama")
    pointers = [p.data_ptr() for p in model.parameters()]
    decode(model, LayerSkipDecoding(SKIP, join=False))
    decode(model, LayerSkipDecoding(SKIP, execution="modules"))
    layerskip.generate(model, prompt(5), skip=SKIP, max_new_tokens=4)
    list(layerskip.decode(model, prompt(5), skip=SKIP, max_new_tokens=4))
    search(model, [prompt(5)[0]], max_new_tokens=4, trials=2, cost=cost_record())
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_shared_storages_are_not_joined():
    """Weights of which something else is a view would part from it."""
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    whole = torch.cat([attention.q_proj.weight.data, attention.k_proj.weight.data])
    attention.q_proj.weight.data = whole[: len(attention.q_proj.weight)]
    with joined(model):
        parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        assert weights.together(parts) is None
        assert attention.q_proj.weight.untyped_storage().data_ptr() == whole.data_ptr()
        assert_agree(Sublayers(model, "modules"), Sublayers(model))


def test_weights_changed_while_joined_count():
    model = tiny_model("llama")
    with joined(model):
        lean = Sublayers(model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        assert_agree(Sublayers(model, "modules"), lean)
        model.float()  # every parameter moves: what lies together is looked at anew
        assert_agree(Sublayers(model, "modules"), Sublayers(model))


def test_products_are_chosen_once_where_there_is_a_choice(monkeypatch):
    asked = []

    def measure(matrices: Any) -> Any:
        asked.append(len(matrices))
        return (weights.streamed,) * 5

    monkeypatch.setattr(weights, "_measure", measure)
    monkeypatch.setattr(weights, "_fastest", {})
    small = [torch.ones(8, 8)] * 4
    large = [torch.ones(512, 512)] * 12  # 12 MiB
    assert weights.best_linear(small) is weights.plain
    assert weights.best_linear([m.bfloat16() for m in large * 2]) is weights.plain
    assert asked == []
    assert weights.best_linear(large) is weights.streamed
    assert weights.best_linear([m + 1 for m in large]) is weights.streamed
    assert asked == [12]  # once for all models of these shapes


def test_some_matrices_of_every_shape_are_timed(monkeypatch):
    monkeypatch.setattr(weights, "_SAMPLE", 100)
    monkeypatch.setattr(weights, "_LARGEST_TIMED", 160)
    matrices = [torch.ones(4, 4), torch.ones(5, 4), torch.ones(30, 4)] * 4
    sizes = [len(piece) for piece in weights._pieces(matrices)]
    assert sizes == [4, 5, 10, 4, 5]  # of 64, 80 and (all rows) 480 bytes


@pytest.mark.parametrize("way", ["plain", "streamed", "onednn"])
def test_products_are_judged_by_the_clock(monkeypatch, way):
    """One way takes 2 seconds, the others 3, but for the counts where all take the same."""
    ways = [weights.plain, weights.streamed, weights.onednn]
    monkeypatch.setattr(weights, "_has_onednn", lambda: True)
    disturbed = 0
    readings = [0.0]
    for count in weights._COUNTS:
        for _ in range(weights._SWEEPS):
            for each in ways:
                quick = each.__name__ == way and count != 4
                disturbed += 1  # now and then a pass takes far longer
                seconds = 50.0 if disturbed % 7 == 0 else 2.0 if quick else 3.0
                readings += [readings[-1], readings[-1] + seconds]
    monkeypatch.setattr(weights.time, "perf_counter", iter(readings[1:]).__next__)
    chosen = weights._measure([torch.ones(4, 4)])
    quick = getattr(weights, way)
    assert chosen == (quick, quick, weights.plain, quick, quick)


@torch.no_grad()
@pytest.mark.parametrize("bias", [None, torch.randn(5)])
def test_every_way_to_take_a_product_is_the_linear(bias):
    assert weights._has_onednn() == (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    ways = [weights.plain, weights.streamed] + [weights.onednn] * weights._has_onednn()
    weight = torch.randn(5, 3)
    for count in (1, 2, 3, 4, 5, 8, 9, 17, 40):
        x = torch.randn(1, count, 3)
        want = nn.functional.linear(x, weight, bias)
        for way in ways:
            torch.testing.assert_close(way(weight, bias)(x), want)


def test_ways_go_by_the_number_of_tokens():
    def way(name: str) -> Any:
        return lambda *_: lambda _: name

    function = weights.by_count([way(name) for name in "abcde"], torch.ones(5, 3), None)
    found = "".join(function(torch.ones(1, count, 3)) for count in (*range(1, 18), 512))
    assert found == "abccdddd" + "e" * 10
    assert function(torch.ones(4, 2, 3)) == "d"  # rows count like tokens


def test_a_torch_without_onednn_is_no_error(monkeypatch):
    monkeypatch.setattr(weights, "onednn", lambda *_: torch.ops.mkldnn.no_such_linear)
    assert weights._has_onednn() is False
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert weights._has_onednn() is False
