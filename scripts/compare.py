"""Compare what `layerskip benchmark` has no method for: llama.cpp, sizes, drafts, searches.

    python scripts/compare.py llama-cpp smollm2 --prompts spec-bench --chat --output run.jsonl
    python scripts/compare.py scale --shape llama-3.2-1b --output scale.jsonl
    python scripts/compare.py drafts smollm2 runs/heads skip.json --output drafts.json
    python scripts/compare.py searches demo-llama --temperature 0.8 --output searches.json

`llama-cpp` and `scale` go by the clock: they add contenders to the benchmark's loop, write its
records and print its table. `drafts` and `searches` decode every prompt once, replay all contenders
from every place of the answers, and price them with one cost table, so that no clock's noise stands
between them; they write one JSON document. For drafts by the clock there is `layerskip benchmark
MODEL --skip FILE --skip FILE`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from random_models import SHAPES, Dial, configuration, random_model
from safetensors.torch import load_file

from layerskip.bench.batches import PromptBatch, make_batches
from layerskip.bench.methods import Clock, Decoded, Engine, Method, Peer, Task
from layerskip.bench.plans import make_header, price
from layerskip.bench.runner import device_clock
from layerskip.checkpoints import DTYPES, Loaded, encode
from layerskip.cli.benchmark import record
from layerskip.cli.options import (
    Loading,
    first_of_each,
    given_prompts,
    open_model,
    open_passes,
    spoken,
)
from layerskip.cli.terminal import Talk, aligned
from layerskip.config import LowPrecision, SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import CONTROLLERS, make_controller
from layerskip.decoding.sources.lookup import Lookup
from layerskip.defaults import automatic_draft
from layerskip.files.comparisons import KIND, SCHEMA, write_comparison
from layerskip.files.writing import replacing, write_text
from layerskip.generation import DEFAULT_CONTROLLER
from layerskip.model.blocks import TOKENS
from layerskip.model.joined import join
from layerskip.model.sublayers import Sublayers
from layerskip.prompts import Prompt
from layerskip.replay.drafts import Replay, replay
from layerskip.replay.exits import law_of
from layerskip.replay.simulation import simulate, tokens_per_step
from layerskip.requests import end_tokens
from layerskip.search import study, warm_starts
from layerskip.search.objective import Objective
from layerskip.search.space import Space
from layerskip.timing.sublayers import measure
from layerskip.timing.tables import cost_tables
from layerskip.timing.threads import cpu_threads
from layerskip.training.judging import answers, formula, request_of, trained_skip

PACKAGE = "llama-cpp-python==0.3.36"
WIDE = {"float32": ("LLAMA_FTYPE_ALL_F32", "F32"), "bfloat16": ("LLAMA_FTYPE_MOSTLY_BF16", "BF16")}
LOOKUP = "lookup"
LONGEST = 12  # tokens that a replayed round drafts
SECONDS = 5.0  # that pricing a draft may take
SHOWN = 4  # depths of acceptance in the table; the file has all that were replayed


@dataclass(frozen=True)
class Setting:
    """A model opened up, on its threads, and the prompts it is asked."""

    args: argparse.Namespace
    talk: Talk
    loaded: Loaded
    opened: Sublayers
    prompts: Sequence[Prompt]
    ids: Sequence[torch.Tensor]
    """Of each prompt, (1, T)."""

    def header(self, task: Task) -> dict[str, Any]:
        return make_header(self.loaded, self.opened, task, self.prompts, self.args.prompts)

    def task(self) -> Task:
        at, new = self.args.temperature, self.args.new_tokens
        return Task(new, at is not None, at, seed=self.args.seed, execution=self.args.execution)


@contextmanager
def setting(args: argparse.Namespace) -> Iterator[Setting]:
    talk = Talk(quiet=False)
    chosen = first_of_each(spoken(given_prompts(args.prompts, args.model), args.chat), args.limit)
    loading = Loading(args.model, dtype=args.dtype, execution=args.execution, threads=args.threads)
    loaded = open_model(loading, talk)
    with open_passes(loaded, loading, talk) as opened:
        ids = [encode(loaded.tokenizer, each).to(opened.device) for each in chosen]
        lengths = [each.shape[1] for each in ids]
        opened.check_lengths(lengths, max(lengths) + args.new_tokens)
        yield Setting(args, talk, loaded, opened, chosen, ids)
    talk.progress("")


# ---------------------------------------------------------------------------------------------
# By the clock: contenders in the benchmark's loop


def by_clock(
    at: Setting,
    task: Task,
    methods: Sequence[Method],
    batches: Sequence[PromptBatch],
    **header: Any,
) -> None:
    """Measure methods in turn on every batch, write the run file, print the benchmark's table."""
    whole = {
        **at.header(task),
        "repeats": at.args.repeats,
        "warmup": 1,
        "batch_sizes": sorted({batch.rows for batch in batches}),
        "methods": [each.describe() for each in methods],
        **header,
    }
    record(at.args.output, whole, at.loaded.model, task, methods, batches, at.talk)


