"""Models of GGUF files, with their weights as the file stores them.

A file means what llama.cpp computes from it. Metadata that changes a text is read here, or refused
by name. Nothing is trusted: tensors must be finite, in the model's number and shapes.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from layerskip.files.gguf_contents import BLOCKS, Contents, Entry, read_gguf
from layerskip.weights.formats.building import put, unfilled
from layerskip.weights.stored import UNIT, Stored

MODELS = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""The `model_type` of each supported architecture."""

_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27B, which scale scores by another number than the others do."""
_NUMBERS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.scale_linear": "rope_scaling",  # the old name of the next
    "rope.scaling.factor": "rope_scaling",
}
_GEMMA_NUMBERS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_OWN_NUMBERS = {
    "gemma2": _GEMMA_NUMBERS,
    "gemma3": _GEMMA_NUMBERS | {"rope.freq_base_swa": "rope_local_base_freq"},
}
_ALSO_READ = ("attention.value_length", "rope.dimension_count", "rope.scaling.type")
_IDLE = (
    *("vocab_size", "tensor_data_layout", "pooling_type", "attention.layer_norm_epsilon"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
)
"""Keys of the architecture that change no text of these models, whatever they say. Neither do
those outside of it and of `tokenizer.ggml`: names, licences, templates, how a file was made."""
_OFF = {"attention.causal": True, "rope.scaling.attn_factor": 1.0}
"""Values that change no text. Of all other keys these are 0 and false."""
_TOKENS = {"bos": "bos", "eos": "eos", "padding": "pad"}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), slice(0, 2)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), slice(0, 4)),
    "Q6_K": slice(208, 210),
}
"""The bytes of a block that are float16: if they are finite, so are all its numbers."""
_FACTORS = "rope_freqs.weight"


def gguf_model(path: Path, dtype: torch.dtype, *, packed: bool) -> nn.Module:
    """Load the causal language model of a file on the CPU.

    Args:
        dtype: of activations, and of weights that are unpacked.
        packed: keep weights as the file stores them, mapped rather than read into memory.

    Raises:
        ValueError: as for `read_gguf`, or the model is not supported or not complete.
    """
    contents = read_gguf(path)
    kind = str(contents.metadata.get("general.architecture"))
    values = _values(contents, kind)
    try:
        model = unfilled(AutoConfig.for_model(MODELS[kind], **values), dtype)
    except Exception as error:  # the library may raise anything for malicious numbers
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(f"{path}: its metadata does not describe a model: {reason}") from error
    names, lacking = dict(_named(contents, kind)), []
    for name, parameter in model.named_parameters():  # yields shared ones once
        entry = names.pop(name, None)
        if entry is None:
            lacking.append(name)
            continue
        if entry.shape != tuple(parameter.shape):
            raise ValueError(
                f"{path}: {entry.name} has shape {entry.shape}, and the model that its metadata "
                f"describes needs {tuple(parameter.shape)}"
            )
        weight = _weight(contents, kind, entry, dtype, packed)
        put(model, name, weight)
    if lacking or names:
        raise ValueError(
            f"{path} is incomplete, or holds another kind of model: "
            + (f"{lacking[0]} has no tensor" if lacking else f"no weight is {next(iter(names))}")
        )
    if _FACTORS in contents.tensors:
        factors, rotary = _numbers(contents, contents.tensors[_FACTORS]), model.model.rotary_emb
        if factors.shape != rotary.inv_freq.shape or not (factors > 0).all():
            raise ValueError(f"{path}: {_FACTORS} must hold a positive number for each frequency")
        for frequencies in (rotary.inv_freq, rotary.original_inv_freq):
            frequencies.div_(factors)
    model.tie_weights()
    model.name_or_path = str(path)
    return model.eval()  # type: ignore[no-any-return]


def _values(contents: Contents, kind: str) -> dict[str, Any]:
    """The values of the model's configuration."""
    metadata, tensors, path = contents.metadata, contents.tensors, contents.path
    if kind not in MODELS or any("_exps." in name for name in tensors):
        words = f"architecture {kind!r}" if kind not in MODELS else "a mixture of experts"
        raise ValueError(
            f"{path}: {words} in GGUF is not supported; supported are {', '.join(MODELS)}; convert "
            "others to a folder with transformers (save_pretrained)"
        )
    prefix, numbers = f"{kind}.", _NUMBERS | _OWN_NUMBERS.get(kind, {})
    given = {k.removeprefix(prefix): each for k, each in metadata.items() if k.startswith(prefix)}
    for key in given.keys() - {*numbers, *_ALSO_READ, *_IDLE}:
        if given[key] != _OFF.get(key, 0):
            raise ValueError(
                f"{path}: {kind}.{key} = {given[key]!r} is not supported and may change the text; "
                "load the model's folder"
            )
    values: dict[str, Any] = {"rope_theta": 10_000.0}
    for key, name in numbers.items():
        if key not in given:
            continue
        values[name] = number = given[key]
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise ValueError(f"{path}: {kind}.{key} must be a positive number, got {number!r}")
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(layers) != values.get("num_hidden_layers"):
        raise ValueError(
            f"{path} is incomplete: its metadata says {values.get('num_hidden_layers')} layers, "
            f"but it has tensors of {len(layers)}"
        )
    # The shapes of other tensors are compared later. These sizes could take memory before.
    shapes = []
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        entry = tensors.get(name)
        if entry is None or len(entry.shape) != 2:
            raise ValueError(f"{path} has no matrix {name}")
        shapes.append(entry.shape)
    (values["vocab_size"], width), (queries, _) = shapes
    heads = values.get("num_attention_heads", 1)
    values.setdefault("head_dim", given.get("rope.dimension_count", width // heads))
    head = values["head_dim"]
    if values.get("hidden_size") != width or queries != heads * head:
        raise ValueError(
            f"{path}: its metadata says embeddings of {values.get('hidden_size')} numbers and "
            f"{heads} heads of {head}, but its tensors have {width} and {queries} in all"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if given.get(key, head) != head:
            raise ValueError(f"{path}: {kind}.{key} other than the width of keys is not supported")
    for key, name in _TOKENS.items():
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            values[f"{name}_token_id"] = token
    values["tie_word_embeddings"] = "output.weight" not in tensors
    if kind in _GEMMAS:  # a file does not say how scores are scaled
        largest = len(layers) == _GEMMAS[kind]
        values["query_pre_attn_scalar"] = width // heads if largest else head
        if "sliding_window" not in values and kind == "gemma3":
            values["layer_types"] = ["full_attention"] * len(layers)
    scaling, factor = given.get("rope.scaling.type", "linear"), values.pop("rope_scaling", None)
    if scaling not in ("none", "linear"):
        raise ValueError(
            f"{path}: rotary scaling {scaling!r} in GGUF is not supported; load the model's folder"
        )
    if scaling == "linear" and factor is not None:
        values["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return values


def _named(contents: Contents, kind: str) -> Iterator[tuple[str, Entry]]:
    """Yield the model's weights by name, without factors of Llama's frequencies."""
    names = _NAMES | _GEMMA_NAMES if kind in _GEMMAS else _NAMES
    for name, entry in contents.tensors.items():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        layer, part, end = match.groups() if match else (None, "", "")
        if part in names:
            within = names[part] if layer is None else f"model.layers.{int(layer)}.{names[part]}"
            yield f"{within}.{end}", entry
        elif name != _FACTORS or kind != "llama":
            yield name, entry  # a name that no weight has


def _weight(
    contents: Contents, kind: str, entry: Entry, dtype: torch.dtype, packed: bool
) -> Tensor:
    """A tensor as data of a parameter."""
    part = entry.name.rpartition(".")[0].rpartition(".")[2]
    if packed and len(entry.shape) == 2 and entry.shape[1] % UNIT == 0:
        stored = _stored(contents, entry, dtype)
        if kind == "llama" and part in ("attn_q", "attn_k"):
            rows = _reordered(stored.bytes, contents.metadata, part)
            return Stored(rows, entry.format, entry.shape[1], dtype)
        return stored
    numbers = _numbers(contents, entry)
    if kind == "llama" and part in ("attn_q", "attn_k"):
        numbers = _reordered(numbers, contents.metadata, part)
    if kind in _GEMMAS and part.endswith("norm"):
        numbers = numbers - 1
    return numbers.to(dtype)


def _stored(contents: Contents, entry: Entry, dtype: torch.dtype = torch.float32) -> Stored:
    """A tensor as the file stores it; a vector becomes a row."""
    data = _blocks(contents, entry).view(math.prod(entry.shape[:-1]), -1)
    return Stored(data, entry.format, entry.shape[-1], dtype, file=contents.data)


def _numbers(contents: Contents, entry: Entry) -> Tensor:
    """The numbers of a tensor in float32."""
    if entry.format not in _TORCH:
        return _stored(contents, entry).unpacked().view(entry.shape)
    return _blocks(contents, entry).clone().view(_TORCH[entry.format]).float().view(entry.shape)


def _blocks(contents: Contents, entry: Entry) -> Tensor:
    """The blocks of a tensor whose numbers are all finite, (N, bytes of a block), uint8."""
    count, offset = entry.nbytes, entry.offset
    data = torch.frombuffer(contents.data, dtype=torch.uint8, count=count, offset=offset)
    blocks = data.view(-1, BLOCKS[entry.format][1])
    scales, dtype = _SCALES.get(entry.format, slice(None)), _TORCH.get(entry.format, torch.float16)
    for some in blocks.split(1 << 20):
        numbers = some[:, scales].clone(memory_format=torch.contiguous_format).view(dtype)
        if not numbers.isfinite().all():
            raise ValueError(f"{contents.path}: {entry.name} holds numbers that are not finite")
    return blocks


def _reordered(rows: Tensor, metadata: Mapping[str, Any], part: str) -> Tensor:
    """Reorder rows of queries or keys as in the library: the halves of a head one after another."""
    count = metadata["llama.attention.head_count"]
    if part == "attn_k":
        count = metadata.get("llama.attention.head_count_kv", count)
    return rows.view(count, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
