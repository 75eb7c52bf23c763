"""The train command: trains the early exits of a model, or a draft for the frozen model.

Heavy imports happen only after the flags are checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from layerskip.cli import flags
from layerskip.cli.flags import PANEL_OF_EXITS, check_limit, flag
from layerskip.cli.inputs import check_folder, read_given
from layerskip.cli.opening import open_model, open_passes
from layerskip.cli.terminal import Talk, aligned, to_json, two_columns
from layerskip.config.registry import LossName, StudentName
from layerskip.config.skips import SkipConfig
from layerskip.files.locking import LOCK, alone
from layerskip.files.trainings import check_record

MINUTES = 30.0


@dataclass(frozen=True)
class ExitFlags(flags.Flags):
    """Flags that apply only to the training of exits."""

    exits: str | None = flag("Exits to train, such as 4,8.  [default: all]", "LAYERS")
    keep: float | None = flag(
        "Weight of the loss that keeps the final distribution in place.  [default: 1]", "W"
    )
    dropout: float | None = flag(
        "Probability of dropping the last layer, lower for earlier ones.  [default: 0.1]", "P"
    )
    curriculum: Literal["rotational", "gradual", "all"] | None = flag(
        "Exits per step: rotate over every 8th; deepest first; all.  [default: rotational]"
    )
    lora: int | None = flag(
        "Train low-rank adapters of this rank and merge them at the end (needs peft).  [default: "
        "train all weights]",
        "RANK",
        min=1,
    )
    steps: int | None = flag("Train for N steps.", "N", min=1)
    rows: int | None = flag("Windows per step.  [default: 4]", "B", min=1)
    window: int | None = flag("Tokens per window.  [default: 256]", "T", min=2)
    init: Literal["checkpoint", "random"] | None = flag(
        "Start from the checkpoint or from random weights.  [default: checkpoint]"
    )
    config: Path | None = flag(
        "Model shape for random weights: a transformers config.json.  [default: MODEL's]", "FILE"
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were given, by name."""
        return {name: value for name, value in self.values().items() if value is not None}

    def layers(self) -> tuple[int, ...]:
        """The exits to train; empty for all."""
        if self.exits in (None, "all"):
            return ()
        try:
            return tuple(int(each) for each in str(self.exits).split(","))
        except ValueError as error:
            raise ValueError(
                f"--exits must be all, or layers with commas, such as 4,8; got {self.exits!r}"
            ) from error


for each in fields(ExitFlags):
    getattr(ExitFlags, each.name).rich_help_panel = PANEL_OF_EXITS


