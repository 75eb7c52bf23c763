"""Weights rounded to 8 or 4 bits, products with weights, and the copies of a model's weights.

8 bits: numbers from -127 to 127 with one scale per row. 4 bits: numbers from -8 to 7 with one
scale, of either sign, per 32 columns of a row. Scales are bfloat16. Copies are made once per model
and kept as long as it lives; all its decodings share them.

Every call compares each weight with its state when it was copied: address, shape, dtype, device and
version, and some of its numbers, since changes through `.data` leave no other trace. A changed
weight is rounded again. A change that is not noticed only lowers acceptance: no text depends on a
copy.
Shapes: R rows, C columns, E experts, G groups of 32 columns; H hidden width, V vocabulary,
n tokens kept.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from layerskip.native.extension import extension
from layerskip.weights.stored import Stored

Function = Callable[[Tensor], Tensor]
Linear = Callable[[Tensor, Tensor | None], Function]
"""Makes a function of inputs from a weight and a bias."""
GROUP = 32
"""Columns that share a scale in 4 bits."""
LARGEST = (-8.6, -8.0, -7.4, 7.0)
"""Values to which the largest number of a group is scaled; the scale with the least error is used.
On SmolLM2 that leaves 0.6 of the squared error of 7 alone; 50 scales leave 0.57."""
ROWS = 16
"""Rows in a panel of packed numbers (see `panels.h`)."""
_CHUNK = 1 << 20  # numbers rounded at a time
_SAMPLES = 32  # numbers of every weight to compare


def plain(weight: Tensor, bias: Tensor | None) -> Function:
    """The ordinary linear layer."""
    linear = F.linear
    return lambda x: linear(x, weight, bias)


@dataclass(frozen=True)
class Rounded:
    """A rounded weight (R, C); for an expert weight (E, R, C) all experts together, (E R, C).

    Attributes:
        data: the numbers, (R, bytes of a row), uint8. In 8 bits each has a byte; in 4 bits, plus 8,
            the first 16 of a group have the low halves of 16 bytes, the others the high halves.
            Rows have whole groups. If packed, numbers and scales in panels, (bytes,).
        scales: (R, 1) or (R, G); None if packed.
    """

    bits: int
    shape: tuple[int, int]
    data: Tensor
    scales: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.scales is None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def chunk(self, count: int) -> list[Rounded]:
        shape = (self.shape[0] // count, self.shape[1])
        scales = [None] * count if self.scales is None else self.scales.chunk(count)
        pairs = zip(self.data.chunk(count), scales, strict=True)
        return [Rounded(self.bits, shape, *pair) for pair in pairs]

    def widened(self, dtype: torch.dtype) -> Tensor:
        data, scales = self.data, self.scales
        if scales is None:
            data, scales = _apart(data, *self.shape, self.bits)
        return _widened(data, scales, self.bits, self.shape[1], dtype)  # (R, C)

    def linear(self, bias: Tensor | None) -> Function:
        """Multiply inputs (..., C) by the widened weight, (..., R).

        This is fast only in the native backend. Torch's own products crash with some widths
        (`_weight_int8pack_mm` of torch 2.13, with 33 rows of 100 columns).
        """
        return lambda x: F.linear(x, self.widened(x.dtype), bias)


def rounded(weight: Tensor, bits: int, *, packed: bool = False) -> Rounded:
    """Round a weight (R, C), or (E, R, C) of experts, to 8 or 4 bits."""
    *experts, rows, columns = weight.shape
    rows = math.prod((*experts, rows))
    # In chunks, each joined to the others at once, so that rounding needs little memory.
    step = max(ROWS, _CHUNK // max(1, columns) // ROWS * ROWS)
    length = rounded_bytes(weight, bits, packed=True) if packed else rows
    joined, end = list[Tensor](), 0
    with torch.inference_mode(False), torch.no_grad():
        # Each expert separately, so that in packed numbers it begins with a panel.
        each = weight.detach() if experts else [weight.detach()]
        for some in (some for one in each for some in one.split(step)):
            data, scales = _rounded(some, bits)
            made = [data, scales]
            if packed:
                stored = _together(data, scales, bits)
                made = [extension().arranged(stored, f"R{bits}", columns)]
            joined = joined or [each.new_empty(length, *each.shape[1:]) for each in made]
            for whole, part in zip(joined, made, strict=True):
                whole[end : end + len(part)] = part
            end += len(made[0])
    return Rounded(bits, (rows, columns), *joined)


def rounded_bytes(weight: Tensor, bits: int, *, packed: bool = False) -> int:
    """`Rounded.nbytes` of a weight, without creating it."""
    if weight.dim() == 3:
        return len(weight) * rounded_bytes(weight[0], bits, packed=packed)
    rows, columns = weight.shape
    width = -(-columns // GROUP) * GROUP
    scales = 2 if bits == 8 else 2 * width // GROUP  # of a row
    if not packed:
        return rows * (width * bits // 8 + scales)
    return -(-rows // ROWS) * (-(-ROWS * scales // 64) * 64 + ROWS * width * bits // 8)


def _rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The numbers and scales of a weight (R, C), as in `Rounded`."""
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    exact = F.pad(exact, (0, -exact.shape[1] % GROUP)) if exact.shape[1] % GROUP else exact
    if bits == 8:
        scales = (exact.abs().amax(-1, keepdim=True) / 127).bfloat16()  # (R, 1)
        numbers = _numbers(exact, scales, -127, 127).to(torch.int8)
        return numbers.view(torch.uint8), scales
    groups = exact.unflatten(1, (-1, GROUP))  # (R, G, 32)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # (R, G, 1)
    best, least = largest, torch.full_like(largest, float("inf"))
    for number in LARGEST:
        scales = (largest / number).bfloat16()
        off = _numbers(groups, scales, -8, 7).mul_(scales.to(groups)).sub_(groups)
        squares = off.square_().sum(-1, keepdim=True)  # (R, G, 1)
        best, least = torch.where(squares < least, scales, best), torch.minimum(squares, least)
    best = best.bfloat16()
    low, high = (_numbers(groups, best, -8, 7) + 8).to(torch.uint8).chunk(2, -1)
    return (low | high << 4).flatten(1), best.flatten(1)


