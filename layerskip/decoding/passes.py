"""The three forward passes of a call: prefill, draft step, verify; knows no laws, no choices.

A session holds one batch's cache and how far each row's exact keys and values reach. Drafting
carries tokens through the shared prefix for good; the hidden states at its end are kept, and
verification starts from them. A draft with a state of its own is told of tokens and keeps the rest
to itself, one that comes from elsewhere is only verified. Rows are named by
their number in the call, also where finished ones have been left behind.
Letters: B rows of the call, R rows of a pass, T tokens, D drafted tokens, H width, V vocabulary, N
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.followers import Drafter, Follower
from layerskip.model.cache import on_device
from layerskip.model.sublayers import Pass, Sublayers

Method = TypeVar("Method", bound=Callable[..., Any])
Position = tuple[int, int]  # (row, tokens past the row's emitted ones)

# Tokens of one pass of the prefill, all rows together: enough to keep a machine busy, and few
# enough that their activations are small beside the weights.
_CHUNK = 512


def _lean(method: Method) -> Method:
    """Run a pass in inference mode on the lean path, whose many small kernels it makes cheaper.

    Logits stay an inference tensor, which nobody writes into: a copy for every caller to have of
    his own costs as much as reading them. The module path may call anything, so not there.
    """

    @wraps(method)
    def run(self: Session, *args: Any) -> Any:
        if self.model.execution == "modules":
            return method(self, *args)
        with torch.inference_mode():
            return method(self, *args)

    return cast(Method, run)


class Path(NamedTuple):
    """How a skip config drafts: sublayers that it shares with the target from the front, and all
    that it runs."""

    skip: SkipConfig
    prefix: int
    kept: int


class Session:
    """One batch on one model with any number of drafts, one of which drafts in a round.

    Args:
        model: the opened model.
        drafts: of each draft what it leaves out and rounds, for this model's number of layers, or
            what has a state of its own; None where a draft needs no passes.
        prompts: token ids of each row without pads, each (length,).
        max_new_tokens: how many tokens a row may grow by.
        max_draft_length: the most tokens any round drafts.
        emitted: tokens each row has emitted, the caller's to extend; states of drafts read them.

    Attributes:
        total, slots: the most tokens of a row, and of its keys and values.
        paths: how each draft drafts.
        rows: the rows that passes carry, in their order, and the place of each in a pass.
        lengths: per row, the tokens whose keys and values are exact in every layer; the row's
            last emitted token is not among them, it is fed by the next pass.
    """

    def __init__(
        self,
        model: Sublayers,
        drafts: Sequence[SkipConfig | Drafter | None],
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        max_draft_length: int,
        emitted: Sequence[Sequence[int]] = (),
    ) -> None:
        self.model = model
        self.prompts = [prompt.to(model.device) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.emitted = emitted
        self.total = max(self.prompt_lengths) + max_new_tokens
        model.check_lengths(self.prompt_lengths, self.total)
        # gamma + 1 slack slots: rows that drafted less ride along as padding behind their end
        self.slots = self.total + max_draft_length + 1
        self.cache = model.new_cache(len(prompts), self.slots)
        self.cache.reserve(max(self.prompt_lengths))
        self.rotary = model.rotary(self.slots, self.total)
        self.rows = {row: row for row in range(len(prompts))}
        self.lengths = [0] * len(prompts)
        self.paths = [self._path(draft) for draft in drafts]
        self._drafting: Path | Follower | None = None  # in the round in progress
        self._prefix = 0  # of it
        self._steps = 0  # that it took, once verified
        self._boundary: list[Tensor] = []  # (R, 1, H) at the end of the prefix, one per token fed

    def _path(self, draft: SkipConfig | Drafter | None) -> Path | Follower | None:
        if isinstance(draft, Drafter):
            return draft.open(self)
        if draft is None:
            return None
        layers = self.model.num_layers
        return Path(draft, draft.shared_prefix(layers), len(draft.kept(layers)))

    @_lean
    def prefill(self) -> Tensor:
        """Carry every prompt through the whole model; logits after its last token, (B, V)."""
        tokens = torch.nn.utils.rnn.pad_sequence(self.prompts, batch_first=True)  # (B, T)

        def run(chunk: Tensor, first: int) -> Tensor:
            self.cache.place([first] * len(chunk), chunk.shape[1])
            step = Pass(self.model, self.cache, self.rotary)
            return self.model.run(self.model.embed(chunk), step, range(self.model.num_sublayers))

        last = in_chunks(tokens, [length - 1 for length in self.prompt_lengths], run)  # (B, H)
        self.lengths = list(self.prompt_lengths)
        self.cache.settled = True
        return self.model.logits(last[None])[0]

    @_lean
    def keep(self, rows: Sequence[int]) -> int:
        """Leave all rows but these (ascending) out of further passes; the bytes this copied."""
        places = [self.rows[row] for row in rows]
        self.rows = {row: place for place, row in enumerate(rows)}
        length = max(self.lengths[row] for row in rows)
        states = [path for path in self.paths if isinstance(path, Follower)]
        moved = self.cache.keep(places, length)
        return moved + sum(state.keep(places, length) for state in states)

    def _place(self, offset: int, count: int) -> Pass:
        """A pass over `count` tokens of every row, the first one at its length + offset."""
        self.cache.place([self.lengths[row] + offset for row in self.rows], count)
        return Pass(self.model, self.cache, self.rotary)

    def _feed(self, tokens: Tensor, offset: int) -> tuple[Tensor, Pass]:
        """Carry tokens (R, T) through the shared prefix and keep where they arrive, (R, T, H)."""
        step = self._place(offset, tokens.shape[1])
        hidden = self.model.run(self.model.embed(tokens), step, range(self._prefix))
        self._boundary.append(hidden)
        return hidden, step

    @_lean
    def draft_step(self, tokens: Tensor, offset: int, draft: int = 0) -> Tensor:
        """Feed each row's token (R,) at its length + offset to a draft; raw logits (R, V).

        Tokens outside of the model's draft vocabulary have -inf. Offsets run 0, 1, 2, ... within a
        round, without gaps, all of one draft.
        """
        path = self.paths[draft]
        assert path is not None
        self._drafting, self._prefix = path, path.prefix
        hidden, step = self._feed(tokens[:, None], offset)
        if isinstance(path, Follower):
            return path.step(tokens, hidden, step, offset)
        return self.model.finish_draft(hidden, step, path.skip)[:, 0]

    @_lean
    def verify(self, tokens: Tensor, positions: Sequence[Position]) -> Tensor:
        """Raw target logits (N, V) at those positions, ascending, of the tokens fed in this round.

        Offset 0 is a row's last emitted token; the largest offset is the longest draft of any row.
        `draft_step` may have fed one token more, where nothing could be drawn after it.

        Args:
            tokens: the last tokens of each row's round, (R, T), that no draft step was fed. Behind
                draft steps that is the last drafted one, else the last emitted one and all drafts;
                where a row has fewer than others, anything goes.
        """
        count = 1 + max(offset for _, offset in positions)
        known = count - tokens.shape[1]
        self._steps = len(self._boundary)
        del self._boundary[known:]
        if known:
            self._feed(tokens, known)
            hidden = torch.cat(self._boundary, dim=1)  # (R, D + 1, H)
        else:
            self._prefix, hidden = 0, self.model.embed(tokens)  # (R, D + 1, H)
        self._boundary.clear()
        step = self._place(0, count)
        rest = range(self._prefix, self.model.num_sublayers)
        if len(positions) == len(self.rows) * count:
            return self.model.finish(hidden, step, rest).flatten(0, 1)
        # the head is large: only where somebody reads it
        wanted = [self.rows[row] * count + offset for row, offset in positions]
        hidden = self.model.run(hidden, step, rest).flatten(0, 1)  # (R * (D + 1), H)
        return self.model.logits(hidden[None, on_device(wanted, hidden.device)])[0]

    def commit(self, row: int, emitted: int) -> None:
        """Keep the round's first `emitted` fed tokens of a row; the rest is forgotten."""
        if self._steps and isinstance(self._drafting, Follower):
            self._drafting.commit(row, emitted, self._steps)
        self.lengths[row] += emitted


def in_chunks(tokens: Tensor, lasts: Sequence[int], run: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Carry many tokens (R, T) through a model, some of them at a time.

    Args:
        lasts: which token of each row is the last.
        run: takes some tokens (R, t) and which the first one is, gives hidden states (R, t, H).

    Returns:
        The hidden states of those last tokens, (R, H).
    """
    count = max(1, _CHUNK // len(tokens))
    for first in range(0, tokens.shape[1], count):
        hidden = run(tokens[:, first : first + count], first)  # (R, up to count, H)
        if first == 0:
            found = torch.empty_like(hidden[:, 0])  # (R, H)
        here = [row for row, last in enumerate(lasts) if 0 <= last - first < hidden.shape[1]]
        found[here] = hidden[here, [lasts[row] - first for row in here]]
    return found
