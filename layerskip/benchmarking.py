"""The benchmark command: from flags to methods and a header; knows how nothing is measured."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layerskip.config import SkipConfig
from layerskip.controllers import CONTROLLERS
from layerskip.flags import (
    MAX_NEW_TOKENS,
    AsJson,
    Device,
    Dtype,
    Execution,
    FixedSeed,
    Model,
    Quiet,
    TrustRemoteCode,
    first_of_each,
    open_model,
    to_json,
    warn_idle,
)
from layerskip.records import SCHEMA, Run, RunWriter, key_of, read_run, read_unfinished, redacted
from layerskip.terminal import Talk, decode_text

if TYPE_CHECKING:
    from torch import Tensor

    from layerskip.loading import Loaded
    from layerskip.methods import Batch, Engine, Method, Task
    from layerskip.prompts import Prompt

DEFAULT_METHODS = ("plain", "self", "generate", "generate-early-exit", "generate-prompt-lookup")
METHODS = (*DEFAULT_METHODS, "generate-assistant")
TRACE_TOKENS = 64  # of each text of a trace, at most
TRACE_PROMPTS = 2  # of each category
WITH_THRESHOLD = ("confidence", "adaptive-threshold")


def benchmark(
    output: Annotated[
        Path,
        typer.Option(metavar="RUN.jsonl", help="Records; a file that is there is gone on with."),
    ],
    model: Model = "demo-llama",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts.  [default: those shipped with the model]"),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Skip config, as JSON; repeatable.")
    ] = None,
    exit_layer: Annotated[
        list[int] | None,
        typer.Option(metavar="E", help="Draft with layers 0 to E-1; repeatable."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"What to measure, of {', '.join(METHODS)}; repeatable.  [default: all but the "
            "last]",
        ),
    ] = None,
    controller: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Of self, of {', '.join(CONTROLLERS)}; repeatable.  [default: expected-gain]",
        ),
    ] = None,
    max_draft_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens a round drafts at most.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of controllers with a threshold.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Record exits and costs of the sublayers, too.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 2,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed ones before them.")] = 1,
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, metavar="N", help="Repeatable.  [default: 1]")
    ] = None,
    max_new_tokens: Annotated[int, MAX_NEW_TOKENS] = 128,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="Sample instead of taking the likeliest token.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Of sampling; the model's setting, or off, if not given.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of sampling; likewise.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Of sampling; likewise.")] = None,
    acceptance: Annotated[
        Literal["coupled", "rejection"] | None,
        typer.Option(help="Accept rule of sampling.  [default: coupled]"),
    ] = None,
    assistant: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Second model, of generate-assistant.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Prompts of each category, at most.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of the CPU.  [default: PyTorch's]")
    ] = None,
    save_text: Annotated[
        bool, typer.Option("--save-text", help="Keep prompts and texts in the records.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: FixedSeed = 0,
    trust_remote_code: TrustRemoteCode = False,
    execution: Execution = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure methods side by side on the same prompts: time, acceptance, and whether texts agree.

    All run in one process, interleaved prompt by prompt. A run that was stopped goes on where it
    was when it is started again with the same flags.
    """
    _check_names("--method", method, METHODS)
    _check_names("--controller", controller, CONTROLLERS)
    kinds = _kinds(method, assistant)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if not do_sample:
        warn_idle({**sampling, "acceptance": acceptance}, "without --do-sample")
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ValueError(f"--temperature must be positive and finite, got {temperature}")
    given = [(Path(path).stem, SkipConfig.load(path)) for path in skip or ()]
    given += [(f"exit-{layer}", SkipConfig.early_exit(layer)) for layer in exit_layer or ()]
    sizes = sorted(set(batch_size or [1]))
    found = read_unfinished(output)
    chosen = _prompts(model, prompts, limit)
    talk = Talk(quiet)
    loaded = open_model(model, device, dtype, trust_remote_code, talk, quiet)

    import torch

    from layerskip.benchmark import benchmark as measure
    from layerskip.benchmark import make_batches
    from layerskip.loading import encode
    from layerskip.methods import Task
    from layerskip.sublayers import Sublayers

    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        opened = Sublayers(loaded.model, execution=execution)
        ids = [encode(loaded.tokenizer, each).to(opened.device) for each in chosen]
        lengths = [each.shape[1] for each in ids]
        opened.check_lengths(lengths, max(lengths) + max_new_tokens)
        triples = [(p.id, p.category, t) for p, t in zip(chosen, ids, strict=True)]
        pad = loaded.tokenizer.pad_token_id
        batches, words = make_batches(triples, sizes, 0 if pad is None else pad)
        for line in words:
            talk.say(line)
        if not batches:
            raise ValueError(
                f"no {min(sizes)} prompts share a category; give more prompts or a smaller "
                "--batch-size"
            )
        task = Task(
            max_new_tokens,
            do_sample,
            **{k: _setting(loaded.model, k, v) if do_sample else None for k, v in sampling.items()},
            acceptance=acceptance or "coupled",
            seed=seed,
            execution=execution,
        )
        plan = _Plan(loaded, task, batches, found, talk)
        skips = plan.skips(given) if kinds & {"self", "generate-early-exit"} else []
        options = _Options(controller or [None], max_draft_length, threshold)
        methods = plan.methods(kinds, skips, options, assistant, (device, dtype, trust_remote_code))
        header = {
            **_header(loaded, opened, task, chosen, prompts),
            "repeats": repeats,
            "warmup": warmup,
            "batch_sizes": sizes,
            "methods": [each.describe() for each in methods],
        }
        with RunWriter(output, header, found) as writer:
            done = {key_of(record) for record in found.records} if found else set()
            if trace:
                plan.trace(writer, triples)
            try:
                measure(
                    loaded.model,
                    task,
                    methods,
                    batches,
                    repeats=repeats,
                    warmup=warmup,
                    write=writer.write,
                    done=done,
                    text=(lambda tokens: decode_text(loaded.tokenizer, tokens))
                    if save_text
                    else None,
                    note=lambda what, share: talk.progress(f"{share:4.0%} {what}"),
                )
            except KeyboardInterrupt:
                talk.say(f"{output} keeps what was measured; the same command goes on with it")
                raise
    finally:
        torch.set_num_threads(before)
    talk.progress("")
    run = read_run(output)
    summary = summarise(run)
    print(table(summary))
    talk.say(f"records: {output}; tables and plots: layerskip report {output} --output DIR")
    if as_json:
        print(to_json({"output": str(output), "model": loaded.name, "methods": summary}))
    if any(row["faults"] for row in summary if row["kind"] in ("plain", "self")):
        talk.say("texts differ beyond rounding: look at the differences in the records")
        raise typer.Exit(1)


