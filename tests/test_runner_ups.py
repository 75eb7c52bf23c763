"""Second-best tokens verified beside a chain: how they are ranked, which ones pay, and the text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import Growing, lively_model, ragged
from torch import Tensor

from layerskip import SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding import engine
from layerskip.decoding.acceptance import SecondAcceptance
from layerskip.decoding.controller import Grower
from layerskip.decoding.draws import Drawn, Draws
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.passes import Position
from layerskip.decoding.planning import Node, beside
from layerskip.generation import generate

FLAT = CostTable(0.2, (1.0,) * 20)
STEEP = CostTable(0.2, tuple(1.0 + 0.9 * n for n in range(20)))
SKIPS = {
    "no prefix": SkipConfig.low_precision(4),
    "a prefix": SkipConfig.layers((3,)),
    "an exit": SkipConfig.early_exit(4),
}


def decoded(skip: SkipConfig | None, controller: Any = None, **more: Any) -> Any:
    ids, mask = ragged((9, 4, 13)[: more.pop("rows", 3)])
    how = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3, "max_new_tokens": 30}
    return generate(
        lively_model(more.pop("family", "llama")),
        ids,
        attention_mask=mask,
        skip=skip,
        enabled=skip is not None,
        controller=controller,
        max_draft_length=8,
        eos_token_id=None,
        **how | more,
    )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("skip", SKIPS)
def test_texts_are_the_targets(family: str, skip: str) -> None:
    """Rows end their chains apart; behind a shared prefix some of them stay chains."""
    grown = 0
    for execution, sample, rows in (("modules", False, 1), ("fused", True, 3)):
        how: dict[str, Any] = {"family": family, "execution": execution, "do_sample": sample}
        out = decoded(SKIPS[skip], Growing(rows), rows=rows, **how)
        assert out.sequences.tolist() == decoded(None, rows=rows, **how).sequences.tolist()
        grown += out.stats.num_draft_tokens - sum(
            len(each) for round_ in out.rounds for each in round_.confidences
        )
    assert grown > 15


def test_a_node_judged_by_the_noise_of_its_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: its noise is that of its depth."""
    plain = decoded(None)
    monkeypatch.setattr(engine, "depths", lambda parents: [*range(len(parents) + 1)])
    wrong = decoded(SKIPS["no prefix"], Growing(1))
    assert wrong.sequences.tolist() != plain.sequences.tolist()


def test_second_tokens_are_right_where_first_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: ranked by another place's noise they seldom are; the text stays."""

    def share() -> float:
        controller = Growing(2)
        out = decoded(SKIPS["no prefix"], controller, max_new_tokens=100)
        assert torch.equal(out.sequences, plain.sequences)
        wrong, right = controller.seconds
        return right / wrong

    plain = decoded(None, max_new_tokens=100)
    draft, right = Draws.draft, share()

    def elsewhere(
        self: Draws, raw: Tensor, positions: Sequence[Position], *how: Any, seconds: bool
    ) -> Drawn:
        own = draft(self, raw, positions, *how, seconds=seconds)
        later = [(row, offset + 1) for row, offset in positions]
        other = draft(self, raw, later, *how, seconds=True)
        assert other.seconds is not None
        both = torch.where(other.tokens == own.tokens, other.seconds, other.tokens)
        return own._replace(seconds=both)

    monkeypatch.setattr(Draws, "draft", elsewhere)
    assert right > 0.4
    assert share() < right / 2


