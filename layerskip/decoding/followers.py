"""Drafts with a state of their own, and what it holds of every row; knows no laws, no rounds.

A second model has keys and values of all tokens, and so have blocks that were trained to draft.
They follow a batch lazily: the first step of a round that they draft in catches up with what each
row has emitted since they drafted last, at first with its prompt. So they cost nothing where others
draft, drafts that fell are overwritten before anything reads them, and rolling back is to lower a
number.
Letters: R rows of a pass, T tokens, H hidden width of the target, V its vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerskip.model.cache import on_device

if TYPE_CHECKING:
    from layerskip.decoding.passes import Session
    from layerskip.model.sublayers import Pass

# Tokens of one pass of the prefill, all rows together: enough to keep a machine busy, and few
# enough that their activations are small beside the weights.
_CHUNK = 512


class Drafter(ABC):
    """A draft with a state of its own, for any number of batches.

    Attributes:
        max_positions: tokens that a row may have, at most.
        longest: tokens that it drafts in a round at most, if there is a limit.
    """

    max_positions: int
    longest: int | None = None

    @abstractmethod
    def open(self, session: Session) -> Follower:
        """What follows the rows of a batch."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Tells it from others, and keeps no weights alive."""

    @abstractmethod
    def step_bytes(self) -> Sequence[float]:
        """Bytes of the weights that one of its steps reads."""


class Follower(ABC):
    """The state of a draft in one batch.

    Args:
        session: the batch.

    Attributes:
        prefix: sublayers of the target, from the front, that its steps go through first.
        tap: behind so many sublayers the session keeps hidden states for it; None: nowhere.
        longest: tokens that it drafts in a round at most, if there is a limit.
        seen: per row, how many tokens of its history the state holds, from the first one on.
    """

    prefix = 0
    tap: int | None = None
    longest: int | None = None

    def __init__(self, session: Session) -> None:
        self.session = session
        self.seen = [0] * len(session.prompts)

    @abstractmethod
    def step(self, tokens: Tensor, hidden: Tensor, step: Pass, offset: int) -> Tensor:
        """Raw logits (R, V) behind a token of the round.

        Args:
            tokens: of each row the last emitted one at first, then those that it drafts, (R,).
            hidden: they behind the `prefix`, (R, 1, H), and the pass `step` that took them there.
            offset: how many tokens of the round came before.
        """

    @abstractmethod
    def keep(self, places: Sequence[int], length: int) -> int:
        """Leave all rows but those at these places behind, as `RowCache.keep`."""

    def commit(self, row: int, emitted: int, steps: int) -> None:
        """A round of so many steps of its own emitted so many tokens of a row: which stay seen.

        Told before the session's length of the row moves. The last token emitted was fed to nobody.
        """
        self.seen[row] = self.session.lengths[row] + min(emitted, steps)

    def missing(self) -> int:
        """Tokens that the first step of a round has to see, the last emitted one among them."""
        lengths = self.session.lengths
        return max(1, *(lengths[row] + 1 - self.seen[row] for row in self.session.rows))

    def see(self) -> None:
        """Where the last emitted token of every row is all that is missing: it is seen."""
        for row in self.session.rows:
            self.seen[row] = self.session.lengths[row] + 1

    def latest(self, count: int) -> tuple[list[int], list[int], Tensor]:
        """The last `count` tokens of every row, or all of a row that has fewer; all are seen then.

        Rows that miss fewer see some again, which changes nothing.

        Returns:
            Of each row of a pass the place of the first of them and which of them is the last;
            and the tokens, (R, T), of short rows with others behind the last.
        """
        session = self.session
        starts, lasts, tokens = [], [], []
        for row in session.rows:
            end = self.seen[row] = session.lengths[row] + 1
            first, prompt = max(0, end - count), session.prompt_lengths[row]
            known = session.prompts[row][first:].tolist()
            known += session.emitted[row][max(0, first - prompt) : end - prompt]
            starts.append(first)
            lasts.append(end - first - 1)
            tokens.append(known + known[-1:] * (count - len(known)))
        return starts, lasts, on_device(tokens, session.model.device)


def in_chunks(tokens: Tensor, lasts: Sequence[int], run: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Carry many tokens (R, T) through a model, some of them at a time.

    Args:
        lasts: which token of each row is the last.
        run: takes some tokens (R, t) and which the first one is, gives hidden states (R, t, H).

    Returns:
        The hidden states of those last tokens, (R, H).
    """
    count = max(1, _CHUNK // len(tokens))
    if tokens.shape[1] <= count and min(lasts) == tokens.shape[1] - 1:
        return run(tokens, 0)[:, -1]
    for first in range(0, tokens.shape[1], count):
        hidden = run(tokens[:, first : first + count], first)  # (R, up to count, H)
        if first == 0:
            found = torch.empty_like(hidden[:, 0])  # (R, H)
        here = [row for row, last in enumerate(lasts) if 0 <= last - first < hidden.shape[1]]
        found[here] = hidden[here, [lasts[row] - first for row in here]]
    return found
