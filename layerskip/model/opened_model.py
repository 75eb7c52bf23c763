"""A model as passes, sources and costs see it: opened into sublayers, or run as a whole.

Shapes: B rows, T tokens of a pass, H hidden width, E of an encoder, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from layerskip.backends import native_passes
from layerskip.backends.base import Backend, Block, Rotary
from layerskip.cache.library_cache import EncoderStates, LibraryCache
from layerskip.cache.rows import RowCache, additive
from layerskip.costs.speculation import keys_read
from layerskip.families.architecture import ModelFacts
from layerskip.model.draft_weights import DraftWeights
from layerskip.model.picture_features import Pictures, seen_ahead

LOGITS = 2**24  # maximum number of logits at once where a call needs many
_CHUNK = 512  # tokens per pass over prompts, all rows together, that keep a CPU busy
_SHARE = 1 / 8  # maximum size of a longer pass's activations, as a share of the weights' bytes
_PADDING = 64  # padding tokens in such a pass that cost less than another pass
FEW = 2  # rows for which kernels of our own are faster than a GPU's library


class Pass:
    """The data that all sublayers of one forward pass share: the cache, angles and masks.

    Args:
        cache: placed for the pass.
        inputs: the layers' own inputs, (B, T, L, P), if they have any (`OpenedModel.inputs`).
        blocks: by slot, the picture whose tokens see each other (see `Pictures`), (B, W).
    """

    def __init__(
        self,
        model: OpenedModel,
        cache: RowCache,
        rotary: Rotary,
        inputs: Tensor | None = None,
        blocks: Tensor | None = None,
    ) -> None:
        self.model, self.cache, self.rotary, self.inputs = model, cache, rotary, inputs
        self.blocks = blocks
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    @cached_property
    def rope(self) -> Mapping[str, Any]:
        """By layer type, the angles of the pass."""
        return self.rotary.at(self.cache)

    def mask(self, window: int | None, sink: int = 0) -> Tensor | None:
        """The mask of layers with this window and sink, or None if they need none."""
        if (window, sink) not in self._masks:
            self._masks[window, sink] = self._mask(window, sink)
        return self._masks[window, sink]

    def _mask(self, window: int | None, sink: int) -> Tensor | None:
        model, cache, more = self.model, self.cache, None
        if self.blocks is not None and model.wrapper is not None:
            more = seen_ahead(model.wrapper, self.blocks, self.slots, cache.end, window)
        # The eager kernel always needs a mask; sdpa is causal without one.
        if more is None and not (model.eager and cache.count > 1) and not cache.needs_mask(window):
            return None
        seen = cache.seen(window, model.device, sink)  # (B or 1, 1, T, slots)
        if more is not None:
            seen = seen | more[..., cache.first(window, sink) :]
        # One mask for all layers: sdpa takes bool, whatever a layer's dtype.
        return seen if model.backend.bool_masks else additive(seen, model.dtype)

    @cached_property
    def cross(self) -> tuple[Tensor, Tensor, Any]:
        """An encoder's output for the rows, (B, E, H), its mask, (B, 1, 1, E), and the cache."""
        encoded = self.cache.encoded_of()  # type: ignore[attr-defined]
        mask = encoded.mask.bool()[:, None, None]
        mask = additive(mask, self.model.dtype) if self.model.eager else mask
        return encoded.states, mask, self.cache.for_library()  # type: ignore[attr-defined]

    @property
    def few(self) -> bool:
        """Whether tokens of few rows are decoded (see `captured`)."""
        return self.cache.prefilled and len(self.cache.firsts) <= FEW

    @cached_property
    def slots(self) -> Tensor:
        """The slots that the pass writes, (B, T)."""
        return self.cache.placed(self.model.device)


