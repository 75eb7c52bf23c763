"""A model's own answers as texts for training.

A draft predicts its target's texts, so it is trained on them: answers sampled as in serving, to the
user's prompts or, without any, to questions that the model makes up. Each batch of texts is a file,
written atomically, and a function of the seed and its number. So a training that was killed
continues with the next batch.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from layerskip.api.generation import decode
from layerskip.api.loading import encode
from layerskip.files.schema import COUNT, items, parse
from layerskip.files.writing import write_text
from layerskip.texts.prompts import Prompt

BATCH = 48
"""Texts decoded together."""
HELD_OUT = 8
"""One of this many prompts is held out of training."""
LONGEST_QUESTION, LONGEST_ANSWER = 64, 256
LEAST_ROOM = 64
"""New tokens for which each given prompt must leave room, as judging decodes so many."""
SHORTEST = 16
"""Minimum mean length of texts in tokens, however late it is."""
_MARK = "\u2042\u2042"
"""A placeholder for a user's message, to find the text that the chat template adds around it."""


class Corpus:
    """A model's answers to prompts.

    Args:
        given: the prompts; None: questions that the model makes up.
        temperature: of the answers.

    Attributes:
        drawn_by: the model that writes: the given one, or a copy of it in another precision.
        late: time (of `time.monotonic`) after which texts are cut short.
        room: maximum number of tokens of a prompt and its answer.

    Raises:
        ValueError: too few are given to hold one out, or a prompt leaves no room for an answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        given: Sequence[Prompt] | None,
        *,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> None:
        if given is not None and len(given) < 2:
            raise ValueError(
                "training needs at least 2 prompts, one of them held out to judge by; got "
                f"{len(given)}"
            )
        self.model, self.tokenizer = model, tokenizer
        self.drawn_by, self.late = model, math.inf
        self.temperature, self.seed = temperature, seed
        ids = [encode(tokenizer, each)[0].tolist() for each in given or ()]
        config = model.config.get_text_config()
        self.room: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
        for prompt, one in zip(given or (), ids, strict=True):  # now, since some are read last
            if len(one) + LEAST_ROOM > self.room:
                raise ValueError(
                    f"prompt {prompt.id} has {len(one):,} tokens, and an answer needs room for "
                    f"{LEAST_ROOM}, but the model reads at most {self.room:,}; shorten it or leave "
                    "it out"
                )
        every = max(2, min(HELD_OUT, len(ids)))
        self.known = [one for i, one in enumerate(ids) if i % every != every - 1]
        self.apart = [one for i, one in enumerate(ids) if i % every == every - 1]

    @property
    def given(self) -> str:
        """A hash of the given prompts."""
        given = json.dumps([self.known, self.apart])
        return sha256(given.encode()).hexdigest()[:16]

    def batch(self, number: int) -> list[list[int]]:
        """The batch of training texts with this number: prompts with their answers."""
        if self.known:
            places = range(number * BATCH, (number + 1) * BATCH)
            # A few prompts are repeated to fill the batch.
            questions = [self.known[i % len(self.known)] for i in places]
        else:
            questions = self._own_questions(number + 1)
        answers = self._continued(questions, number + 1)
        return [ids + new for ids, new in zip(questions, answers, strict=True)]

    def held_out(self, count: int) -> list[list[int]]:
        """Prompts that were held out: no training text begins with them."""
        if self.apart or self.tokenizer.chat_template:
            return self.apart[:count] or self._own_questions(0, count)
        starts = self._own_questions(0, count)  # all the same, so the model continues them
        continued = zip(starts, self._continued(starts, 0, LONGEST_QUESTION), strict=True)
        return [start + [token for token in new if token not in start] for start, new in continued]

    def _own_questions(self, number: int, count: int = BATCH) -> list[list[int]]:
        """Questions made up by the model, as user turns; without a template its start token."""
        tokenizer = self.tokenizer
        if not tokenizer.chat_template:
            ends = self.model.generation_config.eos_token_id
            start = tokenizer.bos_token_id
            if start is None:
                start = ends[0] if isinstance(ends, list) else ends
            if start is None:
                raise ValueError(
                    "this model has neither a chat template nor a start token to begin texts of "
                    "its own with; give --prompts FILE or --texts FILE"
                )
            return [[start]] * count
        around = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        before = tokenizer(around.partition(_MARK)[0], add_special_tokens=False)["input_ids"]
        continued = self._continued([before] * count, -number - 1, LONGEST_QUESTION)
        questions = [
            tokenizer.decode(new, skip_special_tokens=True).strip() or "?" for new in continued
        ]
        prompts = [Prompt(id=str(i), text=text).as_chat() for i, text in enumerate(questions)]
        return [encode(tokenizer, prompt)[0].tolist() for prompt in prompts]

    def _continued(
        self, prompts: Sequence[list[int]], number: int, longest: int = LONGEST_ANSWER
    ) -> list[list[int]]:
        """The target's sampled answers to prompts; each batch number has its own noise."""
        width = max(map(len, prompts))
        rows = [torch.tensor(prompt, device=self.model.device) for prompt in prompts]
        parts = (rows, [*map(torch.ones_like, rows)])  # ids and mask, (B, W) each
        ids, mask = (pad_sequence(p, batch_first=True, padding_side="left") for p in parts)
        new: list[list[int]] = [[] for _ in prompts]
        base = (self.seed * 1_000_003 + number) * BATCH
        for round_ in decode(
            self.drawn_by,
            ids,
            mask,
            enabled=False,
            do_sample=True,
            temperature=self.temperature,
            max_new_tokens=min(longest, self.room - width),
            seeds=[base + row for row in range(len(prompts))],
        ):
            for row, tokens in enumerate(round_.tokens):
                new[row] += tokens
            if time.monotonic() > self.late and sum(map(len, new)) >= SHORTEST * len(new):
                break
        return new


def answers(corpus: Corpus, folder: Path, more: Callable[[], bool]) -> Iterator[list[int]]:
    """Yield the texts of a corpus from files of a folder, a batch each, which are made if missing.

    Args:
        more: whether to make another missing batch; the first is always made.
    """
    folder.mkdir(exist_ok=True)
    for number in count():
        path = folder / f"{number:05}.json"
        if not path.exists():
            if number and not more():
                return
            write_text(path, json.dumps(corpus.batch(number)))
        yield from read(path)


def up_to(texts: Iterable[list[int]], tokens: float) -> Iterator[list[int]]:
    """Yield texts until they contain so many tokens."""
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total >= tokens:
            return


def read(path: Path) -> list[list[int]]:
    """Read the texts of a file.

    Raises:
        ValueError: the file is incomplete or changed.
    """
    try:
        return items(items(COUNT))(parse(path.read_bytes()), "texts")  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the texts in {path} are cut off or changed; remove the file to draw them again"
        ) from error
