"""Mixtures of experts: which experts a token takes, and what they add up to.

A router gives every token the experts with its highest scores. Their weights lie in two parameters
for all experts of a layer, so that no module of an expert can be called alone. Here router and
experts are computed in the order and the dtypes of the library. The outputs of a token's experts
are added in the order of their scores, whatever other tokens are in the pass.
A draft may take fewer experts of every token: then the router chooses and weighs them as if its
number were smaller. So their weights still add up to what a token's weights always add up to, and
the rest of the layer sees an output of the usual size. The router itself is never rounded.
Letters: N tokens of a pass, H hidden width, E experts, K experts of a token, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.model.products import Function
from layerskip.model.rounded import Rounded

Route = Callable[[Tensor], tuple[Any, Tensor, Tensor]]
"""Hidden states (N, H) to scores, and the weights and numbers of the experts, (N, K) both."""
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states (N, H), the numbers and the weights of the experts to the sum of these, (N, H)."""


@dataclass(frozen=True)
class Mixture:
    """The mixture of a decoder layer, in the library's modules.

    Attributes:
        router: chooses the experts.
        experts: their weights, `gate_up_proj` (E, 2 I, H) and `down_proj` (E, H, I).
        weight: the router's linear, (E, H).
        top: how many experts every token takes.
        norm, scale, number: what is done to the router's inputs (Gemma 4): a norm, and products
            with a vector (H,) and a number.
        normalised: the weights of a token's experts add up to one.
        factors: by expert, what its weight is multiplied by, (E,).
        cast: the weights are rounded to the dtype of the hidden states.
        before, after: the norms around the experts, where they run beside a dense MLP (Gemma 4).
        dense: the norm behind that MLP.
    """

    router: Any
    experts: Any
    weight: Tensor
    top: int
    norm: Any = None
    scale: Tensor | None = None
    number: float = 1.0
    normalised: bool = True
    factors: Tensor | None = None
    cast: bool = True
    before: Any = None
    after: Any = None
    dense: Any = None

    @property
    def beside(self) -> bool:
        """Whether the experts run beside a dense MLP, not in place of it."""
        return self.dense is not None

    def taken(self, experts: int | None) -> int:
        """How many a draft takes that asks for so many; None: all that the model takes.

        Raises:
            ValueError: more than the model takes, or none where nothing else would run.
        """
        if experts is None:
            return self.top
        least = 0 if self.beside else 1
        if not least <= experts <= self.top:
            raise ValueError(
                f"experts must be in {least}..{self.top} for this model, whose tokens take "
                f"{self.top} of {len(self.experts.gate_up_proj)}, got {experts}"
            )
        return experts

    def share_read(self, tokens: int, experts: int | None = None) -> float:
        """The share of all experts that a pass over so many tokens is expected to read.

        As if the tokens chose independently and all experts were as likely: 1 - (1 - K / E)^N.
        """
        return 1.0 - (1.0 - self.taken(experts) / len(self.experts.gate_up_proj)) ** tokens

    @property
    def weights(self) -> list[nn.Parameter]:
        """Both parameters of the experts, which can be rounded; none where they are not plain."""
        weights = [self.experts.gate_up_proj, self.experts.down_proj]
        plain = (type(w) is nn.Parameter and type(w.data) is Tensor for w in weights)
        return weights if all(plain) and not weights[0].is_meta else []


def mixing(
    route: Route, experts: Experts, before: Function | None = None, after: Function | None = None
) -> Function:
    """A mixture as one function of hidden states (..., H), with the norms around its experts."""

    def apply(x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (N, H)
        _, weights, chosen = route(flat)  # of what the norm has not seen
        out = experts(flat if before is None else before(flat), chosen, weights)  # (N, H)
        return (out if after is None else after(out)).view_as(x)

    return apply


def routing(mixture: Mixture, top: int, norm: Function | None) -> Route:
    """What a plain router computes, for the `top` experts of every token.

    Args:
        norm: the function of `Mixture.norm`.
    """
    linear, softmax, topk = F.linear, F.softmax, torch.topk
    weight, scale, factors = mixture.weight, mixture.scale, mixture.factors

    def route(x: Tensor) -> tuple[None, Tensor, Tensor]:
        inputs = x if norm is None else norm(x)
        if scale is not None:
            inputs = inputs * scale * mixture.number
        law = softmax(linear(inputs, weight), dim=-1, dtype=torch.float32)  # (N, E)
        weights, chosen = topk(law, top)  # (N, K) both
        if mixture.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if factors is not None:
            weights = weights * factors[chosen]
        return None, weights.to(x.dtype) if mixture.cast else weights, chosen

    return route


def fewer(router: Any, top: int) -> Any:
    """A shallow copy of a router module that chooses so many experts.

    Raises:
        ValueError: its forward is not its class's, so that a copy would call the router itself.
    """
    if "forward" in vars(router):
        raise ValueError(
            "drafts cannot take fewer experts of this model: its routers have a forward of their "
            "own, which accelerate or a patch has put there; leave experts out"
        )
    made = copy(router)
    # the library's routers read the one or the other
    made.top_k, made.config = top, SimpleNamespace(top_k_experts=top)
    return made


def exact(weight: Tensor) -> Callable[[int], Function]:
    """The products of every expert, by its number, with a weight (E, R, C)."""
    linear = F.linear
    return lambda expert: lambda x: linear(x, weight[expert])


def low(rounded: Rounded, count: int) -> Callable[[int], Function]:
    """The products of every expert, by its number, with a rounded weight of `count` experts."""
    return [part.linear(None) for part in rounded.parts(count)].__getitem__


def summed(
    expand: Callable[[int], Function], shrink: Callable[[int], Function], activate: Function
) -> Experts:
    """Experts by their products, those of one expert's tokens together."""

    def apply(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        numbers, order = chosen.flatten().sort()  # (N K,) both
        taken, counts = (each.tolist() for each in numbers.unique_consecutive(return_counts=True))

        def products(of: Callable[[int], Function], inputs: Tensor) -> Tensor:
            parts = zip(taken, inputs.split(counts), strict=True)
            return torch.cat([of(expert)(part) for expert, part in parts])

        gate, up = products(expand, x[order // chosen.shape[1]]).chunk(2, -1)  # (N K, I) both
        sorted_outs = products(shrink, activate(gate) * up)  # (N K, H)
        outs = torch.empty_like(sorted_outs)
        outs[order] = sorted_outs
        # products and sum in the wider of both dtypes, one rounding at the end
        return (outs.view(*chosen.shape, -1) * weights[..., None]).sum(1).to(x.dtype)  # (N, H)

    return apply
