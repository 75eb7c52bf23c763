"""The run command: answers a file of prompts into a file. Heavy imports are deferred."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerskip.cli import flags
from layerskip.cli.flags import flag, switch, warn_idle
from layerskip.cli.inputs import as_chats, check_file, read_given
from layerskip.cli.opening import open_decoding, open_model
from layerskip.cli.terminal import Talk
from layerskip.config.shipped import model_folder
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import plural

if TYPE_CHECKING:
    from layerskip.serving.answers import Answer
    from layerskip.serving.fields import GenerationRequest
    from layerskip.serving.openai_api import Served
    from layerskip.serving.prompt_files import Answering, Answers

_AHEAD = 4  # prompts sorted by length, as a multiple of those that run at once
_READ = (".json", ".jinja", ".model", ".safetensors", ".bin")  # checkpoint files to hash
_SAMPLES, _SAMPLED = 64, 1 << 12  # pieces hashed per file, and bytes per piece


@dataclass(frozen=True)
class Limits(flags.Flags):
    """Limits on what is answered at the same time, and the first seed."""

    max_new_tokens: flags.MaxNewTokens = 128
    max_rows: flags.MaxRows = 16
    memory: flags.Memory = None
    seed: flags.Seed = 0


def run(
    *,
    loading: flags.Loading,
    prompts: Annotated[
        Path, typer.Argument(metavar="PROMPTS", help="JSON lines, or text with a prompt per line.")
    ],
    output: Path = flag(
        "Write a JSON line per prompt when it is done. Prompts that have a line are skipped.",
        "FILE",
        default=...,
    ),
    shard: str | None = flag(
        "Answer every N-th prompt from the I-th (counted from 0). Processes that share a folder "
        "may write one file.  [default: all; under torchrun this process's share]",
        "I/N",
    ),
    ray: bool = switch("--ray", "Run on the machines of a Ray cluster, using Ray Data."),
    ray_address: str | None = flag(
        "Address of the cluster.  [default: environment variable RAY_ADDRESS; without it, a "
        "cluster is started here]",
        "ADDRESS",
    ),
    ray_workers: int | None = flag(
        "Load the model N times.  [default: once per GPU, else once per machine]", "N", min=1
    ),
    retry_errors: bool = switch("--retry-errors", "Retry prompts that failed in an earlier run."),
    force: bool = switch(
        "--force",
        "Answer prompts again whose rows came from another model, other settings or another "
        "prompt, instead of refusing the file.",
    ),
    chat: flags.Chat = False,
    writing: flags.Writing,
    limits: Limits,
    decoding: flags.Decoding,
    quiet: flags.Quiet = False,
) -> None:
    """Answer a file of prompts, and resume an earlier run.

    Example: layerskip run demo-llama prompts.jsonl --output answers.jsonl
    """
    # torchrun sets these
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    part = (rank, ranks) if shard is None else _shard(shard)
    if ranks > 1 and (ray or shard is not None):
        raise ValueError("torchrun gives each process its shard; leave out --shard and --ray")
    if not ray:
        warn_idle({"ray_address": ray_address, "ray_workers": ray_workers}, "without --ray")
    if prompts.exists() and output.exists() and prompts.samefile(output):
        raise ValueError(f"--output {output} is the file of prompts; give another file")
    talk = Talk(quiet or rank > 0)
    check_file(output, talk)
    chosen = as_chats(read_given(prompts, strict=True), chat, writing.system)
    writing = writing.checked(talk)

    from layerskip.serving.prompt_files import answer_all, open_answers

    templated = next((each for each in chosen if each.messages is not None), None)
    model = _Model(limits, writing, decoding, loading, templated)
    numbered = list(enumerate(chosen))[part[0] :: part[1]]
    prints = {each.id: model.fingerprint(number, each) for number, each in numbered}
    with open_answers(output, prints, part, retry_errors=retry_errors, force=force) as answers:
        left = sum(each.id not in answers.done for _, each in numbered)
        if left < len(numbered):
            talk.say(f"{len(numbered) - left} of {plural(len(numbered), 'row')} already done")
        if not left:
            return
        began = time.monotonic()

        def progress() -> None:
            talk.progress(_so_far(answers, left, time.monotonic() - began))

        if ray:
            from layerskip.serving.ray import answer_by_ray, cluster

            with cluster(ray_address, ray_workers):
                answer_by_ray(
                    partial(model.open, Talk(quiet=True)),
                    numbered,
                    answers,
                    progress,
                    workers=ray_workers,
                    at_once=2 * limits.max_rows,
                    gpus=loading.device != "cpu",
                    say=talk.say,
                )
        else:
            with model.open(
                talk, models_here=int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            ) as answering:
                answer_all(answering, numbered, answers, progress)
        talk.say(_so_far(answers, left, time.monotonic() - began))
    if errors := answers.errors:
        talk.say(f"{plural(errors, 'prompt')} failed; --retry-errors tries them again")
        if ranks == 1:  # on an error torchrun would end the other processes
            raise typer.Exit(1)


def _shard(given: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", given, re.ASCII)
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if index >= count:
        raise ValueError(f"--shard must be I/N with I from 0 to N-1, such as 0/4; got {given}")
    return index, count


@dataclass(frozen=True)
class _Model:
    """A model to load and query, in this process or another.

    Attributes:
        templated: one of the prompts for the chat template, or None.
    """

    limits: Limits
    writing: flags.Writing
    decoding: flags.Decoding
    loading: flags.Loading
    templated: Prompt | None

    def fingerprint(self, number: int, prompt: Prompt) -> str:
        """A hash of what an answer depends on: the model, the settings and the prompt."""
        body = prompt.body or {}
        sampled = body.get("temperature", self.writing.do_sample) != 0
        seed = body.get("seed", self.limits.seed + number) if sampled else None
        return f"{self._of_model}-{self._of_settings}-{_hash(prompt.content, seed)}"

    @cached_property
    def _of_model(self) -> str:
        path = Path(self.loading.model)
        place = path if path.is_file() else model_folder(self.loading.model)
        named = self.loading.model if place is None else sampled_files(place)
        return _hash(named, self.loading.dtype)

    @cached_property
    def _of_settings(self) -> str:
        writing, names = self.writing, ("stop", "repetition_penalty", "min_p")
        sampling = [writing.do_sample, writing.settings]
        also = {name: getattr(writing, name) for name in names}
        return _hash(self.limits.max_new_tokens, sampling, also, writing.regex, writing.schema)

    @contextmanager
    def open(self, talk: Talk, *, models_here: int) -> Iterator[Answering]:
        """Load the model and yield an object that answers prompts.

        Args:
            models_here: number of models on this machine, including this one.
        """
        limits, max_rows, writing = self.limits, self.limits.max_rows, self.writing
        loading = replace(self.loading, device=_device(self.loading.device))
        loaded = open_model(loading, talk, reads=True)
        if self.templated is not None and not loaded.tokenizer.chat_template:
            from layerskip.api.loading import encode

            encode(loaded.tokenizer, self.templated)  # raises once, not once per prompt
        with open_decoding(
            self.decoding, writing, loading, loaded, talk, remember="memory"
        ) as opened:
            from layerskip.api.session import share
            from layerskip.serving.openai_api import Served, answer_of
            from layerskip.serving.prompt_files import Answering
            from layerskip.serving.scheduler import Serving

            form = partial(writing.processors, loaded)
            session = share(loaded.model.device)
            if loaded.model.device.type == "cpu":
                session //= models_here
            serving = Serving(
                loaded.model,
                memory=2 * session if limits.memory is None else int(limits.memory * 1e9),
                session_memory=session,
                max_rows=max_rows,
                max_queue=2 * _AHEAD * max_rows,
                **opened.settings,
            )
            new = limits.max_new_tokens
            served = Served(loaded, context=serving.max_tokens, max_new_tokens=new)

            def answer_for(number: int, prompt: Prompt) -> Answer:
                return answer_of(self._asked(number, prompt, served), served, form)

            yield Answering(serving, loaded.tokenizer, answer_for, ahead=_AHEAD * max_rows)

    def _asked(self, number: int, prompt: Prompt, served: Served) -> GenerationRequest:
        """The request for a prompt. Flags set what a line of an OpenAI batch file does not."""
        from layerskip.api.arguments import sampling_of
        from layerskip.api.loading import encode
        from layerskip.serving.fields import ChatRequest, CompletionRequest, read

        loaded, writing = served.loaded, self.writing
        given: dict[str, Any] = {"model": served.name, "seed": self.limits.seed + number}
        given |= {"stop": writing.stop or [], "repetition_penalty": writing.repetition_penalty or 1}
        given["temperature"] = 0
        if writing.do_sample:
            given |= sampling_of(loaded.model, **writing.settings) | {"min_p": writing.min_p}
        if prompt.body is None:
            return CompletionRequest.model_construct(
                **given,
                prompt=encode(loaded.tokenizer, prompt)[0].tolist(),
                max_tokens=prompt.max_new_tokens or self.limits.max_new_tokens,
                response_format=prompt.response_format,
            )
        prompt_fields = (
            {"messages": prompt.messages} if prompt.text is None else {"prompt": prompt.text}
        )
        changed = ("model", "prompt", "messages")
        also = {name: value for name, value in prompt.body.items() if name not in changed}
        body = given | also | prompt_fields
        if body.pop("stream", False) or body.get("n", 1) != 1:
            raise ValueError("a line of a file is one text: leave out stream and n")
        kind = CompletionRequest if prompt.messages is None else ChatRequest
        return read(kind, json.dumps(body).encode())


def _hash(*parts: Any) -> str:
    """Eight hex digits that identify a list of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:8]


