"""The command line: flags, words and exit codes; every import that costs time waits for its use.

Results go to standard output, talk and progress to standard error. Exit codes: 0 done, 1 a check
failed, 2 bad input (one line says why), 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from layerskip import __version__
from layerskip.config import SkipConfig
from layerskip.terminal import (
    Talk,
    TextStream,
    check_table,
    decode_text,
    differences,
    title,
    two_columns,
    verdict,
    why_table,
    wrap,
)

if TYPE_CHECKING:
    from layerskip.demo import SideBySide
    from layerskip.generation import GenerationOutput
    from layerskip.loading import Loaded
    from layerskip.prompts import Prompt


_PIPE_CLOSED = 128 + 13  # as a shell reports a process that SIGPIPE ended


class _Commands(TyperGroup):
    """Ends every way a command can fail in one line and an exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:
        standalone = kwargs.pop("standalone_mode", True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            code = self._run(args, **kwargs)
        if standalone:
            sys.exit(code)
        return code

    def _run(self, args: Sequence[str] | None, **kwargs: Any) -> int:
        try:
            code: int | None = super().main(args, standalone_mode=False, **kwargs)
            sys.stdout.flush()  # here, where a full disk still has a line and an exit code
        except (BrokenPipeError, SystemExit):
            # whoever read the output went away; typer, too, exits where it meets that
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _PIPE_CLOSED
        except TyperException as error:
            reason = error.format_message().replace("Value error, ", "")
            return _refuse(f"{reason} (see layerskip --help)")
        except (ValueError, OSError) as error:
            return _refuse(str(error))
        if code == 130:
            print("\nlayerskip: interrupted", file=sys.stderr)
        return code or 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _refuse(reason: str) -> int:
    print(f"layerskip: error: {_one_line(reason)}", file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"layerskip: warning: {_one_line(str(message))}", file=sys.stderr)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Lossless self-speculative decoding: a model drafts with some of its own sublayers.",
)


def main() -> None:
    """The console script."""
    app(prog_name="layerskip")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"layerskip {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


# ---------------------------------------------------------------------------------------------
# Flags that several commands share.

