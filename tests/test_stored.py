"""Weights in the bytes of files: their numbers, and the same sums in native passes."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import FORMATS, numbers, raw, write
from models import tiny_model
from torch import nn

from layerskip import SkipConfig, fingerprint, generate
from layerskip.model.opened_models import sublayers_of
from layerskip.native import extension
from layerskip.weights.formats.gguf import gguf_model
from layerskip.weights.stored import Stored, store_halves, unpacked_model

pytestmark = pytest.mark.usefixtures("built")


def stored(rng, form, rows, columns):
    return Stored(torch.from_numpy(raw(rng, form, rows, columns)), form, columns, torch.float32)


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_are_those_of_the_reference_bit_by_bit(form):
    rng = np.random.default_rng(0)
    for _ in range(20):
        weight = stored(rng, form, int(rng.integers(1, 40)), 256 * int(rng.integers(1, 4)))
        assert torch.equal(weight.unpacked(), numbers(weight.bytes.numpy(), form))


TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GROUPED = [f"{kind}-{name}" for kind in ("G4", "G8", "F8") for name in TYPES]


@pytest.mark.parametrize("form", GROUPED)
def test_codes_in_groups_mean_what_they_are_scaled_to(form):
    rng = np.random.default_rng(1)
    kind, dtype = form[:2], TYPES[form[3:]]
    for rows, columns, group in ((7, 192, 64), (61, 160, 32), (50, 896, 896)):
        most = {"G4": 16, "G8": 256, "F8": 120}[kind]
        codes = torch.from_numpy(rng.integers(0, most, (rows, columns)))
        scales = torch.from_numpy(rng.normal(0, 1, (rows, columns // group))).to(dtype)
        zeros = torch.from_numpy(rng.integers(0, most, scales.shape)).to(dtype) * (kind != "F8")
        weight = grouped(codes, scales, zeros, form)
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn) if kind == "F8" else codes
        spread = [each.repeat_interleave(group, 1) for each in (zeros, scales)]
        exact = ((values.to(dtype) - spread[0]) * spread[1]).float()  # (R, C)
        assert torch.equal(weight.unpacked(), exact)
        ones = torch.eye(columns)[None]  # each product is one of the numbers
        assert torch.equal(sums(weight, ones)[0].T, exact)
        x = torch.from_numpy(rng.normal(size=(1, 40, columns)).astype(np.float32))
        whole, allowed = sums(weight, x), 2e-6 * (x.double().abs() @ exact.double().abs().T)
        assert ((whole - x.double() @ exact.double().T).abs() <= allowed).all()
        for tokens in (*range(1, 10), 17):
            assert torch.equal(sums(weight, x[:, -tokens:]), whole[:, -tokens:])


def sums(weight, x):
    """Products by native passes, as of a head without a norm."""
    module = extension.extension()
    plan = module.Plan()
    matrix = weight.matrix() if isinstance(weight, Stored) else module.Matrix(weight.data, None)
    return plan.run(x, [plan.add("head", inputs=[matrix])], [], [], [], [])


@pytest.mark.parametrize("form", FORMATS)
def test_products_are_exact_but_for_sums_in_float32(form):
    rng = np.random.default_rng(2)
    for rows, columns in ((1, 256), (24, 512), (61, 3328), (131, 256)):
        weight = stored(rng, form, rows, columns)
        exact = numbers(weight.bytes.numpy(), form).double()  # (R, C)
        x = torch.from_numpy(rng.normal(size=(1, 140, columns)).astype(np.float32))
        ours = sums(weight, x)
        allowed = 2e-6 * (x.double().abs() @ exact.abs().T)
        wrong = sums(weight, (x * 16).round() / 16)  # a known mistake: rounded activations
        assert ((ours - x.double() @ exact.T).abs() <= allowed).all()
        assert not ((wrong - x.double() @ exact.T).abs() <= allowed).all()
        for tokens in (1, 2, 3, 4, 5, 9, 40):  # the same bits beside fewer tokens and other rows
            assert torch.equal(sums(weight, x[:, -tokens:]), ours[:, -tokens:])
        for first in (1, rows // 2):
            assert torch.equal(sums(weight[first:], x), ours[:, :, first:])


def test_weights_of_any_two_formats_share_an_input():
    """Formats whose inputs are packed differently, in one sublayer."""
    rng, module = np.random.default_rng(8), extension.extension()
    weights = [stored(rng, form, 64, 256) for form in FORMATS]
    output = module.Matrix(torch.eye(256, 64), None)
    x = torch.from_numpy(rng.normal(0, 0.1, size=(1, 5, 256)).astype(np.float32))
    gates = [nn.functional.silu(sums(weight, x)) for weight in weights]
    for gate, of_gate in zip(weights, gates, strict=True):
        for up in weights:
            plan, inputs = module.Plan(), [gate.matrix(), up.matrix()]
            number = plan.add("mlp", inputs=inputs, output=output, times=1.0)
            out = plan.run(x, [number], [], [], [], [])
            torch.testing.assert_close(out[..., :64], x[..., :64] + of_gate * sums(up, x))


SUMS = """
import hashlib, numpy, torch
from test_stored import FORMATS, stored, sums
rng, digest = numpy.random.default_rng(6), hashlib.sha256()
for form in FORMATS[1:8]:
    weight = stored(rng, form, 75, 512)
    for tokens in (1, 2, 9, 70):
        x = torch.from_numpy(rng.normal(size=(1, tokens, 512)).astype(numpy.float32))
        digest.update(sums(weight, x).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_sums_have_the_same_bits_with_other_vectors():
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("no two kinds of vectors with fused steps")
    said = [
        subprocess.run(
            [sys.executable, "-c", SUMS],
            cwd=Path(__file__).parent,
            env={**os.environ, "ATEN_CPU_CAPABILITY": vectors},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for vectors in ("avx2", "avx512")
    ]
    assert said[0] == said[1]


def test_a_token_has_the_same_sums_whatever_is_beside_it_in_bfloat16():
    rng = np.random.default_rng(3)
    for form in FORMATS:
        weight = stored(rng, form, 50, 512).to(torch.bfloat16)
        x = torch.from_numpy(rng.normal(size=(1, 11, 512))).bfloat16()
        whole = sums(weight, x)
        torch.testing.assert_close(whole, x @ weight.unpacked().T, atol=0.1, rtol=0.02)
        for t in range(11):
            assert torch.equal(sums(weight, x[:, t : t + 1]), whole[:, t : t + 1])


def test_it_stands_for_its_numbers_in_any_code():
    rng = np.random.default_rng(4)
    weight = torch.nn.Parameter(stored(rng, "Q4_1", 40, 64), requires_grad=False)
    flat = weight.unpacked()
    x = torch.randn(3, 64, requires_grad=True)
    assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, flat))
    nn.functional.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, flat.sum(0).expand(3, 64))
    ids = torch.tensor([[3, 0], [39, 3]])
    assert torch.equal(nn.functional.embedding(ids, weight), flat[ids])
    for rows in (slice(5, 9), torch.tensor([8, 1])):
        some = weight[rows]
        assert isinstance(some, Stored)
        assert torch.equal(some.unpacked(), flat[rows])
    assert torch.equal(weight[:, 3], flat[:, 3])
    assert torch.equal(weight.double(), flat.double())
    assert torch.equal(copy.deepcopy(weight).unpacked(), flat)
    with pytest.raises(TypeError, match="cannot be changed in place; load the model with"):
        weight.add_(1)
    assert torch.equal(weight.unpacked(), flat)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"form": "Q3"}, "there is no format Q3"),
        ({"form": "Q4_K", "columns": 64}, "a multiple of 256 columns, not 64"),
        ({"form": "G4-F32", "group": 48}, "groups of 48 columns do not divide 96"),
        ({"form": "Q8_0", "group": 32}, "groups of 32 columns"),
        ({"form": "Q8_0", "nbytes": 101}, "a stored weight must be"),
    ],
)
def test_bytes_that_are_no_such_weight_are_refused(how, words):
    data = torch.zeros(2, how.get("nbytes", 102), dtype=torch.uint8)
    weight = Stored(data, how["form"], how.get("columns", 96), torch.float32, how.get("group", 0))
    with pytest.raises(ValueError, match=words):
        weight.matrix()


