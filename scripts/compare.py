"""Compare what `layerskip benchmark` has no method for: llama.cpp, and drafts by replay.

    python scripts/compare.py llama-cpp smollm2 --prompts spec-bench --chat --output run.jsonl
    python scripts/compare.py llama-cpp smollm2 --prompts FILE --context 4000 --output run.jsonl
    python scripts/compare.py drafts smollm2 runs/heads skip.json --output drafts.json

`llama-cpp` adds two contenders, without and with flash attention, to the benchmark's loop. `drafts`
decodes every prompt once, replays all drafts from every place of the answers, and prices them with
one cost table, so that no clock's noise stands between them.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from layerskip.bench.batches import Encoded, PromptBatch, encode_all, long_prompts, make_batches
from layerskip.bench.methods import Clock, Decoded, Engine, Peer, Task
from layerskip.bench.plans import make_header, price
from layerskip.checkpoints import DTYPES, Loaded
from layerskip.cli.benchmark import record
from layerskip.cli.flags import Loading
from layerskip.cli.inputs import first_of_each, given_prompts, spoken
from layerskip.cli.opening import open_model, open_passes
from layerskip.cli.terminal import Talk, aligned
from layerskip.config import LowPrecision, SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import make_controller
from layerskip.decoding.sources.lookup import Lookup
from layerskip.drafts import automatic_draft
from layerskip.files.writing import replacing, write_text
from layerskip.model.blocks import TOKENS
from layerskip.model.sublayers import Sublayers
from layerskip.registry import CONTROLLERS
from layerskip.replay.drafts import replay
from layerskip.replay.simulation import simulate, tokens_per_step
from layerskip.requests import end_tokens
from layerskip.timing.tables import cost_tables
from layerskip.timing.threads import cpu_threads
from layerskip.training.judging import answers, formula, request_of, trained_skip

PACKAGE = "llama-cpp-python==0.3.36"
WIDE = {
    "float32": ("LLAMA_FTYPE_ALL_F32", "F32"),
    "bfloat16": ("LLAMA_FTYPE_MOSTLY_BF16", "BF16"),
    "float16": ("LLAMA_FTYPE_MOSTLY_F16", "F16"),
}
LOOKUP = "lookup"
LONGEST = 12  # tokens that a replayed round drafts
SECONDS = 5.0  # that pricing a draft may take
SHOWN = 4  # depths of acceptance in the table; the file has all that were replayed


@dataclass(frozen=True)
class Setting:
    """A model opened up, on its threads, and the prompts it is asked."""

    args: Namespace
    talk: Talk
    loaded: Loaded
    opened: Sublayers
    asked: Sequence[Encoded]
    """The prompts as they are, or joined or cut to lengths of context."""
    task: Task
    header: dict[str, Any]


@contextmanager
def setting(args: Namespace) -> Iterator[Setting]:
    talk = Talk(quiet=False)
    chosen = spoken(given_prompts(args.prompts, args.model), args.chat)
    if not args.context:
        chosen = first_of_each(chosen, args.limit)
    loading = Loading(args.model, dtype=args.dtype, execution=args.execution, threads=args.threads)
    loaded = open_model(loading, talk)
    with open_passes(loaded, loading, talk) as opened:
        device = opened.device
        asked = encode_all(loaded.tokenizer, [] if args.context else chosen, device)
        if args.context:
            asked, _ = long_prompts(loaded.tokenizer, chosen, args.context, device, most=args.limit)
        for each in asked:
            length = each.ids.shape[1]
            opened.check_lengths([length], length + args.new_tokens)
        at = args.temperature
        task = Task(args.new_tokens, at is not None, at, execution=args.execution)
        header = make_header(loaded, opened, task, chosen, args.prompts, asked)
        yield Setting(args, talk, loaded, opened, asked, task, header)
    talk.progress("")


class LlamaCpp:
    """llama.cpp with its own greedy sampler, through llama-cpp-python."""

    kind = "llama.cpp"
    one_row = True

    def __init__(self, name: str, llama: Any, task: Task, ends: frozenset[int]) -> None:
        self.name, self.llama, self.task, self.ends = name, llama, task, ends

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "package": PACKAGE}

    def decode(
        self, batch: PromptBatch, repeat: int, clock: Clock, max_new_tokens: int | None = None
    ) -> Decoded:
        limit = max_new_tokens or self.task.max_new_tokens
        self.llama.reset()  # nothing of the text before is used again
        tokens: list[int] = []
        first = 0.0
        for token in self.llama.generate(batch.input_ids[0].tolist(), temp=0.0, repeat_penalty=1.0):
            first = first if tokens else clock()
            tokens.append(int(token))
            if len(tokens) == limit or tokens[-1] in self.ends:
                break
        return Decoded([tokens], first, [1])


def open_llama(at: Setting, context: int) -> dict[str, Any]:
    """The checkpoint's own GGUF in llama.cpp, widened to the precision that is compared.

    Twice, by names of contenders: without and with flash attention.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise ValueError(
            f"llama.cpp is not installed: `pip install {PACKAGE}` compiles it, in minutes"
        )
    import llama_cpp  # type: ignore[import-not-found]

    folder, dtype = at.loaded.folder, str(at.opened.dtype).removeprefix("torch.")
    files = [] if folder is None else sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"there must be one .gguf in the folder of {at.loaded.name}, got {len(files)}; "
            "`make checkpoints` leaves it there"
        )
    if dtype not in WIDE:
        raise ValueError(f"--dtype must be one of {', '.join(WIDE)} beside llama.cpp, got {dtype}")
    kind, suffix = WIDE[dtype]
    wide = at.args.work / f"{files[0].stem}-{suffix}.gguf"
    if not wide.exists():
        wide.parent.mkdir(parents=True, exist_ok=True)
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.allow_requantize = getattr(llama_cpp, kind), True
        with replacing(wide) as part:
            if llama_cpp.llama_model_quantize(str(files[0]).encode(), str(part).encode(), how):
                raise OSError(f"llama.cpp cannot widen {files[0]} to {suffix}")
    options = dict.fromkeys(("n_threads", "n_threads_batch"), torch.get_num_threads())
    options |= {"n_ctx": context, "verbose": False}
    if dtype == "float32":  # the keys and values, too, which are half precision otherwise
        options |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return {
        name: llama_cpp.Llama(str(wide), flash_attn=flash, **options)
        for name, flash in (("llama.cpp", False), ("llama.cpp-flash", True))
    }


