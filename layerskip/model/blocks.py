"""Modules trained to draft for a frozen model; knows their arithmetic, no losses, no rounds.

Three kinds, after three papers. Each turns hidden states of the model into hidden states that the
model's own final norm and head read; those, and the embedding, stay frozen and are no part of them.
- `ExitBlock`: a decoder layer behind an early exit (Kangaroo, Liu et al. 2024, arXiv 2404.18911);
- `FeatureBlock`: a decoder layer over the model's last hidden state and the token that followed it,
  fed with its own output where it runs ahead (EAGLE, Li et al. 2024, arXiv 2401.15077);
- `Heads`: several tokens from one such pair (Medusa-1, Cai et al. 2024, arXiv 2401.10774).
Letters: B rows, T tokens, H hidden width, K heads.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.config import Trained
from layerskip.model.backend import Backend, Block
from layerskip.model.cache import additive, causal
from layerskip.model.families import Architecture
from layerskip.model.modules import Modules
from layerskip.model.trained import trained_weights

_EPSILON = 1e-6


class _Whole:
    """A pass over whole texts from their first token on, without a cache, as in training.

    Attributes:
        rope, masks: as of every `Step`.
    """

    cache = None

    def __init__(self, model: Architecture, hidden: Tensor) -> None:
        count, device = hidden.shape[1], hidden.device
        places = torch.arange(count, device=device)  # (T,)
        kinds = dict.fromkeys(model.layer_types)
        if model.family.rope_by_type:
            self.rope = {k: model.decoder.rotary_emb(hidden, places[None], k) for k in kinds}
        else:
            self.rope = dict.fromkeys(kinds, model.decoder.rotary_emb(hidden, places[None]))
        seen = {w: causal(places[None], places, w) for w in model.distinct_windows}
        self.masks: dict[int | None, Tensor | None] = {
            window: additive(mask, hidden.dtype) if model.eager else mask  # (1, 1, T, T)
            for window, mask in seen.items()
        }
        if not model.eager:
            for window in self.masks:  # the kernel knows causality, and is faster without a mask
                if window is None or window >= count:
                    self.masks[window] = None


class Layer(nn.Module):
    """A decoder layer beside those of a model, built like one of them.

    It attends as the model's full layers do, if it has such.

    Args:
        model: whose layers it is like.
        like: the layer whose weights it begins with; the last one by default.
    """

    def __init__(self, model: Architecture, like: int | None = None) -> None:
        super().__init__()
        self.architecture = model
        full = "full_attention"
        self.kind = full if full in model.layer_types else model.layer_types[-1]
        of_kind = [i for i, kind in enumerate(model.layer_types) if kind == self.kind]
        self.window = model.windows[of_kind[-1]]
        built = deepcopy(model.layers[of_kind[-1]])  # what a layer computes may depend on its kind
        begin = built if like is None else model.layers[like]
        values = dict(begin.named_parameters())
        for name, parameter in built.named_parameters():
            # storage of its own: the model's may hold several weights together
            owner = built.get_submodule(name.rpartition(".")[0])
            value = nn.Parameter(values[name].detach().clone(), parameter.dtype.is_floating_point)
            setattr(owner, name.rpartition(".")[2], value)
        built.self_attn.layer_idx = 0  # in a cache of its own
        self.built = built.eval()

    def sublayers(self, backend: Any, bits: int | None = None) -> tuple[Block, Block]:
        """Its attention and its MLP, as a backend computes them, rounded or exact."""
        blocks: tuple[Block, Block] = backend.beside(self.built, self.window, self.kind, bits)
        return blocks

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, T, H) of whole texts to as many, every token seeing those before it."""
        step: Any = _Whole(self.architecture, hidden)
        for block in self._differentiable:
            hidden = block(hidden, step)
        return hidden

    @cached_property
    def _differentiable(self) -> tuple[Block, Block]:
        return self.sublayers(Modules(self.architecture))


class ExitBlock(nn.Module):
    """A decoder layer behind an early exit, with keys and values of its own.

    Args:
        like: the layer whose weights it begins with; the last one by default.
    """

    def __init__(self, model: Architecture, like: int | None = None) -> None:
        super().__init__()
        self.layer = Layer(model, like)

    def forward(self, hidden: Tensor) -> Tensor:
        """For training: states at the exit of whole texts, (B, T, H), to what the head reads.

        Position t has seen tokens 0 to t and tells token t + 1.
        """
        out: Tensor = self.layer(hidden)
        return out


