"""Time models of published sizes with random weights: knows shapes and clocks; no checkpoint.

    python scripts/scale_study.py --shape llama-3.2-1b --output scale.jsonl
    layerskip report scale.jsonl --output report

What a pass costs depends on the shapes of the weights, not on their values, and what a draft gains
depends on the values through its acceptance only, which is set here (`random_models.py`). The run
file says so, and the report with it. Times, costs and speedups at a given acceptance are real;
nothing is said about the acceptance of a trained model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from random_models import SHAPES, Dial, configuration, random_model

from layerskip.analysis.runs import Run, load_runs, typical
from layerskip.bench.batches import Batch
from layerskip.bench.methods import Clock, Decoded, Engine, Method, Peer, Task
from layerskip.bench.plans import make_header
from layerskip.bench.runner import WARMUP_TOKENS, benchmark, device_clock
from layerskip.checkpoints import DTYPES, Loaded
from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.pricing import cost_table, step_seconds
from layerskip.decoding.controllers import CONTROLLERS
from layerskip.files.records import RunWriter
from layerskip.generation import DEFAULT_CONTROLLER
from layerskip.model.joined import join
from layerskip.prompts import Prompt
from layerskip.replay.exits import law_of
from layerskip.timing.bandwidth import Sweeps
from layerskip.timing.sublayers import disturbed, measure

BUFFER = 2**30  # bytes that a bandwidth is read off, far more than any cache holds
READS = 5
COUNTS = (1, 2, 3, 4, 5, 7, 9, 13)  # tokens of the passes timed; v in between lies on a line


class AtAcceptance:
    """A method, on the model as it is at the acceptance that a batch's category names."""

    def __init__(self, method: Method, dial: Dial, strengths: Mapping[str, float]) -> None:
        self.method, self.dial, self.strengths = method, dial, strengths
        self.name, self.kind, self.one_row = method.name, method.kind, method.one_row

    def describe(self) -> dict[str, Any]:
        return self.method.describe()

    def decode(
        self, batch: Batch, repeat: int, clock: Clock, max_new_tokens: int | None = None
    ) -> Decoded:
        assert batch.category is not None
        self.dial.set(self.strengths[batch.category])
        return self.method.decode(batch, repeat, clock, max_new_tokens)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a plain streaming read, the fastest of a few."""
    sweep = Sweeps(device, device_clock(device), BUFFER)
    return max(sweep() for _ in range(READS))


def make_batches(args: argparse.Namespace, vocabulary: int, device: torch.device) -> list[Batch]:
    """Random prompts; those of one number are the same ones at every acceptance."""
    generator = torch.Generator().manual_seed(args.seed + 1)
    batches = []
    for rows in args.batch_size:
        for number in range(args.prompts):
            size = (rows, args.prompt_tokens)
            ids = torch.randint(vocabulary, size, generator=generator).to(device)  # (B, W)
            places = tuple(range(number * rows, (number + 1) * rows))
            for asked in args.acceptance:
                names = tuple(f"{asked:g}-{place}" for place in places)
                batches.append(Batch(names, places, category(asked), ids, torch.ones_like(ids)))
    return batches


def category(acceptance: float) -> str:
    return f"acceptance {acceptance:g}"


def study(args: argparse.Namespace, note: Callable[[str], None]) -> list[float]:
    """Make the model, measure, write the run file; bytes per second read before and after."""
    device = torch.device(args.device)
    config = configuration(args.shape)
    exits = args.exit_layer or sorted({max(1, config.num_hidden_layers // n) for n in (8, 4, 2)})
    note("reading memory")
    before = read_bandwidth(device)
    note("making the model")
    few = args.draft_vocabulary
    model = random_model(config, getattr(torch, args.dtype), device, args.seed, likely=few)
    join(model)  # as the commands do with a model of their own
    note("setting its acceptance")
    dial = Dial(model, min(exits), greedy=args.greedy, seed=args.seed)
    strengths = {category(asked): dial.find(asked) for asked in args.acceptance}
    dial.set(strengths[category(args.acceptance[0])])
    sampling = {} if args.greedy else {"temperature": 1.0}
    task = Task(args.new_tokens, not args.greedy, **sampling, seed=args.seed)
    batches = make_batches(args, config.vocab_size, device)
    tokens = None if few is None else tuple(range(few))
    engines = [
        Engine(
            model,
            task,
            f"exit-{layer}",
            replace(
                SkipConfig.early_exit(layer), decoding=DecodingOptions(draft_vocabulary=tokens)
            ),
            controller=args.controller,
            max_draft_length=args.draft_length,
            draft=f"exit-{layer}",
        )
        for layer in exits
    ]
    costs = []
    for rows in args.batch_size:
        record = measure(
            dial.opened,
            [batch.input_ids for batch in batches],
            batch_size=rows,
            contexts=[args.prompt_tokens + args.new_tokens // 2],  # half way through a text
            counts=COUNTS,
            law=law_of(task.law),
            budget=args.cost_seconds,
            progress=lambda what, share: note(f"{what}, {share:.0%}"),
        )
        if disturbed(record):
            print("costs contradict each other: is there other work here?", file=sys.stderr)
        costs.append(record)
        for engine in engines:
            assert engine.skip is not None
            prices = cost_table(record, engine.skip, draft_vocabulary=few)
            seconds = {"step_seconds": step_seconds(record)}
            engine.prices[str(rows)] = prices.to_dict() | seconds
            engine.use(rows, prices)
    every: list[Method] = [Engine(model, task), Peer(model, task), *engines]
    methods = [AtAcceptance(method, dial, strengths) for method in every]
    chosen = [b for b in batches if b.rows == args.batch_size[0]]
    prompts = [Prompt(id=n, text="", category=b.category) for b in chosen for n in b.names]
    loaded = Loaded(f"{args.shape} shape", model, None, None)
    levels = ", ".join(f"{asked:g}" for asked in args.acceptance)
    header = {
        **make_header(loaded, dial.opened, task, prompts, Path("random tokens")),
        "repeats": args.repeats,
        "warmup": 0,  # once, before all
        "batch_sizes": args.batch_size,
        "methods": [each.describe() for each in methods],
        "synthetic": f"random weights, exits from layer {min(exits)} on accepted about {levels}"
        + (f", {few} of {config.vocab_size} tokens likely, all that drafts draw" if few else ""),
        "bandwidth": {str(torch.get_num_threads()): before},
    }
    with RunWriter(args.output, header, None) as writer:
        for record in costs:
            writer.write(record)
        clock = device_clock(device)
        for method in methods:
            note(f"warming up: {method.name}")
            method.decode(batches[0], 0, clock, WARMUP_TOKENS)
        benchmark(
            model,
            task,
            methods,
            batches,
            repeats=args.repeats,
            warmup=0,
            write=writer.write,
            now=clock,
            bandwidth=Sweeps(device, clock),
            note=lambda what, share: note(f"{share:4.0%} {what}"),
        )
    note("reading memory again")
    return [before, read_bandwidth(device)]


def summary(run: Run, reads: Sequence[float]) -> str:
    """What the report does not say: bytes read a second, beside those that memory gives.

    A step at batch 1 reads every weight once, but of an embedding that is no head one row only.
    """
    config = configuration(run.header["model"]["name"].split()[0])
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = run.header["model"]["parameters"] - unread
    read = weights * getattr(torch, run.header["dtype"]).itemsize
    frame = typical(run)
    words = ", ".join(f"{each / 1e9:.1f}" for each in reads)
    lines = [f"a sum reads {words} GB/s (before, after); batches of {run.batch_sizes}:"]
    for size in run.batch_sizes:
        for method in ("plain", "generate"):
            rows = frame[(frame["method"] == method) & (frame["batch_size"] == size)]
            own = rows["decode_seconds"] / rows["decode_tokens"]
            rate = 1 / own.median()
            speed = read * rate / size
            lines.append(
                f"{method} x{size}: {rate:.2f} ({1 / own.max():.2f}-{1 / own.min():.2f}) tokens/s, "
                f"{speed / 1e9:.3g} GB/s, {speed / reads[0]:.1%} of the first"
            )
        for method in run.drafting:
            costs = run.cost_table(method, size)
            assert costs is not None
            verify = ", ".join(f"v({n}) {costs.verify_cost(n):.2f}" for n in COUNTS[1:])
            lines.append(f"{method} x{size}: c {costs.draft:.3f}, {verify}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--output", type=Path, required=True, help="the run file; replaced")
    parser.add_argument("--dtype", choices=DTYPES[1:], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch's default otherwise")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.8, 0.9])
    parser.add_argument("--exit-layer", type=int, nargs="+", help="L/8, L/4 and L/2 otherwise")
    parser.add_argument(
        "--draft-vocabulary",
        type=int,
        metavar="N",
        help="make the first N tokens the likely ones, and drafts draw no others",
    )
    parser.add_argument("--controller", choices=CONTROLLERS, default=DEFAULT_CONTROLLER)
    parser.add_argument("--draft-length", type=int, default=12, help="the most tokens of a draft")
    parser.add_argument("--greedy", action="store_true", help="else sampled at temperature 1")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--prompts", type=int, default=2, help="at each acceptance and batch size")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cost-seconds", type=float, default=20.0, help="for c and v")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)

    def note(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    reads = study(args, note)
    note("")
    (run,) = load_runs([args.output])
    print(summary(run, reads))
    print(f"records: {args.output}; plots: layerskip report {args.output} --output DIR")


if __name__ == "__main__":
    main()