def sampled_files(place: Path) -> list[Any]:
    """Names, sizes and partial hashes of the checkpoint files that determine its texts."""
    sampled: list[Any] = []
    files = [place] if place.is_file() else sorted(place.iterdir())
    for path in (each for each in files if each.suffix in _READ or each == place):
        if path.name == "layerskip.json":  # affects only how to draft
            continue
        size = path.stat().st_size
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(size * number // _SAMPLES)
                digest.update(file.read(_SAMPLED))
        sampled.append([path.name, size, digest.hexdigest()])
    return sampled


def _device(name: str) -> str:
    """The GPU for this process if torchrun started several on this machine, else the given name."""
    rank = os.environ.get("LOCAL_RANK")
    if name == "auto" and rank is not None:
        import torch

        if torch.cuda.is_available():
            return f"cuda:{int(rank) % torch.cuda.device_count()}"
    return name


def _so_far(answers: Answers, whole: int, seconds: float) -> str:
    """Rows done, speed, and the time left as estimated from the rows so far."""
    rows, tokens = answers.rows, answers.tokens
    words = f"{rows} of {plural(whole, 'prompt')}, {plural(tokens, 'token')}, "
    words += f"{tokens / max(seconds, 1e-9):.1f} tokens/s"
    if 0 < rows < whole:
        words += f", {seconds / rows * (whole - rows) / 60:.1f} min left"
    return words
