"""Models and their drafts, opened for a command as its flags say; every heavy import waits.

A skip config that is named comes first, then the one beside the checkpoint. Without either, drafts
need no set-up: they are looked up, and the model drafts in low precision where that is fast.
"""

from __future__ import annotations

import atexit
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from layerskip.cli.flags import Decoding, DraftFlags, Form, Loading, Sampling, Sources, warn_idle
from layerskip.cli.terminal import Talk
from layerskip.config import SkipConfig
from layerskip.registry import named

if TYPE_CHECKING:
    from layerskip.checkpoints import Loaded
    from layerskip.decoding.sources.lookup import Lookup
    from layerskip.model.sublayers import Sublayers

_MEASURING = 0.5  # seconds, where costs are not known from earlier commands


def open_model(loading: Loading, talk: Talk, *, reads: bool = False) -> Loaded:
    """A model, loaded; `reads` as of `checkpoints.load`."""
    talk.progress("importing torch and transformers")
    with _unsearched():
        from layerskip.checkpoints import load

    talk.progress(f"loading {loading.model}")
    loaded = load(**loading.where, bars=sys.stderr.isatty() and not talk.quiet, reads=reads)
    talk.say(loaded.describe())
    return loaded


@contextmanager
def _unsearched() -> Iterator[None]:
    """No search for garbage looks at what is made inside, there or later, but at the very end.

    The library makes a million objects that stay; searches through them take a second.
    """
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if searching:
            gc.enable()


@contextmanager
def open_passes(
    loaded: Loaded, loading: Loading, talk: Talk, threads: int | None = None
) -> Iterator[Sublayers]:
    """The model opened up, on its threads meanwhile; says how passes are computed, and why so.

    Args:
        threads: where the command line names none; None measures which number is fastest.
    """
    from layerskip.timing.threads import cpu_threads, fitting_threads

    with warnings.catch_warnings():
        if not talk.quiet:  # then the line below says it
            warnings.filterwarnings("ignore", "passes take the fused path")
        opened = loaded.opened(loading.execution)
    threads = loading.threads or threads
    if threads is None:
        talk.progress("measuring how many threads are fastest")
    with cpu_threads(None) as most, cpu_threads(threads or fitting_threads(opened)) as count:
        words = f"passes: {opened.describe()}"
        if threads is None and count < most:
            words += f"; more gain nothing here (--threads {most} takes all)"
        talk.say(words)
        yield opened


@dataclass(frozen=True)
class Opened:
    """A model on its threads, and what drafts for it.

    Attributes:
        model: the model opened up.
        settings: of `LayerSkipDecoding`, what is chosen here written out.
        names: what rounds call the sources.
        words: what drafts come from, in words.
    """

    loaded: Loaded
    model: Sublayers
    settings: dict[str, Any]
    names: list[str]
    words: str

    @property
    def sources(self) -> dict[str, Any]:
        """The sources, as `bench.methods.Engine` takes them."""
        return {name: self.settings[name] for name in ("lookup", "sources", "assistant")}


def own_draft(sources: Sources, model: Sublayers) -> tuple[SkipConfig | None, str | None]:
    """The model's own draft where no skip config is named, and why it has no better one."""
    from layerskip.drafts import automatic_draft, in_words

    default, reason = SkipConfig(), None
    if sources.low_precision is None:
        automatic = automatic_draft(model, sources.memory)
        default, reason = automatic.skip or default, automatic.reason
    skip = sources.changed(default)
    if skip == SkipConfig():
        return None, reason
    nbytes, limit = model.weights.nbytes(skip), sources.memory
    if sources.low_precision is not None and limit is not None and nbytes > limit:
        raise ValueError(
            f"--low-precision {sources.low_precision} takes {in_words(nbytes)} of memory, "
            f"--draft-memory allows {in_words(limit)}"
        )
    return skip, reason


def second_model(sources: Sources, loading: Loading, loaded: Loaded, talk: Talk) -> Loaded | None:
    """The second model, if one is named.

    Raises:
        ValueError: it has another vocabulary.
    """
    if sources.assistant is None:
        return None
    from layerskip.checkpoints import load_official
    from layerskip.vocabulary import check_vocabularies

    official = load_official(sources.assistant, loaded)
    if official is not None:
        talk.say(official.describe())
        return official
    second = open_model(replace(loading, model=sources.assistant), talk)
    check_vocabularies(loaded.tokenizer, second.tokenizer)
    return second


def looked_up(
    sources: Sources, text: str | None, loaded: Loaded, talk: Talk
) -> bool | Lookup | None:
    """Whether and in which text drafts are looked up; None: the flags do not say."""
    if text is None:
        return sources.lookup
    from layerskip.decoding.sources.lookup import Lookup

    talk.progress(f"indexing {sources.lookup_file}")
    return Lookup([loaded.tokenizer(text, add_special_tokens=False)["input_ids"]])


def kept_laws(sources: Sources) -> Any:
    """The laws of the file; with --keep-laws none at first, where there is no file yet."""
    if sources.laws is None:
        if sources.keep_laws:
            raise ValueError("--keep-laws has nowhere to keep them; give --laws FILE, too")
        return None
    store = named("store", "laws")
    if sources.keep_laws and not sources.laws.exists():
        return store()
    return store.load(sources.laws)


