"""Healed drafts: deltas beside rounded weights, checks of their file, and unchanged texts."""

from dataclasses import replace

import pytest
import torch
from kinds import RANK, deltas
from models import FEW_FAMILIES, prompt
from models import tiny_model as tiny

import layerskip
from layerskip import LowPrecision, SkipConfig
from layerskip.checkpoints import load
from layerskip.generation import generate
from layerskip.model.blocks import Heads
from layerskip.model.native import NativeBlock
from layerskip.model.rounded import copies_of, rounded
from layerskip.model.sublayers import Sublayers
from layerskip.model.trained import save_trained


def healed(model, folder, *, bits=8, size=0.05):
    """A healed draft of a tiny model that skips layer 3 and is exact up to layer 1."""
    low = LowPrecision(bits=bits, attention=(1, 2, 4, 5), mlp=(1, 2, 4, 5), head=False)
    folder.mkdir(exist_ok=True)
    trained = save_trained(folder / "draft.safetensors", deltas(model, size), "healed", model)
    return SkipConfig(attention=(3,), mlp=(3,), low=low, trained=trained).resolve(6)


def logits(model, skip, ids):
    """A draft's logits over a prompt, (B, T, V)."""
    embedded, step = model.first_pass(ids)
    hidden = model.run(embedded, step, range(skip.shared_prefix()))
    return model.backend.run(hidden, step, model.weights.blocks(skip))


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("execution", ["modules", "fused"])
@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_a_healed_sublayer_has_its_rounded_weights_and_deltas(bits, family, execution, tmp_path):
    """In 8 bits, the sum of weight and delta is rounded; in 4 bits, only the weight is."""
    model, other, ids = tiny(family), tiny(family), prompt(9)
    skip, found = healed(model, tmp_path, bits=bits), deltas(model)
    with torch.no_grad():
        for name, linear in Sublayers(other).weights.linears(skip.rounded()):
            delta = found[f"{name}.b"].double() @ found[f"{name}.a"].double()
            before, behind = (delta, 0) if bits == 8 else (0, delta)
            wide = rounded(linear.weight + before, bits).widened(torch.float64)
            linear.weight.copy_(wide + behind)
    got = logits(Sublayers(model, execution), skip, ids)
    want = logits(Sublayers(other, execution), replace(skip, low=None, trained=None), ids)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    unhealed = logits(Sublayers(model, execution), replace(skip, trained=None), ids)
    assert (got - unhealed).abs().max() > 0.01  # healing has an effect
    assert skip.shared_prefix() == 2


def test_copies_are_shared_and_what_they_take_is_told(tmp_path):
    model = tiny("llama")
    opened = Sublayers(model, "fused")
    four, eight = (healed(model, tmp_path / str(bits), bits=bits) for bits in (4, 8))
    plain = replace(four, trained=None)
    opened.weights.blocks(plain)
    once = copies_of(model).nbytes
    opened.weights.blocks(four)  # deltas share the copies
    assert copies_of(model).nbytes == once == opened.weights.nbytes(plain)
    sizes = [linear.weight.shape for _, linear in opened.weights.linears(four.rounded())]
    of_deltas = sum(RANK * (rows + columns) * 8 for rows, columns in sizes)  # float64
    assert opened.weights.nbytes(four) == once + of_deltas
    for _ in range(2):  # in 8 bits a healed draft has its own copies, made once
        Sublayers(model, "fused").weights.blocks(eight)
        assert copies_of(model).nbytes == once + opened.weights.nbytes(eight)
    assert opened.weights.nbytes(eight) == opened.weights.nbytes(replace(eight, trained=None))


@torch.no_grad()
def test_native_passes_heal_as_lean_ones_do(built, tmp_path):
    model, ids = tiny("llama", dtype=torch.float32), prompt(9)
    opened = Sublayers(model, "native")
    four = healed(model, tmp_path, bits=4, size=0.3)
    assert all(isinstance(block, NativeBlock) for block in opened.weights.blocks(four))
    skip = healed(model, tmp_path, size=0.3)
    healthy = logits(Sublayers(model, "fused"), skip, ids)
    sick = logits(Sublayers(model, "fused"), replace(skip, trained=None), ids)
    off = (logits(opened, skip, ids) - healthy).abs().max()
    # native passes also round inputs
    assert off < 0.2 * (sick - healthy).abs().max()


@torch.no_grad()
def test_modules_beside_rounded_sublayers_heal_nothing(tmp_path):
    model, ids = tiny("llama"), prompt(5)
    skip = healed(model, tmp_path)
    assert skip.trained is not None
    heads = Heads(Sublayers(model), 2).state_dict()
    beside = replace(
        skip, trained=save_trained(tmp_path / "heads.safetensors", heads, "heads", model)
    )
    got, want = (
        logits(Sublayers(model, "fused"), each, ids)
        for each in (beside, replace(skip, trained=None))
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.9.mlp.up_proj.a": torch.ones(3, 32)}, "a weight 'layers.9.mlp.up_proj' that"),
        ({"layers.1.mlp.up_proj.b": torch.ones(47, 3)}, r"up_proj do not fit a weight \(48, 32\)"),
        ({"layers.1.mlp.up_proj.a": torch.ones(4, 32)}, r"up_proj do not fit a weight \(48, 32\)"),
    ],
)
def test_deltas_that_fit_no_weight_are_refused(change, message, tmp_path):
    model = tiny("llama")
    path = tmp_path / "draft.safetensors"
    trained = save_trained(path, deltas(model) | change, "healed", model)
    skip = SkipConfig(low=LowPrecision(), trained=trained)
    with pytest.raises(ValueError, match=message):
        generate(model, prompt(5), skip=skip, max_new_tokens=2)


def test_the_shipped_draft_is_its_models_and_small():
    folder = layerskip.shipped("demo-gemma2")
    assert (folder / "draft.safetensors").stat().st_size < 12_000_000
    model = load("demo-gemma2").model
    ids = torch.tensor([[5, 9, 3, 44]])
    how = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_k": 0}
    how |= {"seed": 1, "execution": "fused"}
    plain = generate(model, ids, enabled=False, **how)
    skip = folder / "healed.json"
    found = generate(model, ids, skip=skip, lookup=False, controller="fixed", **how)
    assert torch.equal(found.sequences, plain.sequences)
    assert found.stats is not None
    assert found.stats.num_accepted_tokens > 0.7 * found.stats.num_draft_tokens
