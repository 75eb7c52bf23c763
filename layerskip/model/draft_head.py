"""An output head with only some rows of the vocabulary.

Few tokens make up most of any text: a draft that reads only their rows costs less and proposes
nearly the same tokens (FR-Spec, arXiv 2502.14856). In drafts, other tokens have logits of -inf.
Shapes: B rows, T tokens of a pass, H hidden width, V vocabulary, n tokens kept.
"""

from __future__ import annotations

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
