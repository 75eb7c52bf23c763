"""States with keys and values of their own, which catch up with the batch when they draft.

Second models and trained modules have keys and values of all tokens. When they draft in a round,
the first step catches up with what each row has emitted since they drafted last (at first, with its
prompt). So they cost nothing while others draft. Rolling back lowers a number; rejected drafts are
overwritten before anything reads them.
Letters: R rows of a pass, T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from layerskip.decoding.sources.base import Batch, State
from layerskip.model.cache import on_device

# Tokens of one pass of the prefill, all rows together: enough to keep a machine busy, but so few
# that their activations are small compared with the weights.
_CHUNK = 512


class Following(State):
    """A state that has seen some tokens of every row.

    Attributes:
        seen: per row, how many of its first tokens the state holds.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.seen = [0] * len(batch.prompts)

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        if steps:  # the last emitted token has not been fed
            self.seen[row] = self.batch.lengths[row] + min(len(emitted), steps)

    def missing(self) -> int:
        """How many tokens a round's first step has to see, the last emitted one included."""
        lengths = self.batch.lengths
        return max(1, *(lengths[row] + 1 - self.seen[row] for row in self.batch.rows))

    def see(self) -> None:
        """Mark the last emitted token of every row as seen, where nothing else is missing."""
        for row in self.batch.rows:
            self.seen[row] = self.batch.lengths[row] + 1

    def latest(self, count: int) -> tuple[list[int], list[int], Tensor]:
        """The last `count` tokens of every row (or all, if it has fewer), and marks them as seen.

        Rows that miss fewer see some again, which changes nothing.

        Returns:
            For each row of a pass the place of the first of them, and the index of the last; and
            the tokens, (R, T), padded behind the last.
        """
        batch = self.batch
        starts, lasts, tokens = [], [], []
        for row in batch.rows:
            end = self.seen[row] = batch.lengths[row] + 1
            first, prompt = max(0, end - count), batch.prompt_lengths[row]
            known = batch.prompts[row][first:].tolist()
            known += batch.emitted[row][max(0, first - prompt) : end - prompt]
            starts.append(first)
            lasts.append(end - first - 1)
            tokens.append(known + known[-1:] * (count - len(known)))
        return starts, lasts, on_device(tokens, batch.model.device)


def in_chunks(
    tokens: Tensor,
    lasts: Sequence[int],
    run: Callable[[Tensor, int], Tensor],
    inside: Container[int] = (),
) -> Tensor:
    """Run many tokens (R, T) through a model in chunks.

    Args:
        lasts: the index of each row's last token.
        run: takes a chunk (R, t) and the index of its first token, returns states (R, t, H).
        inside: where no chunk may begin.

    Returns:
        The hidden states of the last tokens, (R, H).
    """
    count = max(1, _CHUNK // len(tokens))
    if tokens.shape[1] <= count and min(lasts) == tokens.shape[1] - 1:
        return run(tokens, 0)[:, -1]
    end = 0
    while (first := end) < tokens.shape[1]:
        end = first + count
        while end in inside:
            end += 1
        hidden = run(tokens[:, first:end], first)  # (R, t, H)
        if first == 0:
            found = torch.empty_like(hidden[:, 0])  # (R, H)
        here = [row for row, last in enumerate(lasts) if 0 <= last - first < hidden.shape[1]]
        found[here] = hidden[here, [lasts[row] - first for row in here]]
    return found
