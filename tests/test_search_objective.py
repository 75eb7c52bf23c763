"""What a set is worth: against drafts counted one by one and prices added up by parts."""

import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from cost_records import MACHINES, cost_record, cost_table, prices_of
from models import lively_model, prompt
from transformers import TemperatureLogitsWarper

from layerskip.config.skips import SINK, DecodingOptions, SkipConfig
from layerskip.costs.cost_model import interpolated
from layerskip.costs.ratios import Totals
from layerskip.costs.speculation import best_length
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.laws import Law
from layerskip.decoding.sources.lookup import Lookup
from layerskip.replay.replayed_drafts import all_starts, replay
from layerskip.replay.simulation import simulate
from layerskip.replay.trace import take_trace
from layerskip.search import finalists
from layerskip.search.finalists import TOLERANCE, OptionsChoice, best_choice, choices
from layerskip.search.objective import PARTS, PIECES, SECONDS, Objective, extended
from layerskip.search.prices import LONGEST, Prices
from layerskip.search.space import Space
from layerskip.texts.vocabulary import ranked

SPACE = Space(kind="sublayer", num_layers=6, allow_ends=True)
CASES = {
    "greedy": ("llama", None, "coupled"),
    "coupled": ("gemma2", 0.7, "coupled"),
    "rejection": ("llama", 0.7, "rejection"),
}


@cache
def traced(case):
    family, temperature, acceptance = CASES[case]
    warpers = [] if temperature is None else [TemperatureLogitsWarper(temperature)]
    return take_trace(
        lively_model(family, dtype=torch.float32),
        [prompt(length, seed=length)[0] for length in (5, 8, 6)],
        max_new_tokens=24,
        law=Law(warpers, do_sample=temperature is not None, rows=1),
        acceptance=acceptance,
    )


def drawn(count, seed=0):
    """Random sets, small and large, and an early exit."""
    draw = random.Random(seed)
    sizes = [draw.choice([1, 1, 2, 3, 5, 6, 9]) for _ in range(count)]
    return [SPACE.exit_mask(4), *(sum(1 << i for i in draw.sample(range(12), n)) for n in sizes)]


@pytest.mark.parametrize("case", CASES)
def test_a_value_is_that_of_the_best_fixed_length(case):
    """By whole replays. Tokens after the second are assumed to be right as often as the second."""
    objective = Objective(traced(case), SPACE, MACHINES["reads weights"])
    assert sum(map(len, objective.parts)) == traced(case).starts
    for mask in drawn(4):
        whole = replay(traced(case), SPACE.skip_config(mask))
        found, survival = objective(mask), whole.survival
        assert found.acceptance == pytest.approx(survival[0])
        assert found.positions == traced(case).starts
        costs = objective.prices.table(mask)
        rate = of_the_second(whole, objective)
        expected, emitted = 0.0, 1.0
        for length in range(1, LONGEST + 1):
            emitted += survival[0] * rate ** (length - 1)
            price = length * costs.draft + costs.verify_cost(length + 1)
            expected = max(expected, emitted / price)
        assert found.value == pytest.approx(expected)
        assert objective(mask) is found  # nothing is followed twice


def of_the_second(whole, objective):
    """The share of right second tokens after right first ones, where trials follow both."""
    numbers = {
        (start[0].number, start[1]): number for number, start in enumerate(all_starts(whole.trace))
    }
    starts = [start for part in objective.parts[:SECONDS] for start in part]
    matches = whole.matches[[numbers[text.number, place] for text, place in starts]]
    behind = matches[matches[:, 0], 1]
    return float(behind.float().mean()) if len(behind) else 0.0


def test_the_parts_of_a_formula():
    costs = cost_table(MACHINES["free verification"], SkipConfig.early_exit(1))
    assert extended(0.8, 0.5) == pytest.approx([0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625])
    assert extended(0.0, 0.0) == [0.0] * LONGEST
    assert best_length([1.0, 1.0, 0.1], costs)[1] == 2
    assert best_length([0.0], costs) == (pytest.approx(1 / costs.round_cost(1)), 1)


def test_what_loses_is_followed_no_further():
    objective, told = Objective(traced("coupled"), SPACE, MACHINES["reads weights"]), []

    for mask, ends, parts in zip(drawn(2), (1, 2, 9), (1, 2, 5), strict=True):
        told.clear()
        found = objective(
            mask, lambda _, pieces, ends=ends: told.append(pieces) or len(told) == ends
        )
        assert found.positions == sum(map(len, objective.parts[:parts]))
        assert len(told) == min(parts, len(PARTS) - 1)
        numbers = [number for pieces in told for number in pieces]
        assert len(numbers) == len(set(numbers))
        assert all(part * PIECES <= number < (part + 1) * PIECES
                   for part, pieces in enumerate(told) for number in pieces)  # fmt: skip
    assert len(objective.parts[0]) <= 0.2 * traced("coupled").starts


