"""Second-best tokens verified beside a chain: their ranks, which ones pay, and the text."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from marks import thorough
from models import Growing, lively_model, ragged, seated
from transformers import TemperatureLogitsWarper

from layerskip import SkipConfig, generate
from layerskip.costs.speculation import CostTable
from layerskip.decoding import live_target
from layerskip.decoding.controllers import Offer, make_controller
from layerskip.decoding.draws import Draws
from layerskip.decoding.laws import Law
from layerskip.native import extension
from layerskip.research.trees import LaterAcceptance, TreeGain, TreePosition, grown

FLAT = CostTable(0.2, (1.0,) * 20)
STEEP = CostTable(0.2, tuple(1.0 + 0.9 * n for n in range(20)))
SKIPS = {
    "no prefix": SkipConfig.low_precision(4),
    "a window": replace(SkipConfig.low_precision(8), window=5),
    "a prefix": SkipConfig(attention=(3,), mlp=(3,)),
    "an exit": SkipConfig.early_exit(4),
}


def decoded(skip, controller=None, **more):
    ids, mask = ragged((9, 4, 13)[: more.pop("rows", 3)])
    how = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 0,
        "seed": 3,
        "max_new_tokens": 30,
        "lookup": False,
    }
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
def test_texts_are_the_targets(family, skip):
    """Rows end their chains at different steps; behind a shared prefix some stay chains."""
    trees = 0
    for execution, sample, rows in (("modules", False, 1), ("fused", True, 3)):
        how = {"family": family, "execution": execution, "do_sample": sample}
        controller = Growing(rows)
        out = decoded(SKIPS[skip], controller, rows=rows, **how)
        assert out.sequences.tolist() == decoded(None, rows=rows, **how).sequences.tolist()
        trees += controller.widened
    assert trees >= 10


def test_a_node_judged_by_the_noise_of_its_number_is_seen(monkeypatch):
    """Negative control: the noise of a node is that of its depth, not of its number."""
    plain = decoded(None)
    monkeypatch.setattr(live_target, "depths", lambda parents: [*range(len(parents) + 1)])
    wrong = decoded(SKIPS["no prefix"], Growing(1))
    assert wrong.sequences.tolist() != plain.sequences.tolist()


@pytest.mark.thorough
def test_second_tokens_are_right_where_first_ones_are_not(monkeypatch):
    """Negative control: ranked with another position's noise, they are right half as often."""

    def share():
        controller = Growing(2)
        out = decoded(SKIPS["no prefix"], controller, max_new_tokens=100)
        assert torch.equal(out.sequences, plain.sequences)
        wrong, right = controller.seconds
        return right / wrong

    plain = decoded(None, max_new_tokens=100)
    draft, right = Draws.draft, share()

    def elsewhere(self, raw, positions, *how, best):
        own = draft(self, raw, positions, *how, best=best)
        later = [(row, offset + 1) for row, offset in positions]
        other = draft(self, raw, later, *how, best=2)
        assert other.others is not None
        both = torch.where(other.tokens == own.tokens, other.others[:, 0], other.tokens)
        return own._replace(others=both[:, None])

    monkeypatch.setattr(Draws, "draft", elsewhere)
    assert right > 0.4
    assert share() < right / 2


@pytest.mark.parametrize("sample", [*thorough(False), True])
def test_they_save_passes_and_are_left_out_where_tokens_are_dear(sample):
    how = {"do_sample": sample, "max_new_tokens": 80, "rows": 1}
    plain = decoded(None, **how)
    rounds = {}
    for branches in (False, True):
        for costs in (FLAT, STEEP):
            out = decoded(SKIPS["no prefix"], costs=costs, branches=branches, **how)
            assert torch.equal(out.sequences, plain.sequences)
            rounds[branches, costs] = out.stats
    assert rounds[True, FLAT].num_rounds < rounds[False, FLAT].num_rounds
    assert rounds[True, STEEP] == rounds[False, STEEP]


