"""The "captured" backend: passes over fused blocks, replayed as CUDA graphs.

A pass of a few tokens is hundreds of short kernels, which a GPU computes faster than Python can
launch them. A pass is captured the first time, and replayed in one launch then and later. Passes
are the same if they have the same blocks, number of rows and tokens, and buffers at the same
addresses. So that they often are, numbers of tokens are padded (several tokens of a row to at least
eight, which a GPU computes as fast as two), so is the number of a server's texts where its buffers
have more rows, attention reads the buffers up to one of few lengths (a mask hides what is not
written yet), and buffers that are no longer used are handed out again.
Passes of one or two rows take kernels of our own (`kernels`) where there are some. Passes over
trees are told each node's position, and which nodes are on its path.
Shapes: B rows, T tokens of a pass, H hidden width, K key-value heads, S slots of the buffers,
U slots in use, D head width, R rotary width.
"""

from __future__ import annotations

import importlib.util
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from layerskip.backends.base import Block, Step, Tables, Variant, composed, logit_transform
from layerskip.backends.fused import Attention, Fused
from layerskip.backends.norms import FusedRotary, for_heads, gathered
from layerskip.cache.rows import RowCache, additive, capacity, causal, causal_on_paths
from layerskip.families.architecture import Architecture
from layerskip.families.family import LayerParts
from layerskip.weights.rounded import Function, TrimmedHead

