"""The modules that are trained, one class for each kind of draft.

Shapes: B windows, T tokens of one, H hidden width, K tokens predicted at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.config.skips import SkipConfig
from layerskip.model.draft_modules import DraftModule, Heads
from layerskip.model.sublayers import Sublayers
from layerskip.training.losses import DraftStates, TrainingBatch


class Student(nn.Module, ABC):
    """A module in training, made for a model and a draft's resolved skip config.

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
                f"a draft of kind {kind} runs none of the model's layers; name no skip"
            )
        return resolved

    @abstractmethod
    def forward(self, batch: TrainingBatch) -> DraftStates:
        """The states of the draft's steps on windows."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The tensors for the draft's file."""


class Further(Student):
    """The settings of official drafters, which `AssistantTraining` and `EagleTraining` train."""

    rate = 1e-3


class BlockStudent(Student):
    """A module of the class `trains`, with its weights in float32 during training."""

    trains: type[DraftModule]

    def __init__(self, model: Sublayers) -> None:
        super().__init__()
        self.block = self.trains(model).float()
        self.embed = model.embed

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.half() for name, weight in self.block.state_dict().items()}

    def before(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """The state of the token before each, and each token's embedding, (B, T, H) each."""
        return shifted(batch.states), self.embed(batch.ids).float()


class HeadsStudent(BlockStudent):
    """Predicts all tokens of a draft in one pass."""

    trains: type[DraftModule] = Heads

    def forward(self, batch: TrainingBatch) -> DraftStates:
        made = self.block(*self.before(batch))  # (B, T, K, H)
        count = made.shape[1]
        return [(made[:, : count - k, k], k) for k in range(min(made.shape[2], count))]


def shifted(states: Tensor) -> Tensor:
    """The states of the token before each, with zeros before the first: (B, T, H)."""
    return F.pad(states[:, :-1], (0, 0, 1, 0))