def test_few_positions_are_from_all_texts():
    objective = Objective(traced("greedy"), SPACE, MACHINES["reads weights"], 30)
    starts = [start for part in objective.parts for start in part]
    assert len(starts) == 30
    assert len({(text.number, place) for text, place in starts}) == 30
    assert {text.number for text, _ in starts} == {0, 1, 2}


@pytest.mark.parametrize("machine", MACHINES)
def test_skipping_nothing_is_worth_plain_decoding(machine):
    found = Objective(traced("greedy"), SPACE, MACHINES[machine])(0)
    assert (found.value, found.acceptance, found.positions) == (1.0, 1.0, 0)


LOW = {"low_bits": 8, "low_attention": [3e-4] * 6, "low_mlp": [2e-4] * 6, "low_head": 1.5e-4}
RECORDS = {
    **MACHINES,
    "repeats": cost_record(keys=5e-5) | {"repeated": [[0.1, 0.6], [0.5, 0.9], [1.0, 1.0]]},
    "windows": cost_record(keys=3e-5) | {"windows": [16, None, 8, None, None, 64]},
}


def part_by_part(record, skip, size, context):
    """Seconds of a plain step, of a draft step, and of passes over 1, 2, ... tokens."""

    def pairs(first, second):
        return [seconds for pair in zip(first, second, strict=True) for seconds in pair]

    def keys(window):
        most = math.inf if window is None else window + SINK
        seen = [min(context, most, own or math.inf) for own in record["windows"]]
        return pairs([k * n for k, n in zip(record["keys"], seen, strict=True)], [0.0] * 6)

    exact, low = (pairs(record[f"{a}attention"], record[f"{a}mlp"]) for a in ("", "low_"))
    shares = pairs([1.0] * 6, record["experts"].get(str(skip.experts), [1.0] * 6))
    rounded, prefix, read = skip.rounded(), skip.shared_prefix(), keys(None)
    kept = [shares[i] * (low if i in rounded else exact)[i] for i in skip.kept()]
    head = record["low_head" if skip.low and skip.low.head else "head"] * (size or 97) / 97
    again = interpolated(
        dict(record["repeated"]), (sum(kept) + head) / (sum(exact) + record["head"])
    )
    narrow = keys(skip.window)
    draft = again * (sum(kept) + head) + sum(narrow[i] for i in skip.kept()) + record["rest"]
    passes = []
    for tokens in range(1, LONGEST + 2):
        more, more_keys = (interpolated(dict(record[f"{a}growth"]), tokens) for a in ("", "key_"))
        fresh = sum(exact[prefix:]) + record["head"] + record["rest"]
        carried = sum(exact[:prefix]) + sum(read[:prefix])
        passes.append(carried + more * fresh + more_keys * sum(read[prefix:]))
    return sum(exact) + sum(read) + record["head"] + record["rest"], draft, passes


@pytest.mark.parametrize("name", RECORDS)
def test_sets_are_priced_by_the_parts_that_they_run(name):
    """With low precision, experts, windows and draft vocabularies."""
    record = RECORDS[name] | LOW | {"vocabulary": 97}
    record |= {"experts": {"1": [0.6, 0.5, 0.4, 0.6, 0.5, 0.7], "2": [0.8] * 6}}
    space = Space(
        kind="sublayer", num_layers=6, bits=8, allow_ends=True, experts=(2, 1), windows=(8, 32),
        vocabularies=(12, 48),
    )  # fmt: skip
    draw = random.Random(name)
    masks = [0, space.low_mask(0), space.exit_mask(2), space.low_mask(space.exit_mask(3))]
    while len(masks) < 40:
        mask = space.from_params(
            {n: draw.choice([*choices]) for n, choices in space.switches.items()}
        )
        masks += [mask] if mask in space else []
    prices = Prices(space, record, 40.0)
    for mask in masks:
        step, *expected = part_by_part(
            record, space.skip_config(mask), space.number("vocabulary", mask), 40.0
        )
        assert prices.step == pytest.approx(step)
        table = prices.table(mask)
        assert table.draft == pytest.approx(expected[0] / step)
        assert table.verify == pytest.approx([1.0, *(each / step for each in expected[1][1:])])


# ---- Controllers and lookups ----


def way(decoding, speedup):
    return OptionsChoice(decoding, Totals(np.array([speedup]), np.array([1.0])))


