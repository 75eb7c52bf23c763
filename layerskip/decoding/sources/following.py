"""States with their own keys and values, which catch up with the batch when they draft.

Such a state costs nothing while other sources draft. A rollback only lowers a length: the slots of
rejected drafts are overwritten before anything reads them.
Shapes: R rows of a pass, T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from layerskip.cache.rows import on_device
from layerskip.decoding.sources.base import Batch, State
from layerskip.model.opened_model import OpenedModel

_CHUNK = 512  # tokens per pass over prompts, all rows together, that keep a CPU busy
_SHARE = 1 / 8  # maximum size of a longer pass's activations, as a share of the weights' bytes
_PADDING = 64  # padding tokens in such a pass that cost less than another pass


class Following(State):
    """A state that has seen a number of first tokens of each row."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.seen = [0] * len(batch.seats)

    def begin(self, row: int) -> None:
        self.seen[row] = 0

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        if steps:  # the last emitted token has not been fed yet
            self.seen[row] = self.batch.seats[row].length + steps

    def missing(self) -> int:
        """The number of tokens for a round's first step to see, including the last emitted one."""
        seats = self.batch.seats
        return max(1, *(seats[row].length + 1 - self.seen[row] for row in self.batch.rows))

    def see(self) -> None:
        for row in self.batch.rows:
            self.seen[row] = self.batch.seats[row].length + 1

    def latest(self, count: int) -> tuple[list[int], list[range], Tensor]:
        """The last `count` tokens of every row, or all if it has fewer; marks them as seen.

        Returns:
            For each row of a pass, the position of the first of them, and the indices of those that
            were missing; and the tokens, (R, T), padded at the end.
        """
        batch = self.batch
        starts, missing, tokens = [], [], []
        for row in batch.rows:
            seat = batch.seats[row]
            end = seat.length + 1
            first, prompt = max(0, end - count), seat.prompt_length
            some = seat.prompt[first:].tolist()
            some += seat.emitted[max(0, first - prompt) : end - prompt]
            starts.append(first)
            missing.append(range(min(self.seen[row], end - 1) - first, end - first))
            tokens.append(some + some[-1:] * (count - len(some)))
            self.seen[row] = end
        return starts, missing, on_device(tokens, batch.model.device)


def in_chunks(
    model: OpenedModel,
    tokens: Tensor,
    places: Sequence[range],
    run: Callable[[Tensor, range, list[int]], Tensor],
    *,
    inside: Container[int] = (),
    ends_before: Sequence[Iterable[int]] = (),
    partial: bool = True,
) -> Tensor:
    """Run the tokens of many rows through a model in chunks.

    Args:
        tokens: (R, T), of which the indices in `places` are run for each row.
        run: called with a chunk (r, t), its rows, and the index of each row's first token in it;
            returns states (r, t, H).
        ends_before: for each row, indices before which a chunk must end.
        partial: whether a chunk may cover only some rows; otherwise all begin at one index.

    Returns:
        The hidden states of the last tokens, (R, H).
    """
    firsts, ends = [each.start for each in places], [each.stop for each in places]
    last: Tensor | None = None
    most = chunk_size(model, tokens.shape[1])
    while any(first < end for first, end in zip(firsts, ends, strict=True)):
        # All rows advance together, so that caches need not store one row's lead over the others.
        groups = [range(len(tokens))]
        if partial:
            padding = 0 if model.recurrent else _PADDING
            groups = [*_groups(firsts, ends, tokens.shape[1], most, padding)]
        for rows in groups:
            most_here = most if partial else max(1, most // len(tokens))
            count = min(most_here, max(ends[row] - firsts[row] for row in rows))
            for row in rows if ends_before else ():
                ahead = (end - firsts[row] for end in ends_before[row])
                count = min(count, *(each for each in ahead if each > 0), count)
            while firsts[rows[0]] + count in inside:
                count += 1
            here = firsts[rows.start : rows.stop]
            chunk = torch.stack(
                [tokens[row, at : at + count] for row, at in zip(rows, here, strict=True)]
            )
            hidden = run(chunk, rows, here)  # (r, t, H)
            if last is None:
                last = hidden.new_empty(len(tokens), hidden.shape[2])  # (R, H)
            for place, row in enumerate(rows):
                if 0 < ends[row] - firsts[row] <= count:
                    last[row] = hidden[place, ends[row] - firsts[row] - 1]
                firsts[row] += count
    assert last is not None
    return last


def chunk_size(model: OpenedModel, slots: int) -> int:
    """The number of tokens in a pass over prompts, all rows together.

    Long passes keep a GPU busy, but their activations should be small compared with the weights.
    Native passes are as fast in pieces that fit into a CPU's caches.
    """
    if model.execution == "native" or slots <= _CHUNK:
        return _CHUNK
    config, size = model.config, model.dtype.itemsize
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    each = (4 * hidden + 3 * inner) * size + slots  # including a row of a mask
    if model.eager:
        each += 4 * slots * getattr(config, "num_attention_heads", 0)  # scores; Mamba has none
    weights = model.pass_bytes([slots])[0]
    return max(_CHUNK, int(_SHARE * weights / each))


def _groups(
    firsts: Sequence[int], ends: Sequence[int], width: int, most: int, padding: int
) -> Iterator[range]:
    """Yield groups of neighbouring rows for one pass, with little padding and none past `width`."""
    group, left = range(0), [end - first for first, end in zip(firsts, ends, strict=True)]
    for row in (row for row, count in enumerate(left) if count > 0):
        wider = range(group.start, row + 1) if group and group.stop == row else range(row, row + 1)
        counts = left[wider.start : wider.stop]
        whole = len(wider) * max(counts)
        beyond = any(firsts[each] + max(counts) > width for each in wider)
        if len(wider) > 1 and (whole > most or whole - sum(counts) > padding or beyond):
            wider = range(row, row + 1)
        if group and wider.start != group.start:
            yield group
        group = wider
    if group:
        yield group
