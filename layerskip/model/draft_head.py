"""An output head with only some rows of the vocabulary.

Few tokens make up most of any text: a draft that reads only their rows costs less and proposes
nearly the same tokens (FR-Spec, arXiv 2502.14856). In drafts, other tokens have logits of -inf.
Shapes: B rows, T tokens of a pass, H hidden width, V vocabulary, n tokens kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class TrimmedHead:
    """Some rows of an unembedding: their weight (n, H), bias (n,) or None, and tokens (n,).

    Args:
        head: the full head.
        rows: token ids, whose rows are copied, or a slice, whose rows are views.
    """

    def __init__(self, head: nn.Linear, rows: Sequence[int] | slice) -> None:
        weight, bias = head.weight.detach(), head.bias
        self.vocabulary = len(weight)
        which: Any = rows
        if not isinstance(rows, slice):
            which = torch.tensor(sorted(rows), device=weight.device)
        self.tokens = torch.arange(self.vocabulary, device=weight.device)[which]  # (n,)
        self.weight = weight[which]  # (n, H)
        self.bias = None if bias is None else bias.detach()[which]  # (n,)
        self.spread = partial(_spread, tokens=self.tokens, vocabulary=self.vocabulary)
        """Expand logits of the rows (B, T, n) to the vocabulary, (B, T, V), with -inf elsewhere."""


def _spread(logits: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    whole = logits.new_full((*logits.shape[:-1], vocabulary), float("-inf"))
    return whole.scatter_(-1, tokens.expand_as(logits), logits)


# Copies by head and tokens, oldest first; they live as long as the head.
_Copies = dict[tuple[int, ...], tuple[Any, TrimmedHead]]
_copies: weakref.WeakKeyDictionary[nn.Linear, _Copies] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def trimmed_head(head: nn.Linear, tokens: tuple[int, ...]) -> TrimmedHead:
    """Copy rows of a head, only once unless its weight changes.

    All copies of one head together have at most as many rows as it has; the oldest are dropped. A
    change through `.data` is not noticed: it makes drafts worse, but never changes the text.
    """
    with _lock:
        kept = _copies.setdefault(head, {})
        state = _state(head)
        for stale in [stale for stale, (made_of, _) in kept.items() if made_of != state]:
            del kept[stale]
        if tokens not in kept:
            while kept and sum(map(len, kept)) + len(tokens) > len(head.weight):
                del kept[next(iter(kept))]
            kept[tokens] = state, TrimmedHead(head, tokens)
        return kept[tokens][1]


def _state(head: nn.Linear) -> tuple[Any, ...]:
    """Values that change with a head's numbers, as far as that can be checked for free."""
    return tuple(
        (part.data_ptr(), 0 if part.is_inference() else part._version, part.dtype, part.device)
        for part in head.parameters(recurse=False)
    )
