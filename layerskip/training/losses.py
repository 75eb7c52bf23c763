"""How far a draft's law is from the target's, as a loss; knows no models and no data.

A drafted token is accepted with probability alpha = sum min(p, q) = 1 - TV(p, q), p the target's
law and q the draft's. That is what drafts are trained for, but TV alone has little gradient where
the two are far apart.
Letters: B rows, T tokens, V vocabulary, or the part of it that a draft is trained on.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.training.processes import average

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Of a draft's logits (..., V), the target's, the tokens that the text goes on with (...), -1 where
there is none, and a temperature: a scalar."""

ETA = 3.0  # of `lk`, as published for blocks that read the target's states


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits (B, T, V) at labels (B, T)."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def distillation_loss(
    logits: Tensor,
    target_logits: Tensor,
    *,
    temperature: float = 1.0,
    total_variation: float | Tensor = 0.0,
) -> Tensor:
    """Mean distance of a draft's law to the final law, which is detached, at `temperature`.

    (1 - w) KL(p || q) + w TV(p, q), p the final and q the draft's law, w = `total_variation`. A
    draft token is accepted with probability 1 - TV, but TV alone has little gradient where the
    two laws are far apart: KL first, TV late. Both logits (..., V); scalar, in nats for w = 0.
    """
    log_q = F.log_softmax(logits / temperature, -1)
    log_p = F.log_softmax(target_logits.detach() / temperature, -1)
    p = log_p.exp()
    loss = (1.0 - total_variation) * (p * (log_p - log_q)).sum(-1).mean()
    if isinstance(total_variation, Tensor) or total_variation:
        loss = loss + total_variation * 0.5 * (p - log_q.exp()).abs().sum(-1).mean()
    return loss


def overlap(logits: Tensor, target_logits: Tensor, temperature: float) -> Tensor:
    """alpha of each position, (...)."""
    both = torch.minimum(
        F.softmax(logits / temperature, -1), F.softmax(target_logits / temperature, -1)
    )
    return both.sum(-1)


def lk(logits: Tensor, target_logits: Tensor, _: Tensor, temperature: float) -> Tensor:
    """lambda KL(p || q) + (1 - lambda) TV, lambda = exp(-ETA alpha) of the batch (2602.23881)."""
    with torch.no_grad():
        alpha = average(overlap(logits, target_logits, temperature).mean())
    return distillation_loss(
        logits,
        target_logits,
        temperature=temperature,
        total_variation=1 - torch.exp(-ETA * alpha),
    )


def kl(logits: Tensor, target_logits: Tensor, _: Tensor, temperature: float) -> Tensor:
    """KL(p || q)."""
    return distillation_loss(logits, target_logits, temperature=temperature)


def tvd_plus(logits: Tensor, target_logits: Tensor, _: Tensor, temperature: float) -> Tensor:
    """TVD++ (Goel et al. 2024, 2403.00858): TV's policy gradient, the advantages normalised.

    TV falls along E_q[r grad log q] with the reward r = 1 where p > q. Here the expectation is
    taken over all of q, and r has its mean and its deviation under q taken out.
    """
    log_q = F.log_softmax(logits / temperature, -1)
    q = log_q.detach().exp()
    reward = (F.softmax(target_logits / temperature, -1) > q).to(q.dtype)
    mean = (q * reward).sum(-1, keepdim=True)
    advantage = (reward - mean) / ((mean * (1 - mean)).clamp(min=0).sqrt() + 1e-5)
    return -(q * advantage * log_q).sum(-1).mean()


def ce(logits: Tensor, _: Tensor, following: Tensor, temperature: float) -> Tensor:
    """Cross-entropy at the tokens that the text goes on with."""
    total = F.cross_entropy(
        (logits / temperature).flatten(0, -2), following.flatten(), ignore_index=-1, reduction="sum"
    )
    return total / average((following >= 0).sum().to(total.dtype))


LOSSES: dict[str, Loss] = {"lk": lk, "kl": kl, "tvd++": tvd_plus, "ce": ce}