def _check_names(flag: str, given: Sequence[str] | None, allowed: Sequence[str]) -> None:
    for name in given or ():
        if name not in allowed:
            raise ValueError(f"{flag} must be one of {', '.join(allowed)}, got {name!r}")


def _kinds(given: Sequence[str] | None, assistant: str | None) -> set[str]:
    """The kinds of methods to measure; plain decoding always is one."""
    kinds = set(given or DEFAULT_METHODS) | {"plain"}
    if assistant is not None:
        if given is None:
            kinds.add("generate-assistant")
        elif "generate-assistant" not in kinds:
            warn_idle({"assistant": assistant}, "without --method generate-assistant")
    elif "generate-assistant" in kinds:
        raise ValueError("--method generate-assistant needs a second model; give --assistant MODEL")
    return kinds


def _prompts(model: str, path: Path | None, limit: int | None) -> list[Prompt]:
    from layerskip.prompts import read_prompts

    if path is not None:
        return first_of_each(read_prompts(path), limit)
    from layerskip.loading import SHIPPED, SHIPPED_PROMPTS

    if model not in SHIPPED:
        raise ValueError(
            f"--prompts FILE is needed for a model of your own: JSON lines, or one prompt a line "
            f"(only {' and '.join(SHIPPED)} come with prompts)"
        )
    return first_of_each(read_prompts(SHIPPED_PROMPTS), limit)


def _setting(model: Any, name: str, given: float | None) -> Any:
    return getattr(model.generation_config, name, None) if given is None else given