def train(
    *,
    output: Path = flag(
        "Folder for the results. Repeating the command resumes training.", "DIR", default=...
    ),
    prompts: Path | None = flag(
        "Train on the model's answers to these prompts.  [default: prompts it writes itself]",
        "FILE",
    ),
    texts: Path | None = flag("Train on these texts unchanged.", "FILE"),
    recipe: Literal["exits", "draft"] | None = flag(
        "exits: train the model itself so that its early layers draft well, and write a new "
        "checkpoint; draft: train a draft for the frozen model.  [default: exits; draft with "
        "--draft]"
    ),
    draft: StudentName | None = flag(
        "Kind of draft. exit-block: a layer after an early exit (as Kangaroo's adapter); heads: "
        "four tokens at once from the last hidden state and the token (as Medusa); streams: "
        "likewise, by a layer that looks ahead (as ProphetNet); assistant: further training of a "
        "Gemma 4 assistant; eagle3: an EAGLE-3 head in vLLM's speculators format."
    ),
    exit_layer: int | None = flag(
        "Layers before an exit block.  [default: a quarter of all]", "E", min=1
    ),
    start: str | None = flag(
        "Assistant or EAGLE-3 head to train further: a folder or a Hub id.", "NAME"
    ),
    loss: LossName | None = flag(
        "Loss to minimise; ce is cross-entropy with the text.  [default: lk; ce with random "
        "weights]"
    ),
    rate: float | None = flag(
        "Peak learning rate; short trainings need a higher one.  [default: by kind]", "R"
    ),
    tokens: int | None = flag("Train on N tokens, repeats included.", "N", min=1),
    minutes: float | None = flag(
        f"Time for the whole command, judging included.  [default: {MINUTES:g}, or --tokens]", "M"
    ),
    temperature: float = flag("Temperature of the answers, as in serving.", "T", default=0.8),
    seed: flags.Seed = 0,
    of_exits: ExitFlags,
    loading: flags.Loading,
    quiet: flags.Quiet = False,
    as_json: flags.AsJson = False,
) -> None:
    """Train early exits, or a draft (--draft), and say if that pays.

    Exits are written as a new checkpoint; a draft leaves the model as it is. DIR keeps every stage
    (texts, training, judging), so the same command resumes after a stop. To train in several
    processes, run torchrun --nproc-per-node N -m layerskip train ..., or accelerate launch.

    Example: layerskip train demo-llama --output trained --minutes 30
    """
    started = time.monotonic()
    check_limit("minutes", minutes, "minutes")
    check_folder(output)
    if recipe == "exits" and draft is not None:
        raise ValueError("--draft needs --recipe draft; leave it out")
    if recipe != "draft" and draft is None:
        execution = None if loading.execution == "auto" else loading.execution
        given = {"exit-layer": exit_layer, "start": start, "tokens": tokens}
        _refuse(given | {"execution": execution}, "--draft KIND")
        shared: dict[str, Any] = {"loss": loss, "rate": rate, "minutes": minutes}
        shared |= {"temperature": temperature, "seed": seed}
        train_exits(output, prompts, texts, of_exits, shared, loading, quiet, started, as_json)
        return
    _refuse(of_exits.settings, "--recipe exits")
    if draft is None:
        kinds = ", ".join(get_args(StudentName))
        raise ValueError(f"--recipe draft needs --draft KIND, one of {kinds}")
    loss = loss or "lk"
    if draft != "exit-block":
        _refuse({"exit-layer": exit_layer}, "--draft exit-block")
    if draft not in ("assistant", "eagle3"):
        _refuse({"start": start}, "--draft assistant or eagle3")
    if draft == "assistant" and (start is None or loss != "lk"):
        raise ValueError("--draft assistant needs --start NAME and --loss lk")
    if draft == "eagle3" and loss != "lk":
        raise ValueError("--draft eagle3 needs --loss lk")
    asked = None if prompts is None else read_given(prompts)
    base = None if exit_layer is None else SkipConfig.early_exit(exit_layer)
    if tokens is None and minutes is None:
        minutes = MINUTES
    import torch

    from layerskip.api.loading import load_official
    from layerskip.training import processes
    from layerskip.training.assistant_training import AssistantTraining
    from layerskip.training.data import Corpus
    from layerskip.training.draft_training import Recipe, Training
    from layerskip.training.eagle_training import EagleTraining
    from layerskip.training.judging import judge
    from layerskip.training.stages import RECORD, Texts

    with _together(output):
        talk = Talk(quiet or not processes.is_first())
        loaded = open_model(loading, talk)
        together = processes.count()
        settings = Recipe(
            kind=draft,
            loss=loss,
            rate=rate,
            skip=base,
            tokens=tokens,
            minutes=minutes,
            seed=seed,
            temperature=temperature,
            rows=-(-Recipe.rows // together) * together,
        )
        corpus = None
        if texts is None or asked is not None:
            corpus = Corpus(
                loaded.model, loaded.tokenizer, asked, temperature=temperature, seed=seed
            )
        read = Texts(loaded.tokenizer, corpus, texts)
        with open_passes(loaded, loading, talk, torch.get_num_threads()) as opened:
            reporting = _reporting(talk, started)
            if draft in ("assistant", "eagle3"):
                official = None if start is None else load_official(start, loaded)
                if start is not None and official is None:
                    raise ValueError(f"--start must name a head or an assistant, got {start}")
                place = None if official is None else str(official.folder or start)
                training_of = EagleTraining if draft == "eagle3" else AssistantTraining
                record = training_of(place, opened, read, settings, output, **reporting).run_all()
            else:
                training = Training(opened, read, settings, output, **reporting)
                record = training.finished(RECORD, check_record) or {}
                if not record:
                    made = training.run()
                    if processes.is_first():
                        record = judge(training, made, loaded.skip_config())
        if not processes.is_first():
            return
    command = f"generate {loaded.name} --prompt TEXT"
    if draft in ("assistant", "eagle3"):
        words, with_it = _overlaps(record), f" --assistant {output / draft}"
    else:
        words = _verdict(output, "training")
        with_it = f" --skip {output / 'skip.json'}" if record["pays"] else ""
    _show(talk, words, f"{command}{with_it}", record, as_json)


def _refuse(given: Mapping[str, Any], needed: str) -> None:
    """Refuse flags, by name, that were given without the one that they need."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name} needs {needed}; leave it out")


@contextmanager
def _together(output: Path) -> Iterator[None]:
    """Join the processes that were started together; the first keeps others from the folder."""
    from layerskip.training import processes

    with (
        processes.process_group(),
        alone(output / LOCK, output) if processes.is_first() else nullcontext(),
    ):
        yield


def _reporting(talk: Talk, started: float) -> dict[str, Any]:
    """Arguments of a training: where its messages go, and when the command began."""
    return {
        "progress": lambda what, share: talk.progress(f"{what} ({share:.0%})"),
        "say": talk.say,
        "started": started,
    }


def _show(talk: Talk, words: str, following: str, record: dict[str, Any], as_json: bool) -> None:
    """Print the results of a training, and the command that uses them."""
    talk.progress("")
    print(words)
    talk.say(f"next: layerskip {following}")
    if as_json:
        print(to_json(record))


def train_exits(
    output: Path,
    prompts: Path | None,
    texts: Path | None,
    of_exits: ExitFlags,
    shared: dict[str, Any],
    loading: flags.Loading,
    quiet: bool,
    started: float,
    as_json: bool,
) -> None:
    """Run `layerskip train --recipe exits`."""
    settings = of_exits.settings | {name: each for name, each in shared.items() if each is not None}
    settings["exits"], config = of_exits.layers(), settings.pop("config", None)
    random = settings.get("init") == "random"
    if not random:
        _refuse({"config": config}, "--init random")
    if random and (texts is None or prompts is not None):
        raise ValueError("random weights cannot answer prompts; give --texts FILE alone")
    if random:
        settings = {"loss": "ce", "keep": 0.0, "rate": 3e-3} | settings
    if "steps" not in settings and "minutes" not in settings:
        settings["minutes"] = MINUTES
    asked = None if prompts is None else read_given(prompts)

    from layerskip.timing.threads import cpu_threads
    from layerskip.training import processes
    from layerskip.training.data import Corpus
    from layerskip.training.exit_model import random_model
    from layerskip.training.exit_training import ExitRecipe, ExitTraining
    from layerskip.training.stages import Texts

    recipe = ExitRecipe(**settings)
    with _together(output), cpu_threads(loading.threads):
        talk = Talk(quiet or not processes.is_first())
        loaded = open_model(loading, talk)
        model, tokenizer, corpus = loaded.model, loaded.tokenizer, None
        if random:
            model = random_model(config, model, recipe.seed)
        elif texts is None or asked is not None:
            corpus = Corpus(
                model, tokenizer, asked, temperature=recipe.temperature, seed=recipe.seed
            )
        reporting = _reporting(talk, started)
        read = Texts(tokenizer, corpus, texts)
        record = ExitTraining(model, read, recipe, output, **reporting).run()
        if not processes.is_first():
            return
    _show(talk, _verdict(output, "exits"), f"benchmark {output} --prompts FILE", record, as_json)


def _verdict(output: Path, kind: str) -> str:
    """The results of a training in words, as a report has them."""
    from layerskip.analysis import verdict
    from layerskip.analysis.report import kinds
    from layerskip.training.stages import RECORD

    subject = kinds()[kind]
    return verdict.words([subject.judge(each) for each in subject.load([output / RECORD])])


def _read(record: dict[str, Any]) -> tuple[str, str]:
    """How much a training has read, and how long its stages took."""
    spent = ", ".join(f"{name} {took / 60:.0f} min" for name, took in record["seconds"].items())
    return "trained on", f"{record['tokens']:,} tokens of {record['text_tokens']:,}; {spent}"


def _overlaps(record: dict[str, Any]) -> str:
    """Format the results of training an assistant further."""
    lines = [["accepted draft tokens", "1st", "2nd", "3rd", "4th"]]
    for name, shares in record["overlap"].items():
        lines.append([name, *(f"{share:.3f}" for share in shares)])
    return f"{aligned(lines)}\n{two_columns([_read(record)])}"
