"""The costs that a search prices drafts with: measured, or a study's; prices nothing itself."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.decoding.laws import Law
from layerskip.model.sublayers import Sublayers
from layerskip.timing import sublayers as costs
from layerskip.timing.tables import machine

ATTEMPTS = 3
PATIENCE = 40.0
"""So many measurements are made before a busy machine's are taken, or for so many seconds."""


def measured(
    model: Sublayers,
    prompts: Sequence[Tensor],
    law: Law,
    low: SkipConfig | None,
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """The costs here, measured again where the machine was busy; see `timing.sublayers.measure`."""
    started = time.perf_counter()
    attempts = 0
    while attempts < ATTEMPTS and (not attempts or time.perf_counter() - started < PATIENCE):
        attempts += 1
        found = costs.measure(model, prompts, law=law, low=low, progress=progress)
        if not costs.disturbed(found):
            return found
    warnings.warn(
        f"other work on this machine disturbed the costs, {attempts} times: what the search "
        "finds may be slower than it says; search again when the machine is quiet, under "
        "another study name",
        stacklevel=3,
    )
    return found


def check_place(there: Mapping[str, Any] | None, model: Sublayers) -> None:
    """Refuse a study's costs that were measured elsewhere; warn where no one knows.

    Raises:
        ValueError: they were measured on other hardware, or in another way.
    """
    here = machine(model)
    if there is None:
        warnings.warn(
            "the study does not say where its costs were measured (an older version made it): "
            "they are taken to hold here",
            stacklevel=3,
        )
        return
    differing = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if differing:
        raise ValueError(
            "the study's trials were priced with costs measured with "
            + ", ".join(f"{name} {there.get(name)}" for name in differing)
            + "; here it is "
            + ", ".join(str(here.get(name)) for name in differing)
            + ". Go on there, or choose another study name"
        )
