"""The flags of all commands: name, type and help. Heavy imports happen only when they are used."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_type_hints

import typer
from typer.models import OptionInfo

from layerskip.config.options import DecodingOptions
from layerskip.config.registry import names
from layerskip.config.skips import COLDEST, LowPrecision, SkipConfig
from layerskip.files.reading import errors_of, read_text

if TYPE_CHECKING:
    from layerskip.api.loading import Loaded
    from layerskip.bench.methods import Task
    from layerskip.cli.terminal import Talk
    from layerskip.config.registry import ControllerName
else:  # with the names that installed packages add
    ControllerName = Literal[names("controller")]

_OPTIONS = {each.name: each for each in fields(DecodingOptions) if each.metadata["flag"]}
REMEMBERING = ("remember", "remember_tokens")
"""Options of decoding for commands that write texts, not for those that time them."""
_ELSEWHERE = ("controller", "lookup", "acceptance", *REMEMBERING)
PACE = [name for name in _OPTIONS if name not in _ELSEWHERE]
"""Options of decoding that all commands show that draft."""
PANEL_OF_EXITS = "With --recipe exits"
PANELS = {
    "Prompt": "prompt prompts tasks chat system image texts limit per_category",
    "Output": "output max_new_tokens stream stop json_schema regex save_text as_json quiet help",
    "Options": "",  # those of one command
    PANEL_OF_EXITS: "",  # all of `ExitFlags`
    "Sampling": "temperature do_sample seed top_p top_k min_p repetition_penalty acceptance",
    "Drafts": "no_draft draft lookup lookup_file remember remember_tokens low_precision exit_layer "
    f"skip entry assistant source start controller {' '.join(PACE)} window draft_memory",
    "Model": "threads device dtype execution trust_remote_code",
}
"""Headings of a command's help, with the names of their flags; those of a first run come first."""


def flag(
    text: str, metavar: str | None = None, *names: str, default: Any = None, **limits: Any
) -> Any:
    """An option with its help text. Pass `names` only if the flag is not named as its parameter."""
    return typer.Option(default, *names, metavar=metavar, help=text, **limits)


def of_option(name: str) -> Any:
    """An option of decoding, as `DecodingOptions` describes it."""
    given, limits = _OPTIONS[name].metadata["flag"]
    return flag(*given, **limits)


def switch(name: str, text: str) -> Any:
    """A flag without a value, off by default."""
    return typer.Option(False, name, help=text)


Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read prompts from this file. Or name a shipped set: spec-bench (36 questions), "
        "copying (9 requests to repeat text) or agent-day (46 requests of an agent).  [default: "
        "prompts shipped with the model]",
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Format each prompt as a user message of the chat template.")
]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE", help="Show the model this picture; repeatable."),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="Generate at most N tokens."),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Random seed for sampling.")]
DrawnSeed = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Random seed.  [default: a new one per text]"),
]
MaxRows = Annotated[int, typer.Option(min=1, metavar="N", help="Decode at most N texts at once.")]
Memory = Annotated[
    float | None,
    typer.Option(min=0, metavar="GB", help="Memory of KV caches.  [default: half of what is free]"),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only results, warnings and errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document as the last line.")]


Entry = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Use this skip config if the --skip file holds several."),
]


@dataclass(frozen=True)
class Flags:
    """A group of flags. A command takes one parameter per group and receives all its values."""

    def __post_init__(self) -> None:
        for each in fields(self):  # a group made in code: replace each option by its default
            value = getattr(self, each.name)
            if isinstance(value, OptionInfo):
                object.__setattr__(self, each.name, value.default)

    def values(self, group: type[Flags] | None = None) -> dict[str, Any]:
        """The values of all flags, or of those of a group that this one contains, by name."""
        return {each.name: getattr(self, each.name) for each in fields(group or self)}


def _with_options(group: type[Flags]) -> type[Flags]:
    """Add a flag for every option of decoding that no other group has, with its type."""
    hints = get_type_hints(DecodingOptions)
    for name in PACE:
        group.__annotations__.setdefault(name, hints[name])
        setattr(group, name, of_option(name))
    return group


