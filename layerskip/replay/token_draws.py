"""Draws drafts along a text, from shared noise or by the rejection rule; runs no model.

Under the rejection rule, too, a text follows the target's law p whatever is drafted. Given that it
continues with x, a draft of law q has proposed x there and was accepted with probability
w = min(1, q(x) / p(x)). Otherwise the draft has proposed another token, with law (q - p)+
normalised, independently of what follows. So drafts can be drawn after the text is known.

The share of accepted drafts could be computed from the weights w alone. But controllers also learn
from the confidences of drawn tokens, so drafts are drawn and rounds are simulated.
Shapes: N places, R places rejected or off their texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerskip.decoding.draws import confidence
from layerskip.decoding.laws import Law, softmax_law
from layerskip.decoding.noise import accept_uniform, draft_noise
from layerskip.decoding.rules import acceptance_probability, largest, residual, with_margin

NOTHING = -1
"""A token that could not be drawn, since no score is above -inf. Drafting ends there."""

Histories = Sequence[Tensor] | None
"""The tokens before each place, (length,) each; None if the law does not read them."""


class DrawnTokens(NamedTuple):
    """Tokens drawn at N places, or of all steps of chains, (C, J) each.

    Attributes:
        tokens: `NOTHING` if none can be drawn, (N,) int64.
        confidences: their probability under the raw logits at temperature 1, (N,) float32.
        margins: 1 - exp(-m), m the margin between the two best scores, including noise; under the
            rejection rule the confidences again, as for controllers, (N,) float32.
    """

    tokens: Tensor
    confidences: Tensor
    margins: Tensor


class TextPlaces(NamedTuple):
    """The known facts about N places of texts.

    Attributes:
        following: the texts' next tokens, `NOTHING` after the last known one, (N,) int64.
        likelihoods: probability of each under the target's law, (N,) float32.
        keys, places: noise-stream key of each text, and place of each next token, of length N.
        left: place of the token with which each draft left its text; 0 while it is on it.
    """

    following: Tensor
    likelihoods: Tensor
    keys: Sequence[int]
    places: Sequence[int]
    left: Sequence[int] | None = None


def scores_at(law: Law, raw: Tensor, histories: Histories) -> Tensor:
    """Process raw logits (N, V) at places of any texts into scores (N, V)."""
    if histories is None:
        nothing = torch.zeros(1, 1, dtype=torch.long, device=raw.device)
        return law.scores(raw, nothing, [0] * len(raw), [0] * len(raw))
    # One by one, since processors may read whole rows and their number.
    alone = Law(law.processors, do_sample=law.do_sample, rows=1)
    return torch.cat(
        [
            alone.scores(raw[i : i + 1], seen[None], [0], [len(seen)])
            for i, seen in enumerate(histories)
        ]
    )


def draw(law: Law, raw: Tensor, noise: Tensor | None, histories: Histories) -> DrawnTokens:
    """Draw from raw logits (N, V) as the engine does, for a draft or for the target.

    Args:
        noise: Gumbel noise of each place, (N, V); None for greedy decoding.
    """
    scores = scores_at(law, raw, histories)  # (N, V)
    tokens, margins = with_margin(scores if noise is None else scores + noise)
    return DrawnTokens(tokens, confidence(raw, tokens.clamp_min(0)), margins)


def propose(
    law: Law,
    raw: Tensor,
    histories: Histories,
    beside: TextPlaces,
    target: Callable[[Tensor], Tensor],
) -> DrawnTokens:
    """Draw the proposals of drafts at places of texts under the rejection rule, given the texts.

    On its text, a proposal is accepted if it is the text's next token, by an acceptance test with
    the engine's uniform number at each place. Off its text, a draft simply draws.

    Args:
        raw: the drafts' raw logits, (N, V).
        target: the target's law, (R, V), for those of the N places that request it.
    """
    scores = scores_at(law, raw, histories)  # (N, V)
    q, following = softmax_law(scores), beside.following
    left = torch.tensor(beside.left or [0] * len(raw), device=raw.device)  # (N,)
    likely = q.gather(1, following.clamp_min(0)[:, None])[:, 0]  # (N,)
    weights = acceptance_probability(likely, beside.likelihoods)  # with p and q exchanged
    lucky = accept_uniform(beside.keys, beside.places, raw.device) < weights  # (N,), False for NaN
    tokens = torch.where(lucky & (left == 0), following, NOTHING)
    others = torch.nonzero(tokens == NOTHING)[:, 0]  # (R,)
    if len(others):
        drawn = scores[others]  # (R, V)
        rejected = left[others] == 0  # (R,)
        if rejected.any():
            which = others[rejected]
            drawn[rejected] = residual(q[which], target(which)).log()
        keys, places = (
            [whole[i] for i in others.tolist()] for whole in (beside.keys, beside.places)
        )
        origins = [
            origin or place for origin, place in zip(left[others].tolist(), places, strict=True)
        ]
        # decoding rejects at a place once at most: no noise is used twice along a text
        tokens[others] = largest(drawn + draft_noise(keys, origins, places, drawn))
    sure = confidence(raw, tokens.clamp_min(0))
    return DrawnTokens(tokens, sure, sure)