@contextmanager
def open_drafts(
    flags: DraftFlags,
    loading: Loading,
    talk: Talk,
    check: Callable[[Loaded], None] = lambda loaded: None,
    *,
    plain: bool = False,
    reads: bool = False,
) -> Iterator[Opened]:
    """A model on its threads, and its drafts, with copies of weights made.

    Args:
        check: told the model before anything is measured, so that it refuses early.
        plain: nothing is to draft.
        reads: the model may be an encoder-decoder.
    """
    given, text, laws = flags.given(), flags.text(), kept_laws(flags)
    loaded = open_model(loading, talk, reads=reads)
    second = None if plain else second_model(flags, loading, loaded, talk)
    check(loaded)
    with open_passes(loaded, loading, talk) as model:
        settings: dict[str, Any] = {"enabled": False, "execution": loading.execution}
        if plain:
            yield Opened(loaded, model, settings, [], "none")
            return
        from layerskip.drafts import choose_drafts, own_head
        from layerskip.generation import LayerSkipDecoding

        beside = loaded.skip_config()
        given = given or ([] if beside is None else [beside])
        off = any(each.decoding and each.decoding.enabled is False for each in given)
        if off and second is not None:
            given, off = [], False
        if given:
            own, reason = [flags.changed(each) for each in given], None
            warn_idle({"draft_memory": flags.draft_memory}, "with a skip config")
        else:
            default, reason = own_draft(flags, model)
            own = [] if default is None else [default]
        head, why = (None, None) if given else own_head(model, flags.memory)
        lookup = looked_up(flags, text, loaded, talk)
        settings |= {
            "skip": own or None,
            "lookup": True if lookup is None and not given else lookup,
            "assistant": None if second is None else second.opened(loading.execution),
            "sources": () if head is None else (head,),
            "draft_memory": None if own else 0,
        }
        settings["lookup"] = LayerSkipDecoding(**settings).lookup or False
        if laws is not None:
            laws.check(model)
            learned, read = (laws, None) if flags.keep_laws else (None, laws)
            trees = named("source", "laws")(learned, lookup=settings["lookup"] or None, known=read)
            settings["sources"] += (trees,)
        talk.progress("preparing drafts")
        drafts = choose_drafts(model, LayerSkipDecoding(**settings | {"enabled": True}))
        words = ", or ".join(drafts.words) or "none"
        if reason is not None:
            words += f"; none of the model in 8 bits: {reason}"
        words += "" if why is None else f"; none by the checkpoint's own head: {why}"
        settings["enabled"] = bool(drafts.sources) and not off
        try:
            yield Opened(loaded, model, settings, drafts.names, words)
        finally:
            if flags.laws is not None and flags.keep_laws and laws:
                laws.save(flags.laws)


@contextmanager
def open_checked_drafts(flags: DraftFlags, loading: Loading, talk: Talk) -> Iterator[Opened]:
    """As `open_drafts`, for commands that set drafting beside plain decoding.

    Raises:
        ValueError: there is nothing to draft from.
    """
    with open_drafts(flags, loading, talk) as opened:
        if not opened.names:
            raise ValueError(f"there are no drafts here: {opened.words}; name a skip config")
        talk.say(f"drafts: {opened.words}")
        yield opened


@contextmanager
def open_decoding(
    flags: Decoding,
    sampling: Sampling,
    loading: Loading,
    talk: Talk,
    check: Callable[[Loaded], None],
    form: Form | None = None,
    *,
    reads: bool = False,
) -> Iterator[Opened]:
    """A model on its threads, with all settings of `layerskip.generate`; costs are measured.

    Args:
        check: told the model before anything is measured, so that it refuses early.
        reads: the model may be an encoder-decoder, whose costs are measured behind its encoder.
    """
    processors: list[Any] = []

    def checked(loaded: Loaded) -> None:
        check(loaded)
        processors.extend([] if form is None else form.processors(loaded))
        if loaded.store_halves(loading.execution):
            talk.say("float32 weights hold bfloat16 numbers: they are read from half the bytes")

    law = {name: value for name, value in sampling.settings.items() if value is not None}
    law["do_sample"] = sampling.do_sample
    idle = flags.settings | {"acceptance": sampling.acceptance}
    if flags.no_draft:
        warn_idle(flags.idle | idle, "with --no-draft")
    with open_drafts(flags, loading, talk, checked, plain=flags.no_draft, reads=reads) as opened:
        settings = opened.settings | flags.settings | {"acceptance": sampling.acceptance}
        names = opened.names if settings["enabled"] else []
        if not flags.no_draft:
            off = opened.names and not settings["enabled"]
            talk.say(f"drafts: {'none, as the skip config says' if off else opened.words}")
            if not opened.names:
                warn_idle(idle, "without drafts")
        if settings["enabled"] and not opened.model.encoder:
            from layerskip.generation import LayerSkipDecoding

            talk.progress("measuring what drafting costs here")
            LayerSkipDecoding(**settings).prepare(opened.loaded.model, seconds=_MEASURING, **law)
        if processors:
            settings["logits_processor"] = processors
            names = ["forced", *names] if names else []
        yield replace(opened, settings=settings | law, names=names)