class OpenedModel(ModelFacts):
    """A causal language model or encoder-decoder whose passes can be run.

    Attributes:
        execution: the one in use: modules, fused, native or captured.
        reason: why it is not a faster one; None if it is the fastest.
        blocks: the sublayers.
        head: final norm, head and softcap.
        encoded: an encoder's output for the texts of a batch, if the model has an encoder.
        read: token ids of the texts that an encoder has read for a batch, one row each, if any.
        drawn: draws tokens in one native call, or None (see `Backend`).
        rotary, embed, inputs: make what a pass begins with (see `Backend`).
        weights: the weights that drafts compute with.
        branches: whether a pass may run a tree of tokens.
        recurrent: whether it has layers whose state cannot be rolled back.
    """

    branches: bool
    encoded: EncoderStates | None = None
    recurrent: bool
    read: Sequence[Tensor] = ()

    def _compute_with(
        self, backend: Backend, reason: str | None, weights: Callable[..., DraftWeights]
    ) -> None:
        self.backend, self.reason, self.execution = backend, reason, backend.name
        self.blocks, self.drawn = backend.blocks, backend.drawn
        self.head: Block = backend.head()
        self.rotary, self.embed, self.inputs = backend.rotary, backend.embed, backend.inputs
        self.weights = weights(self, backend, self.head)

    @property
    def exact(self) -> bool:
        """Whether a token's numbers are the same bit for bit, whatever tokens are verified with it.

        In other backends, library kernels may sum in another order for other pass sizes.
        """
        return self.execution == "native" and not self.recurrent

    def weak(self) -> OpenedModel:
        """The same opened model, without keeping the model itself alive."""
        self._held = None
        return self

    def strong(self) -> OpenedModel:
        """The same opened model, keeping the model itself alive."""
        other = copy(self)
        other._held = self.model
        return other

    def describe(self) -> str:
        """How passes are computed here and why not faster, in words."""
        words = self.execution
        if words == "native":
            vectors = torch.backends.cpu.get_cpu_capability()
            words += f" ({vectors}, {self.threads} thread{'s' if self.threads != 1 else ''})"
        return words if self.reason is None else f"{words}: {self.reason}"

    @property
    def threads(self) -> int | None:
        """The number of CPU threads that passes use, torch's own number; None on other devices.

        Passes of few tokens use fewer for a while if other processes need the cores (`disturbed`).
        """
        if self.device.type != "cpu":
            return None
        return native_passes.normal_threads() or torch.get_num_threads()

    @property
    def limited(self) -> bool:
        """Whether passes use fewer threads at the moment, inside a context of `disturbed`."""
        return native_passes.normal_threads() is not None

    def disturbed(self) -> AbstractContextManager[None]:
        """A context for a round: torch takes one thread there if other processes need the cores."""
        return self.backend.disturbed()

    def new_cache(self, rows: int, slots: int) -> RowCache:
        """An empty cache for a batch; in an encoder-decoder, for the first rows that it has read.

        Raises:
            ValueError: the model has no keys of its own, or an encoder-decoder has read nothing.
        """
        if self.encoder and self.encoded is None:
            raise ValueError(
                "an encoder-decoder reads a text before it decodes: call layerskip.generate or "
                "model.generate(..., custom_generate=), or encode the text (see OpenedModel.encode)"
            )
        if self.encoded is not None:
            return LibraryCache(rows, slots, self.windows, self.encoded.of(slice(rows)))
        return self.own_cache(rows, slots)

    @abstractmethod
    def own_cache(self, rows: int, slots: int) -> RowCache:
        """An empty cache for the keys and values of a decoder alone."""

    def encode(self, tokens: Tensor, mask: Tensor) -> EncoderStates:
        """Encode texts (B, E), padded where the mask (B, E) is 0."""
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        states = self.model.get_encoder()(input_ids=tokens, attention_mask=mask)[0]  # (B, E, H)
        return EncoderStates(states, mask, tokens)

    def reading(self, encoded: EncoderStates) -> Self:
        """The same model for a batch whose texts an encoder has read."""
        other = copy(self)
        other.encoded = encoded
        if encoded.tokens is not None:
            pairs = zip(encoded.tokens, encoded.mask.bool(), strict=True)
            other.read = [tokens[real] for tokens, real in pairs]
        return other

    def reading_of(self, target: OpenedModel) -> Self:
        """The same model for the texts that another model's encoder has read.

        Raises:
            ValueError: those texts are not known as tokens.
        """
        encoded = target.encoded
        if encoded is None or encoded.tokens is None:
            raise ValueError(
                "an encoder-decoder can only draft for another one whose encoder was given tokens"
            )
        return self.reading(self.encode(encoded.tokens, encoded.mask))

    def cache_bytes(self, tokens: int) -> float:
        """Bytes of keys and values for a text of `tokens` tokens; 0 if unknown."""
        per_token = self.key_bytes(part.number for part in self.parts if part.writes)
        if not self.backend.trims:  # windows are masked
            per_token = {None: math.fsum(per_token.values())}
        return keys_read(per_token, tokens)

    def first_pass(self, tokens: Tensor) -> tuple[Tensor, Pass]:
        """Begin a pass over whole texts (B, T) with a new cache, like `feed`."""
        rows, count = tokens.shape
        cache = self.new_cache(rows, count)
        cache.place([0] * rows, count)
        return self.feed(tokens, cache, self.rotary(count, count))

    def feed(
        self, tokens: Tensor, cache: RowCache, rotary: Rotary, pictures: Pictures | None = None
    ) -> tuple[Tensor, Pass]:
        """Begin a pass: embed tokens (B, T) as hidden states (B, T, H), and make its `Pass`."""
        hidden, blocks = self.embed(tokens), None  # (B, T, H)
        if pictures is not None:
            slots = cache.placed(self.device)  # (B, T)
            hidden = pictures.over(hidden, slots)
            blocks = pictures.blocks_of(slots) if cache.count > 1 else None  # (B, W)
        return hidden, Pass(self, cache, rotary, self.inputs(tokens, hidden), blocks)

    def in_chunks(
        self,
        tokens: Tensor,
        places: Sequence[range],
        run: Callable[[Tensor, range, list[int]], Tensor],
        *,
        inside: Container[int] = (),
        ends_before: Sequence[Iterable[int]] = (),
        partial: bool = True,
    ) -> Tensor:
        """Run the tokens of many rows in chunks.

        Args:
            tokens: (R, T), of which the indices in `places` are run for each row.
            run: called with a chunk (r, t), its rows, and the index of each row's first token
                there; returns states (r, t, H).
            ends_before: for each row, indices before which a chunk must end.
            partial: whether a chunk may cover only some rows; otherwise all begin at one index.

        Returns:
            The hidden states of the last tokens, (R, H).
        """
        firsts, ends = [each.start for each in places], [each.stop for each in places]
        last: Tensor | None = None
        most = chunk_size(self, tokens.shape[1])
        while any(first < end for first, end in zip(firsts, ends, strict=True)):
            # Rows advance together, so that caches need not store one row's lead over the others.
            groups = [range(len(tokens))]
            if partial:
                padding = 0 if self.recurrent else _PADDING
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

    def run(self, hidden: Tensor, step: Pass, sublayers: Iterable[int]) -> Tensor:
        """Pass hidden states (B, T, H) through the given sublayers, in order."""
        return self.backend.run(hidden, step, self.chosen(sublayers))

    def finish(self, hidden: Tensor, step: Pass, sublayers: Iterable[int]) -> Tensor:
        """`run`, then `logits` of the result: (B, T, H) to (B, T, V)."""
        return self.backend.run(hidden, step, [*self.chosen(sublayers), self.head])

    @abstractmethod
    def chosen(self, sublayers: Iterable[int]) -> list[Block]:
        """The blocks that run these sublayers."""

    def logits(self, hidden: Tensor, step: Pass | None = None) -> Tensor:
        """Final norm, head and softcap: (B, T, H) to raw logits (B, T, V).

        Give `step` if a pass verifies or decodes: all such passes use the same arithmetic.
        """
        return self.head(hidden, step)

    def likeliest(self, hidden: Tensor) -> Tensor:
        """The likeliest token after each state (N, H), of any depth, by `logits`: (N,)."""
        parts = hidden.split(max(16, LOGITS // self.vocabulary))
        return torch.cat([self.logits(some[None])[0].argmax(-1) for some in parts])

    @abstractmethod
    def normed(self, states: Tensor) -> Tensor:
        """States after all sublayers (B, T, H) as the model's head reads them."""

    def trimmed(self, tokens: Sequence[int]) -> OpenedModel:
        """The same opened model, with `DraftWeights.trimmed`."""
        weights = self.weights.trimmed(tokens)
        if weights is self.weights:
            return self
        other = copy(self)
        other.weights = weights
        return other


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