Model = Annotated[
    str, typer.Argument(help="Hub id, local folder, or a shipped model: demo-llama, demo-gemma2.")
]
Skip = Annotated[str | None, typer.Option(metavar="FILE", help="Skip config, as JSON.")]
ExitLayer = Annotated[
    int | None, typer.Option(metavar="E", help="Draft with layers 0 to E-1: an early exit.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "float64"],
    typer.Option(help="auto: the checkpoint's; float32 for shipped models on the CPU."),
]
Seed = Annotated[int | None, typer.Option(help="Of sampling; drawn and reported if not given.")]
FixedSeed = Annotated[int, typer.Option(help="Of sampling.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
]
Execution = Annotated[
    Literal["auto", "modules", "fused"],
    typer.Option(help="How sublayers run: the library's modules, or fewer kernels."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Results, warnings and errors only.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document as the last line.")]


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False)


def _write(text: str) -> None:
    print(text, end="", flush=True)


# ---------------------------------------------------------------------------------------------
# What several commands do.


def _given_skip(skip: str | None, exit_layer: int | None) -> SkipConfig | None:
    """The skip config that the flags name; before the model is loaded, so that errors are quick."""
    if skip is not None and exit_layer is not None:
        raise ValueError("give --skip or --exit-layer, not both")
    if exit_layer is not None:
        return SkipConfig.early_exit(exit_layer)
    return None if skip is None else SkipConfig.load(skip)


def _open(
    name: str, device: str, dtype: str, trust_remote_code: bool, talk: Talk, quiet: bool
) -> Loaded:
    talk.progress("importing torch and transformers")
    from transformers.utils import logging as chatter

    from layerskip.loading import load

    chatter.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if quiet or not sys.stderr.isatty():
        chatter.disable_progress_bar()
    talk.progress(f"loading {name}")
    loaded = load(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    talk.say(loaded.describe())
    return loaded


def _skip_config(given: SkipConfig | None, loaded: Loaded) -> SkipConfig | None:
    """The given skip config, else the one beside the checkpoint, for this model."""
    skip = given
    if skip is None and (skip := loaded.skip_config()) is not None:
        skip = replace(skip, model=None)  # it lies with its model, whatever the folder is called
    if skip is not None:
        skip.resolve(loaded.model.config.num_hidden_layers)  # refuses what does not fit
    return skip


_NO_SKIP = (
    "no skip config: {name} has no layerskip.json; search for one with `layerskip search`, or try "
    "an early exit with --exit-layer E"
)


def _need_skip(given: SkipConfig | None, loaded: Loaded) -> SkipConfig:
    skip = _skip_config(given, loaded)
    if skip is None:
        raise ValueError(_NO_SKIP.format(name=loaded.name))
    return skip


def _describe(skip: SkipConfig, num_layers: int) -> str:
    if skip.exit_layer is not None and not skip.attention and not skip.mlp:
        return f"layers 0-{skip.exit_layer - 1} of {num_layers} (early exit at {skip.exit_layer})"
    return f"{len(skip.kept(num_layers))} of {2 * num_layers} sublayers"


def _shipped_prompts(per_category: int) -> list[Prompt]:
    """The first few prompts of each category."""
    from layerskip.loading import SHIPPED_PROMPTS
    from layerskip.prompts import read_prompts

    chosen: dict[str | None, list[Prompt]] = {}
    for prompt in read_prompts(SHIPPED_PROMPTS):
        chosen.setdefault(prompt.category, []).append(prompt)
    return [prompt for prompts in chosen.values() for prompt in prompts[:per_category]]


# ---------------------------------------------------------------------------------------------
# generate

_MAX_NEW_TOKENS = typer.Option(min=1, help="Tokens to generate at most.")


@app.command()
def generate(
    model: Model = "demo-llama",
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts: JSON lines, or text, one prompt a line."),
    ] = None,
    skip: Skip = None,
    exit_layer: ExitLayer = None,
    controller: Annotated[
        Literal["expected-gain", "fixed", "confidence", "adaptive-threshold", "heuristic"] | None,
        typer.Option(help="What decides how long to draft.  [default: expected-gain]"),
    ] = None,
    max_draft_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens a round drafts at most.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of controllers with a threshold.")
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Decode plainly.")] = False,
    max_new_tokens: Annotated[int, _MAX_NEW_TOKENS] = 128,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="Sample instead of taking the likeliest token.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Of sampling; the model's setting if not given.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of sampling; likewise.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Of sampling; likewise. 0 is off.")
    ] = None,
    acceptance: Annotated[
        Literal["coupled", "rejection"] | None,
        typer.Option(help="Accept rule of sampling.  [default: coupled]"),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Write text as it comes.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = None,
    trust_remote_code: TrustRemoteCode = False,
    execution: Execution = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, self-speculatively and with the text that plain decoding gives."""
    prompts = _given_prompts(prompt, prompt_file)
    given = _given_skip(skip, exit_layer)
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ValueError(
            f"--temperature must be positive and finite, got {temperature}; for the likeliest "
            "tokens leave out --do-sample"
        )
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    drafting: dict[str, Any] = {
        "controller": controller,
        "max_draft_length": max_draft_length,
        "threshold": threshold,
        "acceptance": acceptance,
    }
    if not do_sample:
        _warn_idle({**sampling, "acceptance": acceptance, "seed": seed}, "without --do-sample")
    talk = Talk(quiet)
    loaded = _open(model, device, dtype, trust_remote_code, talk, quiet)
    if no_draft:
        _warn_idle(drafting, "with --no-draft")
    chosen = _skip_config(given, loaded)
    if chosen is None and not no_draft:
        talk.say("decoding plainly, " + _NO_SKIP.format(name=loaded.name))
        _warn_idle(drafting, "without a skip config")

    from layerskip.generation import generate as generate_tokens
    from layerskip.loading import encode, unpadded

    inputs = [encode(loaded.tokenizer, each).to(loaded.model.device) for each in prompts]
    if do_sample and seed is None:
        seed = int.from_bytes(os.urandom(4))
    settings: dict[str, Any] = {
        "skip": chosen,
        "enabled": False if no_draft else None,
        "execution": execution,
        "do_sample": do_sample,
        **drafting,
        **sampling,
    }
    if chosen is not None and not no_draft:
        talk.progress("measuring what drafting costs here")  # once, and not part of the times below
        generate_tokens(loaded.model, unpadded(inputs[0]), max_new_tokens=1, seed=0, **settings)
    results = []
    for number, (each, ids) in enumerate(zip(prompts, inputs, strict=True)):
        own_seed = seed + number if do_sample and seed is not None else None
        if len(prompts) > 1 and (stream or not as_json):
            _write(f"{title(f'prompt {each.id}')}\n")
        talk.progress("" if stream else f"generating, prompt {number + 1} of {len(prompts)}")
        start = time.perf_counter()
        output = generate_tokens(
            loaded.model,
            unpadded(ids),
            streamer=TextStream(loaded.tokenizer, _write) if stream else None,
            seed=own_seed,
            max_new_tokens=max_new_tokens,
            **settings,
        )
        seconds = time.perf_counter() - start
        token_ids = output.sequences[0, ids.shape[1] :].tolist()
        text = decode_text(loaded.tokenizer, token_ids)
        if not stream and not as_json:
            talk.progress("")
            _write(text + "\n")
        result = _result(output, token_ids, text, seconds, own_seed)
        talk.say(_summary(result))
        results.append({"id": each.id, **result} if len(prompts) > 1 else result)
    if as_json:
        print(_json({"results": results} if len(prompts) > 1 else results[0]))


def _given_prompts(prompt: str | None, prompt_file: Path | None) -> list[Prompt]:
    from layerskip.prompts import Prompt, read_prompts

    if (prompt is None) == (prompt_file is None):
        got = "neither" if prompt is None else "both"
        raise ValueError(f"give --prompt TEXT or --prompt-file FILE, one of them; got {got}")
    if prompt_file is not None:
        return read_prompts(prompt_file)
    if not prompt:
        raise ValueError("--prompt is empty; give at least one token")
    return [Prompt(id="1", text=prompt)]


def _warn_idle(flags: dict[str, Any], reason: str) -> None:
    """Warn about each flag that was given and has no effect."""
    for name, value in flags.items():
        if value is not None:
            warnings.warn(f"--{name.replace('_', '-')} has no effect {reason}", stacklevel=2)


def _result(
    output: GenerationOutput, token_ids: list[int], text: str, seconds: float, seed: int | None
) -> dict[str, Any]:
    stats = output.stats
    assert stats is not None
    return {
        "text": text,
        "token_ids": token_ids,
        "new_tokens": len(token_ids),
        "seconds": seconds,
        "tokens_per_second": len(token_ids) / seconds,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "seed": seed,
    }


def _summary(result: dict[str, Any]) -> str:
    words = (
        f"{result['new_tokens']} tokens in {result['seconds']:.2f} s, "
        f"{result['tokens_per_second']:.1f} tokens/s"
    )
    if result["num_drafts"]:
        words += (
            f"; drafted {result['num_draft_tokens']}, accepted {result['num_accepted_tokens']} "
            f"({result['acceptance_rate']:.2f}), mean acceptance length "
            f"{result['mean_acceptance_length']:.2f}"
        )
    return words if result["seed"] is None else f"{words}; seed {result['seed']}"


# ---------------------------------------------------------------------------------------------
# check


@app.command()
def check(
    model: Model = "demo-llama",
    skip: Skip = None,
    exit_layer: ExitLayer = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts.  [default: some shipped ones]")
    ] = None,
    max_new_tokens: Annotated[int, _MAX_NEW_TOKENS] = 64,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: FixedSeed = 0,
    trust_remote_code: TrustRemoteCode = False,
    execution: Execution = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Check on your model and machine that drafting changes nothing but the speed.

    Greedy text against transformers' own; sampled text against plain decoding; tokens drawn by
    both accept rules against the model's law; the cache; and the model, which must stay as it was.
    """
    from layerskip.prompts import read_prompts

    given = _given_skip(skip, exit_layer)
    chosen = _shipped_prompts(2) if prompts is None else read_prompts(prompts)
    talk = Talk(quiet)
    loaded = _open(model, device, dtype, trust_remote_code, talk, quiet)
    config = _need_skip(given, loaded)

    from layerskip.checking import check as check_tokens
    from layerskip.loading import encode

    report = check_tokens(
        loaded.model,
        [encode(loaded.tokenizer, each) for each in chosen],
        config,
        max_new_tokens=max_new_tokens,
        seed=seed,
        execution=execution,
        note=lambda text: talk.progress(f"checking: {text}"),
    )
    talk.progress("")
    ids = [each.id for each in chosen]
    print(check_table(report, ids, loaded.tokenizer))
    if as_json:
        print(_json({"model": loaded.name, "seed": seed, **report.to_dict()}))
    if not report.passed:
        raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------
# demo

_DEMO_CHECK_TOKENS = 48  # of each prompt: the demo is over within half a minute


@app.command()
def demo(
    model: Model = "demo-llama",
    skip: Skip = None,
    exit_layer: ExitLayer = None,
    max_new_tokens: Annotated[int, _MAX_NEW_TOKENS] = 128,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: FixedSeed = 0,
    trust_remote_code: TrustRemoteCode = False,
    execution: Execution = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Decode plainly and self-speculatively: the same tokens, the speedup, and why."""
    given = _given_skip(skip, exit_layer)
    talk = Talk(quiet)
    loaded = _open(model, device, dtype, trust_remote_code, talk, quiet)
    config = _need_skip(given, loaded)

    from layerskip.checking import compare_coupled, compare_greedy
    from layerskip.demo import TEMPERATURE, side_by_side
    from layerskip.loading import encode

    prompts = _shipped_prompts(2)
    inputs = [encode(loaded.tokenizer, each).to(loaded.model.device) for each in prompts]
    timed = inputs[::2]  # one of each kind
    print(title("Prompt, held out from training"))
    print(prompts[0].text)
    print(title(f"Continued by sampling, temperature {TEMPERATURE}, seed {seed}"), flush=True)
    found = side_by_side(
        loaded.model,
        timed,
        config,
        max_new_tokens=max_new_tokens,
        seed=seed,
        execution=execution,
        streamer=TextStream(loaded.tokenizer, _write),
        note=talk.progress,
    )
    settings: dict[str, Any] = {"execution": execution}
    sampling: dict[str, Any] = {"temperature": TEMPERATURE, "seed": seed} | settings
    comparisons = []
    if not found.identical:  # a near-tie or a fault?
        comparisons = [
            compare_coupled(loaded.model, timed, config, max_new_tokens=max_new_tokens, **sampling)
        ]
    talk.progress("checking greedy text against transformers")
    length = min(max_new_tokens, _DEMO_CHECK_TOKENS)
    greedy = compare_greedy(loaded.model, inputs, config, max_new_tokens=length, **settings)
    talk.progress("checking sampled text against plain decoding")
    coupled = compare_coupled(loaded.model, inputs, config, max_new_tokens=length, **sampling)
    talk.progress("")
    comparisons += [coupled, greedy]
    passed = not any(comparison.faults for comparison in comparisons)
    same = "yes" if found.identical else "no"
    print(title("The same text?"))
    total = sum(map(len, found.tokens))
    print(f"plain decoding of {len(timed)} prompts gives the same {total} tokens: {same}")
    rows = [("sampled = plain", verdict(coupled)), ("greedy = transformers", verdict(greedy))]
    print(two_columns(rows))
    ids = [each.id for each in prompts]
    for comparison in comparisons:
        for line in differences(comparison, ids, loaded.tokenizer):
            print(wrap(line))
    num_layers = loaded.model.config.num_hidden_layers
    why = _why(found, config, num_layers)
    print(title(f"How fast? ({len(timed)} prompts of different kinds, interleaved)"))
    speed = found.tokens_per_second
    print(
        two_columns(
            [
                ("transformers generate", f"{speed['transformers']:.1f} tokens/s"),
                ("plain, this engine", f"{speed['plain']:.1f} tokens/s"),
                ("self-speculative", f"{speed['self']:.1f} tokens/s"),
                ("speedup over plain", f"{why['speedup']:.2f}x"),
                ("over generate", f"{speed['self'] / speed['transformers']:.2f}x"),
            ]
        )
    )
    print(title("Why?"))
    print(why_table(why))
    if as_json:
        document = {
            "model": loaded.name,
            "passed": passed,
            "identical": found.identical,
            "seed": seed,
            "temperature": TEMPERATURE,
            "prompt": prompts[0].text,
            "text": decode_text(loaded.tokenizer, found.tokens[0]),
            "token_ids": found.tokens[0],
            "new_tokens": len(found.tokens[0]),
            "seconds": found.seconds,
            "tokens_per_second": speed,
            **why,
            "greedy": greedy.to_dict(),
            "coupled": coupled.to_dict(),
        }
        print(_json(document))
    if not passed:
        raise typer.Exit(1)


def _why(found: SideBySide, skip: SkipConfig, num_layers: int) -> dict[str, Any]:
    """The numbers behind the speedup, JSON values."""
    stats, costs = found.stats, found.costs
    drafted = round(stats.num_draft_tokens / stats.num_drafts) if stats.num_drafts else 0
    return {
        "draft": _describe(skip, num_layers),
        "speedup": found.tokens_per_second["self"] / found.tokens_per_second["plain"],
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_cost": None if costs is None else costs.draft,
        "verify_tokens": drafted + 1,
        "verify_cost": None if costs is None else costs.verify_cost(drafted + 1),
        "bound": None if costs is None else 1 / costs.draft,
        "predicted_speedup": found.predicted_speedup,
    }


# ---------------------------------------------------------------------------------------------
# env


@app.command()
def env(as_json: AsJson = False) -> None:
    """Versions, processors and devices, to paste into a bug report."""
    from layerskip.environment import environment, render

    found = environment()
    print(render(found))
    if as_json:
        print(_json(found))
