"""Runs the steps of chains of drafted tokens; draws nothing.

A chain begins at a place of a text and feeds its own tokens. It sees what a draft there would see:
the text's keys and values before its start, and its own after it. Drafts with the model's own
sublayers run as many chains per pass (`Wide`); any other source drafts with its own state, which
moves along the texts (`Walk`).
Shapes: B groups, G chains of a group, P places of all texts, H hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.sublayer_draft import SublayerDraft
from layerskip.model.opened_model import Pass
from layerskip.replay.chain_cache import ChainCache
from layerskip.replay.trace import Trace


class Wide:
    """Steps of the model's own sublayers for many chains at once.

    Args:
        follow: whether chains follow their texts. Then the texts' states replace those of the
            shared prefix's whole layers.
    """

    longest: int | None = None

    def __init__(self, trace: Trace, source: SublayerDraft, *, follow: bool) -> None:
        self.trace, self.model = trace, trace.model
        # Whole layers, whose states the texts have, before the first whose keys others read.
        layers = min([source.prefix // 2, *self.model.read_layers])
        shared = self.model.blocks[2 * layers if follow else 0 : source.prefix]
        self.blocks = [*shared, *source.blocks]
        self.before: Tensor | None = None
        if follow and layers:
            self.before = torch.cat([text.states[layers - 1] for text in trace.texts])  # (P, H)

    def begin(self, texts: Tensor, starts: Tensor, steps: int) -> None:
        """Begin chains in texts (B,) at places (B, G), with at most `steps` steps."""
        texts, starts = (each.to(self.model.device) for each in (texts, starts))
        self.cache = ChainCache(self.trace.cache, texts, starts, steps)
        self.rotary = self.trace.rotary(int(starts.max()) + steps)

    def raw(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        """Raw logits (B, G, V) of a step after tokens (B, G).

        Args:
            rows: their places among all P, (B, G), while a chain follows its text.
        """
        self.cache.advance(step)
        tokens, rows = tokens.to(self.model.device), rows.to(self.model.device)
        inputs = None
        if self.before is None or self.model.inputs_width:
            hidden = self.model.embed(tokens)  # (B, G, H)
            inputs = self.model.inputs(tokens, hidden)
        if self.before is not None:
            hidden = self.before[rows]
        pass_ = Pass(self.model, self.cache, self.rotary, inputs)
        return self.model.backend.run(hidden, pass_, self.blocks)


class Walk:
    """Steps of a source's own state, one chain per text at a time, from start to start.

    Raises:
        TypeError: the source learns from the target's logits, which a trace does not contain.
    """

    def __init__(self, trace: Trace, source: Source) -> None:
        self.trace = trace
        room = trace.model.max_positions - max(text.prompt for text in trace.texts)
        longest = max(len(text.following) for text in trace.texts)
        limit = min(longest, room)
        seats = [Seat(text.tokens[: text.prompt], limit) for text in trace.texts]
        self.passes = Passes(trace.model, [source], seats, max_draft_length=trace.draft_length)
        state = self.passes.states[0]
        if state.reads_logits:
            raise TypeError(
                f"a {type(source).__name__} cannot be replayed, as it learns from the target's "
                "logits in every round; time it by decoding"
            )
        self.longest = source.longest
        self.passes.prefill()
        for row in self.passes.rows:
            self.passes.tell(row, self._next(row))

    def _next(self, row: int) -> list[int]:
        """Emit the text's next token, and return it alone."""
        text, emitted = self.trace.texts[row], self.passes.seats[row].emitted
        emitted.append(int(text.tokens[text.prompt + len(emitted)]))
        return emitted[-1:]

    def begin(self, texts: Tensor, starts: Tensor, steps: int) -> None:
        """Move on to one place (B, 1) in each of some texts (B,), in order."""
        passes, places = self.passes, dict(zip(texts.tolist(), starts[:, 0].tolist(), strict=True))
        seats = passes.seats
        while behind := [row for row, place in places.items() if seats[row].length < place]:
            last = [seats[row].emitted[-1:] for row in passes.rows]
            fed = torch.tensor(last, device=passes.model.device)  # (R, 1)
            passes.verify(fed, [(row, 0) for row in passes.rows])
            for row in behind:
                passes.commit(row, self._next(row))
        # Only now: draft steps read what was just committed.
        if others := passes.rows.keys() - places:
            passes.leave(others)

    def raw(self, step: int, tokens: Tensor, rows: Tensor) -> Tensor:
        """Raw logits (B, 1, V) of a step after tokens (B, 1)."""
        return self.passes.draft_step(tokens[:, 0].to(self.passes.model.device), step)[:, None]
