"""Several drafts for one place: what each rule emits follows the target's law, wrong rules' not.

Seeds are fixed, so that every test is repeatable; the level says how rarely a right rule would fail
with another seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from layerskip.bench.lawtest import chi_square
from layerskip.decoding.rules import acceptance_probability, residual
from layerskip.research import several_drafts
from layerskip.research.several_drafts import AcceptTests, k_seq, k_seq_chance, without_replacement

LEVEL = 1e-6  # of every statistical test here
PLACES, COUNT = 20_000, 3
# the draft cannot draw one token, the target another
P = torch.tensor([0.34, 0.05, 0.21, 0.0, 0.1, 0.3])
Q = torch.tensor([0.1, 0.4, 0.25, 0.15, 0.1, 0.0])
LAWS = [
    (P, Q),
    (P, P),
    (torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.3, 0.7])),  # nothing in common
    (torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.0, 1.0, 0.0])),  # fewer tokens than drafts
]

Rule = Callable[[Tensor, Tensor, Tensor], AcceptTests]


def gumbel(shape: Any, seed: int) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return -(-uniform.log()).log()


def drawn(law: Tensor, count: int, *, again: bool, seed: int = 0) -> Tensor:
    """So many tokens of a law (V,) at many places, (N, K), with or without replacement."""
    if again:
        return (law.log() + gumbel((PLACES, count, len(law)), seed)).argmax(-1)
    return (law.log() + gumbel((PLACES, len(law)), seed)).topk(count).indices


def emitted(rule: Rule, p: Tensor, q: Tensor, drafts: Tensor) -> tuple[list[int], Tensor]:
    """The tokens of many places, and which drafts pass, (N, K)."""
    tests = rule(p.expand(PLACES, -1), q.expand(PLACES, -1), drafts)
    uniform = torch.rand(drafts.shape, generator=torch.Generator().manual_seed(7))
    passes = uniform < tests.chances  # (N, K)
    correction = (tests.correction.log() + gumbel(tests.correction.shape, 8)).argmax(-1)  # (N,)
    first = drafts.gather(1, passes.int().argmax(1, keepdim=True))[:, 0]  # (N,)
    return torch.where(passes.any(1), first, correction).tolist(), passes


RULES: dict[str, tuple[Rule, bool]] = {
    "k-seq": (k_seq, True),
    "without replacement": (without_replacement, False),
    "repeated drafts passed over": (without_replacement, True),
}


@pytest.mark.parametrize(("p", "q"), LAWS)
@pytest.mark.parametrize("name", RULES)
def test_what_is_emitted_follows_the_targets_law(name: str, p: Tensor, q: Tensor) -> None:
    rule, again = RULES[name]
    for count in (1, COUNT):
        drafts = drawn(q, count, again=again)
        tokens, passes = emitted(rule, p, q, drafts)
        assert chi_square(tokens, p) > LEVEL
        tests = rule(p.expand(PLACES, -1), q.expand(PLACES, -1), drafts)
        for some, chance in zip(passes.cumsum(1).T > 0, tests.passed.T, strict=True):  # (N,) each
            error = 5 * math.sqrt(0.25 / PLACES)
            assert float(some.double().mean()) == pytest.approx(float(chance.mean()), abs=error)


def not_renormalised(p: Tensor, q: Tensor) -> Tensor:
    """A known mistake: (p - q)+ as it is, which is no law."""
    return (p - q).clamp_min(0)


def put_back(p: Tensor, q: Tensor, drafts: Tensor) -> AcceptTests:
    """A known mistake: drafts drawn without replacement are tested as if with it."""
    chances = []
    for token in drafts.split(1, -1):
        chances.append((p.gather(-1, token) / q.gather(-1, token)).clamp(max=1))
        p = residual(p, q)
    return AcceptTests(torch.cat(chances, -1), p)


# a rule, whether drafts are drawn with replacement, and what stands in for a part of the rule
MISTAKES: dict[str, tuple[Rule, bool, dict[str, Any]]] = {
    "residual not renormalised": (without_replacement, False, {"residual": not_renormalised}),
    "a repeated draft passes": (without_replacement, True, {"_share": acceptance_probability}),
    "tested as with replacement": (put_back, False, {}),
    "division of one draft": (k_seq, True, {"_division": lambda p, q, k: torch.ones(len(p), 1)}),
    "correction of one draft": (k_seq, True, {"_any": lambda one, count: one}),
    "k-seq without replacement": (k_seq, False, {}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_known_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, again, parts = MISTAKES[mistake]
    for name, part in parts.items():
        monkeypatch.setattr(several_drafts, name, part)
    tokens, _ = emitted(rule, P, Q, drawn(Q, COUNT, again=again))
    assert chi_square(tokens, P) < LEVEL


def test_one_draft_is_the_rejection_rule() -> None:
    """Whatever the rule: accepted is one less total variation."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 7, 50, generator=generator).softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(k_seq_chance(p, q, 1), overlap)
    drafts = q.argmax(-1, keepdim=True)
    for rule in (k_seq, without_replacement):
        torch.testing.assert_close(
            rule(p, q, drafts).chances, (p / q).clamp(max=1).gather(-1, drafts)
        )


def test_more_drafts_accept_more_and_spectr_keeps_its_promise() -> None:
    """No rule can accept more than sum of min(p, 1 - (1 - q)^K); K-SEQ has 1 - 1/e of that."""
    generator = torch.Generator().manual_seed(1)
    target, noise = torch.randn(2, 64, 30, generator=generator)
    p, q = (2 * target).softmax(-1), (2 * target + noise).softmax(-1)
    chances = torch.stack([k_seq_chance(p, q, count) for count in range(1, 9)])  # (8, N)
    assert (chances[1:] > chances[:-1]).all()
    for count, chance in enumerate(chances, 1):
        most = torch.minimum(p, 1 - (1 - q) ** count).sum(-1)
        assert (chance <= most + 1e-6).all()
        assert (chance >= (1 - 1 / math.e) * most).all()
