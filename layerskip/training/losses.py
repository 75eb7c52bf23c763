"""Losses that bring a draft's next-token distribution closer to the target's.

A drafted token is accepted with probability alpha = sum min(p, q) = 1 - TV(p, q), where p is the
target's distribution and q the draft's. Drafts are trained to raise alpha, but TV alone has little
gradient if the two are far apart.
Shapes: B windows, T tokens of one, H hidden width, V vocabulary, n tokens that a loss covers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.backends.base import logit_transform
from layerskip.model.opened_model import OpenedModel
from layerskip.training.processes import average
from layerskip.weights.draft_head import TrimmedHead

Step = tuple[Tensor, Tensor, Tensor | None]
"""Of a draft's step, its logits (..., V), the target's, and the text's next tokens (...), -1 for
none; None: no loss reads them."""
Loss = Callable[[Tensor, Tensor, Any, float], Tensor]
"""Computes a scalar from a step and a temperature."""
DraftStates = list[tuple[Tensor, int]]
"""For each step of a draft, hidden states (B, T - a, H), and a: how many tokens after the next one
they predict."""

ETA = 3.0  # of `lk`, as published for blocks that read the target's states
DEEPER = 0.8  # weight of each later step, which matters only if those before it are right


def divergences(logits: Tensor, target_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Mean KL(p || q) in nats and TV(p, q); both logits (..., V), p without gradients."""
    log_q = F.log_softmax(logits / temperature, -1)
    log_p = F.log_softmax(target_logits.detach() / temperature, -1)
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1).mean()
    return kl, 0.5 * (p - log_q.exp()).abs().sum(-1).mean()


def ce(logits: Tensor, _: Tensor, following: Tensor, temperature: float) -> Tensor:
    """Cross-entropy with the text's next tokens."""
    total = F.cross_entropy(
        (logits / temperature).flatten(0, -2), following.flatten(), ignore_index=-1, reduction="sum"
    )
    return total / average((following >= 0).sum().to(total.dtype))


def overlap(logits: Tensor, target_logits: Tensor, temperature: float) -> Tensor:
    """Mean alpha, a scalar."""
    return 1 - divergences(logits, target_logits, temperature)[1]


def lk(logits: Tensor, target_logits: Tensor, _: Tensor | None, temperature: float) -> Tensor:
    """lambda KL(p || q) + (1 - lambda) TV, lambda = exp(-ETA alpha) of the batch (2602.23881)."""
    kl, tv = divergences(logits, target_logits, temperature)
    weight = torch.exp(-ETA * (1 - average(tv.detach())))
    return weight * kl + (1 - weight) * tv


def distance(loss: Loss, steps: Sequence[Step], temperature: float) -> Tensor:
    """The weighted mean loss of a draft's steps, a scalar (see `DEEPER`)."""
    losses = torch.stack([loss(*step, temperature) for step in steps])
    weights = losses.new_tensor([DEEPER**number for number in range(len(steps))])
    return (weights * losses).sum() / weights.sum()


@torch.no_grad()
def overlaps(steps: Sequence[Step], temperature: float) -> list[float]:
    """For each step of a draft, the mean overlap of its distributions with the target's."""
    return [overlap(logits, target, temperature).item() for logits, target, _ in steps]


@dataclass(frozen=True)
class TrainingBatch:
    """The data of a training step.

    Attributes:
        ids: token ids, (B, T).
        states: the target's last hidden states, (B, T, H).
        tapped: its states at the draft's exit, (B, T, H).
        target: its logits, (B, T, n).
        following: the index among the n tokens of the text's next one, (B, T), -1 if not included.
    """

    ids: Tensor
    states: Tensor
    tapped: Tensor | None
    target: Tensor
    following: Tensor


class LossInputs:
    """Compares a draft's hidden states with the target's, using the frozen norm and head.

    Args:
        tokens: the tokens that the loss covers, (n,).
    """

    def __init__(self, model: OpenedModel, tokens: Tensor) -> None:
        self.norm, self.cap, self.dtype = model.decoder.norm, logit_transform(model), model.dtype
        self.rows = TrimmedHead(model.unembedding, tokens.tolist())
        self.places = torch.full((model.vocabulary,), -1)  # index of each token among these
        self.places[tokens] = torch.arange(len(tokens))
        self.places = self.places.to(model.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states (B, T, H), with gradients: float32, (B, T, n)."""
        out = F.linear(self.norm(hidden.to(self.dtype)), self.rows.weight, self.rows.bias)
        return (out if self.cap is None else self.cap(out)).float()

    @torch.no_grad()
    def batch(self, ids: Tensor, states: Tensor, tapped: Tensor | None) -> TrainingBatch:
        """The data of a step, from windows (B, T) and states (B, T, H)."""
        following = F.pad(self.places[ids[:, 1:]], (0, 1), value=-1)  # (B, T)
        return TrainingBatch(ids, states, tapped, self.logits(states), following)

    def steps(self, states: DraftStates, batch: TrainingBatch) -> list[Step]:
        """The steps of a draft, from their hidden states."""
        return [
            (self.logits(hidden), batch.target[:, ahead:], batch.following[:, ahead:])
            for hidden, ahead in states
        ]
