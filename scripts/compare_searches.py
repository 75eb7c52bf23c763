"""Compare searches of a shipped model at equal numbers of evaluations: knows values, not clocks.

    python scripts/compare_searches.py demo-llama --temperature 0.8 --cost cost.json --cache known

The cost record (of `layerskip.timing.sublayers.measure`, say) is given, so that what a set is
worth is a function of the set, whatever else the machine does. Sets are worth the same to all
methods: the expected speedup, or, where drafting would turn itself off, what the set is worth if it
must draft.
Every value goes to the cache at once: methods share it, and a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from unittest import mock

import optuna
import torch
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from layerskip.checkpoints import Loaded, encode, load
from layerskip.config import SkipConfig
from layerskip.prompts import Prompt, read_prompts
from layerskip.replay.exits import law_of
from layerskip.replay.trace import Trace, take_trace
from layerskip.search import moves, seeds, study
from layerskip.search.objective import Objective
from layerskip.search.space import Space
from layerskip.search.study import Evaluation
from layerskip.served import end_tokens
from layerskip.shelf import SHIPPED, SHIPPED_PROMPTS

HELD_OUT = 4  # prompts of each kind that are left alone
NEW_TOKENS = 64
PATIENCE = 5  # sets of a greedy path that may be worse than its best before it ends

Found = tuple[int, str]  # a set, and what proposed it


class Landscape:
    """What the sets of a space are worth, remembered on disk.

    Raises:
        ValueError: the cache is of another model, law, text or cost record.
    """

    def __init__(self, objective: Objective, space: Space, cache: Path) -> None:
        self.objective, self.space = objective, space
        self.known: dict[int, Evaluation] = {}
        tokens = [text.tokens.tolist() for text in objective.trace.texts]
        made_with = json.dumps([objective.cost, tokens, space.to_dict()], sort_keys=True)
        head = {"of": hashlib.sha256(made_with.encode()).hexdigest()}
        if cache.exists():
            first, *lines = map(json.loads, cache.read_text().splitlines())
            if first != head:
                raise ValueError(
                    f"the values in {cache} are of another model, law, texts or costs; give "
                    "another --cache"
                )
            for line in lines:
                mask = int(line.pop("mask"), 16)
                self.known[mask] = Evaluation(**line)
        self.file = cache.open("a")
        if not self.known:
            self.file.truncate(0)
            self._write(head)

    def __call__(self, skip: SkipConfig) -> Evaluation:
        return self.evaluate(self.space.mask(skip))

    def evaluate(self, mask: int) -> Evaluation:
        if mask not in self.known:
            found = self.objective(self.space.skip_config(mask))
            names = ("value", "guide", "acceptance", "draft_cost")
            values = {name: getattr(found, name) for name in names}
            self._write({"mask": f"{mask:#x}", **values})
            self.known[mask] = Evaluation(**values)
        return self.known[mask]

    def worth(self, mask: int) -> float:
        """Speedup of a set over plain decoding; under 1 if it must draft for that."""
        found, plain = self.evaluate(mask), self.evaluate(0)
        assert found.guide is not None
        worth = found.value if found.value > plain.value else min(found.value, found.guide)
        return worth * self.objective.step_seconds

    def _write(self, line: Mapping[str, object]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def ours(landscape: Landscape, planted: dict[str, int], trials: int, seed: int) -> list[Found]:
    """This package's search."""
    space = landscape.space
    ledger = study.open_study(space)
    study.run(ledger, space, landscape, trials=trials, seeds=planted, seed=seed)
    tried = ledger.get_trials(deepcopy=False)
    return [(int(t.user_attrs["skipped"], 16), t.user_attrs["origin"]) for t in tried]


