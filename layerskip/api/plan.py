"""What decodes a model's texts: the plan that every public interface decides by, and nothing else.

A skip config describes a draft by the model itself; of several, the controller chooses one in each
round. They share one KV cache and one copy of rounded weights, and verification starts from the
hidden states that the chosen draft shares with the model. Without a skip config, drafts need no
training, search or data (see `layerskip.api.drafts`). Lookups cost nothing, and stay beside named
drafts. Other given sources are added. `expected-gain` finds out during decoding whether they pay.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from layerskip.api.arguments import law_of, sampling_of
from layerskip.api.drafts import automatic_draft, head_bits, heads_of, in_words, skip_label
from layerskip.api.own_exits import Agreement, OwnExits, agreement_of, has_exits, prior_of
from layerskip.api.settings import DEFAULT_CONTROLLER, LONGEST_DRAFT, Settings
from layerskip.backends.captured import clock
from layerskip.cache.library_cache import EncoderStates
from layerskip.config.registry import ADAPTIVE, named
from layerskip.config.skips import SkipConfig
from layerskip.costs.speculation import Costs, CostTable
from layerskip.decoding.controllers import AHEAD, Controller, Fixed, make_controller
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.noise import stream_key
from layerskip.decoding.rules import rule_of
from layerskip.decoding.sources import HEADS, load_drafter, second_model, source_of
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.earlier import earlier_answers
from layerskip.decoding.sources.forced import Forced
from layerskip.decoding.sources.lookup import Lookup
from layerskip.model.opened_model import OpenedModel
from layerskip.model.opened_models import kept_for, sublayers_of
from layerskip.model.published_head import PublishedHead
from layerskip.texts.vocabulary import warn_of_vocabularies
from layerskip.timing.cost_tables import by_bytes, cost_tables, stored
from layerskip.weights.stored import storage_words

_IN_8_BITS = "the model in 8 bits"


@dataclass(frozen=True)
class Plan:
    """What drafts for a model, what that costs, and which controller decides.

    Attributes:
        model: the target; the head that its own draft reads may be trimmed to a vocabulary.
        sources: in the order of their numbers in rounds. Without any, decoding is plain.
        skips: the skip configs of the model's own drafts, which are the last sources.
        reasons: why the model itself has no better drafts: by what it could draft with, in words.
        explicit: the settings that name these drafts, so that nothing is chosen again.
        exits: what the model's own exits have answered, if they are asked (see `OwnExits`).
        advice: how to load the model so that it drafts in 8 bits; None if that is not possible, or
            if it has other drafts than lookups.
    """

    model: OpenedModel
    settings: Settings
    sources: Sequence[Source] = ()
    skips: Sequence[SkipConfig] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    explicit: Mapping[str, Any] = field(default_factory=dict)
    exits: Agreement | None = None
    advice: str | None = None

    @property
    def outdated(self) -> bool:
        """Whether exits that are asked have answered since."""
        asked = any(isinstance(source, OwnExits) for source in self.sources)
        return asked and self.exits is not None and self.exits.done

    @property
    def names(self) -> list[str]:
        """The names of the sources in records."""
        return [source.name for source in self.sources]

    @property
    def words(self) -> list[str]:
        """A description of each source, with the memory taken by weights copied for it."""
        lines = [source.words for source in self.sources]
        first = len(lines) - len(self.skips)
        for number, skip in enumerate(self.skips, first):
            lines[number] = skip_label(skip, skip.resolve(self.model.num_layers))
            if len(self.skips) > 1:
                lines[number] = f"{self.sources[number].name}: {lines[number]}"
            if nbytes := self.model.weights.nbytes(skip):
                lines[number] += f" ({in_words(nbytes)} of memory)"
        return lines

    @property
    def summary(self) -> str:
        """The sources, and why there are no better ones, in a line."""
        return "; ".join([", or ".join(self.words) or "none", *self._reasons])

    @property
    def _reasons(self) -> list[str]:
        words = [f"no drafts by {what}: {why}" for what, why in self.reasons.items()]
        return words if self.exits is None else [*words, f"its own exits: {self.exits.words}"]

    @property
    def hint(self) -> str:
        """What finds the best exit, if the name says that the model was trained to exit early.

        The published LayerSkip checkpoints have such names; configurations do not say it.
        """
        model, name = self.model, getattr(self.model.model, "name_or_path", "")
        named = "layerskip" in PurePath(name).name.lower() and has_exits(model)
        drafting = any(skip.skipped(model.num_layers) for skip in self.skips)
        if drafting or not (named and self.settings.enabled):
            return ""
        return f"trained to exit early? layerskip check {name} --exits"

    def explain(self) -> str:
        """List what drafts, and why nothing better does; one item per line."""
        model, settings = self.model, self.settings
        lines = [f"passes: {model.describe()}"]
        if words := storage_words(model.model):
            lines.append(words)
        if each := model.cache_bytes(1000):
            lines.append(f"keys and values: {in_words(round(each))} per 1,000 tokens of text")
        if not settings.enabled:
            return "\n".join([*lines, "drafts: none, as enabled is False"])
        pairs = zip(self.words, self.sources, strict=True)
        lines += [f"drafts: {words}{self._price(source)}" for words, source in pairs]
        lines += [f"controller: {_controller_words(settings)}", *self._reasons]
        if not model.exact:
            native = model.execution == "native"
            why = "the library computes recurrent layers" if native else "passes are not native"
            lines.append(
                f"texts equal those of plain decoding up to near-ties: {why}, and libraries sum in "
                "another order when a batch has other sizes"
            )
        return "\n".join([*lines, *filter(None, [self.hint])])

    def _price(self, source: Source) -> str:
        """What drafting costs by the bytes that it reads, in words; empty for step-free sources."""
        if source.step_free:
            return ""
        cost = by_bytes(self.model, source).at(0).draft
        what = f"{source.per_step} tokens" if source.per_step > 1 else "a token"
        return f"; by the bytes it reads, drafting {what} costs {cost:.2f} plain steps"

    def warn(self, request: Request) -> None:
        """Warn of idle branches, and once for a model that would draft better, loaded otherwise."""
        told = kept_for(self.model.model)
        if self.advice is not None and "advice" not in told:
            told["advice"] = self.advice
            warnings.warn(f"lookups are the only drafts: {self.advice}", stacklevel=2)
        reason = None
        if not self.settings.branches:
            return
        if not self.model.branches:
            reason = "since this model runs as a whole, and its passes have no branches"
        elif all(source.step_free for source in self.sources):
            reason = "since no draft takes steps of a model"
        elif not request.rule.shares_noise:
            reason = f"under the {request.rule.name} rule, which arranges drafts in its own way"
        elif request.law.reads_history:
            reason = "with logits processors that read the text, since it differs between branches"
        if reason is not None:
            warnings.warn(f"branches has no effect {reason}", stacklevel=2)

    def request(self, rows: int, max_new_tokens: int, **sampling: Any) -> Request:
        """A request like those to come, on which costs can be measured."""
        ids = torch.ones(rows, 4, dtype=torch.long, device=self.model.device)  # (B, 4)
        do_sample = sampling.pop("do_sample", False)
        law = law_of({"do_sample": do_sample, **sampling_of(self.model.model, **sampling)}, rows)
        keys = [stream_key(0, row) for row in range(rows)]
        return Request(ids, torch.ones_like(ids), max_new_tokens=max_new_tokens, law=law, keys=keys)

    def costs(self, request: Request, seconds: float | None = None) -> Sequence[Costs | None]:
        """Return the costs of each source; None if the controller does not need them.

        They are given, or come from the skip configs; else they are measured when a round first
        needs them, or now if `seconds` to spend are given. If a text depends on its drafts they are
        computed from byte counts instead, since measured costs would let a clock affect the text.
        """
        model, sources, settings = self.model, self.sources, self.settings
        given, rows = [settings.costs], request.input_ids.shape[0]
        if settings.costs is None and settings.skips and settings.assistant is None:
            given = [stored(skip, model, rows) for skip in settings.skips]
        tables = [table for table in given if table is not None]
        if len(tables) == len(given) > 0:
            tables = [tables[0]] * (len(sources) - len(tables)) + tables
            pairs = zip(sources, tables, strict=True)
            return [replace(table, draft=0.0) if each.step_free else table for each, table in pairs]
        if settings.controller != DEFAULT_CONTROLLER:
            return [None] * len(sources)
        if not request.rule.shares_noise:
            return [by_bytes(model, source) for source in sources]
        return cost_tables(model, sources, request, seconds=seconds)

    def controller(
        self, request: Request, seconds: float | None = None, ahead: float = AHEAD
    ) -> tuple[Controller, Costs | None]:
        """Return the controller of a request, and the costs of the last source.

        Args:
            seconds: time to measure costs now.
            ahead: see `ExpectedGain`.
        """
        settings = self.settings
        if not settings.enabled or not self.sources:
            return Fixed(), None
        costs = self.costs(request, seconds)
        self.warn(request)
        if not isinstance(settings.controller, str):
            return settings.controller, costs[-1]
        made = make_controller(
            settings.controller,
            max_draft_length=settings.max_draft_length,
            threshold=settings.threshold,
            adaptive=settings.adaptive,
            classifier=settings.classifier,
            costs=[table or CostTable(1.0, (1.0,)) for table in costs],
            priors=[source.prior for source in self.sources],
            sampling=request.law.do_sample,
            ahead=ahead,
            branches=settings.branches,
            now=clock,
            reads_confidence=not self.model.backend.ahead,
        )
        return made, costs[-1]

    def decoder(self, request: Request) -> tuple[Decoder, Costs | None]:
        """Return the engine, ready to run a request, and the costs its controller uses."""
        plan = self
        if self.settings.enabled and request.law.stateful:
            plan = replace(self, sources=[Forced(request.law.stateful), *self.sources])
        controller, costs = plan.controller(request)
        longest = (self.settings.max_draft_length or LONGEST_DRAFT) if plan.sources else 0
        decoder = Decoder(
            plan.model,
            plan.sources,
            controller,
            request,
            max_draft_length=longest,
            cached=self.settings.cached,
        )
        return decoder, costs

    def prepare(self, rows: int, context: int, seconds: float, **sampling: Any) -> CostTable | None:
        """Make copies of weights and measure costs; see `LayerSkipDecoding.prepare`."""
        request = self.request(rows, max(2, context), **sampling)
        with torch.no_grad():
            costs = self.costs(request, seconds)[-1] if self.sources else None
        return None if costs is None else costs.at(context, rows)


def open_plan(
    model: Any, settings: Settings, *, sampling: bool = True, encoded: EncoderStates | None = None
) -> Plan:
    """Decide what decodes a model's texts, and make the copies of weights that drafts need.

    It is decided once for a model and settings, and kept as long as both live and the model stays
    as it is; not with a second model that the caller has loaded, nor for an encoder-decoder.

    Args:
        sampling: whether tokens are drawn. Under the rejection rule texts then depend on their
            drafts, so drafts must not depend on the free memory.
        encoded: an encoder's output for the texts.

    Raises:
        ValueError: a source does not fit the model.
    """
    opened = sublayers_of(model, settings.execution)
    if encoded is not None:
        opened = opened.reading(encoded)
    rejection = not rule_of(settings.acceptance, sampling=sampling).independent
    if not settings.enabled:
        return Plan(opened, settings)
    earlier = kept_for(opened.model).setdefault("earlier", WeakKeyDictionary())
    if settings not in earlier:  # once, however often a plan is made
        where, most = settings.remember, settings.remember_tokens
        earlier[settings] = earlier_answers(where, most, settings.tokenizer, opened.vocabulary)
    if opened.encoder or isinstance(settings.assistant, nn.Module):  # that may change unnoticed
        return _decide(opened, settings, earlier[settings], rejection)
    plans = kept_for(opened.model).setdefault("plans", WeakKeyDictionary())
    made: dict[bool, Plan] = plans.setdefault(settings, {})
    kept = made.get(rejection)
    # The model was opened again, or its exits have answered.
    if kept is None or kept.model.backend is not opened.backend or kept.outdated:
        # Of copies, since what is kept must keep neither the model nor the settings alive.
        of = copy(opened).weak(), copy(settings)
        kept = made[rejection] = _decide(*of, earlier[settings], rejection)
    return replace(kept, model=kept.model.strong(), settings=settings)


def _decide(
    model: OpenedModel, settings: Settings, earlier: Sequence[Source], rejection: bool
) -> Plan:
    """Make the draft sources of a model, including copies of weights that they need."""
    lookup = _lookup(settings, rejection)
    second, assistant = _second_model(model, settings, rejection)
    named_sources = [*earlier, *(_source(each, model, second) for each in settings.sources)]
    own, heads, skips = list[Source](), list[Source](), settings.skips
    reasons, advice, exits = dict[str, str](), None, None
    if rejection and any(each.remembers for each in named_sources):
        named_sources = [each for each in named_sources if not each.remembers]
        reasons["earlier answers"] = "under the rejection rule, texts depend on their drafts"
    if settings.automatic:
        chosen = automatic_draft(model, settings.draft_memory, by_memory=not rejection)
        heads += heads_of(model, chosen)
        skips = () if chosen.skip is None else (chosen.skip,)
        if chosen.head_reason is not None:
            reasons["the checkpoint's own head"] = chosen.head_reason
        if chosen.reason is not None and settings.draft_memory != 0:
            reasons[_IN_8_BITS] = chosen.reason
        others = second or heads or any(not each.remembers for each in named_sources)
        asks = not (others or skips or rejection or settings.draft_memory == 0)
        if asks and has_exits(model):
            exits = agreement_of(model)
            best = exits.best(model) if exits.done else None
            skips = () if best is None else (SkipConfig.early_exit(best),)
            heads += [] if exits.done else [OwnExits(model)]
        lookups_alone = lookup is not None and not (others or skips)
        advice = chosen.reason if chosen.loading and lookups_alone else None
    if skips and settings.draft_vocabulary is not None:
        model = model.trimmed(settings.draft_vocabulary)
    skips = tuple(_without_origin(model, skip) for skip in skips)
    for number, skip in enumerate(skips, 1):
        own.append(source := source_of(model, skip))
        if len(skips) > 1:
            source.name = f"{source.name} {number}"  # type: ignore[misc]
        if not rejection and skip == SkipConfig.early_exit(skip.exit_layer or 1):
            source.prior = prior_of(model, skip.exit_layer) or source.prior
    explicit = {
        "skip": [*skips] or None,
        "lookup": lookup or False,
        "remember": "off",  # the source is among those named
        "sources": [*named_sources, *heads],
        "assistant": assistant,
        "draft_memory": None if skips else 0,
        "execution": settings.execution,
    }
    looked_up = [] if lookup is None else [lookup]
    sources = [*looked_up, *named_sources, *second, *heads, *own]
    timed = [source.name for source in sources if source.by_clock]
    if rejection and timed:
        raise ValueError(
            f"drafts of {timed[0]} depend on timing, and so would the text with acceptance "
            f"{settings.acceptance!r}; use 'coupled'"
        )
    return Plan(model, settings, sources, skips, reasons, explicit, exits, advice)


def _lookup(settings: Settings, rejection: bool) -> Lookup | None:
    """Return the source of lookups: beside all other drafts, unless they are turned off.

    Beside named drafts under the rejection rule, where texts depend on drafts, they must be asked
    for, so that a skip config without a word about lookups keeps its texts.
    """
    asked = settings.lookup
    if asked is None:
        asked = settings.automatic or not rejection
    return Lookup() if asked is True else asked or None


def _source(given: Source | str, model: OpenedModel, second: list[Source]) -> Source:
    """Return a source, made for the opened model if it is given by its name.

    It may take over the second model, which then drafts in no other way.
    """
    if isinstance(given, Source):
        return given
    make = named("source", given)
    takes, offered = signature(make).parameters, dict[str, Any](model=model)
    if "assistant" in takes:
        offered["assistant"] = second.pop() if second else None
    made: Source = make(**{name: value for name, value in offered.items() if name in takes})
    if not isinstance(made, Source):
        raise ValueError(f"the source {given} must make a layerskip.Source, got {made!r}")
    return made


def _without_origin(model: OpenedModel, skip: SkipConfig) -> SkipConfig:
    """Return a skip config that fits the model, without where it was searched.

    Warns if that was another model; what is returned does not warn again.

    Raises:
        ValueError: it does not fit the model.
    """
    own_hash = model.weights.fingerprint() if skip.model_hash else None
    name = getattr(model.model, "name_or_path", None) or None
    foreign = skip.matches(name, own_hash) is False
    origin = f"this skip config was searched on {skip.model or 'another model'}, not on {name}"
    try:
        skip.resolve(model.num_layers)
    except ValueError as error:
        raise ValueError(f"{error}; {origin}" if foreign else str(error)) from error
    if foreign:
        warnings.warn(f"{origin}: the output stays exact, but it may be slower", stacklevel=3)
    return replace(skip, model=None, model_hash=None)


def _second_model(
    target: OpenedModel, settings: Settings, rejection: bool
) -> tuple[list[Source], Any]:
    """Return the second model as a source, limited to the draft vocabulary, and the model.

    One given by its folder is loaded once for a target, and kept with it.
    """
    assistant, tokens = settings.assistant, settings.draft_vocabulary
    if assistant is None:
        return [], None
    if isinstance(assistant, str | os.PathLike):
        key, kept = (os.fspath(assistant), target.dtype, target.device), kept_for(target.model)
        if key not in kept:
            kept[key] = load_drafter(assistant, dtype=target.dtype, device=target.device)
        assistant = kept[key]
    if isinstance(assistant, HEADS):
        bits = None
        # Under the rejection rule texts depend on their drafts, and must not on the free memory.
        if isinstance(assistant, PublishedHead) and not rejection:
            bits = head_bits(target, assistant, settings.draft_memory)
        return [second_model(target, assistant, tokens, bits)], assistant
    opened = sublayers_of(assistant, settings.execution)
    if opened.encoder:
        opened = opened.reading_of(target)
    source = second_model(target, opened, tokens)
    if isinstance(source, Assistant):
        warn_of_vocabularies(target.model, opened.model)
    return [source], assistant


def _controller_words(settings: Settings) -> str:
    """Describe the controller, and those settings that differ from its defaults."""
    how = settings.controller
    if not isinstance(how, str):
        return type(how).__name__
    names = ("max_draft_length", "threshold")
    given = {name: getattr(settings, name) for name in names}
    given |= ADAPTIVE | settings.adaptive if how == "adaptive-threshold" else {}
    words = [f"{name} {value}" for name, value in given.items() if value is not None]
    return ", ".join([how, *words])
