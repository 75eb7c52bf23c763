"""Small packed checkpoints of random codes, and the models that they contain."""

import json

import numpy as np
import torch
from checkpoints import save_checkpoint
from models import tiny_model
from safetensors.torch import load_file, save_file
from torch import nn

GROUP = 32
COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def compressed(form, bits=4, kind="int", **more):
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {**COMPRESSED, "format": form, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "checkpoint_format": "gptq"}
CONFIGS = {
    "pack 4": compressed("pack-quantized"),
    "pack 4 zeros": compressed("pack-quantized", symmetric=False),
    "pack 4 g_idx": compressed("pack-quantized", symmetric=False, actorder="group"),
    "pack 8 zeros": compressed("pack-quantized", 8, symmetric=False),
    "pack 8 rows": compressed("pack-quantized", 8, strategy="channel"),
    "int 8": compressed("int-quantized", 8, strategy="channel"),
    "float matrix": compressed("float-quantized", 8, "float", strategy="tensor"),
    "float rows": compressed("naive-quantized", 8, "float", strategy="channel"),
    "float blocks": compressed("float-quantized", 8, "float", block_structure=[48, 32]),
    "gptq 4": GPTQ | {"bits": 4},
    "gptq 8 g_idx": GPTQ | {"bits": 8, "desc_act": True},
    "gptq v2 4 g_idx": GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "torchao int 8": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8Weight"}},
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 32]},
}


def words(codes, bits):
    """Codes (N, K) packed into words, the first in the lowest bits: (N, K bits / 32) int32."""
    made = np.zeros((len(codes), -(-codes.shape[1] * bits // 32)), dtype=np.uint32)
    for i in range(codes.shape[1]):
        made[:, i * bits // 32] |= codes[:, i].astype(np.uint32) << (i * bits % 32)
    return torch.from_numpy(made.view(np.int32))


def matrix(rng, name, rows, columns, dtype, size=0.1):
    """A random matrix in the form of a checkpoint: tensors by name suffix, and its numbers.

    Args:
        dtype: dtype of the scales.
        size: typical size of the numbers.
    """
    bits = 4 if "4" in name or name == "awq" else 8
    floats = "float" in name or name == "fp8"
    one = any(word in name for word in ("rows", "int", "matrix"))
    count = 1 if one else columns // GROUP
    each = np.arange(columns) // (columns // count)  # the group of each column
    if "g_idx" in name:
        each = rng.permutation(each)
    drawn = rng.uniform(0.5, 2, (rows, count)) * size / (100 if floats else 1 << bits - 2)
    if "matrix" in name:
        drawn[:] = drawn[0, 0]
    if "blocks" in name or name == "fp8":
        height = 48 if "blocks" in name else 32
        drawn = drawn[np.arange(rows) // height * height]
    scales = torch.from_numpy(drawn).to(dtype)  # (R, G)
    middle = 1 << bits - 1
    zeros = np.full((rows, count), middle)
    if "zeros" in name or "g_idx" in name or name in ("gptq 4", "awq"):
        zeros = rng.integers(1, 1 << bits, (rows, count))
    codes = rng.integers(0, 1 << bits, (rows, columns))
    values = codes - zeros[:, each]
    if floats:
        codes = codes & 0xF7  # excludes NaN
        kept = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
        values = kept.double().numpy()
    # exact, because the factors have so few bits
    numbers = torch.from_numpy(values * scales.double().numpy()[:, each]).to(dtype)
    order = {"g_idx": torch.from_numpy(each.astype(np.int32))} if "g_idx" in name else {}
    if "gptq" in name:
        qzeros = words((zeros if "v2" in name else zeros - 1).T, bits)
        qweight = words(codes, bits).T.contiguous()
        made = {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.contiguous(), **order}
    elif name == "awq":
        qweight, qzeros = (
            words(part.T.reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]], 4).view(-1, rows // 8)
            for part in (codes, zeros)
        )
        made = {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.contiguous()}
    elif "pack" in name:
        made = {"weight_packed": words(codes, bits), "weight_scale": scales}
        made["weight_shape"] = torch.tensor([rows, columns])
        made |= {f"weight_{key}": tensor for key, tensor in order.items()}
        if "zeros" in name or order:
            made["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    elif "int 8" in name:
        kept = torch.from_numpy((codes - middle).astype(np.int8))
        made = {"weight": kept, "weight_scale": scales}
        if "torchao" in name:
            made = {"_weight_qdata": kept, "_weight_scale": scales}
    else:
        scales = scales[:1, 0] if "matrix" in name else scales
        if "blocks" in name or name == "fp8":
            scales = scales[::height].contiguous()
        end = "weight_scale_inv" if name == "fp8" else "weight_scale"
        made = {"weight": kept, end: scales}
    return made, numbers


def write(folder, name, dtype=torch.bfloat16, kind="llama", whole=(), seed=0, **overrides):
    """Write a checkpoint in one of `CONFIGS`; returns the model that it contains, in float64.

    Args:
        dtype: dtype of the scales and of weights that are not packed.
        whole: linears that are not packed.
    """
    rng = np.random.default_rng(seed)
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16} | overrides
    model = tiny_model(kind, dtype=dtype, **shape)
    save_checkpoint(folder, model)
    tensors = load_file(folder / "model.safetensors")
    model = model.double()
    for path, module in model.named_modules():
        if type(module) is nn.Linear and path != "lm_head" and not path.endswith(tuple(whole)):
            del tensors[f"{path}.weight"]
            made, numbers = matrix(rng, name, *module.weight.shape, dtype)
            tensors |= {f"{path}.{end}": tensor for end, tensor in made.items()}
            module.weight.data.copy_(numbers)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    return model
