"""Flags of what drafts come from, and what is taken where none is given; every heavy import waits.

A skip config that is named comes first, then the one beside the checkpoint; without either drafts
need no set-up: they are looked up, and the model drafts in low precision where that is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layerskip.cli.options import (
    Branches,
    DraftFlags,
    Form,
    Loading,
    MaxDraftLength,
    Sampling,
    Threshold,
    open_model,
    open_passes,
    warn_idle,
)
from layerskip.cli.terminal import Talk
from layerskip.config import LowPrecision, SkipConfig
from layerskip.decoding.controller import ControllerName
from layerskip.files.reading import read_text

if TYPE_CHECKING:
    from layerskip.checkpoints import Loaded
    from layerskip.decoding.sources.kept_laws import Laws
    from layerskip.decoding.sources.lookup import Lookup
    from layerskip.decoding.sources.lookup_laws import LookupLaws
    from layerskip.model.sublayers import Sublayers

_MEASURING = 0.5  # seconds, where costs are not known from earlier commands


@dataclass(frozen=True)
class Drafting:
    """Whether drafts are made, and how long they get."""

    controller: Annotated[
        ControllerName | None,
        typer.Option(help="What decides how long to draft.  [default: expected-gain]"),
    ] = None
    max_draft_length: MaxDraftLength = None
    threshold: Threshold = None
    branches: Branches = None
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Decode plainly.")] = False

    @property
    def settings(self) -> dict[str, Any]:
        """For `LayerSkipDecoding`."""
        own = {"controller": self.controller, "max_draft_length": self.max_draft_length}
        return own | {"threshold": self.threshold, "branches": self.branches}

    @property
    def idle(self) -> dict[str, Any]:
        """What is given, for `warn_idle`."""
        found = self.settings
        branches = found.pop("branches")
        return found | {"no-branches" if branches is False else "branches": branches}


@dataclass(frozen=True)
class Sources:
    """What drafts come from, beside the sublayers that a skip config names."""

    low_precision: Annotated[
        Literal["8", "4", "none"] | None,
        typer.Option(
            help="Bits of the weights that the model drafts with.  [default: the skip config's; "
            "without one 8, where that is fast]"
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Of long texts, let drafts see the first few and so many last tokens; 0: all.  "
            "[default: the skip config's; without one 1024, where drafts are in 8 bits]",
        ),
    ] = None
    lookup: Annotated[
        bool | None,
        typer.Option(
            "--lookup/--no-lookup",
            help="Draft what followed when the text said the same before.  [default: the skip "
            "config's; without one --lookup]",
        ),
    ] = None
    lookup_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to look drafts up in, too; UTF-8."),
    ] = None
    laws: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draft trees of what the model said after the same tokens, there and in the text "
            "so far; a file of `layerskip laws`.",
        ),
    ] = None
    keep_laws: Annotated[
        bool,
        typer.Option("--keep-laws", help="Add what the model says now to the file of --laws."),
    ] = False
    assistant: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Draft with a second model of the same vocabulary, or a Gemma 4's assistant.",
        ),
    ] = None
    draft_memory: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GB",
            help="What copies of weights for drafts may take.  [default: half of what is free]",
        ),
    ] = None

    @property
    def idle(self) -> dict[str, Any]:
        """What is given, for `warn_idle`."""
        name = "no-lookup" if self.lookup is False else "lookup"
        given = {"low_precision": self.low_precision, "window": self.window, name: self.lookup}
        files = {"lookup_file": self.lookup_file, "laws": self.laws, "assistant": self.assistant}
        return given | files | {"draft_memory": self.draft_memory}

    def text(self) -> str | None:
        """The text to look drafts up in; read before the model is, so that errors are quick."""
        if self.lookup_file is None:
            return None
        if self.lookup is False:
            raise ValueError("give --lookup-file or --no-lookup, not both")
        return text_in("--lookup-file", self.lookup_file)

    def asked(self, skip: SkipConfig) -> SkipConfig:
        """The skip config with the window and in the precision that are asked for."""
        if self.window is not None and self.window != (skip.window or 0):
            skip = replace(skip, window=self.window or None, costs=None)
        if self.low_precision is None:
            return skip
        bits: Any = self.low_precision
        low = None if bits == "none" else LowPrecision(bits=int(bits))  # type: ignore[arg-type]
        if low == skip.low:
            return skip
        if skip.trained is not None and (low is not None or not skip.trained.module):
            raise ValueError(
                f"--low-precision {bits} is not what this skip config's weights were trained for; "
                "leave it out"
            )
        return replace(skip, low=low, costs=None)

    def looked_up(self, text: str | None, loaded: Loaded, talk: Talk) -> bool | Lookup | None:
        """Whether and where drafts are looked up; None: not said."""
        if text is None:
            return self.lookup
        from layerskip.decoding.sources.lookup import Lookup

        talk.progress(f"indexing {self.lookup_file}")
        return Lookup([loaded.tokenizer(text, add_special_tokens=False)["input_ids"]])

    def refuse_keeping(self, command: str) -> None:
        """Raises ValueError where laws are to be kept by a command of perhaps many processes."""
        if self.keep_laws:
            raise ValueError(
                f"{command} may run in several processes, which would overwrite each other's laws:"
                " leave out --keep-laws, and make the file with `layerskip laws`"
            )

    def kept_laws(self) -> Laws | None:
        """The laws of the file; with --keep-laws none at first, where there is no file yet."""
        if self.laws is None:
            if self.keep_laws:
                raise ValueError("--keep-laws has nowhere to keep them; give --laws FILE, too")
            return None
        from layerskip.decoding.sources.kept_laws import Laws

        if self.keep_laws and not self.laws.exists():
            return Laws()
        return Laws.load(self.laws)

    def trees(
        self, laws: Laws | None, lookup: bool | Lookup | None, opened: Sublayers
    ) -> LookupLaws | None:
        """What drafts from laws, joined by what is looked up."""
        if laws is None:
            return None
        from layerskip.decoding.sources.lookup import Lookup
        from layerskip.decoding.sources.lookup_laws import LookupLaws

        laws.check(opened)
        joined = Lookup() if lookup is True else lookup or None
        own, known = (laws, None) if self.keep_laws else (None, laws)
        return LookupLaws(own, lookup=joined, known=known)

    @contextmanager
    def keeping(self, laws: Laws | None) -> Iterator[None]:
        """At the end, write laws back that are to be kept, unless there are none."""
        try:
            yield
        finally:
            if self.laws is not None and self.keep_laws and laws:
                laws.save(self.laws)

    def second(self, loading: Loading, loaded: Loaded, talk: Talk) -> Loaded | None:
        """The second model, if one is named.

        Raises:
            ValueError: it has another vocabulary.
        """
        if self.assistant is None:
            return None
        from layerskip.checkpoints import load_official
        from layerskip.vocabulary import check_vocabularies

        official = load_official(self.assistant, loaded)
        if official is not None:
            talk.say(official.describe())
            return official
        found = open_model(replace(loading, model=self.assistant), talk)
        check_vocabularies(loaded.tokenizer, found.tokenizer)
        return found

    def own(self, opened: Sublayers) -> tuple[SkipConfig | None, str | None]:
        """The model's own draft where there is no skip config, and why it has none."""
        from layerskip.defaults import automatic_draft, in_words

        limit = None if self.draft_memory is None else int(self.draft_memory * 1e9)
        if self.low_precision is None:
            found = automatic_draft(opened, limit)
            skip = self.asked(found.skip or SkipConfig())
            return (None if skip == SkipConfig() else skip), found.reason
        skip = self.asked(SkipConfig())
        if skip == SkipConfig():
            return None, None
        nbytes = opened.weights.nbytes(skip)
        if limit is not None and nbytes > limit:
            raise ValueError(
                f"--low-precision {self.low_precision} takes {in_words(nbytes)} of memory, "
                f"--draft-memory allows {in_words(limit)}"
            )
        return skip, None

    def words(
        self,
        skip: SkipConfig | None,
        lookup: bool,
        assistant: Sublayers | None,
        opened: Sublayers,
        talk: Talk,
    ) -> str:
        """What drafts come from, in words; copies of weights are made, where a person sees it."""
        from layerskip.bench.methods import skip_label
        from layerskip.defaults import in_words
        from layerskip.model.assistants import is_assistant

        found = []
        if lookup:
            also = "" if self.lookup_file is None else f" and in {self.lookup_file}"
            found.append(f"looked up in the text so far{also}")
        if self.laws is not None:
            found.append(f"trees of laws, those of {self.laws} too")
        if assistant is not None:
            official = is_assistant(assistant.model.config)
            what = "the model's official assistant" if official else "a second model"
            found.append(f"{what}, {self.assistant}")
        if skip is not None:
            resolved = skip.resolve(opened.num_layers)
            found.append(skip_label(skip, resolved))
            nbytes = opened.weights.nbytes(skip)
            if nbytes:
                talk.progress(f"rounding weights, {in_words(nbytes)}")
                opened.weights.blocks(resolved)
                found[-1] += f" ({in_words(nbytes)} of memory)"
        return ", or ".join(found) or "none"


