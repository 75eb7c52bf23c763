"""Compare controllers by counted rounds: knows the shipped models and prompts; times nothing.

    python scripts/compare_controllers.py --split held-out

Every prompt is decoded once and its drafts replayed from every place (`layerskip.replay.drafts`);
the rounds of any controller, and of every fixed draft length, follow from that exactly. One given
cost table prices them all, so that no clock's noise is in the comparison. The held-out prompts are
the first 8 of each kind, those of the README's table; the others of the shipped file are for
development.
"""

from __future__ import annotations

import argparse
import itertools
import math

import torch

from layerskip.checkpoints import encode, load
from layerskip.config import SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import CONTROLLERS, make_controller
from layerskip.prompts import Prompt, read_prompts
from layerskip.replay.drafts import Replay, replay
from layerskip.replay.exits import law_of
from layerskip.replay.simulation import count_rounds, simulate, tokens_per_step
from layerskip.replay.trace import take_trace
from layerskip.shelf import SHIPPED_PROMPTS

EXITS = {"demo-llama": 3, "demo-gemma2": 12}
HELD_OUT = 8  # prompts of each kind
LONGEST = 12  # tokens that any round drafts


def whole_rounds(draft: float, *rounds: float) -> CostTable:
    """The table under which a round of d drafts costs the d-th of `rounds` target steps."""
    return CostTable(draft, (1.0, *(cost - d * draft for d, cost in enumerate(rounds, 1))))


# "measured": one thread of an AMD EPYC (Zen 4), batch 1, float32, in whole rounds of 1, 2, ...
# drafts (demo-gemma2's while the machine was busy). The others are what else one may look like.
TABLES = {
    "demo-llama": {
        "measured": whole_rounds(0.145, 1.41, 1.63, 1.74, 1.95, 2.05, 2.13, 2.21, 2.40),
        "faster head": whole_rounds(0.11, 1.37, 1.56, 1.65, 1.83, 1.90, 1.96, 2.01, 2.17),
        "memory-bound": CostTable(0.16, (1.0,)),
        "dear": CostTable(0.3, (1.0, 1.25, 1.35, 1.45)),
    },
    "demo-gemma2": {
        "measured": whole_rounds(0.74, 1.84, 2.66, 3.48, 4.24, 5.03, 5.82, 6.61, 7.40),
        "memory-bound": CostTable(0.76, (1.0,)),
    },
}


def choose(split: str, per_kind: int) -> dict[str, list[tuple[int, Prompt]]]:
    """Prompts of the split with their numbers among their kind, by kind."""
    by_kind: dict[str, list[tuple[int, Prompt]]] = {}
    for prompt in read_prompts(SHIPPED_PROMPTS):
        own = by_kind.setdefault(prompt.category or "all", [])
        own.append((len(own), prompt))
    kept = slice(HELD_OUT) if split == "held-out" else slice(HELD_OUT, None)
    return {kind: own[kept][: per_kind or None] for kind, own in by_kind.items()}


def gain(drafts: Replay, name: str, costs: CostTable, sampling: bool) -> float:
    """Tokens per target step over all texts, each decoded alone; 1 for plain decoding."""
    controller = make_controller(name, costs=costs, sampling=sampling)
    texts = range(len(drafts.texts))
    rounds = itertools.chain.from_iterable(simulate(drafts, controller, [t]) for t in texts)
    return tokens_per_step(rounds, costs)


def best_fixed(drafts: Replay, costs: CostTable) -> tuple[float, int]:
    """The highest gain of the fixed draft lengths 0..LONGEST on these very texts, and which."""
    gains = []
    for length in range(LONGEST + 1):
        counts = count_rounds(drafts, length)
        spent = math.fsum(count * costs.round_cost(d) for d, count in enumerate(counts))
        gains.append((drafts.trace.starts / spent, length))
    return max(gains)


def show(drafts: dict[str, Replay], tables: dict[str, CostTable], sampling: bool) -> None:
    """Print one line per table and kind, and ours over the best fixed length of all of them."""
    print("| costs | prompts | best fixed | " + " | ".join(CONTROLLERS) + " | ours / best |")
    print("|---|---|---|" + "---|" * len(CONTROLLERS) + "---|")
    ratios = []
    for title, costs in tables.items():
        for kind, own in drafts.items():
            best, length = best_fixed(own, costs)
            gains = {name: gain(own, name, costs, sampling) for name in CONTROLLERS}
            ratios.append(gains["expected-gain"] / best)
            cells = [f"{best:.3f} ({length})", *(f"{g:.3f}" for g in gains.values())]
            print(f"| {title} | {kind} | {' | '.join(cells)} | {ratios[-1]:.3f} |", flush=True)
    mean = math.fsum(ratios) / len(ratios)
    print(f"\nOurs / best: mean {mean:.3f}, least {min(ratios):.3f}.", flush=True)


def compare(name: str, temperature: float | None, args: argparse.Namespace) -> None:
    """Trace, replay and print one model under one law."""
    loaded = load(name, dtype="float32")
    skip = SkipConfig.early_exit(EXITS[name])
    sampling = temperature is not None
    drafts = {}
    for kind, numbered in choose(args.split, args.prompts).items():
        runs = range(args.seeds if sampling else 1)
        trace = take_trace(
            loaded.model,
            [encode(loaded.tokenizer, prompt) for _, prompt in numbered] * len(runs),
            max_new_tokens=args.tokens,
            law=law_of({"do_sample": sampling, "temperature": temperature}),
            seeds=[number + 1000 * run for run in runs for number, _ in numbered],
            draft_length=LONGEST,
        )
        drafts[kind] = replay(trace, skip)
    how = f"sampled at {temperature}" if sampling else "greedy"
    print(f"\n### {name}, exit {skip.exit_layer}, {how}, {args.split} prompts\n")
    show(drafts, TABLES[name], sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(EXITS), help="of demo-llama, demo-gemma2")
    parser.add_argument("--split", choices=["development", "held-out"], default="development")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=0, help="of each kind; 0: all of the split")
    parser.add_argument("--seeds", type=int, default=1, help="sampled texts of each prompt")
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, temperature in itertools.product(args.models, (args.temperature, None)):
        compare(name, temperature, args)


if __name__ == "__main__":
    main()
