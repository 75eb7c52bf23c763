"""Mixtures of experts: which experts a token uses, and the sum of their outputs.

A router selects for every token the experts with its highest scores. Their weights are in two
parameters for all experts of a layer, so no expert's module can be called alone. Here router and
experts are computed in the library's order and dtypes. The outputs of a token's experts are added
in the order of their scores, whatever other tokens are in the pass.
A draft may use fewer experts per token. Then the router chooses and weights them as if its number
were smaller. So their weights still have the usual sum, and the rest of the layer sees an output of
the usual size. The router itself is never rounded.
Shapes: N tokens of a pass, H hidden width, E experts, K experts per token, I width of an expert.
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

from layerskip.weights.rounded import Function, Rounded

Route = Callable[[Tensor], tuple[Any, Tensor, Tensor]]
"""Maps hidden states (N, H) to scores, and to weights and numbers of experts, (N, K) both."""
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps hidden states (N, H), numbers and weights of experts to their weighted sum, (N, H)."""


@dataclass(frozen=True)
class Mixture:
    """The mixture of a decoder layer, in the library's modules.

    Attributes:
        router: chooses the experts.
        experts: their weights, `gate_up_proj` (E, 2 I, H) and `down_proj` (E, H, I).
        weight: the router's linear layer, (E, H).
        top: number of experts per token.
        norm, scale, number: applied to the router's inputs (Gemma 4): a norm, a vector (H,) and a
            number, both of which are multiplied.
        normalised: whether the weights of a token's experts are scaled to sum to one.
        factors: a factor for each expert's weight, (E,).
        cast: whether the weights are rounded to the dtype of the hidden states.
        sigmoid: whether scores are sigmoids of the router's outputs, rather than their softmax.
        bias: added to the scores for the choice only, (E,).
        factor: multiplies the weights of a token's experts.
        wide: whether the router computes in float32, whatever the model's dtype.
        shared: a dense MLP that runs beside the experts for every token, or None.
        shared_gate: the linear layer of one output whose sigmoid multiplies that MLP's output.
        before, after: norms around the experts, if they read the input of the MLP's norm (Gemma 4).
        dense: in this case, the norm after the dense MLP.
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
    sigmoid: bool = False
    bias: Tensor | None = None
    factor: float = 1.0
    wide: bool = False
    shared: Any = None
    shared_gate: Any = None
    before: Any = None
    after: Any = None
    dense: Any = None

    @property
    def parallel(self) -> bool:
        """Whether the experts run in parallel with a dense MLP, instead of replacing it."""
        return self.shared is not None

    def taken(self, experts: int | None) -> int:
        """The number of experts per token in a draft that asks for `experts`; None: the model's.

        Raises:
            ValueError: more than the model uses, or zero where nothing else would run.
        """
        if experts is None:
            return self.top
        least = 0 if self.parallel else 1
        if not least <= experts <= self.top:
            raise ValueError(
                f"experts must be in {least}..{self.top} for this model, whose tokens take "
                f"{self.top} of {len(self.experts.gate_up_proj)}, got {experts}"
            )
        return experts

    def share_read(self, tokens: int, experts: int | None = None) -> float:
        """The expected share of all experts that a pass over this many tokens reads.

        It assumes independent tokens and equally likely experts: 1 - (1 - K / E)^N.
        """
        return 1.0 - (1.0 - self.taken(experts) / len(self.experts.gate_up_proj)) ** tokens

    @property
    def weights(self) -> list[nn.Parameter]:
        """Both parameters of the experts if they can be rounded; empty if they are not plain."""
        weights = [self.experts.gate_up_proj, self.experts.down_proj]
        plain = (type(w) is nn.Parameter and type(w.data) is Tensor for w in weights)
        return weights if all(plain) and not weights[0].is_meta else []


def mixture_function(
    route: Route, experts: Experts, before: Function | None = None, after: Function | None = None
) -> Function:
    """Combine a mixture and the norms around its experts into a function of states (..., H)."""

    def apply(x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (N, H)
        _, weights, chosen = route(flat)  # the router reads the input before the norm
        out = experts(flat if before is None else before(flat), chosen, weights)  # (N, H)
        return (out if after is None else after(out)).view_as(x)

    return apply


def plain_router(mixture: Mixture, top: int, norm: Function | None) -> Route:
    """The function of a plain router, for the `top` experts of every token.

    Args:
        norm: the function of `Mixture.norm`.
    """
    linear, softmax, topk = F.linear, F.softmax, torch.topk
    weight, scale, factors = mixture.weight, mixture.scale, mixture.factors
    wide, sigmoid, bias = mixture.wide, mixture.sigmoid, mixture.bias

    def route(x: Tensor) -> tuple[None, Tensor, Tensor]:
        inputs = x if norm is None else norm(x)
        if scale is not None:
            inputs = inputs * scale * mixture.number
        raw = linear(inputs.float(), weight.float()) if wide else linear(inputs, weight)
        law = raw.sigmoid() if sigmoid else softmax(raw, dim=-1, dtype=torch.float32)  # (N, E)
        chosen = topk(law if bias is None else law + bias, top).indices  # (N, K)
        weights = law.gather(-1, chosen)  # (N, K)
        if mixture.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if mixture.factor != 1:
            weights = weights * mixture.factor
        if factors is not None:
            weights = weights * factors[chosen]
        return None, weights.to(x.dtype) if mixture.cast else weights, chosen

    return route


def smaller_router(router: Any, top: int) -> Any:
    """A shallow copy of a router module that chooses `top` experts.

    Raises:
        ValueError: its forward is not its class's, so a copy would call the original router.
    """
    if "forward" in vars(router):
        raise ValueError(
            "drafts cannot take fewer experts of this model: its routers have a custom forward, "
            "which accelerate or a patch has put there; leave experts out"
        )
    made = copy(router)
    # The library's routers read one attribute or the other.
    made.top_k, made.config = top, SimpleNamespace(top_k_experts=top)
    return made


def exact_products(weight: Tensor) -> Callable[[int], Function]:
    """The products with each expert's part of a weight (E, R, C), by its number."""
    linear = F.linear
    return lambda expert: lambda x: linear(x, weight[expert])


def rounded_products(rounded: Rounded, count: int) -> Callable[[int], Function]:
    """The products with each expert's part of a rounded weight, by its number."""
    return [part.linear(None) for part in rounded.chunk(count)].__getitem__


def sum_of_experts(
    expand: Callable[[int], Function], shrink: Callable[[int], Function], activate: Function
) -> Experts:
    """Make the function of all experts, grouping the tokens of each expert."""

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
        # Products and sum in the wider of both dtypes, rounded once at the end.
        return (outs.view(*chosen.shape, -1) * weights[..., None]).sum(1).to(x.dtype)  # (N, H)

    return apply
