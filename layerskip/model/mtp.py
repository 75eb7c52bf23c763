"""Heads for the token after the next, which checkpoints hold and the library does not load.

A head joins a token's embedding with the model's last state of the token before, and runs one
decoder layer of its own over all such pairs; the model's head makes logits of the result.
Letters: R rows, T tokens, H hidden width.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from layerskip.files.reading import read_file

if TYPE_CHECKING:
    from layerskip.model.whole import Whole

_FILE = "model.safetensors"
_INDEX = f"{_FILE}.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_HEADS = re.compile(r"(?:^|\.)mtp(?:\.|_)|^model\.layers\.(\d+)\.")
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj$")


class Layout(NamedTuple):
    """How the tensors of a head are called, behind a prefix ("{}": the model's layers).

    Attributes:
        layer: what those of its decoder layer begin with.
        of_tokens, of_states: norms of embeddings and of the model's states.
        join: makes one of both.
        last: the norm before the model's head.
    """

    prefix: str
    layer: str
    of_tokens: str
    of_states: str
    join: str
    last: str


_BEHIND = Layout("model.layers.{}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_BESIDE = Layout("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
LAYOUTS = dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _BEHIND)
LAYOUTS |= dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _BESIDE)
"""By model type. Of several heads, each for one token further, the first is run again and again."""


class Head(nn.Module):
    """A head without weights; `read` gives it those of a checkpoint.

    Args:
        model: the model it belongs to, of a type in `LAYOUTS`.
    """

    def __init__(self, model: Whole) -> None:
        super().__init__()
        base, config = model.base, model.config
        width, norm = config.hidden_size, type(base.norm)
        types = getattr(config, "layer_types", None) or ["full_attention"] * len(base.layers)
        number = max(i for i, kind in enumerate(types) if kind == "full_attention")
        with torch.device("meta"):
            self.of_tokens = norm(width, eps=config.rms_norm_eps)
            self.of_states = norm(width, eps=config.rms_norm_eps)
            self.join = nn.Linear(2 * width, width, bias=False)
            self.layer: Any = type(base.layers[number])(config, number)
            self.last = norm(width, eps=config.rms_norm_eps)
        self.layer.self_attn.layer_idx = 0  # of a cache with one layer
        self.eval().requires_grad_(False)

    def forward(self, embedded: Tensor, states: Tensor, **more: Any) -> Tensor:
        """What its layer makes of embeddings and states (R, T, H), before the model's head.

        Args:
            more: what the layer needs besides: mask, angles, cache.
        """
        parts = [self.of_tokens(embedded), self.of_states(states)]
        hidden = self.layer(self.join(torch.cat(parts, -1)), **more)
        hidden = hidden if isinstance(hidden, Tensor) else hidden[0]  # early versions 5
        return self.last(hidden)  # type: ignore[no-any-return]


class Found(NamedTuple):
    """The tensors of a head in a checkpoint.

    Attributes:
        head: without weights yet.
        files: by tensor of the checkpoint, its file.
        parts: by tensor of the head, those of the checkpoint that it consists of: one, or a list
            for each of its rows, which are joined.
    """

    head: Head
    files: dict[str, Path]
    parts: dict[str, list[Sequence[str]]]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return sum(weight.numel() for weight in self.head.state_dict().values())


def find(model: Whole) -> Found | str | None:
    """The head in the files that a model was loaded from; why it cannot draft; None: no head.

    Raises:
        ValueError: a tensor of it is missing or of a wrong shape, or the files cannot be read.
    """
    kind, layers = model.config.model_type, model.num_layers
    revision = getattr(model.model.config, "_commit_hash", None)
    files = tensor_files(getattr(model.model, "name_or_path", ""), revision)
    beyond = (_HEADS.search(name) for name in files)
    if not any(each and (each[1] is None or int(each[1]) >= layers) for each in beyond):
        return None
    if kind not in LAYOUTS:
        return f"the layout of a {kind}'s head is not known here; known are {', '.join(LAYOUTS)}"
    layout = LAYOUTS[kind]
    prefix = layout.prefix.format(layers)
    names = {
        "of_tokens": layout.of_tokens,
        "of_states": layout.of_states,
        "join": layout.join,
        "last": layout.last,
    }
    head, parts, opened = Head(model), {}, opener()
    for name, wanted in head.state_dict().items():
        part, _, rest = name.partition(".")
        stored = f"{names[part]}.{rest}" if part in names else layout.layer + rest
        parts[name] = [*_parts(prefix + stored, len(wanted), files)]
        shape = list(wanted.shape)
        if len(parts[name]) > 1 or len(parts[name][0]) > 1:  # a row of experts' weights
            shape = [shape[1] // len(parts[name][0]), *shape[2:]]
        for each in (each for row in parts[name] for each in row):
            if each not in files:
                raise ValueError(
                    f"the checkpoint's head for drafts is not whole: {each} is missing; draft "
                    "without it (draft_memory=0), or load a whole checkpoint"
                )
            there = opened(files[each]).get_slice(each)
            if there.get_dtype() not in _FLOATS:
                return f"{each} is stored as {there.get_dtype()}, not as plain floats"
            if there.get_shape() != shape:
                raise ValueError(
                    f"{each} in {files[each]} has shape {there.get_shape()}, the model's head for "
                    f"drafts needs {shape}; draft without it (draft_memory=0)"
                )
    return Found(head, files, parts)


def read(found: Found, like: Tensor) -> Head:
    """The head with its weights, in the dtype and on the device of a tensor."""
    weights, opened = {}, opener()

    def tensor(name: str) -> Tensor:
        return opened(found.files[name]).get_tensor(name).to(like.device, like.dtype)  # type: ignore[no-any-return]

    for name, rows in found.parts.items():
        joined = [torch.cat([tensor(each) for each in row]) for row in rows]
        weights[name] = joined[0] if len(rows) == 1 else torch.stack(joined)
    found.head.load_state_dict(weights, assign=True)
    return found.head.requires_grad_(False)


def opener() -> Callable[[Path], Any]:
    """Opens each file once: one with thousands of experts takes a while."""

    @functools.cache
    def opened(path: Path) -> Any:
        try:
            return safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error

    return opened


def _parts(name: str, count: int, files: dict[str, Path]) -> Iterator[Sequence[str]]:
    """The tensors that one of the head consists of; experts may be stored one by one."""
    match = _EXPERTS.match(name)
    if match is None or name in files:
        yield [name]
        return
    halves = ("gate", "up") if match[2] == "gate_up" else ("down",)
    for number in range(count):
        yield [f"{match[1]}.{number}.{half}_proj.weight" for half in halves]


def tensor_files(
    source: str, revision: str | None = None, *, fetch: bool = False
) -> dict[str, Path]:
    """By tensor in the safetensors of a checkpoint, its file; empty where there are none.

    Args:
        source: a folder, or a repository of the hub, in its cache or fetched if `fetch` says so.

    Raises:
        ValueError: the files cannot be read.
    """
    index, single = (_file(source, name, revision, fetch) for name in (_INDEX, _FILE))
    try:
        if index is not None:
            inside = json.loads(read_file(index))["weight_map"].items()
            parts = {Path(file).name for _, file in inside} if fetch else ()
            for part in parts:  # beside the index, once they are in the cache
                _file(source, part, revision, fetch)
            return {name: index.parent / Path(file).name for name, file in inside}
        if single is not None:
            return dict.fromkeys(opener()(single).keys(), single)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"cannot read {index or single}: {error}") from error
    return {}


def _file(source: str, name: str, revision: str | None, fetch: bool) -> Path | None:
    quiet = dict.fromkeys(("missing_entries", "connection_errors", "gated_repo"), False)
    how: dict[str, Any] = {f"_raise_exceptions_for_{what}": no for what, no in quiet.items()}
    how |= {"local_files_only": not fetch, "revision": revision}
    try:
        path = cached_file(source, name, **how) if source else None
    except (OSError, ValueError):  # no folder, and no name of a repository
        return None
    return None if path is None else Path(path)
