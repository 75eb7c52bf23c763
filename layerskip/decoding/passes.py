"""The three forward passes of decoding: prompts, draft steps, verification.

Verification starts from the hidden states that drafting leaves at the end of the shared prefix.
The cache's places 0 .. R - 1 belong to the rows in rounds, later places to rows that are joining.
Shapes: B rows, R rows of a pass, T tokens, D drafted tokens, H width, V vocabulary, N positions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from layerskip.cache.branches import Branches
from layerskip.cache.library_cache import EncoderStates, LibraryCache
from layerskip.cache.rows import STRIPE, RowCache, on_device
from layerskip.config.skips import SkipConfig
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.assistant import Assistant, slot_bytes, state_bytes
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.decoding.sources.following import in_chunks
from layerskip.model.picture_features import Pictures
from layerskip.model.sublayers import Pass, Sublayers
from layerskip.texts.tokens import common_prefix

PIECE = 256  # minimum number of prompt tokens per pass if there are windows
Method = TypeVar("Method", bound=Callable[..., Any])
Position = tuple[int, int]  # (row, tokens past the row's emitted ones)


Part = tuple[str, int]  # ("keys" or "values", layer), or ("tap", sublayers)


class Filling(NamedTuple):
    """Cached contents of a row's slots up to `end`, from an earlier text (see `Passes.parts`)."""

    end: int
    parts: Mapping[Part, Tensor]


def in_inference_mode(method: Method) -> Method:
    """Run a pass in inference mode, which makes small kernels cheaper; not for modules."""

    @wraps(method)
    def run(self: Passes, *args: Any) -> Any:
        if self.model.execution in ("modules", "whole"):
            return method(self, *args)
        with torch.inference_mode():
            return method(self, *args)

    return cast(Method, run)