class FeatureBlock(nn.Module):
    """A decoder layer over the last hidden state of the token before, and the token.

    Its output stands for the token's own last hidden state (before the final norm), so that it may
    be fed with it in place of the model's.

    Args:
        like: the layer whose weights it begins with; the last one by default.
    """

    def __init__(self, model: Architecture, like: int | None = None) -> None:
        super().__init__()
        self.layer = Layer(model, like)
        self.fuse = _linear(model, 2, 1)
        with torch.no_grad():  # begins as the mean of both
            self.fuse.weight.copy_(_eye(model).repeat(1, 2) / 2)

    def join(self, features: Tensor, embedded: Tensor) -> Tensor:
        """What the layer is fed with: both in the scale of the features, (..., H) each."""
        both, scale = _scaled(features, embedded)
        out: Tensor = self.fuse(both) * scale
        return out

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """For training, of whole texts, (B, T, H) each to (B, T, H).

        Position t holds token t: its embedding, and the last hidden state of token t - 1 (zeros
        before the first; from a second pass on perhaps the block's own). It tells token t + 1.
        """
        out: Tensor = self.layer(self.join(features, embedded))
        return out


class Heads(nn.Module):
    """K tokens at once from the last hidden state of the token before, and the token.

    Args:
        count: K.
    """

    def __init__(self, model: Architecture, count: int = 4) -> None:
        super().__init__()
        heads = [_linear(model, 2, 1) for _ in range(count)]
        for head in heads:
            nn.init.zeros_(head.weight)  # all begin as the model's own head
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Of any positions, (B, T, H) each to (B, T, K, H).

        Position t holds what it does in `FeatureBlock`; head k (from 0) tells token t + 1 + k.
        """
        both, scale = _scaled(features, embedded)
        each = torch.stack([head(both) for head in self.heads], dim=-2)  # (B, T, K, H)
        out: Tensor = features[..., None, :] + F.silu(each) * scale[..., None, :]
        return out


AnyBlock = ExitBlock | FeatureBlock | Heads


def open_block(
    model: Architecture, backend: Backend, trained: Trained, bits: int | None = None
) -> tuple[AnyBlock, tuple[Block, ...]]:
    """The module that a skip config names, its weights those of the file in the model's dtype.

    Args:
        backend: computes with it.
        bits: that its linears are rounded to, if they are.

    Returns:
        The module, and the sublayers of its layer if it has one.

    Raises:
        ValueError: the file is none of this model's (see `trained_weights`), or holds no such
            module.
    """
    weights = trained_weights(model.model, trained)
    block: AnyBlock
    if trained.kind == "exit-block":
        block = ExitBlock(model)
    elif trained.kind == "feature-block":
        block = FeatureBlock(model)
    else:
        block = Heads(model, max(1, len(weights)))
    own = {name: (value.shape, value.dtype) for name, value in block.state_dict().items()}
    wrong = sorted(
        name
        for name in own.keys() | weights.keys()
        if name not in own or name not in weights or own[name][0] != weights[name].shape
    )
    if wrong:
        raise ValueError(
            f"the trained draft {trained.weights} holds no {trained.kind} of this model: "
            f"{len(wrong)} tensors are missing, too many or of another shape, {wrong[0]} first"
        )
    block.load_state_dict({name: weights[name].to(own[name][1]) for name in own})
    block.requires_grad_(False)
    beside = () if isinstance(block, Heads) else block.layer.sublayers(backend, bits)
    if bits is not None:
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("layer."):
                module.forward = backend.product(module, bits)  # type: ignore[assignment]
    return block, beside


def _linear(model: Architecture, inputs: int, outputs: int) -> nn.Linear:
    """A linear of so many hidden states to so many, of the model's dtype and device."""
    width = model.config.hidden_size
    how = {"dtype": model.dtype, "device": model.device}
    return nn.Linear(inputs * width, outputs * width, bias=False, **how)


def _eye(model: Architecture) -> Tensor:
    return torch.eye(model.config.hidden_size, dtype=model.dtype, device=model.device)  # (H, H)


def _scaled(features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Both side by side in unit scale, (..., 2 H), and the scale of the features, (..., 1)."""
    two = torch.stack([features, embedded], -2)  # (..., 2, H)
    wide = two.to(torch.promote_types(two.dtype, torch.float32))
    scales = wide.square().mean(-1, keepdim=True).add(_EPSILON).sqrt().to(two.dtype)  # (..., 2, 1)
    return (two / scales).flatten(-2), scales[..., 0, :]
