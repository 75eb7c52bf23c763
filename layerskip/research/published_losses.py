"""Published losses, to compare with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from layerskip.training.losses import divergences


def kl(logits: Tensor, target_logits: Tensor, _: Tensor, temperature: float) -> Tensor:
    """KL(p || q)."""
    return divergences(logits, target_logits, temperature)[0]


def tvd_plus(logits: Tensor, target_logits: Tensor, _: Tensor, temperature: float) -> Tensor:
    """TVD++ (Goel et al. 2024, 2403.00858): TV's policy gradient with normalised advantages.

    TV decreases along E_q[r grad log q] with reward r = 1 where p > q. Here the expectation is
    taken over all of q, and r is normalised by its mean and deviation under q.
    """
    log_q = F.log_softmax(logits / temperature, -1)
    q = log_q.detach().exp()
    reward = (F.softmax(target_logits / temperature, -1) > q).to(q.dtype)
    mean = (q * reward).sum(-1, keepdim=True)
    advantage = (reward - mean) / ((mean * (1 - mean)).clamp(min=0).sqrt() + 1e-5)
    return -(q * advantage * log_q).sum(-1).mean()
