"""The "compiled" backend: passes over fused blocks, compiled by `torch.compile`.

A function is compiled for a list of blocks (sublayers, and perhaps a head) and a number of rows:
once for one token per row and once for several. Weights are passed in at every call. The guards of
`torch.compile` are switched off, as they would cost a small model all of the gain; what they check
is part of each function's key. On a GPU functions are captured as CUDA graphs.
`torch.compiler.nested_compile_region` is not used: it gave NaN in torch 2.13 from two layers on.
Shapes: B rows, T tokens of a pass, H hidden width, N heads, K key-value heads, S slots of the
buffers, U slots in use, D head width, R rotary width.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.model.architecture import Architecture
from layerskip.model.backend import Block, Step
from layerskip.model.cache import RowCache, additive, capacity, causal, rounded_up
from layerskip.model.fused import Attention, Fused
from layerskip.model.norms import for_heads, gathered
from layerskip.model.products import compilable

Function = Callable[..., Tensor]

# model -> structure of the blocks and further keys -> the compiled function
_functions: WeakKeyDictionary[nn.Module, dict[Any, Function]] = WeakKeyDictionary()
_seconds = 0.0  # total compile time in this process


def compile_seconds() -> float:
    """Seconds that this process has spent compiling passes."""
    return _seconds


@cache
def refusal(device: str) -> str | None:
    """Why nothing can be compiled for a type of device, or None. A trial takes a few seconds."""
    try:
        _quietly(torch.compile(torch.square, fullgraph=True), torch.ones(8, device=device))
    except Exception as error:  # a toolchain may raise anything
        return " ".join([type(error).__name__, *str(error).split()])[:200]
    return None


def _quietly(function: Function, *arguments: Any) -> Tensor:
    """Call a function for the first time, hiding the warnings of `torch.compile` about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


@cache
def warn_refusal(reason: str) -> None:
    warnings.warn(
        f"nothing can be compiled here, so passes take the fused path: {reason}; install a "
        "C++ compiler (on a GPU: Triton), or use execution='auto'",
        stacklevel=2,
    )