def compare_llama(args: Namespace) -> None:
    """llama.cpp, `generate()`, plain and self on the same weights, threads and prompts; greedy."""
    if args.temperature is not None:
        raise ValueError("llama.cpp is compared greedily: leave --temperature out")
    with setting(args) as at:
        model, task = at.loaded.model, at.task
        context = max(each.ids.shape[1] for each in at.asked) + args.new_tokens
        ends = end_tokens(model)
        llamas = [
            LlamaCpp(name, each, task, ends) for name, each in open_llama(at, context).items()
        ]
        skip = SkipConfig.load(args.skip) if args.skip else automatic_draft(at.opened).skip
        plain, ours = Engine(model, task), Engine(model, task, "self", skip, lookup=True)
        batches, _ = make_batches(at.asked, [1], 0)
        price(ours, batches)
        methods = [*llamas, Peer(model, task), plain, ours]
        header = at.header | {
            "repeats": args.repeats,
            "warmup": args.warmup,
            "batch_sizes": [1],
            "methods": [each.describe() for each in methods],
            "baseline": llamas[0].name,  # what the table's speedups are over
        }
        record(args.output, header, model, task, methods, batches, at.talk)


def compare_drafts(args: Namespace) -> None:
    """Drafts, mixtures of them with lookups, and controllers: acceptance and expected speedup.

    Speedups are tokens per target step of simulated rounds, by controller; "best fixed" is what the
    best fixed draft length would bring, which one knows only afterwards.
    """
    law = "greedy" if args.temperature is None else f"{args.temperature:g}"
    with setting(args) as at:
        drafts = given_drafts(at)
        at.talk.progress("answers")
        trace = answers(
            at.opened,
            [each.ids for each in at.asked],
            args.temperature,
            new_tokens=args.new_tokens,
            draft_length=LONGEST,
        )
        replays, costs, rows = {}, {}, []
        for name, draft in drafts.items():
            at.talk.progress(f"replay and price: {name}")
            replays[name] = replay(trace, draft)
            costs[name] = costs_of(at, draft)
        mixtures = [(LOOKUP, name) for name in drafts if name != LOOKUP]
        for parts in [*((name,) for name in drafts), *mixtures]:
            played, tables = [replays[name] for name in parts], [costs[name] for name in parts]
            priors = [each.source.prior for each in played]
            gains = {}
            for name in CONTROLLERS:
                controller = make_controller(
                    name, costs=tables, priors=priors, sampling=law != "greedy"
                )
                texts = range(len(trace.texts))
                rounds = (simulate(played, controller, [text]) for text in texts)
                gains[name] = tokens_per_step(itertools.chain.from_iterable(rounds), tables)
            sizes = [size_of(at.opened, drafts[name]) for name in parts]
            row: dict[str, Any] = {
                "name": " + ".join(reversed(parts)),
                "bytes": sum(nbytes for nbytes, _ in sizes),
                "parameters": sum(count for _, count in sizes),
                "controllers": gains,
            }
            if len(parts) == 1:
                survival, table = played[0].survival, tables[0]
                row |= {"acceptance": survival, "best_fixed": formula(survival, table)}
                row |= {"costs": {"draft": table.draft, "verify": list(table.verify)}}
            rows.append(row)
        document = at.header | {"kind": "drafts", "rows": rows}
    write_text(args.output, json.dumps(document, indent=1) + "\n")
    lines = [["draft", "MB", f"accepted, {law}", "c", "best fixed", *CONTROLLERS]]
    for row in rows:
        line = [row["name"], f"{row['bytes'] / 1e6:.1f}", "-", "-", "-"]
        if "costs" in row:
            shares = row["acceptance"][:SHOWN]
            accepted = " ".join(f"{share:.3f}".lstrip("0") for share in shares)
            line[2:] = [accepted, f"{row['costs']['draft']:.2f}", f"{row['best_fixed']:.2f}"]
        lines.append([*line, *(f"{gain:.2f}" for gain in row["controllers"].values())])
    print(aligned(lines))


