"""Opens the model and the plan that a command's flags ask for. Heavy imports are deferred.

A skip config given by flag takes precedence over one stored with the checkpoint. Without either,
drafts need no setup: they are looked up, and the model drafts in low precision where that is fast.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from layerskip.cli.flags import Decoding, DraftFlags, Loading, Sources, Writing, warn_idle
from layerskip.cli.terminal import Talk
from layerskip.config.skips import SkipConfig

if TYPE_CHECKING:
    from layerskip.api.loading import Loaded
    from layerskip.api.plan import Plan
    from layerskip.model.opened_model import OpenedModel

_MEASURING = 0.5  # seconds, if no earlier command has stored the costs


def open_model(loading: Loading, talk: Talk, *, reads: bool = False) -> Loaded:
    """Load the model. `reads` is passed to `layerskip.load`."""
    talk.progress("importing torch and transformers")
    # This makes a million lasting objects; collections over them would take a second.
    gc.disable()
    from layerskip.api.loading import load

    gc.freeze()
    gc.enable()
    talk.progress(f"loading {loading.model}")
    loaded = load(**loading.where, bars=sys.stderr.isatty() and not talk.quiet, reads=reads)
    talk.say(loaded.describe())
    return loaded


@contextmanager
def open_passes(
    loaded: Loaded, loading: Loading, talk: Talk, threads: int | None = None
) -> Iterator[OpenedModel]:
    """Open the model and set its threads until the context ends; says how passes are computed.

    Args:
        threads: used if the command line gives none; None measures which number is fastest.
    """
    from layerskip.model.opened_models import sublayers_of
    from layerskip.timing.threads import cpu_threads, fitting_threads

    with warnings.catch_warnings():
        if not talk.quiet:  # the line below says the same
            warnings.filterwarnings("ignore", "passes use the fused path")
        opened = sublayers_of(loaded.model, loading.execution)  # as every call opens it
    threads = loading.threads or threads
    if threads is None and opened.device.type == "cpu":
        talk.progress("measuring how many threads are fastest")
    with cpu_threads(None) as most, cpu_threads(threads or fitting_threads(opened)) as count:
        words = f"passes: {opened.describe()}"
        if threads is None and count < most:
            words += f"; more threads gain nothing here (--threads {most} uses all)"
        talk.say(words)
        yield opened


@dataclass(frozen=True)
class Opened:
    """An opened model and its plan.

    Attributes:
        settings: settings of `LayerSkipDecoding`, with the choices of the plan filled in.
        law: further arguments of `layerskip.generate`: sampling.
        formed: whether logits processors give texts a form, whose only allowed tokens are drafts.
    """

    loaded: Loaded
    plan: Plan
    settings: dict[str, Any]
    law: dict[str, Any] = field(default_factory=dict)
    formed: bool = False

    @property
    def model(self) -> OpenedModel:
        return self.plan.model

    @property
    def names(self) -> list[str]:
        """The names of the sources in rounds."""
        names = self.plan.names
        return ["forced", *names] if names and self.formed else names

    @property
    def sources(self) -> dict[str, Any]:
        """The sources as keyword arguments of `bench.methods.Engine`."""
        return {name: self.settings[name] for name in ("lookup", "sources", "assistant")}


def own_drafts(sources: Sources, model: OpenedModel, given: Sequence[SkipConfig]) -> dict[str, Any]:
    """Return the settings of the drafts by the model itself.

    They are the given skip configs, or what needs no setup, each as the flags change it.
    """
    limit, asked = sources.memory, sources.low_precision
    if given:
        warn_idle({"draft_memory": sources.draft_memory}, "with a skip config")
        return {"skip": [sources.changed(each) for each in given]}
    if asked is None and sources.window is None:
        return {"draft_memory": limit}
    from layerskip.api.drafts import automatic_draft, heads_of, in_words

    usual = automatic_draft(model, limit)
    skip = sources.changed((usual.skip if asked is None else None) or SkipConfig())
    nbytes = 0 if asked in (None, "none") else model.weights.nbytes(skip)
    if limit is not None and nbytes > limit:
        raise ValueError(
            f"--low-precision {asked} needs {in_words(nbytes)} of memory, "
            f"but --draft-memory allows {in_words(limit)}"
        )
    own: dict[str, Any] = {"skip": [skip]} if skip != SkipConfig() else {"draft_memory": 0}
    return own | {"sources": [*(sources.source or ()), *heads_of(model, usual)]}


def second_model(sources: Sources, loading: Loading, loaded: Loaded, talk: Talk) -> Loaded | None:
    """Load the --assistant model, if one is given; with both tokenizers if they differ."""
    if sources.assistant is None:
        return None
    from layerskip.api.loading import load_official
    from layerskip.decoding.sources.universal import fitting

    official = load_official(sources.assistant, loaded)
    if official is not None:
        talk.say(official.describe())
        return official
    second = open_model(replace(loading, model=sources.assistant), talk)
    return replace(second, model=fitting(second.model, loaded.tokenizer, second.tokenizer))


def source_settings(
    sources: Sources, second: Loaded | None, loaded: Loaded, talk: Talk
) -> dict[str, Any]:
    """Return the settings of drafts that are looked up, or by a second model."""
    lookup: Any = sources.lookup
    if sources.text is not None:
        from layerskip.decoding.sources.lookup import Lookup

        talk.progress(f"indexing {sources.lookup_file}")
        lookup = Lookup([loaded.tokenizer(sources.text, add_special_tokens=False)["input_ids"]])
    others = {"lookup": lookup, "sources": sources.source or ()}
    return others if second is None else {**others, "assistant": second.model}


@contextmanager
def open_drafts(
    flags: DraftFlags,
    loading: Loading,
    loaded: Loaded,
    talk: Talk,
    *,
    plain: bool = False,
    sampling: bool = False,
    **how: Any,
) -> Iterator[Opened]:
    """Open a model and the plan of its drafts, including any copies of weights.

    Args:
        plain: open no drafts.
        sampling: whether tokens are drawn.
        how: further settings of `LayerSkipDecoding`.
    """
    second = None if plain else second_model(flags, loading, loaded, talk)
    with open_passes(loaded, loading, talk) as model:
        from layerskip.api.generation import LayerSkipDecoding
        from layerskip.api.plan import open_plan

        settings: dict[str, Any] = how | {"execution": loading.execution}
        if plain:
            settings["enabled"] = False
        else:
            stored = loaded.skip_config()
            given = flags.given or ([] if stored is None else [stored])
            off = any(each.decoding and each.decoding.enabled is False for each in given)
            if off and second is not None:
                given, off = [], False
            settings |= source_settings(flags, second, loaded, talk)
            settings |= own_drafts(flags, model, given)
            if settings["lookup"] is None and not given:
                settings["lookup"] = True  # a draft that flags make is not a named one
            settings = ({"enabled": False} if off else {}) | settings
            talk.progress("preparing drafts")
        decoding = LayerSkipDecoding(**settings, tokenizer=loaded.tokenizer)
        plan = open_plan(model, decoding, sampling=sampling)
        settings |= plan.explicit
        settings["enabled"] = bool(plan.sources)
        yield Opened(loaded, plan, settings)


@contextmanager
def open_checked_drafts(flags: DraftFlags, loading: Loading, talk: Talk) -> Iterator[Opened]:
    """Load a model with drafts, for commands that compare drafting with plain decoding.

    Raises:
        ValueError: there is no source of drafts.
    """
    with open_drafts(flags, loading, open_model(loading, talk), talk, enabled=True) as opened:
        if not opened.names:
            raise ValueError(f"nothing can draft here: {opened.plan.summary}; give a skip config")
        talk.say(f"drafts: {opened.plan.summary}")
        yield opened


@contextmanager
def open_decoding(
    flags: Decoding,
    writing: Writing,
    loading: Loading,
    loaded: Loaded,
    talk: Talk,
    *,
    remember: str | None = None,
) -> Iterator[Opened]:
    """Open a model with all arguments of `layerskip.generate`, and measure its costs.

    Args:
        remember: where earlier answers are remembered by default, beside lookups.
    """
    formed = bool(writing.processors(loaded))  # so that a bad one ends it here
    if loaded.store_halves(loading.execution):
        talk.say("the float32 weights are exact in bfloat16: half the bytes are read")
    law = {name: value for name, value in writing.settings.items() if value is not None}
    law["do_sample"] = writing.do_sample
    how = flags.settings | {"acceptance": writing.acceptance}
    if flags.no_draft:
        warn_idle(flags.values(DraftFlags) | how, "with --no-draft")
    if how["remember"] is None and flags.lookup is not False:
        how["remember"] = remember
    how |= {"plain": flags.no_draft, "sampling": writing.do_sample}
    with open_drafts(flags, loading, loaded, talk, **how) as opened:
        if not flags.no_draft:
            plan, off = opened.plan, "none, as the skip config says"
            talk.say(f"drafts: {plan.summary if plan.settings.enabled else off}")
            if not opened.names:
                warn_idle(flags.settings | {"acceptance": writing.acceptance}, "without drafts")
        if opened.names and not opened.model.encoder:
            talk.progress("measuring the costs of drafting")
            opened.plan.prepare(1, 0, _MEASURING, **law)
        yield replace(opened, law=law, formed=formed)
