"""Costs that correct themselves by a simulated clock. No test depends on real time."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from models import lively_model

import layerskip
from layerskip.config.skips import SkipConfig
from layerskip.costs.correction import CorrectedCosts, Corrections
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import Offer
from layerskip.decoding.expected_gain import ExpectedGain

STEP = 0.012  # seconds
TRUE = CostTable(
    0.25,
    (1, 1.03, 1.06, 1.1, 1.15, 1.2, 1.25, 1.3, 2.6, 2.7, 2.8, 2.9, 3.0, 3.1, 3.2, 3.3),
    "measured",
    STEP,
)


def corrected(tables):
    """The costs of a model's sources, corrected by rounds."""
    corrections = Corrections()
    return [CorrectedCosts(table, corrections, number) for number, table in enumerate(tables)]


def believed(verify=1.0, draft=1.0, of=TRUE):
    """Wrong costs: those of draft steps and of passes over 9 tokens or more are multiplied."""
    long = [verify * each for each in of.verify[8:]]
    return replace(of, draft=draft * of.draft, verify=(*of.verify[:8], *long))


FLAT = believed(0.55)  # long passes are cheap


def play(table, true, *, copies, model, heals=True, seed=0):
    """300 rounds of a text, drafted by lookups and a model; draws and times are independent.

    Returns the tokens per target step in the last two thirds, and for every round the believed
    costs of a draft step and of a pass over 12 tokens.
    """
    draws, now = random.Random(seed), [0.0]
    lookups, own = corrected([replace(table, draft=0.0), table])
    clock = (lambda: now[0]) if heals else None
    controller = ExpectedGain([lookups, own], 20, priors=[0.75, 0.93], now=clock)
    controller.reset(1)

    def takes(steps):
        now[0] += steps * STEP * (1.0 + 0.05 * abs(draws.gauss(0.0, 1.0)))
        return steps

    rounds, prices = [], []
    for _ in range(300):
        right = [[draws.random() < each for _ in range(20)] for each in (copies, model)]
        controller.begin(200, 1)
        prices.append((own.at(200).draft, lookups.at(200).verify_cost(12)))
        source = controller.choose([Offer({0: 20}, {0: 8}), Offer({0: 20}, None)])
        limit = controller.limit(0, 0 if source is None else 20)
        drafted, cost = (limit if source == 0 else 0), 0.0
        while source == 1 and drafted < limit and controller.draft_together([0]):
            cost += takes(true.draft)
            drafted += 1
            if drafted < limit:
                controller.keep_drafting(0, 0.9 if right[1][drafted - 1] else 0.6)
        cost += takes(true.verify_cost(drafted + 1))
        taken, copied = (
            len(list(itertools.takewhile(bool, each)))
            for each in (right[source or 0][:drafted], right[0])
        )
        controller.learn(0, 0, min(copied + 1, 20), copied)
        controller.update(0, drafted, taken)
        rounds.append((taken + 1, cost))
    tokens, costs = map(sum, zip(*rounds[100:], strict=True))
    return tokens / costs, prices


def healed_after(prices, which, true):
    """The round from which a price is right within a fifth, in all but one round in fifty."""
    off = [abs(each[which] / true - 1.0) > 0.2 for each in prices]
    return next((i for i in range(len(off)) if sum(off[i:]) <= len(off[i:]) / 50), len(off))


