"""Healed drafts: deltas beside rounded weights, whose file is checked, and texts that stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import RANK, deltas
from models import FEW_FAMILIES, lively_model, prompt, ragged
from models import tiny_model as tiny
from torch import Tensor
from transformers import TemperatureLogitsWarper

import layerskip
from layerskip import LowPrecision, SkipConfig
from layerskip.checkpoints import load
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import make_controller
from layerskip.decoding.laws import Law
from layerskip.generation import generate
from layerskip.model import extension
from layerskip.model.blocks import Heads
from layerskip.model.native import NativeBlock
from layerskip.model.rounded import copies_of, rounded
from layerskip.model.sublayers import Pass, Sublayers
from layerskip.model.trained import save_trained
from layerskip.replay.drafts import replay
from layerskip.replay.simulation import SimulatedRound, simulate
from layerskip.replay.trace import take_trace


def healed(model: Any, folder: Path, *, bits: int = 8, size: float = 0.05) -> SkipConfig:
    """A healed draft of a tiny model without its layer 3, exact up to layer 1."""
    low = LowPrecision(bits=bits, attention=(1, 2, 4, 5), mlp=(1, 2, 4, 5), head=False)  # type: ignore[arg-type]
    trained = save_trained(folder / "draft.safetensors", deltas(model, size), "healed", model)
    return SkipConfig(attention=(3,), mlp=(3,), low=low, trained=trained).resolve(6)


def logits(model: Sublayers, skip: SkipConfig, ids: Tensor) -> Tensor:
    """Of a draft, over a prompt, (B, T, V)."""
    cache = model.new_cache(*ids.shape)
    cache.place([0] * ids.shape[0], ids.shape[1])
    step = Pass(model, cache, model.rotary(ids.shape[1], ids.shape[1]))
    hidden = model.run(model.embed(ids), step, range(skip.shared_prefix()))
    return model.backend.run(hidden, step, model.weights.blocks(skip))


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("execution", ["modules", "fused"])
@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_a_healed_sublayer_has_its_rounded_weights_and_deltas(
    bits: int, family: str, execution: str, tmp_path: Path
) -> None:
    """In 8 bits the sum of both is rounded, in 4 the weight alone."""
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
    assert (got - unhealed).abs().max() > 0.01  # healing does something
    assert skip.shared_prefix() == 2


def test_a_healed_sublayer_stays_native(tmp_path: Path) -> None:
    if extension.refusal():
        pytest.skip(str(extension.refusal()))
    model = tiny("llama").float()
    drafted = Sublayers(model, "native").weights.blocks(healed(model, tmp_path, bits=4))
    assert all(isinstance(block, NativeBlock) for block in drafted)


def test_memory_is_told_and_shared(tmp_path: Path) -> None:
    model = tiny("llama")
    skip = healed(model, tmp_path, bits=4)
    opened, plain = Sublayers(model, "fused"), replace(skip, trained=None)
    opened.weights.blocks(plain)
    once = copies_of(model).nbytes
    opened.weights.blocks(skip)
    assert copies_of(model).nbytes == once == opened.weights.nbytes(plain)
    sizes = [linear.weight.shape for _, linear in opened.weights.linears(skip.rounded())]
    of_deltas = sum(RANK * (rows + columns) * 8 for rows, columns in sizes)  # float64
    assert opened.weights.nbytes(skip) == once + of_deltas


def test_healed_copies_in_8_bits_take_what_others_do_and_are_made_once(tmp_path: Path) -> None:
    model = tiny("llama")
    skip = healed(model, tmp_path)
    opened = Sublayers(model, "fused")
    opened.weights.blocks(skip)
    once = copies_of(model).nbytes
    Sublayers(model, "fused").weights.blocks(skip)
    assert copies_of(model).nbytes == once == opened.weights.nbytes(skip)
    opened.weights.blocks(replace(skip, trained=None))  # whose copies are others
    assert copies_of(model).nbytes == 2 * once


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("execution", ["modules", "fused"])
def test_the_text_is_the_same_whatever_heals_the_draft(
    execution: str, do_sample: bool, tmp_path: Path
) -> None:
    model = lively_model("llama")
    ids, mask = ragged((5, 9, 2))
    inputs: dict[str, Any] = {"inputs": {"input_ids": ids, "attention_mask": mask}}
    inputs |= {"do_sample": do_sample, "max_new_tokens": 24}
    how: dict[str, Any] = {"seed": 3, "execution": execution, "controller": "fixed"}
    plain = generate(model, **inputs, **how, enabled=False)
    for size in (0.01, 3.0):  # deltas that hardly matter, and ones that make nonsense
        skip = healed(model, tmp_path, size=size)
        found = generate(model, **inputs, **how, skip=skip, max_draft_length=3)
        assert torch.equal(found.sequences, plain.sequences)
        assert found.stats is not None
        accepted = found.stats.num_accepted_tokens / found.stats.num_draft_tokens
        assert (accepted > 0.4) == (size < 1)


@pytest.mark.parametrize("sample", [False, True])
def test_simulated_rounds_are_those_of_decoding(sample: bool, tmp_path: Path) -> None:
    model, ids = lively_model("gemma2"), prompt(7)
    skip = healed(model, tmp_path, bits=4, size=0.3)
    law = Law([TemperatureLogitsWarper(0.8)] if sample else [], do_sample=sample, rows=1)
    trace = take_trace(model, [ids[0]], max_new_tokens=30, law=law, draft_length=4)
    costs = CostTable(0.3, (1.0, 1.1, 1.2, 1.3, 1.4))
    how: dict[str, Any] = {"do_sample": sample, "temperature": 0.8, "seed": 0, "costs": costs}
    real = layerskip.decode(model, ids, skip=skip, max_new_tokens=30, **how)
    want = [SimulatedRound(r.drafted, r.accepted, (len(r.tokens[0]),), r.source) for r in real][1:]
    for draft, same in [(skip, True), (replace(skip, trained=None), False)]:
        controller = make_controller("expected-gain", costs=costs, sampling=sample)
        assert (list(simulate(replay(trace, draft), controller)) == want) == same


@torch.no_grad()
def test_native_passes_heal_as_lean_ones_do(tmp_path: Path) -> None:
    if extension.refusal():
        pytest.skip(str(extension.refusal()))
    model, ids = tiny("llama", dtype=torch.float32), prompt(9)
    skip = healed(model, tmp_path, size=0.3)
    opened = Sublayers(model, "native")
    healthy = logits(Sublayers(model, "fused"), skip, ids)
    sick = logits(Sublayers(model, "fused"), replace(skip, trained=None), ids)
    off = (logits(opened, skip, ids) - healthy).abs().max()
    # whose inputs are rounded, too
    assert off < 0.2 * (sick - healthy).abs().max()


@torch.no_grad()
def test_modules_beside_rounded_sublayers_heal_nothing(tmp_path: Path) -> None:
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


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut off":
        path.write_bytes(data[:-40])
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "cannot read the trained draft .*: No such file"),
        ("cut off", "is cut off or changed"),
        ("changed", "is cut off or changed"),
    ],
)
def test_a_file_that_is_not_the_one_is_refused(how: str, message: str, tmp_path: Path) -> None:
    model = tiny("llama")
    skip = healed(model, tmp_path)
    generate(model, prompt(5), skip=skip, max_new_tokens=2)
    damaged(tmp_path / "draft.safetensors", how)
    with pytest.raises(ValueError, match=message) as caught:
        generate(model, prompt(5), skip=skip, max_new_tokens=2)
    assert "\n" not in str(caught.value)


def test_another_base_is_refused_and_so_is_a_changed_one(tmp_path: Path) -> None:
    model = tiny("llama")
    skip = healed(model, tmp_path)
    with pytest.raises(ValueError, match="belongs to a model with other weights") as caught:
        generate(tiny("llama", seed=1), prompt(5), skip=skip, max_new_tokens=2)
    assert "\n" not in str(caught.value)
    generate(model, prompt(5), skip=skip, max_new_tokens=2)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match="belongs to a model with other weights"):
        generate(model, prompt(5), skip=skip, max_new_tokens=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.9.mlp.up_proj.a": torch.ones(3, 32)}, "a weight 'layers.9.mlp.up_proj' that"),
        ({"layers.1.mlp.up_proj.b": torch.ones(47, 3)}, r"up_proj do not fit a weight \(48, 32\)"),
        ({"layers.1.mlp.up_proj.a": torch.ones(4, 32)}, r"up_proj do not fit a weight \(48, 32\)"),
    ],
)
def test_deltas_that_fit_no_weight_are_refused(
    change: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    model = tiny("llama")
    path = tmp_path / "draft.safetensors"
    trained = save_trained(path, deltas(model) | change, "healed", model)
    skip = SkipConfig(low=LowPrecision(), trained=trained)
    with pytest.raises(ValueError, match=message):
        generate(model, prompt(5), skip=skip, max_new_tokens=2)


def test_the_shipped_draft_is_its_models_and_small() -> None:
    folder = layerskip.shipped("demo-gemma2")
    assert (folder / "draft.safetensors").stat().st_size < 12_000_000
    model = load("demo-gemma2").model
    ids = torch.tensor([[5, 9, 3, 44]])
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_k": 0}
    how |= {"seed": 1, "execution": "fused"}
    plain = generate(model, ids, enabled=False, **how)
    skip = folder / "healed.json"
    found = generate(model, ids, skip=skip, lookup=False, controller="fixed", **how)
    assert torch.equal(found.sequences, plain.sequences)
    assert found.stats is not None
    assert found.stats.num_accepted_tokens > 0.7 * found.stats.num_draft_tokens
