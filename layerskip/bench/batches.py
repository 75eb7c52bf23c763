"""Prompts that are decoded together, left-padded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are decoded together.

    Attributes:
        names: their ids; `numbers` their places among all prompts of the run.
        category: of all of them.
        input_ids, attention_mask: left-padded, (B, W).
    """

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    category: str | None
    input_ids: Tensor
    attention_mask: Tensor

    @property
    def rows(self) -> int:
        return len(self.names)


def one_by_one(prompts: Sequence[Tensor]) -> list[PromptBatch]:
    """A batch for each prompt, (1, T); named by their numbers, from 1."""
    return [
        PromptBatch((str(number + 1),), (number,), None, ids, torch.ones_like(ids))
        for number, ids in enumerate(prompts)
    ]


def make_batches(
    prompts: Sequence[tuple[str, str | None, Tensor]], sizes: Sequence[int], pad: int
) -> tuple[list[PromptBatch], list[str]]:
    """Batches of every size, of prompts of one category in their order, left-padded.

    Args:
        prompts: name, category and token ids (1, T) of each.
        pad: the token to fill up with.

    Returns:
        The batches, and words about prompts that are left over at a size.
    """
    by_category: dict[str | None, list[int]] = defaultdict(list)
    for number, (_, category, _) in enumerate(prompts):
        by_category[category].append(number)
    batches, words = [], []
    for size in sizes:
        left = 0
        for category, numbers in by_category.items():
            left += len(numbers) % size
            for start in range(0, len(numbers) - size + 1, size):
                chosen = tuple(numbers[start : start + size])
                ids = [prompts[number][2][0] for number in chosen]
                batches.append(
                    PromptBatch(
                        names=tuple(prompts[number][0] for number in chosen),
                        numbers=chosen,
                        category=category,
                        input_ids=_left_padded(ids, pad),
                        attention_mask=_left_padded(list(map(torch.ones_like, ids)), 0),
                    )
                )
        if left:
            words.append(f"{left} prompts are left out at batch size {size}: they fill no batch")
    return batches, words


def _left_padded(rows: list[Tensor], filler: int) -> Tensor:
    """Rows (T,) of any lengths as one tensor, (B, W)."""
    return pad_sequence(rows, batch_first=True, padding_value=filler, padding_side="left")
