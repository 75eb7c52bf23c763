"""Simulated rounds of sources that learn and draft trees: those of decoding, to the token."""

import functools
from dataclasses import replace

import kinds
import pytest
import torch
from covering import covering
from models import All, Erratic, Fickle

from layerskip import LogitLookup, Lookup, SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.laws import Law
from layerskip.decoding.sources import source_of
from layerskip.replay.drafts import replay
from layerskip.replay.live import Live
from layerskip.replay.simulation import SimulatedRound, simulate, tokens_per_step
from layerskip.replay.trace import take_trace

SIZES, CHILDREN = (4, 8, 16, 32), (1, 2, 3, 8)
NEW = 40
FLAT = CostTable(0.0, (1.0,))
BESIDE = {
    "alone": (),
    "joined by lookups": (),
    "beside lookups": (Lookup(),),
    "beside an exit": (SkipConfig.early_exit(2),),
    "beside both": (Lookup(), SkipConfig.early_exit(2)),
}


CONTROLLERS = {
    "all": lambda _: All(),
    "erratic": lambda _: Erratic(3),
    "fickle": lambda _: Fickle(2),
    "expected-gain": lambda drafts: ExpectedGain([FLAT] * drafts, 32),
}


@functools.cache
def traced(family, law, ended):
    ids, mask = kinds.prompts()
    return take_trace(
        kinds.model_of(family),
        [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)],
        max_new_tokens=NEW,
        law=Law((), do_sample=law == "coupled", rows=1),
        seeds=range(len(ids)),
        eos=frozenset(kinds.ENDS) if ended else frozenset(),
        draft_length=32,
    )


def decoded(trace, texts, drafts, controller):
    """The rounds of real decoding, but for the prefill's."""
    ids, mask = kinds.prompts()
    request = Request(
        ids[list(texts)],
        mask[list(texts)],
        NEW,
        Law((), do_sample=trace.law.do_sample, rows=len(texts)),
        [trace.texts[text].key for text in texts],
        eos=trace.eos,
    )
    run = Decoder(trace.model, drafts, controller, request, max_draft_length=32)
    return [*run.rounds()][1:]


@pytest.mark.parametrize(
    ("size", "children", "law", "controller", "beside", "family", "texts", "ended"),
    covering(
        SIZES,
        CHILDREN,
        ("greedy", "coupled"),
        tuple(CONTROLLERS),
        tuple(BESIDE),
        ("llama", "gemma3"),
        ((1,), (2, 0), (0, 1, 2)),
        (False, True),
    ),
)
def test_rounds_are_those_of_decoding(
    size, children, law, controller, beside, family, texts, ended
):
    trace = traced(family, law, ended)
    joined = Lookup() if "joined" in beside else None
    source = LogitLookup(None, children, joined, longest=size, beside=False)
    others = BESIDE[beside]
    drafts, made = [source, *others], CONTROLLERS[controller]
    with torch.no_grad():
        real = decoded(trace, texts, drafts, made(len(drafts)))
    known = [Live(trace, source), *(replay(trace, each) for each in others)]
    simulated = list(simulate(known, made(len(drafts)), texts))
    assert simulated == [
        SimulatedRound(r.drafted, r.accepted, tuple(map(len, r.tokens)), r.source) for r in real
    ]
    for ours, theirs in zip(simulated, real, strict=True):
        assert ours.steps == theirs.steps
        for row, plan in ours.drafts.items():
            assert tuple(plan.tokens or ()) == theirs.drafts[row]
            assert plan.parents == theirs.parents[row]
    if controller == "all" and children > 1:
        assert any(plan.parents for each in simulated for plan in each.drafts.values())


def test_what_is_learnt_beside_the_path_is_seen():
    """The negative control: a trace does not know it, and decoding that does drafts other trees."""
    trace, source = traced("llama", "coupled", False), LogitLookup(longest=16)
    with torch.no_grad():
        real = decoded(trace, (0,), [source], All())
    simulated = list(simulate(Live(trace, source), All()))
    assert [each.drafted for each in simulated] != [each.drafted for each in real]


def test_a_tree_costs_what_a_pass_over_its_nodes_does():
    costs = CostTable(0.0, tuple(1.0 + 0.1 * more for more in range(17)))
    live = Live(traced("llama", "greedy", False), LogitLookup(longest=16))
    rounds = list(simulate(live, All()))
    paid = sum(1.0 + 0.1 * each.drafted[0] for each in rounds)
    assert tokens_per_step(rounds, costs) == pytest.approx((NEW - 1) / paid)
    assert tokens_per_step(rounds, FLAT) == pytest.approx((NEW - 1) / len(rounds))


def test_what_cannot_be_simulated_is_refused_by_name():
    trace = traced("llama", "coupled", False)
    draft = source_of(trace.model, SkipConfig.early_exit(2))
    with pytest.raises(TypeError, match="SublayerDraft drafts by steps of a model; replay it"):
        Live(trace, draft)
    with pytest.raises(ValueError, match="cannot be simulated under the rejection rule"):
        Live(replace(trace, rejection=True), LogitLookup())
