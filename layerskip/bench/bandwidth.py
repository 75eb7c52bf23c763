"""The bytes that the passes of a call read from memory, and how fast a device reads memory.

A pass reads every weight once, and the keys and values that its attentions see of every row. The
CPU's caches are ignored. No pass over few tokens can be faster than its bytes are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

import torch

from layerskip.bench.batches import PromptBatch
from layerskip.bench.methods import Decoded, Engine, Method
from layerskip.costs.speculation import keys_read
from layerskip.model.opened_model import OpenedModel

STEPWISE = ("plain", "generate", "generate-static", "generate-compiled", "llama.cpp")
"""Methods with one token per row and pass."""

SIZE = 256 << 20  # bytes per sweep: more than caches hold, but quick to read in a benchmark


class Sweeps:
    """Sweeps over a buffer; each adds up its float32 numbers on torch's threads.

    Args:
        now: a clock in seconds that waits for the device's pending work.
        size: bytes of the buffer, which lives as long as this object.
    """

    def __init__(self, device: torch.device, now: Callable[[], float], size: int = SIZE) -> None:
        self.buffer = torch.ones(size // 4, device=device)
        self.now = now

    def __call__(self) -> float:
        """Bytes per second of one sweep."""
        start = self.now()
        self.buffer.sum()
        return self.buffer.nbytes / (self.now() - start)


def bytes_read(
    opened: OpenedModel, method: Method, batch: PromptBatch, decoded: Decoded
) -> float | None:
    """Bytes that a call's passes read after the first tokens; None if unknown.

    A round's draft steps read what their source states, whatever the number of tokens; its target
    pass reads the whole model.
    """
    keys = opened.key_bytes()
    if not keys or (decoded.rounds is None and method.kind not in STEPWISE):
        return None
    sources = method.plan.sources if isinstance(method, Engine) else []
    steps = [(math.fsum(each.step_bytes()), each.key_bytes(), each.per_step) for each in sources]
    weights = cache(lambda tokens: opened.pass_bytes([tokens])[0])
    firsts = decoded.first_tokens
    prompts: list[int] = batch.attention_mask.sum(-1).tolist()
    lengths = [prompt + first for prompt, first in zip(prompts, firsts, strict=True)]
    total = 0.0
    for drafted, taken, used, emitted in _rounds(decoded):
        going = [length for length, count in zip(lengths, emitted, strict=True) if count]
        total += weights(len(going) * (drafted + 1))
        total += math.fsum(keys_read(keys, length + drafted) for length in going)
        for source in used:
            step, own_keys, per_step = steps[source]
            for place in range(-(-taken // per_step) if step else 0):
                total += step + math.fsum(keys_read(own_keys, length + place) for length in going)
        lengths = [length + count for length, count in zip(lengths, emitted, strict=True)]
    return total or None


def _rounds(decoded: Decoded) -> Iterator[tuple[int, int, set[int], list[int]]]:
    """Rounds after the first tokens: longest draft, steps, sources, and tokens by row.

    Methods without rounds have one per token.
    """
    for each in (decoded.rounds or ())[1:]:
        sources = map(each.source_of, range(len(each.tokens)))
        used = {source for source in sources if source is not None}
        yield max(each.drafted), each.steps, used, [len(tokens) for tokens in each.tokens]
    if decoded.rounds is None:
        pairs = zip(decoded.tokens, decoded.first_tokens, strict=True)
        left = [len(tokens) - first for tokens, first in pairs]
        for number in range(max(left)):
            yield 0, 0, set(), [int(count > number) for count in left]
