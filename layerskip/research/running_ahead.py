"""A second model that drafts while the target verifies (AMUSD, McDanel 2024, arXiv 2410.17375).

Its thread decodes greedily ahead of every row's text, on a device or cores of its own. A round
takes the tokens that are there without waiting, and `commit` sets the thread back to the text. As
drafts depend on timing, it is refused under rules by which the text depends on its drafts. On a
CPU, `--threads` is for each side.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from layerskip.cache.rows import RowCache
from layerskip.decoding.sources.assistant import Assistant, SecondModel
from layerskip.decoding.sources.base import Batch, Proposal, Source, State
from layerskip.model.opened_model import OpenedModel
from layerskip.texts.tokens import common_prefix


def running_ahead(assistant: Source | None) -> RunningAhead:
    """The source by its name, which takes over the second model that is given.

    Raises:
        ValueError: there is none, it reads the target's states or keys, or has another tokenizer.
    """
    if type(assistant) is not Assistant:
        raise ValueError(
            "running-ahead needs a second model of its own with the same tokenizer: give it as "
            "assistant"
        )
    return RunningAhead(assistant.model)


class RunningAhead(SecondModel):
    """Drafts with a second model of the same vocabulary that never waits for the target.

    Args:
        model: the opened second model; one that nothing else runs meanwhile.
        longest: how many tokens it runs ahead of a text at most.
    """

    name, what = "running-ahead", "a second model that runs ahead"
    by_clock = True

    longest: int

    def __init__(self, model: OpenedModel, longest: int = 8) -> None:
        self.model, self.longest, self.max_positions = model, longest, model.max_positions

    def open(self, batch: Batch) -> State:
        return _AheadState(batch, self)


@dataclass
class _DraftedAhead:
    """One text, and what the second model has drafted behind it.

    Attributes:
        fed: tokens of the text and its draft whose keys and values are computed.
        agreed: drafted tokens that the text has confirmed since the last one that it rejected.
    """

    cache: RowCache
    rotary: Any
    text: list[int]
    draft: list[int] = field(default_factory=list)
    fed: int = 0
    agreed: int = 0

    def extend(self, emitted: Sequence[int]) -> None:
        right = common_prefix(self.draft, emitted)
        self.fed = min(self.fed, len(self.text) + right)
        self.agreed = self.agreed + right if right in (len(self.draft), len(emitted)) else 0
        self.draft = self.draft[right:] if right == len(emitted) else []
        self.text += emitted


class Runner:
    """The thread, and what it shares with a batch; it does not keep the batch alive."""

    def __init__(self, model: OpenedModel, longest: int) -> None:
        self.model, self.longest = model, longest
        self.rows: dict[int, _DraftedAhead] = {}
        self.changed = threading.Condition()
        self.stopped = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="running-ahead", daemon=True)

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def next_row(self) -> _DraftedAhead | None:
        """The row with the shortest draft of those that have room for another token."""
        room = [
            row
            for row in self.rows.values()
            if len(row.draft) < self.longest and len(row.text) + len(row.draft) < row.cache.slots
        ]
        return min(room, key=lambda row: len(row.draft), default=None)

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.stopped or self.next_row())
                    row = self.next_row()
                    if self.stopped or row is None:
                        return
                    known, first = [*row.text, *row.draft], row.fed
                token = self._after(row, known, first)
                with self.changed:
                    now = [*row.text, *row.draft]
                    if now[: len(known)] == known and row.fed == first:
                        row.fed = len(known)
                        row.draft += [token] if len(now) == len(known) else []
                    self.changed.notify_all()
        except BaseException as error:  # raised where the drafts are asked for
            self.error = error

    def _after(self, row: _DraftedAhead, tokens: Sequence[int], first: int) -> int:
        """Feed the tokens from the first unfed one on; returns the likeliest one after them."""
        model = self.model
        row.cache.place([first], len(tokens) - first)
        fed = torch.tensor([tokens[first:]]).clamp(max=model.vocabulary - 1)  # (1, T)
        hidden, step = model.feed(fed.to(model.device), row.cache, row.rotary)
        hidden = model.run(hidden, step, range(model.num_sublayers))[:, -1:]  # (1, 1, H)
        row.cache.prefilled = True
        return int(model.logits(hidden, step).argmax())


class _AheadState(State):
    def __init__(self, batch: Batch, source: RunningAhead) -> None:
        super().__init__(batch)
        source.model.check_lengths(batch.prompt_lengths, batch.total)
        self.runner = Runner(source.model, source.longest)
        weakref.finalize(self, self.runner.stop)
        self.runner.thread.start()

    def begin(self, row: int) -> None:
        with self.runner.changed:
            self.runner.rows.pop(row, None)

    def resized(self) -> None:
        with self.runner.changed:
            self.runner.rows.clear()  # they begin anew, with room for longer texts

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        batch, model, rows = self.batch, self.runner.model, self.runner.rows
        with self.runner.changed:
            if row in rows:
                rows[row].extend(emitted)
            else:
                cache = model.new_cache(1, batch.slots)
                rotary = model.rotary(batch.slots, min(batch.slots, batch.total))
                text = [*batch.seats[row].prompt.tolist(), *batch.seats[row].emitted]
                rows[row] = _DraftedAhead(cache, rotary, text)
            self.runner.changed.notify_all()

    def offer(self, row: int, most: int) -> Proposal:
        with self.runner.changed:
            if self.runner.error is not None:
                raise self.runner.error
            there, size = self.runner.rows.get(row), self.batch.model.vocabulary
            tokens = [] if there is None else there.draft[:most]
            known = next((i for i, token in enumerate(tokens) if token >= size), len(tokens))
            return Proposal.of(tokens[:known], 0 if there is None else 2 + there.agreed)
