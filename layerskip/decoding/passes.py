"""The three forward passes of a call: prefill, draft step, verify; knows no laws, no choices.

A session holds one batch's cache and how far each row's exact keys and values reach. Drafting
carries tokens through the shared prefix for good; the hidden states at its end are kept, and
verification starts from them. Drafts that come from elsewhere are only verified. Rows are named by
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
    """One batch on one model with any number of skip configs, one of which drafts in a round.

    Args:
        model: the opened model.
        skips: of each draft what it leaves out and rounds, for this model's number of layers; None
            where a draft comes from elsewhere.
        prompts: token ids of each row without pads, each (length,).
        max_new_tokens: how many tokens a row may grow by.
        max_draft_length: the most tokens any round drafts.

    Attributes:
        rows: the rows that passes carry, in their order, and the place of each in a pass.
        lengths: per row, the tokens whose keys and values are exact in every layer; the row's
            last emitted token is not among them, it is fed by the next pass.
    """

    def __init__(
        self,
        model: Sublayers,
        skips: Sequence[SkipConfig | None],
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        max_draft_length: int,
    ) -> None:
        self.model = model
        self.prompts = [prompt.to(model.device) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        total = max(self.prompt_lengths) + max_new_tokens
        model.check_lengths(self.prompt_lengths, total)
        layers = model.num_layers
        self.paths = [
            Path(skip, skip.shared_prefix(layers), len(skip.kept(layers))) if skip else None
            for skip in skips
        ]
        # gamma + 1 slack slots: rows that drafted less ride along as padding behind their end
        slots = total + max_draft_length + 1
        self.cache = model.new_cache(len(prompts), slots)
        self.cache.reserve(max(self.prompt_lengths))
        self.rotary = model.rotary(slots, total)
        self.rows = {row: row for row in range(len(prompts))}
        self.lengths = [0] * len(prompts)
        self._prefix = 0  # of the draft in progress
        self._boundary: list[Tensor] = []  # (R, 1, H) at the end of the prefix, one per token fed

    @_lean
    def prefill(self) -> Tensor:
        """Carry every prompt through the whole model; logits after its last token, (B, V)."""
        tokens = torch.nn.utils.rnn.pad_sequence(self.prompts, batch_first=True)  # (B, T)
        count = max(1, _CHUNK // len(tokens))
        for start in range(0, tokens.shape[1], count):
            chunk = tokens[:, start : start + count]  # (B, up to count)
            self.cache.place([start] * len(chunk), chunk.shape[1])
            step = Pass(self.model, self.cache, self.rotary)
            hidden = self.model.run(self.model.embed(chunk), step, range(self.model.num_sublayers))
            if start == 0:
                last = torch.empty_like(hidden[:, 0])  # (B, H)
            ends = [length - 1 - start for length in self.prompt_lengths]
            here = [row for row, end in enumerate(ends) if 0 <= end < chunk.shape[1]]
            last[here] = hidden[here, [ends[row] for row in here]]
        self.lengths = list(self.prompt_lengths)
        self.cache.settled = True
        return self.model.logits(last[None])[0]

    @_lean
    def keep(self, rows: Sequence[int]) -> int:
        """Leave all rows but these (ascending) out of further passes; the bytes this copied."""
        places = [self.rows[row] for row in rows]
        self.rows = {row: place for place, row in enumerate(rows)}
        return self.cache.keep(places, max(self.lengths[row] for row in rows))

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
        self._prefix = path.prefix
        hidden, step = self._feed(tokens[:, None], offset)
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
        self.lengths[row] += emitted
