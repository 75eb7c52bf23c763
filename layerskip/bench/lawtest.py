"""Tests of the emitted distribution: the engine's own rounds on recorded logits, without the model.

Passes that return recorded logits of one position draw many rounds of one draft token. A chi-square
test compares these with the target's law. N positions, R rows of a pass, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import TemperatureLogitsWarper

from layerskip.config.skips import SkipConfig
from layerskip.decoding.controllers import Controller, Fixed
from layerskip.decoding.decoding_loop import Loop, Outcome
from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law, softmax_law
from layerskip.decoding.live_target import LiveTarget
from layerskip.decoding.noise import stream_key
from layerskip.decoding.passes import Passes, Position
from layerskip.decoding.rules import rule_of
from layerskip.decoding.seats import Seat
from layerskip.decoding.sources.base import Source, State
from layerskip.model.opened_model import OpenedModel

DRAWS = 2048  # per position and rule
_SUPPORT = 256  # number of most probable tokens of a recorded law that are drawn from


@dataclass(frozen=True)
class LawTest:
    """Chi-square tests of emitted tokens against the target's law."""

    draws: int
    """Rounds drawn at each recorded position."""
    p_values: tuple[float, ...]
    """Two for each position: of a round's first token, and of its bonus token."""

    def passed(self, level: float) -> bool:
        return min(self.p_values) * len(self.p_values) >= level


class Recorded:
    """Replaces the `Passes` of rows; returns recorded raw logits of target and draft, (V,) each."""

    fed = ()
    runs_ahead = False

    def __init__(self, target: Tensor, draft: Tensor, seats: MutableSequence[Any]) -> None:
        self.target, self.draft, self.seats = target, draft, seats
        self.rows = dict[int, int]()
        batch: Any = self
        self.states, self.sources = [State(batch)], [SimpleNamespace(name="recorded", longest=None)]
        self.model = SimpleNamespace(branches=True, device=target.device, vocabulary=len(target))
        self.cache = SimpleNamespace(slots=sys.maxsize)

    def prefill(self, *_: Any) -> Tensor:
        self.rows = {row: row for row in range(len(self.seats))}
        return self.target.expand(len(self.rows), -1)  # (R, V)

    def tell(self, row: int, emitted: Sequence[int]) -> None:
        pass

    def draft_step(self, tokens: Tensor, offset: int, draft: int) -> Tensor:
        return self.draft.expand(len(tokens), -1)  # (R, V)

    def verify(self, tokens: Tensor, positions: Sequence[Position], parents: object) -> Tensor:
        return self.target.expand(len(positions), -1)  # (N, V)

    def commit(self, row: int, emitted: Sequence[int], path: Sequence[int]) -> None:
        self.seats[row].length += len(emitted)


def recorded_rounds(
    target: Tensor,
    draft: Tensor,
    controller: Controller,
    law: Law,
    keys: Sequence[int],
    *,
    longest: int,
    acceptance: str,
) -> Iterator[Outcome]:
    """Run rounds with the engine's own loop, one row per noise-stream key, after its first token.

    Args:
        target, draft: raw logits, the same at every position, (V,).
        longest: maximum number of tokens in a draft.
    """
    rule = rule_of(acceptance, sampling=law.do_sample)
    draws = Draws(law, rule=rule)
    prompt = torch.zeros(1, 1, dtype=torch.long)  # (1, 1); these laws do not read it
    seats = [
        Seat(prompt[0], sys.maxsize, length=1, row=row, draws=draws, key=key, history=prompt)
        for row, key in enumerate(keys)
    ]
    passes: Any = Recorded(target, draft, seats)
    loop = Loop(LiveTarget(passes, rule), controller, longest=longest)
    loop.prefill()
    while True:
        yield loop.round()


def draw_rounds(
    target: Tensor,
    draft: Tensor,
    *,
    acceptance: str,
    temperature: float = 1.0,
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[list[int], list[int]]:
    """Run rounds of one draft token each on given laws, with the engine's own loop.

    Args:
        target, draft: raw logits at one position, (V,).
        acceptance: the acceptance rule.

    Returns:
        The first emitted token of every round, and the bonus tokens of those that had one. Both
        follow the target's law.
    """
    law = Law([TemperatureLogitsWarper(temperature)], do_sample=True, rows=draws)
    keys = [stream_key(seed, row) for row in range(draws)]
    rounds = recorded_rounds(
        target,
        draft,
        Fixed(1),
        law,
        keys,
        longest=rule_of(acceptance, sampling=True).candidates,
        acceptance=acceptance,
    )
    emitted = next(rounds).emitted.values()
    return [tokens[0] for tokens in emitted], [tokens[1] for tokens in emitted if len(tokens) > 1]


def chi_square(tokens: Sequence[int], law: Tensor) -> float:
    """p-value of tokens drawn from a law (V,). Cells with expectation below 5 are pooled."""
    shares = law.cpu().double().numpy()  # (V,); not every device has float64
    counts = np.bincount(tokens, minlength=len(shares))  # (V,)
    if counts[shares == 0].any():
        return 0.0
    expected = shares / shares.sum() * len(tokens)  # (V,)
    order = expected.argsort()
    pooled = int((expected[order].cumsum() < 5).sum()) + 1  # the smallest, up to a sum of 5
    pooled = max(pooled, int((expected < 5).sum()))
    if pooled >= len(shares):
        return 1.0  # one cell: nothing to compare
    starts = [0, *range(pooled, len(shares))]
    seen, wanted = (np.add.reduceat(each[order], starts) for each in (counts, expected))
    return float(chisquare(seen, wanted).pvalue)


def law_tests(
    model: OpenedModel,
    texts: Sequence[tuple[Tensor, list[int]]],
    source: SkipConfig | Source,
    *,
    temperature: float,
    seed: int,
) -> dict[str, LawTest]:
    """By acceptance rule, test tokens drawn from the laws at two positions of texts.

    Args:
        texts: prompts (1, T) and the tokens that follow them.
    """
    laws = []
    for ids, text in texts:
        for part in dict.fromkeys((max(1, len(text) // 3), max(1, 2 * len(text) // 3))):
            laws.append(_record(model, [*ids[0].tolist(), *text[:part]], source))
    tests = {}
    for rule in ("coupled", "rejection"):
        p_values = []
        for number, (target, draft) in enumerate(laws):
            law = softmax_law(target.double() / temperature)  # (V,)
            for tokens in draw_rounds(
                target,
                draft,
                acceptance=rule,
                temperature=temperature,
                draws=DRAWS,
                seed=seed + number,
            ):
                p_values.append(chi_square(tokens, law))
        tests[rule] = LawTest(DRAWS, tuple(p_values))
    return tests


def _record(
    model: OpenedModel, tokens: list[int], source: SkipConfig | Source
) -> tuple[Tensor, Tensor]:
    """Raw logits of target and draft after the tokens, on the CPU, (V,) each.

    For a large vocabulary, only those tokens that either law considers most probable.
    """
    ids = torch.tensor(tokens)
    passes = Passes(model, [source], [Seat(ids[:-1], 2, tokens[-1:])], max_draft_length=1)
    passes.prefill()
    last = ids[-1:].to(model.device)  # (1,)
    draft = passes.draft_step(last, 0)[0].float().cpu()  # (V,)
    # The logits after `last` are not used.
    target = passes.verify(last[None], [(0, 0), (0, 1)])[0].float().cpu()  # (V,)
    either = torch.maximum(softmax_law(target), softmax_law(draft))
    kept = either.topk(min(_SUPPORT, len(either))).indices
    return target[kept], draft[kept]
