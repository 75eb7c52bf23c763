"""The settings of a decoding: checked, and made into a decoder for a model and a request."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.observed import LaterCosts
from layerskip.costs.speculation import Costs, CostTable
from layerskip.decoding.controllers import Controller, completed, make_controller
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.known import KnownTexts
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.sources import second_model, source_of
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.forced import Forced
from layerskip.decoding.sources.lookup import Lookup
from layerskip.decoding.sources.official import Official
from layerskip.defaults import AutomaticDraft, automatic_draft, in_words, warn_of_loading
from layerskip.model.assistants import load_assistant
from layerskip.model.opening import sublayers_of
from layerskip.model.sublayers import Sublayers
from layerskip.model.whole import Whole
from layerskip.requests import sampling_of, warpers
from layerskip.timing.analytic import by_bytes
from layerskip.timing.tables import cost_tables, stored
from layerskip.vocabulary import warn_of_vocabularies

DEFAULT_CONTROLLER = "expected-gain"
LONGEST_DRAFT = 20  # the default of `max_draft_length`


class Settings:
    """What `LayerSkipDecoding` is given, whose docstring says what each means."""

    def __init__(
        self,
        skip: SkipConfig | str | os.PathLike[str] | None = None,
        *,
        lookup: bool | Lookup | None = None,
        assistant: Any = None,
        sources: Sequence[Source] = (),
        controller: str | Controller | None = None,
        max_draft_length: int | None = None,
        threshold: float | None = None,
        acceptance: str | None = None,
        branches: bool | None = None,
        enabled: bool | None = None,
        draft_memory: int | None = None,
        draft_vocabulary: Iterable[int] | None = None,
        seed: int | None = None,
        seeds: Sequence[int] | None = None,
        costs: CostTable | None = None,
        execution: str = "auto",
        known: KnownTexts | None = None,
        progress: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if skip is not None and not isinstance(skip, SkipConfig):
            skip = SkipConfig.load(skip)
        if seed is not None and seeds is not None:
            raise ValueError("give seed (one for the batch) or seeds (one per row), not both")
        for given_seed in (seed, *(() if seeds is None else seeds)):
            if given_seed is not None and not hasattr(given_seed, "__index__"):
                raise TypeError(f"a seed must be an integer, got {given_seed!r}")
        stored = (skip and skip.decoding) or DecodingOptions()
        given = DecodingOptions(  # validates
            controller=controller if isinstance(controller, str) else None,
            max_draft_length=max_draft_length,
            threshold=threshold,
            acceptance=acceptance,  # type: ignore[arg-type]
            enabled=enabled,
            draft_vocabulary=draft_vocabulary,  # type: ignore[arg-type]
            lookup=lookup if not isinstance(lookup, Lookup) else None,
            branches=branches,
        )
        self.skip = skip
        self.controller: str | Controller = stored.controller or DEFAULT_CONTROLLER
        if controller is not None:
            self.controller = controller if isinstance(controller, str) else completed(controller)
        self.max_draft_length = given.max_draft_length or stored.max_draft_length
        self.threshold = stored.threshold if threshold is None else threshold
        self.acceptance = given.acceptance or stored.acceptance or "coupled"
        # those of a skip config belong to its controller
        own = self.controller == DEFAULT_CONTROLLER and stored.branches
        self.branches = bool(own if branches is None else branches)
        wanted = stored.enabled if enabled is None else enabled
        looks_up = stored.lookup if lookup is None else lookup
        self.lookup = Lookup() if looks_up is True else looks_up or None
        self.enabled = wanted is not False
        self.assistant = assistant
        self.sources = tuple(sources)
        self.automatic = skip is None
        if self.automatic and lookup is None:
            self.lookup = Lookup()
        if draft_memory is not None and not self.automatic:
            warnings.warn("draft_memory has no effect where drafts are named", stacklevel=2)
        self.draft_memory = draft_memory
        self.draft_vocabulary = given.draft_vocabulary or stored.draft_vocabulary
        self.seed = seed
        self.seeds = None if seeds is None else tuple(seeds)
        self.costs = costs
        self.execution = execution
        self.known = known
        self.progress = progress
        self.clock = clock

    def __repr__(self) -> str:
        how = self.controller if isinstance(self.controller, str) else type(self.controller)
        return f"LayerSkipDecoding({self.skip!r}, controller={how!r})"

    def decoder(self, model: Any, request: Request) -> tuple[Decoder, Costs | None]:
        """The engine, ready to run a request on a model, and the costs its controller uses."""
        opened = sublayers_of(model, self.execution)
        if isinstance(opened, Whole) and request.encoded is not None:
            opened = opened.reading(request.encoded)
        sampling = request.law.do_sample
        if not self.enabled:
            return self._plain(opened, request), None
        opened, sources = self._sources(opened, rejection=request.rejection and sampling)
        if request.law.stateful:
            sources.insert(0, Forced(request.law.stateful))
        if not sources:
            return self._plain(opened, request), None
        costs = self._tables(opened, sources, request)
        if self.branches:
            warn_of_branches(opened, sources, request)
        controller = self._control(sources, costs, sampling=sampling)
        longest = self.max_draft_length or LONGEST_DRAFT
        decoder = Decoder(
            opened, sources, controller, request, max_draft_length=longest, known=self.known
        )
        return decoder, costs[-1]

    def _control(
        self, sources: Sequence[Source], costs: Sequence[Costs | None], **how: Any
    ) -> Controller:
        """The controller; one that is given by name, for those sources."""
        if not isinstance(self.controller, str):
            return self.controller
        return make_controller(
            self.controller,
            max_draft_length=self.max_draft_length,
            threshold=self.threshold,
            costs=[table or CostTable(1.0, (1.0,)) for table in costs],
            priors=[source.prior for source in sources],
            branches=self.branches,
            now=time.perf_counter,
            **how,
        )

    def _sources(self, opened: Sublayers, *, rejection: bool) -> tuple[Sublayers, list[Source]]:
        """The model, perhaps with a draft vocabulary, and its sources, the own draft last."""
        sources: list[Source] = [] if self.lookup is None else [self.lookup]
        sources += self.sources
        if self.assistant is not None:
            sources.append(self._assistant(opened))
        own = self._own(opened, by_memory=not rejection)
        if sources == [self.lookup]:
            warn_of_loading(opened, own)
        if own.skip is not None:
            skip = own.skip.resolve(opened.num_layers)
            own_hash = opened.weights.fingerprint() if skip.model_hash else None
            skip.warn_if_foreign(getattr(opened.model, "name_or_path", None) or None, own_hash)
            if self.draft_vocabulary is not None:
                opened = opened.trimmed(self.draft_vocabulary)
            opened.weights.blocks(skip)  # raises here, before anything is decoded
            sources.append(source_of(opened, skip))
        return opened, sources

    def _own(self, opened: Sublayers, *, by_memory: bool) -> AutomaticDraft:
        """The model's own draft, or why it has none."""
        if not self.automatic:
            return AutomaticDraft(self.skip, None)
        return automatic_draft(opened, self.draft_memory, by_memory=by_memory)

    def explain(self, model: Any) -> str:
        """The sources of drafts for a model, and why there are no better ones; a line each."""
        opened = sublayers_of(model, self.execution)
        lines = [f"passes: {opened.describe()}"]
        if each := opened.cache_bytes(1000):
            lines.append(f"keys and values: {in_words(round(each))} for 1,000 tokens of a text")
        if not self.enabled:
            return "\n".join([*lines, "drafts: none, as enabled is False"])
        if self.lookup is not None:
            lines.append("drafts: looked up in the text so far, for nothing")
        lines += [f"drafts: by {type(source).__name__}" for source in self.sources]
        if self.assistant is not None:
            official = isinstance(self._assistant(opened), Official)
            what = "the model's official assistant" if official else "a second model"
            lines.append(f"drafts: by {what}")
        own = self._own(opened, by_memory=self.acceptance == "coupled")
        if own.skip is not None:
            nbytes = in_words(opened.weights.nbytes(own.skip))
            lines.append(f"drafts: by the model itself, {own.skip!r}, whose weights take {nbytes}")
        elif own.reason is not None:
            lines.append(f"no drafts by the model in 8 bits: {own.reason}")
        if not opened.exact:
            lines.append(
                "texts equal plain decoding's up to near-ties: passes are not native, and "
                "libraries sum in another order beside other tokens"
            )
        return "\n".join(lines)

    def prepare(
        self,
        model: Any,
        *,
        rows: int = 1,
        context: int = 0,
        seconds: float = 2.0,
        **sampling: Any,
    ) -> CostTable | None:
        """Make copies and measure costs now instead of in the first calls.

        Args:
            rows: of later batches.
            context: tokens that they get to; behind long ones costs are measured, too.
            seconds: about how long measuring may take.
            sampling: do_sample, temperature, top_k and top_p of later calls, as for `decode`.

        Returns:
            The costs there, of the last source; None if there is none, or they are not needed.
        """
        opened = sublayers_of(model, self.execution)
        opened, sources = self._sources(opened, rejection=False)
        if not sources or self.controller != DEFAULT_CONTROLLER:
            return None
        ids = torch.ones(rows, 4, dtype=torch.long, device=opened.device)  # (B, 4)
        law = law_of(opened.model, rows, (), **({"do_sample": False} | sampling))
        keys = [stream_key(0, row) for row in range(rows)]
        most = max(2, context)
        request = Request(ids, torch.ones_like(ids), max_new_tokens=most, law=law, keys=keys)
        with torch.no_grad():
            found = cost_tables(opened, sources, request, seconds=seconds)
        return found[-1].at(context, rows)

    def _assistant(self, target: Sublayers) -> Assistant | Official:
        """The second model as a source, limited to the draft vocabulary."""
        if isinstance(self.assistant, str | os.PathLike):
            found = load_assistant(self.assistant, dtype=target.dtype)
            self.assistant = found.to(target.device)
        opened = sublayers_of(self.assistant, self.execution)
        if isinstance(opened, Whole) and opened.both:
            opened = opened.reading_of(target)
        found = second_model(target, opened, self.draft_vocabulary)
        if isinstance(found, Assistant):
            warn_of_vocabularies(target.model, opened.model)
        return found

    def _plain(self, model: Sublayers, request: Request) -> Decoder:
        nothing = make_controller("fixed", costs=CostTable(1.0, (1.0,)))
        return Decoder(model, [], nothing, request, max_draft_length=0, known=self.known)

    def _brought(self, model: Sublayers, rows: int) -> CostTable | None:
        """The costs that are given, or those of the skip config."""
        if self.costs is None and self.skip is not None and self.assistant is None:
            return stored(self.skip, model, rows)
        return self.costs

    def _tables(
        self, model: Sublayers, sources: Sequence[Source], request: Request
    ) -> Sequence[Costs | None]:
        """The costs of each source; None where the controller does not need them."""
        brought = self._brought(model, request.input_ids.shape[0])
        if brought is not None:
            free = replace(brought, draft=0.0)
            return [free if source.known else brought for source in sources]
        if self.controller != DEFAULT_CONTROLLER:
            return [None] * len(sources)
        if request.rejection and request.law.do_sample:
            # measured costs would let a clock decide the text
            rows = request.input_ids.shape[0]
            return [by_bytes(model, source, rows) for source in sources]
        # behind the first token, which need not wait for it
        make = cache(lambda: cost_tables(model, sources, request))
        return [LaterCosts(make, number) for number in range(len(sources))]

    def row_seeds(self, rows: int, do_sample: bool) -> list[tuple[int, int]]:
        """(seed, row) of each row's noise stream; none for greedy decoding."""
        if not do_sample:
            return []
        if self.seeds is not None:
            if len(self.seeds) != rows:
                raise ValueError(f"seeds must hold one seed per row, {rows}; got {len(self.seeds)}")
            return [(seed, 0) for seed in self.seeds]
        seed = self.seed
        if seed is None:
            seed = int(torch.randint(2**31, ()))
        return [(seed, row) for row in range(rows)]


def warn_of_branches(
    opened: Sublayers, sources: Sequence[Source], request: Request | None = None
) -> None:
    """Say where second-best tokens are not verified, though they were asked for."""
    law = None if request is None else request.law
    reason = None
    if not opened.branches:
        reason = "as this model runs whole: a pass of it has no branches"
    elif all(source.known for source in sources):
        reason = "as no draft takes steps of a model"
    elif request is not None and request.rejection and request.law.do_sample:
        reason = "under the rejection rule, which accepts one draft of a place"
    elif law is not None and law.reads_history:
        reason = "beside logits processors that read the text, each branch of which is another one"
    if reason is not None:
        warnings.warn(f"branches has no effect {reason}", stacklevel=2)


def law_of(
    model: Any, rows: int, processors: Sequence[Any], *, do_sample: bool, **sampling: Any
) -> Law:
    """The law of processors and sampling arguments, as `model.generate()` makes it."""
    own = warpers(**sampling_of(model, **sampling)) if do_sample else ()
    return Law([*processors, *own], do_sample=do_sample, rows=rows)
