"""Compares texts with those they must equal, and tells near-ties from faults.

A text is judged along its own tokens: at every position the reference's choice is asked for given
the text's tokens before it (teacher forcing), so that one near-tie does not hide what follows.
A token that is not that choice is a near-tie if the reference's scores of the two lie within the
resolution, and a fault otherwise.

The resolution is measured on the very texts. The library scores them as `generate()` does, token
by token, and again in wide passes, once by its other attention. By how much two candidates'
distance changes from one computation to the next is what rounding does; its size differs from
position to position, and so does the resolution: `QUANTILE` of these changes lie within it.

Where passes are `exact`, drafting may change nothing at all, and there is no resolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from layerskip.model.wrappers import unwrapped

QUANTILE = 0.999
CANDIDATES = 8  # the best tokens of a position, whose distances are measured
WIDTH, OTHER_WIDTH = 32, 5  # tokens of a wide pass; of the second one where there is one attention

Scores = Callable[[Tensor, int], Tensor]
"""Logits (N, V) of new tokens from a number on, to what those tokens are chosen by, (N, V)."""


@dataclass(frozen=True)
class Difference:
    """A token that is not the reference's.

    Attributes:
        prompt: index of the prompt.
        position: index of the new token.
        expected, got: the two tokens; None where a text ends.
        margin: how far the lower of the two lies below the highest score there; infinite where
            a text ends, and null in JSON.
        resolution: what rounding can do to their distance; 0 where texts must be the same bit for
            bit, and where a text ends.
    """

    prompt: int
    position: int
    expected: int | None
    got: int | None
    margin: float
    resolution: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference; otherwise it is a fault."""
        return 0 < self.resolution >= self.margin


@dataclass(frozen=True)
class Comparison:
    """Texts against those that they must equal.

    Attributes:
        prompts: how many were compared.
        tokens: new tokens judged.
        differences: of all texts, ascending.
        resolution: the median over positions; 0 where texts must be the same bit for bit, None
            where it was not measured.
    """

    prompts: int
    tokens: int
    differences: tuple[Difference, ...]
    resolution: float | None = None

    @property
    def near_ties(self) -> int:
        return sum(difference.near_tie for difference in self.differences)

    @property
    def faults(self) -> int:
        return len(self.differences) - self.near_ties

    def to_dict(self) -> dict[str, Any]:
        differences = [
            asdict(d)
            | {"near_tie": d.near_tie, "margin": d.margin if math.isfinite(d.margin) else None}
            for d in self.differences
        ]
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "resolution": self.resolution,
            "near_ties": self.near_ties,
            "faults": self.faults,
            "differences": differences,
        }


@dataclass(frozen=True)
class Along:
    """What the library says along a text of n tokens.

    Attributes:
        best: its choice at each position, (n,).
        margins: how far the lower of two given tokens lies below it, (n,) float64.
        places: the last place of the best score, as far as numbers are held, (n,) float64.
        changes: of the candidates' distances from the best one, two computations against the one
            of `generate()`; nan where a score is not finite, (2, n, K) float64.
    """

    best: list[int]
    margins: Tensor
    places: Tensor
    changes: Tensor


def along(
    model: Any, prompt: Tensor, text: Sequence[int], others: Sequence[int], scores: Scores
) -> Along:
    """Let the library's own passes score a text.

    Args:
        prompt: token ids, (1, T), no pads.
        text, others: at every position the two tokens in question; the text's are fed.
    """
    ids = torch.cat([prompt, prompt.new_tensor([text[:-1]])], dim=1)  # (1, T + n - 1)
    first = prompt.shape[1]
    both = prompt.new_tensor([[*text], [*others]]).T  # (n, 2)
    best: list[int] = []
    picks, values = [], []
    for part in _scored(model, ids, first, None, scores):  # (N, V)
        here = both[len(best) : len(best) + len(part)].to(part.device)  # (N, 2)
        best += part.argmax(-1).tolist()
        top = part.topk(min(CANDIDATES, part.shape[-1])).indices
        picks.append(torch.cat([top, here], dim=-1))  # (N, K + 3)
        values.append(part.gather(-1, picks[-1]))
    computed, asked = [torch.cat(values)], torch.cat(picks)
    own, other = _attentions(model)
    for width, attention in ((WIDTH, own), (WIDTH if other else OTHER_WIDTH, other or own)):
        with _attending(model, attention):
            wide = list(_gathered(_scored(model, ids, first, width, scores), asked))
        computed.append(torch.cat(wide))
    # on the CPU: not every device has float64
    told = torch.stack([each.cpu().double() for each in computed])  # (3, n, K + 3)
    gaps = told[..., 1:-2] - told[..., :1]  # (3, n, K)
    changes = gaps[1:] - gaps[0]
    # logits come in the model's dtype, and scores are made of them in float32
    eps = max(torch.finfo(unwrapped(model).dtype).eps, 2 * torch.finfo(torch.float32).eps)
    return Along(
        best=best,
        margins=told[0, :, 0] - told[0, :, -2:].amin(-1),
        places=(told[0, :, 0].abs() * eps).clamp_min(torch.finfo(torch.float32).tiny),
        changes=changes.masked_fill(~changes.isfinite(), math.nan),
    )