class LlamaCpp:
    """llama.cpp with its own greedy sampler, through llama-cpp-python."""

    name = kind = "llama.cpp"
    one_row = True

    def __init__(self, llama: Any, task: Task, ends: frozenset[int]) -> None:
        self.llama, self.task, self.ends = llama, task, ends

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


def open_llama(at: Setting, context: int) -> Any:
    """The checkpoint's own GGUF in llama.cpp, widened to the precision that is compared.

    Raises:
        ValueError: llama.cpp is not installed, no GGUF lies beside the checkpoint, another dtype.
        OSError: llama.cpp cannot widen it.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise ValueError(
            f"llama.cpp is not installed: `pip install {PACKAGE}` compiles it, in minutes"
        )
    import llama_cpp  # type: ignore[import-not-found]

    folder, dtype = at.loaded.folder, str(at.opened.dtype).removeprefix("torch.")
    found = [] if folder is None else sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise ValueError(
            f"there must be one .gguf in the folder of {at.loaded.name}, got {len(found)}; "
            "`make checkpoints` leaves it there"
        )
    if dtype not in WIDE:
        raise ValueError(f"--dtype must be one of {', '.join(WIDE)} beside llama.cpp, got {dtype}")
    kind, suffix = WIDE[dtype]
    wide = at.args.work / f"{found[0].stem}-{suffix}.gguf"
    if not wide.exists():
        wide.parent.mkdir(parents=True, exist_ok=True)
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.allow_requantize = getattr(llama_cpp, kind), True
        with replacing(wide) as part:
            if llama_cpp.llama_model_quantize(str(found[0]).encode(), str(part).encode(), how):
                raise OSError(f"llama.cpp cannot widen {found[0]} to {suffix}")
    threads = torch.get_num_threads()
    own = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": context, "verbose": False}
    if dtype == "float32":  # the keys and values, too, which are half precision otherwise
        own |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(str(wide), **own)


def compare_llama(args: argparse.Namespace) -> None:
    """llama.cpp, `generate()`, plain and self on the same weights, threads and prompts; greedy."""
    if args.temperature is not None:
        raise ValueError("llama.cpp is compared greedily: leave --temperature out")
    with setting(args) as at:
        model, task = at.loaded.model, at.task()
        context = max(ids.shape[1] for ids in at.ids) + args.new_tokens
        llama = LlamaCpp(open_llama(at, context), task, end_tokens(model))
        skip = SkipConfig.load(args.skip) if args.skip else automatic_draft(at.opened).skip
        plain, ours = Engine(model, task), Engine(model, task, "self", skip, lookup=True)
        asked = [(p.id, p.category, ids) for p, ids in zip(at.prompts, at.ids, strict=True)]
        batches, _ = make_batches(asked, [1], 0)
        price(ours, plain, batches, device_clock(at.opened.device))
        # the baseline is what the table's speedups are over
        by_clock(at, task, [llama, Peer(model, task), plain, ours], batches, baseline=llama.name)


class AtAcceptance:
    """A method, on the model as it is at the acceptance that a batch's category names."""

    def __init__(self, method: Method, dial: Dial, strengths: Mapping[str, float]) -> None:
        self.method, self.dial, self.strengths = method, dial, strengths
        self.name, self.kind, self.one_row = method.name, method.kind, method.one_row

    def describe(self) -> dict[str, Any]:
        return self.method.describe()

    def decode(
        self, batch: PromptBatch, repeat: int, clock: Clock, max_new_tokens: int | None = None
    ) -> Decoded:
        assert batch.category is not None
        self.dial.set(self.strengths[batch.category])
        return self.method.decode(batch, repeat, clock, max_new_tokens)


