"""What is trained for each kind of draft, and what it makes of texts; knows no files, no losses.

Letters: B windows, T tokens of one, H hidden width, K heads or streams.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.config import LowPrecision, SkipConfig
from layerskip.model.blocks import AnyBlock, ExitBlock, FeatureBlock, Heads, Streams
from layerskip.model.sublayers import Sublayers
from layerskip.training.healing import Healing
from layerskip.training.laws import Batch, Made, Student

RATES = dict.fromkeys(("feature-block", "heads", "streams"), 5e-3)
RATES |= {"healed": 1e-3, "exit-block": 3e-3}
"""Of learning: on demo-gemma2 modules reach in 150,000 tokens what took 240,000 to 470,000 at a
fifth or a tenth of it."""
FOUR_BITS = SkipConfig(low=LowPrecision(bits=4, head=8))
ROUNDED_MODULE = LowPrecision(bits=8, attention=(), mlp=())
"""How a module decodes where products with rounded weights are fast: the head that it reads is most
of what its step costs. It is trained with exact ones, which it hardly tells from these."""
ROLLOUTS = 3  # steps that a feature block runs ahead of the target in training
AHEAD = 4  # tokens that heads and streams tell at once


def skip_for(kind: str, skip: SkipConfig | None, num_layers: int) -> SkipConfig:
    """What a draft of a kind runs of the model, resolved.

    Where nobody says, a healed one runs everything in 4 bits and the head in 8, an exit block
    stands behind a quarter of the layers. One that is healed already is healed further.

    Raises:
        ValueError: this kind cannot stand on it.
    """
    if kind == "healed":
        found = (skip or FOUR_BITS).resolve(num_layers)
        if found.low is None:
            raise ValueError("what is healed is what a draft rounds, and this one rounds nothing")
        if found.trained is not None and found.trained.module:
            raise ValueError(f"a draft of kind {found.trained.kind} cannot be healed; name another")
        return found
    if kind == "exit-block":
        usual = SkipConfig.early_exit(max(1, round(num_layers / 4)))
        found = (skip or usual).resolve(num_layers)
        if not len(found.kept()) == found.shared_prefix() < 2 * num_layers:
            raise ValueError(
                "an exit block stands behind an early exit: name an exit_layer, and leave out or "
                "round nothing before it"
            )
        return found
    found = (skip or SkipConfig()).resolve(num_layers)
    if found.shared_prefix() < 2 * num_layers:
        raise ValueError(f"a draft of kind {kind} runs none of the model's layers; name no skip")
    return found


class _Block(Student):
    """A module of `blocks`, its weights in float32 meanwhile."""

    def __init__(self, model: Sublayers, block: AnyBlock) -> None:
        super().__init__()
        self.block = block.float()
        self.embed = model.embed

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.half() for name, weight in self.block.state_dict().items()}

    def before(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The states of the token before each, and what is embedded of it, (B, T, H) each."""
        return shifted(batch.states), self.embed(batch.ids).float()


class _Exit(_Block):
    def made(self, batch: Batch) -> Made:
        return [(self.block(batch.tapped), 0)]


class _Feature(_Block):
    """Runs over the texts several times, from the second on over what it made of them itself.

    Then all keys are of its own features, where in decoding only those of drafted tokens are.
    """

    def made(self, batch: Batch) -> Made:
        features, embedded = self.before(batch)
        steps: Made = []
        for _ in range(ROLLOUTS):
            steps.append((self.block(features, embedded), 0))  # (B, T, H)
            features = shifted(steps[-1][0])
        return steps


class _Ahead(_Block):
    """Heads or streams: all tokens of a draft in one pass."""

    def made(self, batch: Batch) -> Made:
        made = self.block(*self.before(batch))  # (B, T, K, H)
        count = made.shape[1]
        return [(made[:, : count - k, k], k) for k in range(min(made.shape[2], count))]


def student_of(
    kind: str, model: Sublayers, skip: SkipConfig, *, rank: int, dtype: torch.dtype, seed: int
) -> Student:
    """What is trained for a draft.

    Args:
        skip: what the draft runs of the model, resolved.
        rank, dtype, seed: of `Healing`.
    """
    if kind == "healed":
        modules = Sublayers(model.model, "modules")
        return Healing(modules, skip, rank=rank, dtype=dtype, seed=seed)
    if kind == "exit-block":
        return _Exit(model, ExitBlock(model))
    if kind == "feature-block":
        return _Feature(model, FeatureBlock(model))
    return _Ahead(model, (Streams if kind == "streams" else Heads)(model, AHEAD))


def shifted(states: Tensor) -> Tensor:
    """Those of the token before each, zeros before the first: (B, T, H)."""
    return F.pad(states[:, :-1], (0, 0, 1, 0))
