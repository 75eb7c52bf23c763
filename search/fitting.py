"""The space that fits a live model: its layers, precisions and experts, and its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.model.sublayers import Sublayers
from layerskip.search.space import Space

WINDOWS = (256, 1024, 4096)
"""Windows that drafts are searched with, where texts are long; shorter ones save nothing more."""

Bits = Literal["auto", 8, 4] | None


def space_for(
    model: Any,
    execution: str,
    first: Mapping[str, SkipConfig],
    *,
    kind: str,
    bits: Bits = "auto",
    allow_ends: bool = False,
    cost: Mapping[str, Any] | None = None,
    context: int = 0,
) -> Space:
    """The space to search, around the config to try first that is healed, if one is.

    Its low precision is that config's, or as asked; "auto" is what a given `cost` has prices for,
    else 8 where passes are native: only they have products of 8 bits that are faster than exact
    ones on every machine. It has windows where texts of `context` tokens are long enough.

    Raises:
        ValueError: another precision was asked for than that of the healed config.
    """
    head: Literal[8, 4] | None = None
    trained = None
    for name, skip in first.items():
        if skip.trained is None or skip.low is None:
            continue
        low, trained = skip.low, skip.trained
        if bits not in ("auto", low.bits):
            raise ValueError(
                f"skip config {name} is healed in {low.bits} bits, and {bits or 'no'} bits were "
                "asked for; leave them out"
            )
        bits, head = low.bits, None if isinstance(low.head, bool) else low.head
        break
    if bits == "auto" and cost is not None:
        bits = cost.get("low_bits")
    opened = Sublayers(model, execution)
    if bits == "auto":
        bits = 8 if opened.execution == "native" else None
    return Space(
        kind=kind,
        num_layers=opened.num_layers,
        allow_ends=allow_ends,
        bits=bits,
        head=head,
        trained=trained,
        read=tuple(opened.read_layers),
        experts=_fewer_experts(opened),
        windows=windows_for(opened, context),
    )


def typical_context(prompts: Sequence[Tensor], max_new_tokens: int) -> int:
    """Tokens before the middle of a text's new ones, on average."""
    return round(fmean(prompt.numel() for prompt in prompts) + max_new_tokens / 2) if prompts else 0


def windows_for(opened: Sublayers, context: int) -> tuple[int, ...]:
    """Of WINDOWS, those that leave out at least half of a typical text's keys in some layer."""
    widest = max(context if window is None else window for window in opened.windows)
    return tuple(window for window in WINDOWS if 2 * window <= min(widest, context))


def _fewer_experts(opened: Sublayers) -> tuple[int, ...]:
    """The numbers of experts that drafts are searched with: half, one, and none if they may."""
    if not opened.mixtures:
        return ()
    top, beside = opened.mixtures[0].top, opened.mixtures[0].beside
    fewer = {top // 2, 1, *((0,) if beside else ())} - ({top} if beside else {top, 0})
    return tuple(sorted(fewer, reverse=True))
