"""The generate command: continues prompts. Heavy imports happen only when they are used."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from layerskip.cli import flags, terminal
from layerskip.cli.flags import flag, switch
from layerskip.cli.inputs import as_chats, read_given, read_pictures
from layerskip.cli.opening import open_decoding, open_model
from layerskip.files.reading import errors_of
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import decode_text, plural


def generate(
    *,
    prompt: str | None = flag(
        "Continue this text. -, or no prompt at all: read standard input.", "TEXT"
    ),
    prompts: Path | None = flag(
        "Continue each prompt of this file: JSON lines, or one prompt per line; -: standard input.",
        "FILE",
        "--prompts",
        "--prompt-file",
    ),
    chat: flags.Chat = False,
    image: flags.Images = None,
    writing: flags.Writing,
    decoding: flags.Decoding,
    max_new_tokens: flags.MaxNewTokens = 128,
    seed: flags.DrawnSeed = None,
    stream: bool = switch("--stream", "Write the text while it is generated."),
    loading: flags.Loading,
    quiet: flags.Quiet = False,
    as_json: flags.AsJson = False,
) -> None:
    """Continue a prompt with the text of plain decoding, but faster.

    Example: layerskip generate demo-llama --prompt "def main():" --stream
    """
    began = time.perf_counter()
    pictures = read_pictures(image)
    chosen = as_chats(_given_prompts(prompt, prompts), chat, writing.system)
    chosen = [each.with_pictures(pictures) for each in chosen] if pictures else chosen
    talk = terminal.Talk(quiet)
    writing = writing.checked(talk, seed)
    if writing.do_sample and seed is None:
        seed = int.from_bytes(os.urandom(4))
    loaded = open_model(loading, talk, reads=True)
    encoded = [*map(loaded.inputs, chosen)]
    results: list[dict[str, Any]] = []
    with open_decoding(decoding, writing, loading, loaded, talk) as opened:
        tokenizer = loaded.tokenizer
        settings = opened.settings | opened.law | writing.arguments(tokenizer)

        from layerskip.api.generation import generate as generate_tokens
        from layerskip.api.session import Session

        continued: Any = partial(generate_tokens, loaded.model)
        if len(chosen) > 1 and not opened.model.encoder:
            continued = Session(loaded.model, execution=loading.execution).generate
        for number, (each, given) in enumerate(zip(chosen, encoded, strict=True)):
            own_seed = seed + number if writing.do_sample and seed is not None else None
            if len(chosen) > 1 and (stream or not as_json):
                terminal.write_out(f"{terminal.title(f'prompt {each.id}')}\n")
            talk.progress("" if stream else f"generating, prompt {number + 1} of {len(chosen)}")
            ids = given["input_ids"][0].tolist()
            start = time.perf_counter()
            output = continued(
                given,
                streamer=terminal.TextStream(tokenizer, terminal.write_out) if stream else None,
                seed=own_seed,
                progress=terminal.reading(talk),
                clock=time.perf_counter,
                max_new_tokens=each.max_new_tokens or max_new_tokens,
                **settings,
                logits_processor=writing.processors(loaded, ids),
            )
            seconds, stats = time.perf_counter() - start, output.stats
            first = output.rounds[0].times[-1] - start
            token_ids = [token for each_round in output.rounds for token in each_round.tokens[0]]
            text = decode_text(tokenizer, token_ids)
            if not stream and not as_json:
                talk.progress("")
                terminal.write_out(text + "\n")
            result = {
                "text": text,
                "token_ids": token_ids,
                "finish_reason": output.finish_reasons[0],
                "prompt_tokens": len(ids),
                "new_tokens": len(token_ids),
                "seconds": seconds,
                "tokens_per_second": len(token_ids) / seconds,
                "time_to_first_token": first,
                "prefill_tokens_per_second": (len(ids) - stats.num_known_tokens) / first,
                "decode_tokens_per_second": (
                    (len(token_ids) - 1) / (seconds - first) if len(token_ids) > 1 else None
                ),
                "num_known_tokens": stats.num_known_tokens,
                **terminal.counts(stats, opened.names),
                "seed": own_seed,
                "drafts": opened.plan.summary,
            }
            talk.say(_summary(result))
            results.append({"id": each.id, **result} if len(chosen) > 1 else result)
    if opened.plan.hint:
        talk.say(opened.plan.hint)
    total = time.perf_counter() - began
    talk.say(
        f"{total:.1f} s in all, "
        f"{total - sum(result['seconds'] for result in results):.1f} s of that to load and measure"
    )
    if as_json:
        whole = {"results": results} if len(chosen) > 1 else results[0]
        print(terminal.to_json({**whole, "total_seconds": total}))


def _given_prompts(prompt: str | None, path: Path | None) -> list[Prompt]:
    if prompt is not None and path is not None:
        raise ValueError("give either --prompt TEXT or --prompts FILE; got both")
    if path is not None:
        chosen = read_given(path, strict=True)
        for each in chosen:
            if each.body or each.response_format:
                raise ValueError(f"prompt {each.id} has its own response_format; use layerskip run")
        return chosen
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        with errors_of("standard input"):
            prompt = sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n") or None
    if prompt is None:
        raise ValueError(
            "give --prompt TEXT, --prompts FILE or text on standard input; got none of them"
        )
    if not prompt:
        raise ValueError("--prompt is empty; give at least one token")
    return [Prompt(id="1", text=prompt)]


def _summary(result: dict[str, Any]) -> str:
    words = (
        f"{plural(result['new_tokens'], 'token')} in {result['seconds']:.2f} s: the first after "
        f"{result['time_to_first_token']:.2f} s (prefill, "
        f"{result['prefill_tokens_per_second']:.0f} tokens/s)"
    )
    if result["decode_tokens_per_second"] is not None:
        words += f", the rest at {result['decode_tokens_per_second']:.1f} tokens/s"
    if result["finish_reason"] == "length":
        words += "; cut off by --max-new-tokens"
    if result["num_known_tokens"]:
        words += f"; {plural(result['num_known_tokens'], 'token')} cached from earlier prompts"
    if result["num_drafts"]:
        by = f" ({terminal.by_source(result)})" if len(result["sources"]) > 1 else ""
        words += (
            f"; {plural(result['num_drafts'], 'draft')}{by} with "
            f"{plural(result['num_draft_tokens'], 'token')}, "
            f"accepted {result['num_accepted_tokens']} ({result['acceptance_rate']:.2f}), "
            f"mean acceptance length {result['mean_acceptance_length']:.2f}"
        )
    return words if result["seed"] is None else f"{words}; seed {result['seed']}"
