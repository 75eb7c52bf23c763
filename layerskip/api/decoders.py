"""Builds a decoder from settings: the draft sources of a model, their costs, and the controller."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from layerskip.api.arguments import sampling_of, warpers
from layerskip.api.drafts import Drafts, choose_drafts
from layerskip.api.settings import DEFAULT_CONTROLLER, LONGEST_DRAFT, Settings
from layerskip.backends.captured import clock
from layerskip.costs.speculation import Costs, CostTable
from layerskip.decoding.controllers import Controller, Fixed, make_controller
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.forced import Forced
from layerskip.model.opened_models import sublayers_of
from layerskip.model.sublayers import Sublayers
from layerskip.timing.cost_tables import by_bytes, cost_tables, stored


def make_decoder(model: Any, settings: Settings, request: Request) -> tuple[Decoder, Costs | None]:
    """Return the engine, ready to run a request on a model, and the costs its controller uses."""
    opened = sublayers_of(model, settings.execution)
    if request.encoded is not None:
        opened = opened.reading(request.encoded)
    sampling, cached = request.law.do_sample, settings.cached
    drafts = choose_drafts(opened, settings, rejection=request.rejection and sampling)
    if settings.enabled and request.law.stateful:
        drafts = replace(drafts, sources=[Forced(request.law.stateful), *drafts.sources])
    if not drafts.sources:
        return Decoder(opened, [], Fixed(), request, max_draft_length=0, cached=cached), None
    costs = costs_of(settings, drafts, request)
    if settings.branches:
        warn_of_branches(drafts, request)
    controller = controller_of(settings, drafts.sources, costs, sampling=sampling)
    longest = settings.max_draft_length or LONGEST_DRAFT
    decoder = Decoder(
        drafts.model, drafts.sources, controller, request, max_draft_length=longest, cached=cached
    )
    return decoder, costs[-1]


def prepare(
    model: Any, settings: Settings, rows: int, context: int, seconds: float, **sampling: Any
) -> CostTable | None:
    """Make copies of weights and measure costs; see `LayerSkipDecoding.prepare`."""
    drafts = choose_drafts(sublayers_of(model, settings.execution), settings)
    if not drafts.sources or settings.controller != DEFAULT_CONTROLLER:
        return None
    request = sample_request(drafts.model, rows, max(2, context), **sampling)
    with torch.no_grad():
        tables = cost_tables(drafts.model, drafts.sources, request, seconds=seconds)
    return tables[-1].at(context, rows)


def sample_request(model: Sublayers, rows: int, max_new_tokens: int, **sampling: Any) -> Request:
    """A request like those to come, on which costs can be measured."""
    ids = torch.ones(rows, 4, dtype=torch.long, device=model.device)  # (B, 4)
    law = law_of(model.model, rows, (), **({"do_sample": False} | sampling))
    keys = [stream_key(0, row) for row in range(rows)]
    return Request(ids, torch.ones_like(ids), max_new_tokens=max_new_tokens, law=law, keys=keys)


def costs_of(
    settings: Settings, drafts: Drafts, request: Request, seconds: float | None = None
) -> Sequence[Costs | None]:
    """Return the costs of each source for a request; None if the controller does not need them.

    They are given, or come from the skip configs; else they are measured when a round first needs
    them, or now if `seconds` to spend are given. If a text depends on its drafts they are computed
    from byte counts instead, since measured costs would let a clock affect the text.
    """
    model, sources, rows = drafts.model, drafts.sources, request.input_ids.shape[0]
    given, skips = [settings.costs], settings.skips
    if settings.costs is None and skips and settings.assistant is None:
        given = [stored(skip, model, rows) for skip in skips]
    tables = [table for table in given if table is not None]
    if len(tables) == len(given) > 0:
        tables = [tables[0]] * (len(sources) - len(tables)) + tables
        pairs = zip(sources, tables, strict=True)
        return [replace(table, draft=0.0) if each.step_free else table for each, table in pairs]
    if settings.controller != DEFAULT_CONTROLLER:
        return [None] * len(sources)
    if request.rejection and request.law.do_sample:
        return [by_bytes(model, source) for source in sources]
    return cost_tables(model, sources, request, seconds=seconds)


def controller_of(
    settings: Settings, sources: Sequence[Source], costs: Sequence[Costs | None], **how: Any
) -> Controller:
    """Return the controller; one given by name is made for these sources and their costs."""
    if not isinstance(settings.controller, str):
        return settings.controller
    return make_controller(
        settings.controller,
        max_draft_length=settings.max_draft_length,
        threshold=settings.threshold,
        adaptive=settings.adaptive,
        costs=[table or CostTable(1.0, (1.0,)) for table in costs],
        priors=[source.prior for source in sources],
        branches=settings.branches,
        now=clock,
        **how,
    )


def warn_of_branches(drafts: Drafts, request: Request) -> None:
    """Warn why second-best tokens are not verified although branches were requested."""
    reason = None
    if not drafts.model.branches:
        reason = "since this model runs as a whole, and its passes have no branches"
    elif all(source.step_free for source in drafts.sources):
        reason = "since no draft takes steps of a model"
    elif request.rejection and request.law.do_sample:
        reason = "under the rejection rule, which accepts one draft per position"
    elif request.law.reads_history:
        reason = "with logits processors that read the text, since it differs between branches"
    if reason is not None:
        warnings.warn(f"branches has no effect {reason}", stacklevel=2)


def law_of(
    model: Any, rows: int, processors: Sequence[Any], *, do_sample: bool, **sampling: Any
) -> Law:
    """Build the target distribution of processors and sampling arguments, as `generate()` does."""
    asked = warpers(**sampling_of(model, **sampling))
    return Law([*processors, *(asked if do_sample else ())], do_sample=do_sample, rows=rows)