def test_expected_gain_is_taken_within_the_tolerance():
    alone = DecodingOptions(controller="expected-gain", max_draft_length=8)
    fixed = DecodingOptions(controller="fixed", max_draft_length=3)
    for adaptive, controller in ((1.295, "expected-gain"), (1.27, "fixed")):
        best = best_choice([way(fixed, 1.3), way(alone, adaptive)])
        assert best.decoding.controller == controller
    for mixed, chosen in ((1.40, 1), (1.295 / TOLERANCE + 0.01, 1), (1.20, 0)):
        ways = [way(alone, 1.295), way(replace(alone, lookup=True), mixed)]
        assert best_choice(ways) is ways[chosen]


def by_hand(whole, length, costs):
    """The speedup of a fixed draft length, from texts walked round by round."""
    spent = 0.0
    for text, rows in zip(whole.trace.texts, whole.texts, strict=True):
        place, matched = 0, whole.matches[rows].tolist()
        while place < text.starts:
            drafted = min(length, text.starts - place - 1)  # the last token is never drafted
            accepted = next((j for j in range(drafted) if not matched[place][j]), drafted)
            spent += costs.round_cost(drafted)
            place += accepted + 1
    return whole.trace.starts / spent


@pytest.mark.parametrize("case", CASES)
def test_controllers_and_lookups_are_priced_each_by_its_own_costs(case):
    """Against the same rounds, walked and priced one by one."""
    trace, record = traced(case), MACHINES["reads weights"]
    passes = prices_of(record, SkipConfig(), trace.context)[0].passes
    looked_up = replay(trace, Lookup()), passes
    taken = set()
    for mask in drawn(2, seed=9):
        drafts = replay(trace, SPACE.skip_config(mask))
        costs = cost_table(record, SPACE.skip_config(mask), trace.context)
        tuned, *ways = choices(drafts, costs, looked_up)
        published = [w for w in ways if w.decoding.controller == "adaptive-threshold"]
        assert tuned.speedup >= max(way.speedup for way in published)
        changed = tuned.decoding.adaptive
        assert replace(tuned.decoding, adaptive=None) in [way.decoding for way in published]
        assert (changed is None) == any(tuned is way for way in published)
        names = {way.decoding.controller for way in ways}
        assert names == {"fixed", "confidence", "adaptive-threshold", "expected-gain"}
        assert [way.decoding for way in ways[:-1]] == finalists.controllers(8)
        assert ways[-1].decoding == replace(ways[-2].decoding, lookup=True)
        if case != "rejection":  # each of its lengths draws its own drafts
            for way in ways[:3]:
                length = way.decoding.max_draft_length or 0
                assert way.speedup == pytest.approx(by_hand(drafts, length, costs))
        (usual,) = choices(drafts, costs, None, all_controllers=False)
        assert (usual.decoding, usual.speedup) == (ways[-2].decoding, ways[-2].speedup)
        spent = tokens = 0.0
        for text in range(len(trace.texts)):
            known = [replace(costs, draft=0.0), costs]
            controller = ExpectedGain(known, 8, priors=[0.75, 0.75])
            for round_ in simulate([looked_up[0], drafts], controller, [text]):
                price = looked_up[1] if round_.source == 0 else costs
                spent += price.round_cost(round_.drafted[0])
                tokens += len(round_.tokens[0])
                taken.add(round_.source)
        assert ways[-1].speedup == pytest.approx(tokens / spent)
    assert taken >= {0, 1}


# ---- Draft vocabularies ----


def test_a_text_does_not_rank_its_own_tokens():
    """It is drafted with the ranking of the other texts. The final config uses all texts."""
    space = replace(SPACE, vocabularies=(24, 6))
    objective = Objective(traced("coupled"), space, MACHINES["trimmed heads"])
    trace = objective.trace
    for size in (6, 24):
        allowed = objective.allowed(size)
        assert allowed is not None
        assert allowed.sum(1).tolist() == [size] * 3
        for number, own in enumerate(allowed):
            others = [text.tokens for text in trace.texts if text.number != number]
            assert own.nonzero()[:, 0].tolist() == sorted(ranked(others, 97)[:size].tolist())
        texts = [text.tokens for text in trace.texts]
        assert objective.vocabulary(size) == tuple(ranked(texts, 97)[:size].tolist())
    assert objective.allowed(None) is None
    mask = SPACE.exit_mask(4)
    whole, limited = objective(mask), objective(mask | space.numbers["vocabulary"][6])
    assert limited.acceptance < whole.acceptance
    assert limited.draft_cost < whole.draft_cost
