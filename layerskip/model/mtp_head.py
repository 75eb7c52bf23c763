"""Heads that predict the token after the next; checkpoints have them, the library ignores them.

A head joins a token's embedding with the model's last state of the token before it, and runs its
own decoder layer over all such pairs; the model's head turns the result into logits.
Shapes: R rows, T tokens, H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from layerskip.library import cache_name
from layerskip.weights.formats.tensors import Tensors

if TYPE_CHECKING:
    from layerskip.model.opened_model import OpenedModel

_FLOATS = ("F64", "F32", "F16", "BF16")
_HEADS = re.compile(r"(?:^|\.)mtp(?:\.|_)|^model\.layers\.(\d+)\.")
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj$")


class Layout(NamedTuple):
    """The names of a head's tensors after a prefix ("{}": the number of the model's layers).

    Attributes:
        layer: the prefix of its decoder layer's tensors.
        of_tokens, of_states: norms of embeddings and of the model's states.
        join: the linear layer that combines both.
        last: the norm before the model's head.
    """

    prefix: str
    layer: str
    of_tokens: str
    of_states: str
    join: str
    last: str


_AFTER_LAYERS = Layout("model.layers.{}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_SEPARATE = Layout("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
LAYOUTS = dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _AFTER_LAYERS)
LAYOUTS |= dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _SEPARATE)
"""By model type. If there are heads for several tokens, the first is applied repeatedly."""


class Head(nn.Module):
    """A head without weights; `read` loads them from a checkpoint.

    Args:
        model: the model it belongs to, with a type in `LAYOUTS`.
    """

    def __init__(self, model: OpenedModel) -> None:
        super().__init__()
        base, config = model.decoder, model.config
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
        self.cache_name = cache_name(self.layer)
        self.eval().requires_grad_(False)

    def forward(self, embedded: Tensor, states: Tensor, cache: Any, **more: Any) -> Tensor:
        """Its layer's output for embeddings and states (R, T, H), before the model's head.

        Args:
            more: other arguments of the layer: mask, angles.
        """
        assert self.cache_name is not None
        more[self.cache_name] = cache
        parts = [self.of_tokens(embedded), self.of_states(states)]
        return self.last(self.layer(self.join(torch.cat(parts, -1)), **more))  # type: ignore[no-any-return]


class Found(NamedTuple):
    """The tensors of a head in a checkpoint.

    Attributes:
        head: the head, without weights yet.
        tensors: the checkpoint's tensors.
        parts: for each of the head's tensors, the checkpoint's tensors that form it: one, or a list
            for each of its rows, which are concatenated.
    """

    head: Head
    tensors: Tensors
    parts: dict[str, list[Sequence[str]]]

    @property
    def size(self) -> int:
        """The number of its parameters."""
        return sum(weight.numel() for weight in self.head.state_dict().values())


def find(model: OpenedModel) -> Found | str | None:
    """Find the head in the files of a model: the head, why it cannot draft, or None for no head.

    Raises:
        ValueError: a tensor of it is missing or has the wrong shape, or a file cannot be read.
    """
    kind, layers = model.config.model_type, model.num_layers
    revision = getattr(model.model.config, "_commit_hash", None)
    tensors = Tensors(getattr(model.model, "name_or_path", ""), revision)
    beyond = (_HEADS.search(name) for name in tensors.files)
    if not any(each and (each[1] is None or int(each[1]) >= layers) for each in beyond):
        return None
    if kind not in LAYOUTS:
        return f"the head of a {kind} is not supported; supported are those of {', '.join(LAYOUTS)}"
    layout = LAYOUTS[kind]
    prefix = layout.prefix.format(layers)
    head, parts = Head(model), {}
    for name, wanted in head.state_dict().items():
        part, _, rest = name.partition(".")
        stored = layout.layer + rest if part == "layer" else f"{getattr(layout, part)}.{rest}"
        parts[name] = [*_parts(prefix + stored, len(wanted), tensors)]
        shape = list(wanted.shape)
        if len(parts[name]) > 1 or len(parts[name][0]) > 1:  # a row of experts' weights
            shape = [shape[1] // len(parts[name][0]), *shape[2:]]
        for each in (each for row in parts[name] for each in row):
            if each not in tensors:
                raise ValueError(
                    f"the checkpoint's head for drafts is incomplete: {each} is missing; draft "
                    "without it (draft_memory=0), or load a complete checkpoint"
                )
            there = tensors.slice(each)
            if there.get_dtype() not in _FLOATS:
                return f"{each} is stored as {there.get_dtype()}, not as plain floats"
            if there.get_shape() != shape:
                raise ValueError(
                    f"{each} in {tensors.files[each]} has shape {there.get_shape()}, the model's "
                    f"head for drafts needs {shape}; draft without it (draft_memory=0)"
                )
    return Found(head, tensors, parts)


def read(found: Found, like: Tensor) -> Head:
    """Load the head's weights in the dtype and on the device of a tensor."""
    weights = {}
    for name, rows in found.parts.items():
        parts = [[found.tensors.tensor(each).to(like) for each in row] for row in rows]
        joined = [torch.cat(row) for row in parts]
        weights[name] = joined[0] if len(rows) == 1 else torch.stack(joined)
    found.head.load_state_dict(weights, assign=True)
    return found.head.requires_grad_(False)


def _parts(name: str, count: int, tensors: Tensors) -> Iterator[Sequence[str]]:
    """Yield the checkpoint's tensors that form one of the head's; experts may be separate."""
    match = _EXPERTS.match(name)
    if match is None or name in tensors:
        yield [name]
        return
    halves = ("gate", "up") if match[2] == "gate_up" else ("down",)
    for number in range(count):
        yield [f"{match[1]}.{number}.{half}_proj.weight" for half in halves]
