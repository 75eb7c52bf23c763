"""The modules that are trained, one class for each kind of draft.

Letters: B windows, T tokens of one, H hidden width, K heads or streams, R rows and C columns of a
weight, r rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.config import LowPrecision, SkipConfig
from layerskip.model.blocks import AnyBlock, ExitBlock, FeatureBlock, Heads, Streams
from layerskip.model.modules import Modules
from layerskip.model.rounded import rounded
from layerskip.model.sublayers import Sublayers
from layerskip.training.losses import DraftStates, TrainingBatch

RATES = dict.fromkeys(("feature-block", "heads", "streams"), 5e-3)
RATES |= {"healed": 1e-3, "exit-block": 3e-3, "assistant": 1e-3}
"""Learning rates: on demo-gemma2 modules need 150,000 tokens for what took 240,000 to 470,000 at a
fifth or a tenth of them."""
RANK = 16
FOUR_BITS = SkipConfig(low=LowPrecision(bits=4, head=8))
ROLLOUTS = 3  # steps that a feature block runs ahead of the target in training
AHEAD = 4  # tokens that heads and streams predict at once


def skip_for(kind: str, skip: SkipConfig | None, num_layers: int) -> SkipConfig:
    """The resolved skip config of a draft of a kind.

    By default a healed one runs everything in 4 bits and the head in 8, and an exit block follows a
    quarter of the layers. A draft that is already healed is trained further.

    Raises:
        ValueError: the skip config does not suit this kind.
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


class Student(nn.Module, ABC):
    """A module in training."""

    @abstractmethod
    def forward(self, batch: TrainingBatch) -> DraftStates:
        """The states of the draft's steps on windows."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The tensors of the draft's file."""


class Healing(Student):
    """A skip config's draft, with deltas of low rank to train on its rounded linears.

    The forward pass runs the draft over whole windows: every place sees the draft's keys and values
    before it, where decoding has the target's.

    Args:
        model: opened with "modules"; its own weights do not change.
        skip: resolved, with `low`; healed weights that it names are the initial ones.
        dtype: of the rounded weights.

    Attributes:
        inner, outer: (r, C) and (R, r) of every rounded linear, by name.
    """

    def __init__(
        self, model: Sublayers, skip: SkipConfig, *, rank: int, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        assert isinstance(model.backend, Modules)
        assert skip.low is not None
        self.opened = [model]  # in a list, so that its weights are not this module's
        known = {} if skip.trained is None else model.weights.deltas(skip.trained).by_weight
        generator = torch.Generator().manual_seed(seed)
        self.inner, self.outer = nn.ParameterDict(), nn.ParameterDict()
        self._names: dict[int, str] = {}
        self._weights: dict[str, Tensor] = {}
        low = skip.rounded()
        for name, linear in model.weights.linears(low):
            rows, columns = linear.weight.shape
            key = name.replace(".", "/")
            bound = 1 / math.sqrt(columns)
            new = torch.empty(rank, columns).uniform_(-bound, bound, generator=generator)
            inner, outer = known.get(id(linear.weight), (new, torch.zeros(rows, rank)))
            self.inner[key] = nn.Parameter(inner.float().clone())
            self.outer[key] = nn.Parameter(outer.float().clone())
            self._names[id(linear.weight)] = key
            self._weights[key] = rounded(linear.weight, skip.low.bits).widened(dtype)
        self.blocks = []
        for index in skip.kept():
            own, bits = (self._linear, skip.low.bits) if index in low else (None, None)
            block = model.backend.block(index, own, bits, skip.experts, skip.window)
            self.blocks.append(block)

    def _linear(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        key, bias = self._names[id(module.weight)], module.bias

        def apply(x: Tensor) -> Tensor:
            out = F.linear(x.to(self._weights[key]), self._weights[key])
            healed = F.linear(F.linear(x, self.inner[key]), self.outer[key])
            total = (out + healed).to(x)
            return total if bias is None else total + bias

        return apply

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states after the draft's sublayers, before the final norm, (B, T, H)."""
        model = self.opened[0]
        hidden, step = model.first_pass(ids)
        for block in self.blocks:
            hidden = block(hidden, step)
        return hidden

    def forward(self, batch: TrainingBatch) -> DraftStates:
        return [(self.hidden(batch.ids), 0)]

    def weights(self) -> dict[str, Tensor]:
        return {
            f"{key.replace('/', '.')}.{letter}": weight.detach().half()
            for letter, weights in (("a", self.inner), ("b", self.outer))
            for key, weight in weights.items()
        }


class _Block(Student):
    """A module of `blocks`, its weights in float32 during training."""

    def __init__(self, model: Sublayers, block: AnyBlock) -> None:
        super().__init__()
        self.block = block.float()
        self.embed = model.embed

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.half() for name, weight in self.block.state_dict().items()}

    def before(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """The state of the token before each, and each token's embedding, (B, T, H) each."""
        return shifted(batch.states), self.embed(batch.ids).float()


class _Exit(_Block):
    def forward(self, batch: TrainingBatch) -> DraftStates:
        return [(self.block(batch.tapped), 0)]


class _Feature(_Block):
    """Runs over the texts several times, from the second time on with its own outputs as features.

    Then all keys come from its own features; in decoding only those of drafted tokens do.
    """

    def forward(self, batch: TrainingBatch) -> DraftStates:
        features, embedded = self.before(batch)
        steps: DraftStates = []
        for _ in range(ROLLOUTS):
            steps.append((self.block(features, embedded), 0))  # (B, T, H)
            features = shifted(steps[-1][0])
        return steps


class _Ahead(_Block):
    """Heads or streams: all tokens of a draft in one pass."""

    def forward(self, batch: TrainingBatch) -> DraftStates:
        made = self.block(*self.before(batch))  # (B, T, K, H)
        count = made.shape[1]
        return [(made[:, : count - k, k], k) for k in range(min(made.shape[2], count))]


def student_of(
    kind: str, model: Sublayers, skip: SkipConfig, *, rank: int, dtype: torch.dtype, seed: int
) -> Student:
    """The module to train for a draft.

    Args:
        skip: the draft's resolved skip config.
        rank, dtype, seed: for `Healing`.
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
    """The states of the token before each, zeros before the first: (B, T, H)."""
    return F.pad(states[:, :-1], (0, 0, 1, 0))
