"""The run command: a file of prompts answered into a file; every heavy import waits."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerskip.cli.drafting import Drafting, Sources, open_decoding
from layerskip.cli.options import (
    Chat,
    DraftFlags,
    Loading,
    MaxNewTokens,
    MaxRows,
    Memory,
    Quiet,
    Sampling,
    Seed,
    Wording,
    read_given,
    spoken,
)
from layerskip.cli.terminal import Talk
from layerskip.prompts import Prompt

if TYPE_CHECKING:
    from layerskip.checkpoints import Loaded
    from layerskip.serving.files import Progress
    from layerskip.serving.tasks import Task

_AHEAD = 4  # times as many prompts as run at once are sorted by length


def run(
    *,
    loading: Loading,
    prompts: Annotated[
        Path, typer.Argument(metavar="PROMPTS", help="JSON lines, or text, one prompt a line.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="JSON lines, one for each prompt as it is done; what is there is not done again.",
        ),
    ],
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Every N-th prompt from the I-th, counted from 0.")
    ] = "0/1",
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Try again what failed in an earlier run.")
    ] = False,
    chat: Chat = False,
    wording: Wording,
    max_new_tokens: MaxNewTokens = 128,
    max_rows: MaxRows = 16,
    memory: Memory = None,
    sampling: Sampling,
    seed: Seed = 0,
    draft: DraftFlags,
    sources: Sources,
    drafting: Drafting,
    quiet: Quiet = False,
) -> None:
    """Answer a file of prompts, many at once; goes on where an earlier run ended."""
    index, count = _shard(shard)
    if prompts.exists() and output.exists() and prompts.samefile(output):
        raise ValueError(f"--output {output} is the file of the prompts; give another")
    chosen = spoken(read_given(prompts), chat, wording.system)
    sampling.check()
    wording.check(sampling.do_sample)
    talk = Talk(quiet)

    def check(loaded: Loaded) -> None:
        from layerskip.checkpoints import encode

        if not loaded.tokenizer.chat_template:  # else each prompt would fail by itself
            for each in (each for each in chosen if each.messages is not None):
                encode(loaded.tokenizer, each)

    from layerskip.serving.files import answer_all, open_answers, shard_of

    with open_answers(output, retry_errors=retry_errors) as answers:
        asked = shard_of(chosen, index, count)
        left = sum(each.id not in answers.done for _, each in asked)
        if left < len(asked):
            talk.say(f"{len(asked) - left} of {len(asked)} prompts have a row already")
        if not left:
            return
        opening = open_decoding(draft, sources, drafting, sampling, loading, talk, check)
        with opening as (loaded, _, settings, _):
            from layerskip.checkpoints import encode
            from layerskip.serving.scheduler import Serving

            names = ("do_sample", "temperature", "top_k", "top_p")
            law = {name: settings.pop(name) for name in names if name in settings}
            ahead = _AHEAD * max_rows
            serving = Serving(
                loaded.model,
                memory=None if memory is None else int(memory * 1e9),
                max_rows=max_rows,
                max_queue=2 * ahead,
                **settings,
            )

            def task_of(number: int, prompt: Prompt) -> Task:
                ids = encode(loaded.tokenizer, prompt)[0].tolist()
                return _task(loaded, ids, wording, max_new_tokens, seed=seed + number, **law)

            told = _Told(talk, left)
            progress = answer_all(
                serving, loaded.tokenizer, asked, task_of, answers, ahead=ahead, told=told
            )
            talk.say(told.words(progress))
        if progress.errors:
            talk.say(f"{progress.errors} prompts failed; --retry-errors tries them again")
            raise typer.Exit(1)


def _shard(given: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", given, re.ASCII)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if index >= count:
        raise ValueError(f"--shard must be I/N with I from 0 to N-1, as 0/4, got {given}")
    return index, count


def _task(
    loaded: Loaded, ids: list[int], wording: Wording, max_new_tokens: int, **law: Any
) -> Task:
    from transformers import RepetitionPenaltyLogitsProcessor

    from layerskip.serving.history import StopStrings
    from layerskip.serving.tasks import Task

    penalty, stop = wording.repetition_penalty, wording.stop
    return Task(
        ids,
        max_new_tokens,
        min_p=wording.min_p,
        processors=[] if penalty is None else [RepetitionPenaltyLogitsProcessor(penalty)],
        stop=StopStrings(loaded.tokenizer, stop, len(ids)) if stop else None,
        **law,
    )


class _Told:
    """Shows on a terminal how far a run is."""

    def __init__(self, talk: Talk, whole: int) -> None:
        self._talk, self._whole = talk, whole
        self._began = self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._talk.live and now - self._last > 0.2:
            self._last = now
            self._talk.progress(self.words(progress))

    def words(self, progress: Progress) -> str:
        """Done, speed, and the time left as far as rows so far tell."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        words = f"{progress.rows} of {self._whole} prompts, {progress.tokens} tokens, "
        words += f"{progress.tokens / seconds:.1f} tokens/s"
        if 0 < progress.rows < self._whole:
            left = seconds / progress.rows * (self._whole - progress.rows)
            words += f", {left / 60:.1f} min left"
        return words
