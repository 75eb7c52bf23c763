"""The search space that fits a model, and the influence of each of its sublayers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.families.plain import head_refusal
from layerskip.model.opened_model import OpenedModel
from layerskip.model.whole import Whole
from layerskip.search.space import KINDS, Space

WINDOWS = (256, 1024, 4096)
"""Windows to try for drafts of long texts; shorter ones save nothing more."""
VOCABULARIES = (8, 2)
"""Divisors of the vocabulary to which drafts may be limited."""
POSITIONS = 256
"""Number of tokens on which the influence of sublayers is measured."""
PARTS = ("bits", "experts", "window", "vocabulary", "lookup", "controller")
"""What a search can try besides skipping sublayers."""

Bits = Literal["auto", 8, 4] | None


def parts_of(space: str) -> tuple[str, frozenset[str]]:
    """The kind that a comma-separated list names, and its parts: all if it names none.

    Raises:
        ValueError: an unknown word, or two kinds.
    """
    words = [word.strip() for word in space.split(",")]
    kinds, parts = ([w for w in words if w in names] for names in (KINDS, PARTS))
    unknown = [word for word in words if word not in (*kinds, *parts)]
    if unknown or len(kinds) > 1:
        wrong = repr(unknown[0]) if unknown else " and ".join(kinds)
        raise ValueError(
            f"space must be one of {', '.join(KINDS)}, and any of {', '.join(PARTS)}, divided by "
            f"commas; got {wrong}"
        )
    return kinds[0] if kinds else "sublayer", frozenset(parts or PARTS)


def space_for(
    opened: OpenedModel,
    space: str = "sublayer",
    *,
    bits: Bits = "auto",
    allow_ends: bool = False,
    context: int = 0,
) -> Space:
    """The space to search for a model; `space` as for `parts_of`.

    Automatic bits are 8 if passes are native: only they have 8-bit products that are faster than
    exact ones on every machine. It has windows if texts of `context` tokens are long enough.

    Raises:
        ValueError: as for `parts_of`; or the model runs as a whole.
    """
    if isinstance(opened, Whole):
        raise ValueError(opened.refusal("there are no sublayers to search"))
    kind, parts = parts_of(space)
    if bits == "auto":
        bits = 8 if opened.execution == "native" else None
    trims = "vocabulary" in parts and head_refusal(opened.unembedding) is None
    return Space(
        kind=kind,
        num_layers=opened.num_layers,
        allow_ends=allow_ends,
        bits=bits if "bits" in parts else None,
        read=tuple(opened.read_layers),
        experts=_fewer_experts(opened) if "experts" in parts else (),
        windows=windows_for(opened, context) if "window" in parts else (),
        vocabularies=tuple(opened.vocabulary // part for part in VOCABULARIES) if trims else (),
    )


def typical_context(prompts: Sequence[Tensor], max_new_tokens: int) -> int:
    """The mean number of tokens before the middle of a text's new ones."""
    return round(fmean(prompt.numel() for prompt in prompts) + max_new_tokens / 2) if prompts else 0


def windows_for(opened: OpenedModel, context: int) -> tuple[int, ...]:
    """Those of WINDOWS that skip at least half of a typical text's keys in some layer."""
    widest = max(context if window is None else window for window in opened.windows)
    return tuple(window for window in WINDOWS if 2 * window <= min(widest, context))


def _fewer_experts(opened: OpenedModel) -> tuple[int, ...]:
    """Numbers of experts to try in drafts: half, one, and none if possible."""
    if not opened.mixtures:
        return ()
    top, parallel = opened.mixtures[0].top, opened.mixtures[0].parallel
    fewer = {top // 2, 1, *((0,) if parallel else ())} - ({top} if parallel else {top, 0})
    return tuple(sorted(fewer, reverse=True))


@torch.no_grad()
def influence(opened: OpenedModel, texts: Sequence[Any], positions: int = POSITIONS) -> list[float]:
    """For each sublayer, 1 - the cosine similarity of the hidden states before and after it.

    Takes one pass over the ends of texts. Sublayers with the least influence are the likeliest to
    be dispensable (CLaSp, Chen et al. 2025, arXiv 2505.24196, chooses layers by it).

    Args:
        texts: with `tokens`, (T,) each.
        positions: of all texts together.
    """
    each = max(1, positions // len(texts))
    changes: list[Tensor] = []  # (2L,) each
    for text in texts:
        hidden, step = opened.first_pass(text.tokens.to(opened.device)[None])  # (1, T, H)
        alike = []
        for sublayer in range(opened.num_sublayers):
            before = hidden.clone()
            hidden = opened.run(hidden, step, [sublayer])
            near = F.cosine_similarity(before[0, -each:].float(), hidden[0, -each:].float(), dim=-1)
            alike.append(near.mean())
        changes.append(1.0 - torch.stack(alike))
    found: list[float] = torch.stack(changes).mean(0).clamp_min(0.0).tolist()
    return found
