"""How many bytes the passes of a call read from memory: weights, and keys and values.

By the model's own formulas: a pass reads every weight once, and of every row's text what its
layers' attentions see. What the CPU's caches keep between passes is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from layerskip.bench.batches import PromptBatch
from layerskip.bench.methods import Decoded, Engine, Method
from layerskip.costs.speculation import keys_read
from layerskip.model.sublayers import Sublayers

STEPWISE = ("plain", "generate", "llama.cpp")
"""Kinds of methods whose passes are of one token of every row."""


def bytes_read(
    opened: Sublayers, method: Method, batch: PromptBatch, decoded: Decoded
) -> float | None:
    """Bytes that a call's passes read behind the first tokens.

    A round's draft steps read what their source says, however many tokens they take, and its target
    pass reads the whole model.

    Returns:
        None where the passes, or the model's keys, are not known.
    """
    keys = opened.key_bytes()
    if not keys or (decoded.rounds is None and method.kind not in STEPWISE):
        return None
    sources = method.opened_sources(opened) if isinstance(method, Engine) else []
    steps = [(math.fsum(each.step_bytes()), each.key_bytes()) for each in sources]
    weights = cache(lambda tokens: opened.pass_bytes([tokens])[0])
    firsts = decoded.first_tokens
    prompts: list[int] = batch.attention_mask.sum(-1).tolist()
    lengths = [prompt + first for prompt, first in zip(prompts, firsts, strict=True)]
    total = 0.0
    for each in _rounds(decoded):
        going = [length for length, count in zip(lengths, each.emitted, strict=True) if count]
        total += weights(len(going) * (each.drafted + 1))
        total += math.fsum(keys_read(keys, length + each.drafted) for length in going)
        for source in each.sources:
            step, own = steps[source]
            for place in range(each.steps if step else 0):
                total += step + math.fsum(keys_read(own, length + place) for length in going)
        lengths = [length + count for length, count in zip(lengths, each.emitted, strict=True)]
    return total or None


class _Round(NamedTuple):
    """Tokens that the longest row drafted, draft steps, sources; tokens emitted by row."""

    drafted: int
    steps: int
    sources: set[int]
    emitted: list[int]


def _rounds(decoded: Decoded) -> Iterator[_Round]:
    """The rounds behind the first tokens; of methods without any, one a token."""
    for each in (decoded.rounds or ())[1:]:
        sources = map(each.source_of, range(len(each.tokens)))
        used = {source for source in sources if source is not None}
        yield _Round(max(each.drafted), each.steps, used, [len(tokens) for tokens in each.tokens])
    if decoded.rounds is None:
        pairs = zip(decoded.tokens, decoded.first_tokens, strict=True)
        left = [len(tokens) - first for tokens, first in pairs]
        for number in range(max(left)):
            yield _Round(0, 0, set(), [int(count > number) for count in left])
