"""Flags that several commands share, and what they do with them; every heavy import waits."""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layerskip.cli.terminal import Talk
from layerskip.config import SkipConfig
from layerskip.named import NAMED_PROMPTS, SHIPPED, SHIPPED_PROMPTS
from layerskip.prompts import Prompt, by_category, read_prompts

if TYPE_CHECKING:
    from layerskip.bench.methods import Task
    from layerskip.checkpoints import Loaded
    from layerskip.decoding.rounds import DecodingStats
    from layerskip.model.sublayers import Sublayers

Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompts; spec-bench are 36 questions, copying 9 requests whose answers copy.  "
        "[default: those shipped with the model]",
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Prompts are what a user says: use the chat template.")
]
MaxDraftLength = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens a round drafts at most.")
]
Threshold = Annotated[
    float | None,
    typer.Option(min=0, max=1, metavar="P", help="Of controllers with a threshold."),
]
Branches = Annotated[
    bool | None,
    typer.Option(
        "--branches/--no-branches",
        help="Verify second-best tokens of drafts, too, where they are expected to pay.  [default: "
        "the skip config's; without one --no-branches]",
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="Tokens to generate at most."),
]
Minutes = Annotated[
    float | None, typer.Option(metavar="M", help="The same as --timeout, in minutes.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Of sampling.")]
DrawnSeed = Annotated[
    int | None, typer.Option(metavar="N", help="Of sampling; drawn for each text if not given.")
]
MaxRows = Annotated[int, typer.Option(min=1, metavar="N", help="The most texts at once.")]
Memory = Annotated[
    float | None,
    typer.Option(min=0, metavar="GB", help="What keys and values of texts at once may take."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Results, warnings and errors only.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document as the last line.")]


@dataclass(frozen=True)
class Loading:
    """Which model, and how it runs."""

    model: Annotated[
        str,
        typer.Argument(
            help="Hub id, local folder, a shipped model (demo-llama, demo-gemma2, demo-gemma4), or "
            "one of `make checkpoints` (smollm2, gemma3-270m)."
        ),
    ] = "demo-llama"
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, ...")] = (
        "auto"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float64"],
        typer.Option(help="auto: the checkpoint's; float32 for shipped models on the CPU."),
    ] = "auto"
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False
    execution: Annotated[
        Literal["auto", "modules", "fused", "native", "compiled"],
        typer.Option(
            help="How sublayers run: the library's modules, fewer kernels, one native call a pass "
            "(CPU; built once, half a minute), or kernels compiled (for minutes, in every run)."
        ),
    ] = "auto"

    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Of the CPU, in all.  [default: as many as passes are fastest on, measured]",
        ),
    ] = None

    @property
    def where(self) -> dict[str, Any]:
        """What `checkpoints.load` wants to know."""
        return {
            "name": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass(frozen=True)
class DraftFlags:
    """Which sublayers a draft leaves out."""

    skip: Annotated[str | None, typer.Option(metavar="FILE", help="Skip config, as JSON.")] = None
    exit_layer: Annotated[
        int | None, typer.Option(metavar="E", help="Draft with layers 0 to E-1: an early exit.")
    ] = None

    def given(self) -> SkipConfig | None:
        """What is named; asked before the model is loaded, so that errors are quick."""
        if self.skip is not None and self.exit_layer is not None:
            raise ValueError("give --skip or --exit-layer, not both")
        if self.exit_layer is not None:
            return SkipConfig.early_exit(self.exit_layer)
        return None if self.skip is None else SkipConfig.load(self.skip)


@dataclass(frozen=True)
class Sampling:
    """What texts are drawn from."""

    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="Sample instead of taking the likeliest token.")
    ] = False
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="Of sampling.  [default: the model's setting, else 1]"),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="P", help="Of sampling.  [default: likewise]"),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="K",
            help="Of sampling; 0 is off.  [default: likewise, else 50, as in transformers]",
        ),
    ] = None
    acceptance: Annotated[
        Literal["coupled", "rejection"] | None,
        typer.Option(help="Accept rule of sampling.  [default: coupled]"),
    ] = None

    def check(self, seed: int | None = None) -> None:
        """Refuse a temperature that is none; warn of flags without an effect."""
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(
                f"--temperature must be positive and finite, got {self.temperature}; for the "
                "likeliest tokens leave out --temperature and --do-sample"
            )
        if not self.do_sample:
            given = {**self.settings, "acceptance": self.acceptance, "seed": seed}
            warn_idle(given, "without --do-sample")

    @property
    def settings(self) -> dict[str, Any]:
        """The law, but for whether it is sampled from; None: the model's setting."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def task(self, model: Any, max_new_tokens: int, *, seed: int, execution: str) -> Task:
        """What decoding is asked for, the model's settings filled in."""
        from layerskip.bench.methods import Task
        from layerskip.requests import sampling_of

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
class Wording:
    """What a text begins with and where it ends, and what else its law is made of."""

    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="System message of prompts that have none; means --chat."
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End once this has been written; repeatable."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(metavar="X", help="Above 1, what was there already becomes less likely."),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="P", help="Of sampling: least share of the likeliest's chance."
        ),
    ] = None

    def check(self, do_sample: bool) -> None:
        """Refuse what can mean nothing; warn of a flag without an effect."""
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                "--repetition-penalty must be positive and finite (1 is off), got "
                f"{self.repetition_penalty}"
            )
        if not all(self.stop or ()):
            raise ValueError("--stop is empty; give the text to end at")
        if not do_sample:
            warn_idle({"min_p": self.min_p}, "without --do-sample")

    def settings(self, tokenizer: Any) -> dict[str, Any]:
        """For `layerskip.generate`."""
        found: dict[str, Any] = {}
        if self.stop:
            found |= {"stop_strings": self.stop, "tokenizer": tokenizer}
        given = {"repetition_penalty": self.repetition_penalty, "min_p": self.min_p}
        return found | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Form:
    """What a text is kept to."""

    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the text to JSON of this schema.")
    ] = None
    regex: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Keep the text to a regular expression.")
    ] = None

    def check(self) -> None:
        """Refuse both at once, and a file that cannot be read, before anything is loaded."""
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("give --json-schema or --regex, not both")
        self._schema()

    def _schema(self) -> str | None:
        if self.json_schema is None:
            return None
        try:
            return self.json_schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise ValueError(
                f"--json-schema {self.json_schema} cannot be read: {reason}"
            ) from error

    def processors(self, loaded: Loaded) -> list[Any]:
        """Logits processors, one at most."""
        schema = self._schema()
        if schema is None and self.regex is None:
            return []
        from layerskip.grammars import json_schema, regex
        from layerskip.requests import end_tokens

        eos = sorted(end_tokens(loaded.model)) or None
        if schema is not None:
            return [json_schema(schema, loaded.tokenizer, eos=eos)]
        assert self.regex is not None
        return [regex(self.regex, loaded.tokenizer, eos=eos)]