def given_drafts(at: Setting) -> dict[str, Any]:
    """The drafts named, and those of any model that need no training."""
    layers = at.opened.num_layers
    exit_layer = at.args.exit_layer or max(1, round(layers / 4))
    given: dict[str, Any] = {
        f"exit {exit_layer}": SkipConfig.early_exit(exit_layer),
        "8 bits": SkipConfig.low_precision(8),
        "4 bits, head 8": SkipConfig(low=LowPrecision(bits=4, head=8)),
    }
    for path in at.args.drafts:
        if path.stem in given:
            raise ValueError(f"two drafts are called {path.stem!r}; give different names")
        skip = trained_skip(path) if path.is_dir() else SkipConfig.load(path)
        given[path.stem] = skip.bare()
    return {LOOKUP: Lookup(), **{name: skip.resolve(layers) for name, skip in given.items()}}


def size_of(opened: Sublayers, draft: SkipConfig | Lookup) -> tuple[int, int]:
    if isinstance(draft, Lookup):
        return 0, 0
    weights = {} if draft.trained is None else load_file(draft.trained.weights)
    count = sum(weight.numel() for name, weight in weights.items() if name != TOKENS)
    return opened.weights.nbytes(draft), count


def costs_of(at: Setting, draft: SkipConfig | Lookup) -> CostTable:
    """What a draft costs: as given, or else by the clock."""
    if at.args.costs:
        step, *verify = at.args.costs
        return CostTable(0.0 if isinstance(draft, Lookup) else step, tuple(verify))
    request = request_of(at.opened, at.asked[0].ids, at.args.temperature)
    context = request.input_ids.shape[1]
    return cost_tables(at.opened, [draft], request, seconds=SECONDS)[0].at(context)


def arguments() -> ArgumentParser:
    asked = ArgumentParser(add_help=False)
    asked.add_argument("model", nargs="?", default="demo-llama", help="as for layerskip")
    asked.add_argument("--output", type=Path, required=True, help="replaced")
    asked.add_argument("--prompts", type=Path, help="a file, spec-bench or copying")
    asked.add_argument("--chat", action="store_true", help="prompts are what a user says")
    asked.add_argument("--limit", type=int, help="prompts of each category or context, at most")
    asked.add_argument(
        "--context", type=int, action="append", help="prompts joined or cut to N tokens; repeatable"
    )
    asked.add_argument("--temperature", type=float, help="of sampling; greedy if not given")
    asked.add_argument("--new-tokens", type=int, default=64)
    asked.add_argument("--dtype", choices=DTYPES, default="auto")
    asked.add_argument("--execution", default="auto")
    asked.add_argument("--threads", type=int, help="measured if not given")
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    llama = commands.add_parser("llama-cpp", parents=[asked], description=compare_llama.__doc__)
    llama.set_defaults(run=compare_llama)
    llama.add_argument("--repeats", type=int, default=1)
    llama.add_argument("--warmup", type=int, default=1)
    llama.add_argument("--skip", type=Path, help="of self, which needs no set-up otherwise")
    llama.add_argument("--work", type=Path, default=Path("runs/llama-cpp"), help="wide GGUFs")
    drafts = commands.add_parser("drafts", parents=[asked], description=compare_drafts.__doc__)
    drafts.set_defaults(run=compare_drafts)
    drafts.add_argument("drafts", nargs="*", type=Path, help="skip configs, trainings' folders")
    drafts.add_argument("--exit-layer", type=int, help="a quarter of the layers otherwise")
    drafts.add_argument(
        "--costs",
        type=float,
        nargs="+",
        metavar="COST",
        help="of a draft step, then of passes of 1, 2, ... tokens; in target steps; else measured",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    try:
        with cpu_threads(None):
            args.run(args)
    except (ValueError, OSError) as error:
        print(f"compare: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
