"""The "native" backend: one C++ call per pass, on a CPU.

The C++ source is `native.cpp`. Every pass is native, however many tokens it has. So a token's
numbers depend only on the tokens before it: not on those verified with it, nor on how its prompt
was cut. Only gradients, pictures and chained replays take the fused path.
Shapes: B rows, T tokens of a pass, H hidden, D head, R rotary width, K key-value heads, S slots.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.backends.base import EXACT, Block, Step, Tables, Variant
from layerskip.backends.fused import Fused, activation
from layerskip.backends.norms import FusedRotary, weight_and_epsilon
from layerskip.families.architecture import Architecture
from layerskip.families.experts import Mixture
from layerskip.families.family import LayerParts
from layerskip.native.extension import extension
from layerskip.weights.rounded import ROWS, Function, TrimmedHead
from layerskip.weights.stored import Stored

_DTYPES = (torch.float32, torch.bfloat16)


class _Limited(threading.local):
    before: int | None = None


_limited = _Limited()


def normal_threads() -> int | None:
    """Torch's normal number of threads if it takes one in a round, as others need the cores."""
    return _limited.before


def refusal(model: Architecture) -> str | None:
    """Why a model that the fused path supports has no native passes, or None."""
    if model.device.type != "cpu":
        return f"native passes need a CPU; the model is on {model.device.type}"
    modules = [model.unembedding]
    modules += [model.decoder.per_layer_model_projection] if model.inputs_width else []
    weights = [weight for part in model.parts for weight in part.weights]
    weights += [weight for module in modules for weight in module.parameters()]
    dtypes = {model.dtype, *(weight.dtype for weight in weights)}
    if len(dtypes) > 1 or not dtypes <= {*_DTYPES}:
        return f"native passes need float32 or bfloat16, not {sorted(map(str, dtypes))}"
    if not all(weight.is_contiguous() for weight in weights):
        return "a weight is not contiguous"
    for part in model.parts:
        if part.joined and part.heads[1] % 32:
            return "heads with gates need a width that is a multiple of 32"
        mixture = part.mixture
        acting = [part.module.act_fn] if part.tail and model.inputs_width else []
        acting += [part.activation] if part.dense else []
        acting += [] if mixture is None else [mixture.experts.act_fn]
        for module in acting:
            if _kind(module) is None:
                return f"native passes do not support {type(module).__name__}"
    return None


@cache
def warn_refusal(reason: str) -> None:
    """Warn, once, that there are no native or captured passes."""
    warnings.warn(f"passes use the fused path: {reason}", stacklevel=2)


@dataclass(frozen=True, eq=False)
class NativeBlock:
    """A sublayer or a head, both for native passes and for the fused path.

    Attributes:
        layer, heads: for an attention, the layer in the cache that it reads, and (K, D).
        after: the function to apply to the logits of a head.
    """

    backend: Native
    number: int
    fused: Block
    layer: int | None = None
    heads: tuple[int, int] = (0, 0)
    after: Function | None = None

    def __call__(self, hidden: Tensor, step: Step | None) -> Tensor:
        return self.backend.run(hidden, step, [self])


class NativeRotary(FusedRotary):
    """Rotary tables of a call for both paths; `angles` are the native ones, by layer type."""

    def __init__(self, tables: Tables, make: Any) -> None:
        super().__init__(tables)
        self.angles = [make(cos.contiguous(), sin.contiguous()) for cos, sin in tables.values()]


