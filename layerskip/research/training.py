"""Published losses for drafts, for comparison with the default, and Muon instead of AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.training.loop import adamw
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


MUON = 5.0
"""Muon's rate over AdamW's: scaled to AdamW's size, its steps at first learn a fifth as much."""


def muon(parameters: Iterable[nn.Parameter], rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for matrices, and AdamW for the rest.

    Raises:
        ValueError: this version of torch lacks it.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"optimizer muon needs torch 2.9 or newer, this is {torch.__version__}; take adamw"
        )
    matrices, rest = list[nn.Parameter](), list[nn.Parameter]()
    for each in parameters:
        (matrices if each.dim() == 2 else rest).append(each)
    how: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}
    others = adamw(rest, rate) if rest else []
    return [*others, torch.optim.Muon(matrices, lr=MUON * rate, **how)] if matrices else others
