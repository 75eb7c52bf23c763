"""The three forward passes of a call: prefill, draft step, verify.

A `Passes` holds one batch's cache and the length of each row's exact keys and values. Drafting
computes the sublayers of the shared prefix exactly and keeps the hidden states at its end;
verification starts from them. Rows keep their number in the call after finished ones are dropped.
Letters: B rows of the call, R rows of a pass, T tokens, D drafted tokens, H width, V vocabulary, N
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.base import Source, State
from layerskip.decoding.sources.following import in_chunks
from layerskip.model.branches import Branches, along
from layerskip.model.cache import on_device
from layerskip.model.pictures import Pictures
from layerskip.model.sublayers import Pass, Sublayers

Method = TypeVar("Method", bound=Callable[..., Any])
Position = tuple[int, int]  # (row, tokens past the row's emitted ones)


Part = tuple[str, int]  # ("keys" or "values", layer), or ("tap", sublayers)


class Filling(NamedTuple):
    """What some slots of a row hold from an earlier text (see `Passes.parts`), up to `end`."""

    end: int
    parts: Mapping[Part, Tensor]


def in_inference_mode(method: Method) -> Method:
    """Run a pass in inference mode, which makes small kernels cheaper, except through modules.

    Modules may do anything, so they run as usual. Logits stay inference tensors, which nobody
    writes into: a copy would cost as much as reading them.
    """

    @wraps(method)
    def run(self: Passes, *args: Any) -> Any:
        if self.model.execution in ("modules", "whole"):
            return method(self, *args)
        with torch.inference_mode():
            return method(self, *args)

    return cast(Method, run)


class Passes:
    """One batch on one model with any number of sources, one of which drafts in a round.

    It is the `Batch` that the states of sources read.

    Args:
        model: the opened model.
        drafts: sources, or skip configs.
        prompts: token ids of each row without pads, each (length,).
        max_new_tokens: how many tokens a row may grow by.
        max_draft_length: the most tokens any round drafts.
        emitted: tokens each row has emitted; the caller extends them, and states read them.
        pictures: in the prompts, if there are any.

    Attributes:
        total, slots: the most tokens of a row, and of its keys and values.
        states: each source's state for the batch.
        rows: the rows that take part in passes, in order, and the place of each in a pass.
        lengths: per row, the tokens whose keys and values are exact in every layer; the row's
            last emitted token is not among them: the next pass feeds it.
        draws: what scores a few tokens (`Draws.few`), once there is something.
    """

    def __init__(
        self,
        model: Sublayers,
        drafts: Sequence[SkipConfig | Source],
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        max_draft_length: int,
        emitted: Sequence[Sequence[int]] = (),
        pictures: Pictures | None = None,
    ) -> None:
        self.model = model
        self.pictures = None if pictures is None else pictures.to(model.device)
        self.prompts = [prompt.to(model.device) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.emitted = emitted
        self.draws: Callable[..., Sequence[float]] | None = None
        self.total = max(self.prompt_lengths, default=0) + max_new_tokens
        model.check_lengths(self.prompt_lengths, self.total)
        # gamma + 1 slack slots: shorter drafts are padded behind their end
        self.slots = self.total + max_draft_length + 1
        self.cache = model.new_cache(len(prompts), self.slots)
        self.cache.reserve(max(self.prompt_lengths, default=0))
        self.rotary = model.rotary(self.slots, self.total)
        self.rows = {row: row for row in range(len(prompts))}
        self.lengths = [0] * len(prompts)
        self.states = [source_of(model, draft).open(self) for draft in drafts]
        self._taps = sorted({each.tap for each in self.states if each.tap is not None})
        self._tapped: dict[int, Tensor] = {}  # (R, S, H) each, where tokens lie in the cache
        self._drafting: State | None = None  # in the round in progress
        self._prefix = 0  # of it
        self._steps = 0  # that it took, once verified
        self._fed: list[Tensor] = []  # the tokens that they were fed, (R, T) each
        self._parents: Sequence[Sequence[int]] | None = None  # what these follow, (R, N)
        # at the end of the prefix, one per token fed: (R, 1, H), and the layers' own inputs
        self._boundary: list[tuple[Tensor, Tensor | None]] = []

    @in_inference_mode
    def prefill(
        self,
        filled: Sequence[Sequence[Filling]] = (),
        reached: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Run every prompt through the whole model; logits after its last token, (B, V).

        Args:
            filled: per row, what its first slots are filled with, in order; at least the last
                token is run.
            reached: called after every pass; `lengths` are then what is exact.
        """
        tokens = torch.nn.utils.rnn.pad_sequence(self.prompts, batch_first=True)  # (B, T)
        lasts = [length - 1 for length in self.prompt_lengths]
        for row, parts in enumerate(filled):
            self.lengths[row] = parts[-1].end if parts else 0
        if any(self.lengths):  # buffers begin where passes read
            self.cache.place(self.lengths, 1, min(self.lengths))
        for row, parts in enumerate(filled):
            for part in parts:
                self._fill(row, part)
        every = self.model.num_sublayers
        # layers that only read others' keys are needed for the last tokens alone
        needed = any(each.whole_prompts and each.tap is not None for each in self.states)
        through = every if needed else 2 * self.model.first_reader

        def run(chunk: Tensor, rows: range, firsts: list[int]) -> Tensor:
            lowest = min(*self.lengths, *lasts)
            self.cache.place(firsts, chunk.shape[1], lowest, rows)
            pictures = None if self.pictures is None else self.pictures.some(rows)
            hidden, step = self.model.feed(chunk, self.cache, self.rotary, pictures)
            hidden = self._carry(hidden, step, 0, through)
            for row, first in zip(rows, firsts, strict=True):
                self.lengths[row] = min(first + chunk.shape[1], self.prompt_lengths[row])
            reached()
            return hidden

        inside = () if self.pictures is None else self.pictures.inside
        places = [range(*each) for each in zip(self.lengths, self.prompt_lengths, strict=True)]
        last = in_chunks(
            self.model, tokens, places, run, inside=inside, apart=self.cache.apart
        )  # (B, H)
        last = last[:, None]  # (B, 1, H)
        if through < every:
            ends = torch.stack([prompt[-1:] for prompt in self.prompts])  # (B, 1)
            self.cache.place(lasts, 1, min(lasts))
            _, step = self.model.feed(ends, self.cache, self.rotary, self.pictures)
            last = self._carry(last, step, through, every)
        self.cache.settled = True
        return self.model.logits(last.transpose(0, 1))[0]

    def tokens(self, row: int, length: int) -> list[int]:
        """A row's first tokens, of its prompt and those that it has emitted."""
        prompt: list[int] = self.prompts[row][:length].tolist()
        return [*prompt, *self.emitted[row][: length - len(prompt)]]

    def parts(self, row: int, first: int, end: int) -> Iterator[tuple[Part, Tensor]]:
        """What there is of a row's slots first .. end - 1, by name: keys, values, states at taps.

        Views (..., n, D), all of which end with the last slot; those of layers with windows may
        begin later than the first.
        """
        place = self.rows[row]
        yield from self.cache.parts(place, first, end)
        for name in self.needed:
            yield name, self._tapped[name[1]][place, first + 1 : end + 1]  # (n, H)

    @property
    def needed(self) -> set[Part]:
        """The names among `parts` that drafts read of whole prompts."""
        return {
            ("tap", each.tap) for each in self.states if each.whole_prompts and each.tap is not None
        }

    def _fill(self, row: int, filling: Filling) -> None:
        for (kind, number), held in filling.parts.items():
            if kind != "tap":
                self.cache.fill(row, (kind, number), filling.end, held)
            elif number in self._taps:
                states = self._states(number, held, self.cache.rows)
                states[row, filling.end + 1 - len(held) : filling.end + 1] = held

    @in_inference_mode
    def keep(self, rows: Sequence[int]) -> int:
        """Drop all rows but these (ascending) from further passes; returns the bytes copied."""
        places = [self.rows[row] for row in rows]
        self.rows = {row: place for place, row in enumerate(rows)}
        length = max(self.lengths[row] for row in rows)
        self._tapped = {tap: states[places] for tap, states in self._tapped.items()}
        moved = self.cache.keep(places, length)
        return moved + sum(state.keep(places, length) for state in self.states)

    def _place(
        self, offset: int, count: int, parents: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Place a pass over `count` tokens of every row, the first one at its length + offset."""
        lengths = [self.lengths[row] for row in self.rows]
        starts = [length + offset for length in lengths]
        branches = None if parents is None else Branches(parents, offset)
        self.cache.place(starts, count, min(lengths), range(len(starts)), branches)

    def _feed(
        self, tokens: Tensor, offset: int, parents: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Pass]:
        """Run tokens (R, T) through the shared prefix and keep their states, (R, T, H)."""
        self._place(offset, tokens.shape[1], parents)
        hidden, step = self.model.feed(tokens, self.cache, self.rotary)
        hidden = self._carry(hidden, step, 0, self._prefix)
        self._boundary.append((hidden, step.inputs))
        return hidden, step

    def _carry(self, hidden: Tensor, step: Pass, first: int, last: int) -> Tensor:
        """Run hidden states (R, T, H) through sublayers, and keep those at taps."""
        for tap in self._taps:
            if first < tap <= last:
                hidden, first = self.model.run(hidden, step, range(first, tap)), tap
                self._keep_states(tap, hidden)
        return self.model.run(hidden, step, range(first, last))

    def _keep_states(self, tap: int, hidden: Tensor) -> None:
        states = self.cache.taking_part(self._states(tap, hidden, self.cache.rows))
        if self.cache.in_step:
            states[:, self.cache.start + 1 : self.cache.end + 1] = hidden
            return
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]  # (R, 1)
        states[rows, self.cache.placed(hidden.device) + 1] = hidden

    def _states(self, tap: int, like: Tensor, rows: int) -> Tensor:
        if tap not in self._tapped:
            shape = rows, self.cache.slots + 1, like.shape[-1]
            self._tapped[tap] = like.new_zeros(shape)  # (R, S + 1, H)
        return self._tapped[tap]

    def tapped(
        self,
        tap: int,
        starts: Sequence[int],
        count: int,
        before: int = 0,
        rows: range | None = None,
    ) -> Tensor:
        """States at a tap, (R, count, H), from each row's `starts` token, or `before` it, on."""
        states, start = self._tapped[tap], starts[0] + 1 - before
        place = 0 if rows is None else rows.start
        states = states[place : place + len(starts)]
        if start + count <= states.shape[1] and all(each == starts[0] for each in starts):
            return states[:, start : start + count]
        first = on_device(starts, states.device)[:, None] + 1 - before  # (R, 1)
        slots = first + torch.arange(count, device=states.device)  # (R, count)
        places = torch.arange(len(states), device=states.device)[:, None]  # (R, 1)
        return states[places, slots.clamp(max=states.shape[1] - 1)]

    @in_inference_mode
    def draft_step(
        self,
        tokens: Tensor,
        offset: int,
        draft: int = 0,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Feed each row's token (R,) at its length + offset to a draft; raw logits (R, V).

        Tokens outside the draft vocabulary have -inf. A round takes one source, and its offsets
        are 0, 1, 2, ... without gaps. Or several tokens of each row, (R, T), with what every token
        of the round follows; then logits are (R, T, V) (see `State.wide`).
        """
        state = self.states[draft]
        self._drafting, self._prefix = state, state.prefix
        fed = tokens[:, None] if parents is None else tokens  # (R, T)
        self._fed, self._parents = [*self._fed[:offset], fed], parents
        hidden, step = self._feed(fed, offset, parents)
        return state.step(tokens, hidden, step, offset)

    @in_inference_mode
    def verify(
        self,
        tokens: Tensor,
        positions: Sequence[Position],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Raw target logits (N, V) at positions (ascending) of this round's tokens.

        Offset 0 is a row's last emitted token; the largest offset is the longest draft of any row.
        Where drafts have branches, offsets are numbers of nodes (see `branches`).
        `draft_step` may have fed one token more, where nothing could be drawn after it.

        Args:
            tokens: the tokens of each row that no draft step was fed, (R, T). After draft steps
                the last drafted one, else the last emitted one and the draft; short rows are
                padded with any token.
            parents: which node each one follows, in the passes' order of rows, (R, D + 1), where
                that is not always the one before.
        """
        count = 1 + max(offset for _, offset in positions)
        known = count - tokens.shape[1]
        self._steps = len(self._boundary)
        del self._boundary[known:]
        if known:
            self._feed(tokens, known, parents)
            states, inputs = zip(*self._boundary, strict=True)
            hidden = torch.cat(states, dim=1)  # (R, D + 1, H)
            own = None if inputs[0] is None else torch.cat(inputs, dim=1)  # (R, D + 1, L, P)
            self._place(0, count, parents)
            step = Pass(self.model, self.cache, self.rotary, own)
        else:
            self._prefix = 0
            self._place(0, count, parents)
            hidden, step = self.model.feed(tokens, self.cache, self.rotary)  # (R, D + 1, H)
        self._boundary.clear()
        last = self.model.num_sublayers
        if len(positions) == len(self.rows) * count and not self._taps:
            return self.model.finish(hidden, step, range(self._prefix, last)).flatten(0, 1)
        # the head is large: compute it only where it is read
        wanted = [self.rows[row] * count + offset for row, offset in positions]
        hidden = self._carry(hidden, step, self._prefix, last).flatten(0, 1)  # (R * (D + 1), H)
        return self.model.logits(hidden[None, on_device(wanted, hidden.device)], step)[0]

    def tell(self, row: int, emitted: Sequence[int], steps: int = 0) -> None:
        """Tell the states which tokens a row has emitted in the prefill or a round.

        Args:
            steps: those of the round's draft that were fed what these tokens are.
        """
        for state in self.states:
            state.commit(row, emitted, steps if state is self._drafting else 0)

    @property
    def reads_logits(self) -> bool:
        """Whether any state does."""
        return any(state.reads_logits for state in self.states)

    def read(self, raw: Tensor, seen: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Show the states that read logits those of a round, (N, V) (see `State.read`)."""
        for state in self.states:
            if state.reads_logits:
                state.read(raw, seen)

    def scores(
        self, row: int, offset: int, tokens: Sequence[int], raw: Sequence[float]
    ) -> Sequence[float]:
        """See `Batch.scores`."""
        return () if self.draws is None else self.draws(row, offset, tokens, raw)

    def commit(self, row: int, emitted: Sequence[int], path: Sequence[int] = ()) -> None:
        """Keep the round's fed tokens of a row up to the last emitted one, which was not fed.

        Args:
            path: where drafts have branches, the nodes that these tokens are.
        """
        path = path[: len(emitted) - 1]
        place, root = self.rows[row], self.lengths[row]
        own: Sequence[int] = ()
        steps = self._steps
        if steps and self._drafting is not None:  # which were fed a tree of their own
            fed: list[int] = torch.cat(self._fed, 1)[place].tolist()
            parents = range(-1, len(fed)) if self._parents is None else self._parents[place]
            own = along(parents[1 : len(fed)], fed[1:], emitted[:-1])
            steps = len(own) + 1
        self._take(place, root, path, own)
        self.tell(row, emitted, steps)
        self.lengths[row] += len(emitted)

    @in_inference_mode
    def _take(self, place: int, root: int, path: Sequence[int], own: Sequence[int]) -> None:
        """Move what the nodes of a path hold to where they lie without other branches.

        Args:
            own: the path in the tree that the round's source has been fed.
        """
        self.cache.take(place, root, path)
        for cache in self._drafting.caches if self._drafting is not None else ():
            cache.take(place, root, own)
        at = [node + root + 1 for node in path]
        for states in self._tapped.values():
            states[place, root + 2 : root + 2 + len(at)] = states[place, at]
