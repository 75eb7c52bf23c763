"""The modules that are trained, by kind of draft.

Shapes: B windows, T tokens of one, H hidden width, K tokens predicted at once.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.config.registry import named
from layerskip.config.skips import SkipConfig
from layerskip.model.sublayers import Sublayers
from layerskip.training.losses import DraftStates, TrainingBatch


class Student(nn.Module):
    """A draft's module in training, with weights in float32; it predicts all tokens in one pass.

    Args:
        kind: of draft; `config.registry` names the class of its module.

    Attributes:
        rate: learning rate. On demo-gemma2, modules reach in 150,000 tokens what took 240,000 to
            470,000 at a fifth or a tenth of it.
        tapped: whether it also reads the target's states after an exit.
    """

    rate = 5e-3
    tapped = False

    @classmethod
    def skip_for(cls, kind: str, skip: SkipConfig | None, num_layers: int) -> SkipConfig:
        """The resolved skip config of a draft of this kind; the usual one for None.

        Raises:
            ValueError: the skip config does not suit this kind.
        """
        resolved = (skip or SkipConfig()).resolve(num_layers)
        if resolved.shared_prefix() < 2 * num_layers:
            raise ValueError(
                f"a draft of kind {kind} runs none of the model's layers; leave skip out"
            )
        return resolved

    def __init__(self, model: Sublayers, kind: str) -> None:
        super().__init__()
        self.block = named("module", kind)(model).float()
        self.embed = model.embed

    def forward(self, batch: TrainingBatch) -> DraftStates:
        """The states of the draft's steps on windows."""
        before = F.pad(batch.states[:, :-1], (0, 0, 1, 0))  # (B, T, H) of the token before each
        made = self.block(before, self.embed(batch.ids).float())  # (B, T, K, H)
        count = made.shape[1]
        return [(made[:, : count - k, k], k) for k in range(min(made.shape[2], count))]

    def weights(self) -> dict[str, Tensor]:
        """The tensors for the draft's file."""
        return {name: weight.half() for name, weight in self.block.state_dict().items()}


class Further(Student):
    """The settings of official drafters, which `AssistantTraining` and `EagleTraining` train."""

    rate = 1e-3
