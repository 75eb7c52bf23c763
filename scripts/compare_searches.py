"""Compare searches of a shipped model at equal numbers of evaluations: knows values, not clocks.

    python scripts/compare_searches.py demo-llama --temperature 0.8 --cost cost.json

The cost record (of `layerskip.timing.sublayers.measure`, say) is given, so that what a set is
worth is a function of the set, whatever else the machine does. Sets are worth the same to all
methods: the expected speedup, or, where drafting would turn itself off, what the set is worth if it
must draft.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from itertools import product, zip_longest
from pathlib import Path

import optuna
import torch
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from layerskip.checkpoints import Loaded, encode, load
from layerskip.prompts import Prompt, read_prompts
from layerskip.replay.exits import law_of
from layerskip.replay.trace import Trace, take_trace
from layerskip.search import study, warm_starts
from layerskip.search.objective import Objective
from layerskip.search.space import Space
from layerskip.served import end_tokens
from layerskip.shelf import SHIPPED, SHIPPED_PROMPTS

HELD_OUT = 4  # prompts of each kind that are left alone
NEW_TOKENS = 64


class Landscape:
    """What the sets of a space are worth; every method is told the same."""

    def __init__(self, objective: Objective, space: Space) -> None:
        self.objective, self.space = objective, space

    def worth(self, mask: int) -> float:
        """Speedup of a set over plain decoding; under 1 if it must draft for that."""
        found, plain = (self.objective(self.space.skip_config(each)) for each in (mask, 0))
        assert found.guide is not None
        worth = found.value if found.value > plain.value else min(found.value, found.guide)
        return worth * self.objective.step_seconds


def ours(landscape: Landscape, planted: dict[str, int], trials: int, seed: int) -> list[int]:
    """This package's search."""
    space = landscape.space
    ledger = study.open_study(space)
    study.run(ledger, space, landscape.objective, trials=trials, warm_starts=planted, seed=seed)
    tried = ledger.get_trials(deepcopy=False)
    return [int(trial.user_attrs["skipped"], 16) for trial in tried]


def sampler(make: Callable[[int], BaseSampler]) -> Callable[..., list[int]]:
    """One of Optuna's own samplers, alone; a set that it repeats is not counted again."""

    def run(landscape: Landscape, planted: dict[str, int], trials: int, seed: int) -> list[int]:
        space = landscape.space
        with study.quiet():
            ledger = optuna.create_study(direction="maximize", sampler=make(seed))
            tried: dict[int, None] = {}
            for _ in range(3 * trials):
                trial = ledger.ask(space.distributions)
                mask = space.from_params(trial.params)
                tried[mask] = None
                ledger.tell(trial, landscape.worth(mask))
                if len(tried) == trials:
                    break
        return list(tried)

    return run


METHODS: dict[str, Callable[..., list[int]]] = {
    "ours": ours,
    "TPE": sampler(lambda seed: TPESampler(seed=seed)),
    "GP": sampler(lambda seed: GPSampler(seed=seed, deterministic_objective=True)),
    "random": sampler(lambda seed: RandomSampler(seed=seed)),
}


def show(landscape: Landscape, runs: dict[str, list[list[int]]], trials: int, best: float) -> None:
    """Print what every method had found after a quarter, half and all of its evaluations."""
    print("| method | runs | after " + " | ".join(map(str, quarters(trials))) + " | speedup |")
    print("|---|---|---|---|---|---|")
    for name, own in runs.items():
        cells = []
        for count in quarters(trials):
            if min(map(len, own)) < count:
                cells.append("-")
                continue
            shares = [best_of(landscape, found[:count]) / best for found in own]
            cells.append(f"{min(shares):.3f} / {math.fsum(shares) / len(shares):.3f}")
        last = [best_of(landscape, found) for found in own]
        ended = f"{min(last):.3f} / {math.fsum(last) / len(last):.3f}"
        print(f"| {name} | {len(own)} | " + " | ".join(cells) + f" | {ended} |")


def quarters(trials: int) -> tuple[int, int, int]:
    return trials // 4, trials // 2, trials


def best_of(landscape: Landscape, found: Iterable[int]) -> float:
    """The best worth of sets that skip something."""
    return max((landscape.worth(mask) for mask in found if mask), default=-math.inf)


def trace_of(loaded: Loaded, temperature: float | None, positions: int) -> Trace:
    kinds: dict[str | None, list[Prompt]] = {}
    for prompt in read_prompts(SHIPPED_PROMPTS):
        kinds.setdefault(prompt.category, []).append(prompt)
    in_turn = zip_longest(*(own[HELD_OUT:] for own in kinds.values()))
    prompts = [prompt for each in in_turn for prompt in each if prompt is not None]
    return take_trace(
        loaded.model,
        [encode(loaded.tokenizer, prompt) for prompt in prompts[: -(-positions // NEW_TOKENS)]],
        max_new_tokens=NEW_TOKENS,
        law=law_of({"do_sample": temperature is not None, "temperature": temperature}),
        eos=end_tokens(loaded.model),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=SHIPPED)
    parser.add_argument("--temperature", type=float, help="of sampling; greedy if not given")
    parser.add_argument("--cost", type=Path, required=True, help="a cost record, JSON")
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(args.model, dtype="float32")
    trace = trace_of(loaded, args.temperature, args.positions)
    objective = Objective(trace, json.loads(args.cost.read_text()))
    space = Space(kind="sublayer", num_layers=trace.model.num_layers)
    landscape = Landscape(objective, space)
    planted = warm_starts.standard(space)
    planted |= warm_starts.from_hidden_states(space, warm_starts.hidden_states(trace))
    runs: dict[str, list[list[int]]] = {}
    for name, seed in product(args.methods, range(args.seeds)):
        print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
        found = METHODS[name](landscape, planted, args.trials, seed)
        runs.setdefault(name, []).append(found)
    exits = [space.exit_mask(layer) for layer in range(1, space.num_layers)]
    tried = {mask for own in runs.values() for found in own for mask in found}.union(exits)
    best = best_of(landscape, tried)
    law = "greedy" if args.temperature is None else f"sampled at {args.temperature}"
    print(
        f"\n### {args.model}, {law}, {len(space.switches)} switches, {trace.starts} positions\n\n"
        f"Best set known {best:.4f}, best exit {best_of(landscape, exits):.4f}, "
        f"{len(tried)} sets evaluated.\n"
    )
    show(landscape, runs, args.trials, best)


if __name__ == "__main__":
    main()
