"""Models of GGUF files, with their weights as the file stores them.

A file means what llama.cpp computes from it. Metadata that changes a text is read here, or refused
by name. Nothing is trusted: tensors must be finite, in the model's number and shapes.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator
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
    "rope.scaling.yarn_attn_factor",  # which llama.cpp computes anew
)
"""Keys of the architecture that change no text of these models, whatever they say. Neither do
those outside of it and of `tokenizer.ggml`: names, licences, templates, how a file was made."""
_OFF = {"attention.causal": True, "rope.scaling.yarn_beta_fast": 32.0}
_OFF |= {
    f"rope.scaling.{name}": 1.0 for name in ("attn_factor", "yarn_beta_slow", "yarn_ext_factor")
}
"""Values that change no text. Of all other keys these are 0 and false."""
_TOKENS = {"bos": "bos", "eos": "eos", "padding": "pad"}
_BIASES = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(\.weight|\.bias|\.scale)?")
_UNPACKED = (".mlp.gate.", ".router.", ".linear_attn.")
"""Matrices that are kept unpacked: routers, and those that the library computes with."""
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
        packed: keep matrices as the file stores them, mapped rather than read into memory. Experts,
            routers and recurrent layers are unpacked.

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
        model = unfilled(AutoConfig.for_model(values.pop("model_type"), **values), dtype)
    except Exception as error:  # the library may raise anything for malicious numbers
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(f"{path}: its metadata does not describe a model: {reason}") from error
    entries: dict[str, list[Entry]] = {}
    places: dict[int, tuple[str, Tensor]] = {}
    for name, place in model.state_dict(keep_vars=True).items():
        places.setdefault(id(place), (name, place))  # shared ones once
    for name, entry in _named(contents, architecture, model.config.num_hidden_layers):
        entries.setdefault(name, []).append(entry)
    scalars = _scalars(contents, architecture, model.config.num_hidden_layers)
    for name, place in places.values():
        if name in scalars:
            put(model, name, torch.full_like(place, scalars[name]))
            continue
        if name not in entries:
            raise ValueError(_INCOMPLETE.format(path, f"{name} has no tensor"))
        parts = sorted(entries.pop(name), key=lambda each: "_up_" in each.name)  # gates first
        shape = [*parts[0].shape]
        rows = int(len(shape) == 3)  # of experts, whose gates may lie in a tensor of their own
        shape[rows] *= len(parts)
        wanted = [*(place.squeeze(1) if name.endswith("conv1d.weight") else place).shape]
        if shape != wanted or any(each.shape != parts[0].shape for each in parts):
            raise ValueError(
                f"{path}: {parts[0].name} has shape {parts[0].shape}, and the model that its "
                f"metadata describes needs {tuple(wanted)}"
            )
        read = packed and not any(each in name for each in _UNPACKED)
        weights = [
            _weight(contents, architecture, model.config, each, dtype, read) for each in parts
        ]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights, rows)
        put(model, name, weight if isinstance(weight, Stored) else weight.view(place.shape))
    ignored = getattr(model.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in entries:
        if not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(_INCOMPLETE.format(path, f"no weight is {name}"))
    if FACTORS in given:
        factors, rotary = torch.tensor(given[FACTORS]), model.model.rotary_emb
        turns = getattr(rotary, "inv_freq", torch.empty(0))  # there are several for several bases
        if factors.shape != turns.shape or not (factors > 0).all():
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
    values: dict[str, Any] = {"model_type": architecture.model}
    for key, name in numbers.items():
        number = given.get(key)
        if number is None or (number == 0 and key in architecture.counts):
            continue
        values[name] = number
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise ValueError(f"{path}: {kind}.{key} must be a positive number, got {number!r}")
        if type(number) is int and number > len(contents.data):  # which might fill the memory
            raise ValueError(f"{path} is too small for {kind}.{key} = {number}")
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(layers) != values.get("num_hidden_layers"):
        raise ValueError(
            f"{path} is incomplete: its metadata says {values.get('num_hidden_layers')} layers, "
            f"but it has tensors of {len(layers)}"
        )
    values["num_hidden_layers"] -= values.pop("mtp_num_hidden_layers", 0)  # a head that drafts
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{path} has no matrix token_embd.weight")
    values["vocab_size"], width = embedding.shape
    head = values.setdefault("head_dim", width // values.get("num_attention_heads", 1))
    for key in {"attention.value_length", "rope.dimension_count"} - {*architecture.reads}:
        if given.get(key, head) != head:
            raise ValueError(f"{path}: {kind}.{key} other than the width of keys is not supported")
    values["rope_parameters"] = rope = _rope(path, given, values)
    if "rope.dimension_count" in architecture.reads:
        rope["partial_rotary_factor"] = given.get("rope.dimension_count", head) / head
    values["attention_bias"] = not tensors.keys().isdisjoint(_BIASES)
    for key, name in _TOKENS.items():  # a library's default may lie outside of the vocabulary
        values[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    values["tie_word_embeddings"] = "output.weight" not in tensors
    for name in tensors.keys() & {*architecture.tensors}:
        given[name] = _numbers(contents, tensors[name]).tolist()
    return given, values


def _rope(path: Path, given: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The rotary positions, as a configuration says them. YaRN: arXiv:2309.00071."""
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta", 10_000.0)}
    scaling, factor = given.get("rope.scaling.type", "linear"), values.pop("rope_scaling", None)
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise ValueError(
            f"{path}: rotary scaling {scaling!r} in GGUF is not supported; load the model's folder"
        )
    if factor is None or scaling == "none":
        return rope
    if scaling == "yarn":
        whole = values.get("max_position_embeddings")
        context = given.get("rope.scaling.original_context_length", whole)
        rope["original_max_position_embeddings"] = context
    return rope | {"rope_type": "yarn" if scaling == "yarn" else "linear", "factor": factor}


