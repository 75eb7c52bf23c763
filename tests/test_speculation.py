"""Closed formulas against the published tables."""

import json

import pytest

from layerskip.costs import speculation
from layerskip.costs.cost_model import Rates, Traffic
from layerskip.costs.speculation import ContextCosts, CostTable, expected_tokens, remaining, speedup

LEVIATHAN = {  # tables 1 and 4; c: alpha (rounded in table 4), draft length, expected speedup
    0.0: [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 10, 6.86)],
    0.02: [(0.75, 7, 3.2), (0.62, 7, 2.3), (0.65, 5, 2.4), (0.53, 5, 1.9)],
    0.04: [(0.80, 7, 3.3), (0.68, 5, 2.4), (0.73, 5, 2.6), (0.55, 3, 1.8)],
    0.11: [(0.82, 7, 2.5), (0.71, 3, 2.0), (0.74, 3, 2.0), (0.56, 3, 1.6)],
}
OPTIMA = {  # c: (optimal draft length, speedup) at the alphas below
    0.05: [(3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67), (21, 6.60)],
    0.1: [(2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43), (15, 4.48)],
    0.25: [(1, 1.20), (2, 1.31), (2, 1.46), (3, 1.69), (6, 2.09), (9, 2.47)],
    0.5: [(0, 1.00), (1, 1.07), (1, 1.13), (2, 1.22), (3, 1.38), (5, 1.51)],
    0.7: [(0, 1.00), (0, 1.00), (0, 1.00), (1, 1.06), (2, 1.13), (3, 1.20)],
}
OPTIMA_ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@pytest.mark.parametrize("cost", LEVIATHAN)
def test_speedups_of_the_tables_of_leviathan(cost):
    for alpha, length, expected in LEVIATHAN[cost]:
        assert speedup(alpha, length, cost) == pytest.approx(expected, abs=0.07 if cost else 0.005)


@pytest.mark.parametrize("cost", OPTIMA)
def test_integer_optimal_draft_length(cost):
    costs = CostTable(cost, (1.0,))
    for alpha, (length, value) in zip(OPTIMA_ALPHAS, OPTIMA[cost], strict=True):
        assert speculation.optimal_draft_length(alpha, costs) == length
        assert speedup(alpha, length, cost) == pytest.approx(value, abs=0.006)
        one_more = 0
        while alpha ** (one_more + 1) / cost > speedup(alpha, one_more, cost):
            one_more += 1
        assert one_more == length


def test_no_alpha_and_length_exceed_the_bound():
    for cost in (0.05, 0.3, 0.9):
        bound = speculation.speedup_bound(cost)
        assert bound == pytest.approx(1 / cost)
        assert max(speedup(1.0, length, cost) for length in (1, 10, 1000)) < bound


def test_expected_tokens_matches_the_quotient_and_its_limits():
    for alpha in (0.0, 0.3, 0.999):
        for length in (0, 1, 7):
            quotient = (1 - alpha ** (length + 1)) / (1 - alpha)
            assert expected_tokens(alpha, length) == pytest.approx(quotient, rel=1e-12)
    assert expected_tokens(1.0, 7) == 8.0


@pytest.mark.parametrize(
    ("asked", "tokens_left", "free_slots", "limit"),
    [(5, 100, 100, 5), (5, 4, 100, 3), (5, 100, 3, 2), (5, 1, 100, 0), (5, 0, 0, 0), (0, 9, 9, 0)],
)
def test_draft_limit(asked, tokens_left, free_slots, limit):
    assert speculation.draft_limit(asked, tokens_left, free_slots) == limit


def test_cost_table_reads_and_extrapolates():
    costs = CostTable(0.25, (1.0, 1.2, 1.25))
    assert [costs.verify_cost(n) for n in (1, 2, 3)] == [1.0, 1.2, 1.25]
    assert costs.verify_cost(5) == pytest.approx(1.35)
    assert costs.round_cost(0) == 1.0
    assert costs.round_cost(1) == pytest.approx(0.25 + 1.2)
    assert costs.round_cost(4) == pytest.approx(4 * 0.25 + 1.35)
    assert costs.round_cost(4, 2) == pytest.approx(2 * 0.25 + 1.35)
    assert CostTable(0.25, (1.0,)).verify_cost(9) == 1.0
    assert CostTable(0.25, (1.0, 1.3, 1.2)).verify_cost(9) == 1.2
    for each in (costs, CostTable(0.0, (1.0,))):  # drafts that are looked up cost nothing
        assert CostTable.from_dict(json.loads(json.dumps(each.to_dict()))) == each


def test_analytic_costs_are_shares_of_the_weights():
    # Llama-3.2-1B: 16 layers of 60.8M, attention 17.2% of a layer, head 21.3% of the total
    attention, mlp = 60.8 * 0.172, 60.8 * 0.828
    sublayers = [attention, mlp] * 16
    head = 16 * 60.8 * 0.213 / (1 - 0.213)
    whole = sum(sublayers) + head
    costs = Rates().table(Traffic((whole,), {}, sum(sublayers[:8]) + head), None, 0, 1)
    assert costs.draft == pytest.approx(0.409, abs=0.002)
    assert costs.verify_cost(8) == 1.0
    assert costs.source == "analytic"
    without_half_the_mlps = [sublayers[i] for i in range(32) if i % 4 != 1]
    scattered = Rates().table(Traffic((whole,), {}, sum(without_half_the_mlps) + head), None, 0, 1)
    assert speculation.speedup_bound(scattered.draft) == pytest.approx(1.48, abs=0.01)


def test_the_nearest_rising_values():
    for values, nearest in (
        ([1, 2, 3], [1, 2, 3]),
        ([3, 2, 1], [2, 2, 2]),
        ([1, 5, 3, 4, 9], [1, 4, 4, 4, 9]),
        ([1, 4, 4, 1, 3], [1, 3, 3, 3, 3]),
    ):
        assert speculation.isotonic(values) == pytest.approx(nearest)


def test_similar_contexts_share_a_table():
    made = []

    def table(context, rows):
        made.append((context, rows))
        return CostTable(0.1, (1.0, 1.0 + context / 1000))

    costs = ContextCosts(table)
    for context in range(9000):
        found = costs.at(context, 2)
        assert found is costs.at(context, 2)
        assert abs(found.verify[1] - 1 - context / 1000) <= max(0.033, context / 15000)
    assert len(made) < 80
    assert {rows for _, rows in made} == {2}
    assert costs.at(10) != costs.at(100)
    alone = CostTable(0.1, (1.0,))
    assert alone.at(9999, 8) is alone


def test_finished_rows_leave_when_the_others_fit_into_half_a_pass():
    assert [remaining(8, going) for going in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
    assert [remaining(6, going) for going in range(1, 7)] == [1, 2, 6, 6, 6, 6]
