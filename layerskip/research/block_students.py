"""Training of exit blocks, and published losses to compare with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from layerskip.config.skips import SkipConfig
from layerskip.training.losses import DraftStates, TrainingBatch, divergences
from layerskip.training.students import Student


class ExitStudent(Student):
    """A separate layer after an exit, by default after a quarter of the layers."""

    rate = 3e-3
    tapped = True

    @classmethod
    def skip_for(cls, kind: str, skip: SkipConfig | None, num_layers: int) -> SkipConfig:
        usual = SkipConfig.early_exit(max(1, round(num_layers / 4)))
        resolved = (skip or usual).resolve(num_layers)
        if not len(resolved.kept()) == resolved.shared_prefix() < 2 * num_layers:
            raise ValueError(
                "an exit block follows an early exit: name an exit_layer, and leave out or "
                "round nothing before it"
            )
        return resolved

    def forward(self, batch: TrainingBatch) -> DraftStates:
        return [(self.block(batch.tapped), 0)]


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
