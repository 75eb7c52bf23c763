"""Training of corrected weights, blocks and streams, and published losses to compare with.

Shapes: B windows, T tokens of one, H hidden width, R rows and C columns of a weight, r rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.config import LowPrecision, SkipConfig
from layerskip.model.backend import Variant
from layerskip.model.modules import Modules
from layerskip.model.products import Function, Linear
from layerskip.model.rounded import rounded
from layerskip.model.sublayers import Sublayers
from layerskip.research.blocks import ExitBlock, FeatureBlock, Streams
from layerskip.training.losses import DraftStates, TrainingBatch, divergences
from layerskip.training.students import BlockStudent, HeadsStudent, Student, shifted

FOUR_BITS = SkipConfig(low=LowPrecision(bits=4, head=8))
ROLLOUTS = 3
"""Number of steps that a feature block runs ahead of the target in training."""


class _Corrected(Modules):
    """The library's modules, with other products of rounded weights."""

    def __init__(self, model: Sublayers, linear: Linear) -> None:
        super().__init__(model)
        self._linear = linear

    def product(self, weight: Tensor, bias: Tensor | None, variant: Variant) -> Function:
        return self._linear(weight, bias)


class Healing(Student):
    """A skip config's draft, with trainable low-rank deltas on its rounded linear modules.

    The forward pass runs the draft over whole windows: every place sees the draft's keys and values
    before it, where decoding has the target's. By default everything is in 4 bits and the head in
    8. A draft that has deltas is trained further.

    Args:
        dtype: of the rounded weights.

    Attributes:
        inner, outer: (r, C) and (R, r) for every rounded linear module, by name.
    """

    rate = 1e-3
    module = False

    @classmethod
    def skip_for(cls, kind: str, skip: SkipConfig | None, num_layers: int) -> SkipConfig:
        resolved = (skip or FOUR_BITS).resolve(num_layers)
        if resolved.low is None:
            raise ValueError("healing corrects what a draft rounds, but this one rounds nothing")
        trained = resolved.trained
        if trained is not None and trained.module:
            raise ValueError(f"a draft of kind {trained.kind} cannot be healed; name another")
        return resolved

    def __init__(
        self, model: Sublayers, skip: SkipConfig, *, rank: int, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        model = Sublayers(model.model, "modules")
        backend = _Corrected(model, self._linear)
        assert skip.low is not None
        self.opened = [model]  # in a list, so that its weights are not this module's
        begun = {} if skip.trained is None else model.weights.deltas(skip.trained).by_weight
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
            inner, outer = begun.get(id(linear.weight), (new, torch.zeros(rows, rank)))
            self.inner[key] = nn.Parameter(inner.float().clone())
            self.outer[key] = nn.Parameter(outer.float().clone())
            self._names[id(linear.weight)] = key
            self._weights[key] = rounded(linear.weight, skip.low.bits).widened(dtype)
        self.blocks = []
        for index in skip.kept():
            bits = skip.low.bits if index in low else None
            variant = Variant(bits, experts=skip.experts, window=skip.window)
            self.blocks.append(backend.sublayer(index, variant))

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Function:
        key = self._names[id(weight)]

        def apply(x: Tensor) -> Tensor:
            out = F.linear(x.to(self._weights[key]), self._weights[key])
            delta = F.linear(F.linear(x, self.inner[key]), self.outer[key])
            total = (out + delta).to(x)
            return total if bias is None else total + bias

        return apply

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states after the draft's sublayers, before the final norm, (B, T, H)."""
        hidden, step = self.opened[0].first_pass(ids)
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
