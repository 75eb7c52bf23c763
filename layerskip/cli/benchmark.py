"""The benchmark command: measures methods side by side and prints a table of the results."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from layerskip.cli import flags, inputs, opening
from layerskip.cli.flags import flag, load_skips, switch, warn_idle
from layerskip.cli.terminal import Talk, aligned, ratio, to_json
from layerskip.config.registry import names
from layerskip.config.skips import SkipConfig
from layerskip.files.locking import LOCK, alone
from layerskip.files.records import RunWriter, key_of, read_unfinished
from layerskip.texts.tokens import decode_text

if TYPE_CHECKING:
    from layerskip.bench.methods import Method
    from layerskip.bench.suite import Suite

DEFAULT_METHODS = ("plain", "self", "generate")
ASSISTED = ("self-assistant", "generate-assistant")
STATIC = ("generate-static", "generate-compiled")
PEERS = ("generate-early-exit", "generate-prompt-lookup", *STATIC, "llama.cpp", "llama.cpp-flash")
METHODS = (*DEFAULT_METHODS, "self-lookup", "self-8bit", "self-together", *ASSISTED, *PEERS)
_METHODS, _CONTROLLERS = ", ".join(METHODS), f"<{'|'.join(names('controller'))}>"
LONGEST = 8  # longest draft of --explain, in tokens


def benchmark(
    *,
    command: typer.Context,
    output: Path = flag(
        "File for the records. Repeating the command resumes it.", "RUN.jsonl", default=...
    ),
    prompts: flags.Prompts = None,
    tasks: Path | None = flag("Folder with one JSONL file of prompts per task.", "FOLDER"),
    chat: flags.Chat = False,
    skip: list[str] | None = flag("JSON file of a skip config; repeatable.", "FILE"),
    entry: flags.Entry = None,
    exit_layer: list[int] | None = flag("Draft with layers 0 to E-1; repeatable.", "E"),
    sources: flags.Sources,
    method: list[str] | None = flag(
        f"Method to measure: {_METHODS}. Repeatable.  [default: the first three]", "NAME"
    ),
    controller: list[str] | None = flag(
        "Controller of self; repeatable.  [default: expected-gain]", _CONTROLLERS
    ),
    pace: flags.Pace,
    sweep: str | None = flag(
        "Replay early exits at fixed draft lengths, such as exits=2..12,lengths=1..8, and time the "
        "best three.",
        "GRID",
    ),
    explain: bool = switch("--explain", "Also replay every early exit. This takes minutes."),
    repeats: int = flag("Timed calls of each method per prompt.", "N", default=2, min=1),
    warmup: int = flag("Untimed calls before the timed ones.", "N", default=1, min=0),
    batch_size: list[int] | None = flag("Batch size; repeatable.  [default: 1]", "N", min=1),
    context: list[int] | None = flag("Join or cut prompts to N tokens; repeatable.", "N", min=1),
    max_new_tokens: flags.MaxNewTokens = 128,
    sampling: flags.Sampling,
    seed: flags.Seed = 0,
    limit: int | None = flag("Use at most N prompts, from each category in turn.", "N", min=1),
    per_category: int | None = flag(
        "Use at most N prompts per category, task or context length.", "N", min=1
    ),
    save_text: bool = switch("--save-text", "Store prompts and texts in the records."),
    loading: flags.Loading,
    quiet: flags.Quiet = False,
    as_json: flags.AsJson = False,
) -> None:
    """Compare methods on the same prompts: time, acceptance, texts.

    All methods run in one process, interleaved prompt by prompt. The same command resumes a run
    that was stopped.

    Example: layerskip benchmark demo-llama --output run.jsonl
    """
    for name, chosen_names, allowed in (
        ("method", method, METHODS),
        ("controller", controller, names("controller")),
    ):
        if wrong := [each for each in chosen_names or () if each not in allowed]:
            raise ValueError(f"--{name} must be one of {', '.join(allowed)}, got {wrong[0]!r}")
    kinds, how = _kinds(method, sources.assistant), pace.settings
    talk = Talk(quiet)
    sampling = sampling.checked(talk)
    if sweep and explain:
        raise ValueError("--explain is a --sweep of every exit; give only one of them")
    if context and (sweep or explain):
        raise ValueError("--sweep and --explain replay prompts as they are; leave out --context")
    if tasks and (prompts or context):
        raise ValueError("--tasks cannot be combined with --prompts or --context")
    loaded_skips = load_skips(skip, entry)
    given = [(entry or Path(path).stem, each) for path, each in loaded_skips.items()]
    given += [(f"exit-{layer}", SkipConfig.early_exit(layer)) for layer in exit_layer or ()]
    if "self-together" in kinds and len(given) < 2:
        raise ValueError(
            "--method self-together drafts with several skip configs in one decoding; give --skip "
            "or --exit-layer more than once"
        )
    if "self" not in kinds:
        idle: dict[str, Any] = {"draft_memory": sources.draft_memory}
        if "self-together" not in kinds:
            idle |= {"skip": skip, "exit_layer": exit_layer, **sources.values(), "assistant": None}
        if "self-lookup" in kinds:
            idle["lookup_file"] = None
        warn_idle(idle, "without --method self")
    if not any(kind.startswith("self") for kind in kinds):
        warn_idle({"controller": controller, **how}, "without a method that drafts")
    _ = sources.text  # so that errors come early
    sizes = sorted(set(batch_size or [1]))
    inputs.check_file(output, talk)
    command.with_resource(alone(output.with_name(f".{output.name}{LOCK}"), output))
    earlier = read_unfinished(output)
    if earlier is not None and not (earlier.records or earlier.sweeps):
        earlier = None  # it stopped before any measurement, so its settings bind nothing
    read = inputs.read_tasks(tasks) if tasks else inputs.given_prompts(prompts, loading.model)
    chosen = inputs.as_chats(read, chat)
    if not context:
        chosen = inputs.first_in_turn(inputs.first_of_each(chosen, per_category), limit)
    loaded = opening.open_model(loading, talk)
    second = opening.second_model(sources, loading, loaded, talk) if kinds & {*ASSISTED} else None

    from layerskip.bench.batches import encode_all, long_prompts, make_batches
    from layerskip.bench.runner import try_out
    from layerskip.bench.suite import Suite, make_header, store_halves

    if told := store_halves(loaded, kinds, loading.execution):
        talk.say(told)
    threads = earlier.header["threads"] if earlier else None  # as when the run began
    with opening.open_passes(loaded, loading, talk, threads) as opened:
        grid = f"exits=1..{opened.num_layers - 1},lengths=1..{LONGEST}" if explain else sweep
        cells = grid and _grid(grid, opened.num_layers)
        short = encode_all(loaded.tokenizer, chosen, opened.device)
        asked = short
        if context:
            most = per_category or limit
            asked, again = long_prompts(
                loaded.tokenizer, chosen, context, opened.device, least=max(sizes), most=most
            )
            asked = asked[:limit]
            if again is not None:
                talk.say(f"prompts repeat for contexts of {again:,} tokens and more")
        batches, words = make_batches(asked, sizes, loaded.tokenizer.pad_token_id or 0)
        for batch in batches:
            lengths = batch.attention_mask.sum(-1).tolist()
            opened.check_lengths(lengths, max(lengths) + max_new_tokens)
        for line in words:
            talk.say(line)
        if not batches:
            raise ValueError(
                f"no {min(sizes)} prompts share a category; give more prompts or a smaller "
                "--batch-size"
            )
        task = sampling.task(loaded.model, max_new_tokens, seed=seed, execution=loading.execution)
        suite = Suite(loaded, task, short, batches, earlier, talk.say, talk.progress)
        if not given and (stored := loaded.skip_config()) is not None:
            given = [("layerskip", stored)]
        used = given if kinds & {"self", "self-together"} else []
        given = [(name, sources.changed(each)) for name, each in used]
        others = opening.source_settings(sources, None, loaded, talk)
        skips = [each for _, each in given]
        own = opening.own_drafts(sources, opened, skips) if "self" in kinds else {}
        engines = suite.engines(kinds, given, others, own, second, controller or [None], **how)
        for each in {(each.name.partition(":")[0], each.draft): each for each in engines}.values():
            talk.say(f"{each.name.partition(':')[0]} drafts: {each.plan.summary}")
        lines = [suite.sweep(*cells)] if cells else []
        if sweep:
            engines += suite.swept(lines[0])
        methods = suite.methods(kinds, engines, second)
        header = {
            **make_header(loaded, opened, task, chosen, tasks or prompts, asked),
            "repeats": repeats,
            "warmup": warmup,
            "batch_sizes": sizes,
            "methods": [each.describe() for each in methods],
        }
        header["prompts"] |= {"tasks": True} if tasks else {}
        if earlier is None:
            talk.progress("trying every method")
            try_out(methods, batches)
        lines = lines if earlier is None or not earlier.sweeps else []
        summary = _record(suite, output, header, methods, lines, talk, save_text)
    if as_json:
        print(to_json({"output": str(output), "model": loaded.name, "methods": summary}))
    if any(row["faults"] for row in summary if row["kind"] in ("plain", "self")):
        talk.say("texts differ by more than rounding: see the differences in the records")
        raise typer.Exit(1)


def _grid(text: str, layers: int) -> tuple[range, range]:
    """Parse the exits and draft lengths of --sweep."""
    match = re.fullmatch(r"exits=(\d+)\.\.(\d+),lengths=(\d+)\.\.(\d+)", text)
    first, last, least, most = map(int, match.groups()) if match else (0,) * 4
    if not (1 <= first <= last < layers and 1 <= least <= most):
        raise ValueError(
            "--sweep must be like exits=2..12,lengths=1..8, with exits in "
            f"1..{layers - 1} for this model, got {text!r}"
        )
    return range(first, last + 1), range(least, most + 1)


def _record(
    suite: Suite,
    output: Path,
    header: dict[str, Any],
    methods: Sequence[Method],
    lines: Sequence[dict[str, Any]],
    talk: Talk,
    save_text: bool,
) -> list[dict[str, Any]]:
    """Write `lines`, then measurements, to a run file. Prints and returns the table's rows."""
    from layerskip.analysis.run_tables import headlines
    from layerskip.analysis.runs import load_runs
    from layerskip.backends.captured import capture_seconds
    from layerskip.bench.bandwidth import Sweeps
    from layerskip.bench.runner import benchmark as run_benchmark
    from layerskip.bench.runner import device_clock

    device = suite.batches[0].input_ids.device
    done = {key_of(each) for each in suite.earlier.records} if suite.earlier else set()
    with RunWriter(output, header, suite.earlier) as writer:
        for line in lines:
            writer.write(line)
        try:
            run_benchmark(
                suite.loaded.model,
                suite.task,
                methods,
                suite.batches,
                repeats=header["repeats"],
                warmup=header["warmup"],
                write=writer.write,
                done=done,
                text=partial(decode_text, suite.loaded.tokenizer) if save_text else None,
                bandwidth=Sweeps(device, device_clock(device)),
                note=partial(_note, talk, time.monotonic()),
            )
        except KeyboardInterrupt:
            talk.say(f"{output} keeps the measurements; the same command resumes the run")
            raise
    talk.progress("")
    (run,) = load_runs([output])
    summary = headlines(run)
    print(_table(summary))
    if capture_seconds():
        talk.say(f"capturing took {capture_seconds():.1f} s, not included in the times above")
    talk.say(f"records: {output}; tables and plots: layerskip report {output} --output DIR")
    return summary