def text_in(flag: str, path: Path) -> str:
    """The text of a file that a flag names."""
    try:
        text = read_text(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path} is not UTF-8: {error}") from error
    if not text:
        raise ValueError(f"{flag} {path} is empty; there is nothing in it")
    return text


@dataclass(frozen=True)
class ChosenDrafts:
    """What drafts come from.

    Attributes:
        skip: the model's own draft, if it has one.
        trees: what drafts from laws, if anything does.
        assistant: the second model, if there is one, opened.
        words: all of it, in words.
    """

    skip: SkipConfig | None
    lookup: bool | Lookup
    trees: LookupLaws | None
    assistant: Sublayers | None
    words: str

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def turned_off(self) -> bool:
        """Whether the skip config says not to draft with it."""
        return _turned_off(self.skip)

    @property
    def settings(self) -> dict[str, Any]:
        """For `LayerSkipDecoding`: these sources and no others."""
        found: dict[str, Any] = {"skip": self.skip, "lookup": self.lookup}
        found |= {"assistant": self.assistant, "sources": [self.trees] if self.trees else []}
        return found if self.skip is not None else {**found, "draft_memory": 0}

    @property
    def names(self) -> list[str]:
        """What the sources are called, as rounds number them."""
        found: dict[str, Any] = {"lookup": self.lookup, "laws": self.trees}
        found |= {"assistant": self.assistant, "sublayers": self.skip}
        return [name for name, each in found.items() if each not in (None, False)]