class Native(Fused):
    """The blocks of a plain-weight model; a pass is one native call."""

    name = "native"
    packed = True

    def __init__(self, model: Architecture) -> None:
        super().__init__(model)
        self.extension = extension()
        self.drawn = self.extension.drawn
        self.plan = self.extension.Plan()
        self._fresh = set[Tensor]()  # weights that have not been moved to huge pages yet

    def attention(self, part: LayerParts, variant: Variant) -> Block:
        module, matrix = part.attention, self._matrix(variant)
        q_norm, k_norm, v_norm = map(self._norm, part.head_norms)
        number = self.plan.add(
            "attention",
            before=self._norm(part.before),
            after=self._norm(part.after),
            inputs=[*map(matrix, part.projections)],
            output=matrix(module.o_proj),
            gate=None if part.gate is None or part.joined else matrix(part.gate),
            joined=part.joined,
            sinks=part.sinks,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=v_norm,
            heads=module.o_proj.weight.shape[1] // module.head_dim,
            kv_heads=part.heads[0],
            width=module.head_dim,
            window=part.window or 0,
            sink=part.sink,
            angles=self.model.kinds.index(part.kind),
            scale=module.scaling,
            softcap=part.score_cap or 0.0,
            query_factor=part.query_factor,
            pairs=part.family.pairs,
            late_norms=part.family.late_norms,
            eager=self.model.eager,
            times=part.residual,
        )
        fused = super().attention(part, variant)
        return NativeBlock(self, number, fused, part.keys, part.heads)

    def mlp(self, part: LayerParts, variant: Variant) -> Block:
        fused = super().mlp(part, variant)
        if variant.bits is not None and not _in_blocks(part):
            return fused
        mixture, dense, matrix = part.mixture, part.dense, self._matrix(variant)
        gate = None if mixture is None else mixture.shared_gate
        number = self.plan.add(
            "mlp",
            before=self._norm(part.pre),
            after=self._norm(part.post),
            inputs=[*map(matrix, part.expansions)] if dense else [],
            output=matrix(dense.down_proj) if dense else None,
            gate=None if gate is None else self._exact(gate),
            act=self._activation(part.activation if dense else None),
            gated=part.family.gated,
            times=part.residual,
            tail=self._tail(part) if part.tail else None,
            mixture=None if mixture is None else self._mixture(mixture, variant),
        )
        return NativeBlock(self, number, fused)

    def sublayer(self, number: int, variant: Variant | None = EXACT) -> Block:
        block = super().sublayer(number, variant)
        if variant is not None:
            return block
        tail = self._tail(self.model.parts[number // 2])
        return NativeBlock(self, self.plan.add("tail", tail=tail), block)

    def layer_inputs(self, hidden: Tensor, rows: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().layer_inputs(hidden, rows)
        made: Tensor = self.plan.run(
            hidden, [self._inputs_number], [], [], [], [], layer_inputs=rows
        )
        return made  # (B, T, L, P)

    @cached_property
    def _inputs_number(self) -> int:
        decoder = self.model.decoder
        number: int = self.plan.add(
            "layer_inputs",
            inputs=[self._exact(decoder.per_layer_model_projection)],
            after=self._norm(decoder.per_layer_projection_norm),
            scale=decoder.per_layer_model_projection_scale,
            times=decoder.per_layer_input_scale,
        )
        return number

    def product(self, weight: Tensor, bias: Tensor | None, variant: Variant) -> Function:
        """Products for wide passes that equal native ones, which also round inputs."""
        plan, widened = self.extension.Plan(), super().product(weight, bias, variant)
        head = plan.add("head", inputs=[self._rounded(weight, bias, variant)])

        def apply(x: Tensor) -> Tensor:
            if x.requires_grad:  # there are no native gradients
                return widened(x)
            out: Tensor = plan.run(x.reshape(1, -1, x.shape[-1]), [head], [], [], [], [])
            return out.view(*x.shape[:-1], out.shape[-1])  # (..., R)

        return apply

    def head(self, rows: TrimmedHead | None = None, bits: int | None = None) -> Block:
        linear = self.model.unembedding if rows is None else rows
        # A plan keeps its sublayers for good, but trimmed heads come and go.
        owner = self if rows is None else Native(self.model)
        number = owner.plan.add(
            "head",
            before=owner._norm(self.model.decoder.norm, self.model.family.norm_of_head),
            inputs=[owner._matrix(Variant(bits))(linear)],
            softcap=self.model.softcap or 0.0,
            divisor=self.model.logits_divisor,
            factor=self.model.logits_factor,
        )
        after = None if rows is None else rows.spread
        return NativeBlock(owner, number, Fused.head(owner, rows, bits), after=after)

    def rotary_of(self, tables: Tables) -> NativeRotary:
        return NativeRotary(tables, self.extension.Angles)

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        # Torch's own work between the passes would also wait for a second thread.
        if normal_threads() is not None or not self.extension.disturbed():
            yield
            return
        _limited.before = self.extension.limit_threads(1)
        try:
            yield
        finally:
            self.extension.limit_threads(_limited.before)
            _limited.before = None

    def run(self, hidden: Tensor, step: Step | None, blocks: Sequence[Any]) -> Tensor:
        # Natively there are no gradients, and queries see only earlier slots.
        chained = step is not None and (not step.cache.firsts or step.blocks is not None)
        if torch.is_grad_enabled() or chained:
            for block in blocks:
                hidden = getattr(block, "fused", block)(hidden, step)
            return hidden
        for owner, some in groupby(blocks, lambda block: getattr(block, "backend", None)):
            if owner is not None:
                hidden = owner._run(hidden, step, list(some))
            else:
                for block in some:
                    hidden = block(hidden, step)
        return hidden

    def _run(self, hidden: Tensor, step: Step | None, blocks: list[NativeBlock]) -> Tensor:
        keys, values, firsts, bases = list[Tensor](), list[Tensor](), list[int](), list[int]()
        angles, inputs = list[Any](), None
        # Moving takes up to a second per quarter of a gigabyte, and saves a tenth of a pass.
        if self.long_lived and self._fresh:
            fresh, self._fresh = self._fresh, set()
            self.extension.move_to_huge_pages([*fresh])
        if step is not None:
            cache, inputs = step.cache, step.inputs
            firsts, angles = cache.firsts, step.rotary.angles
            for block in blocks:
                if block.layer is not None:
                    k, v = cache.buffers(block.layer, block.heads, block.heads, hidden)
                    keys.append(k)
                    values.append(v)
                    if cache.trimmed:  # otherwise all rows of all layers begin at slot 0
                        bases += cache.first_slots(block.layer)
        branches = cache.branches.flat if keys and cache.branches is not None else []
        numbers = [block.number for block in blocks]
        more = {"layer_inputs": inputs, "branches": branches}
        out: Tensor = self.plan.run(hidden, numbers, keys, values, firsts, angles, bases, **more)
        after = blocks[-1].after
        return out if after is None else after(out)

    def _mixture(self, mixture: Mixture, variant: Variant) -> Any:
        weights = mixture.experts
        expand, shrink = (
            self._matrix(variant)(SimpleNamespace(weight=weight, bias=None))
            for weight in (weights.gate_up_proj, weights.down_proj)
        )
        return self.extension.Mixture(
            # The router stays exact, as on the fused path.
            router=self.extension.Matrix(mixture.weight, None),
            norm=self._norm(mixture.norm),
            scale=mixture.scale,
            number=mixture.number,
            factors=mixture.factors,
            factor=mixture.factor,
            sigmoid=mixture.sigmoid,
            bias=None if mixture.bias is None else mixture.bias.float(),
            wide=mixture.wide,
            whole=mixture.normalised,
            cast=mixture.cast,
            expand=expand,
            shrink=shrink,
            before=self._norm(mixture.before),
            after=self._norm(mixture.after),
            dense=self._norm(mixture.dense),
            top=mixture.taken(variant.experts),
            act=self._activation(weights.act_fn),
        )

    def _tail(self, part: LayerParts) -> Any:
        layer = part.module  # its linear layers stay exact, as on the fused path
        gated = bool(self.model.inputs_width)
        return self.extension.Tail(
            gate=self._exact(layer.per_layer_input_gate) if gated else None,
            projection=self._exact(layer.per_layer_projection) if gated else None,
            norm=self._norm(layer.post_per_layer_input_norm) if gated else None,
            scalar=layer.layer_scalar,
            layer=part.number,
            act=self._activation(layer.act_fn if gated else None),
        )

    def _activation(self, module: Any) -> Any:
        kind = "silu" if module is None else _kind(module)
        if kind != "xielu":
            return self.extension.Activation(kind)
        fixed = float(module.beta), float(module.eps)
        return self.extension.Activation(kind, module.alpha_p, module.alpha_n, *fixed)

    def _norm(self, module: Any, style: str = "") -> Any:
        if module is None:
            return None
        return self.extension.Norm(*weight_and_epsilon(module), style or self.model.family.norm)

    def _exact(self, module: nn.Linear | TrimmedHead) -> Any:
        if isinstance(module.weight, Stored):
            self._fresh.add(module.weight.read)
            return module.weight.matrix(module.bias)
        self._fresh.add(module.weight)
        return self.extension.Matrix(module.weight, module.bias)

    def _matrix(self, variant: Variant) -> Callable[[Any], Any]:
        """Return what prepares a linear layer, or anything with a weight: exact or rounded."""
        if variant.bits is None:
            return self._exact
        return lambda module: self._rounded(module.weight, module.bias, variant)

    def _rounded(self, weight: Tensor, bias: Tensor | None, variant: Variant) -> Any:
        bits = variant.bits
        assert bits is not None
        copy = self.copies.of(weight, bits, packed=True)
        self._fresh.add(copy.data)
        rows, columns = copy.shape
        return self.extension.Matrix(copy.data, bias, format=f"R{bits}", rows=rows, columns=columns)


def _in_blocks(part: LayerParts) -> bool:
    """Whether `up` begins at a block of rows when gate and up are rounded together.

    The same must hold for every expert of a mixture, in both of its weights.
    """
    mixture, linears = part.mixture, part.expansions if part.dense else []
    both = len(linears) == 1 and part.family.gated
    sizes = [linears[0].weight.shape[0] // 2] if both else []
    sizes += [] if mixture is None else [*mixture.experts.down_proj.shape[1:]]
    return not any(size % ROWS for size in sizes)


def _kind(module: Any) -> str | None:
    """The extension's name of an activation, or None."""
    function = activation(module)
    if function is F.silu or isinstance(function, partial):
        return "silu" if function is F.silu else "gelu"
    return {"ReLUSquaredActivation": "relu2", "XIELUActivation": "xielu"}.get(type(module).__name__)
