"""Modules that are trained to draft for a frozen model.

There are four kinds, from four papers. Each turns hidden states of the model into hidden states for
the model's own final norm and head. Those and the embedding stay frozen and are not part of it.
- `ExitBlock`: a decoder layer behind an early exit (Kangaroo, Liu et al. 2024, arXiv 2404.18911);
- `FeatureBlock`: a decoder layer over the model's last hidden state and the token that followed it,
  fed with its own output where it runs ahead (EAGLE, Li et al. 2024, arXiv 2401.15077);
- `Heads`: several tokens from one such pair (Medusa-1, Cai et al. 2024, arXiv 2401.10774);
- `Streams`: several tokens in one pass of such a layer, in which learned streams after the last
  token attend to the text (the n-stream attention of ProphetNet, Qi et al. 2020, arXiv 2001.04063).
Letters: B rows, T tokens, H hidden width, K heads or streams.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.config import Trained
from layerskip.model.architecture import Architecture
from layerskip.model.backend import Backend, Block
from layerskip.model.cache import additive, causal
from layerskip.model.modules import Modules
from layerskip.model.trained import TOKENS, trained_weights

_EPSILON = 1e-6


class _WholeTexts:
    """A pass over whole texts from their first token on, without a cache, for training.

    Args:
        hidden: the inputs, (B, T K, H).
        streams: K. Every token has its own place and K - 1 places ahead of it, the streams. They
            see the text up to the token and each other; other tokens do not see them.

    Attributes:
        rope, slots: as in `Step`.
    """

    cache = blocks = None

    def __init__(self, model: Architecture, hidden: Tensor, streams: int = 1) -> None:
        count, device = hidden.shape[1] // streams, hidden.device
        every = torch.arange(count * streams, device=device)
        tokens, ahead = every // streams, every % streams  # (T K,) each
        places = tokens + ahead
        turned, by_type = model.decoder.rotary_emb, model.family.rope_by_type
        self.slots = places[None]  # (1, T K)
        self.rope = {
            kind: turned(hidden, places[None], *([kind] if by_type else [])) for kind in model.kinds
        }
        text = (ahead == 0) & (tokens <= tokens[:, None])  # (T K, T K)
        own = tokens == tokens[:, None]
        seen = {w: causal(places[None], places, w) & (text | own) for w in model.distinct_windows}
        self._masks: dict[int | None, Tensor | None] = {
            window: additive(mask, hidden.dtype) if model.eager else mask  # (1, 1, T K, T K)
            for window, mask in seen.items()
        }
        if not model.eager and streams == 1:
            for window in self._masks:  # the kernel is causal, and faster, without a mask
                if window is None or window >= count:
                    self._masks[window] = None

    def mask(self, window: int | None, sink: int = 0) -> Tensor | None:
        """As in `Step`; trained layers have no sink."""
        return self._masks[window]


class Layer(nn.Module):
    """An extra decoder layer, built like one of a model's.

    It attends like the model's layers with full attention, if there are any.

    Args:
        model: whose layers it is like.
        like: the layer whose weights it begins with; the last one by default.
    """

    def __init__(self, model: Architecture, like: int | None = None) -> None:
        super().__init__()
        self.architecture = model
        # one with keys and values of its own, in the way of the full layers if there are any
        own = [part for part in model.parts if part.writes]
        full = [part for part in own if part.kind == "full_attention"]
        part = (full or [each for each in own if each.kind == own[-1].kind])[-1]
        built = deepcopy(part.module)  # what a layer computes may depend on its kind
        begin = built if like is None else model.layers[like]
        values = dict(begin.named_parameters())
        for name, parameter in built.named_parameters():
            # storage of its own: the model's may hold several weights together
            owner = built.get_submodule(name.rpartition(".")[0])
            value = nn.Parameter(values[name].detach().clone(), parameter.dtype.is_floating_point)
            setattr(owner, name.rpartition(".")[2], value)
        built.self_attn.layer_idx = 0  # in a cache of its own
        self.built = built.eval()
        self.parts = model.parts_of(0, built, part.window, part.kind)
        self.kind, self.window = part.kind, part.window

    def sublayers(self, backend: Any, bits: int | None = None) -> tuple[Block, Block]:
        """Its attention and its MLP, as a backend computes them, rounded or exact."""
        blocks: tuple[Block, Block] = backend.extra_layer(self.parts, bits)
        return blocks

    def forward(self, hidden: Tensor, streams: int = 1) -> Tensor:
        """Hidden states (B, T, H) of whole texts to as many; tokens see those before them.

        With streams (B, T K, H), as for `_WholeTexts`.
        """
        step: Any = _WholeTexts(self.architecture, hidden, streams)
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
        """For training: states of whole texts at the exit, (B, T, H), to states for the head.

        Position t has seen tokens 0 to t and predicts token t + 1.
        """
        out: Tensor = self.layer(hidden)
        return out


class FeatureBlock(nn.Module):
    """A decoder layer over a token and the last hidden state of the token before it.

    Its output predicts the token's own last hidden state (before the final norm), so that it can
    be fed with its output instead of the model's. At first it passes the state on unchanged: on
    demo-gemma2 that gains .04 of overlap after 100,000 tokens, on SmolLM2 nothing.

    Args:
        like: the layer whose weights it begins with, except the outputs of attention and MLP,
            which begin as zeros; the last one by default.
    """

    def __init__(self, model: Architecture, like: int | None = None) -> None:
        super().__init__()
        self.layer = Layer(model, like)
        self.fuse = _linear(model, 2, 1)
        with torch.no_grad():
            self.fuse.weight.copy_(torch.cat([_eye(model), torch.zeros_like(_eye(model))], 1))
            for name, parameter in self.layer.built.named_parameters():
                if "o_proj" in name or "down_proj" in name:  # of experts, too
                    parameter.zero_()

    def join(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The layer's inputs: both in the scale of the features, (..., H) each."""
        both, scale = _scaled(features, embedded)
        out: Tensor = self.fuse(both) * scale
        return out

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """For training, of whole texts, (B, T, H) each to (B, T, H).

        Position t holds token t: its embedding, and the last hidden state of token t - 1 (zeros
        before the first; in later passes perhaps the block's own). It predicts token t + 1.
        """
        out: Tensor = self.layer(self.join(features, embedded))
        return out


