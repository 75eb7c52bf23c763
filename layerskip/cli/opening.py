"""Opens the model and the drafts that a command's flags ask for. Heavy imports are deferred.

A skip config given by flag takes precedence over one stored with the checkpoint. Without either,
drafts need no setup: they are looked up, and the model drafts in low precision where that is fast.
"""

from __future__ import annotations

import atexit
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from layerskip.cli.flags import Decoding, DraftFlags, Loading, Sampling, Sources, warn_idle
from layerskip.cli.terminal import Talk
from layerskip.config.skips import SkipConfig

if TYPE_CHECKING:
    from layerskip.api.loading import Loaded
    from layerskip.decoding.sources.lookup import Lookup
    from layerskip.decoding.sources.mtp import CheckpointHead
    from layerskip.model.sublayers import Sublayers

_MEASURING = 0.5  # seconds, if no earlier command has stored the costs


def open_model(loading: Loading, talk: Talk, *, reads: bool = False) -> Loaded:
    """Load the model. `reads` is passed to `checkpoints.load`."""
    talk.progress("importing torch and transformers")
    with _unsearched():
        from layerskip.api.loading import load

    talk.progress(f"loading {loading.model}")
    loaded = load(**loading.where, bars=sys.stderr.isatty() and not talk.quiet, reads=reads)
    talk.say(loaded.describe())
    return loaded


@contextmanager
def _unsearched() -> Iterator[None]:
    """Exempt objects made inside from garbage collection, also when the interpreter exits.

    Importing the libraries makes a million lasting objects; collections over them take a second.
    Triton, where it is installed, would report its own at exit in thirty lines.
    """
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if "triton" in sys.modules:
            atexit.register(gc.unfreeze)
        if searching:
            gc.enable()


@contextmanager
def open_passes(
    loaded: Loaded, loading: Loading, talk: Talk, threads: int | None = None
) -> Iterator[Sublayers]:
    """Open the model and set its threads until the context ends; says how passes are computed.

    Args:
        threads: used if the command line gives none; None measures which number is fastest.
    """
    from layerskip.timing.threads import cpu_threads, fitting_threads

    with warnings.catch_warnings():
        if not talk.quiet:  # the line below says the same
            warnings.filterwarnings("ignore", "passes take the fused path")
        opened = loaded.opened(loading.execution)
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
    """An opened model and its draft sources.

    Attributes:
        model: the opened model.
        settings: settings of `LayerSkipDecoding`, with the choices made here filled in.
        names: the names of the sources in rounds.
        words: the sources, described in words.
        law: further arguments of `layerskip.generate`: sampling.
    """

    loaded: Loaded
    model: Sublayers
    settings: dict[str, Any]
    names: list[str]
    words: str
    law: dict[str, Any] = field(default_factory=dict)

    @property
    def sources(self) -> dict[str, Any]:
        """The sources as keyword arguments of `bench.methods.Engine`."""
        return {name: self.settings[name] for name in ("lookup", "sources", "assistant")}


def own_drafts(
    sources: Sources, model: Sublayers, given: Sequence[SkipConfig]
) -> tuple[list[SkipConfig], list[CheckpointHead], list[str]]:
    """Choose the drafts by the model itself: the given skip configs, or what needs no setup.

    Returns:
        The skip configs, the checkpoint's own head, and why there are no better drafts, in words.
    """
    from layerskip.api.drafts import automatic_draft, in_words, own_head, without_origin

    if given:
        warn_idle({"draft_memory": sources.draft_memory}, "with a skip config")
        return [sources.changed(without_origin(model, each)) for each in given], [], []
    default, reasons, limit = SkipConfig(), [], sources.memory
    if sources.low_precision is None:
        automatic = automatic_draft(model, limit)
        default = automatic.skip or default
        if automatic.reason is not None:
            reasons.append(f"the model does not draft in 8 bits: {automatic.reason}")
    head, why = own_head(model, limit)
    if why is not None:
        reasons.append(f"the checkpoint's own head does not draft: {why}")
    skip = sources.changed(default)
    asked = sources.low_precision not in (None, "none")
    if asked and limit is not None and (nbytes := model.weights.nbytes(skip)) > limit:
        raise ValueError(
            f"--low-precision {sources.low_precision} needs {in_words(nbytes)} of memory, "
            f"but --draft-memory allows {in_words(limit)}"
        )
    return [skip] if skip != SkipConfig() else [], [head] if head else [], reasons


