"""Sublayers in Triton kernels for captured passes: seven launches a layer, where torch takes 28.

Their products are in `kernel_products`. Every sum has one order, whatever other tokens and rows a
pass has and however long the buffers are. So a token has the same numbers, bit by bit, in a plain
step and in a verification.
Shapes: B rows, T tokens of each, M = B T, H hidden width, N heads, K key-value heads, G = N / K,
S slots of the buffers, U slots in use, D head width, R rotary width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from layerskip.backends.base import Block
from layerskip.backends.fused import activation
from layerskip.backends.kernel_products import Norm, Weight, norms, product
from layerskip.backends.norms import weight_and_epsilon
from layerskip.families.architecture import Architecture
from layerskip.families.family import LayerParts

DTYPES = (torch.bfloat16, torch.float32)
_SPLIT = 128  # slots in one program of an attention; buffers in use are multiples of 256

Attend = Callable[..., Tensor]
"""Maps states (B, T, H), slots (B, T), positions and paths (B, T) of the nodes of trees, or None,
keys and values (B, K, S, D), U, and angles (1, S, R)."""
Hold = Callable[[Tensor], Weight]
"""Maps a weight (R, C) of the model to what is read in its place."""


@triton.jit(do_not_specialize=["t"])
def _turn(
    heads, q_scale, k_scale, cos, sin, slots, positions, q, keys, values, t, n, k, d, r, by_row,
    by_head, epsilon, plus, WIDTH: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate a head of a token: queries to (B, N, T, D), the rest to the buffers."""
    token, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, WIDTH)
    inside = i < d
    slot, position = tl.load(slots + token), tl.load(positions + token)
    source = heads + (token * (n + 2 * k) + head) * d
    x = tl.load(source + i, inside, 0.0).to(tl.float32)
    held = (token // t) * by_row + slot * d + i  # in the buffers
    if head >= n + k:
        tl.store(values + held + (head - n - k) * by_head, x.to(values.dtype.element_ty), inside)
    else:
        turned = i < r
        j = tl.where(turned, (i + r // 2) % r, i)
        y = tl.load(source + j, inside, 0.0).to(tl.float32)
        if q_scale is not None:
            scale = q_scale
            if head >= n:
                scale = k_scale
            factor = tl.rsqrt(tl.sum(x * x, 0) / d + epsilon)
            x *= factor * (tl.load(scale + i, inside, 0.0).to(tl.float32) + plus)
            y *= factor * (tl.load(scale + j, inside, 0.0).to(tl.float32) + plus)
        x *= tl.load(cos + position * r + i, turned, 1.0).to(tl.float32)
        x += y * tl.load(sin + position * r + i, turned, 0.0).to(tl.float32)
        if head < n:
            place = ((token // t) * n + head) * t + token % t
            tl.store(q + place * d + i, x.to(q.dtype.element_ty), inside)
        else:
            tl.store(keys + held + (head - n) * by_head, x.to(q.dtype.element_ty), inside)


@triton.jit
def _nodes(path):
    """The 64 bits of a path: whether it has each node."""
    return ((path >> tl.arange(0, 64)) & 1).to(tl.int32)


@triton.jit(do_not_specialize=["t"])
def _attend(
    q, keys, values, positions, paths, sums, largest, totals, t, k, g, d, by_row, by_head, scale,
    cap, window, sink, CAPPED: tl.constexpr, NEAR: tl.constexpr, SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention of 16 queries of a key head to `SPLIT` positions: sums before they are divided.

    The nodes of a tree have the positions of a row from its root on. Nodes see different ones
    there, so those queries are of one token, for which the slots of its path are put in order.
    """
    pair, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = block * 16 + tl.arange(0, 16)
    real = query < g * t
    start, first = split * SPLIT, (pair // k) * t
    if paths is not None:
        root = tl.load(positions + first) + 1 - tl.sum(_nodes(tl.load(paths + first)), 0)
        node = _nodes(tl.load(paths + first + block % t))
        depth = tl.where(node == 1, tl.cumsum(node, 0) - 1, -1)
        if start + SPLIT > root:
            head = block // t * 16 + tl.arange(0, 16)
            query = head * t + block % t
            real = head < g
    i = tl.arange(0, WIDTH)
    inside = i < d
    slot = tl.load(positions + first + query % t, real, -1)
    place = pair * g * t + query
    queries = tl.load(q + place[:, None] * d + i[None, :], real[:, None] & inside[None, :], 0.0)
    base = (pair // k).to(tl.int64) * by_row + (pair % k) * by_head
    most = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, WIDTH), tl.float32)
    end = tl.minimum(start + SPLIT, tl.max(slot, 0) + 1)
    for at in range(start, end, 64):
        s = at + tl.arange(0, 64)
        mask = (s < end)[:, None] & inside[None, :]
        held = s
        if paths is not None:
            of = depth[None, :] == (s - root).to(tl.int32)[:, None]  # (64 positions, 64 nodes)
            held = tl.where(s < root, s, root + tl.sum(tl.where(of, tl.arange(0, 64), 0), 1))
        where = base + held[:, None] * d + i[None, :]
        key = tl.load(keys + where, mask, 0.0)  # (64, D)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale  # (16, 64)
        if CAPPED:  # tanh
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
        seen = s[None, :] <= slot[:, None]
        if NEAR:
            seen = seen & ((s[None, :] > slot[:, None] - window) | (s < sink)[None, :])
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        kept = tl.exp(most - finite)
        shares = tl.exp(scores - finite[:, None])
        total = total * kept + tl.sum(shares, 1)
        value = tl.load(values + where, mask, 0.0)  # (64, D)
        added = tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        acc = acc * kept[:, None] + added
        most = new
    place = place * tl.num_programs(2) + split
    tl.store(largest + place, most, real)
    tl.store(totals + place, total, real)
    tl.store(sums + place[:, None] * d + i[None, :], acc, real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["t", "splits"])
def _joined(sums, largest, totals, out, t, k, g, d, splits, WIDTH: tl.constexpr):
    """The attention of a query from the sums of all splits, in order: (M, N, D)."""
    query = tl.program_id(0)
    i = tl.arange(0, WIDTH)
    inside = i < d
    most = tl.load(largest + query * splits)
    for split in range(1, splits):
        most = tl.maximum(most, tl.load(largest + query * splits + split))
    total = 0.0
    acc = tl.zeros((WIDTH,), tl.float32)
    for split in range(splits):
        place = query * splits + split
        share = tl.exp(tl.load(largest + place) - most)
        total += share * tl.load(totals + place)
        acc += share * tl.load(sums + place * d + i, inside, 0.0)
    pair, own = query // (g * t), query % (g * t)
    token = (pair // k) * t + own % t
    head = (pair % k) * g + own // t
    acc = (acc / total).to(out.dtype.element_ty)
    tl.store(out + (token * (k * g) + head) * d + i, acc, inside)


def _norm(module: Any, style: str) -> Norm | None:
    plus = 1.0 if style == "one plus" else 0.0
    return None if module is None else (*weight_and_epsilon(module), plus)


def _pairs(modules: Sequence[Any], hold: Hold) -> list[tuple[Weight, Tensor | None]]:
    return [(hold(each.weight), each.bias) for each in modules]


def _flat(hidden: Tensor) -> Tensor:
    return hidden.contiguous().view(-1, hidden.shape[-1])  # (M, H)


def _added(
    part: LayerParts, linear: Any, norm: Any, hold: Hold
) -> Callable[[Tensor, Tensor], Tensor]:
    """A sublayer's last product, the norm after it, and the residual add: (M, H)."""
    modules, by, after = _pairs([linear], hold), part.residual, _norm(norm, part.family.norm)

    def added(residual: Tensor, x: Tensor) -> Tensor:
        if after is None:
            return product(x, modules, None, residual, by)
        return norms(product(x, modules), after, residual, by)

    return added


def attention(part: LayerParts, hold: Hold) -> Attend | None:
    """The kernels of an attention sublayer; None if it needs more than they compute."""
    module, family = part.attention, part.family
    q_norm, k_norm, v_norm = part.head_norms
    width, groups = module.head_dim, module.num_key_value_groups
    heads = module.o_proj.weight.shape[1] // width  # N
    held = heads // groups  # K
    usual = sum(len(each.weight) for each in part.projections) == (heads + 2 * held) * width
    same_bias = len({each.bias is None for each in part.projections}) == 1
    if not usual or not same_bias or v_norm is not None or width > 256:
        return None
    if part.sinks is not None or part.gate is not None:
        return None
    if family.pairs or family.late_norms or part.query_factor != 1:
        return None
    if q_norm is not None and len(q_norm.weight) != width:  # one norm of all heads
        return None
    modules, before = _pairs(part.projections, hold), _norm(part.before, family.norm)
    add = _added(part, module.o_proj, part.after, hold)
    q_scale, *scaled = _norm(q_norm, family.norm) or (None, 0.0, 0.0)
    k_scale = None if k_norm is None else k_norm.weight
    cap, window = part.score_cap, part.window
    padded = max(16, triton.next_power_of_2(width))

    def run(
        hidden: Tensor,
        slots: Tensor,
        positions: Tensor | None,
        paths: Tensor | None,
        keys: Tensor,
        values: Tensor,
        used: int,
        angles: Any,
    ) -> Tensor:
        rows, count, _ = hidden.shape
        tokens, splits = rows * count, -(-used // _SPLIT)
        positions = slots if positions is None else positions
        blocks = -(-groups * count // 16) if paths is None else -(-groups // 16) * count
        by_row, by_head = keys.stride(0), keys.stride(1)
        x = product(_flat(hidden), modules, before)  # (M, (N + 2K) D)
        q = x.new_empty(rows, heads, count, width)  # (B, N, T, D)
        _turn[tokens, heads + 2 * held](
            x, q_scale, k_scale, *angles, slots, positions, q, keys, values, count, heads, held,
            width, angles[0].shape[-1], by_row, by_head, *scaled, padded, num_warps=1,
        )  # fmt: skip
        sums = x.new_empty(tokens * heads, splits, width, dtype=torch.float32)
        largest, totals = sums.new_empty(2, tokens * heads, splits)
        _attend[rows * held, blocks, splits](
            q, keys, values, positions, paths, sums, largest, totals, count, held, groups, width,
            by_row, by_head, module.scaling, cap or 0.0, window or 0, part.sink, cap is not None,
            window is not None, _SPLIT, padded,
        )  # fmt: skip
        out = x.new_empty(tokens, heads * width)  # (M, N D)
        _joined[(tokens * heads,)](
            sums, largest, totals, out, count, held, groups, width, splits, padded, num_warps=1
        )
        return add(_flat(hidden), out).view_as(hidden)

    return run


def mlp(part: LayerParts, hold: Hold) -> Block | None:
    """The kernels of a dense MLP sublayer, or None."""
    activate = activation(part.activation)
    tanh = isinstance(activate, partial)  # GELU
    if part.tail or not part.family.gated or not (tanh or activate is F.silu):
        return None
    modules, gate = _pairs(part.expansions, hold), 2 if tanh else 1
    if len(modules) == 1:  # both in one
        (weight, bias), both = modules[0], (None, None)
        halves: Sequence[Weight] = weight.chunk(2)
        modules = [*zip(halves, both if bias is None else bias.chunk(2), strict=True)]
    before = _norm(part.pre, part.family.norm)
    add = _added(part, part.mlp.down_proj, part.post, hold)

    def run(hidden: Tensor, _: Any) -> Tensor:
        x = _flat(hidden)
        return add(x, product(x, modules, before, gate=gate)).view_as(hidden)

    return run


def head(model: Architecture, linear: Any, hold: Hold) -> Callable[[Tensor], Tensor]:
    """The final norm and the head, or some rows of it, (B, T, H) to (B, T, V)."""
    norm, modules = _norm(model.decoder.norm, model.family.norm_of_head), _pairs([linear], hold)
    return lambda x: product(_flat(x), modules, norm).view(*x.shape[:2], -1)
