"""The source that looks laws up: what the target said when it last read the same few tokens.

It keeps the target's best scores at every place that it has computed, also behind drafts that it
rejected. A draft takes those behind the longest suffix that it has seen before, and draws from them
by the law and the noise of its own place: what the target would draw now, not what it drew then.

Letters: N positions, K tokens kept of each, V vocabulary, S places.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.decoding.sources.base import Batch, Proposal, Source, State
from layerskip.decoding.sources.lookup import NOTHING, Lookup

_KEPT = 32  # K
_SUFFIX = 4  # tokens of the longest suffix
_BLOCK = 64  # neighbouring tokens
_LONGEST = 8


class Laws:
    """The best raw logits of a model, by the tokens before them.

    Args:
        most: places that are kept, the latest ones. A place takes about a kilobyte, of which 256
            bytes are tokens and logits.

    Attributes:
        tokens, logits: of every place, the likeliest first, (S, K).
    """

    def __init__(self, most: int = 2**14) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._of: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._next = 0
        self._contexts: list[tuple[int, ...]] = []
        self._places: dict[tuple[int, ...], int] = {}

    def check(self, fingerprint: str) -> None:
        """Drop everything if it is of another model than the one of this fingerprint."""
        with self._lock:
            if self._of not in (None, fingerprint):
                self._clear()
            self._of = fingerprint

    def add(self, contexts: Sequence[Sequence[int]], raw: Tensor) -> None:
        """Keep raw logits (N, V) behind contexts, the last tokens of each."""
        logits, tokens = (each.cpu() for each in largest_of(raw.float(), _KEPT))  # (N, K) each
        with self._lock:
            if not self._contexts:
                shape = self.most, tokens.shape[1]  # (S, K)
                self.tokens = torch.empty(shape, dtype=torch.int32)
                self.logits = torch.empty(shape)
            places = [(self._next + i) % self.most for i in range(len(contexts))]
            for place, context in zip(places, contexts, strict=True):
                own = tuple(context[-_SUFFIX:])
                if self._next < self.most:
                    self._contexts.append(own)
                else:
                    for key in suffixes(self._contexts[place]):
                        if self._places[key] == place:
                            del self._places[key]
                    self._contexts[place] = own
                self._places.update(dict.fromkeys(suffixes(own), place))
                self._next += 1
            self.tokens[places], self.logits[places] = tokens.int(), logits

    def find(self, context: Sequence[int]) -> tuple[int, int]:
        """The length of the longest suffix that is known, 0 for none, and its place."""
        for key in suffixes(tuple(context[-_SUFFIX:])):
            place = self._places.get(key)
            if place is not None:
                return len(key), place
        return 0, -1


def suffixes(context: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Those of a context, the longest first."""
    return [context[first:] for first in range(len(context))]


def largest_of(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of values (N, V), in order, and their indices, (N, K) each: K = min(count, V).

    As `topk`, which would take several times as long on a CPU.
    """
    count = min(count, values.shape[1])
    if missing := -values.shape[1] % _BLOCK:
        values = F.pad(values, (0, missing), value=-float("inf"))
    blocks = values.unflatten(1, (-1, _BLOCK))  # (N, V / 64, 64)
    # the blocks with the largest maxima hold them
    best = blocks.amax(2).topk(min(count, blocks.shape[1])).indices  # (N, M)
    few = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)  # (N, 64 M)
    found, at = few.topk(count)  # (N, K) each
    return found, best.gather(1, at // _BLOCK) * _BLOCK + at % _BLOCK


class LookupLaws(Source):
    """Looks laws up in what the target has said.

    Args:
        laws: where they are kept, also for later calls; by default every call begins with none.
    """

    key = "lookup-laws"
    longest = _LONGEST

    def __init__(self, laws: Laws | None = None) -> None:
        self.laws = laws

    def open(self, batch: Batch) -> State:
        laws = Laws() if self.laws is None else self.laws
        laws.check(batch.model.weights.fingerprint())
        return _State(batch, laws)

    def timed(self) -> Source:
        return Lookup().timed()


class _State(State):
    reads_logits = True

    def __init__(self, batch: Batch, laws: Laws) -> None:
        super().__init__(batch)
        self.laws = laws
        self.ends = [prompt[-_SUFFIX:].tolist() for prompt in batch.prompts]

    def offer(self, row: int, most: int) -> Proposal:
        context, found, first = self.ends[row], list[int](), 0
        for offset in range(min(most, _LONGEST)):
            match, place = self.laws.find(context)
            if not match:
                break
            tokens = self.laws.tokens[place].long()  # (K,)
            token = self.batch.draw(row, offset, tokens, self.laws.logits[place])
            if token < 0:
                break
            first = first or match
            found.append(token)
            context = [*context, token][-_SUFFIX:]
        return Proposal.of(found, first) if found else NOTHING

    def read(self, raw: Tensor, seen: Sequence[tuple[int, Sequence[int]]]) -> None:
        self.laws.add([[*self.ends[row], *tokens] for row, tokens in seen], raw)

    def commit(self, row: int, emitted: Sequence[int], steps: int) -> None:
        self.ends[row] = [*self.ends[row], *emitted][-_SUFFIX:]
