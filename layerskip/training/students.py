"""The modules that are trained, by kind of draft.

Shapes: B windows, T tokens of one, H hidden width, K tokens predicted at once.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.config.registry import TRAINED, named
from layerskip.config.skips import SkipConfig
from layerskip.model.opened_model import OpenedModel
from layerskip.training.losses import DraftStates, TrainingBatch

RATES = {"exit-block": 3e-3, "heads": 5e-3, "streams": 5e-3, "assistant": 1e-3, "eagle3": 1e-3}
"""Learning rates by kind. On demo-gemma2, modules reach in 150,000 tokens what took 240,000 to
470,000 at a fifth or a tenth of it."""


def follows_exit(kind: str) -> bool:
    """Whether a draft of a kind follows an early exit, and reads the target's states there."""
    return kind in TRAINED and bool(named("module", kind).behind_exit)


def skip_for(kind: str, skip: SkipConfig | None, num_layers: int) -> SkipConfig:
    """The resolved skip config of a draft of a kind; for None the usual one: without any layers, or
    with a quarter of them before an exit.

    Raises:
        ValueError: the skip config does not suit this kind.
    """
    if not follows_exit(kind):
        resolved = (skip or SkipConfig()).resolve(num_layers)
        if resolved.shared_prefix() < 2 * num_layers:
            raise ValueError(
                f"a draft of kind {kind} runs none of the model's layers; name no skip"
            )
        return resolved
    resolved = (skip or SkipConfig.early_exit(max(1, round(num_layers / 4)))).resolve(num_layers)
    if not len(resolved.kept()) == resolved.shared_prefix() < 2 * num_layers:
        raise ValueError(
            "an exit block follows an early exit: name an exit_layer, and leave out or round "
            "nothing before it"
        )
    return resolved


class Student(nn.Module):
    """A draft's module in training, with weights in float32.

    Args:
        kind: of draft; `config.registry` names the class of its module.
    """

    def __init__(self, model: OpenedModel, kind: str) -> None:
        super().__init__()
        self.block = named("module", kind)(model).float()
        self.embed = model.embed

    def forward(self, batch: TrainingBatch) -> DraftStates:
        """The states of the draft's steps on windows: one step after an exit, or all in a pass."""
        if self.block.behind_exit:
            return [(self.block(batch.tapped), 0)]
        before = F.pad(batch.states[:, :-1], (0, 0, 1, 0))  # (B, T, H) of the token before each
        made = self.block(before, self.embed(batch.ids).float())  # (B, T, K, H)
        count = made.shape[1]
        return [(made[:, : count - k, k], k) for k in range(min(made.shape[2], count))]

    def weights(self) -> dict[str, Tensor]:
        """The tensors for the draft's file."""
        return {name: weight.half() for name, weight in self.block.state_dict().items()}