DEVICES = ("cuda",)
# cuDNN's attention makes a plan for every new length of a prompt, which takes 40 ms and cannot be
# captured. For prompts it comes before kernels that write out all scores.
_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_ANY_LENGTH = [*_UNPLANNED, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
_GRAPHS = 256  # maximum number of passes whose graphs are kept for a model
_TOKENS = 8  # minimum number of tokens of all rows in a pass over several of each
_LONGEST = 64  # maximum number of tokens of a row; more are a prompt's, whose length will not recur
_NODES = 64  # maximum number of nodes of a tree, as its paths are numbers of 64 bits
_SHAPES = 8  # maximum number of shapes whose unused buffers are kept for a model
_seconds = 0.0  # total time of captures in this process


def capture_seconds() -> float:
    """Seconds that this process has spent capturing passes."""
    return _seconds


def clock() -> float:
    """Seconds on a clock that stands still during captures."""
    return time.perf_counter() - _seconds


def refusal(model: Architecture) -> str | None:
    """Why the passes of a model cannot be captured, or None."""
    if model.device.type not in DEVICES:
        return "CUDA graphs need a GPU"
    if model.recurrent:
        return "the library computes its recurrent layers"
    return "in mixtures the host reads which experts run" if model.mixtures else None


class Captured(Fused):
    """The fused blocks of a model on a GPU: all but the prefill and large trees are captured.

    Graphs are kept as long as the opened model lives. Its weights stay where they are as long.
    """

    name = "captured"
    trims = False  # window layers would move their slots
    ahead = True
    zeros: Callable[..., Tensor]

    def __init__(self, model: Architecture) -> None:
        super().__init__(model)
        self._kernels = _kernels(model)
        self.zeros = Reused().zeros
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._lock = threading.Lock()

    def capacity(self, slots: int) -> int:
        return capacity(slots)

    def attention(self, part: LayerParts, variant: Variant) -> Any:
        block, own = super().attention(part, variant), self._kernels
        return block._replace(few=own and own.attention(part, self._hold(variant.bits)))

    def mlp(self, part: LayerParts, variant: Variant) -> Block:
        own = self._kernels
        return _either(super().mlp(part, variant), own and own.mlp(part, self._hold(variant.bits)))

    def head(self, rows: TrimmedHead | None = None, bits: int | None = None) -> Block:
        block, own = super().head(rows, bits), self._kernels
        if own is None:
            return block
        linear, spread = (self.model.unembedding, None) if rows is None else (rows, rows.spread)
        logits = own.head(self.model, linear, self._hold(bits))
        return _either(block, composed(logits, logit_transform(self.model), spread))

    def product(self, weight: Tensor, bias: Tensor | None, variant: Variant) -> Function:
        """For other passes than kernels take whole: torch would widen the weight each time."""
        widened, own = super().product(weight, bias, variant), self._kernels
        if own is None:
            return widened
        pair = self._hold(variant.bits)(weight), bias

        def apply(x: Tensor) -> Tensor:
            flat = x.contiguous().view(-1, x.shape[-1])  # (M, C)
            if len(flat) > _LONGEST or x.requires_grad:
                return widened(x)
            out: Tensor = own.product(flat, [pair])
            return out.view(*x.shape[:-1], -1)

        return apply

    def _hold(self, bits: int | None) -> Callable[[Tensor], Any]:
        """What kernels read in place of a weight."""
        return (lambda weight: weight) if bits is None else partial(self.copies.of, bits=bits)

    def rotary_of(self, tables: Tables) -> FusedRotary:
        rotary = super().rotary_of(tables)
        rotary.tables = {
            kind: (self.zeros(cos.shape, cos).copy_(cos), self.zeros(sin.shape, sin).copy_(sin))
            for kind, (cos, sin) in rotary.tables.items()
        }
        return rotary

    def run(self, hidden: Tensor, step: Step, blocks: Sequence[Block]) -> Tensor:
        cache: RowCache = step.cache
        if not blocks or not _is_usual(cache) or torch.is_grad_enabled():
            with sdpa_kernel(_ANY_LENGTH, True):  # in this order
                return super().run(hidden, step, blocks)
        rows, count = hidden.shape[:2]
        inputs = {"hidden": hidden, "slots": step.slots.contiguous()}
        if step.inputs is not None:
            inputs["inputs"] = step.inputs
        if cache.branches is not None:
            inputs["positions"] = cache.positions(hidden.device)
            inputs["paths"] = cache.branches.paths.to(hidden.device, non_blocking=True)
        room = min(1 << (rows - 1).bit_length(), cache.rows)
        least = _TOKENS // room if count > 1 else 1
        padding = room - rows, max(1 << (count - 1).bit_length(), least) - count
        if any(padding):  # written to the buffers' last slot, which no token ever has
            by = {"slots": cache.size - 1}
            inputs = {name: _padded(x, *padding, by.get(name, 0)) for name, x in inputs.items()}
        layers = dict.fromkeys(block.layer for block in blocks if isinstance(block, Attention))
        pairs = {layer: (cache.keys[layer][:room], cache.values[layer][:room]) for layer in layers}
        used = min(capacity(cache.end), cache.size) - 1
        tables = step.rotary.tables
        key = (
            (tuple(blocks), inputs["hidden"].shape, *inputs, cache.size, used),
            tuple(each.data_ptr() for pair in (*pairs.values(), *tables.values()) for each in pair),
        )

        run = partial(_pass, blocks, used, pairs, tables, step.few)
        with self._lock:  # all graphs share memory for what they compute
            graph = self._graphs.pop(key, None)
            if graph is None:
                graph = _captured(run, inputs, next(iter(self._graphs.values()), None))
            self._graphs[key] = graph  # the last one used is the last one dropped
            out = graph.replay(inputs)[:rows, :count].clone()  # replays overwrite it
            if len(self._graphs) > _GRAPHS:
                self._graphs.popitem(last=False)
        return out


def _is_usual(cache: RowCache) -> bool:
    """Whether a pass is not over prompts or large trees; its rows come first in the buffers."""
    short = cache.prefilled and cache.count <= _LONGEST
    small = cache.branches is None or cache.branches.nodes <= _NODES
    return short and small and cache.active.start == 0


def _kernels(model: Architecture) -> Any:
    """The module with kernels for passes of few tokens, or None."""
    if model.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from layerskip.backends import kernels

    usable = model.dtype in kernels.DTYPES and _compiles(kernels, model.device, model.dtype)
    return kernels if usable else None


@cache
def _compiles(kernels: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels run here. They need a C compiler, Python's headers and shared memory."""
    x = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        kernels.product(x, [(x, None), (x, None)], gate=1)
    except Exception as error:  # compilers fail in many ways
        warnings.warn(f"passes use torch's kernels: Triton failed with {error!r}", stacklevel=2)
        return False
    return True


def _either(block: Block, few: Block | None) -> Block:
    """A block that takes kernels, if there are some, where few rows are decoded."""
    if few is None:
        return block
    return lambda hidden, step: (few if step is not None and step.few else block)(hidden, step)


def _padded(x: Tensor, rows: int, tokens: int, value: int) -> Tensor:
    """Append rows and tokens to (B, T, ...)."""
    return F.pad(x, (*(0, 0) * (x.dim() - 2), 0, tokens, 0, rows), value=value)


class Reused:
    """Zeroed buffers, which are handed out again, at the same addresses, once they are not used."""

    def __init__(self) -> None:
        # by shape: buffers, and the tensors by which others know them
        self._held: OrderedDict[Any, list[tuple[Tensor, ref[Tensor]]]] = OrderedDict()
        self._lock = threading.Lock()

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        key = (*shape, like.dtype, like.device)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            held = self._held.setdefault(key, [])
            self._held.move_to_end(key)
            number = next((i for i, (_, known) in enumerate(held) if known() is None), len(held))
            buffer = held[number][0] if number < len(held) else like.new_empty(shape)
            out = buffer.zero_().view(shape)
            held[number : number + 1] = [(buffer, ref(out))]
            for old in [*self._held][:-_SHAPES]:
                self._held[old] = [each for each in self._held[old] if each[1]() is not None]
                if not self._held[old]:
                    del self._held[old]
        return out


class _Graph(NamedTuple):
    """A captured pass: where it reads its inputs, and where it writes its output."""

    graph: Any
    inputs: dict[str, Tensor]  # by their names in `_pass`
    out: Tensor  # (B, T, H), or logits (B, T, V)

    def replay(self, inputs: dict[str, Tensor]) -> Tensor:
        for name, held in self.inputs.items():
            held.copy_(inputs[name])
        self.graph.replay()
        return self.out


def _captured(
    run: Callable[..., Tensor], inputs: dict[str, Tensor], shared: _Graph | None
) -> _Graph:
    """Capture a pass; its memory is that of `shared`.

    The pass runs once before, as kernels cannot be compiled in a capture.

    Raises:
        RuntimeError: the device refuses, for lack of memory or in an operation no graph can hold.
    """
    global _seconds
    start = time.perf_counter()
    run(**inputs)
    with torch.inference_mode(False):
        held = {name: torch.empty_like(each) for name, each in inputs.items()}
    graph = torch.cuda.CUDAGraph()
    pool = None if shared is None else shared.graph.pool()
    try:
        alone = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        with sdpa_kernel([*_UNPLANNED, SDPBackend.MATH], True), alone:
            out = run(**held)
    except RuntimeError as error:
        error.add_note("while a pass was captured; execution='fused' captures nothing")
        raise
    _seconds += time.perf_counter() - start
    return _Graph(graph, held, out)


class _Step(NamedTuple):
    """The parts of a step that blocks other than attention need."""

    inputs: Tensor | None
    few: bool


def _pass(
    blocks: Sequence[Block],
    used: int,
    pairs: dict[int, tuple[Tensor, Tensor]],  # by layer, keys and values (B, K, S, D)
    tables: Tables,
    few: bool,
    hidden: Tensor,  # (B, T, H)
    slots: Tensor,  # (B, T)
    inputs: Tensor | None = None,  # (B, T, L, P)
    positions: Tensor | None = None,  # of a tree's nodes, (B, T)
    paths: Tensor | None = None,  # (B, T), see `Branches.paths`
) -> Tensor:
    rows = torch.arange(hidden.shape[0], device=hidden.device)[:, None]  # (B, 1)
    places = torch.arange(used, device=hidden.device)  # (U,)
    rope: Tables = {}
    masks: dict[tuple[int | None, int], Tensor] = {}
    step = _Step(inputs, few)
    at, sees = slots, causal
    if positions is not None and paths is not None:
        bits = paths[..., None] >> torch.arange(_NODES, device=paths.device)  # (B, T, N)
        at, sees = positions, partial(causal_on_paths, sees=(bits & 1) > 0)
    for block in blocks:
        if not isinstance(block, Attention):
            hidden = block(hidden, step)
            continue
        keys, values = pairs[block.layer]
        if block.few is not None and few:
            cached = keys, values, used, tables[block.kind]
            hidden = block.few(hidden, slots, positions, paths, *cached)
            continue
        seen = block.window, block.sink
        if seen not in masks:
            masks[seen] = additive(sees(at, places, *seen), hidden.dtype)  # (B, 1, T, U)
        rope = rope or for_heads(gathered(tables, at))
        q, k, v = block.inputs(hidden, rope[block.kind])
        if block.writes:
            keys[rows, :, slots] = k.transpose(1, 2)
            values[rows, :, slots] = v.transpose(1, 2)
        hidden = block.outputs(hidden, q, keys[:, :, :used], values[:, :, :used], masks[seen])
    return hidden
