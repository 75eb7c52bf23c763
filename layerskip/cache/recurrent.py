"""Recurrent layers: their states cannot be rolled back, so copies are kept.

Each row keeps the state after its last committed token, or an earlier one, and the newest state. A
pass starts from the newest state that has seen none of its tokens, and feeds the tokens in between
again before its own. If all drafts were accepted, that is the newest, and none is fed twice.
Where sublayers are opened, only recurrent layers are fed again, with the inputs that are kept.
Shapes: R rows of a pass, T tokens, H hidden width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from layerskip.cache.library_cache import AttentionLayer, LibraryCache
from layerskip.library import CacheLayerMixin, LinearAttentionLayer

LONGEST = 16
"""Number of tokens to feed again from which on they get a separate pass, whose state is kept."""
SERVED = frozenset(
    (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe"),
        *("lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next"),
    )
)
"""Types of models with recurrent layers whose text was compared with `generate()`."""
ONE_BY_ONE = frozenset(("falcon_mamba", "jamba", "mamba"))
"""Those that the library can continue from a state by only one token at a time."""


KINDS = ("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")


class RecurrentState(NamedTuple):
    """The contents of recurrent layers after a row's first tokens.

    Attributes:
        end: number of tokens.
        tensors: by kind ("conv", "recurrent") and number of the layer, for one row, (1, ...). Where
            sublayers are opened, the newest state also has "inputs", from the committed one on.
    """

    end: int
    tensors: dict[tuple[str, int], Tensor]


_NOTHING = RecurrentState(0, {})


class _RowInPass(NamedTuple):
    """What the recurrent layers of an opened model do with a row in a pass.

    Attributes:
        start: the state from which they continue.
        kept: the newest tensors before the pass, with each layer's latest inputs, (1, n, H).
        again: the inputs that they are fed again.
        stays: the inputs that are kept together with the pass's own.
        states: the states to fill: one before the pass if many are fed again, and one after it.
    """

    start: RecurrentState
    kept: dict[tuple[str, int], Tensor]
    again: range
    stays: range
    states: list[RecurrentState]

    def inputs(self, number: int, which: range) -> Tensor:
        return self.kept["inputs", number][:, which.start : which.stop]


class RecurrentCache(LibraryCache):
    """Keys, values and states of rows; passes are grouped by the number of tokens they feed.

    Args:
        make: makes the library's layers of an empty cache, for models that run as a whole.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        windows: Sequence[int | None],
        make: Callable[[], list[Any]] = list,
    ) -> None:
        super().__init__(rows, slots, windows)
        self.make = make
        self._tokens = torch.zeros(rows, slots, dtype=torch.long)  # (B, S), tokens fed so far
        self._states = [[_NOTHING] for _ in range(rows)]  # the committed one, and the newest
        self._drafted = [_NOTHING] * rows  # of a draft with other weights, in this round
        self._pass: list[_RowInPass] = []

    def place(self, *given: Any, **how: Any) -> None:
        super().place(*given, **how)
        self._pass = []

    def run_layer(
        self, number: int, inputs: Tensor, mix: Callable[[Tensor, Cache], Tensor], *, draft: bool
    ) -> Tensor:
        """Run a recurrent layer of an opened model on its inputs (R, T, H) in a pass.

        Args:
            mix: maps inputs (r, t, H) and the library's cache to outputs (r, t, H).
            draft: as for `run`.
        """
        if not self._pass:
            rows = enumerate(self.active)
            self._pass = [self._begun(place, row, draft) for row, place in rows]
        groups: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
        for row, run in enumerate(self._pass):
            groups[len(run.again), run.start.end == 0, len(run.states)].append(row)
        out = torch.empty_like(inputs)
        for (lag, empty, count), some in groups.items():
            runs, layer = [self._pass[row] for row in some], LinearAttentionLayer()
            fed = inputs[some]  # (r, T, H)
            if lag:
                again = torch.cat([run.inputs(number, run.again) for run in runs])  # (r, lag, H)
                fed = torch.cat((again, fed), 1)
            for kind in () if empty else ("conv", "recurrent"):
                _fill(layer, kind, torch.cat([run.start.tensors[kind, number] for run in runs]))
            past, pieces = Cache(layers=[layer] * (number + 1)), []
            for at, piece in enumerate(fed.tensor_split([lag] if count > 1 else [], 1)):
                pieces.append(mix(piece, past))
                for kind, held in _contents(layer).items():
                    held = held.clone()  # changed in place by the next piece
                    for row, run in enumerate(runs):
                        run.states[at].tensors[kind, number] = held[row : row + 1]
            out[some] = torch.cat(pieces, 1)[:, lag:]
        for row, run in enumerate(() if draft else self._pass):
            own = inputs[row : row + 1]  # (1, T, H)
            stays = [run.inputs(number, run.stays)] if run.stays else []
            run.states[-1].tensors["inputs", number] = torch.cat((*stays, own), 1)
        return out

    def _begun(self, place: int, row: int, draft: bool) -> _RowInPass:
        before, first = self._states[place], self.firsts[row]
        start, since = self._start(place, row, draft), before[0].end
        states = [RecurrentState(first + self.count, {})]
        if first - start.end > LONGEST and not draft:
            states.insert(0, RecurrentState(first, {}))
        for state in states:
            self._add(place, row, state, draft)
        again = range(start.end - since, first - since)
        stays = range(self._states[place][0].end - since, first - since)
        return _RowInPass(start, before[-1].tensors, again, stays, states)

    def _add(self, place: int, row: int, state: RecurrentState, draft: bool) -> None:
        """Keep a row's state after a pass."""
        if draft:
            self._drafted[place] = state
        else:
            settled = [s for s in self._states[place] if s.end <= self.settled[row]]
            self._states[place] = [*settled[-1:], state]

    def run(
        self,
        tokens: Tensor,
        total: int,
        forward: Callable[[Tensor, Tensor, Cache], Tensor],
        *,
        one_by_one: bool,
        draft: bool,
    ) -> Tensor:
        """Run the tokens (R, T) of a pass; returns hidden states (R, T, H).

        Args:
            total: maximum number of tokens in a row; tokens after it are pads.
            forward: maps tokens and positions (r, t) and the library's cache to states (r, t, H).
            one_by_one: whether only one token at a time may continue from a state.
            draft: whether the weights are not the model's: only its committed states are useful.
        """
        device, count = tokens.device, tokens.shape[1]
        out: Tensor | None = None
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, (place, first) in enumerate(zip(self.active, self.firsts, strict=True)):
            end = min(first + count, total)
            self._tokens[place, first:end] = tokens[row, : max(0, end - first)].cpu()
            if end > first:
                groups[self._start(place, row, draft).end, first].append(row)
        for (start, first), rows in groups.items():
            end = min(first + count, total)
            places = [self.active[row] for row in rows]
            starts = [start]
            if first - start > LONGEST and not draft:
                starts.append(first)
            if one_by_one and start:
                starts = [*range(start, end)]
            pieces = []
            for begin, until in zip(starts, [*starts[1:], end], strict=True):
                fed = self._tokens[places, begin:until].to(device)  # (r, t)
                positions = torch.arange(begin, until, device=device).expand_as(fed)
                past = self._layers(rows, places, begin, until, draft)
                pieces.append(forward(fed, positions, past))
                self._keep(rows, places, past, until, draft)
            hidden = torch.cat(pieces, 1)[:, first - start :]  # (r, t, H)
            if out is None:
                out = hidden.new_zeros(*tokens.shape, hidden.shape[-1])  # (R, T, H)
            out[rows, : end - first] = hidden
        assert out is not None
        return out

    def _start(self, place: int, row: int, draft: bool) -> RecurrentState:
        """The state from which a row's pass continues."""
        first = self.firsts[row]
        if draft and first > self.settled[row]:
            return self._drafted[place]
        kept = [each for each in self._states[place] if each.end <= first]
        if not draft:
            self._states[place] = kept
        else:
            self._drafted[place] = kept[-1]
        return kept[-1]

    def _layers(
        self, rows: list[int], places: list[int], start: int, end: int, draft: bool
    ) -> Cache:
        """The library's cache for rows of the pass that all continue from the same token."""
        states = [self._drafted[p] if draft else self._states[p][-1] for p in places]
        layers = self.make()
        for number, layer in enumerate(layers):
            if isinstance(layer, CacheLayerMixin):
                made = _Both if isinstance(layer, LinearAttentionLayer) else AttentionLayer
                layers[number] = made(self, number, rows, start, end)
            for kind in ("conv", "recurrent") if isinstance(layer, LinearAttentionLayer) else ():
                parts = [each.tensors.get((kind, number)) for each in states]
                if parts[0] is not None:
                    _fill(layers[number], kind, torch.cat(parts))  # type: ignore[arg-type]
        return Cache(layers=layers)

    def _keep(self, rows: list[int], places: list[int], past: Cache, end: int, draft: bool) -> None:
        tensors: dict[tuple[str, int], Tensor] = {}
        for number, layer in enumerate(past.layers):
            if isinstance(layer, LinearAttentionLayer):
                tensors |= {(kind, number): each for kind, each in _contents(layer).items()}
        for at, (row, place) in enumerate(zip(rows, places, strict=True)):
            state = RecurrentState(end, {name: each[at : at + 1] for name, each in tensors.items()})
            self._add(place, row, state, draft)

    def parts(self, place: int, first: int, end: int) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """As for `RowCache`, and the state at the end as the last slot's contents, (..., 1, D)."""
        yield from super().parts(place, first, end)
        state = next(each for each in self._states[place] if each.end == end)  # see `reusable`
        for name, tensor in state.tensors.items():
            if name[0] != "inputs":
                yield name, tensor[0].unsqueeze(-2)  # (..., 1, D)

    def fill(self, place: int, part: tuple[str, int], end: int, held: Tensor) -> None:
        if part[0] in ("keys", "values"):
            super().fill(place, part, end, held)
        elif held.shape[-2]:
            if self._states[place][-1].end != end:
                self._states[place] = [RecurrentState(end, {})]
            self._states[place][-1].tensors[part] = held.squeeze(-2)[None]

    @property
    def state_bytes(self) -> int:
        one = sum(tensor.nbytes for tensor in self._states[0][-1].tensors.values())
        return 3 * one  # two states, and a draft's

    @property
    def window(self) -> int:
        return 1  # a text is useful only where its state was kept

    def reusable(self, place: int, length: int) -> int:
        return max((each.end for each in self._states[place] if each.end <= length), default=0)

    def store_points(self, length: int, same: int) -> set[int]:
        return {length - 1, same}  # the last token runs again if the same prompt comes

    def _arrange(self, places: Sequence[int | None]) -> None:
        super()._arrange(places)
        tokens = self._tokens.new_zeros(len(places), self.slots)
        length = min(tokens.shape[1], self._tokens.shape[1])
        for row, place in enumerate(places):
            if place is not None:
                tokens[row, :length] = self._tokens[place, :length]
        states = self._states
        self._states = [[_NOTHING] if place is None else states[place] for place in places]
        self._tokens, self._drafted = tokens, [_NOTHING] * len(places)

    def begin(self, ends: Mapping[int, int]) -> None:
        super().begin(ends)
        for place in ends:
            self._states[place] = [_NOTHING]


class _Both(LinearAttentionLayer, AttentionLayer):  # type: ignore[override]
    """A layer with both a state and an attention."""

    def __init__(self, *given: Any) -> None:
        LinearAttentionLayer.__init__(self)
        AttentionLayer.__init__(self, *given)


def _contents(layer: LinearAttentionLayer) -> dict[str, Tensor]:
    """The states of one of the library's layers, by kind."""
    held = {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
    return {kind: each for kind, each in held.items() if each is not None}


def _fill(layer: Any, kind: str, tensor: Tensor) -> None:
    """Set the state of one of the library's layers, for as many rows as the pass has."""
    layer.device, layer.dtype, layer.has_previous_state[0] = tensor.device, tensor.dtype, True
    if kind == "conv":
        layer.conv_states[0], layer.conv_kernel_size[0] = tensor, tensor.shape[-1]
        layer.is_conv_states_initialized[0] = True
    else:
        layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = tensor, True
