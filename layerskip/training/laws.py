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
from layerskip.training.losses import LOSSES, overlap

DEEPER = 0.8  # the weight of a step further on: it counts only where those before it are right


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

    def distance(self, made: Made, batch: Batch) -> Tensor:
        """The loss of a draft's steps, a scalar: their mean, a deeper one counting less."""
        losses = []
        for hidden, ahead in made:
            target, following = batch.target[:, ahead:], batch.following[:, ahead:]
            losses.append(self.loss(self.logits(hidden), target, following, self.temperature))
        weights = losses[0].new_tensor([DEEPER**n for n in range(len(losses))])
        return (weights * torch.stack(losses)).sum() / weights.sum()

    def overlaps(self, made: Made, batch: Batch) -> list[float]:
        """By step of a draft, the mean overlap of its laws with the target's."""
        return [
            overlap(self.logits(hidden), batch.target[:, ahead:], self.temperature).mean().item()
            for hidden, ahead in made
        ]


Made = list[tuple[Tensor, int]]
"""By step of a draft, hidden states (B, T - a, H), and how many tokens further on than the next one
their laws are: a."""


class Student(nn.Module, ABC):
    """What is trained."""

    @abstractmethod
    def made(self, batch: Batch) -> Made:
        """What its steps make of windows."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """What goes into the draft's file."""