def _named(
    contents: Contents, architecture: FileArchitecture, layers: int
) -> Iterator[tuple[str, Entry]]:
    """Yield the weights of the model's layers by name, without factors of rotary frequencies."""
    for name, entry in contents.tensors.items():
        match = _TENSOR.fullmatch(name)
        layer, part, end = match.groups("") if match else ("", "", "")
        weight = architecture.name(layer, part, end)
        if layer and int(layer) >= layers:  # a head that drafts
            continue
        if weight is not None or name not in architecture.tensors:
            yield weight or name, entry  # a name that no weight has


def _scalars(contents: Contents, architecture: FileArchitecture, layers: int) -> dict[str, float]:
    """The weights that are numbers in the metadata, by name."""
    made: dict[str, float] = {}
    for key, part in architecture.scalars.items():
        numbers = contents.metadata.get(key)
        if not isinstance(numbers, list) or [*map(math.isfinite, numbers)] != [True] * layers:
            raise ValueError(f"{contents.path}: {key} must hold {layers} numbers, one for a layer")
        made |= {f"model.layers.{layer}.{part}": number for layer, number in enumerate(numbers)}
    return made


def _weight(
    contents: Contents,
    architecture: FileArchitecture,
    config: Any,
    entry: Entry,
    dtype: torch.dtype,
    packed: bool,
) -> Tensor:
    """A tensor as data of a parameter or buffer."""
    part = _TENSOR.fullmatch(entry.name)[2]  # type: ignore[index]
    if packed and len(entry.shape) == 2 and entry.shape[1] % UNIT == 0:
        stored = _stored(contents, entry, dtype)
        rows = architecture.change(part, stored.bytes, config)
        kept = rows is stored.bytes  # mapped
        return stored if kept else Stored(rows, entry.format, entry.shape[1], dtype)
    numbers = architecture.change(part, _numbers(contents, entry), config)
    if not numbers.isfinite().all():
        raise ValueError(f"{contents.path}: {entry.name} holds numbers that no such model has")
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
