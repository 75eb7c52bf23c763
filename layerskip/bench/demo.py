"""Plain and self-speculative decoding of prompts side by side; knows no text and no terminal.

Sampled, with the coupled rule, so that both must give the same tokens. Measured as a benchmark is;
a prompt counts with the repeat that took the fewest seconds per token, a method with all prompts:
what else a machine does only adds seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerskip.bench.batches import one_by_one
from layerskip.bench.comparison import Comparison, Difference
from layerskip.bench.methods import Engine, Method, Peer, Task
from layerskip.bench.runner import Judge, device_clock, interleaved
from layerskip.config import SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.rounds import DecodingStats, Round

TEMPERATURE = 0.8

REPEATS = 3

ONE_THREAD_PARAMETERS = 20_000_000
"""Up to this size one CPU thread decodes one prompt; the shipped models are half as large."""

METHODS = ("transformers", "plain", "self")
"""The library's own `generate()`, this engine without drafts, and with them."""


@dataclass(frozen=True)
class SideBySide:
    """Prompts decoded three ways.

    Attributes:
        tokens: per prompt, new tokens of this engine's plain decoding.
        comparison: of self-speculation with it; a prompt's first difference counts.
        rounds: per prompt, those of the last self-speculative decoding.
        costs: what the controller decided with; None where it needed no costs.
        seconds: by method, those of each prompt's fastest repeat.
        counts: by method, the new tokens of the same repeats; transformers draws others in every
            repeat, and may end sooner.
    """

    tokens: list[list[int]]
    comparison: Comparison
    rounds: list[Sequence[Round]]
    costs: CostTable | None
    seconds: dict[str, list[float]]
    counts: dict[str, list[int]]

    @property
    def identical(self) -> bool:
        """Whether self-speculation gave the same tokens, every time."""
        return not self.comparison.differences

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """By method, all new tokens over all seconds, prefill included."""
        return {method: sum(self.counts[method]) / sum(self.seconds[method]) for method in METHODS}

    @property
    def stats(self) -> DecodingStats:
        """The counts of all prompts together."""
        total = DecodingStats()
        for rounds in self.rounds:
            for round_ in rounds:
                total.add(round_, lambda drafted: 0)
        return total

    @property
    def predicted_speedup(self) -> float | None:
        """Tokens per target step over the rounds, at the cost table's prices; None without one."""
        rounds = [round_ for each in self.rounds for round_ in each[1:]]
        if self.costs is None or not rounds:
            return None
        emitted = sum(len(round_.tokens[0]) for round_ in rounds)
        return emitted / sum(self.costs.round_cost(round_.drafted[0]) for round_ in rounds)


def fitting_threads(model: Any) -> int | None:
    """How many threads a model should decode on: one for a small one; None if not on the CPU.

    The steps of a small model are shorter than a time slice of the system: where something else
    takes a core, all threads of a step wait for the one that was on it, many times over.
    """
    if model.device.type != "cpu":
        return None
    size = sum(parameter.numel() for parameter in model.parameters())
    return 1 if size <= ONE_THREAD_PARAMETERS else torch.get_num_threads()


def side_by_side(
    model: Any,
    prompts: Sequence[Tensor],
    skip: SkipConfig,
    *,
    max_new_tokens: int,
    seed: int,
    execution: str = "auto",
    repeats: int = REPEATS,
    streamer: Any = None,
    note: Callable[[str], None] = lambda _: None,
) -> SideBySide:
    """Decode prompts (1, T) plainly and self-speculatively, and time both and transformers.

    Args:
        streamer: gets the tokens of the first prompt's first self-speculative decoding, a warm-up.
        repeats: sweeps timed.
        note: told what begins, in words.
    """
    task = Task(max_new_tokens, True, temperature=TEMPERATURE, seed=seed, execution=execution)
    batches = one_by_one(prompts)
    speculative = Engine(model, task, "self", skip)
    methods: list[Method] = [
        Peer(model, task, name="transformers"),
        Engine(model, task),
        speculative,
    ]
    judge = Judge(model, task, methods)
    note("decoding")
    costs = speculative.generate(batches[0], streamer=streamer).costs
    tokens: list[list[int]] = [[] for _ in prompts]
    rounds: list[Sequence[Round]] = [() for _ in prompts]
    differences: dict[int, Difference] = {}
    times: dict[str, list[list[tuple[float, int]]]] = {n: [[] for _ in prompts] for n in METHODS}
    for timed in interleaved(
        methods,
        batches,
        repeats=repeats,
        warmup=1,
        now=device_clock(model.device),
        note=lambda what, share: note(f"timing, {share:.0%}: prompt {what}"),
    ):
        judge.prepare(timed.batch)
        if timed.repeat < 0:
            continue
        name, (number,) = timed.method.name, timed.batch.numbers
        (text,) = timed.decoded.tokens
        times[name][number].append((timed.seconds, len(text)))
        if name == "plain":
            tokens[number] = text
        if name == "self":
            rounds[number] = timed.decoded.rounds or ()
            for difference in judge.differences(timed.method, timed.batch, [text]) or ():
                differences.setdefault(number, difference)
    fastest = {
        name: [min(tries, key=lambda one: one[0] / one[1]) for tries in each]
        for name, each in times.items()
    }
    return SideBySide(
        tokens=tokens,
        comparison=Comparison.of(tokens, differences),
        rounds=rounds,
        costs=costs,
        seconds={name: [seconds for seconds, _ in each] for name, each in fastest.items()},
        counts={name: [count for _, count in each] for name, each in fastest.items()},
    )
