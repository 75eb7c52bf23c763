"""Plain and self-speculative decoding of one prompt side by side; knows no text and no terminal.

Sampled, with the coupled rule, so that both must give the same tokens. Times are taken in
interleaved sweeps, after a warm-up, and compared by their medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerskip.config import SkipConfig
from layerskip.generation import GenerationOutput, generate

TEMPERATURE = 0.8

METHODS = ("transformers", "plain", "self")
"""The library's own `generate()`, this engine without drafts, and with them."""


@dataclass(frozen=True)
class SideBySide:
    """One prompt decoded three ways.

    Attributes:
        tokens: new tokens of this engine's plain decoding.
        identical: whether self-speculation gave the same ones, every time.
        speculative: the last self-speculative output; its stats, rounds and costs.
        seconds: by method, of every sweep.
        tokens_per_second: by method, at the median time.
    """

    tokens: list[int]
    identical: bool
    speculative: GenerationOutput
    seconds: dict[str, list[float]]
    tokens_per_second: dict[str, float]

    @property
    def predicted_speedup(self) -> float | None:
        """Tokens per target step over the rounds, at the cost table's prices; None without one."""
        rounds, costs = (self.speculative.rounds or [])[1:], self.speculative.costs
        if costs is None or not rounds:
            return None
        emitted = sum(len(round_.tokens[0]) for round_ in rounds)
        return emitted / sum(costs.round_cost(round_.drafted[0]) for round_ in rounds)


def side_by_side(
    model: Any,
    input_ids: Tensor,
    skip: SkipConfig,
    *,
    max_new_tokens: int,
    seed: int,
    execution: str = "auto",
    repeats: int = 3,
    streamer: Any = None,
    note: Callable[[str], None] = lambda _: None,
) -> SideBySide:
    """Decode a prompt (1, T) plainly and self-speculatively, and time both and transformers.

    Args:
        streamer: gets the tokens of the first self-speculative decoding, the warm-up.
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

    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}

    def transformers() -> Tensor:
        return model.generate(**inputs, **shared)  # type: ignore[no-any-return]

    def plain() -> GenerationOutput:
        return generate(model, inputs, enabled=False, **ours)

    def speculate(streamer: Any = None) -> GenerationOutput:
        return generate(model, inputs, enabled=True, streamer=streamer, **ours)

    run: dict[str, Callable[[], Any]] = {
        "transformers": transformers,
        "plain": plain,
        "self": speculate,
    }
    width = input_ids.shape[1]
    texts = [speculate(streamer).sequences[0, width:].tolist()]
    tokens: list[int] = plain().sequences[0, width:].tolist()
    transformers()
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    counts: dict[str, list[int]] = {method: [] for method in METHODS}
    for sweep in range(repeats):
        note(f"timing, sweep {sweep + 1} of {repeats}")
        for method in METHODS:
            _synchronize(model)
            start = time.perf_counter()
            output = run[method]()
            _synchronize(model)
            seconds[method].append(time.perf_counter() - start)
            sequences = output if isinstance(output, Tensor) else output.sequences
            counts[method].append(sequences.shape[1] - width)
            if method == "self":
                speculative = output
                texts.append(sequences[0, width:].tolist())
    return SideBySide(
        tokens=tokens,
        identical=all(text == tokens for text in texts),
        speculative=speculative,
        seconds=seconds,
        tokens_per_second={
            # transformers draws other tokens, and may end sooner
            method: statistics.median(
                count / second
                for count, second in zip(counts[method], seconds[method], strict=True)
            )
            for method in METHODS
        },
    )


def _synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
