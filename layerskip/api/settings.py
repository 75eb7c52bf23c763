"""The checked settings of a decoding."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from inspect import Parameter, Signature, signature
from typing import Any

import torch

from layerskip.config.skips import DecodingOptions, SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.cached_texts import CachedTexts
from layerskip.decoding.controllers import Controller, completed
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.lookup import Lookup
from layerskip.files import schema

Skips = SkipConfig | str | os.PathLike[str]
"""A skip config, or the path of its file."""

DEFAULT_CONTROLLER = "expected-gain"
LONGEST_DRAFT = 20  # the default of `max_draft_length`
OPTIONS = [each.name for each in fields(DecodingOptions)]


class Settings:
    """The arguments of `LayerSkipDecoding`, whose docstring explains them.

    `options` are those of `DecodingOptions`; what is not given comes from the skip config.
    """

    controller: str | Controller
    max_draft_length: int | None
    threshold: float | None
    adaptive: dict[str, float]
    classifier: str | None
    acceptance: str
    branches: bool
    enabled: bool
    lookup: bool | Lookup | None
    remember: str | None
    remember_tokens: int | None
    draft_vocabulary: Sequence[int] | None

    def __init__(
        self,
        skip: Skips | Sequence[Skips] | None = None,
        *,
        lookup: bool | Lookup | None = None,
        tokenizer: Any = None,
        assistant: Any = None,
        sources: Sequence[Source | str] = (),
        controller: str | Controller | None = None,
        draft_memory: int | None = None,
        seed: int | None = None,
        seeds: Sequence[int] | None = None,
        costs: CostTable | None = None,
        execution: str = "auto",
        cached: CachedTexts | None = None,
        progress: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] | None = None,
        **options: Any,
    ) -> None:
        self.skips = _loaded(skip)
        if seed is not None and seeds is not None:
            raise ValueError("give seed (one for the batch) or seeds (one per row), not both")
        if costs is not None and not isinstance(costs, CostTable):
            raise TypeError(f"costs must be a CostTable (see layerskip.prepare), got {costs!r}")
        if not isinstance(seeds, Iterable | None):
            raise TypeError(f"seeds must be a list of integers, one for each row, got {seeds!r}")
        self.seed, self.seeds = seed, None if seeds is None else tuple(seeds)
        several = not isinstance(sources, Source | str) and isinstance(sources, Iterable)
        given: Any = sources if several else [sources]
        self.sources: tuple[Source | str, ...] = tuple(given)
        if not all(isinstance(each, Source | str) for each in self.sources):
            raise TypeError(
                f"sources must be a list of layerskip.Source objects or names, got {sources!r}"
            )
        for each in (seed, *(self.seeds or ())):
            schema.optional(schema.integer())(each, "a seed")
        stored = (self.skips and self.skips[0].decoding) or DecodingOptions()
        options |= {"controller": controller if isinstance(controller, str) else None}
        options |= {"lookup": None if isinstance(lookup, Lookup) else lookup}
        asked = DecodingOptions(**options)  # validates
        if stored.remember not in (None, "off", "memory"):
            raise ValueError(
                "a skip config may set remember to off or memory, since no file decides where "
                f"answers are written; got {stored.remember!r}, which only you can ask for"
            )
        for name in OPTIONS:
            value = getattr(asked, name)
            setattr(self, name, getattr(stored, name) if value is None else value)
        if controller is not None and not isinstance(controller, str):
            self.controller = completed(controller)
        self.controller = self.controller or DEFAULT_CONTROLLER
        self.adaptive = {**(stored.adaptive or {}), **(asked.adaptive or {})}
        self.acceptance = self.acceptance or "coupled"
        # Branches stored in a skip config apply only to the default controller.
        idle = asked.branches is None and self.controller != DEFAULT_CONTROLLER
        self.branches = bool(self.branches) and not idle
        self.enabled = self.enabled is not False
        if isinstance(lookup, Lookup):
            self.lookup = lookup
        self.tokenizer = tokenizer
        self.automatic = not self.skips
        self.assistant = assistant
        schema.optional(schema.number(0))(draft_memory, "draft_memory")
        if draft_memory is not None and not self.automatic:
            warnings.warn("draft_memory has no effect where drafts are named", stacklevel=2)
        self.draft_memory = draft_memory
        self.costs, self.execution, self.cached = costs, execution, cached
        self.progress, self.clock = progress, clock

    def __repr__(self) -> str:
        how = self.controller if isinstance(self.controller, str) else type(self.controller)
        skips = self.skips[0] if len(self.skips) == 1 else [*self.skips] or None
        return f"LayerSkipDecoding({skips!r}, controller={how!r})"

    def row_seeds(self, rows: int, do_sample: bool) -> list[tuple[int, int]]:
        """(seed, row) of each row's noise stream; empty for greedy decoding."""
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


def _loaded(skip: Skips | Sequence[Skips] | None) -> tuple[SkipConfig, ...]:
    """Return the given skip configs, read from their files where they are paths."""
    if skip is None:
        return ()
    several = [*skip] if isinstance(skip, Sequence) and not isinstance(skip, str) else [skip]
    for each in several:
        if not isinstance(each, SkipConfig | str | os.PathLike):
            raise TypeError(f"skip must be a SkipConfig, its file, or several, got {each!r}")
    if not several:
        raise ValueError("skip must hold at least one skip config; give None for the default")
    skips = [each if isinstance(each, SkipConfig) else SkipConfig.load(each) for each in several]
    for number, each in enumerate(skips):
        if each in skips[:number]:
            raise ValueError(f"skip holds {each} twice; give each skip config once")
    return tuple(skips)


def _listed(takes: Signature) -> Signature:
    """The signature with each option by name, for `help()` and editors."""
    named = dict(takes.parameters)
    del named["options"]
    for each in fields(DecodingOptions):
        named.setdefault(
            each.name,
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=None, annotation=each.type),
        )
    return takes.replace(parameters=[*named.values()])


# Not the class's own, which its instances would have, too: theirs is that of their calls.
Settings.__init__.__signature__ = _listed(signature(Settings.__init__))  # type: ignore[attr-defined]