@torch.no_grad()
def _scored(
    model: Any, ids: Tensor, first: int, width: int | None, scores: Scores
) -> Iterator[Tensor]:
    """Scores of the tokens from number `first` of ids (1, T + n - 1) on, pass by pass, (N, V).

    In passes of a width or, as `generate()` does, the prompt at once and then token by token.
    """
    total = ids.shape[1]
    starts = range(0, total, width) if width else (0, *range(first, total))
    cache, done = None, 0
    for start, end in pairwise((*starts, total)):
        count = max(0, end - max(start, first - 1))
        out = model(
            input_ids=ids[:, start:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=max(1, count),
        )
        cache = out.past_key_values
        if count:
            yield scores(out.logits[0, -count:], done)
        done += count


def _gathered(parts: Iterator[Tensor], picks: Tensor) -> Iterator[Tensor]:
    """Of scores (N, V), pass by pass, those of the tokens (n, P) that are picked: (N, P)."""
    done = 0
    for part in parts:
        yield part.gather(-1, picks[done : done + len(part)])
        done += len(part)


def _attentions(model: Any) -> tuple[str, str | None]:
    """The attention that a model computes with, and another that computes the same."""
    inner = unwrapped(model)
    text = inner.config.get_text_config()
    own: str = text._attn_implementation
    capped = getattr(text, "attn_logit_softcapping", None)  # sdpa leaves the cap out
    both = inner._supports_sdpa and capped is None
    return own, {"sdpa": "eager", "eager": "sdpa"}.get(own) if both else None


@contextmanager
def _attending(model: Any, attention: str) -> Iterator[None]:
    inner = unwrapped(model)
    before = inner.config._attn_implementation
    inner.set_attn_implementation(attention)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


def resolutions(texts: Sequence[Along]) -> list[Tensor]:
    """What rounding can do to the distance of two tokens, at every position of texts, (n,) each.

    A computation's changes are held against their scale at the position as the other computation
    shows it, and half of that is what they are everywhere: the positions next to each other are
    too few to tell. Where nothing changed, the last place still may.
    """
    changes = torch.cat([each.changes for each in texts], dim=1)  # (2, N, K)
    power = changes.square().nanmean(-1)  # (2, N)
    typical = power.nanmean()
    quantile = 0.0
    if typical > 0:
        apart = changes.abs() / _scale(power.flip(0), typical)[..., None]
        quantile = float(apart[apart.isfinite()].quantile(QUANTILE))
    found = quantile * _scale(power.nanmean(0), typical)  # (N,)
    found = torch.maximum(found, torch.cat([each.places for each in texts]))
    return list(found.split([len(each.best) for each in texts]))


def _scale(power: Tensor, typical: Tensor) -> Tensor:
    """Of changes whose mean squares are known at a position, unless nan, and everywhere."""
    return ((power.nan_to_num(float(typical)) + typical) / 2).nan_to_num(0.0).sqrt()


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """The position of the first token that is another one, or there in one text only."""
    pairs = zip_longest(expected, got)
    return next((i for i, (left, right) in enumerate(pairs) if left != right), None)


def differences(
    prompt: int,
    expected: Sequence[int],
    got: Sequence[int],
    found: Along,
    resolution: Tensor,
    *,
    bitwise: bool,
    longest: int,
) -> list[Difference]:
    """Every token of a text that is not the reference's.

    Args:
        found: along the text, beside it the expected token where they first differ; where the text
            ends too soon, one token further.
        resolution: of each position, (n,).
        bitwise: whether the two must be the same bit for bit.
        longest: how long the text may get, ended by a token of its own or by the limit.
    """
    first = first_difference(expected, got)
    if first is None:
        return []
    told = []
    for i in range(first, min(len(got), longest)):
        wanted = expected[i] if i == first and i < len(expected) else found.best[i]
        if wanted != got[i]:
            most = 0.0 if bitwise and i == first else float(resolution[i])
            told.append(Difference(prompt, i, wanted, got[i], float(found.margins[i]), most))
    if len(got) > longest:  # no score explains an end
        told.append(Difference(prompt, longest, None, got[longest], math.inf, 0.0))
    elif len(got) < longest:
        told.append(Difference(prompt, len(got), found.best[len(got)], None, math.inf, 0.0))
    return told
