"""Plain and self-speculative decoding of prompts side by side; knows no text and no terminal.

Sampled, with the coupled rule, so that both must give the same tokens. Times are taken in
interleaved sweeps, after a warm-up; a prompt counts with its median, a method with all prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.generation import DecodingStats, GenerationOutput, generate
from layerskip.loading import unpadded
from layerskip.speculation import CostTable

TEMPERATURE = 0.8

METHODS = ("transformers", "plain", "self")
"""The library's own `generate()`, this engine without drafts, and with them."""


@dataclass(frozen=True)
class SideBySide:
    """Prompts decoded three ways.

    Attributes:
        tokens: per prompt, new tokens of this engine's plain decoding.
        identical: whether self-speculation gave the same ones, every time.
        speculative: per prompt, the last self-speculative output; its stats, rounds and costs.
        seconds: by method, the median of each prompt.
        counts: by method, the new tokens of each prompt; transformers draws others, and may end
            sooner.
    """

    tokens: list[list[int]]
    identical: bool
    speculative: list[GenerationOutput]
    seconds: dict[str, list[float]]
    counts: dict[str, list[int]]

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """By method, all new tokens over all seconds, prefill included."""
        return {method: sum(self.counts[method]) / sum(self.seconds[method]) for method in METHODS}

    @property
    def costs(self) -> CostTable | None:
        """What the controller decided with; None where it needed no costs."""
        return self.speculative[0].costs

    @property
    def stats(self) -> DecodingStats:
        """The counts of all prompts together."""
        total = DecodingStats()
        for output in self.speculative:
            assert output.stats is not None
            total.num_drafts += output.stats.num_drafts
            total.num_draft_tokens += output.stats.num_draft_tokens
            total.num_accepted_tokens += output.stats.num_accepted_tokens
        return total

    @property
    def predicted_speedup(self) -> float | None:
        """Tokens per target step over the rounds, at the cost table's prices; None without one."""
        rounds = [r for output in self.speculative for r in (output.rounds or [])[1:]]
        if self.costs is None or not rounds:
            return None
        emitted = sum(len(round_.tokens[0]) for round_ in rounds)
        return emitted / sum(self.costs.round_cost(round_.drafted[0]) for round_ in rounds)


def side_by_side(
    model: Any,
    prompts: Sequence[Tensor],
    skip: SkipConfig,
    *,
    max_new_tokens: int,
    seed: int,
    execution: str = "auto",
    repeats: int = 2,
    streamer: Any = None,
    note: Callable[[str], None] = lambda _: None,
) -> SideBySide:
    """Decode prompts (1, T) plainly and self-speculatively, and time both and transformers.

    Args:
        streamer: gets the tokens of the first prompt's first self-speculative decoding, a warm-up.
        repeats: sweeps timed.
        note: told what begins, in words.
    """
    shared: dict[str, Any] = {
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": max_new_tokens,
    }
    ours: dict[str, Any] = {
        "skip": skip,
        "seed": seed,
        "execution": execution,
        "acceptance": "coupled",
    } | shared

    def transformers(ids: Tensor) -> Tensor:
        return model.generate(**unpadded(ids), **shared)  # type: ignore[no-any-return]

    def plain(ids: Tensor) -> GenerationOutput:
        return generate(model, unpadded(ids), enabled=False, **ours)

    def speculate(ids: Tensor, streamer: Any = None) -> GenerationOutput:
        return generate(model, unpadded(ids), enabled=True, streamer=streamer, **ours)

    run: dict[str, Callable[[Tensor], Any]] = {
        "transformers": transformers,
        "plain": plain,
        "self": speculate,
    }
    note("decoding")
    speculate(prompts[0], streamer)
    for method in METHODS:
        run[method](prompts[0])
    tokens: list[list[int]] = []
    speculative: list[GenerationOutput] = []
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    counts: dict[str, list[int]] = {method: [] for method in METHODS}
    identical = True
    for number, ids in enumerate(prompts):
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        for sweep in range(repeats):
            note(f"timing prompt {number + 1} of {len(prompts)}, sweep {sweep + 1} of {repeats}")
            last: dict[str, Any] = {}
            new: dict[str, list[int]] = {}
            for method in METHODS:
                _synchronize(model)
                start = time.perf_counter()
                last[method] = run[method](ids)
                _synchronize(model)
                times[method].append(time.perf_counter() - start)
                sequences = last[method] if method == "transformers" else last[method].sequences
                new[method] = sequences[0, ids.shape[1] :].tolist()
            identical = identical and new["self"] == new["plain"]
        tokens.append(new["plain"])
        speculative.append(last["self"])
        for method in METHODS:
            seconds[method].append(statistics.median(times[method]))
            counts[method].append(len(new[method]))
    return SideBySide(tokens, identical, speculative, seconds, counts)


def _synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
