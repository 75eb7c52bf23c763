"""Measure the README's table: knows the shipped models and prompts, asserts nothing.

    python scripts/measure.py demo-llama --threads 2

Every prompt is decoded by `generate()`, by this engine plainly and by self-speculation, interleaved
in one process in rotating order; a repeat's ratio compares neighbours in time. The first repeat of
each prompt warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import layerskip
from layerskip.loading import SHIPPED_PROMPTS, encode, load
from layerskip.prompts import Prompt, read_prompts
from layerskip.speculation import speedup_bound

METHODS = ("generate", "plain", "self")


@dataclass
class Tally:
    """Seconds and counts of one kind of prompts under one way to draw."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0
    repeated: list[float] = field(default_factory=list)
    different: int = 0

    def speedup(self, method: str, over: str) -> tuple[float, float, float]:
        """Ratio of total seconds per token, with a 95% bootstrap interval over prompts."""
        cost = {
            m: [s / n for s, n in zip(self.seconds[m], self.tokens[m], strict=True)]
            for m in (method, over)
        }
        pairs = list(zip(cost[over], cost[method], strict=True))
        draw = random.Random(0)
        samples = sorted(
            sum(a for a, _ in s) / sum(b for _, b in s)
            for s in (draw.choices(pairs, k=len(pairs)) for _ in range(2000))
        )
        total = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
        return total, samples[50], samples[1949]

    def rate(self, method: str) -> float:
        """Tokens per second over all prompts, prefill included."""
        return sum(self.tokens[method]) / sum(self.seconds[method])


def repeated_share(tokens: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred earlier in the same text."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def choose(per_kind: int) -> list[Prompt]:
    """The first prompts of every kind among the shipped held-out ones; 0 takes all."""
    by_kind: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in read_prompts(SHIPPED_PROMPTS):
        by_kind[prompt.category or "all"].append(prompt)
    return [prompt for kind in by_kind.values() for prompt in kind[: per_kind or None]]


def decode_all(
    loaded: Any, prompt: Prompt, seed: int, args: argparse.Namespace, sampling: bool
) -> dict[str, Callable[[], Any]]:
    """One call per method, each returning an output with the sequences."""
    inputs = {"input_ids": encode(loaded.tokenizer, prompt)}
    draw = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if sampling else {}
    common = {"max_new_tokens": args.tokens, "eos_token_id": None, **draw}
    skip = layerskip.SkipConfig.early_exit(args.exit_layer)
    if args.skip:
        skip = layerskip.SkipConfig.load(args.skip)
    ours = partial(layerskip.generate, loaded.model, inputs, seed=seed, **common)
    return {
        "generate": partial(
            loaded.model.generate, **inputs, **common, return_dict_in_generate=True
        ),
        "plain": ours,
        "self": partial(ours, skip=skip, controller=args.controller),
    }


def measure(args: argparse.Namespace, sampling: bool) -> tuple[dict[str, Tally], Any]:
    """Time every prompt with every method; tallies by kind, and the cost table used."""
    loaded = load(args.model, dtype=args.dtype)
    prompts = choose(args.prompts)
    tallies: dict[str, Tally] = defaultdict(Tally)
    costs = None
    for number, prompt in enumerate(prompts):
        calls = decode_all(loaded, prompt, number, args, sampling)
        width = len(encode(loaded.tokenizer, prompt)[0])
        tally = tallies[prompt.category or "all"]
        times: dict[str, list[float]] = defaultdict(list)
        outputs: dict[str, Any] = {}
        for repeat in range(args.repeats + 1):
            shift = (number + repeat) % len(METHODS)
            for method in METHODS[shift:] + METHODS[:shift]:
                start = time.perf_counter()
                outputs[method] = calls[method]()
                if repeat:
                    times[method].append(time.perf_counter() - start)
        for method in METHODS:
            tally.seconds[method].append(statistics.median(times[method]))
            tally.tokens[method].append(outputs[method].sequences.shape[1] - width)
        stats = outputs["self"].stats
        costs = outputs["self"].costs or costs
        tally.drafted += stats.num_draft_tokens
        tally.accepted += stats.num_accepted_tokens
        tally.rejections += sum(r.accepted[0] < r.drafted[0] for r in outputs["self"].rounds)
        text = outputs["self"].sequences[0, width:].tolist()
        tally.repeated.append(repeated_share(text))
        reference = outputs["plain" if sampling else "generate"].sequences[0, width:].tolist()
        tally.different += text != reference
        print(f"\r{number + 1}/{len(prompts)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return tallies, costs


def show(tallies: dict[str, Tally], costs: Any, title: str) -> None:
    """Print a Markdown table, one line per kind and one for all."""
    total = Tally()
    for tally in tallies.values():
        for method in METHODS:
            total.seconds[method] += tally.seconds[method]
            total.tokens[method] += tally.tokens[method]
        for name in ("drafted", "accepted", "rejections", "different"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
        total.repeated += tally.repeated
    print(f"\n### {title}\n")
    print(
        "| prompts | generate tok/s | plain tok/s | self tok/s | plain / generate |"
        " self / plain | self / generate | alpha | r | repeated 4-grams | different |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for kind, t in [*sorted(tallies.items()), ("all", total)]:
        ratios = [
            t.speedup(*pair)
            for pair in (("plain", "generate"), ("self", "plain"), ("self", "generate"))
        ]
        cells = [f"{t.rate(m):.0f}" for m in METHODS]
        cells += [f"{mid:.2f} ({low:.2f}-{high:.2f})" for mid, low, high in ratios]
        tried = t.accepted + t.rejections
        cells += [f"{t.accepted / tried:.2f}" if tried else "-"]
        cells += [f"{t.accepted / t.drafted:.2f}" if t.drafted else "-"]
        cells += [f"{statistics.mean(t.repeated):.2f}", f"{t.different}/{len(t.repeated)}"]
        print(f"| {kind} | " + " | ".join(cells) + " |")
    if costs is not None:
        verify = ", ".join(f"{costs.verify_cost(n):.2f}" for n in (2, 3, 5, 9))
        print(
            f"\nc = {costs.draft:.3f}, bound 1/c = {speedup_bound(costs.draft):.1f}x, "
            f"v(2, 3, 5, 9) = {verify}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo-llama")
    parser.add_argument("--exit-layer", type=int, default=3)
    parser.add_argument("--skip", help="a skip config's JSON, instead of an exit layer")
    parser.add_argument("--controller", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind; 0: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="the tallies as one JSON line last")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = {}
    for sampling in (True, False):
        how = f"sampling at temperature {args.temperature}" if sampling else "greedy"
        tallies, costs = measure(args, sampling)
        show(tallies, costs, f"{args.model}, {args.dtype}, batch 1, {args.threads} threads, {how}")
        lines[how] = {kind: {m: t.rate(m) for m in METHODS} for kind, t in tallies.items()}
    if args.json:
        print(json.dumps(lines))


if __name__ == "__main__":
    main()
