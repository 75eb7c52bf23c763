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
from layerskip.weights.formats.gguf_architectures import (
    ARCHITECTURES,
    FACTORS,
    NUMBERS,
    FileArchitecture,
)
from layerskip.weights.stored import UNIT, Stored

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
_INCOMPLETE = "{} is incomplete, or holds another kind of model: {}"
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), slice(0, 2)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), slice(0, 4)),
    "Q6_K": slice(208, 210),
}
"""The bytes of a block that are float16: if they are finite, so are all its numbers."""


def gguf_model(path: Path, dtype: torch.dtype, *, packed: bool) -> nn.Module:
    """Load the causal language model of a file on the CPU.

    Args:
        dtype: of activations, and of weights that are unpacked.
        packed: keep matrices as the file stores them, mapped rather than read into memory. Experts
            are unpacked.

    Raises:
        ValueError: as for `read_gguf`, or the model is not supported or not complete.
    """
    contents = read_gguf(path)
    kind = str(contents.metadata.get("general.architecture"))
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{path}: architecture {kind!r} in GGUF is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}; convert others to a folder with transformers "
            "(save_pretrained)"
        )
    architecture, (given, values) = ARCHITECTURES[kind], _described(contents, kind)
    try:
        values |= architecture.more(given, values, contents.tensors)
        if {"rope_parameters", "rope_scaling"} <= values.keys():
            raise ValueError("its rotary positions cannot be scaled")
        model = unfilled(AutoConfig.for_model(values.pop("model_type"), **values), dtype)
    except Exception as error:  # the library may raise anything for malicious numbers
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(f"{path}: its metadata does not describe a model: {reason}") from error
    entries: dict[str, list[Entry]] = {}
    for name, entry in _named(contents, architecture):
        entries.setdefault(name, []).append(entry)
    places: dict[int, tuple[str, Tensor]] = {}
    for name, place in model.state_dict(keep_vars=True).items():
        places.setdefault(id(place), (name, place))  # shared ones once
    for name, place in places.values():
        if name not in entries:
            raise ValueError(_INCOMPLETE.format(path, f"{name} has no tensor"))
        parts = sorted(entries.pop(name), key=lambda each: "_up_" in each.name)  # gates first
        shape = [*parts[0].shape]
        rows = int(len(shape) == 3)  # of experts, whose gates may lie in a tensor of their own
        shape[rows] *= len(parts)
        if shape != [*place.shape] or any(each.shape != parts[0].shape for each in parts):
            raise ValueError(
                f"{path}: {parts[0].name} has shape {parts[0].shape}, and the model that its "
                f"metadata describes needs {tuple(place.shape)}"
            )
        weights = [_weight(contents, kind, each, dtype, packed) for each in parts]
        put(model, name, weights[0] if len(weights) == 1 else torch.cat(weights, rows))
    ignored = getattr(model.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in entries:
        if not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(_INCOMPLETE.format(path, f"no weight is {name}"))
    if FACTORS in given:
        factors, rotary = torch.tensor(given[FACTORS]), model.model.rotary_emb
        if factors.shape != rotary.inv_freq.shape or not (factors > 0).all():
            raise ValueError(f"{path}: {FACTORS} must hold a positive number for each frequency")
        for frequencies in (rotary.inv_freq, rotary.original_inv_freq):
            frequencies.div_(factors)
    model.tie_weights()
    model.name_or_path = str(path)
    return model.eval()  # type: ignore[no-any-return]


def _described(contents: Contents, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The architecture's values by key, with tensors that are no weights, and a configuration's."""
    metadata, tensors, path = contents.metadata, contents.tensors, contents.path
    architecture, prefix = ARCHITECTURES[kind], f"{kind}."
    numbers = {**NUMBERS, **architecture.numbers, **architecture.counts}
    numbers = {key: name for key, name in numbers.items() if key not in architecture.reads}
    given = {k.removeprefix(prefix): each for k, each in metadata.items() if k.startswith(prefix)}
    for key in given.keys() - {*numbers, *architecture.reads, *_ALSO_READ, *_IDLE}:
        if given[key] != _OFF.get(key, 0):
            raise ValueError(
                f"{path}: {kind}.{key} = {given[key]!r} is not supported and may change the text; "
                "load the model's folder"
            )
    values: dict[str, Any] = {"model_type": architecture.model, "rope_theta": 10_000.0}
    for key, name in numbers.items():
        number = given.get(key)
        if number is None or (number == 0 and key in architecture.counts):
            continue
        values[name] = number
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise ValueError(f"{path}: {kind}.{key} must be a positive number, got {number!r}")
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(layers) != values.get("num_hidden_layers"):
        raise ValueError(
            f"{path} is incomplete: its metadata says {values.get('num_hidden_layers')} layers, "
            f"but it has tensors of {len(layers)}"
        )
    # The shapes of other tensors are compared later. These sizes could take memory before.
    shapes, joined = [], "blk.0.attn_qkv.weight" in tensors
    for name in ("token_embd.weight", f"blk.0.attn_{'qkv' if joined else 'q'}.weight"):
        entry = tensors.get(name)
        if entry is None or len(entry.shape) != 2:
            raise ValueError(f"{path} has no matrix {name}")
        shapes.append(entry.shape)
    (values["vocab_size"], width), (queries, _) = shapes
    heads = values.get("num_attention_heads", 1)
    turned = width // heads
    if "rope.dimension_count" not in architecture.reads:
        turned = given.get("rope.dimension_count", turned)
    head = values.setdefault("head_dim", turned)
    whole = heads + 2 * values.get("num_key_value_heads", heads) * joined
    if values.get("hidden_size") != width or queries != whole * head:
        raise ValueError(
            f"{path}: its metadata says embeddings of {values.get('hidden_size')} numbers and "
            f"{heads} heads of {head}, but its tensors have {width} and {queries} in all"
        )
    for key in {"attention.value_length", "rope.dimension_count"} - {*architecture.reads}:
        if given.get(key, head) != head:
            raise ValueError(f"{path}: {kind}.{key} other than the width of keys is not supported")
    for key, name in _TOKENS.items():  # a library's default may lie outside of the vocabulary
        values[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    values["tie_word_embeddings"] = "output.weight" not in tensors
    scaling, factor = given.get("rope.scaling.type", "linear"), values.pop("rope_scaling", None)
    if scaling not in ("none", "linear"):
        raise ValueError(
            f"{path}: rotary scaling {scaling!r} in GGUF is not supported; load the model's folder"
        )
    if scaling == "linear" and factor is not None:
        values["rope_scaling"] = {"rope_type": "linear", "factor": factor}

    for name in tensors.keys() & {*architecture.tensors}:
        given[name] = _numbers(contents, tensors[name]).tolist()
    return given, values


def _named(contents: Contents, architecture: FileArchitecture) -> Iterator[tuple[str, Entry]]:
    """Yield the model's weights by name, without factors of rotary frequencies."""
    for name, entry in contents.tensors.items():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias|scale)", name)
        weight = architecture.name(*match.groups()) if match else None
        if weight is not None:
            yield weight, entry
        elif name not in architecture.tensors:
            yield name, entry  # a name that no weight has


def _weight(
    contents: Contents, kind: str, entry: Entry, dtype: torch.dtype, packed: bool
) -> Tensor:
    """A tensor as data of a parameter or buffer."""
    architecture, part = ARCHITECTURES[kind], entry.name.rpartition(".")[0].rpartition(".")[2]
    turned = architecture.interleaved and part in ("attn_q", "attn_k")
    packed = packed and part != "ffn_gate_inp"  # a router, which is read in full
    if packed and len(entry.shape) == 2 and entry.shape[1] % UNIT == 0:
        stored = _stored(contents, entry, dtype)
        if turned:
            rows = _reordered(stored.bytes, contents.metadata, kind, part)
            return Stored(rows, entry.format, entry.shape[1], dtype)
        return stored
    numbers = _numbers(contents, entry)
    if turned:
        numbers = _reordered(numbers, contents.metadata, kind, part)
    if architecture.shifted and part.endswith("norm"):
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


def _reordered(rows: Tensor, metadata: Mapping[str, Any], kind: str, part: str) -> Tensor:
    """Reorder rows of queries or keys as in the library: the halves of a head one after another."""
    count = metadata[f"{kind}.attention.head_count"]
    if part == "attn_k":
        count = metadata.get(f"{kind}.attention.head_count_kv", count)
    return rows.view(count, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
