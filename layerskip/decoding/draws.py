"""Tokens from a round's logits: scores, draws, and which drafted tokens stay.

Knows laws, noise and where rows stand; knows no model, no controller, no ends.
Letters: B rows, N positions, V vocabulary, W width of the padded prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from layerskip.decoding.laws import (
    TARGET,
    Law,
    NoiseBlocks,
    accept_uniform,
    acceptance_probability,
    gumbel_noise,
    residual,
    softmax_law,
    stream_key,
)
from layerskip.decoding.passes import Position
from layerskip.model.cache import on_device


@dataclass
class Drafts:
    """What a round has drafted.

    Attributes:
        tokens: drafted tokens per row; empty where they are still to be read from the device.
        confidences: those of the tokens per row, where the controller needs them.
        lengths: per row, how many tokens the target is asked about.
        last: each row's last token, drafted or emitted, in the session's order of rows, (R,).
        steps: of every draft step its positions, and the tokens drawn there, -1 for none, (N,).
        laws: for the rejection rule, of every draft step the draft's law, (N, V).
        unread: whether no token has been read from the device yet.
    """

    tokens: list[list[int]]
    confidences: list[list[float]]
    lengths: list[int]
    last: Tensor
    steps: list[tuple[list[Position], Tensor]]
    laws: list[Tensor]
    unread: bool

    def at(self, positions: Sequence[Position]) -> Tensor:
        """Where each position lies among those of all steps, -1 for none, (len(positions),)."""
        places = {position: i for i, position in enumerate(chain(*(at for at, _ in self.steps)))}
        return on_device([places.get(position, -1) for position in positions], self.last.device)


class Draws:
    """Draws tokens at positions of rows that advance at their own pace.

    Args:
        law: turns logits into the law, for draft and target alike.
        keys: noise-stream key of each row; unused where the law is greedy.
        rejection: accept by the rejection rule instead of coupled draws.
        history: pads and prompt, emitted and drafted tokens of each row, (B, W + slack).
        width: W.
        prompt_lengths: tokens of each prompt, pads not counted.
        emitted: tokens each row has emitted; both this and `history` are the caller's to extend.
    """

    def __init__(
        self,
        law: Law,
        keys: Sequence[int],
        *,
        rejection: bool,
        history: Tensor,
        width: int,
        prompt_lengths: Sequence[int],
        emitted: Sequence[Sequence[int]],
    ) -> None:
        self.law, self.keys = law, keys
        self.greedy = not law.do_sample
        self.rejection = rejection and not self.greedy
        self.history, self.width = history, width
        self.prompt_lengths, self.emitted = prompt_lengths, emitted
        self.noise = NoiseBlocks()

    def scores(self, raw: Tensor, positions: Sequence[Position]) -> Tensor:
        """Processed scores (N, V) from the raw logits (N, V) at those positions."""
        rows = [row for row, _ in positions]
        lengths = [self.width + len(self.emitted[row]) + offset for row, offset in positions]
        return self.law.scores(raw, self.history, rows, lengths)

    def draw(self, scores: Tensor, positions: Sequence[Position], purpose: int) -> Tensor:
        """Draw a token at each position, (N,); -1 where none has a score above -inf, or NaN."""
        if not self.greedy:
            keys, places = self._stream(positions)
            if purpose == TARGET:
                noise = self.noise.at(keys, places, scores)
            else:
                # A draft thrown away has told the controller something of its noise, so that no
                # later round may draft from the same: each round has a stream of its own.
                starts = [
                    place - offset for place, (_, offset) in zip(places, positions, strict=True)
                ]
                keys = list(map(stream_key, keys, starts))
                noise = gumbel_noise(
                    keys, places, scores.shape[-1], purpose=purpose, device=scores.device
                )
            scores = noise.add_(scores)  # (N, V)
        best, token = scores.max(-1)  # (N,), (N,)
        return torch.where(best > float("-inf"), token, -1)

    def forget(self, row: int, *, finished: bool) -> None:
        """Drop the noise of the places that a row has passed, or all of it."""
        if not self.greedy:
            (key,), (place,) = self._stream([(row, 0)])
            self.noise.forget(key, None if finished else place)

    def _stream(self, positions: Sequence[Position]) -> tuple[list[int], list[int]]:
        """Noise-stream key and place, pads not counted, of the token drawn at each position."""
        keys = [self.keys[row] for row, _ in positions]
        lengths = self.prompt_lengths
        places = [lengths[row] + len(self.emitted[row]) + offset for row, offset in positions]
        return keys, places

    def judge(
        self, drafts: Drafts, positions: Sequence[Position], scores: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """What the target says of its scores (N, V) at those positions.

        Returns:
            Of every position whether the token drafted there is accepted (N,), or None where it is
            if it equals what is drawn; and what is drawn: by the rejection rule a correction or
            the bonus, otherwise the target's own token (N,).
        """
        if self.rejection:
            return self._reject(drafts, positions, scores)
        return None, self.draw(scores, positions, TARGET)

    def _reject(
        self, drafts: Drafts, positions: Sequence[Position], scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rejection rule (Leviathan et al. 2023, Algorithm 1)."""
        p = softmax_law(scores)  # (N, V)
        if not drafts.steps:
            return torch.zeros(len(p), device=p.device), self.draw(p.log(), positions, TARGET)
        index = drafts.at(positions)  # (N,)
        token = torch.cat([drawn for _, drawn in drafts.steps])[index]  # (N,)
        drafted = (index >= 0) & (token >= 0)  # (N,)
        q = torch.cat(drafts.laws)[index]  # (N, V)
        here = token.clamp_min(0)[:, None]  # (N, 1)
        chance = acceptance_probability(p.gather(1, here), q.gather(1, here))[:, 0]  # (N,)
        keys, places = self._stream(positions)
        accepted = drafted & (accept_uniform(keys, places, p.device) < chance)  # (N,)
        final = torch.where(drafted[:, None], residual(p, q), p)  # (N, V)
        return accepted, self.draw(final.log(), positions, TARGET)


def confidence(raw: Tensor, tokens: Tensor) -> Tensor:
    """Probability of each token (N,) under the softmax of its raw logits (N, V), (N,)."""
    law = torch.softmax(raw.float(), dim=-1)  # (N, V); logsumexp is several times slower
    return law.gather(1, tokens[:, None])[:, 0]