class Heads(nn.Module):
    """Predicts K tokens at once from a token and the last hidden state of the one before it.

    Args:
        count: K.
    """

    def __init__(self, model: Architecture, count: int = 4) -> None:
        super().__init__()
        heads = [_linear(model, 2, 1) for _ in range(count)]
        for head in heads:
            nn.init.zeros_(head.weight)  # all begin as the model's own head
        self.heads = nn.ModuleList(heads)

    @property
    def count(self) -> int:
        """K."""
        return len(self.heads)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Any positions, (B, T, H) each to (B, T, K, H).

        Position t is as in `FeatureBlock`; head k (from 0) predicts token t + 1 + k.
        """
        both, scale = _scaled(features, embedded)
        each = torch.stack([head(both) for head in self.heads], dim=-2)  # (B, T, K, H)
        out: Tensor = features[..., None, :] + F.silu(each) * scale[..., None, :]
        return out


class Streams(FeatureBlock):
    """Predicts K tokens in one pass: a `FeatureBlock` with K - 1 streams after the last token.

    A stream gets the same inputs, combined with weights of its own. Its position is further on. It
    sees the text and the streams before it, and predicts the token after its position.

    Args:
        count: K.
        like: the layer whose weights it begins with; the last one by default.
    """

    def __init__(self, model: Architecture, count: int = 4, like: int | None = None) -> None:
        super().__init__(model, like)
        self.ahead = _linear(model, 2, count - 1)
        nn.init.zeros_(self.ahead.weight)  # copies of the token would pull its weights away
        self.count = count

    def streams(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The inputs of the streams ahead of a token, (..., H) each to (..., K - 1, H)."""
        both, scale = _scaled(features, embedded)
        each = self.ahead(both).unflatten(-1, (self.count - 1, -1))  # (..., K - 1, H)
        out: Tensor = each * scale[..., None, :]
        return out

    def fed(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The inputs of a token and its streams, (..., H) each to (..., K, H)."""
        own = self.join(features, embedded)[..., None, :]  # (..., 1, H)
        return torch.cat([own, self.streams(features, embedded)], -2)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """For training, of whole texts, (B, T, H) each to (B, T, K, H).

        Position t is as in `FeatureBlock`; stream k (from 0) predicts token t + 1 + k.
        """
        fed = self.fed(features, embedded)  # (B, T, K, H)
        out: Tensor = self.layer(fed.flatten(1, 2), self.count).view_as(fed)
        return out


AnyBlock = ExitBlock | FeatureBlock | Heads


class OpenBlock(NamedTuple):
    """A module, the sublayers of its layer if it has one, and the only tokens it may draft."""

    block: AnyBlock
    sublayers: tuple[Block, ...]
    tokens: tuple[int, ...] | None


def open_block(
    model: Architecture, backend: Backend, trained: Trained, bits: int | None = None
) -> OpenBlock:
    """The module that a skip config names, with the file's weights in the model's dtype.

    Args:
        backend: computes with it.
        bits: that its linears are rounded to, if they are.

    Raises:
        ValueError: the file does not belong to this model (see `trained_weights`), or holds no such
            module.
    """
    weights = dict(trained_weights(model.model, trained))
    tokens = weights.pop(TOKENS, None)
    block: AnyBlock
    if trained.kind == "exit-block":
        block = ExitBlock(model)
    elif trained.kind == "feature-block":
        block = FeatureBlock(model)
    elif trained.kind == "streams":
        further = len(weights.get("ahead.weight", ())) // model.config.hidden_size
        block = Streams(model, 1 + max(1, further))
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
    drawn: tuple[int, ...] | None = None
    if tokens is not None:
        drawn = tuple(sorted(set(tokens.flatten().tolist())))
        if not drawn or not 0 <= drawn[0] <= drawn[-1] < model.vocabulary:
            raise ValueError(
                f"the trained draft {trained.weights} drafts tokens that this model lacks: it has "
                f"0..{model.vocabulary - 1}; train one for this model with `layerskip train`"
            )
    sublayers = () if isinstance(block, Heads) else block.layer.sublayers(backend, bits)
    if bits is not None:
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("layer."):
                module.forward = backend.product(module, bits)  # type: ignore[assignment]
    return OpenBlock(block, sublayers, drawn)


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
    scales = _scale(two)  # (..., 2, 1)
    return (two / scales).flatten(-2), scales[..., 0, :]


def _scale(states: Tensor) -> Tensor:
    """The root mean square of hidden states (..., H), (..., 1)."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return wide.square().mean(-1, keepdim=True).add(_EPSILON).sqrt().to(states.dtype)