def seconds_given(timeout: float | None, minutes: float | None) -> float | None:
    """The time that a whole command may take; None where neither flag says one."""
    if timeout is not None and minutes is not None:
        raise ValueError("give --timeout SECONDS or --minutes M, not both")
    for name, value, unit in (("timeout", timeout, "seconds"), ("minutes", minutes, "minutes")):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be more than 0 {unit} and finite, got {value}")
    return timeout if minutes is None else 60 * minutes


def to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False)


def counts(stats: DecodingStats, sources: Sequence[str]) -> dict[str, Any]:
    """What a decoding drafted and accepted, in all and from each source, as `--json` has it."""
    return {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "sources": [
            {"name": name, **vars(each)}
            for name, each in zip(sources, stats.sources, strict=False)  # fewer where none drafted
        ],
    }


def by_source(counted: dict[str, Any]) -> str:
    """How often each source of `counts` drafted."""
    return ", ".join(f"{each['num_drafts']} {each['name']}" for each in counted["sources"])


def open_model(loading: Loading, talk: Talk) -> Loaded:
    talk.progress("importing torch and transformers")
    with _unsearched():
        from layerskip.checkpoints import load

    talk.progress(f"loading {loading.model}")
    loaded = load(**loading.where, bars=sys.stderr.isatty() and not talk.quiet)
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
            words += f"; more, of {most}, are not worth it here"
        talk.say(words)
        yield opened


def make_folder(folder: Path) -> None:
    """Make the folder of --output; refuse what cannot be written to, before anything is loaded."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--output {folder} cannot be written to")


def given_prompts(path: Path | None, model: str) -> list[Prompt]:
    """The prompts of a file, else those shipped with the model."""
    if path is not None:
        return read_given(path)
    if model not in SHIPPED:
        raise ValueError(
            "--prompts FILE is needed for a model of your own: JSON lines, or one prompt a line, "
            f"a few dozen of them, or {' or '.join(NAMED_PROMPTS)} (only "
            f"{' and '.join(SHIPPED)} come with prompts)"
        )
    return shipped_prompts(None)


def read_given(path: Path) -> list[Prompt]:
    """The prompts of a file, of the sample of that name, or of standard input, which is "-"."""
    if str(path) == "-":
        path = Path("/dev/stdin")
    return read_prompts(path if path.exists() else NAMED_PROMPTS.get(str(path), path))


def spoken(prompts: Sequence[Prompt], chat: bool, system: str | None = None) -> list[Prompt]:
    """The prompts, for the chat template where --chat or a system message was given."""
    if system is not None:
        return [prompt.as_chat().with_system(system) for prompt in prompts]
    return [prompt.as_chat() if chat else prompt for prompt in prompts]


def shipped_prompts(per_category: int | None) -> list[Prompt]:
    """The first few prompts of each category; None takes all."""
    return first_of_each(read_prompts(SHIPPED_PROMPTS), per_category)


def first_of_each(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first so many prompts of each category; None takes all."""
    return [prompt for each in by_category(prompts).values() for prompt in each[:limit]]


def warn_idle(flags: dict[str, Any], reason: str) -> None:
    """Warn about each flag that was given and has no effect."""
    for name, value in flags.items():
        if value is not None:
            warnings.warn(f"--{name.replace('_', '-')} has no effect {reason}", stacklevel=2)
