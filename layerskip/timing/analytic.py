"""The costs of rounds from the bytes that passes read, where nothing has been timed."""

from __future__ import annotations

import math

from layerskip.costs.model import Rates, Traffic
from layerskip.costs.speculation import ContextCosts, CostTable
from layerskip.decoding.engine import DraftOrSkip
from layerskip.decoding.sources import source_of
from layerskip.model.sublayers import Sublayers

_TOKENS = 64  # of a pass up to which a mixture's experts are counted


def traffic_of(model: Sublayers, draft: DraftOrSkip) -> Traffic:
    """What passes of a model and steps of a source read."""
    source = source_of(model, draft)
    prefix = model.weight_bytes()["sublayers"][: source.prefix] if source.prefix else ()
    return Traffic(
        model.pass_bytes(range(1, _TOKENS + 1 if model.mixtures else 2)),
        model.key_bytes(),
        math.fsum(source.step_bytes()),
        source.key_bytes(),
        math.fsum(prefix),
    )


def by_bytes(model: Sublayers, draft: DraftOrSkip) -> ContextCosts:
    """The costs on a machine that is limited by reading weights and keys."""
    traffic = traffic_of(model, draft)
    return ContextCosts(lambda context, rows: Rates().table(traffic, None, context, rows))


def analytic(model: Sublayers, draft: DraftOrSkip, rows: int = 1) -> CostTable:
    """The table of `by_bytes` where no keys are read yet."""
    return Rates().table(traffic_of(model, draft), None, 0, rows)
