"""Plain and self-speculative decoding of prompts side by side; knows no text and no terminal.

Sampled, with the coupled rule, so that both must give the same tokens. Measured as a benchmark is;
a prompt counts with the repeat that took the fewest seconds per token, a method with all prompts:
what else a machine does only adds seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from layerskip.bench.batches import one_by_one
from layerskip.bench.comparison import Comparison, Difference
from layerskip.bench.methods import Engine, Method, Peer, Task
from layerskip.bench.runner import Judge, Timed, device_clock, interleaved
from layerskip.config import SkipConfig
from layerskip.costs.ratios import Totals, measured_speedup
from layerskip.costs.speculation import CostTable
from layerskip.decoding.lookup import Lookup
from layerskip.decoding.rounds import DecodingStats, Round

TEMPERATURE = 0.8

REPEATS = 3

METHODS = ("transformers", "plain", "self")
"""The library's own `generate()`, this engine without drafts, and with them."""


@dataclass(frozen=True)
class SideBySide:
    """Prompts decoded three ways.

    Attributes:
        fastest: by method, each prompt's fastest repeat, in seconds per token: transformers draws
            others in every repeat, and may end sooner.
        comparison: of self-speculation with plain decoding, every time; a prompt's first
            difference counts.
        costs: what the controller decided with, of the model's own draft if it has one; None where
            it needed no costs.
        sources: what drafts came from, as rounds number them.
    """

    fastest: dict[str, list[Timed]]
    comparison: Comparison
    costs: CostTable | None
    sources: Sequence[str]

    @property
    def tokens(self) -> list[list[int]]:
        """Per prompt, new tokens of this engine's plain decoding."""
        return [timed.decoded.tokens[0] for timed in self.fastest["plain"]]

    @property
    def rounds(self) -> list[Round]:
        """Those of self-speculation, all prompts', without the prefills."""
        return [r for timed in self.fastest["self"] for r in (timed.decoded.rounds or ())[1:]]

    @property
    def seconds(self) -> dict[str, list[float]]:
        """By method, those of every prompt."""
        return {name: [timed.seconds for timed in each] for name, each in self.fastest.items()}

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """By method, all new tokens over all seconds, prefill included."""
        return {name: self._totals(name).rate for name in self.fastest}

    @property
    def speedup(self) -> float:
        """Of self-speculation over this engine's plain decoding."""
        return measured_speedup(self._totals("self"), self._totals("plain"))[0]

    def _totals(self, name: str) -> Totals:
        each = self.fastest[name]
        return Totals(np.array([*map(_count, each)]), np.array([timed.seconds for timed in each]))

    @property
    def stats(self) -> DecodingStats:
        """The counts of all prompts together."""
        total = DecodingStats()
        for round_ in self.rounds:
            total.add(round_, lambda drafted: 0)
        return total

    @property
    def predicted_speedup(self) -> float | None:
        """Tokens per target step over the rounds, at the cost table's prices; None without one."""
        if self.costs is None or not self.rounds:
            return None
        cost = 0.0
        for round_ in self.rounds:
            (drafted,) = round_.drafted
            looked_up = round_.source is not None and self.sources[round_.source] == "lookup"
            cost += self.costs.verify_cost(drafted + 1)
            cost += 0.0 if looked_up else drafted * self.costs.draft
        return sum(len(round_.tokens[0]) for round_ in self.rounds) / cost


def _count(timed: Timed) -> int:
    return len(timed.decoded.tokens[0])


def side_by_side(
    model: Any,
    prompts: Sequence[Tensor],
    skip: SkipConfig | None,
    *,
    lookup: bool | Lookup = False,
    assistant: Any = None,
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
    speculative = Engine(model, task, "self", skip, lookup=lookup, assistant=assistant)
    methods: list[Method] = [
        Peer(model, task, name="transformers"),
        Engine(model, task),
        speculative,
    ]
    judge = Judge(model, task, methods)
    note("decoding")
    costs = speculative.generate(batches[0], streamer=streamer).costs
    tries: dict[str, list[list[Timed]]] = {name: [[] for _ in prompts] for name in METHODS}
    differences: dict[int, Difference] = {}
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
        (number,) = timed.batch.numbers
        tries[timed.method.name][number].append(timed)
        if timed.method is speculative:
            found = judge.differences(speculative, timed.batch, timed.decoded.tokens)
            for difference in found or ():
                differences.setdefault(number, difference)
    fastest = {
        name: [min(repeated, key=lambda one: one.seconds / _count(one)) for repeated in each]
        for name, each in tries.items()
    }
    texts = [timed.decoded.tokens[0] for timed in fastest["plain"]]
    return SideBySide(fastest, Comparison.of(texts, differences), costs, speculative.sources)
