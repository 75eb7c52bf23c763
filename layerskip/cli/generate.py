"""The generate command: prompts continued, self-speculatively; every heavy import waits."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from layerskip.cli.drafting import Sources, choose
from layerskip.cli.options import (
    AsJson,
    Chat,
    DraftFlags,
    Loading,
    MaxDraftLength,
    MaxNewTokens,
    Quiet,
    Sampling,
    Threshold,
    by_source,
    counts,
    open_model,
    open_passes,
    read_given,
    spoken,
    to_json,
    warn_idle,
    write_out,
)
from layerskip.cli.terminal import Talk, TextStream, decode_text, reading, title
from layerskip.prompts import Prompt

_MEASURING = 0.5  # seconds, where costs are not known from earlier commands


def generate(
    *,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts: JSON lines, or text, one prompt a line."),
    ] = None,
    chat: Chat = False,
    draft: DraftFlags,
    sources: Sources,
    controller: Annotated[
        Literal["expected-gain", "fixed", "confidence", "adaptive-threshold", "heuristic"] | None,
        typer.Option(help="What decides how long to draft.  [default: expected-gain]"),
    ] = None,
    max_draft_length: MaxDraftLength = None,
    threshold: Threshold = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Decode plainly.")] = False,
    max_new_tokens: MaxNewTokens = 128,
    sampling: Sampling,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of sampling; drawn and reported if not given."),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Write text as it comes.")] = False,
    loading: Loading,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, self-speculatively and with the text that plain decoding gives."""
    began = time.perf_counter()
    prompts = spoken(_given_prompts(prompt, prompt_file), chat)
    given = draft.given()
    text_to_draft = sources.text()
    sampling.check(seed)
    drafting: dict[str, Any] = {
        "controller": controller,
        "max_draft_length": max_draft_length,
        "threshold": threshold,
        "acceptance": sampling.acceptance,
    }
    talk = Talk(quiet)
    loaded = open_model(loading, talk)
    second = None
    if no_draft:
        warn_idle({**sources.idle, **drafting}, "with --no-draft")
    else:
        second = sources.second(loading, loaded, talk)

    import torch

    from layerskip.checkpoints import encode
    from layerskip.generation import LayerSkipDecoding
    from layerskip.generation import generate as generate_tokens
    from layerskip.session import Session

    inputs = [encode(loaded.tokenizer, each).to(loaded.model.device) for each in prompts]
    if sampling.do_sample and seed is None:
        seed = int.from_bytes(os.urandom(4))
    settings: dict[str, Any] = {
        "enabled": False,
        "execution": loading.execution,
        "do_sample": sampling.do_sample,
        **drafting,
        **{name: value for name, value in sampling.settings.items() if value is not None},
    }
    results: list[dict[str, Any]] = []
    names: list[str] = []
    with open_passes(loaded, loading, talk) as opened:
        if not no_draft:
            other = None if second is None else second.opened(loading.execution)
            drafts = choose(given, sources, text_to_draft, loaded, opened, talk, other)
            enabled = bool(drafts) and not drafts.turned_off
            names = drafts.names if enabled else []
            off = "none, as the skip config says" if drafts.turned_off else ""
            talk.say(f"drafts: {off or drafts.words}")
            if not drafts:
                warn_idle(drafting, "without drafts")
            settings |= {"enabled": enabled} | drafts.settings
            if enabled:
                talk.progress("measuring what drafting costs here")
                own = {**drafting, **drafts.settings, "execution": loading.execution}
                law = {"do_sample": sampling.do_sample, **sampling.settings}
                LayerSkipDecoding(**own).prepare(loaded.model, seconds=_MEASURING, **law)
        continued: Any = partial(generate_tokens, loaded.model)
        if len(prompts) > 1 and not getattr(opened, "both", False):  # an encoder-decoder
            continued = Session(loaded.model, execution=loading.execution).generate
        for number, (each, ids) in enumerate(zip(prompts, inputs, strict=True)):
            own_seed = seed + number if sampling.do_sample and seed is not None else None
            if len(prompts) > 1 and (stream or not as_json):
                write_out(f"{title(f'prompt {each.id}')}\n")
            talk.progress("" if stream else f"generating, prompt {number + 1} of {len(prompts)}")
            start = time.perf_counter()
            output = continued(
                # without a mask the library takes a pad token in the prompt for padding
                {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
                streamer=TextStream(loaded.tokenizer, write_out) if stream else None,
                seed=own_seed,
                progress=reading(talk),
                clock=time.perf_counter,
                max_new_tokens=max_new_tokens,
                **settings,
            )
            seconds = time.perf_counter() - start
            token_ids = output.sequences[0, ids.shape[1] :].tolist()
            text = decode_text(loaded.tokenizer, token_ids)
            if not stream and not as_json:
                talk.progress("")
                write_out(text + "\n")
            result = {
                "text": text,
                "token_ids": token_ids,
                "new_tokens": len(token_ids),
                "seconds": seconds,
                "tokens_per_second": len(token_ids) / seconds,
                "time_to_first_token": output.rounds[0].times[-1] - start,
                "num_known_tokens": output.stats.num_known_tokens,
                **counts(output.stats, names),
                "seed": own_seed,
            }
            talk.say(_summary(result))
            results.append({"id": each.id, **result} if len(prompts) > 1 else result)
    total = time.perf_counter() - began
    talk.say(
        f"{total:.1f} s in all, "
        f"{total - sum(result['seconds'] for result in results):.1f} of them to load and measure"
    )
    if as_json:
        found = {"results": results} if len(prompts) > 1 else results[0]
        print(to_json({**found, "total_seconds": total}))


def _given_prompts(prompt: str | None, prompt_file: Path | None) -> list[Prompt]:
    if (prompt is None) == (prompt_file is None):
        got = "neither" if prompt is None else "both"
        raise ValueError(f"give --prompt TEXT or --prompt-file FILE, one of them; got {got}")
    if prompt_file is not None:
        return read_given(prompt_file)
    if not prompt:
        raise ValueError("--prompt is empty; give at least one token")
    return [Prompt(id="1", text=prompt)]


def _summary(result: dict[str, Any]) -> str:
    words = (
        f"{result['new_tokens']} tokens in {result['seconds']:.2f} s, "
        f"{result['tokens_per_second']:.1f} tokens/s, "
        f"the first after {result['time_to_first_token']:.2f} s"
    )
    if result["num_known_tokens"]:
        words += f"; {result['num_known_tokens']} tokens known from earlier prompts"
    if result["num_drafts"]:
        by = f" ({by_source(result)})" if len(result["sources"]) > 1 else ""
        words += (
            f"; {result['num_drafts']} drafts{by} of {result['num_draft_tokens']} tokens, accepted "
            f"{result['num_accepted_tokens']} ({result['acceptance_rate']:.2f}), mean acceptance "
            f"length {result['mean_acceptance_length']:.2f}"
        )
    return words if result["seed"] is None else f"{words}; seed {result['seed']}"
