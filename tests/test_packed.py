"""Packed checkpoint folders as models: their numbers, every way to use them, and refusals."""

import json

import numpy as np
import pytest
import torch
from commands import PROMPT, refused
from models import prompt
from packed_files import CONFIGS, GPTQ, compressed, matrix, write
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from layerskip import SkipConfig, fingerprint, generate, load
from layerskip.api.plan import open_plan
from layerskip.api.settings import Settings
from layerskip.model.opened_models import sublayers_of
from layerskip.weights.formats.codes import Codes
from layerskip.weights.formats.folders import ignored_rounding, reader
from layerskip.weights.formats.tensors import Tensors
from layerskip.weights.stored import Stored, stored_weights, unpacked_model

native = pytest.mark.usefixtures("built")
pytestmark = pytest.mark.filterwarnings("ignore:.* also rounds activations")
LINEARS = 2 * 7  # of a model with two layers


def text(model, ids, **settings):
    how = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    return generate(model, ids, **how, **settings).sequences


@native
@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_are_those_of_the_reference_bit_by_bit(tmp_path, name):
    rng, tensors, expected = np.random.default_rng(0), {}, []
    for i in range(20):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        made, numbers = matrix(rng, name, 8 * int(rng.integers(1, 17)), 64 * (i % 4 + 1), dtype)
        expected.append(numbers)
        tensors |= {f"{i}.{end}": tensor for end, tensor in made.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    read, kept = reader(CONFIGS[name]), Tensors(tmp_path)
    for i, numbers in enumerate(expected):
        codes = read(kept, str(i), *numbers.shape)
        stored = codes.weight(torch.float32, packed=True)
        assert isinstance(stored, Stored)
        for made in (stored.unpacked(), codes.weight(torch.float32, packed=False)):
            assert torch.equal(made, numbers.float())
        for rows in (slice(2, 5), torch.tensor([7, 0])):
            assert torch.equal(stored[rows].unpacked(), numbers[rows].float())


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_codes_times_all_scales_are_rounded_as_the_reference_rounds(dtype):
    codes = torch.arange(256, dtype=torch.uint8).expand(2048, 256)
    scales = (1 + torch.arange(2048) / 2048)[:, None].to(dtype)  # all mantissas
    for zero, size in ((0, 2.0**-9), (255, 2.0**-20), (128, 1.0)):
        zeros = torch.full(scales.shape, zero)
        made = Codes(codes, 8, scales * size, zeros, 256)
        values = (codes.double() - zero) * (scales * size).double()
        ours = made.weight(torch.float32, packed=True)
        assert torch.equal(ours.unpacked(), values.to(dtype).float())
        assert torch.equal(made.numbers(), values.to(dtype))


@native
@pytest.mark.parametrize("name", CONFIGS)
def test_texts_are_those_of_the_model_that_the_folder_means(tmp_path, name):
    plain = write(tmp_path, name, num_hidden_layers=2)
    packed = load(str(tmp_path), dtype="float32").model
    ids = prompt(12)
    expected = plain.generate(ids, max_new_tokens=16, do_sample=False)
    for settings in ({"enabled": False}, {"skip": SkipConfig.early_exit(1)}):
        assert torch.equal(text(packed, ids, **settings), expected)
    kept = [e for e in stored_weights(packed) if e.format[0] in "GF"]
    assert len(kept) == LINEARS
    for (key, ours), theirs in zip(
        unpacked_model(packed).named_parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs.float()), key


@native
def test_sampled_texts_are_those_of_plain_decoding_in_every_dtype(tmp_path):
    # columns in different orders, and some linears that are not packed beside others
    ids, how = prompt(40), {"max_new_tokens": 16, "do_sample": True, "seed": 3}
    for scales, dtype in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        write(tmp_path, "gptq 8 g_idx", scales, whole=("k_proj", "up_proj"), kind="qwen2")
        loaded = load(str(tmp_path))
        assert loaded.model.dtype == dtype
        plain = [w for w in loaded.model.parameters() if getattr(w, "format", "BF16") == "BF16"]
        assert not any(getattr(w, "bytes", w).data_ptr() % 64 for w in plain)
        plain = generate(loaded.model, ids, enabled=False, **how).sequences
        for settings in ({}, {"skip": SkipConfig.low_precision(8)}):
            ours = generate(loaded.model, ids, **settings, **how).sequences
            assert torch.equal(ours, plain)
        logits = []
        for model in (loaded.model, unpacked_model(loaded.model)):
            opened = sublayers_of(model)
            assert opened.execution == "native"
            with torch.no_grad():
                hidden, step = opened.first_pass(ids)
                logits.append(opened.finish(hidden, step, range(opened.num_sublayers)))
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(*logits, atol=tolerance, rtol=tolerance)


@native
def test_it_is_told_how_weights_are_stored_and_what_they_take(tmp_path):
    write(tmp_path, "pack 4 zeros", num_hidden_layers=2)
    loaded = load(str(tmp_path))
    assert loaded.model.dtype == torch.bfloat16
    assert "weights as they are stored: 4-bit groups 0 MB" in loaded.describe()
    words = open_plan(loaded.model, Settings()).explain()
    assert "passes: native" in words
    assert "8 bits: its weights already take so few bits that 8 save too little" in words
    assert fingerprint(loaded.model) == fingerprint(load(str(tmp_path), packed=False).model)
    kept = stored_weights(loaded.model)
    files = load_file(tmp_path / "model.safetensors")
    packed = sum(t.nbytes for name, t in files.items() if "proj" in name)
    assert sum(each.bytes.nbytes for each in kept) < 1.15 * packed


def test_what_is_rounded_besides_weights_is_told(tmp_path):
    write(tmp_path, "fp8", torch.float32)
    words = "also rounds activations, which is ignored: its weights are read exactly, and texts are"
    with pytest.warns(UserWarning, match=words):
        load(str(tmp_path))
    rounded = {"config_groups": {"a": {"input_activations": {"num_bits": 8}}}}
    configured(tmp_path, quant_method="compressed-tensors", kv_cache_scheme={"a": 8}, **rounded)
    config = AutoConfig.from_pretrained(tmp_path)
    assert ignored_rounding(config) == "activations and keys and values"


@native
def test_a_matrix_whose_groups_are_no_units_is_unpacked(tmp_path):
    plain = write(tmp_path, "pack 4", hidden_size=48, head_dim=12)
    model = load(str(tmp_path), dtype="float32").model
    assert len([e for e in stored_weights(model) if e.format == "G4-BF16"]) == 6  # mlp.down_proj
    expected = plain.generate(prompt(9), max_new_tokens=16, do_sample=False)
    assert torch.equal(text(model, prompt(9)), expected)


@native
def test_orders_of_columns_that_are_none_are_refused():
    stored = Stored(torch.zeros(2, 36, dtype=torch.uint8), "G8-BF16", 32, torch.float32, 32)
    for order in (torch.arange(32), torch.zeros(32).int(), torch.arange(1, 33).int()):
        stored.order = order
        with pytest.raises(ValueError, match="order"):
            stored.matrix()


INT4 = {"quant_method": "torchao", "quant_type": "int4_weight_only"}
SPOILT = {
    "cut": ("gptq 4", {}, "cannot load the checkpoint"),
    "a file elsewhere": ("gptq 4", {}, "a.safetensors: No such file"),
    "no weight": ("gptq 4", {"qweight": None}, "7 weights missing, model.layers.0.self_attn"),
    "no scales": ("awq", {"scales": None}, "q_proj.scales is missing"),
    "shape": ("awq", {"qweight": lambda t: t[:-8]}, "qweight must have shape (64, 8), got (56"),
    "dtype": ("gptq 4", {"scales": lambda t: t.int()}, "scales must be in torch.float32 or"),
    "bits": ("gptq 4", {"qweight": lambda t: t[:-2]}, "64 codes in 6 words have neither 4 nor"),
    "NaN": ("pack 4", {"weight_scale": lambda t: t * torch.nan}, "a scale is zero or not finite"),
    "zero": ("fp8", {"weight_scale_inv": lambda t: t * 0}, "q_proj: a scale is zero or not"),
    "huge": ("awq", {"scales": lambda t: t * 0 + 3e38}, "q_proj: a number is not finite"),
    "NaN code": ("fp8", {"weight": lambda t: (t.view(torch.uint8) | 127).view(t.dtype)}, "NaN"),
    "groups": ("pack 4", {"weight_scale": lambda t: t[:, [0] * 5]}, "5 groups do not divide 64"),
    "zeros": ("pack 4 zeros", {"weight_zero_point": lambda t: t[:, :1]}, "must have shape (8, 2)"),
    "g_idx": ("gptq 8 g_idx", {"g_idx": lambda t: t + 1}, "q_proj: its g_idx must be in 0..1"),
    "negative": ("pack 4 g_idx", {"weight_g_idx": lambda t: t - 5}, "its g_idx must be in 0..1"),
    "size": ("pack 4", {"weight_shape": lambda t: t * 2}, "must be [64, 64], got [128, 128]"),
    "blocks": ("float blocks", {"weight_scale": lambda t: t[:1]}, "fit no matrix (64, 64)"),
    "int4": (INT4, {}, "torchao's 4-bit weights"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, {}, "format 'marlin' of GPTQ is not one of"),
    "gemv": ({"quant_method": "awq", "version": "gemv"}, {}, "AWQ version 'gemv' with 4 bits"),
    "nvfp4": (compressed("nvfp4-pack-quantized"), {}, "'nvfp4-pack-quantized' of compressed-ten"),
    "turned": (compressed("pack-quantized") | {"transform_config": {"a": 1}}, {}, "transformed"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_spoilt_folders_are_refused_in_one_line(tmp_path, kind):
    name, edits, words = SPOILT[kind]
    write(tmp_path, name if isinstance(name, str) else "gptq 4", num_hidden_layers=1)
    if isinstance(name, dict):
        configured(tmp_path, **name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for key in [*tensors]:
        edit = edits.get(key.rpartition(".")[2], lambda tensor: tensor)
        tensors[key] = edit and edit(tensors[key]).contiguous()
    save_file({key: value for key, value in tensors.items() if value is not None}, file)
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-5000])
    if kind == "a file elsewhere":
        index = {"weight_map": {"model.embed_tokens.weight": "../a.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert words in refused("generate", str(tmp_path), "--prompt", PROMPT)


def configured(folder, **more):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= more
    path.write_text(json.dumps(config))