def compare_shape(args: argparse.Namespace) -> None:
    """A published size with random weights, at acceptances that are set (see `random_models`).

    Times and costs are real, as they depend on the shapes of the weights and not on their values;
    nothing is said about the acceptance of a trained model. The run file says so.
    """
    if args.threads:  # else as many as torch takes
        torch.set_num_threads(args.threads)
    talk, config, device = Talk(quiet=False), configuration(args.shape), torch.device(args.device)
    layers = config.num_hidden_layers
    exits = args.exit_layer or sorted({max(1, layers // n) for n in (8, 4, 2)})
    talk.progress("making the model, and setting its acceptance")
    model = random_model(config, getattr(torch, args.dtype), device, args.seed)
    join(model)  # as the commands do with a model of their own
    dial = Dial(model, min(exits), greedy=args.temperature is None, seed=args.seed)
    strengths = {f"acceptance {asked:g}": dial.find(asked) for asked in args.acceptance}
    size, generator = (args.count, 1, args.prompt_tokens), torch.Generator().manual_seed(args.seed)
    ids = torch.randint(config.vocab_size, size, generator=generator).to(device)  # (prompts, 1, T)
    asked = [
        (f"{level.split()[1]}-{number}", level, ids[number])
        for level, number in itertools.product(strengths, range(args.count))
    ]
    batches, _ = make_batches(asked, args.batch_size, 0)
    prompts = [Prompt(id=name, text="", category=level) for name, level, _ in asked]
    loaded = Loaded(f"{args.shape} shape", model, None, None)
    at = Setting(args, talk, loaded, dial.opened, prompts, list(ids))
    task = at.task()
    plain = Engine(model, task)
    methods: list[Method] = [plain, Peer(model, task)]
    for layer in exits:
        name = f"exit-{layer}"
        talk.progress(f"measuring what drafting costs: {name}")
        engine = Engine(model, task, name, SkipConfig.early_exit(layer), draft=name)
        price(engine, plain, batches, device_clock(device))
        methods.append(engine)
    levels = ", ".join(f"{asked:g}" for asked in args.acceptance)
    synthetic = f"random weights, exits from layer {min(exits)} on accepted about {levels}"
    dialled = [AtAcceptance(method, dial, strengths) for method in methods]
    by_clock(at, task, dialled, batches, synthetic=synthetic)


# ---------------------------------------------------------------------------------------------
# By replay: contenders along the target's own answers


def compare_drafts(args: argparse.Namespace) -> None:
    """Drafts, mixtures of them with lookups, and controllers: acceptance and expected speedup.

    Speedups are tokens per target step of simulated rounds, by controller; "best fixed" is what the
    best fixed draft length would bring, which one knows only afterwards.
    """
    law = "greedy" if args.temperature is None else f"{args.temperature:g}"
    with setting(args) as at:
        drafts = given_drafts(at)
        at.talk.progress("answers")
        trace = answers(
            at.opened, at.ids, args.temperature, new_tokens=args.new_tokens, draft_length=LONGEST
        )
        replays, costs, rows = {}, {}, []
        for name, draft in drafts.items():
            at.talk.progress(f"replay and price: {name}")
            replays[name] = replay(trace, draft)
            costs[name] = costs_of(at, draft)
        mixtures = [(LOOKUP, name) for name in drafts if name != LOOKUP]
        for parts in [*((name,) for name in drafts), *mixtures]:
            played, tables = [replays[name] for name in parts], [costs[name] for name in parts]
            priors = [each.prior for each in played]
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
                "kind": "mixture" if len(parts) > 1 else "lookup" if parts == (LOOKUP,) else "skip",
                "drafts": list(parts),
                "trained": any(getattr(drafts[name], "trained", None) for name in parts),
                "bytes": sum(nbytes for nbytes, _ in sizes),
                "parameters": sum(count for _, count in sizes),
                "acceptance": {},
                "predicted": {law: gains[DEFAULT_CONTROLLER]},
                "controllers": {law: gains},
            }
            rows.append(row | (alone(law, played[0], tables[0]) if len(parts) == 1 else {}))
        document = at.header(at.task()) | {"kind": KIND, "schema": SCHEMA, "rows": rows}
        if args.temperature is None:
            document["law"] |= {"temperature": 1.0}  # which the file asks for, and greedy has not
    write_comparison(args.output, document)
    lines = [["draft", "MB", f"accepted, {law}", "c", "best fixed", *CONTROLLERS]]
    for row in rows:
        shares = row["acceptance"].get(law, ())[:SHOWN]
        line = [row["name"], f"{row['bytes'] / 1e6:.1f}"]
        line.append(" ".join(f"{share:.3f}".lstrip("0") for share in shares) or "-")
        line.append(f"{row['costs']['draft']:.2f}" if "costs" in row else "-")
        line.append(f"{row['best_fixed'][law]:.2f}" if "best_fixed" in row else "-")
        lines.append([*line, *(f"{gain:.2f}" for gain in row["controllers"][law].values())])
    print(aligned(lines))


def given_drafts(at: Setting) -> dict[str, Any]:
    """What is named, beside the drafts of any model that need no training."""
    layers = at.opened.num_layers
    exit_layer = at.args.exit_layer or max(1, round(layers / 4))
    found: dict[str, Any] = {
        f"exit {exit_layer}": SkipConfig.early_exit(exit_layer),
        "8 bits": SkipConfig.low_precision(8),
        "4 bits, head 8": SkipConfig(low=LowPrecision(bits=4, head=8)),
    }
    for path in at.args.drafts:
        if path.stem in found:
            raise ValueError(f"two drafts are called {path.stem!r}; give different names")
        skip = trained_skip(path) if path.is_dir() else SkipConfig.load(path)
        found[path.stem] = skip.bare()
    return {LOOKUP: Lookup(), **{name: skip.resolve(layers) for name, skip in found.items()}}


def size_of(opened: Sublayers, draft: SkipConfig | Lookup) -> tuple[int, int]:
    """Bytes and parameters of a draft's own weights."""
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
    request = request_of(at.opened, at.ids[0], at.args.temperature)
    return cost_tables(at.opened, [draft], request, seconds=SECONDS)[0]


def alone(law: str, played: Replay, costs: CostTable) -> dict[str, Any]:
    """What is known of a draft that is no mixture."""
    found: dict[str, Any] = {
        "acceptance": {law: played.survival},
        "best_fixed": {law: formula(played.survival, costs)},
        "costs": {"draft": costs.draft, "verify": list(costs.verify)},
    }
    if played.found is not None:
        found["offered"] = {law: (played.tokens[:, 0] >= 0).double().mean().item()}
    return found


class Landscape:
    """What the sets of a space are worth; every search is told the same.

    That is the expected speedup, or, where drafting would turn itself off, what a set is worth if
    it must draft.
    """

    def __init__(self, objective: Objective, space: Space) -> None:
        self.objective, self.space = objective, space

    def worth(self, mask: int) -> float:
        """Speedup of a set over plain decoding; under 1 if it must draft for that."""
        found, plain = (self.objective(self.space.skip_config(each)) for each in (mask, 0))
        assert found.guide is not None
        value = found.value if found.value > plain.value else min(found.value, found.guide)
        return value * self.objective.step_seconds

    def best(self, masks: Iterable[int]) -> float:
        """The best worth of sets that skip something."""
        return max((self.worth(mask) for mask in masks if mask), default=-math.inf)


def ours(landscape: Landscape, planted: dict[str, int], trials: int, seed: int) -> list[int]:
    """This package's search."""
    space, ledger = landscape.space, study.open_study(landscape.space)
    study.run(ledger, space, landscape.objective, trials=trials, warm_starts=planted, seed=seed)
    return [int(each.user_attrs["skipped"], 16) for each in ledger.get_trials(deepcopy=False)]


def sampler(make: Callable[[int], BaseSampler]) -> Callable[..., list[int]]:
    """One of Optuna's own samplers, alone; a set that it repeats is not counted again."""

    def run(landscape: Landscape, planted: dict[str, int], trials: int, seed: int) -> list[int]:
        space, tried = landscape.space, dict[int, None]()
        with study.quiet():
            ledger = optuna.create_study(direction="maximize", sampler=make(seed))
            for _ in range(3 * trials):
                trial = ledger.ask(space.distributions)
                mask = space.from_params(trial.params)
                tried[mask] = None
                ledger.tell(trial, landscape.worth(mask))
                if len(tried) == trials:
                    break
        return list(tried)

    return run


SEARCHES: dict[str, Callable[..., list[int]]] = {
    "ours": ours,
    "TPE": sampler(lambda seed: TPESampler(seed=seed)),
    "GP": sampler(lambda seed: GPSampler(seed=seed, deterministic_objective=True)),
    "random": sampler(lambda seed: RandomSampler(seed=seed)),
}


def compare_searches(args: argparse.Namespace) -> None:
    """Searches at equal numbers of evaluations: what each had found, over the best set known."""
    with setting(args) as at:
        at.talk.progress("answers and costs")
        trace = answers(at.opened, at.ids, args.temperature, new_tokens=args.new_tokens)
        cost = measure(at.opened, at.ids, law=law_of(at.task().law))
        space = Space(kind="sublayer", num_layers=at.opened.num_layers)
        landscape = Landscape(Objective(trace, cost), space)
        planted = warm_starts.standard(space)
        planted |= warm_starts.from_hidden_states(space, warm_starts.hidden_states(trace))
        runs: dict[str, list[list[int]]] = {name: [] for name in args.searches}
        for name, seed in itertools.product(args.searches, range(args.runs)):
            at.talk.progress(f"search: {name}, run {seed + 1}")
            runs[name].append(SEARCHES[name](landscape, planted, args.trials, seed))
        exits = [space.exit_mask(layer) for layer in range(1, space.num_layers)]
        tried = {mask for own in runs.values() for found in own for mask in found}.union(exits)
        best, best_exit = landscape.best(tried), landscape.best(exits)
        stages = (args.trials // 4, args.trials // 2, args.trials)
        rows = {
            name: {
                stage: [landscape.best(found[:stage]) / best for found in own] for stage in stages
            }
            for name, own in runs.items()
        }
        document = at.header(at.task()) | {"kind": "searches", "best": best, "best_exit": best_exit}
        document |= {"positions": trace.starts, "cost": cost, "rows": rows}
    write_text(args.output, json.dumps(document, indent=1) + "\n")
    print(f"best set known {best:.3f}, best exit {best_exit:.3f}; shares of it, worst / mean:")
    lines = [["search", *(f"after {stage}" for stage in stages)]]
    lines += [[name, *map(spread, shares.values())] for name, shares in rows.items()]
    print(aligned(lines))


def spread(values: Sequence[float]) -> str:
    """The worst and the mean of some runs."""
    return f"{min(values):.3f} / {math.fsum(values) / len(values):.3f}"


# ---------------------------------------------------------------------------------------------
# The command line


def arguments() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--output", type=Path, required=True, help="replaced")
    shared.add_argument("--temperature", type=float, help="of sampling; greedy if not given")
    shared.add_argument("--new-tokens", type=int, default=64)
    shared.add_argument("--execution", default="auto")
    shared.add_argument("--threads", type=int, help="measured if not given")
    shared.set_defaults(seed=0)
    asked = argparse.ArgumentParser(add_help=False, parents=[shared])
    asked.add_argument("model", nargs="?", default="demo-llama", help="as for layerskip")
    asked.add_argument("--dtype", choices=DTYPES, default="auto")
    asked.add_argument("--prompts", type=Path, help="a file, spec-bench or copying")
    asked.add_argument("--chat", action="store_true", help="prompts are what a user says")
    asked.add_argument("--limit", type=int, help="prompts of each category, at most")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[..., None], parent: Any) -> argparse.ArgumentParser:
        words = (run.__doc__ or "").splitlines()[0]
        own = commands.add_parser(name, parents=[parent], help=words, description=words)
        own.set_defaults(run=run)
        return own

    llama = command("llama-cpp", compare_llama, asked)
    llama.add_argument("--repeats", type=int, default=1)
    llama.add_argument("--skip", type=Path, help="of self, which needs no set-up otherwise")
    llama.add_argument("--work", type=Path, default=Path("runs/llama-cpp"), help="wide GGUFs")
    scale = command("scale", compare_shape, shared)
    scale.set_defaults(prompts=Path("random tokens"))
    scale.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    scale.add_argument("--repeats", type=int, default=1)
    scale.add_argument("--dtype", choices=DTYPES[1:], default="bfloat16")
    scale.add_argument("--device", default="cpu")
    scale.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.8, 0.9])
    scale.add_argument("--exit-layer", type=int, nargs="+", help="L/8, L/4 and L/2 otherwise")
    scale.add_argument("--batch-size", type=int, nargs="+", default=[1])
    scale.add_argument("--count", type=int, default=2, help="prompts at each acceptance")
    scale.add_argument("--prompt-tokens", type=int, default=16)
    drafts = command("drafts", compare_drafts, asked)
    drafts.add_argument("drafts", nargs="*", type=Path, help="skip configs, trainings' folders")
    drafts.add_argument("--exit-layer", type=int, help="a quarter of the layers otherwise")
    drafts.add_argument(
        "--costs",
        type=float,
        nargs="+",
        metavar="COST",
        help="of a draft step, then of passes of 1, 2, ... tokens; in target steps; else measured",
    )
    searches = command("searches", compare_searches, asked)
    searches.add_argument("--trials", type=int, default=200)
    searches.add_argument("--runs", type=int, default=3, help="of each search")
    searches.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
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