def second_model(sources: Sources, loading: Loading, loaded: Loaded, talk: Talk) -> Loaded | None:
    """Load the --assistant model, if one is given.

    Raises:
        ValueError: its vocabulary differs from the model's.
    """
    if sources.assistant is None:
        return None
    from layerskip.api.loading import load_official
    from layerskip.texts.vocabulary import check_vocabularies

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
    """Return whether, or in which text, to look up drafts. None: the flags do not say."""
    if text is None:
        return sources.lookup
    from layerskip.decoding.sources.lookup import Lookup

    talk.progress(f"indexing {sources.lookup_file}")
    return Lookup([loaded.tokenizer(text, add_special_tokens=False)["input_ids"]])


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
    """Open a model and its drafts, including any copies of weights.

    Args:
        check: called with the model before anything is measured, to refuse early.
        plain: open no drafts.
        reads: the model may be an encoder-decoder.
    """
    given, text = flags.given(), flags.text()
    loaded = open_model(loading, talk, reads=reads)
    second = None if plain else second_model(flags, loading, loaded, talk)
    check(loaded)
    with open_passes(loaded, loading, talk) as model:
        settings: dict[str, Any] = {"enabled": False, "execution": loading.execution}
        if plain:
            yield Opened(loaded, model, settings, [], "none")
            return
        from layerskip.api.drafts import choose_drafts
        from layerskip.api.generation import LayerSkipDecoding

        beside = loaded.skip_config()
        given = given or ([] if beside is None else [beside])
        off = any(each.decoding and each.decoding.enabled is False for each in given)
        if off and second is not None:
            given, off = [], False
        own, heads, reasons = own_drafts(flags, model, given)
        lookup = looked_up(flags, text, loaded, talk)
        settings |= {
            "skip": own or None,
            "lookup": True if lookup is None and not given else lookup,  # `own` is not named
            "assistant": None if second is None else second.opened(loading.execution),
            "sources": tuple(heads),
            "draft_memory": None if own else 0,
        }
        talk.progress("preparing drafts")
        drafts = choose_drafts(model, LayerSkipDecoding(**settings | {"enabled": True}))
        words = "; ".join([", or ".join(drafts.words) or "none", *reasons])
        settings["enabled"] = bool(drafts.sources) and not off
        yield Opened(loaded, model, settings, drafts.names, words)


@contextmanager
def open_checked_drafts(flags: DraftFlags, loading: Loading, talk: Talk) -> Iterator[Opened]:
    """Like `open_drafts`, for commands that compare drafting with plain decoding.

    Raises:
        ValueError: there is no source of drafts.
    """
    with open_drafts(flags, loading, talk) as opened:
        if not opened.names:
            raise ValueError(f"nothing can draft here: {opened.words}; give a skip config")
        talk.say(f"drafts: {opened.words}")
        yield opened


@contextmanager
def open_decoding(
    flags: Decoding,
    sampling: Sampling,
    loading: Loading,
    talk: Talk,
    check: Callable[[Loaded], None],
    *,
    reads: bool = False,
) -> Iterator[Opened]:
    """Open a model with all arguments of `layerskip.generate`, and measure its costs.

    Args:
        check: called with the model before anything is measured, to refuse early.
        reads: the model may be an encoder-decoder, whose decoder's costs are measured.
    """
    processors: list[Any] = []  # made here, too, so that a bad form is refused early

    def checked(loaded: Loaded) -> None:
        check(loaded)
        processors.extend(sampling.processors(loaded))
        if loaded.store_halves(loading.execution):
            talk.say("the float32 weights are exact in bfloat16: half the bytes are read")

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
            if not names:
                warn_idle(idle, "without drafts")
        if settings["enabled"] and not opened.model.encoder:
            from layerskip.api.generation import LayerSkipDecoding

            talk.progress("measuring the costs of drafting")
            LayerSkipDecoding(**settings).prepare(opened.loaded.model, seconds=_MEASURING, **law)
        if processors and names:
            names = ["forced", *names]
        yield replace(opened, settings=settings, names=names, law=law)