class Passes(Batch):
    """One batch on one model with any number of sources, one of which drafts in a round.

    Attributes:
        seated: the row at each place of the cache, including rows that are joining.
        piece: maximum number of prompt tokens per pass, if rows join.
        moves: how many times rows have changed places.
    """

    def __init__(
        self,
        model: Sublayers,
        drafts: Sequence[SkipConfig | Source],
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        max_draft_length: int,
        emitted: Sequence[list[int]] = (),
        pictures: Pictures | None = None,
    ) -> None:
        self.model = model
        self.pictures = None if pictures is None else pictures.to(model.device)
        self._joined: dict[int, Pictures] = {}  # by row, for rows that joined later
        self.prompts: list[Tensor] = [prompt.to(model.device) for prompt in prompts]
        self.prompt_lengths: list[int] = [len(prompt) for prompt in prompts]
        self.emitted: Sequence[list[int]] = emitted
        self.score: Callable[..., Sequence[float]] | None = None
        self.total = max(self.prompt_lengths, default=0) + max_new_tokens
        model.check_lengths(self.prompt_lengths, self.total)
        # D + 1 spare slots, since shorter drafts are padded at their end
        self.slack = max_draft_length + 1
        self.slots = self.total + self.slack
        self.cache = model.new_cache(len(prompts), self.slots)
        self.cache.reserve(max(self.prompt_lengths, default=0))
        self.rotary = model.rotary(self.slots, self.total)
        self.seated = [*range(len(prompts))]
        self.rows: dict[int, int] = {row: row for row in self.seated}
        self.moves = 0
        self.lengths: list[int] = [0] * len(prompts)
        # By row, the first slot from which on window layers hold what belongs to the row.
        self._whole: dict[int, int] = {}
        self.sources = [source_of(model, draft) for draft in drafts]
        self.states = [source.open(self) for source in self.sources]
        self._taps = sorted({tap for each in self.states for tap in each.every_tap})
        self._tapped: dict[int, Tensor] = {}  # (B, S, H) each, by slot as in the cache
        self._drafting: State | None = None  # of the current round
        self._prefix = 0  # its shared prefix
        self._steps = 0  # its number of steps, once verified
        self.fed: list[Tensor] = []  # the tokens fed to these steps, (R,) each
        self.fed_tokens: Sequence[Sequence[int]] = ()  # the same on the host, (R, N), once read
        # Per fed token, at the end of the prefix: states (R, 1, H) and the layers' own inputs.
        self._boundary: list[tuple[Tensor, Tensor | None]] = []

    @property
    def runs_ahead(self) -> bool:
        """Whether a pass may begin before the host has read its tokens."""
        return self.model.backend.ahead and not self._taps

    @in_inference_mode
    def prefill(
        self,
        filled: Sequence[Sequence[Filling]] = (),
        reached: Callable[[], None] = lambda: None,
        marks: Sequence[Collection[int]] = (),
    ) -> Tensor:
        """Run every prompt through the whole model; returns logits after its last token, (B, V).

        Args:
            filled: per row, cached contents for its first slots, in order; at least the last token
                is run.
            marks: per row, numbers of tokens after which its text is stored; a model with recurrent
                layers ends a pass there. Marks that are reached may be removed.
        """
        tokens = torch.nn.utils.rnn.pad_sequence(self.prompts, batch_first=True)  # (B, T)
        lasts = [length - 1 for length in self.prompt_lengths]
        for row, parts in enumerate(filled):
            self.lengths[row] = parts[-1].end if parts else 0
        if any(self.lengths):  # buffers must begin where passes read
            self.cache.place(self.lengths, 1, min(self.lengths))
        for row, parts in enumerate(filled):
            self._fill(row, parts)

        def run(chunk: Tensor, rows: range, firsts: list[int]) -> Tensor:
            hidden = self._run_prompts(
                chunk, rows, firsts, min(*self.lengths, *lasts), self._through
            )
            for row, first in zip(rows, firsts, strict=True):
                self.lengths[row] = min(first + chunk.shape[1], self.prompt_lengths[row])
            reached()
            return hidden

        inside = () if self.pictures is None else self.pictures.inside
        places = [range(*each) for each in zip(self.lengths, self.prompt_lengths, strict=True)]
        last = in_chunks(
            *(self.model, tokens, places, run),
            inside=inside,
            marks=marks if self.model.recurrent else (),
            partial=self.cache.partial,
        )  # (B, H)
        return self._finish_prompts(last[:, None], range(len(self.prompts)))

    @in_inference_mode
    def prefill_piece(self, row: int, most: int, every: bool = False) -> Tensor | None:
        """Run the next tokens of a joining row's prompt; returns logits (1, V) after the last one.

        Args:
            every: whether to return logits after each of these n tokens, (n, V).
        """
        place, first, length = self.place_of(row), self.lengths[row], self.prompt_lengths[row]
        end = first + most
        if (pictures := self._joined.get(row)) is not None and end in (inside := pictures.inside):
            most = next(each for each in range(end, length + 1) if each not in inside) - first
            if most > self.piece:  # leave the picture to the next piece
                end = max(each for each in range(first + 1, end) if each not in inside)
                most = end - first
        rows, chunk = range(place, place + 1), self.prompts[row][None, first : first + most]
        self.cache.prefilled = False
        through = self.model.num_sublayers if every else self._through
        hidden = self._run_prompts(chunk, rows, [first], 0, through)
        self.lengths[row] += chunk.shape[1]
        self._steps = 0  # the first token does not belong to the last round
        if every:
            self.cache.prefilled = True
            return self.model.logits(hidden)[0]
        if self.lengths[row] == length:
            return self._finish_prompts(hidden[:, -1:], rows)
        self.cache.prefilled = True
        return None

    @property
    def _through(self) -> int:
        # Layers that only read other layers' keys are needed for the last tokens alone.
        return self.model.num_sublayers if self.needed else 2 * self.model.first_reader

    def _run_prompts(
        self, chunk: Tensor, rows: range, firsts: list[int], lowest: int, through: int
    ) -> Tensor:
        """Run prompt tokens (r, T) at some places; returns states (r, T, H)."""
        self.cache.place(firsts, chunk.shape[1], lowest, rows)
        hidden, step = self.model.feed(chunk, self.cache, self.rotary, self._pictures(rows))
        return self._carry(hidden, step, 0, through)

    def _pictures(self, rows: range) -> Pictures | None:
        """The pictures in the prompts at some places."""
        if self.pictures is not None:
            return self.pictures.some(rows)
        return self._joined.get(self.seated[rows.start])  # joining rows are run one by one

    def _finish_prompts(self, last: Tensor, rows: range) -> Tensor:
        """Logits after the last prompt tokens at some places, from states (r, 1, H)."""
        through, every = self._through, self.model.num_sublayers
        if through < every:
            prompts = [self.prompts[self.seated[place]] for place in rows]
            lasts = [len(prompt) - 1 for prompt in prompts]
            ends = torch.stack([prompt[-1:] for prompt in prompts])  # (r, 1)
            self.cache.place(lasts, 1, min(lasts), rows)
            _, step = self.model.feed(ends, self.cache, self.rotary, self._pictures(rows))
            last = self._carry(last, step, through, every)
        self.cache.prefilled = True
        return self.model.logits(last.transpose(0, 1))[0]

    def tokens(self, row: int, length: int) -> list[int]:
        """A row's first tokens: its prompt, then the tokens it has emitted.

        Pictures have their own numbers (see `Pictures.named`).
        """
        prompt: list[int] = self.prompts[row][:length].tolist()
        if self.pictures is not None:
            prompt = self.pictures.named(row, prompt)
        elif row in self._joined:
            prompt = self._joined[row].named(0, prompt)
        return [*prompt, *self.emitted[row][: length - len(prompt)]]

    def parts(self, row: int, first: int, end: int) -> Iterator[tuple[Part, Tensor]]:
        """Yield the contents of a row's slots `first` to `end` - 1 by name, as views (..., n, D).

        All end with the last slot; those of window layers may begin later than the first.
        """
        place, whole = self.place_of(row), max(first, self._whole.get(row, 0))
        for name, part in self.cache.parts(place, first, end):
            unknown = part.shape[-2] - end + whole if name[1] in self.cache.trimmed else 0
            yield name, part[..., max(0, unknown) :, :]
        for name in self.needed:
            yield name, self._tapped[name[1]][place, first + 1 : end + 1]  # (n, H)

    @property
    def needed(self) -> set[Part]:
        """The names in `parts` that drafts need for all prompt tokens."""
        states = (each for each in self.states if each.whole_prompts)
        return {("tap", tap) for each in states for tap in each.every_tap}

    def _fill(self, row: int, filled: Sequence[Filling]) -> None:
        place, first, self._whole[row] = self.place_of(row), 0, 0
        for end, parts in filled:
            for (kind, number), held in parts.items():
                if kind != "tap":
                    self.cache.fill(place, (kind, number), end, held)
                    if number in self.cache.trimmed and end - held.shape[-2] > first:
                        self._whole[row] = max(self._whole[row], end - held.shape[-2])
                elif number in self._taps:
                    states = self._states(number, held)
                    states[place, end + 1 - len(held) : end + 1] = held
            first = end

    @in_inference_mode
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows except these (ascending) from further passes."""
        self.moves += 1
        places = [self.rows[row] for row in rows]
        self.seated = [*rows]
        self.rows = {row: place for place, row in enumerate(rows)}
        length = max(self.lengths[row] for row in rows)
        self._tapped = {tap: states[places] for tap, states in self._tapped.items()}
        self.cache.keep(places, length)
        for state in self.states:
            state.keep(places, length)

    def _place(
        self, offset: int, count: int, parents: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Place a pass over `count` tokens of every row; the first is at its length + offset."""
        lengths = [self.lengths[row] for row in self.rows]
        starts = [length + offset for length in lengths]
        branches = None if parents is None else Branches(parents, offset)
        self.cache.place(starts, count, min(lengths), range(len(starts)), branches, lengths)

    def _feed(
        self, tokens: Tensor, offset: int, parents: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Pass]:
        """Run tokens (R, T) through the shared prefix, and keep their states (R, T, H)."""
        self._place(offset, tokens.shape[1], parents)
        hidden, step = self.model.feed(tokens, self.cache, self.rotary)
        hidden = self._carry(hidden, step, 0, self._prefix)
        self._boundary.append((hidden, step.inputs))
        return hidden, step

    def _carry(self, hidden: Tensor, step: Pass, first: int, last: int) -> Tensor:
        """Run hidden states (R, T, H) through sublayers, and keep the states at taps."""
        for tap in self._taps:
            if first < tap <= last:
                hidden, first = self.model.run(hidden, step, range(first, tap)), tap
                self._keep_states(tap, hidden)
        return self.model.run(hidden, step, range(first, last))

    def _keep_states(self, tap: int, hidden: Tensor) -> None:
        states = self.cache.active_rows(self._states(tap, hidden))
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]  # (R, 1)
        states[rows, self.cache.placed(hidden.device) + 1] = hidden

    def _states(self, tap: int, like: Tensor) -> Tensor:
        if tap not in self._tapped:
            shape = self.cache.rows, self.cache.slots + 1, like.shape[-1]
            self._tapped[tap] = like.new_zeros(shape)  # (B, S + 1, H)
        return self._tapped[tap]

    def tapped(
        self,
        tap: int,
        starts: Sequence[int],
        count: int,
        before: int = 0,
        rows: range | None = None,
    ) -> Tensor:
        """States at a tap, (R, count, H), from each row's position `starts` - `before` on."""
        place = 0 if rows is None else rows.start
        states = self._tapped[tap][place : place + len(starts)]
        first = on_device(starts, states.device)[:, None] + 1 - before  # (R, 1)
        slots = first + torch.arange(count, device=states.device)  # (R, count)
        places = torch.arange(len(states), device=states.device)[:, None]  # (R, 1)
        return states[places, slots.clamp(max=states.shape[1] - 1)]

    @in_inference_mode
    def draft_step(self, tokens: Tensor, offset: int, draft: int = 0) -> Tensor:
        """Feed each row's token (R,) at its length + offset to a draft; returns raw logits (R, V).

        Tokens outside the draft vocabulary have -inf. A round uses one source, with offsets 0, 1,
        2, ... without gaps.
        """
        state = self.states[draft]
        self._drafting, self._prefix = state, state.prefix
        self.fed, self.fed_tokens = [*self.fed[:offset], tokens], ()
        hidden, step = self._feed(tokens[:, None], offset)
        return state.step(tokens, hidden, step, offset)

    @in_inference_mode
    def verify(
        self,
        tokens: Tensor,
        positions: Sequence[Position],
        parents: Sequence[Sequence[int]] | None = None,
        ahead: int = 0,
    ) -> Tensor:
        """Raw target logits (N, V) at (ascending) positions of this round's tokens.

        Offset 0 is a row's last emitted token; the largest offset is the longest draft of any row.
        If drafts have branches, offsets are node numbers (see `branches`). `draft_step` may have
        fed one more token, after which nothing could be drawn.

        Args:
            tokens: the tokens of each row that no draft step was fed, (R, T). After draft steps
                this is the last drafted one, otherwise the last emitted one and the draft; short
                rows are padded with any token.
            parents: the node that each one follows, in the order of rows in a pass, (R, D + 1);
                needed if that is not always the one before.
            ahead: tokens that every row will emit before this round begins.
        """
        count = 1 + max(offset for _, offset in positions)
        kept = count - tokens.shape[1]
        self._steps = len(self._boundary)
        del self._boundary[kept:]
        if kept:
            self._feed(tokens, kept, parents)
            states, inputs = zip(*self._boundary, strict=True)
            hidden = torch.cat(states, dim=1)  # (R, D + 1, H)
            of_layers = None if inputs[0] is None else torch.cat(inputs, dim=1)  # (R, D + 1, L, P)
            self._place(0, count, parents)
            step = Pass(self.model, self.cache, self.rotary, of_layers)
        else:
            self._prefix = 0
            self._place(ahead, count, parents)
            hidden, step = self.model.feed(tokens, self.cache, self.rotary)  # (R, D + 1, H)
        self._boundary.clear()
        last = self.model.num_sublayers
        if len(positions) == len(self.rows) * count and not self._taps:
            return self.model.finish(hidden, step, range(self._prefix, last)).flatten(0, 1)
        # The head is large, so compute it only at the positions needed.
        wanted = [self.rows[row] * count + offset for row, offset in positions]
        hidden = self._carry(hidden, step, self._prefix, last).flatten(0, 1)  # (R * (D + 1), H)
        return self.model.logits(hidden[None, on_device(wanted, hidden.device)], step)[0]

    def tell(self, row: int, emitted: Sequence[int], steps: int = 0) -> None:
        """Report to the states which tokens a row has emitted in the prefill or a round."""
        for state in self.states:
            state.commit(row, emitted, steps if state is self._drafting else 0)

    def scores(
        self, row: int, offset: int, tokens: Sequence[int], raw: Sequence[float]
    ) -> Sequence[float]:
        return () if self.score is None else self.score(row, offset, tokens, raw)

    def commit(self, row: int, emitted: Sequence[int], path: Sequence[int] = ()) -> None:
        """Keep a row's fed tokens before its last emitted one, which the next pass feeds."""
        place, steps = self.rows[row], self._steps
        if steps:  # count the steps that were fed the row's actual text
            if not self.fed_tokens:  # once for all rows, since this waits for the device
                self.fed_tokens = torch.stack(self.fed, 1).tolist()
            steps = 1 + common_prefix(self.fed_tokens[place][1:], emitted[:-1])
        if path:
            self._keep_path(place, self.lengths[row], path[: len(emitted) - 1])
        self.tell(row, emitted, steps)
        self.lengths[row] += len(emitted)

    @in_inference_mode
    def _keep_path(self, place: int, root: int, path: Sequence[int]) -> None:
        """Move the cache entries of a path's nodes to the slots that they have in a plain text."""
        self.cache.keep_path(place, root, path)
        at = [node + root + 1 for node in path]
        for states in self._tapped.values():
            states[place, root + 2 : root + 2 + len(at)] = states[place, at]

    # Rows that join and leave.

    def open_seats(self, total: int) -> None:
        """Let rows join and leave from now on; the present rows become free seats.

        In window layers every row has slots for its own window and a piece of a prompt. So a text
        may join at slot 0 at any time, whatever the positions of the others.
        """
        self.model.check_lengths([1], total)
        self.total = total
        window = self.cache.window
        self.piece = min(max(PIECE, window // 2), 2 * PIECE) if window else sys.maxsize
        behind = window + self.slack
        # A pass may begin up to a stripe after its base.
        span = behind + max(self.piece, self.slack) + STRIPE if window else 0
        self._span = -(-span // STRIPE) * STRIPE
        self.cache.roll(self._span, behind)
        for cache in self._caches[1:]:
            cache.trimmed.clear()
        self.clear()
        model = self.model
        second = [each.model for each in self.sources if isinstance(each, Assistant)]
        self._backends = [each.backend for each in (model, *second)]
        per_token = slot_bytes(model)
        full = per_token.pop(None, 0.0) if window else math.fsum(per_token.values())
        self._window_bytes = math.fsum(per_token.values()) if window else 0.0
        of_sources = math.fsum(each.own_bytes() for each in self.sources)
        self._tap_bytes = float(len(self._taps) * model.config.hidden_size * model.dtype.itemsize)
        self._slot_bytes = full + of_sources + self._tap_bytes
        self._row_bytes = self._tap_bytes + sum(map(state_bytes, (model, *second)))

    @property
    def _caches(self) -> list[RowCache]:
        return [self.cache, *(each for state in self.states for each in state.caches)]

    def nbytes(self, rows: int, slots: int, encoder_length: int = 0) -> int:
        """Bytes of keys, values and states; those of an encoder's token count as one."""
        slots = self._capacity(slots)  # and one more at taps
        inside = min(slots, self._span) * self._window_bytes
        own = (slots + encoder_length) * self._slot_bytes
        return round(rows * (own + inside + self._row_bytes))

    @property
    def encoder_length(self) -> int:
        """The number of encoder tokens stored per row."""
        encoded = getattr(self.cache, "encoded", None)
        return 0 if encoded is None else encoded.states.shape[1]

    def clear(self) -> None:
        self.seated, self.rows, self.slots = [], {}, 0
        for cache in self._caches:
            cache.rows = 0
            cache.keys.clear()
            cache.values.clear()
        self._tapped.clear()
        self._boundary.clear()

    @in_inference_mode
    def resize(self, rows: int, slots: int) -> None:
        self.moves += 1
        size, kept = self._capacity(slots), len(self.seated)
        for cache in self._caches:
            cache.resize(rows, size, kept)
        for tap, old in self._tapped.items():
            new = old.new_zeros(rows, size + 1, old.shape[2])  # (B, S + 1, H)
            least = min(old.shape[1], size + 1)
            new[:kept, :least] = old[:kept, :least]
            self._tapped[tap] = new
        self.rotary = self.model.rotary(slots, min(slots, self.total))
        self.slots = slots
        for state in self.states:
            state.resized()

    def _capacity(self, slots: int) -> int:
        return max(each.capacity(slots) for each in self._backends)

    def place_of(self, row: int) -> int:
        return self.seated.index(row)

    def join(
        self,
        row: int,
        prompt: Sequence[int],
        pictures: Pictures | None = None,
        encoded: EncoderStates | None = None,
    ) -> None:
        """Seat a row after all others, with nothing computed yet."""
        self._joined.pop(row, None)
        if pictures is not None:
            self._joined[row] = pictures.to(self.model.device)
        self.prompts[row] = torch.tensor(prompt, device=self.model.device)  # (T,)
        self.prompt_lengths[row], self.lengths[row] = len(prompt), 0
        self.emitted[row].clear()
        self.seated.append(row)
        if encoded is not None:
            assert isinstance(self.cache, LibraryCache)
            assert encoded.tokens is not None
            self.cache.join(len(self.seated) - 1, encoded)
            self.model.read = [*self.model.read[:row], *encoded.tokens, *self.model.read[row + 1 :]]
        for state in self.states:
            state.begin(row)

    @in_inference_mode
    def fill(self, row: int, filled: Sequence[Filling]) -> None:
        """Copy the cached prefix of a joining row's prompt into its slots."""
        place = self.place_of(row)
        self.lengths[row] = filled[-1].end if filled else 0
        self.cache.begin(place, self.lengths[row])
        self._fill(row, filled)

    @in_inference_mode
    def begin(self, row: int) -> None:
        """Let a row take part in rounds: it swaps places with the first row still joining."""
        self.moves += 1
        place, free = self.place_of(row), len(self.rows)
        if place != free:
            other = self.seated[free]
            self.seated[free], self.seated[place] = row, other
            length = max(self.lengths[row], self.lengths[other])
            for cache in self._caches:
                cache.exchange(place, free, length)
            for states in self._tapped.values():
                states[[place, free], : length + 1] = states[[free, place], : length + 1]
        self.rows[row] = free

    @in_inference_mode
    def leave(self, row: int) -> None:
        """Drop a row. The last active row fills its place, and the last joining row fills that."""
        self.moves += 1
        place = self.place_of(row)
        if row in self.rows:
            last = len(self.rows) - 1
            self._move(last, place)
            place = last
        self._move(len(self.seated) - 1, place)
        self.seated.pop()
        count = len(self.rows) - (row in self.rows)
        self.rows = {each: at for at, each in enumerate(self.seated[:count])}

    def _move(self, place: int, free: int) -> None:
        if place == free:
            return
        row = self.seated[free] = self.seated[place]
        length = self.lengths[row]
        for cache in self._caches:
            cache.move(place, free, length)
        for states in self._tapped.values():
            states[free, : length + 1] = states[place, : length + 1]