class Compiled(Fused):
    """The fused blocks of a model in compiled passes, except for a prefill.

    Compiled functions are kept as long as the model lives.
    """

    name = "compiled"
    trims = False  # all buffers have the same shape
    linear = staticmethod(compilable)

    def __init__(self, model: Architecture) -> None:
        super().__init__(model)
        self._called: dict[Any, Function] = {}  # by blocks and situation

    def capacity(self, slots: int) -> int:
        return capacity(slots)

    def run(self, hidden: Tensor, step: Step, blocks: Sequence[Block]) -> Tensor:
        cache: RowCache = step.cache
        if not blocks or not cache.prefilled or cache.branches is not None:
            return super().run(hidden, step, blocks)
        layers = dict.fromkeys(block.layer for block in blocks if isinstance(block, Attention))
        rows, count, _ = hidden.shape
        captured = hidden.device.type == "cuda"
        hidden, slots = _padded(hidden, step.slots, cache.size, powers=captured)
        inputs = step.inputs
        if inputs is not None:
            inputs = F.pad(inputs, (0, 0, 0, 0, 0, hidden.shape[1] - count)).contiguous()
        arguments = (
            list(blocks),
            hidden.contiguous(),
            slots,
            torch.arange(rounded_up(cache.end), device=hidden.device),  # (U,)
            [cache.keys[layer] for layer in layers],
            [cache.values[layer] for layer in layers],
            step.rotary.tables,
            inputs,
        )
        situation = (
            *(rows, count == 1, torch.get_num_threads()),
            *(torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        )
        key = (tuple(blocks), situation)
        function = self._called.get(key)
        if function is None:
            functions = _functions.setdefault(self.model.model, {})
            built = (_built(blocks), situation)
            if built not in functions:
                functions[built] = _first(arguments)
            function = self._called[key] = functions[built]
        if captured:
            torch.compiler.cudagraph_mark_step_begin()
            return function(*arguments)[:, :count].clone()  # the next pass writes the same memory
        return function(*arguments)[:, :count]


def _padded(hidden: Tensor, slots: Tensor, size: int, *, powers: bool) -> tuple[Tensor, Tensor]:
    """Pad hidden states (B, T, H) and slots (B, T) to the number of tokens of a function.

    With `powers`, lengths are powers of two, since a graph is captured for every length. Padding is
    written to the last of the buffers' slots, which no token ever has.
    """
    count = hidden.shape[1]
    more = (1 << (count - 1).bit_length()) - count if powers else 0
    if not more:
        return hidden, slots
    return F.pad(hidden, (0, 0, 0, more)), F.pad(slots, (0, more), value=size - 1)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors, code and constants of blocks, in a fixed order."""
    if isinstance(value, tuple | list):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, partial):
        yield from _leaves((value.func, value.args, tuple(value.keywords.items())))
    elif isinstance(value, FunctionType):
        yield value.__code__
        for cell in value.__closure__ or ():
            yield from _leaves(cell.cell_contents)
    else:
        yield value


def _built(blocks: Sequence[Block]) -> tuple[Any, ...]:
    """The structure of blocks, without the values of their weights."""
    return tuple(
        (type(leaf), tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in _leaves(blocks)
    )


def _first(arguments: tuple[Any, ...]) -> Function:
    """Compile a function for these arguments, and for others with the same rows and blocks."""
    global _seconds
    start = time.perf_counter()
    blocks, hidden, slots, used, keys, values, tables, inputs = arguments
    dynamic = torch._dynamo.mark_dynamic
    if hidden.shape[1] > 1:
        dynamic(hidden, 1)
        dynamic(slots, 1)
        if inputs is not None:
            dynamic(inputs, 1)
    dynamic(used, 0)
    for each in (*keys, *values):
        dynamic(each, 2)
    for each in (table for pair in tables.values() for table in pair):
        dynamic(each, 1)
    options: dict[str, Any] = {"emulate_precision_casts": True}  # rounds where eager kernels do
    skip_guards = getattr(torch.compiler, "skip_all_guards_unsafe", None)
    if skip_guards is not None:
        options["guard_filter_fn"] = skip_guards
    if hidden.device.type == "cuda":
        options["triton.cudagraphs"] = True
        for each in (*keys, *values, *_leaves(blocks)):
            if isinstance(each, Tensor):  # used in place, not copied for every replay
                torch._dynamo.mark_static_address(each, guard=False)
    # `torch.compile` caches few shapes per code object, so each function gets its own object.
    function = FunctionType(_pass.__code__.replace(), _pass.__globals__, _pass.__name__)
    compiled: Function = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    _quietly(compiled, *arguments)  # the following call writes the same values again
    _seconds += time.perf_counter() - start
    return compiled


class _Inputs(NamedTuple):
    """The parts of a step that blocks other than attention need."""

    inputs: Tensor | None


def _pass(
    blocks: list[Block],
    hidden: Tensor,  # (B, T, H)
    slots: Tensor,  # (B, T)
    used: Tensor,  # (U,)
    keys: list[Tensor],  # (B, K, S, D) of every layer that the blocks read
    values: list[Tensor],
    tables: dict[str, tuple[Tensor, Tensor]],  # (1, S, R) each
    inputs: Tensor | None,  # (B, T, L, P)
) -> Tensor:
    rows = torch.arange(hidden.shape[0], device=hidden.device)[:, None]  # (B, 1)
    rope = for_heads(gathered(tables, slots))
    masks: dict[tuple[int | None, int], Tensor] = {}
    layers = dict.fromkeys(block.layer for block in blocks if isinstance(block, Attention))
    buffers = dict(zip(layers, zip(keys, values, strict=True), strict=True))
    step = _Inputs(inputs)
    for block in blocks:
        if not isinstance(block, Attention):
            hidden = block(hidden, step)
            continue
        seen = block.window, block.sink
        if seen not in masks:
            masks[seen] = additive(causal(slots, used, *seen), hidden.dtype)
        q, k, v = block.inputs(hidden, rope[block.kind])
        all_keys, all_values = buffers[block.layer]
        if block.writes:
            all_keys[rows, :, slots] = k.transpose(1, 2)
            all_values[rows, :, slots] = v.transpose(1, 2)
        cached = all_keys.narrow(2, 0, used.shape[0]), all_values.narrow(2, 0, used.shape[0])
        hidden = block.outputs(hidden, q, *cached, masks[seen])
    return hidden