@pytest.mark.parametrize("sample", [False, True])
def test_native_draws_rank_the_best_tokens_as_torch_does(built, sample):
    law = Law([TemperatureLogitsWarper(0.7)] if sample else [], do_sample=sample, rows=1)
    raw = torch.randn(3, 3000, generator=torch.Generator().manual_seed(2))
    raw[1, 4:] = -torch.inf  # fewer tokens than requested
    found = []
    for native in (None, extension.extension().drawn):
        draws, (seat,) = Draws(law, native=native), seated([7], [4], [[5]], 4)
        found.append(draws.draft(raw, [(seat, at) for at in range(3)], "margin", best=8))
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert found[0].others is not None
    assert found[1].others is not None
    assert torch.equal(found[0].others, found[1].others)
    assert found[0].others[1].tolist().count(-1) == 4


@pytest.mark.parametrize("more", [{"repetition_penalty": 1.3}, {"acceptance": "rejection"}])
def test_laws_that_read_the_text_and_the_rejection_rule_get_chains(more):
    out = decoded(SKIPS["no prefix"], Growing(1), **more)
    for round_ in out.rounds:
        assert list(round_.drafted) == list(map(len, round_.confidences))


def places(everywhere=False):
    """A draft's tokens and chances at three consecutive places."""
    said = [
        TreePosition(0.5, (5, 6), (0.5, 0.38)),
        TreePosition(0.5, (7, 8), (0.8, 0.2)),
        TreePosition(0.5, (9, -1), (0.9, 0.1)),
    ]
    for place, after in pairwise(said):
        place.after.update(dict.fromkeys(place.tokens[: 2 if everywhere else 1], after))
    return said[0]


def nodes(found):
    return [(parent, token, pytest.approx(chance)) for chance, parent, token in found]


def test_the_best_tokens_of_a_tree():
    best = [(0, 5, 0.5), (1, 7, 0.4), (0, 6, 0.38), (2, 9, 0.36), (1, 8, 0.1)]
    assert nodes(grown(places(), 9)) == best
    assert nodes(grown(places(), 3)) == best[:3]
    chain = [(0, 5, 0.5), (1, 7, 0.4), (2, 9, 0.36), (0, 6, 0.38), (1, 8, 0.1)]
    assert nodes(grown(places(), 9, chain=3)) == chain
    everywhere = nodes(grown(places(everywhere=True), 9))
    assert (3, 7, 0.304) in everywhere
    assert len(everywhere) == 9
    ended = grown(places(everywhere=True), 9, ends=frozenset({6}))
    assert all(node.parent != 3 for node in ended)


def test_chances_of_later_tokens_are_learnt_by_confidence_and_rank():
    drawn, rates = random.Random(3), LaterAcceptance()
    for _ in range(3000):
        each, chance = drawn.choice((0, 4)), drawn.random()
        first, third = (0.8, 0.9) if each else (0.3, 0.5)
        rates.observe(each, 1 if chance < first else 3 if chance < third else None)
    assert rates.given_wrong(0, 3) == pytest.approx([0.3, 0.0, 0.2], abs=0.04)
    assert rates.given_wrong(4, 3) == pytest.approx([0.8, 0.0, 0.1], abs=0.04)
    assert rates.given_wrong(8, 3) == pytest.approx([0.55, 0.0, 0.15], abs=0.04)


def test_as_many_tokens_are_verified_as_pay():
    """A node is added if its chances in all rows exceed its cost for all rows."""

    def width(price, chances, rows=1):
        table = CostTable(0.1, tuple(1.0 + price * n for n in range(20)))
        controller = TreeGain(table)
        controller.reset(rows)
        controller.begin(100, rows)
        assert controller.choose([Offer(dict.fromkeys(range(rows), 3), None)]) == 0
        for row in range(rows):
            controller.limit(row, 3)
        assert controller.draft_together(range(rows))
        more = {0: (1, [0.9, *chances])} | {row: (1, [0.9]) for row in range(1, rows)}
        return controller.widen(more)

    assert width(0.0, [0.5, 0.3, 0.02]) == 4
    assert width(0.1, [0.5, 0.3, 0.02]) == 3
    assert width(0.2, [0.5, 0.2, 0.02]) == 2
    assert width(0.3, [0.2]) == 1
    assert width(0.2, [0.5, 0.45], rows=3) == 1  # the other rows would wait


def test_other_controllers_say_that_branches_have_no_effect():
    with pytest.warns(UserWarning, match="branches has no effect on the controller 'fixed'"):
        make_controller("fixed", costs=FLAT, branches=True)
