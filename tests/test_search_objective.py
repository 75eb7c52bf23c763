"""What a config is worth: against rounds counted one by one and priced by hand."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from cost_records import MACHINES, cost_record
from models import lively_model, prompt
from transformers import TemperatureLogitsWarper

from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.pricing import cost_table
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.laws import Law
from layerskip.replay.drafts import Replay, follow, replay
from layerskip.replay.simulation import simulate
from layerskip.replay.trace import Trace, take_trace
from layerskip.search import objective as objective_module
from layerskip.search.objective import TOLERANCE, Choice, Objective, best_choice, choices
from layerskip.search.space import Space
from layerskip.search.study import Evaluation
from layerskip.vocabulary import ranked

SPACE = Space(kind="sublayer", num_layers=6, allow_ends=True)
CASES: dict[str, tuple[str, float | None, str]] = {
    "greedy": ("llama", None, "coupled"),
    "coupled": ("gemma2", 0.7, "coupled"),
    "rejection": ("llama", 0.7, "rejection"),
}
TEXTS = ["greedy", "coupled"]  # where drafts are not drawn for themselves
LENGTHS = range(1, 9)


def take(case: str) -> Trace:
    family, temperature, acceptance = CASES[case]
    warpers = [] if temperature is None else [TemperatureLogitsWarper(temperature)]
    return take_trace(
        lively_model(family, dtype=torch.float32),
        [prompt(length, seed=length)[0] for length in (5, 8, 6)],
        max_new_tokens=24,
        law=Law(warpers, do_sample=temperature is not None, rows=1),
        acceptance=acceptance,
    )


traced = cache(take)


def drawn(count: int, seed: int = 0) -> Iterator[SkipConfig]:
    """Random configs, large and small, an early exit among them."""
    draw = random.Random(seed)
    yield SPACE.skip_config(SPACE.exit_mask(4))
    for _ in range(count):
        yield SPACE.skip_config(
            sum(1 << i for i in draw.sample(range(12), draw.choice([1, 1, 2, 3, 5, 6, 9])))
        )


def by_hand(whole: Replay, record: dict[str, Any]) -> dict[int, float]:
    """Speedup of each fixed draft length: texts walked round by round, each priced part by part.

    For machines on which the context costs nothing.
    """
    kept, prefix = whole.skip.kept(), whole.skip.shared_prefix()
    beside = record["head"] + record["rest"]
    pairs = zip(record["attention"], record["mlp"], strict=True)
    sublayers = [seconds for pair in pairs for seconds in pair]
    (_, _), (most, growth) = record["growth"]
    draft = sum(sublayers[i] for i in kept) + beside
    plain = sum(sublayers) + beside
    found = {}
    matches = [whole.matches[rows].tolist() for rows in whole.texts]
    for length in LENGTHS:
        seconds = 0.0
        for text, matched in zip(whole.trace.texts, matches, strict=True):
            place = 0
            while place < text.starts:
                drafted = min(length, text.starts - place - 1)  # the last token is never drafted
                accepted = next((j for j in range(drafted) if not matched[place][j]), drafted)
                longer = 1 + (growth - 1) * drafted / (most - 1)
                verified = sum(sublayers[:prefix]) + longer * (sum(sublayers[prefix:]) + beside)
                round_ = drafted * draft + verified
                seconds += round_ if drafted else plain
                place += accepted + 1
        found[length] = whole.trace.starts * plain / seconds
    return found


def fixed(found: list[Choice]) -> dict[int | None, float]:
    ways = [(choice.decoding, choice.speedup) for choice in found]
    return {how.max_draft_length: gain for how, gain in ways if how.controller == "fixed"}


@pytest.mark.parametrize("case", TEXTS)
def test_fixed_lengths_are_worth_what_counting_by_hand_says(case: str) -> None:
    for skip in drawn(4):
        whole, followed = replay(traced(case), skip), follow(traced(case), skip)[0]
        for name in ("reads weights", "dear verification", "cheap ends"):
            costs = Objective(traced(case), MACHINES[name]).costs(skip)
            expected = pytest.approx(by_hand(whole, MACHINES[name]))
            assert fixed(choices(whole, costs)) == expected
            assert fixed(choices(followed, costs)) == expected


@pytest.mark.parametrize("case", CASES)
def test_the_value_is_that_of_the_best_way_and_never_below_plain(case: str) -> None:
    trace, flat, paying = traced(case), 0, 0
    for skip in drawn(3, seed=1):
        followed = follow(trace, skip)[0]
        for record in MACHINES.values():
            objective = Objective(trace, record)
            found = objective(skip)
            size = found.attributes["draft_vocabulary"]
            costs = objective.costs(skip, size)
            assert found.value >= 1.0
            assert found.guide is not None
            assert found.guide <= found.value
            assert found.draft_cost == costs.draft
            drafts = follow(trace, skip, [objective.allowed(size)])[0] if size else followed
            assert drafts.draft_length == trace.draft_length  # the objective's own may end sooner
            assert found.value >= max(fixed(choices(drafts, costs)).values()) * 0.9999
            if found.value == 1.0:
                flat += 1
                assert found.attributes["controller"] is None
            else:
                paying += 1
                assert found.attributes["controller"] is not None
    assert flat > 5
    assert paying > 3


def test_the_context_is_that_of_the_texts() -> None:
    trace, record = traced("greedy"), MACHINES["long contexts"]
    objective = Objective(trace, record)
    assert objective.step_seconds == pytest.approx(13e-3 + trace.context * 6 * 5e-5)
    draft = 7e-3 + trace.context * 3 * 5e-5  # three layers, head and rest
    found = objective.costs(SkipConfig.early_exit(3))
    assert found.draft == pytest.approx(draft / objective.step_seconds)


@pytest.mark.parametrize("machine", MACHINES)
def test_skipping_nothing_is_worth_plain_decoding(machine: str) -> None:
    objective = Objective(traced("greedy"), MACHINES[machine])
    found = objective(SkipConfig())
    assert found.value == found.guide == 1.0
    assert found.acceptance == 1.0
    assert not found.attributes


def test_what_cannot_pay_is_followed_for_one_step() -> None:
    lengths = []

    def watched(*arguments: Any, **options: Any) -> list[Replay]:
        drafts = follow(*arguments, **options)
        lengths.extend(each.draft_length for each in drafts)
        return drafts

    dear = cost_record() | {"repeated": [[1.0, 100.0]]}  # a draft step costs many plain ones
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective_module, "follow", watched)
        found = Objective(traced("greedy"), dear)(SkipConfig(attention=(2,)))
    assert lengths == [1]
    assert found.attributes["controller"] is None


def test_expected_gain_and_lookups_are_preferred_within_the_tolerance() -> None:
    alone = DecodingOptions(controller="expected-gain", max_draft_length=8)
    for fastest, adaptive, controller in (
        (1.30, 1.35, "expected-gain"),
        (1.30, 1.30 / TOLERANCE + 1e-6, "expected-gain"),
        (1.30, 1.30 / TOLERANCE - 1e-6, "fixed"),
        (0.90, 0.95, None),
        (0.90, 0.999, None),
        (1.005, 0.999, "expected-gain"),
    ):
        ways = [
            Choice(DecodingOptions(enabled=False), 1.0),
            Choice(DecodingOptions(controller="fixed", max_draft_length=3), fastest),
            Choice(DecodingOptions(controller="confidence", threshold=0.6), fastest - 0.1),
            Choice(alone, adaptive),
        ]
        best = best_choice(ways)
        assert best.decoding.controller == controller
        assert best.decoding.enabled is (None if controller else False)
    for mixed, chosen in ((1.40, 1), (1.295 / TOLERANCE + 0.01, 1), (1.20, 0)):
        ways = [Choice(alone, 1.295), Choice(dataclasses.replace(alone, lookup=True), mixed)]
        assert best_choice(ways) is ways[chosen]


@pytest.mark.parametrize("case", CASES)
def test_drafts_and_lookups_are_priced_each_by_its_own_costs(case: str) -> None:
    """Against the same rounds, walked and priced one by one."""
    trace = traced(case)
    objective = Objective(trace, MACHINES["reads weights"])
    record, context = objective.cost, trace.context
    taken = set()
    for skip in drawn(4, seed=9):
        drafts, costs = replay(trace, skip), objective.costs(skip)
        looked_up, free = objective.looked_up
        assert looked_up.skip is None
        assert free.draft == 0
        no_prefix = cost_table(record, SkipConfig(attention=(0,)), context)
        assert free.verify == pytest.approx(no_prefix.verify)
        ways = choices(drafts, costs, objective.looked_up)
        assert ways[:-1] == choices(drafts, costs)
        assert ways[-1].decoding == dataclasses.replace(ways[-2].decoding, lookup=True)
        spent = tokens = 0.0
        for text in range(len(trace.texts)):
            known = [dataclasses.replace(costs, draft=0.0), costs]
            controller = ExpectedGain(known, 8, priors=[0.75, 0.75])
            for round_ in simulate([looked_up, drafts], controller, [text]):
                price = free if round_.source == 0 else costs
                spent += price.round_cost(round_.drafted[0])
                tokens += round_.emitted[0]
                taken.add(round_.source)
        assert ways[-1].speedup == pytest.approx(tokens / spent)
    assert taken >= {0, 1}


def test_each_config_is_evaluated_once() -> None:
    objective = Objective(traced("greedy"), MACHINES["reads weights"])
    same = [SkipConfig(attention=(5,), mlp=(5,)), SkipConfig.layers((5,)), SkipConfig.early_exit(5)]
    first, *others = [objective(skip) for skip in (*same, same[0])]
    assert all(each is first for each in others)


@pytest.mark.parametrize("case", CASES)
def test_values_follow_from_the_config_the_trace_and_the_costs(case: str) -> None:
    skips = list(drawn(3, seed=4))

    def values(record: dict[str, Any], trace: Trace) -> list[Evaluation]:
        objective = Objective(trace, record)
        return [objective(skip) for skip in skips]

    first = values(MACHINES["reads weights"], traced(case))
    again = Objective(take(case), MACHINES["reads weights"])
    assert [again(skip) for skip in reversed(skips)] == first[::-1]  # in any order
    other = values(MACHINES["dear heads"], traced(case))
    assert [f.acceptance for f in other] == [f.acceptance for f in first]
    for mine, theirs in zip(first, other, strict=True):
        assert mine.guide != theirs.guide
        assert mine.draft_cost != theirs.draft_cost


# ---------------------------------------------------------------------------------------------
# Draft vocabularies.

HEADS = MACHINES["trimmed heads"]


@pytest.mark.parametrize("case", CASES)
def test_the_best_of_all_vocabularies_counts(case: str) -> None:
    """Against every size followed alone, by the best fixed length."""
    objective, trace = Objective(traced(case), HEADS), traced(case)
    assert objective.sizes == [None, 6, 12, 24, 48]
    chosen = set()
    for skip in drawn(3, seed=7):
        found = objective(skip)
        best: dict[int | None, float] = {}
        for size in objective.sizes:
            drafts = replay(trace, skip, allowed=objective.allowed(size))
            best[size] = max(fixed(choices(drafts, objective.costs(skip, size))).values())
        size = found.attributes["draft_vocabulary"]
        assert found.draft_cost == objective.costs(skip, size).draft
        assert found.acceptance == replay(trace, skip, allowed=objective.allowed(size)).survival[0]
        assert found.guide is not None
        assert found.guide > 0.9 * max(best.values())
        whole = Objective(trace, MACHINES["dear heads"])(skip)  # the same without trimmed heads
        assert found.value >= 0.95 * whole.value
        chosen.add(size)
    assert chosen - {None}


def test_a_text_does_not_rank_its_own_tokens() -> None:
    """Each is drafted with what the others rank first; the final config has the ranks of all."""
    objective = Objective(traced("coupled"), HEADS)
    trace = objective.trace
    for size in (6, 12, 24, 48):
        allowed = objective.allowed(size)
        assert allowed is not None
        assert allowed.sum(1).tolist() == [size] * 3
        for number, own in enumerate(allowed):
            others = [text.tokens for text in trace.texts if text.number != number]
            assert own.nonzero()[:, 0].tolist() == sorted(ranked(others, 97)[:size].tolist())
        texts = [text.tokens for text in trace.texts]
        assert objective.vocabulary(size) == tuple(ranked(texts, 97)[:size].tolist())
    assert objective.allowed(None) is None
    ending = Objective(dataclasses.replace(trace, eos=frozenset({91, 95})), HEADS)
    assert ending.vocabulary(6)[:2] == (91, 95)
    allowed = ending.allowed(6)
    assert allowed is not None
    assert allowed[:, [91, 95]].all()