def plain_moves(
    landscape: Landscape, planted: dict[str, int], trials: int, seed: int
) -> list[Found]:
    """Ours, but that local moves are flips and swaps of the best sets drawn at random."""

    def drawn(space: Space, history: moves.History, rank: int = 0) -> int | None:
        draw = random.Random(f"{seed} {len(history.taken)}")
        apart = max(2, len(space.switches) // 8)
        centre = moves._elite(history, rank, apart)
        free = [centre ^ m for m in steps(space, centre) if history.free(space, centre ^ m)]
        return draw.choice(free) if free else None

    with mock.patch.object(moves, "next_local", drawn):
        return ours(landscape, planted, trials, seed)


def sampler(make: Callable[[int], BaseSampler]) -> Callable[..., list[Found]]:
    """One of Optuna's own samplers, alone; a set that it repeats is not counted again."""

    def run(landscape: Landscape, planted: dict[str, int], trials: int, seed: int) -> list[Found]:
        space = landscape.space
        with study.quiet():
            ledger = optuna.create_study(direction="maximize", sampler=make(seed))
            tried: dict[int, str] = {}
            for _ in range(3 * trials):
                trial = ledger.ask(space.distributions)
                mask = space.from_params(trial.params)
                tried.setdefault(mask, "sampled")
                ledger.tell(trial, landscape.worth(mask))
                if len(tried) == trials:
                    break
        return list(tried.items())

    return run


METHODS: dict[str, Callable[..., list[Found]]] = {
    "ours": ours,
    "ours, plain moves": plain_moves,
    "TPE": sampler(lambda seed: TPESampler(seed=seed)),
    "GP": sampler(lambda seed: GPSampler(seed=seed, deterministic_objective=True)),
    "random": sampler(lambda seed: RandomSampler(seed=seed)),
}


class Spent(Exception):
    """The reference has no evaluations left."""


def reference(landscape: Landscape, limit: int) -> tuple[float, int, str]:
    """Worth of the best set of a long search, its evaluations, and how the search ended.

    Flips and swaps until none helps, from the best exit, from the best set of full greedy from
    nothing (whose path ends PATIENCE sets after its best one), and from the next two exits.
    """
    space, asked = landscape.space, {0}
    draw = random.Random(0)

    def worth(mask: int) -> float:
        if mask not in space:
            return -math.inf
        if mask not in asked and len(asked) > limit:
            raise Spent
        asked.add(mask)
        return landscape.worth(mask)

    def greedy() -> int:
        path = [0]
        best = -1
        while best < 0 or len(path) - 1 - path.index(best) < PATIENCE:
            left = [s for s in space.switches.values() if not path[-1] & s]
            if not left:
                break
            path.append(max((path[-1] | s for s in left), key=worth))
            best = max(path[1:], key=worth)
        return best

    def climb(mask: int) -> None:
        found = True
        while found:
            found = False
            for move in list(steps(space, mask, draw)):
                if worth(mask ^ move) > worth(mask):
                    mask ^= move
                    found = True

    exits = [space.exit_mask(e) for e in range(1, space.num_layers)]
    how = "to convergence"
    try:
        exits.sort(key=worth, reverse=True)
        climb(exits[0])
        climb(greedy())
        for start in exits[1:3]:
            climb(start)
    except Spent:
        how = "until its evaluations were spent"
    return best_of(landscape, [(m, how) for m in asked & landscape.known.keys()]), len(asked), how


def steps(space: Space, mask: int, draw: random.Random | None = None) -> Iterator[int]:
    """What to flip of a set: every switch, then every pair of one that is out and one that runs."""
    switches = list(space.switches.values())
    if draw is not None:
        draw.shuffle(switches)
    yield from switches
    for one in switches:
        if mask & one:
            yield from (one | other for other in switches if not mask & other)


def show(
    landscape: Landscape, runs: dict[str, list[list[Found]]], trials: int, best: float
) -> None:
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


def best_of(landscape: Landscape, found: Iterable[Found]) -> float:
    """The best worth of sets that skip something."""
    return max((landscape.worth(mask) for mask, _ in found if mask), default=-math.inf)


def tell(landscape: Landscape, found: list[Found]) -> str:
    """Where a run of ours found its best set, and the best one of every origin."""
    kinds: dict[str, list[Found]] = {}
    for mask, origin in found:
        if mask:
            kinds.setdefault(origin.split("-")[0], []).append((mask, origin))
    firsts = [max(own, key=lambda each: landscape.worth(each[0])) for own in kinds.values()]
    each = ", ".join(f"{origin} {landscape.worth(mask):.3f}" for mask, origin in firsts)
    best = max(firsts, key=lambda each: landscape.worth(each[0]))
    skip = landscape.space.skip_config(best[0])
    return (
        f"best at {found.index(best) + 1} ({best[1]}): attention {list(skip.attention)}, mlp "
        f"{list(skip.mlp)}; best of each origin: {each}"
    )


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
    parser.add_argument("--cache", type=Path, required=True, help="values known so far; made")
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument(
        "--methods", default=";".join(METHODS), help="with ; between, *N: so many runs"
    )
    parser.add_argument("--reference", type=int, default=2000, help="its evaluations, at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(args.model, dtype="float32")
    trace = trace_of(loaded, args.temperature, args.positions)
    objective = Objective(trace, json.loads(args.cost.read_text()))
    space = Space(kind="sublayer", num_layers=trace.model.num_layers)
    landscape = Landscape(objective, space, args.cache)
    planted = seeds.standard(space)
    planted |= seeds.from_hidden_states(space, seeds.hidden_states(trace))
    runs: dict[str, list[list[Found]]] = {}
    for name in args.methods.split(";"):
        name, _, count = name.partition("*")
        for seed in range(int(count or args.seeds)):
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
            found = METHODS[name](landscape, planted, args.trials, seed)
            runs.setdefault(name, []).append(found)
    long, spent, how = reference(landscape, args.reference)
    exits = [(space.exit_mask(e), "exit") for e in range(1, space.num_layers)]
    best = max(landscape.worth(mask) for mask in landscape.known if mask)
    law = "greedy" if args.temperature is None else f"sampled at {args.temperature}"
    print(
        f"\n### {args.model}, {law}, {len(space.switches)} switches, {trace.starts} positions\n\n"
        f"Long search {long:.4f} ({spent} evaluations, {how}), best set known {best:.4f}, best "
        f"exit {best_of(landscape, exits):.4f}, {len(landscape.known)} sets evaluated.\n"
    )
    show(landscape, runs, args.trials, best)
    for name, own in runs.items():
        if name.startswith("ours"):
            print()
            for seed, found in enumerate(own):
                print(f"- {name}, seed {seed}: {tell(landscape, found)}")


if __name__ == "__main__":
    main()