def _together(data: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Numbers and scales in the rows of a format of `codes.h`, (R, bytes of a row)."""
    if bits == 8:
        return torch.cat((data, scales.view(torch.uint8)), -1)
    by = scales[..., None].view(torch.uint8)  # (R, G, 2)
    return torch.cat((by, data.unflatten(1, (-1, GROUP // 2))), -1).flatten(1)


def _apart(panels: Tensor, rows: int, columns: int, bits: int) -> tuple[Tensor, Tensor]:
    """The numbers and scales of panels, as in `Rounded` (see `codes.h`)."""
    panels = panels.view(-(-rows // ROWS), -1)  # (P, bytes)
    groups = -(-columns // GROUP)
    scales = panels[:, : 2 * ROWS * (1 if bits == 8 else groups)].contiguous()
    scales = scales.view(torch.bfloat16).view(len(panels), -1, ROWS)  # (P, 1 or G, 16)
    lines = panels.view(torch.int32)[:, -groups * bits * ROWS :].unflatten(1, (-1, bits, ROWS))
    data = lines.permute(0, 3, 1, 2).contiguous().view(torch.uint8)  # (P, 16, G, 4 * bits)
    if bits == 8:
        data = data ^ 128
    else:  # two lines of 4 columns share bytes
        pairs = data.unflatten(-1, (4, 4))
        data = torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3)  # (P, 16, G, 32)
        data = data[..., :16] | data[..., 16:] << 4
    return data.flatten(2).flatten(0, 1)[:rows], scales.transpose(1, 2).flatten(0, 1)[:rows]


def _numbers(exact: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    by = torch.where(scales == 0, 1, scales.to(exact.dtype))
    return (exact / by).round_().clamp_(low, high)


def _widened(data: Tensor, scales: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight (R, C) of numbers and scales."""
    if bits == 8:
        return data[:, :columns].view(torch.int8).to(dtype) * scales.to(dtype)
    pairs = data.unflatten(1, (-1, GROUP // 2))  # (R, G, 16)
    numbers = torch.cat((pairs & 15, pairs >> 4), -1).to(dtype) - 8  # (R, G, 32)
    weight: Tensor = (numbers * scales[..., None].to(dtype)).flatten(1)[:, :columns]
    return weight


class TrimmedHead:
    """Some rows of an unembedding: their weight (n, H), bias (n,) or None, and tokens (n,).

    Few tokens make up most of any text: a draft that reads only their rows costs less and proposes
    nearly the same tokens (FR-Spec, arXiv 2502.14856). Other tokens have logits of -inf.

    Args:
        head: the full head.
        tokens: those whose rows are copied.
    """

    def __init__(self, head: nn.Linear, tokens: Iterable[int]) -> None:
        weight, bias = head.weight.detach(), head.bias
        self.tokens = torch.tensor(sorted(tokens), device=weight.device)  # (n,)
        self.weight = weight[self.tokens]  # (n, H)
        self.bias = None if bias is None else bias.detach()[self.tokens]  # (n,)
        self.spread = partial(spread, tokens=self.tokens, vocabulary=len(weight))


def spread(logits: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Expand logits (..., n) of tokens, (n,) or (..., n), to (..., V), with -inf elsewhere."""
    whole = logits.new_full((*logits.shape[:-1], vocabulary), float("-inf"))
    return whole.scatter_(-1, tokens.expand_as(logits), logits)


# ---------------------------------------------------------------------------------------------
# The copies of a model.


class _Origin:
    """A weight's state when it was copied, and its copies.

    Attributes:
        copies: rounded ones, by bits and layout.
        heads: its rows of some tokens, by tokens, oldest first.
    """

    def __init__(self, weight: Tensor) -> None:
        self.facts = facts(weight)
        self._look(weight)
        self.before = self.sample.clone()
        self.copies: dict[tuple[int, bool], Rounded] = {}
        self.heads: dict[tuple[int, ...], TrimmedHead] = {}

    def _look(self, weight: Tensor) -> None:
        flat = (weight.bytes if isinstance(weight, Stored) else weight.detach()).reshape(-1)
        step = max(1, len(flat) // _SAMPLES)
        self.place = weight.data_ptr()
        self.sample = flat[step // 2 :: step]  # a view of the weight, if it is contiguous

    def holds(self, weight: Tensor) -> bool:
        if self.facts != facts(weight):
            return False
        if self.place != weight.data_ptr() or not weight.is_contiguous():  # it was moved
            self._look(weight)
        if torch.equal(self.sample, self.before):
            return True
        same = (self.sample == self.before) | (self.sample.isnan() & self.before.isnan())
        return bool(same.all())  # NaN does not equal itself


def facts(weight: Tensor) -> tuple[Any, ...]:
    """What reveals a change of a weight for free, unless it is made through `.data`."""
    version = 0 if weight.is_inference() else weight._version
    return version, weight.shape, weight.dtype, weight.device


class Copies:
    """The rounded weights and trimmed heads of a model, each made when first needed.

    Attributes:
        changes: how often copies were dropped; if it has changed, a model is opened again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: Any = WeakTensorKeyDictionary()  # weight -> `_Origin`
        self.changes = 0

    def of(self, weight: Tensor, bits: int, *, packed: bool = False) -> Rounded:
        """A rounded weight of the model."""
        with self._lock:
            kept = self._origin(weight).copies
            if (bits, packed) not in kept:
                kept[bits, packed] = rounded(weight, bits, packed=packed)
            return kept[bits, packed]

    def trimmed(self, head: nn.Linear, tokens: tuple[int, ...]) -> TrimmedHead:
        """A head with the rows of some tokens.

        All of one head together have at most as many rows as it has; the oldest are dropped.
        """
        with self._lock:
            kept = self._origin(head.weight).heads
            if tokens not in kept:
                while kept and sum(map(len, kept)) + len(tokens) > len(head.weight):
                    del kept[next(iter(kept))]
                kept[tokens] = TrimmedHead(head, tokens)
            return kept[tokens]

    def _origin(self, weight: Tensor) -> _Origin:
        if weight not in self._made:
            with torch.inference_mode(False), torch.no_grad():
                self._made[weight] = _Origin(weight)
        return self._made[weight]  # type: ignore[no-any-return]

    def forget_changed(self) -> None:
        with self._lock:
            changed = [w for w, origin in self._made.items() if not origin.holds(w)]
            for weight in changed:
                del self._made[weight]
            self.changes += bool(changed)

    def forget_all(self) -> None:
        with self._lock:
            self._made.clear()
            self.changes += 1

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(c.nbytes for origin in self._made.values() for c in origin.copies.values())


_copies: WeakKeyDictionary[nn.Module, Copies] = WeakKeyDictionary()
_lock = threading.Lock()


def copies_of(model: nn.Module) -> Copies:
    """The copies of a model, without those of changed weights."""
    with _lock:
        copies = _copies.setdefault(model, Copies())
    copies.forget_changed()
    return copies


def linears(module: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linear layers of a sublayer, decoder or head that can be rounded.

    All others are used unchanged: those that the library has quantised or offloaded, the small ones
    of adapters, and those that choose experts.
    """
    adapted = [name for name, each in module.named_modules() if hasattr(each, "base_layer")]
    for name, each in module.named_modules():
        base = name.endswith("base_layer")
        if any(name.startswith(f"{path}.") for path in adapted) and not base:
            continue
        if name.endswith(("gate", "gate.wg", "router")) or type(each) is not nn.Linear:
            continue
        weight = each.weight
        plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
        if (plain and not weight.is_meta) or isinstance(weight, Stored):
            yield each
