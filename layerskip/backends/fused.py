"""The "fused" backend: sublayers with plain weights, computed in few kernels.

It does the arithmetic of the library's modules in the same order and dtypes, but without module
calls: in a small model most of a decoding step is launches and Python. Models with hooks, adapters,
quantised weights, several devices or patched forwards are refused (see `plain`); they use the
"modules" backend.
Shapes: B rows, T tokens of a pass, H hidden width, N heads, K key-value heads, G = N / K, S slots,
D head width, R rotary width (R <= D).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.backends import base as backend
from layerskip.backends.base import Block, LayerBackend, Step, Tables, Variant
from layerskip.backends.norms import FusedRotary, rms_norm, rotated, weight_and_epsilon
from layerskip.families.experts import (
    Mixture,
    exact_products,
    mixture_function,
    plain_router,
    rounded_products,
    sum_of_experts,
)
from layerskip.families.family import LayerParts
from layerskip.weights.rounded import Function, Linear, TrimmedHead, plain

# Queries with common keys are put side by side where that makes attention faster (1.2 to 2.5 times
# on a CPU): with heads of at least this width, in passes of few tokens, before masks become large.
WIDE, FEW = 64, 16
# Maximum queries of all heads that a GPU matches with all keys by products: kernels of attention
# walk through the keys of a head one after the other, which leaves most of it idle.
MATCHED, MATCHED_ON = 2048, "cuda"
_WIDENS = "dtype" in torch.ops.aten.bmm.overloads()  # not in old versions of torch


class Fused(LayerBackend):
    """The blocks of a plain-weight model, in few kernels."""

    name = "fused"

    def layer_inputs(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self._inputs(hidden, rows)

    @cached_property
    def _inputs(self) -> Callable[[Tensor, Tensor], Tensor]:
        decoder = self.model.decoder
        project = plain(decoder.per_layer_model_projection.weight, None)
        norm = rms_norm(decoder.per_layer_projection_norm, self.model.family.norm)
        by = decoder.per_layer_model_projection_scale
        scale = decoder.per_layer_input_scale

        def inputs(hidden: Tensor, rows: Tensor) -> Tensor:
            projected = norm((project(hidden) * by).view_as(rows))
            out: Tensor = (projected + rows) * scale  # (B, T, L, P)
            return out

        return inputs

    def norm_of(self, module: Any) -> Function | None:
        return None if module is None else rms_norm(module, self.model.family.norm)

    def linear_of(self, module: Any) -> Function:
        return plain(module.weight, module.bias)

    def activation_of(self, module: Any) -> Function:
        return activation(module)

    def head(self, rows: TrimmedHead | None = None, bits: int | None = None) -> Block:
        norm = rms_norm(self.model.decoder.norm, self.model.family.norm_of_head)
        after = backend.logit_transform(self.model)
        head = self.model.unembedding if rows is None else rows
        product = self.linear(Variant(bits))(head.weight, head.bias)
        return backend.composed(norm, product, after, None if rows is None else rows.spread)

    def attention(self, part: LayerParts, variant: Variant) -> Any:
        return attention(part, eager=self.model.eager, linear=self.linear(variant))

    def mlp(self, part: LayerParts, variant: Variant) -> Block:
        mixture, mixed = part.mixture, self._mixed(part.mixture, variant)
        if part.dense is None:
            assert mixed is not None
            return self.mlp_block(part, mixed)
        gate = None if mixture is None else mixture.shared_gate
        return self.mlp_block(part, gated(part, self.linear(variant)), mixed, gate)

    def _mixed(self, mixture: Mixture | None, variant: Variant) -> Function | None:
        """A mixture of experts as a function of (..., H); None if no expert runs."""
        bits = variant.bits
        top = 0 if mixture is None else mixture.taken(variant.experts)
        if mixture is None or not top:
            return None
        place = mixture.experts.down_proj.device
        norm, before, after = (
            None if each is None else rms_norm(each, self.model.family.norm, place)
            for each in (mixture.norm, mixture.before, mixture.after)
        )
        expand, shrink = (
            exact_products(weight)
            if bits is None
            else rounded_products(self.copies.of(weight, bits, packed=self.packed), len(weight))
            for weight in mixture.weights
        )
        routed = sum_of_experts(expand, shrink, activation(mixture.experts.act_fn))
        return mixture_function(plain_router(mixture, top, norm), routed, before, after)

    def rotary_of(self, tables: Tables) -> FusedRotary:
        return FusedRotary(tables, self.model.family.pairs)


def _sdpa(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Attention of (B, N, T, D), or of groups side by side (B, K, G T, D), to (B, K, S, D)."""
    grouped = q.shape[1] != keys.shape[1]
    few = not grouped and q[..., 0].numel() <= MATCHED
    if mask is not None and few and q.device.type == MATCHED_ON and _WIDENS:
        return _matched(q, keys, values, mask, scale)
    if mask is not None and q.shape[2] > mask.shape[2] > 1:
        mask = mask.repeat(1, 1, q.shape[2] // mask.shape[2], 1)  # (B or 1, 1, G T, S)
    return F.scaled_dot_product_attention(
        q, keys, values, mask, 0.0, causal, scale=scale, enable_gqa=grouped
    )


def _matched(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of few queries (B, K, G T, D) by products, with scores in float32 at least."""
    wide: dict[str, Any] = {"out_dtype": torch.float32} if q.dtype.itemsize < 4 else {}
    scores = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1).mT, **wide)  # (B K, G T, S)
    scores = scores.view(*q.shape[:2], -1, *mask.shape[2:])  # (B, K, G, T, S)
    shares = F.softmax(torch.add(mask[:, :, None], scores, alpha=scale), -1).to(q.dtype)
    return torch.matmul(shares.flatten(2, 3), values)  # (B, K, G T, D)


def _eager(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    _: bool,  # a causal pass has a mask here
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (N,)
) -> Tensor:
    """The library's eager attention in its order, with the queries of a group side by side."""
    rows, heads, count, width = q.shape
    groups = keys.shape[1]
    q = q.reshape(rows, groups, -1, width)  # (B, K, G * T, D)
    scores = torch.matmul(q, keys.transpose(2, 3)).mul_(scale)  # (B, K, G * T, S)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.view(rows, groups, -1, count, scores.shape[-1]).add_(mask[:, :, None])
    shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    out = torch.matmul(shares, values)  # (B, K, G * T, D)
    if sinks is not None:
        own = sinks.view(groups, -1, 1).expand(-1, -1, scores.shape[2] * groups // len(sinks))
        kept = (torch.logsumexp(scores, -1) - own.flatten(1)).float().sigmoid()  # (B, K, G * T)
        out = out * kept[..., None].to(out.dtype)
    return out.view(rows, heads, count, width)  # (B, N, T, D)


def _projections(projects: Sequence[Function]) -> Function:
    """Combine linear layers with the same input into one function; outputs are concatenated."""
    if len(projects) == 1:
        return projects[0]
    return lambda x: torch.cat([project(x) for project in projects], -1)


def _half(project: Function, heads: int, half: int) -> Function:
    """The queries (0) or gates (1) of a linear layer whose heads have both."""
    return lambda x: project(x).unflatten(-1, (heads, 2, -1))[..., half, :].flatten(-2)


class Attention(NamedTuple):
    """An attention sublayer, in two halves around the cache.

    Attributes:
        inputs: maps (B, T, H) and angles to queries (B, N, T, D), keys and values (B, K, T, D),
            which are empty if it has none of its own.
        outputs: maps hidden states, queries, all keys and values (B, K, S, D), mask to (B, T, H).
        layer, kind: the layer in the cache that it reads, and its rotary kind.
        writes: whether that layer is its own.
        window, sink: the slots it sees (see `cache.causal`).
        few: the same sublayer for captured passes (see `kernels.Attend`), or None.
    """

    inputs: Callable[[Tensor, Any], tuple[Tensor, Tensor, Tensor]]
    outputs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
    layer: int
    kind: str
    writes: bool
    window: int | None
    sink: int
    few: Callable[..., Tensor] | None = None

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        q, k, v = self.inputs(hidden, step.rope[self.kind])
        cache = step.cache
        if self.writes:
            cache.update(k, v, self.layer)
        keys, values = cache.read(self.layer, self.window, self.sink)
        return self.outputs(hidden, q, keys, values, step.mask(self.window, self.sink))


def attention(part: LayerParts, *, eager: bool, linear: Linear) -> Attention:
    module, family = part.attention, part.family
    norm, pairs, late = family.norm, family.pairs, family.late_norms
    before = None if part.before is None else rms_norm(part.before, norm)
    add = backend.residual_add(part, None if part.after is None else rms_norm(part.after, norm))
    width, scale = module.head_dim, module.scaling
    groups = module.num_key_value_groups
    projects = [linear(each.weight, each.bias) for each in part.projections]
    output = linear(module.o_proj.weight, module.o_proj.bias)
    gate = None if part.gate is None else linear(part.gate.weight, part.gate.bias)
    queries = module.o_proj.weight.shape[1] // width  # N
    if part.joined:
        gate, projects[0] = (_half(projects[0], queries, half) for half in (1, 0))
    project = _projections(projects)
    turning = queries + (queries // groups if part.writes else 0)  # N + K
    place = module.o_proj.weight.device
    q_norm, k_norm, v_norm = (
        None if each is None else rms_norm(each, norm, place) for each in part.head_norms
    )
    # One of OLMo's norms spans all heads.
    span = None if q_norm is None else weight_and_epsilon(part.head_norms[0])[0]
    whole = span is not None and span.shape[0] != width
    factor = part.query_factor
    grouped = not eager and groups > 1 and (width >= WIDE or place.type == "cuda")
    attend: Callable[..., Tensor] = _sdpa
    if eager:
        attend = partial(_eager, softcap=part.score_cap, sinks=part.sinks)

    def turn(x: Tensor, angles: tuple[Tensor, Tensor], norm: Function) -> Tensor:
        return norm(rotated(x, angles, pairs)) if late else rotated(norm(x), angles, pairs)

    def queried(x: Tensor) -> Tensor:
        assert q_norm is not None
        return q_norm(x) if factor == 1 else q_norm(x) * factor

    def inputs(hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        rows, count, _ = hidden.shape
        heads = project(hidden if before is None else before(hidden))  # (B, T, (N + 2K) D)
        if whole and q_norm is not None and k_norm is not None:
            q, k, v = heads.tensor_split((queries * width, turning * width), -1)
            heads = torch.cat((q_norm(q), k_norm(k), v), -1)
        heads = heads.view(rows, count, -1, width).transpose(1, 2)  # (B, N + 2K, T, D)
        if q_norm is None or whole:
            turned = rotated(heads[:, :turning], angles, pairs)  # (B, N + K, T, D)
            return turned[:, :queries], turned[:, queries:], heads[:, turning:]
        q = turn(heads[:, :queries], angles, queried)  # (B, N, T, D)
        k, v = heads[:, queries:turning], heads[:, turning:]  # (B, K, T, D)
        if k_norm is not None:  # it has its own keys
            v = v if v.shape[1] else k  # keys and values of one projection
            k, v = turn(k, angles, k_norm), v if v_norm is None else v_norm(v)
        return q, k, v

    def outputs(
        hidden: Tensor, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        rows, count, _ = hidden.shape
        if count == 1:  # treat the queries of a group like tokens, which avoids transposes
            out = attend(
                q.reshape(rows, -1, groups, width), keys, values, mask, False, scale
            )  # (B, K, G, D)
        elif grouped and mask is not None and count <= FEW:
            side_by_side = q.reshape(rows, -1, groups * count, width)  # (B, K, G T, D)
            out = attend(side_by_side, keys, values, mask, False, scale)
            out = out.reshape(rows, queries, count, width).transpose(1, 2)  # (B, T, N, D)
        else:
            out = attend(q, keys, values, mask, mask is None, scale).transpose(1, 2)  # (B, T, N, D)
        out = out.reshape(rows, count, -1)  # (B, T, N D)
        if gate is not None:
            out = out * torch.sigmoid(gate(hidden if before is None else before(hidden)))
        return add(hidden, output(out))

    return Attention(inputs, outputs, part.keys, part.kind, part.writes, part.window, part.sink)


def gated(part: LayerParts, linear: Linear) -> Function:
    """The dense MLP of a layer, (..., H) to (..., H)."""
    down = linear(part.dense.down_proj.weight, part.dense.down_proj.bias)
    expand = [linear(each.weight, each.bias) for each in part.expansions]
    activate = activation(part.activation)
    if not part.family.gated:
        return lambda x: down(activate(expand[0](x)))

    def apply(x: Tensor) -> Tensor:
        gate, up = (each(x) for each in expand) if len(expand) == 2 else expand[0](x).chunk(2, -1)
        return down(activate(gate).mul_(up))

    return apply


def activation(module: Any) -> Function:
    """The plain function of the families' two activations; otherwise the module itself."""
    name = type(module).__name__
    if name in ("SiLUActivation", "SiLU"):
        return F.silu
    if name == "GELUTanh" and isinstance(module.act, partial):
        return module.act  # F.gelu, approximate="tanh"
    return module  # type: ignore[no-any-return]
