"""Tests of the emitted law: the engine's own rounds on recorded logits, without the model.

A model and a source that reply with recorded logits of one position draw many rounds of one draft
token; a chi-square test compares them with the target's law. B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper

from layerskip.config import SkipConfig
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law, softmax_law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.passes import Passes
from layerskip.decoding.sources.base import Batch, Source, State
from layerskip.model.cache import RowCache
from layerskip.model.norms import TableRotary
from layerskip.model.sublayers import Pass, Sublayers

DRAWS = 2048  # of each position and rule
_SUPPORT = 256  # tokens of a recorded law that are drawn from, the most probable ones


@dataclass(frozen=True)
class LawTest:
    """Chi-square tests of emitted tokens against the target's law."""

    draws: int
    """Rounds drawn at each recorded position."""
    p_values: tuple[float, ...]
    """Two for each position, of a round's first token and of its bonus token."""

    def passed(self, level: float) -> bool:
        return min(self.p_values) * len(self.p_values) >= level


class Recorded:
    """Stands for a model whose raw logits (V,) are given, in all that a `Passes` asks of one."""

    num_sublayers = first_reader = 1
    execution = "modules"
    drawn = None
    branches = recurrent = False

    def __init__(self, target: Tensor) -> None:
        self.target, self.device = target, target.device
        self.vocabulary = len(target)

    def disturbed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_lengths(self, prompt_lengths: Sequence[int], total: int) -> None:
        pass

    def new_cache(self, rows: int, slots: int) -> RowCache:
        return RowCache(rows, slots, ())

    def rotary(self, slots: int, total: int) -> TableRotary:
        return TableRotary({})

    def feed(self, tokens: Tensor, cache: Any, rotary: Any, *_: Any) -> tuple[Tensor, Pass]:
        model: Any = self
        return tokens[..., None], Pass(model, cache, rotary)  # (B, T, 1)

    def run(self, hidden: Tensor, step: Any, sublayers: Sequence[int]) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor, step: Any = None) -> Tensor:
        return self.target.expand(*hidden.shape[:2], -1)  # (B, T, V)

    def finish(self, hidden: Tensor, step: Any, sublayers: Sequence[int]) -> Tensor:
        return self.logits(hidden)


class RecordedDraft(Source):
    """A source whose law is given by raw logits, (V,)."""

    key = "recorded"

    def __init__(self, draft: Tensor) -> None:
        self.draft = draft

    def step_bytes(self) -> Sequence[float]:
        return (1.0,)

    def open(self, batch: Batch) -> State:
        return _RecordedState(batch, self.draft)


class _RecordedState(State):
    def __init__(self, batch: Batch, draft: Tensor) -> None:
        super().__init__(batch)
        self.draft = draft

    def step(self, tokens: Tensor, hidden: Tensor, step: Any, offset: int) -> Tensor:
        return self.draft.expand(len(tokens), -1)  # (R, V)


def draw_rounds(
    target: Tensor,
    draft: Tensor,
    *,
    rejection: bool,
    temperature: float = 1.0,
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[list[int], list[int]]:
    """Rounds of one draft token each on given laws, by the engine's own loop.

    Args:
        target, draft: raw logits at one position, (V,).
        rejection: the rejection rule instead of coupled draws.

    Returns:
        The first emitted token of every round, and the bonus tokens of those that had one: both
        follow the target's law.
    """
    law = Law([TemperatureLogitsWarper(temperature)], do_sample=True, rows=draws)
    request = Request(
        input_ids=torch.zeros(draws, 1, dtype=torch.long),
        attention_mask=torch.ones(draws, 1, dtype=torch.long),
        max_new_tokens=3,  # the prefill's token, then a round of up to two
        law=law,
        keys=[stream_key(seed, row) for row in range(draws)],
        rejection=rejection,
    )
    recorded: Any = Recorded(target)
    decoder = Decoder(recorded, RecordedDraft(draft), Fixed(1), request, max_draft_length=1)
    rounds = decoder.rounds()
    next(rounds)
    emitted = next(rounds).tokens
    return [tokens[0] for tokens in emitted], [tokens[1] for tokens in emitted if len(tokens) > 1]


def chi_square(tokens: Sequence[int], law: Tensor) -> float:
    """p-value of tokens drawn from a law (V,); cells that expect fewer than 5 are pooled."""
    law = law.cpu().double()  # (V,); not every device has float64
    drawn = torch.tensor(tokens, dtype=torch.long)
    counts = torch.bincount(drawn, minlength=len(law)).double()  # (V,)
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    expected = law * len(tokens)  # (V,)
    order = expected.argsort()
    pooled = int((expected[order].cumsum(0) < 5).sum()) + 1  # the smallest, until they expect 5
    pooled = max(pooled, int((expected < 5).sum()))
    if pooled >= len(law):
        return 1.0  # one cell: nothing to compare

    def cells(values: Tensor) -> Tensor:
        return torch.cat([values[order[:pooled]].sum()[None], values[order[pooled:]]])

    seen, wanted = cells(counts), cells(expected)
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def law_tests(
    model: Sublayers,
    texts: Sequence[tuple[Tensor, list[int]]],
    source: SkipConfig | Source,
    *,
    temperature: float,
    seed: int,
) -> dict[str, LawTest]:
    """By accept rule, tokens drawn from the laws at two positions of texts.

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
                rejection=rule == "rejection",
                temperature=temperature,
                draws=DRAWS,
                seed=seed + number,
            ):
                p_values.append(chi_square(tokens, law))
        tests[rule] = LawTest(DRAWS, tuple(p_values))
    return tests


def _record(
    model: Sublayers, tokens: list[int], source: SkipConfig | Source
) -> tuple[Tensor, Tensor]:
    """Raw logits of target and draft after the tokens, on the CPU, (V,) each.

    Of a large vocabulary the tokens that either law finds most probable.
    """
    ids = torch.tensor(tokens)
    prompt, emitted = [ids[:-1]], [tokens[-1:]]
    passes = Passes(model, [source], prompt, max_new_tokens=2, max_draft_length=1, emitted=emitted)
    passes.prefill()
    last = ids[-1:].to(model.device)  # (1,)
    draft = passes.draft_step(last, 0)[0].float().cpu()  # (V,)
    # what follows `last` is not read
    target = passes.verify(last[None], [(0, 0), (0, 1)])[0].float().cpu()  # (V,)
    either = torch.maximum(softmax_law(target), softmax_law(draft))
    kept = either.topk(min(_SUPPORT, len(either))).indices
    return target[kept], draft[kept]
