"""Medusa's heads as published: each predicts one further token from the target's last state.

Head k adds residual blocks of its own to the state after the final norm, and has its own output
head. So it needs neither the drafted tokens nor the target's head (Cai et al. 2024, arXiv
2401.10774). Folders are those of the authors (FasterDecoding): `config.json` with
`medusa_num_heads`, and the heads in `medusa_lm_head.safetensors` or `medusa_lm_head.pt`.
Shapes: R rows of a pass, H hidden width of the target, V vocabulary, K heads.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from layerskip.decoding.acceptance import PRIOR_MODULE
from layerskip.decoding.sources.base import AtOnce, Batch, Source, State
from layerskip.decoding.sources.sublayer_draft import BEST
from layerskip.library import file_of
from layerskip.model.opened_model import OpenedModel

_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """K heads without weights, with parts named as in the authors' files."""

    def __init__(self, count: int, depth: int, width: int, vocabulary: int) -> None:
        def head() -> nn.Sequential:
            blocks = [_Residual(width) for _ in range(depth)]
            return nn.Sequential(*blocks, nn.Linear(width, vocabulary, bias=False))

        with torch.device("meta"):
            super().__init__(head() for _ in range(count))
        self.shape, self.name_or_path = (vocabulary, width), ""

    def forward(self, state: Tensor) -> Tensor:
        """Map states after the final norm, (R, H), to the logits of every head, (R, K, V)."""
        return torch.stack([head(state) for head in self], 1)

    def source(self, target: OpenedModel, tokens: Sequence[int] | None) -> Source:
        """The source that drafts with them, as of a `Drafter`.

        Raises:
            ValueError: they belong to another model, or the drafts are limited to some tokens.
        """
        needed = (target.vocabulary, target.config.hidden_size)
        if self.shape != needed:
            raise ValueError(
                "the Medusa heads belong to another model: they map {1} numbers to {0} tokens, "
                "this model needs {3} and {2}; give heads made for it".format(*self.shape, *needed)
            )
        if tokens is not None:
            raise ValueError("Medusa heads draft all tokens: leave draft_vocabulary out")
        return Medusa(target, self)


def load_medusa(
    source: str | os.PathLike[str], config: Mapping[str, Any], *, dtype: torch.dtype
) -> MedusaHeads:
    """Load heads from a folder or a Hub id.

    Args:
        config: the content of its `config.json`.

    Raises:
        ValueError: there is no file of them, or its tensors are not those that its config names.
    """
    count, depth = config["medusa_num_heads"], config.get("medusa_num_layers", 1)
    found = (file_of(os.fspath(source), name, fetch=True) for name in _FILES)
    file = next((each for each in found if each is not None), None)
    if file is None:
        raise ValueError(f"{source} holds no Medusa heads: there must be {' or '.join(_FILES)}")
    try:
        safe = file.suffix == ".safetensors"
        weights = load_file(file) if safe else torch.load(file, "cpu", weights_only=True)
        weights = {name.removeprefix("medusa_head."): value for name, value in weights.items()}
        vocabulary, width = weights[f"0.{depth}.weight"].shape
        heads = MedusaHeads(count, depth, width, vocabulary)
        heads.load_state_dict({name: each.to(dtype) for name, each in weights.items()}, assign=True)
    except (
        *(SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError),
        *(AttributeError, KeyError, TypeError, ValueError),
    ) as error:  # damaged, or of other sizes
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{file} does not hold the {count} Medusa heads that its config.json says: "
            f"{type(error).__name__}: {reason}"
        ) from error
    heads.name_or_path = os.fspath(source)
    return heads.eval().requires_grad_(False)


class Medusa(Source):
    """Drafts with a target's Medusa heads: as many tokens as there are heads, in one step."""

    prior = PRIOR_MODULE
    name = "medusa"

    def __init__(self, target: OpenedModel, heads: MedusaHeads) -> None:
        self.model, self.heads, self.longest = target, heads, len(heads)
        self.per_step = self.longest

    @property
    def words(self) -> str:
        return f"{self.longest} Medusa heads, {self.heads.name_or_path}"

    @property
    def key(self) -> Hashable:
        return (self.name, weakref.ref(self.heads), self.model.dtype)

    def open(self, batch: Batch) -> State:
        return _MedusaState(batch, self)

    def step_bytes(self) -> Sequence[float]:
        return [float(sum(each.nbytes for each in self.heads.parameters()))]


class _MedusaState(AtOnce):
    best = BEST

    def __init__(self, batch: Batch, source: Medusa) -> None:
        super().__init__(batch)
        self.heads = source.heads
        self.normed = source.model.normed
        self.tap: int = batch.model.num_sublayers

    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        # The state that drew the last token; head k predicts the token k places after it.
        state = self.batch.tapped(self.tap, self.places(), 1, before=1)[:, 0]  # (R, H)
        raw: Tensor = self.heads(self.normed(state))
        return raw