@pytest.mark.parametrize("sample", [False, True])
def test_they_save_passes_and_are_left_out_where_tokens_are_dear(sample: bool) -> None:
    how: dict[str, Any] = {"do_sample": sample, "max_new_tokens": 80, "rows": 1}
    plain = decoded(None, **how)
    rounds: dict[tuple[bool, CostTable], Any] = {}
    for branches in (False, True):
        for costs in (FLAT, STEEP):
            out = decoded(SKIPS["no prefix"], costs=costs, branches=branches, **how)
            assert torch.equal(out.sequences, plain.sequences)
            rounds[branches, costs] = out.stats
    assert rounds[True, FLAT].num_rounds < rounds[False, FLAT].num_rounds
    assert rounds[True, STEEP] == rounds[False, STEEP]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_texts_are_the_targets(dtype: torch.dtype) -> None:
    model = lively_model("llama", dtype=dtype)
    ids, mask = ragged((9, 4, 13))
    for law in ({"do_sample": False}, {"do_sample": True, "seed": 3, "top_k": 20}):
        how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, **law}
        plain = generate(model, ids, enabled=False, **how)
        for skip in SKIPS.values():
            controller = Growing(1)
            out = generate(model, ids, skip=skip, controller=controller, max_draft_length=8, **how)
            assert out.sequences.tolist() == plain.sequences.tolist()
            assert controller.seconds[1]


@pytest.mark.parametrize("more", [{"repetition_penalty": 1.3}, {"acceptance": "rejection"}])
def test_laws_that_read_the_text_and_the_rejection_rule_get_chains(more: dict[str, Any]) -> None:
    out = decoded(SKIPS["no prefix"], Growing(1), **more)
    for round_ in out.rounds:
        assert list(round_.drafted) == list(map(len, round_.confidences))


def test_the_best_tokens_beside_a_chain() -> None:
    places = [[(5, 0.5), (6, 0.4)], [(7, 0.8), (8, 0.2)], [(9, 0.9), (-1, 0.1)]]
    assert beside(places, 9) == [Node(0.4, 0, 6), Node(0.5 * 0.2, 1, 8)]
    assert beside(places, 1) == [Node(0.4, 0, 6)]
    everywhere = beside(places, 9, everywhere=True)
    by_path = {(node.parent, node.token): node.chance for node in everywhere}
    # the other token is node 4, and what follows it at the second place node 5, and so on
    assert list(by_path)[:3] == [(0, 6), (4, 7), (5, 9)]
    assert by_path[5, 9] == pytest.approx(0.4 * 0.8 * 0.9)
    assert [node.chance for node in everywhere] == sorted(by_path.values(), reverse=True)
    ended = beside(places, 9, everywhere=True, ends=frozenset({6}))
    assert all(node.parent != 4 for node in ended)


def test_chances_of_second_tokens_are_learnt_by_confidence() -> None:
    drawn, rates = random.Random(3), SecondAcceptance()
    for _ in range(3000):
        each = drawn.choice((0, 4))
        rates.observe(each, drawn.random() < (0.8 if each else 0.3))
    assert rates.given_wrong(0) == pytest.approx(0.3, abs=0.04)
    assert rates.given_wrong(4) == pytest.approx(0.8, abs=0.04)
    assert rates.given_wrong(8) == pytest.approx(0.55, abs=0.04)


def test_as_many_tokens_are_verified_as_pay() -> None:
    """One more where its chance, of all rows, exceeds what it costs all of them."""

    def width(price: float, chances: Sequence[float], rows: int = 1) -> int:
        table = CostTable(0.1, tuple(1.0 + price * n for n in range(20)))
        controller: Grower = ExpectedGain(table, branches=True)
        assert isinstance(controller, ExpectedGain)
        controller.reset(rows)
        controller.begin(100, rows)
        for row in range(rows):
            controller.limit(row, 3)
        assert controller.draft_together(range(rows))
        more = {0: (1, chances)} | {row: (1, [0.0]) for row in range(1, rows)}
        return controller.widen(more)

    assert width(0.0, [0.5, 0.3, 0.02]) == 4
    assert width(0.1, [0.5, 0.3, 0.02]) == 3
    assert width(0.2, [0.5, 0.2, 0.02]) == 2
    assert width(0.3, [0.2]) == 1
    assert width(0.2, [0.5, 0.45], rows=3) == 1  # the others wait
