"""What a step of training learns from, and how far laws are off; knows no kinds of drafts.

The target has been through the texts. Hidden states of a draft, read through the frozen norm and
head, are laws of the next token; those are to be the target's at that place.
Letters: B windows, T tokens of one, H hidden width, n tokens that the loss looks at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.model.backend import softcap
from layerskip.model.draft_head import TrimmedHead
from layerskip.model.sublayers import Sublayers
from layerskip.training.losses import LOSSES


@dataclass(frozen=True)
class Batch:
    """What a step learns from.

    Attributes:
        ids: (B, T).
        states: the target's last, (B, T, H).
        tapped: those at the draft's exit, (B, T, H).
        target: the target's logits, (B, T, n).
        following: which of the n tokens the text goes on with, (B, T), -1 where it is none.
    """

    ids: Tensor
    states: Tensor
    tapped: Tensor | None
    target: Tensor
    following: Tensor


class Laws:
    """Laws of hidden states over some tokens, through the frozen norm and head; their distance.

    Args:
        tokens: those that the loss looks at, (n,).
        loss: of `LOSSES`.
    """

    def __init__(self, model: Sublayers, tokens: Tensor, loss: str, temperature: float) -> None:
        self.norm, self.cap, self.dtype = model.decoder.norm, softcap(model.softcap), model.dtype
        self.rows = TrimmedHead(model.model.lm_head, tokens.tolist())
        self.places = torch.full((model.vocabulary,), -1)  # of a token
        self.places[tokens] = torch.arange(len(tokens))
        self.places = self.places.to(model.device)
        self.loss, self.temperature = LOSSES[loss], temperature

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states (B, T, H), with gradients for them: float32, (B, T, n)."""
        out = F.linear(self.norm(hidden.to(self.dtype)), self.rows.weight, self.rows.bias)
        return (out if self.cap is None else self.cap(out)).float()

    @torch.no_grad()
    def batch(self, ids: Tensor, states: Tensor, tapped: Tensor | None) -> Batch:
        """What a step learns from, of windows (B, T) and states (B, T, H)."""
        following = F.pad(self.places[ids[:, 1:]], (0, 1), value=-1)  # (B, T)
        return Batch(ids, states, tapped, self.logits(states), following)

    def distance(self, hidden: Tensor, batch: Batch, ahead: int = 0) -> Tensor:
        """The loss of hidden states (B, T - ahead, H), each of the law so many tokens further on.

        Scalar.
        """
        target, following = batch.target[:, ahead:], batch.following[:, ahead:]
        return self.loss(self.logits(hidden), target, following, self.temperature)


class Student(nn.Module, ABC):
    """What is trained."""

    @abstractmethod
    def loss(self, batch: Batch, laws: Laws) -> Tensor:
        """Of a step, a scalar."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """What goes into the draft's file."""
