"""An output head with only some rows of the vocabulary.

Few tokens make up most of any text: a draft that reads only their rows costs less and proposes
nearly the same tokens (FR-Spec, arXiv 2502.14856). In drafts, other tokens have logits of -inf.
Shapes: B rows, T tokens of a pass, H hidden width, V vocabulary, n tokens kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn


class TrimmedHead:
    """Some rows of an unembedding: their weight (n, H), bias (n,) or None, and tokens (n,).

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