def test_logits_are_those_of_the_unpacked_model(tmp_path):
    for kind in ("llama", "gemma3"):
        plain = write(tmp_path / "model.gguf", kind)
        packed = gguf_model(tmp_path / "model.gguf", torch.float32, packed=True)
        ids = torch.randint(0, 300, (2, 13), generator=torch.Generator().manual_seed(0))
        logits = []
        for model in (plain, packed):
            opened = sublayers_of(model)
            assert opened.execution == "native"
            with torch.no_grad():
                hidden, step = opened.first_pass(ids)
                logits.append(opened.finish(hidden, step, range(opened.num_sublayers)))
        torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-4)
        with torch.no_grad():  # the library's modules unpack them
            assert torch.equal(packed(ids).logits, plain(ids).logits)


def grouped(codes, scales, zeros, form):
    """Codes (R, C) with scales and zeros (R, G), in the form of `rows.h`; FP8 has no zeros."""
    columns = codes.shape[1]
    kept = codes.to(torch.uint8)
    if form.startswith("G4"):
        halves = kept.unflatten(1, (-1, 2, 16))
        kept = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    given = (scales,) if form.startswith("F8") else (scales, zeros)
    parts = [kept, *(each.contiguous().view(torch.uint8) for each in given)]
    return Stored(torch.cat(parts, 1), form, columns, torch.float32, columns // scales.shape[1])


def test_float32_weights_of_bfloat16_numbers_are_read_from_half_the_bytes():
    model = tiny_model("llama", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96).float()
    odd = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        odd.weight[3, 5] = 1 / 3
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    before = copy.deepcopy(model)
    assert store_halves(model)
    assert not store_halves(model)
    assert not isinstance(odd.weight, Stored)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not odd]
    assert all(isinstance(each.weight, Stored) for each in linears)
    assert fingerprint(model) == fingerprint(before)
    ids = torch.arange(5, 30)[None]
    texts = [
        generate(each, ids, max_new_tokens=30, do_sample=True, seed=1, **how).sequences
        for each in (before, model)
        for how in ({"enabled": False}, {"skip": SkipConfig.low_precision(8)}, {})
    ]
    assert all(torch.equal(each, texts[0]) for each in texts)
    for (name, ours), theirs in zip(
        unpacked_model(model).state_dict().items(), before.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert not store_halves(tiny_model("llama", dtype=torch.float32))