CASES = {
    "long passes half": (believed(verify=0.5), TRUE, 0.8, 0.6),
    "long passes twice": (believed(verify=2.0, of=FLAT), FLAT, 0.93, 0.9),
    "drafts half": (believed(draft=0.5), TRUE, 0.3, 0.7),
    "drafts twice": (believed(draft=2.0), TRUE, 0.3, 0.9),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_costs_heal_within_ten_rounds(case):
    wrong, true, copies, model = CASES[case]
    texts = [{"copies": copies, "model": model, "seed": seed} for seed in range(3)]
    played = [play(wrong, true, **text) for text in texts]
    which = case.startswith("long")
    price = (true.draft, true.verify_cost(12))[which]
    assert max(healed_after(prices, which, price) for _, prices in played) <= 10
    right = sum(play(true, true, **text)[0] for text in texts)
    assert sum(rate for rate, _ in played) > 0.95 * right


def test_without_a_clock_they_do_not():
    wrong, true, copies, model = CASES["long passes half"]
    text = {"copies": copies, "model": model, "heals": False}
    (rate, prices), (right, _) = (play(table, true, **text) for table in (wrong, true))
    assert set(prices) == {(wrong.draft, wrong.verify_cost(12))}
    assert rate < 0.7 * right


def rounds_of(costs, count, pace=1.0):
    lookups, own = costs
    for number in range(count):
        lookups.see(200, 1, 1, pace * STEP)
        lookups.see(200, 1, 9, pace * STEP * TRUE.verify_cost(9))
        own.see(200, 1, 0, pace * STEP * TRUE.draft)
        own.see(200, 1, 3 + number % 2, pace * STEP * TRUE.verify_cost(3 + number % 2))


def test_right_costs_stay_whatever_the_machine_does():
    """Other work slows some rounds, or all of them from one on; unseen costs stay as they are."""
    costs = lookups, own = corrected([replace(TRUE, draft=0.0), TRUE])
    rounds_of(costs, 12)
    for tokens in (1, 9, 9):
        lookups.see(200, 1, tokens, 5.0)  # seconds
    own.see(200, 1, 0, 5.0)
    assert (own.at(200), lookups.at(200)) == (TRUE, replace(TRUE, draft=0.0))
    for pace in (2.0, 0.5, 1.3):
        rounds_of(costs, 30, pace)
        for got, expected in ((own.at(200), TRUE), (lookups.at(200), replace(TRUE, draft=0.0))):
            assert got.draft == pytest.approx(expected.draft, rel=0.05)
            assert got.verify == pytest.approx(expected.verify, rel=0.05)
    assert own.at(200, 4) == TRUE


def test_costs_that_know_no_long_passes_heal():
    flat = CostTable(0.25, (1.0,), "analytic", STEP)
    lookups, _ = costs = corrected([replace(flat, draft=0.0), flat])
    for _ in range(8):
        lookups.see(200, 8, 1, 2 * STEP)
        lookups.see(200, 8, 12, 8 * STEP)
    assert lookups.at(200, 8).verify_cost(12) == pytest.approx(4.0)
    assert costs[1].at(200, 8).verify_cost(12) == 1.0


def test_forgotten_times_correct_nothing():
    lookups, _ = corrected([replace(TRUE, draft=0.0), TRUE])
    for _ in range(8):
        lookups.see(200, 1, 1, STEP)
        lookups.see(200, 1, 9, 3 * STEP * TRUE.verify_cost(9))
    assert lookups.at(200).verify_cost(9) == pytest.approx(3 * TRUE.verify_cost(9), rel=0.1)
    assert lookups.has_times(1, 9)
    for _ in range(600):
        lookups.see(200, 1, 1, STEP)
    assert not lookups.has_times(1, 9)
    assert lookups.at(200).verify_cost(9) == TRUE.verify_cost(9)


@pytest.mark.parametrize("do_sample", [False, True])
def test_no_text_depends_on_what_the_clock_says(do_sample, monkeypatch):
    model = lively_model("llama", dtype=torch.float64)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])  # (B, W)
    law = {"do_sample": do_sample, "max_new_tokens": 40, "seed": 3, "pad_token_id": 0}
    plain = layerskip.generate(model, ids, enabled=False, **law)
    found, lengths = [], set()
    for seed in range(3):
        draws, now = random.Random(seed), [0.0]

        def clock(draws=draws, now=now):
            now[0] += draws.choice([1e-6, 1e-3, 1.0])
            return now[0]

        costs = corrected([TRUE, TRUE])
        monkeypatch.setattr("layerskip.api.plan.cost_tables", lambda *_, c=costs, **__: c)
        monkeypatch.setattr("layerskip.api.plan.clock", clock)
        out = layerskip.generate(model, ids, skip=SkipConfig.early_exit(2), lookup=True, **law)
        found.append(out.sequences)
        lengths.add(tuple(round_.drafted for round_ in out.rounds))
        assert costs[0].corrections.version > 0
    assert all(torch.equal(each, plain.sequences) for each in found)
    assert len(lengths) > 1
