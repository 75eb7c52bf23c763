"""Joined weights and products: the same model, the same tokens, and everything given back."""

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from agreement import assert_agree
from cost_records import cost_record
from models import FEW_FAMILIES, prompt, side_by_side, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import layerskip
from layerskip import LayerSkipDecoding, SkipConfig, joined
from layerskip.cli.flags import Loading
from layerskip.cli.opening import open_model, open_passes
from layerskip.cli.terminal import Talk
from layerskip.model import products
from layerskip.model.joined import groups, part, together
from layerskip.model.sublayers import Sublayers
from layerskip.search import search

SKIP = SkipConfig.early_exit(2)


def storages(model: nn.Module) -> int:
    """Bytes of all storages that the parameters lie in, and of the parameters themselves."""
    found = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in found.values())


def tensors(group: Any) -> list[list[Any]]:
    kinds = [[linear.weight for linear in group], [linear.bias for linear in group]]
    return [parts for parts in kinds if parts[0] is not None]


def places(model: nn.Module) -> int:
    return len({p.untyped_storage().data_ptr() for p in model.parameters()})


def decode(model: Any, decoding: Any) -> list[int]:
    tokens = model.generate(
        prompt(9), custom_generate=decoding, do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    return tokens[0].tolist()


@pytest.mark.parametrize("way", [products.compilable, products.onednn])
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_joined_weights_compute_the_same_in_every_way(family, way, monkeypatch):
    dtype = torch.float64
    if way is products.onednn:
        dtype = torch.float32
        if not products._has_onednn():
            pytest.skip("this torch has no oneDNN")
    model = tiny_model(family, dtype=dtype)
    modules = Sublayers(model, "modules")
    monkeypatch.setattr("layerskip.model.fused.best_linear", lambda _: way)
    with joined(model):
        found = list(groups(model))
        assert len(found) == (0 if family == "phi3" else 2 * len(model.model.layers))
        for group in found:
            for parts in tensors(group):
                assert together(parts).shape[0] == sum(map(len, parts))
        lean = Sublayers(model)
        for rows, ragged in ((1, False), (3, False), (3, True)):
            assert_agree(modules, lean, rows=rows, ragged=ragged)
    for group in found:
        assert all(together(parts) is None for parts in tensors(group))
    assert_agree(modules, Sublayers(model))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_a_joined_model_is_the_same_model_and_is_given_back(family, tmp_path):
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
    decoding = LayerSkipDecoding(SKIP)
    with joined(model):
        assert decode(model, decoding) == want.tolist()
        assert places(model) < places_before
        pointers = [p.data_ptr() for p in model.parameters()]
        with joined(model):
            assert decode(model, decoding) == want.tolist()
        assert [p.data_ptr() for p in model.parameters()] == pointers  # the outer one holds them
        unchanged()
        saved("during")
        assert places(copy.deepcopy(model)) == places_before
    assert places(model) == places_before
    unchanged()
    saved("after")
    assert decode(model, decoding) == want.tolist()
    with pytest.raises(ValueError, match="more calls of part than of join"):
        part(model)


@pytest.mark.parametrize("execution", ["fused", "modules"])
def test_commands_join_what_fused_passes_read(execution):
    loading = Loading(device="cpu", execution=execution)
    loaded = open_model(loading, Talk(quiet=True))
    assert gc.isenabled()  # turned off while much is imported
    with open_passes(loaded, loading, Talk(quiet=True)):
        found = list(groups(loaded.model))
        assert len(found) == 2 * len(loaded.model.model.layers)
        for group in found:
            one = together([linear.weight for linear in group]) is not None
            assert one == (execution == "fused")


def test_threads_may_hold_one_model_joined_and_errors_part_it():
    model = tiny_model("llama")
    count = places(model)
    barrier = threading.Barrier(4)
    found = []

    def enter() -> None:
        with joined(model):
            barrier.wait(60)
            found.append(places(model))
            barrier.wait(60)

    with pytest.raises(RuntimeError, match="broken"), joined(model):  # noqa: PT012
        assert places(model) < count
        raise RuntimeError("broken")
    assert places(model) == count
    side_by_side(*4 * [enter])
    assert len(found) == 4
    assert max(found) < count
    assert places(model) == count


@pytest.mark.parametrize("inside", ["join", "part", "both"])
def test_inference_mode_leaves_parameters_that_can_be_trained(inside):
    model = tiny_model("llama")
    context = joined(model)
    with torch.inference_mode(inside != "part"):
        context.__enter__()
    with torch.inference_mode(inside != "join"):
        context.__exit__(None, None, None)
    assert not any(p.is_inference() for p in model.parameters())
    model.train()
    model(prompt(9), labels=prompt(9)).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


class Packed(torch.Tensor):
    """A quantised weight: a tensor without a storage of its own."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0])
        raise NotImplementedError(func)


def test_weights_quantised_while_joined_are_left_alone():
    model = tiny_model("llama")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    packed = nn.Parameter(Packed(attention.k_proj.weight.data), requires_grad=False)
    mlp_kept = mlp.up_proj.weight
    with joined(model):
        attention.k_proj.weight = packed
        mlp.gate_proj = nn.Identity()
    assert attention.k_proj.weight is packed
    assert mlp.up_proj.weight is mlp_kept
    for weight in (attention.q_proj.weight, attention.v_proj.weight, mlp_kept):
        assert weight.untyped_storage().nbytes() == weight.nbytes
    with joined(model):  # what is quantised already
        assert attention.q_proj.weight.untyped_storage().nbytes() == attention.q_proj.weight.nbytes


def test_no_door_moves_weights():
    model = tiny_model("llama")
    pointers = [p.data_ptr() for p in model.parameters()]
    decode(model, LayerSkipDecoding(SKIP))
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
        assert together(parts) is None
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
        return (products.onednn,) * 5

    monkeypatch.setattr(products, "_measure", measure)
    monkeypatch.setattr(products, "_fastest", {})
    monkeypatch.setattr(products, "_has_onednn", lambda: True)
    small = [torch.ones(8, 8)] * 4
    large = [torch.ones(512, 512)] * 12  # 12 MiB
    assert products.best_linear(small) is products.plain
    assert products.best_linear([m.bfloat16() for m in large * 2]) is products.plain
    assert asked == []
    assert products.best_linear(large) is products.onednn
    assert products.best_linear([m + 1 for m in large]) is products.onednn
    assert asked == [12]  # once for all models of these shapes


def test_some_matrices_of_every_shape_are_timed(monkeypatch):
    monkeypatch.setattr(products, "_SAMPLE", 100)
    monkeypatch.setattr(products, "_LARGEST_TIMED", 160)
    matrices = [torch.ones(4, 4), torch.ones(5, 4), torch.ones(30, 4)] * 4
    sizes = [len(piece) for piece in products._pieces(matrices)]
    assert sizes == [4, 5, 10, 4, 5]  # of 64, 80 and (all rows) 480 bytes


@pytest.mark.parametrize("way", ["plain", "onednn"])
def test_products_are_judged_by_the_clock(monkeypatch, way):
    """One way takes 2 seconds, the others 3, but for the counts where all take the same."""
    clock = {"now": 0.0, "other work": 10.0}

    def taking_time(name: str) -> Any:
        def product(x: Tensor) -> Tensor:
            clock["now"] += 2.0 if name == way and x.shape[1] != 4 else 3.0
            if clock["now"] > clock["other work"]:  # now and then a pass takes far longer
                clock["now"] += 50.0
                clock["other work"] = clock["now"] + 17.0
            return x

        return lambda weight, bias: product

    for name in ("plain", "onednn"):
        monkeypatch.setattr(products, name, taking_time(name))
    monkeypatch.setattr(products.time, "perf_counter", lambda: clock["now"])
    chosen = products._measure([torch.ones(4, 4)])
    quick = getattr(products, way)
    assert chosen == (quick, quick, products.plain, quick, quick)


@torch.no_grad()
@pytest.mark.parametrize("bias", [None, torch.randn(5)])
def test_every_way_to_take_a_product_is_the_linear(bias):
    assert products._has_onednn() == (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    ways = [products.plain, products.compilable] + [products.onednn] * products._has_onednn()
    weight = torch.randn(5, 3)
    for count in (1, 2, 3, 4, 5, 8, 9, 17, 40):
        x = torch.randn(1, count, 3)
        want = nn.functional.linear(x, weight, bias)
        for way in ways:
            torch.testing.assert_close(way(weight, bias)(x), want)


def test_ways_go_by_the_number_of_tokens():
    def way(name: str) -> Any:
        return lambda *_: lambda _: name

    function = products.by_count([way(name) for name in "abcde"], torch.ones(5, 3), None)
    found = "".join(function(torch.ones(1, count, 3)) for count in (*range(1, 18), 512))
    assert found == "abccdddd" + "e" * 10
    assert function(torch.ones(4, 2, 3)) == "d"  # rows count like tokens


def test_a_torch_without_onednn_is_no_error(monkeypatch):
    monkeypatch.setattr(products, "onednn", lambda *_: torch.ops.mkldnn.no_such_linear)
    assert products._has_onednn() is False
    assert products.best_linear([torch.ones(512, 512)] * 12) is products.plain
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert products._has_onednn() is False
