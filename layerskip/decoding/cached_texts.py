"""Keys and values of finished texts, in a tree of segments, for later texts with the same prefix.

Layers with windows have only the slots that they had when a text was stored. So prompts of such
models are also stored at their end, and where they branch off from a stored text.
Shapes: H key-value heads, n slots, D head width.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.decoding.passes import Filling, Part, Passes
from layerskip.model.opened_model import OpenedModel
from layerskip.texts.tokens import common_prefix
from layerskip.weights.fingerprint import checksum, fingerprint


class _Segment:
    """Some tokens of a text, and the contents of cache slots `first` to `end` - 1.

    Attributes:
        parts: by name (..., n, D), as for `Passes.parts`.
        used: when it was last used; larger is later.
    """

    def __init__(self, before: _Segment | None, first: int, tokens: Sequence[int]) -> None:
        self.before, self.first, self.tokens = before, first, tokens
        self.parts: dict[Part, Tensor] = {}
        self.following: dict[int, _Segment] = {}
        self.used = 0

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def whole(self) -> int:
        """The first slot from which on all parts are stored."""
        return self.end - min(part.shape[-2] for part in self.parts.values())

    def up_to(self, end: int) -> dict[Part, Tensor]:
        """Views of its parts up to a slot."""
        left = self.end - end
        return {
            name: part[..., : max(0, part.shape[-2] - left), :] for name, part in self.parts.items()
        }


class CachedTexts:
    """Keys and values of texts of one model, up to a number of bytes.

    The least recently used segments are dropped first. Any number of threads may use it.
    """

    def __init__(self, memory: int) -> None:
        if memory < 0:
            raise ValueError(f"memory must be a number of bytes, at least 0, got {memory}")
        self.memory = memory
        self.nbytes = 0
        self._lock = threading.Lock()
        self._first = _Segment(None, 0, ())
        self._of: tuple[Any, ...] = ()
        self._clock = 0

    def __len__(self) -> int:
        """The number of stored texts; a text that is a prefix of another does not count."""
        with self._lock:
            return sum(not each.following for each in self._all())

    def clear(self) -> None:
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._first = _Segment(None, 0, ())
        self.nbytes = 0

    def check(self, model: OpenedModel, *, numbers: bool = False) -> object:
        """Drop everything if it belongs to another model or to other weights.

        Args:
            numbers: compare all numbers of the weights, not only a sample (see `checksum`).

        Returns:
            A token to pass to `keep` for texts of these weights.
        """
        of = (*_state(model), checksum(model.model) if numbers else None)
        with self._lock:
            if of != self._of:
                self._clear()
                self._of = of
            return self._first

    def start(
        self, tokens: Sequence[int], window: int, needed: set[Part]
    ) -> tuple[list[Filling], int]:
        """Find the cached prefix of a prompt without its last token, and its number of tokens.

        Args:
            window: the longest sliding window of layers that do not keep all slots; 0: none.
            needed: names of parts that must be present for a segment to be useful.
        """
        with self._lock:
            usable, same, whole = 0, 0, 0
            path: list[tuple[_Segment, int]] = []
            for segment, end in self._path(tokens[:-1]):
                if not needed <= segment.parts.keys():
                    break
                self._touch(segment)
                path.append((segment, end))
                same = end
                if segment.whole > segment.first:
                    whole = segment.whole
                if not whole or end - whole >= window:
                    usable = len(path)
            # These tensors stay valid whatever becomes of the tree.
            return [Filling(end, segment.up_to(end)) for segment, end in path[:usable]], same

    def keep(self, weights: object, passes: Passes, row: int, length: int) -> None:
        """Store the first slots of a row if there is room for them.

        Args:
            weights: the result of `check`; if everything was dropped since, nothing is stored.
            length: number of slots; for models with recurrent layers, up to the state before.
        """
        length = passes.cache.reusable(passes.place_of(row), length)
        if not length:
            return
        tokens = passes.tokens(row, length)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if weights is not self._first:
                return
            path = [*self._path(tokens)]
            last, same = path[-1] if path else (self._first, 0)
            for segment, _ in path:
                self._touch(segment)
            if same < last.end:
                last = self._split(last, same)
            if same == length:  # known text, but perhaps more of its slots
                for name, part in passes.parts(row, last.first, length):
                    held = last.parts.get(name)
                    if held is None or held.shape[-2] < part.shape[-2]:
                        self._set(last, name, part)
                return
            new = _Segment(last, same, tokens[same:])
            self._touch(new)
            parts = dict(passes.parts(row, same, length))
            if self._make_room(sum(part.nbytes for part in parts.values()), last):
                last.following[tokens[same]] = new
                for name, part in parts.items():
                    self._set(new, name, part)

    def _set(self, segment: _Segment, name: Part, part: Tensor) -> None:
        before = segment.parts.get(name)
        segment.parts[name] = part.clone()
        self.nbytes += part.nbytes - (0 if before is None else before.nbytes)

    def _split(self, segment: _Segment, end: int) -> _Segment:
        """Split a segment in two, and return the first part."""
        assert segment.before is not None
        count = end - segment.first
        first = _Segment(segment.before, segment.first, segment.tokens[:count])
        first.used = segment.used
        for name, part in segment.parts.items():
            here = max(0, part.shape[-2] - len(segment.tokens) + count)
            # Copies, so that each can be dropped separately.
            first.parts[name] = part[..., :here, :].clone()
            segment.parts[name] = part[..., here:, :].clone()
        segment.before.following[segment.tokens[0]] = first
        segment.before, segment.first, segment.tokens = first, end, segment.tokens[count:]
        first.following[segment.tokens[0]] = segment
        return first

    def _make_room(self, nbytes: int, last: _Segment) -> bool:
        """Drop the least recently used segments, except those that lead to `last`."""
        leading = {last}
        while (before := last.before) is not None:
            leading.add(last := before)
        while self.nbytes + nbytes > self.memory:
            ends = [each for each in self._all() if not each.following and each not in leading]
            if not ends:
                return False
            oldest = min(ends, key=lambda each: each.used)
            assert oldest.before is not None
            del oldest.before.following[oldest.tokens[0]]
            self.nbytes -= oldest.nbytes
        return True

    def _path(self, tokens: Sequence[int]) -> Iterator[tuple[_Segment, int]]:
        segment, at = self._first, 0
        while at == segment.end and at < len(tokens) and tokens[at] in segment.following:
            segment = segment.following[tokens[at]]
            at += common_prefix(segment.tokens, tokens[at : segment.end])
            yield segment, at

    def _all(self) -> Iterator[_Segment]:
        left = [*self._first.following.values()]
        while left:
            yield (segment := left.pop())
            left += segment.following.values()

    def _touch(self, segment: _Segment) -> None:
        self._clock += 1
        segment.used = self._clock


class Reuse:
    """What the rows of a batch take from cached texts, and what they leave there.

    Args:
        cached: None: nothing is taken or left.
        early: whether prompts are stored as soon as they have been run, for rows that join later.
    """

    def __init__(self, cached: CachedTexts | None, passes: Passes, *, early: bool = False) -> None:
        self.cached, self.passes, self.early = cached, passes, early
        self._weights: object = None  # identifies the weights to which stored contents belong

    def check(self, *, numbers: bool = False) -> None:
        """Begin with texts of the present weights, see `CachedTexts.check`."""
        if self.cached is not None:
            self._weights = self.cached.check(self.passes.model, numbers=numbers)

    def find(self, row: int, most: int | None = None) -> tuple[list[Filling], int]:
        """The cached prefix of a row's prompt, or of its first `most` tokens."""
        if self.cached is None:
            return [], 0
        passes, length = self.passes, self.passes.seats[row].prompt_length
        return self.cached.start(
            passes.tokens(row, most or length), passes.cache.window, passes.needed
        )

    def start(self, rows: Mapping[int, int | None]) -> None:
        """Fill the first slots of joining rows; given are the tokens to look for, as in `find`."""
        cache, filled = self.passes.cache, {}
        for row, most in rows.items():
            filled[row], same = self.find(row, most)
            at, seat = filled[row][-1].end if filled[row] else 0, self.passes.seats[row]
            if self.cached is not None and (self.early or cache.window):
                points = cache.store_points(seat.prompt_length, same)
                seat.store_points = {each for each in points if each > at}
        self.passes.fill(filled)

    def reached(self) -> None:
        """Store the joining texts that have reached a point at which they are stored."""
        for row in self.passes.joining:
            seat = self.passes.seats[row]
            for point in sorted(each for each in seat.store_points if each <= seat.length):
                seat.store_points.remove(point)
                self.keep(row, point)

    def keep(self, row: int, length: int | None = None) -> None:
        """Store a row's text, or its first tokens."""
        if self.cached is not None and (length := length or self.passes.seats[row].length):
            self.cached.keep(self._weights, self.passes, row, length)


def _state(model: OpenedModel) -> tuple[Any, ...]:
    """The model's state on which keys and values depend besides tokens; equal if unchanged.

    In-place changes raise a weight's version. Changes of all numbers through `.data` alter its
    hash, which reads a sample. Switched adapters appear in their modules.
    """
    inner = model.model
    weights = [*inner.parameters(), *inner.buffers()]
    versions = tuple(0 if each.is_inference() else each._version for each in weights)
    adapters = [
        (str(each.active_adapters), each.disable_adapters, str(getattr(each, "scaling", None)))
        for each in inner.modules()
        if hasattr(each, "active_adapters") and hasattr(each, "disable_adapters")
    ]
    return model.backend, fingerprint(inner), versions, tuple(adapters)
