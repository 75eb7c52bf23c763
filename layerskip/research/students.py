"""Training of blocks and streams, and published losses to compare with.

Shapes: B windows, T tokens of one, H hidden width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.research.blocks import ExitBlock, FeatureBlock, Streams
from layerskip.training.losses import DraftStates, TrainingBatch, divergences
from layerskip.training.students import BlockStudent, HeadsStudent, shifted

ROLLOUTS = 3
"""Number of steps that a feature block runs ahead of the target in training."""


class ExitStudent(BlockStudent):
    """A separate layer after an exit, by default after a quarter of the layers."""

    rate = 3e-3
    tapped = True
    trains = ExitBlock

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


class FeatureStudent(BlockStudent):
    """Runs over the texts several times, from the second time on with its own outputs as features.

    Then all keys come from its own features; in decoding, only those of drafted tokens do.
    """

    trains = FeatureBlock

    def forward(self, batch: TrainingBatch) -> DraftStates:
        features, embedded = self.before(batch)
        steps: DraftStates = []
        for _ in range(ROLLOUTS):
            steps.append((self.block(features, embedded), 0))  # (B, T, H)
            features = shifted(steps[-1][0])
        return steps


class StreamsStudent(HeadsStudent):
    """Predicts all tokens of a draft in one pass of a layer."""

    trains = Streams


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
