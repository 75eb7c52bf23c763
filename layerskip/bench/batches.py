"""Prompts as token ids: joined or cut to a context length, and in left-padded batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerskip.api.loading import encode
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import plural


class Encoded(NamedTuple):
    """A prompt's name, category, token ids (1, T), and the context length it was made for."""

    name: str
    category: str | None
    ids: Tensor
    context: int | None = None


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are decoded together, left-padded to (B, W)."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    """The prompts' numbers among all prompts of the run."""
    category: str | None
    input_ids: Tensor
    attention_mask: Tensor
    context: int | None = None

    @property
    def rows(self) -> int:
        return len(self.names)


def one_by_one(prompts: Sequence[Tensor]) -> list[PromptBatch]:
    """A batch for each prompt, (1, T), named by its number from 1 on."""
    return [
        PromptBatch((str(number + 1),), (number,), None, ids, torch.ones_like(ids))
        for number, ids in enumerate(prompts)
    ]


def make_batches(
    prompts: Sequence[Encoded], sizes: Sequence[int], pad: int
) -> tuple[list[PromptBatch], list[str]]:
    """Make batches of each size within a category, and messages about prompts that fill none."""
    by_category: dict[str | None, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        by_category[prompt.category].append(number)
    batches, words = [], []
    for size in sizes:
        left = 0
        for category, numbers in by_category.items():
            left += len(numbers) % size
            for start in range(0, len(numbers) - size + 1, size):
                chosen = tuple(numbers[start : start + size])
                ids = [prompts[number].ids[0] for number in chosen]
                batches.append(
                    PromptBatch(
                        names=tuple(prompts[number].name for number in chosen),
                        numbers=chosen,
                        category=category,
                        input_ids=_left_padded(ids, pad),
                        attention_mask=_left_padded(list(map(torch.ones_like, ids)), 0),
                        context=prompts[chosen[0]].context,
                    )
                )
        if left:
            words.append(
                f"{plural(left, 'prompt')} left out at batch size {size}: too few for a batch"
            )
    return batches, words


def _left_padded(rows: list[Tensor], filler: int) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=filler, padding_side="left")


def encode_all(tokenizer: Any, prompts: Sequence[Prompt], device: torch.device) -> list[Encoded]:
    return [Encoded(p.id, p.category, encode(tokenizer, p).to(device)) for p in prompts]


def long_prompts(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    contexts: Sequence[int],
    device: torch.device,
    *,
    least: int = 1,
    most: int | None = None,
) -> tuple[list[Encoded], int | None]:
    """Make prompts of exactly the given numbers of tokens from whole prompts, taken in order.

    Prompts are joined until they suffice, chats inside one user turn. Excess tokens are cut out of
    the middle, so the beginning, the last question and the end of the chat template remain.

    Args:
        least, most: number of prompts per context; by default as many as possible without repeats.

    Returns:
        The long prompts, and the context from which on prompts are repeated, or None.
    """
    made: list[Encoded] = []
    again = None
    for context in sorted(set(contexts)):
        joined = _joined(tokenizer, prompts, context)
        for number, (ids, repeated) in enumerate(joined, 1):
            if repeated and number > least:
                break
            again = context if repeated and again is None else again
            tail = context // 2
            ids = torch.cat([ids[:, : context - tail], ids[:, ids.shape[1] - tail :]], dim=1)
            name, category = f"{context}-{number}", f"{context:,} tokens"
            made.append(Encoded(name, category, ids.to(device), context))
            if number == most:
                break
    return made, again


def _joined(
    tokenizer: Any, prompts: Sequence[Prompt], tokens: int
) -> Iterator[tuple[Tensor, bool]]:
    """Yield joined prompts as ids (1, `tokens` or more), and whether they repeat; endless."""
    chat = any(prompt.messages is not None for prompt in prompts)

    def encoded(text: str) -> Tensor:
        prompt = Prompt(id="joined", text=text)
        return encode(tokenizer, prompt.as_chat() if chat else prompt)

    around = encoded("a").shape[1] - 1
    if 2 * around > tokens:
        raise ValueError(f"--context must be at least {2 * around} for this model, got {tokens}")
    texts = [
        "\n\n".join(each["content"] for each in prompt.messages)
        if prompt.messages is not None
        else str(prompt.text)
        for prompt in prompts
    ]
    lengths = [encoded(text).shape[1] - around for text in texts]
    used, source = 0, cycle(zip(texts, lengths, strict=True))
    while True:
        parts: list[str] = []
        count = around
        while count < tokens:
            while count < tokens:  # count the texts' own tokens first, since encoding takes time
                text, length = next(source)
                parts.append(text)
                count += max(1, length)
                used += 1
            ids = encoded("\n\n".join(parts))  # (1, T)
            count = ids.shape[1]
        yield ids, used > len(texts)