def _header(
    loaded: Loaded, opened: Any, task: Task, prompts: Sequence[Prompt], path: Path | None
) -> dict[str, Any]:
    from layerskip.environment import environment
    from layerskip.sublayers import fingerprint

    content = [[p.id, p.category, p.text, p.messages] for p in prompts]
    categories = [p.category or "none" for p in prompts]
    found = environment()
    model = loaded.model
    return {
        "kind": "header",
        "schema": SCHEMA,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "argv": [redacted(argument) for argument in sys.argv[1:]],
        "environment": found,
        "model": {
            "name": loaded.name,
            "hash": fingerprint(model),
            "architecture": model.config.model_type,
            "num_layers": opened.num_layers,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        "device": str(opened.device),
        "dtype": str(opened.dtype).removeprefix("torch."),
        "threads": found["cpu"]["threads"],
        "execution": opened.execution,
        "law": task.law,
        "max_new_tokens": task.max_new_tokens,
        "prompts": {
            "name": "shipped" if path is None else path.name,
            "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            "count": len(prompts),
            "categories": {name: categories.count(name) for name in dict.fromkeys(categories)},
        },
        "baseline": "plain",
    }


@dataclass(frozen=True)
class _Options:
    """How `self` drafts; a controller of None is the skip config's own, or the default."""

    controllers: Sequence[str | None]
    max_draft_length: int | None
    threshold: float | None


@dataclass(frozen=True)
class _Plan:
    """From what was asked for, and what a run to go on with has decided already, to methods."""

    loaded: Loaded
    task: Task
    batches: Sequence[Batch]
    found: Run | None
    talk: Talk

    def skips(self, given: list[tuple[str, SkipConfig]]) -> list[tuple[str, SkipConfig]]:
        """The drafts, with names: those given, the one beside the checkpoint, or the best exit."""
        if not given and (own := self.loaded.skip_config()) is not None:
            given = [("layerskip", replace(own, model=None))]
        if not given and self.found is not None:
            known = {
                entry["draft"]: entry["skip"]
                for entry in self.found.header["methods"]
                if entry["kind"] == "self"
            }
            given = [(name, SkipConfig.from_dict(skip)) for name, skip in known.items()]
        if not given:
            given = [self._best_exit()]
        return [(name, self._checked(skip)) for name, skip in given]

    def _checked(self, skip: SkipConfig) -> SkipConfig:
        from layerskip.sublayers import fingerprint

        model = self.loaded.model
        skip.resolve(model.config.num_hidden_layers)
        if skip.matches(self.loaded.name, fingerprint(model)) is False:
            warnings.warn(
                f"this skip config was searched on {skip.model or 'another model'}, not on "
                f"{self.loaded.name}: the speedup may be gone",
                stacklevel=2,
            )
        return replace(skip, model=None, model_hash=None)  # said once is enough

    def _best_exit(self) -> tuple[str, SkipConfig]:
        """The exit of the highest predicted speedup, from a trace of a few prompts."""
        from layerskip.pricing import cost_table
        from layerskip.search.cost import measure
        from layerskip.search.exits import best_exit, exit_trace

        few = _few([(b.names[0], b.category, _row(b)) for b in self.batches if b.rows == 1])
        if not few:
            few = _few([(b.names[0], b.category, _row(b)) for b in self.batches])
        found = exit_trace(
            self.loaded.model,
            [ids for _, _, ids in few],
            names=[name for name, _, _ in few],
            law={**self.task.law, "acceptance": "coupled"},
            max_new_tokens=min(self.task.max_new_tokens, TRACE_TOKENS),
            progress=lambda what, share: self.talk.progress(f"best exit: {what}, {share:.0%}"),
        )
        costs = measure(
            self.loaded.model,
            [ids for _, _, ids in few],
            progress=lambda what, share: self.talk.progress(f"best exit: {what}, {share:.0%}"),
        )
        best = best_exit(
            found["what_if"], lambda layer: cost_table(costs, SkipConfig.early_exit(layer))
        )
        self.talk.say(
            f"best exit of a quick trace: {best.exit_layer} (predicted {best.speedup:.2f}x)"
        )
        return f"exit-{best.exit_layer}", SkipConfig.early_exit(best.exit_layer)

    def methods(
        self,
        kinds: set[str],
        skips: Sequence[tuple[str, SkipConfig]],
        options: _Options,
        assistant: str | None,
        loading: tuple[str, str, bool],
    ) -> list[Method]:
        """All methods to measure, what their drafts cost measured."""
        from layerskip.loading import load
        from layerskip.methods import (
            Engine,
            Peer,
            assistant_peer,
            early_exit_peer,
            prompt_lookup_peer,
        )

        model, task = self.loaded.model, self.task
        plain = Engine(model, task)
        methods: list[Method] = [plain]
        ours = self._drafting(skips, options) if skips else []
        for each in ours if "self" in kinds else ():
            self._price(each, plain)
            methods.append(each)
        if "generate" in kinds:
            methods.append(Peer(model, task))
        if "generate-early-exit" in kinds:
            first = ours[0]
            assert first.skip is not None
            depth = _depth(first.skip, model.config.num_hidden_layers)
            length = self._matched_length(first)
            methods += [early_exit_peer(model, task, depth)]
            methods += [early_exit_peer(model, task, depth, length)]
        if "generate-prompt-lookup" in kinds:
            methods.append(prompt_lookup_peer(model, task))
        if "generate-assistant" in kinds and assistant is not None:
            device, dtype, trust = loading
            second = load(assistant, device=device, dtype=dtype, trust_remote_code=trust)
            methods.append(assistant_peer(model, task, second.model, second.name))
        alone = [m.name for m in methods if m.one_row]
        if alone and any(batch.rows > 1 for batch in self.batches):
            self.talk.say(f"{', '.join(alone)}: batch size 1 only, transformers refuses more")
        return methods

    def _drafting(self, skips: Sequence[tuple[str, SkipConfig]], options: _Options) -> list[Engine]:
        from layerskip.methods import Engine

        found: dict[str, Engine] = {}
        for label, skip in skips:
            for controller in options.controllers:
                each = Engine(
                    self.loaded.model,
                    self.task,
                    skip=skip,
                    controller=controller,
                    max_draft_length=options.max_draft_length,
                    draft=label,
                )
                if each.controller in WITH_THRESHOLD and options.threshold is not None:
                    each.threshold = options.threshold
                parts = [label] if len(skips) > 1 else []
                parts += [each.controller] if len(options.controllers) > 1 else []
                name = ":".join(["self", *parts])
                while name in found:
                    name += "'"
                each.name = name
                found[name] = each
        if all(each.controller not in WITH_THRESHOLD for each in found.values()):
            warn_idle({"threshold": options.threshold}, f"without {' or '.join(WITH_THRESHOLD)}")
        return list(found.values())

    def _price(self, method: Engine, plain: Engine) -> None:
        from layerskip.benchmark import device_clock, price
        from layerskip.speculation import CostTable

        known = self._known(method.name)
        if known is not None and known.get("costs"):
            method.prices = known["costs"]
            names = ("draft", "verify", "source")
            for size, costs in known["costs"].items():
                table = CostTable.from_dict({name: costs[name] for name in names})
                method.use(int(size), table)
            return
        self.talk.progress(f"measuring what drafting costs: {method.name}")
        price(method, plain, self.batches, device_clock(self.batches[0].input_ids.device))

    def _matched_length(self, method: Engine) -> int:
        """How long drafts of transformers' early exit are, to be like the method's."""
        from layerskip.benchmark import mean_draft_length

        for entry in self.found.header["methods"] if self.found else ():
            matched = entry["kind"] == "generate-early-exit" and entry["name"] != entry["kind"]
            if matched:
                return int(entry["num_assistant_tokens"])
        self.talk.progress(f"how long the drafts of {method.name} are")
        return mean_draft_length(method, self.batches)

    def _known(self, name: str) -> dict[str, Any] | None:
        entries = self.found.header["methods"] if self.found else []
        return next((entry for entry in entries if entry["name"] == name), None)

    def trace(self, writer: RunWriter, prompts: Sequence[tuple[str, str | None, Tensor]]) -> None:
        """Record what every exit would have drafted, and what sublayers cost."""
        from layerskip.search.cost import measure
        from layerskip.search.exits import exit_trace

        few = _few(prompts)
        texts = [ids for _, _, ids in few]
        if self.found is None or not self.found.traces:
            writer.write(
                exit_trace(
                    self.loaded.model,
                    texts,
                    names=[name for name, _, _ in few],
                    law=self.task.law,
                    max_new_tokens=min(self.task.max_new_tokens, TRACE_TOKENS),
                    progress=lambda what, share: self.talk.progress(f"trace: {what}, {share:.0%}"),
                )
            )
        if self.found is None or not self.found.costs:
            writer.write(
                measure(
                    self.loaded.model,
                    texts,
                    progress=lambda what, share: self.talk.progress(f"costs: {what}, {share:.0%}"),
                )
            )


def _depth(skip: SkipConfig, num_layers: int) -> int:
    """The early exit that runs as many sublayers as the draft does."""
    return max(1, min(num_layers - 1, round(len(skip.kept(num_layers)) / 2)))


def _row(batch: Batch) -> Tensor:
    """Token ids of the first prompt, without pads, (1, T)."""
    return batch.input_ids[:1, batch.attention_mask[0].bool()]


def _few(prompts: Sequence[tuple[str, str | None, Any]]) -> list[tuple[str, str | None, Any]]:
    """The first prompts of every category."""
    chosen: dict[str | None, list[Any]] = {}
    for prompt in prompts:
        chosen.setdefault(prompt[1], []).append(prompt)
    return [prompt for each in chosen.values() for prompt in each[:TRACE_PROMPTS]]


# ---------------------------------------------------------------------------------------------
# What is shown at the end.


def summarise(run: Run) -> list[dict[str, Any]]:
    """A few numbers of every method, JSON values."""
    import statistics

    rows = []
    seconds: dict[str, dict[Any, float]] = {}
    for entry in run.header["methods"]:
        name = entry["name"]
        records = [record for record in run.records if record["method"] == name]
        units: dict[Any, list[float]] = {}
        drafted = accepted = 0
        for record in records:
            unit = (tuple(record["prompts"]), record["batch_size"])
            per_token = record["seconds"]["total"] / max(1, sum(record["new_tokens"]))
            units.setdefault(unit, []).append(per_token)
            for counts in (record["rounds"] or {"drafted": []})["drafted"]:
                drafted += sum(counts)
            for counts in (record["rounds"] or {"accepted": []})["accepted"]:
                accepted += sum(counts)
        seconds[name] = {unit: statistics.median(values) for unit, values in units.items()}
        texts = [flag for record in records for flag in record["equal"] or ()]
        ties = [d["near_tie"] for record in records for d in record["differences"]]
        total = sum(record["seconds"]["total"] for record in records)
        rows.append(
            {
                "name": name,
                "kind": entry["kind"],
                "tokens_per_second": sum(sum(r["new_tokens"]) for r in records) / total
                if records
                else None,
                "acceptance_rate": accepted / drafted if drafted else None,
                "repeated_4grams": statistics.fmean(
                    share for record in records for share in record["repeated_4grams"]
                )
                if records
                else None,
                "compared": len(texts),
                "equal": sum(texts),
                "near_ties": sum(ties),
                "faults": len(ties) - sum(ties),
            }
        )
    for row in rows:
        own = seconds[row["name"]]
        for over in ("plain", "generate"):
            base = seconds.get(over, {})
            both = [unit for unit in own if unit in base]
            row[f"over_{over}"] = (
                sum(base[unit] for unit in both) / sum(own[unit] for unit in both) if both else None
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The summary in columns."""

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [("method", "tokens/s", "/plain", "/generate", "accepted", "repeats", "same text")]
    for row in rows:
        same = f"{row['equal']}/{row['compared']}" if row["compared"] else "-"
        same += f" ({row['near_ties']} near-ties)" if row["near_ties"] else ""
        same += f" ({row['faults']} FAULTS)" if row["faults"] else ""
        lines.append(
            (
                row["name"],
                cell(row["tokens_per_second"], ".1f"),
                cell(row["over_plain"], ".2f"),
                cell(row["over_generate"], ".2f"),
                cell(row["acceptance_rate"], ".2f"),
                cell(row["repeated_4grams"], ".0%"),
                same,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}  "
        + "  ".join(f"{line[column]:>{widths[column]}}" for column in range(1, 6))
        + f"  {line[6]}"
        for line in lines
    )