def choose(
    given: SkipConfig | None,
    sources: Sources,
    text: str | None,
    loaded: Loaded,
    opened: Sublayers,
    talk: Talk,
    second: Sublayers | None = None,
    laws: Laws | None = None,
) -> ChosenDrafts:
    """What drafts come from, copies of weights made.

    Args:
        given: the skip config that is named.
        text: to look drafts up in, if there is any.
        second: the second model, if there is one, opened.
        laws: to draft from, if there are any.
    """
    from layerskip.decoding.sources import source_of

    skip, reason = loaded.skip_config() if given is None else given, None
    lookup = sources.looked_up(text, loaded, talk)
    if skip is not None and second is not None and _turned_off(skip):
        skip = None
    if skip is None:
        skip, reason = sources.own(opened)
        lookup = True if lookup is None else lookup
    else:
        skip = sources.asked(skip)
        source_of(opened, skip)  # refuses what does not fit
        stored = skip.decoding is not None and skip.decoding.lookup is True
        lookup = stored if lookup is None else lookup
        if sources.draft_memory is not None:
            warn_idle({"draft_memory": sources.draft_memory}, "with a skip config")
    trees = sources.trees(laws, lookup, opened)
    words = sources.words(skip, bool(lookup), second, opened, talk)
    if reason is not None:
        words += f"; none of the model in 8 bits: {reason}"
    return ChosenDrafts(skip, lookup or False, trees, second, words)


def _turned_off(skip: SkipConfig | None) -> bool:
    return skip is not None and skip.decoding is not None and skip.decoding.enabled is False


@contextmanager
def open_drafts(
    draft: DraftFlags, sources: Sources, loading: Loading, talk: Talk
) -> Iterator[tuple[Loaded, Sublayers, ChosenDrafts]]:
    """A model opened up on its threads, and its drafts, which are said.

    Raises:
        ValueError: there are none.
    """
    given, text, laws = draft.given(), sources.text(), sources.kept_laws()
    loaded = open_model(loading, talk)
    second = sources.second(loading, loaded, talk)
    with open_passes(loaded, loading, talk) as opened, sources.keeping(laws):
        other = None if second is None else second.opened(loading.execution)
        drafts = choose(given, sources, text, loaded, opened, talk, other, laws)
        if not drafts:
            raise ValueError(f"there are no drafts here: {drafts.words}; name a skip config")
        talk.say(f"drafts: {drafts.words}")
        yield loaded, opened, drafts


@contextmanager
def open_decoding(
    draft: DraftFlags,
    sources: Sources,
    drafting: Drafting,
    sampling: Sampling,
    loading: Loading,
    talk: Talk,
    check: Callable[[Loaded], None],
    form: Form | None = None,
) -> Iterator[tuple[Loaded, Sublayers, dict[str, Any], list[str]]]:
    """A model on its threads, settings of `layerskip.generate`, and what its sources are called.

    Args:
        check: told the model before anything is measured: what it refuses is refused early.
    """
    given, text, laws = draft.given(), sources.text(), sources.kept_laws()
    own = {"acceptance": sampling.acceptance}
    idle = drafting.idle | own
    loaded = open_model(loading, talk)
    second = None
    if drafting.no_draft:
        warn_idle({**sources.idle, **idle}, "with --no-draft")
    else:
        second = sources.second(loading, loaded, talk)
    check(loaded)
    processors = [] if form is None else form.processors(loaded)
    law = {name: value for name, value in sampling.settings.items() if value is not None}
    settings = {"enabled": False, "execution": loading.execution, **drafting.settings, **own}
    names: list[str] = []
    with open_passes(loaded, loading, talk) as opened, sources.keeping(laws):
        if not drafting.no_draft:
            from layerskip.generation import LayerSkipDecoding

            other = None if second is None else second.opened(loading.execution)
            drafts = choose(given, sources, text, loaded, opened, talk, other, laws)
            enabled = bool(drafts) and not drafts.turned_off
            off = "none, as the skip config says" if drafts.turned_off else ""
            talk.say(f"drafts: {off or drafts.words}")
            if not drafts:
                warn_idle(idle, "without drafts")
            settings |= {"enabled": enabled} | drafts.settings
            if enabled:
                names = drafts.names
                talk.progress("measuring what drafting costs here")
                LayerSkipDecoding(**settings).prepare(
                    loaded.model, seconds=_MEASURING, do_sample=sampling.do_sample, **law
                )
        if processors:
            settings["logits_processor"] = processors
            names = ["forced", *names] if names else []
        yield loaded, opened, settings | law | {"do_sample": sampling.do_sample}, names