def _note(talk: Talk, began: float, what: str, share: float) -> None:
    """Show what is being measured and an estimate of the time left."""
    left = (time.monotonic() - began) * (1 - share) / share if share else 0.0
    rest = f", {left / 60:.0f} min left" if left > 90 else f", {left:.0f} s left" if left else ""
    talk.progress(f"{share:4.0%}{rest}: {what}")


def _kinds(given: Sequence[str] | None, assistant: str | None) -> set[str]:
    """The kinds of methods to measure. Plain decoding is always one."""
    kinds = set(given or DEFAULT_METHODS) | {"plain"}
    if assistant is not None:
        if given is None:
            kinds |= {*ASSISTED}
        elif not kinds & {*ASSISTED}:
            warn_idle({"assistant": assistant}, f"without --method {' or '.join(ASSISTED)}")
    elif asked := [name for name in ASSISTED if name in kinds]:
        raise ValueError(f"--method {asked[0]} needs a second model; give --assistant MODEL")
    return kinds


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the main numbers: one line per method, speedups with their 95% intervals."""
    from layerskip.analysis.run_tables import same_text

    places = {"batch": "batch_size", "context": "context", "task": "task"}
    varying = [name for name, key in places.items() if len({row[key] for row in rows}) > 1]
    over = list(dict.fromkeys(name for row in rows for name in row["speedups"]))
    head = ["method", *varying, "tokens/s", *(f"x {name}" for name in over)]
    lines = [[*head, "accepted", "same text"]]
    for row in rows:
        line = [row["method"], *(str(row[places[name]]) for name in varying)]
        line.append(f"{row['tokens_per_second']:.1f}")
        for name in over:
            speedup, low, high = row["speedups"].get(name, (None, None, None))
            line.append(ratio(speedup, None if row["method"] == name else low, high))
        rate = row["acceptance_rate"]
        lines.append([*line, "-" if rate is None else f"{rate:.2f}", same_text(row) or "-"])
    return aligned(lines, keys=1 + len(varying))