@dataclass(frozen=True)
class Loading(Flags):
    """Which model to load, and how to run it."""

    model: Annotated[
        str,
        typer.Argument(
            help="Hub id, local folder, shipped model (demo-llama, demo-gemma2, demo-gemma4), or a "
            "model made by `make checkpoints` (smollm2, gemma3-270m)."
        ),
    ] = "demo-llama"
    device: str = flag("Run on this device: auto, cpu, cuda, cuda:1.", "NAME", default="auto")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = flag(
        "Data type of the weights. auto: the checkpoint's; float32 for shipped models on a CPU.",
        default="auto",
    )
    trust_remote_code: bool = switch("--trust-remote-code", "Run code from the checkpoint.")
    execution: Literal["auto", "modules", "fused", "native", "captured"] = flag(
        "How to run the layers. modules: transformers; fused: fewer kernels; native: one C++ call "
        "per pass (CPU; a one-time build takes a minute); captured: CUDA graphs (GPU).",
        default="auto",
    )
    threads: int | None = flag("CPU threads.  [default: the fastest number, measured]", "N", min=1)

    @property
    def where(self) -> dict[str, Any]:
        """The arguments of `layerskip.load`."""
        names = ("device", "dtype", "trust_remote_code")
        return {"name": self.model, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class Skip(Flags):
    """The model's own draft."""

    skip: list[str] | None = flag(
        "Draft with the skip config in this JSON file, or in the skip.json of this folder. "
        "Repeatable: each round uses the config with the highest expected gain.",
        "FILE",
    )
    entry: Entry = None
    exit_layer: list[int] | None = flag(
        "Draft with layers 0 to E-1 (early exit). Repeatable, like --skip.", "E"
    )

    @cached_property
    def given(self) -> list[SkipConfig]:
        """The skip configs."""
        if self.skip and self.exit_layer:
            raise ValueError("give --skip or --exit-layer, not both")
        exits = [SkipConfig.early_exit(layer) for layer in self.exit_layer or ()]
        return exits or [*load_skips(self.skip, self.entry).values()]


@dataclass(frozen=True)
class Sources(Flags):
    """Draft sources other than the skip configs."""

    low_precision: Literal["8", "4", "none"] | None = flag(
        "Draft with weights rounded to this many bits.  [default: from the skip config; without "
        "one, 8 where that is fast]"
    )
    window: int | None = flag(
        "In long texts, let drafts attend only to the first few and the last TOKENS tokens; 0: to "
        "all.  [default: from the skip config; without one, 1024 for 8-bit drafts]",
        "TOKENS",
        min=0,
    )
    lookup: bool | None = of_option("lookup")
    lookup_file: Path | None = flag("Also look up drafts in this UTF-8 text file.", "FILE")
    source: list[str] | None = flag(
        "Also draft with this source, one flag for each; installed packages may add some.",
        f"<{'|'.join(names('source'))}>",
    )
    assistant: str | None = flag(
        "Draft with a second model, a Gemma 4 assistant, an EAGLE-3 head, a DFlash drafter or "
        "Medusa heads: a folder or a Hub id.",
        "MODEL",
    )
    draft_memory: float | None = flag(
        "Memory for copies of weights that drafts need.  [default: half of the free memory]",
        "GB",
        min=0,
    )

    @property
    def memory(self) -> int | None:
        """--draft-memory in bytes."""
        return None if self.draft_memory is None else int(self.draft_memory * 1e9)

    @cached_property
    def text(self) -> str | None:
        """The text of --lookup-file."""
        if self.lookup_file is None:
            return None
        if self.lookup is False:
            raise ValueError("give --lookup-file or --no-lookup, not both")
        return text_in("--lookup-file", self.lookup_file)

    def changed(self, skip: SkipConfig) -> SkipConfig:
        """Return the skip config with the requested window and precision."""
        if self.window is not None and self.window != (skip.window or 0):
            skip = replace(skip, window=self.window or None, costs=None)
        if self.low_precision is None:
            return skip
        bits: Any = self.low_precision
        low = None if bits == "none" else LowPrecision(bits=int(bits))  # type: ignore[arg-type]
        if low == skip.low:
            return skip
        if skip.trained is not None and low is not None:
            raise ValueError(
                f"--low-precision {bits} does not match what this skip config's weights were "
                "trained for; leave it out"
            )
        return replace(skip, low=low, costs=None)


@dataclass(frozen=True)
@_with_options
class Pace(Flags):
    """Options of decoding that the command line passes on unchanged."""

    adaptive: str | None = of_option("adaptive")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings by name.

        Raises:
            ValueError: --adaptive is not a list of numbers by name, or a number is out of range.
        """
        values = self.values(Pace)
        if self.adaptive is not None:
            pairs = [each.partition("=")[::2] for each in self.adaptive.split(",")]
            try:
                chosen = {name.strip(): float(value) for name, value in pairs}
            except ValueError as error:
                raise ValueError(
                    f"--adaptive must be like alpha=0.85,epsilon=0.02; got {self.adaptive!r}"
                ) from error
            values["adaptive"] = DecodingOptions(adaptive=chosen).adaptive  # checked
        return values


@dataclass(frozen=True)
class DraftFlags(Sources, Skip):
    """All flags that select draft sources. Their files are read at once: errors come early."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.given, self.text


@dataclass(frozen=True)
class Decoding(Pace, DraftFlags):
    """How to decode: what drafts, how many tokens, and whether to draft at all."""

    controller: ControllerName | None = of_option("controller")
    remember: str | None = of_option("remember")
    remember_tokens: int | None = of_option("remember_tokens")
    no_draft: bool = switch("--no-draft", "Decode without drafting.")

    @property
    def settings(self) -> dict[str, Any]:
        also = {name: getattr(self, name) for name in ("controller", *REMEMBERING)}
        return also | super().settings


@dataclass(frozen=True)
class Sampling(Flags):
    """The distribution from which tokens are drawn."""

    do_sample: bool = switch("--do-sample", "Sample instead of taking the most likely token.")
    temperature: float | None = flag(
        "Sample at this temperature; 0: take the most likely tokens.  [default: 0; with "
        "--do-sample the model's setting, else 1]",
        "T",
    )
    top_p: float | None = flag(
        "Sample from the smallest set of most likely tokens whose probabilities add up to P.  "
        "[default: the model's setting, else all tokens]",
        "P",
        min=0,
        max=1,
    )
    top_k: int | None = flag(
        "Sample from the K most likely tokens; 0: from all.  [default: the model's setting, else "
        "50, as in transformers]",
        "K",
        min=0,
    )
    acceptance: Literal["coupled", "rejection", "spectr"] | None = of_option("acceptance")

    def checked(self, talk: Talk, seed: int | None = None) -> Self:
        """Return these flags with sampling on or off as --temperature says.

        Warns about flags without effect.

        Raises:
            ValueError: a value is invalid.
        """
        chosen, given = self, self.temperature
        if given is not None and given < 0:
            raise ValueError(f"--temperature must be 0 or more, got {given}")
        if given is not None and given < COLDEST:
            idle = {"do_sample": self.do_sample or None}
            warn_idle(idle, f"with --temperature {given:g}, which takes the most likely tokens")
            chosen = replace(self, do_sample=False, temperature=None)
        elif given is not None and not self.do_sample:
            talk.say(f"sampling, because --temperature is {given:g}")
            chosen = replace(self, do_sample=True)
        if not chosen.do_sample:
            settings = {**chosen.settings, "acceptance": self.acceptance, "seed": seed}
            warn_idle(settings, "without --do-sample or --temperature")
        return chosen

    @property
    def settings(self) -> dict[str, Any]:
        """Temperature, top-p and top-k. None stands for the model's own setting."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def task(self, model: Any, max_new_tokens: int, *, seed: int, execution: str) -> Task:
        """The task a benchmark gives to every method, with the model's own settings filled in."""
        from layerskip.api.arguments import sampling_of
        from layerskip.bench.methods import Task

        law = sampling_of(model, **self.settings) if self.do_sample else {}
        return Task(
            max_new_tokens,
            self.do_sample,
            **law,
            acceptance=self.acceptance or "coupled",
            seed=seed,
            execution=execution,
        )


@dataclass(frozen=True)
class Writing(Sampling):
    """What to write: the distribution, how a text begins and ends, and its form."""

    min_p: float | None = flag(
        "Sample only tokens that are at least P times as likely as the most likely token.",
        "P",
        min=0,
        max=1,
    )
    repetition_penalty: float | None = flag(
        "Make tokens that are already in the text less likely if X is above 1.", "X"
    )
    system: str | None = flag(
        "Begin chats that have no system message with this one; all prompts become chats.", "TEXT"
    )
    stop: list[str] | None = flag("End the text after this string; repeatable.", "TEXT")
    json_schema: Path | None = flag("Write JSON that matches the schema in this file.", "FILE")
    regex: str | None = flag("Write text that matches this regular expression.", "PATTERN")

    def checked(self, talk: Talk, seed: int | None = None) -> Self:
        chosen = super().checked(talk, seed)
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ValueError(
                "--repetition-penalty must be positive and finite (1 is off), got "
                f"{self.repetition_penalty}"
            )
        if not all(self.stop or ()):
            raise ValueError("--stop is empty; give the text to end at")
        if not chosen.do_sample:
            warn_idle({"min_p": self.min_p}, "without --do-sample or --temperature")
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("give --json-schema or --regex, not both")
        _ = chosen.schema  # before anything is loaded
        return chosen

    @cached_property
    def schema(self) -> str | None:
        """The contents of the --json-schema file, read once, since it may be a pipe."""
        return None if self.json_schema is None else text_in("--json-schema", self.json_schema)

    def arguments(self, tokenizer: Any) -> dict[str, Any]:
        """The arguments for `layerskip.generate` besides those of sampling and processors."""
        ends = {"stop_strings": self.stop, "tokenizer": tokenizer} if self.stop else {}
        given = {"repetition_penalty": self.repetition_penalty, "min_p": self.min_p}
        return ends | {name: value for name, value in given.items() if value is not None}

    def processors(self, loaded: Loaded, prompt: Sequence[int] = ()) -> list[Any]:
        """The logits processors that give the text after a prompt its form: at most one."""
        if self.schema is None and self.regex is None:
            return []
        from layerskip.api.arguments import end_tokens
        from layerskip.serving.formats import left_open, reasoning_of, template_of
        from layerskip.texts.grammars import json_schema, regex

        tokenizer, eos = loaded.tokenizer, sorted(end_tokens(loaded.model)) or None
        after = left_open(reasoning_of("auto", template_of(tokenizer)), tokenizer, prompt)
        if self.schema is not None:
            return [json_schema(self.schema, tokenizer, eos=eos, after=after)]
        assert self.regex is not None
        return [regex(self.regex, tokenizer, eos=eos, after=after)]


def check_limit(name: str, value: float | None, unit: str) -> None:
    """Raise an error for the time limit of a command that is not positive."""
    if value is not None and value <= 0:
        raise ValueError(f"--{name} must be more than 0 {unit} and finite, got {value}")


def load_skips(paths: Sequence[str] | None, entry: str | None) -> dict[str, SkipConfig]:
    """Load the --skip files: configs by path. --entry picks one where a file holds several."""
    if not paths:
        warn_idle({"entry": entry}, "without --skip")
    elif len({*paths}) < len(paths):
        raise ValueError("--skip names a file twice; give each skip config once")
    return {path: SkipConfig.load(path, entry) for path in paths or ()}


def text_in(name: str, path: Path) -> str:
    """Read the text file that the flag `name` points to."""
    with errors_of(f"{name} {path}"):
        text = read_text(path).decode()
        if not text:
            raise ValueError("it is empty; give a file with text")
        return text


def warn_idle(flags: dict[str, Any], reason: str) -> None:
    """Warn about each flag that was given but has no effect. False stands for the `--no-` form."""
    for name, value in flags.items():
        if value is not None:
            flag_name = f"{'no-' if value is False else ''}{name.replace('_', '-')}"
            warnings.warn(f"--{flag_name} has no effect {reason}", stacklevel=2)
