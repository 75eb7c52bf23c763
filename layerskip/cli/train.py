"""The train command: a draft for a frozen model, trained and judged.

Heavy imports wait until the flags are known to be right.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from layerskip.cli.options import (
    AsJson,
    Loading,
    Quiet,
    Seed,
    make_folder,
    open_model,
    open_passes,
    read_given,
    seconds_given,
    to_json,
)
from layerskip.cli.terminal import Talk, aligned, ratio, two_columns
from layerskip.config import SkipConfig

MINUTES = 30.0


def train(
    *,
    output: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Where the draft comes to lie; the same again goes on with it."
        ),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts for the model to answer.  [default: what it would ask itself]",
        ),
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts to train on as they are.")
    ] = None,
    draft: Annotated[
        Literal["healed", "exit-block", "feature-block", "heads", "streams", "assistant"],
        typer.Option(
            help="What is trained: what corrects low precision, a layer behind an early exit, one "
            "over the last hidden state and the token, or four tokens at once from those: by "
            "heads, or by such a layer with streams that look ahead; or an assistant of Gemma 4, "
            "further."
        ),
    ] = "healed",
    skip: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The draft to heal, from where its weights are if it names healed ones.  "
            "[default: all in 4 bits, head 8]",
        ),
    ] = None,
    exit_layer: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="E", help="Layers before an exit block.  [default: a quarter of them]"
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The assistant to train further: a folder or a Hub id."),
    ] = None,
    loss: Annotated[
        Literal["lk", "kl", "tvd++", "ce"], typer.Option(help="What training lowers.")
    ] = "lk",
    optimizer: Annotated[
        Literal["adamw", "muon"], typer.Option(help="What lowers it: Muon is for matrices.")
    ] = "adamw",
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R", help="Of learning, at most; short trainings like more.  [default: by kind]"
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="To train on, in all passes.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="M",
            help=f"Of the whole command, judging included.  [default: {MINUTES:g}, or --tokens]",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", help="The same as --minutes, in seconds.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=1, metavar="R", help="Of a healed draft's deltas.  [default: 16]"),
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Of the answers, as in serving.")
    ] = 0.8,
    seed: Seed = 0,
    loading: Loading,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a draft for your model, which stays as it is, and say whether it pays.

    Stages (texts, features, training, judging) are kept in DIR: after a kill the same command goes
    on where it was. Several processes train together: torchrun --nproc-per-node N -m layerskip
    train ..., or accelerate launch.
    """
    started = time.monotonic()
    seconds = seconds_given(timeout, minutes)
    minutes = None if seconds is None else seconds / 60
    if prompts is not None and texts is not None:
        raise ValueError("give --prompts or --texts, not both")
    for flag, value, kind in (
        ("--skip", skip, "healed"),
        ("--rank", rank, "healed"),
        ("--exit-layer", exit_layer, "exit-block"),
        ("--start", start, "assistant"),
    ):
        if value is not None and draft != kind:
            raise ValueError(f"{flag} is of --draft {kind}; leave it out with {draft}")
    if draft == "assistant" and (start is None or loss != "lk"):
        raise ValueError("--draft assistant needs --start NAME, and lowers --loss lk")
    file = prompts or texts
    given = None if file is None else read_given(file)
    base = None if skip is None else SkipConfig.load(skip)
    if exit_layer is not None:
        base = SkipConfig.early_exit(exit_layer)
    if tokens is None and minutes is None:
        minutes = MINUTES
    make_folder(output)
    import torch

    from layerskip.checkpoints import load_official
    from layerskip.training import processes
    from layerskip.training.assistants import AssistantTraining
    from layerskip.training.data import Corpus
    from layerskip.training.drafts import Recipe, Training
    from layerskip.training.judging import judge, read_record
    from layerskip.training.students import RANK

    with processes.process_group():
        talk = Talk(quiet or not processes.first())
        loaded = open_model(loading, talk)
        together = processes.count()
        recipe = Recipe(
            kind=draft,
            loss=loss,
            optimizer=optimizer,
            rate=rate,
            skip=base,
            tokens=tokens,
            minutes=minutes,
            seed=seed,
            temperature=temperature,
            rank=rank or RANK,
            rows=-(-Recipe.rows // together) * together,
        )
        corpus = Corpus(
            loaded.model,
            loaded.tokenizer,
            given,
            answer=texts is None,
            temperature=temperature,
            seed=seed,
        )
        with open_passes(loaded, loading, talk, torch.get_num_threads()) as opened:
            said: dict[str, Any] = {
                "progress": lambda what, share: talk.progress(f"{what} ({share:.0%})"),
                "say": talk.say,
                "started": started,
            }
            if start is not None:
                official = load_official(start, loaded)
                if official is None:
                    raise ValueError(f"--start must name an assistant of Gemma 4, got {start}")
                place = str(official.folder or start)
                found = AssistantTraining(place, opened, corpus, recipe, output, **said).further()
                talk.progress("")
                if processes.first():
                    print(_overlaps(found))
                    if as_json:
                        print(to_json(found))
                return
            training = Training(opened, corpus, recipe, output, **said)
            record = read_record(output)
            if record is None:
                training.run()
                record = judge(training) if processes.first() else None
            else:
                talk.say(f"this training is finished; {output / 'train.json'} says what came of it")
            if record is None or not processes.first():
                return
    talk.progress("")
    print(_table(record))
    with_it = f" --skip {output / 'skip.json'}" if record["pays"] else ""
    talk.say(f"next: layerskip generate {loaded.name} --prompt TEXT{with_it}")
    if as_json:
        print(to_json(record))


def _overlaps(record: dict[str, Any]) -> str:
    """What an assistant's further training brought, in words."""
    lines = [["drafted token is accepted", "1st", "2nd", "3rd", "4th"]]
    for name, shares in record["overlap"].items():
        lines.append([name, *(f"{share:.3f}" for share in shares)])
    notes = [("trained on", f"{record['tokens']:,} tokens of {record['text_tokens']:,}")]
    return f"{aligned(lines)}\n{two_columns(notes)}"


def _table(record: dict[str, Any]) -> str:
    lines = [["draft", "greedy", "coupled", "2nd", "4th", "c", "promised", "measured"]]
    for name, each in record["drafts"].items():
        coupled, timed = each["coupled"], record["timed"].get(name)
        lines.append(
            [
                name,
                *(f"{share:.3f}" for share in (each["greedy"][0], *coupled[:2], coupled[3])),
                f"{each['costs']['draft']:.2f}",
                f"{each['formula']:.2f}",
                ratio(timed["speedup"], timed["low"], timed["high"]) if timed else "-",
            ]
        )
    spent = ", ".join(f"{name} {took / 60:.0f} min" for name, took in record["seconds"].items())
    notes = [
        ("trained on", f"{record['tokens']:,} tokens of {record['text_tokens']:,}; {spent}"),
        ("it pays", "yes" if record["pays"] else "no: keep the default, it is as fast"),
    ]
    return f"{aligned(lines)}\n{two_columns(notes)}"
