"""Losses that bring a draft's next-token distribution closer to the target's.

A drafted token is accepted with probability alpha = sum min(p, q) = 1 - TV(p, q), where p is the
target's distribution and q the draft's. Drafts are trained to raise alpha, but TV alone has little
gradient if the two are far apart.
Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.training.processes import average

Step = tuple[Tensor, Tensor, Tensor | None]
"""Of a draft's step, its logits (..., V), the target's, and the text's next tokens (...), -1 for
none; None: no loss reads them."""
Loss = Callable[[Tensor, Tensor, Any, float], Tensor]
"""Computes a scalar from a step and a temperature."""

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
