"""Simulated rounds of sources that learn and draft trees: those of decoding, to the token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_every_kind as kinds
import torch
from covering import covering
from kinds import draft_of
from models import All, Erratic, Fickle, Growing
from torch import Tensor

from layerskip import Lookup, LookupLaws, SkipConfig
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controller import Controller
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import gumbel_noise
from layerskip.decoding.rounds import Round
from layerskip.decoding.sources import source_of
from layerskip.replay import chains
from layerskip.replay.drafts import replay
from layerskip.replay.drawing import Drawn
from layerskip.replay.live import Live
from layerskip.replay.simulation import SimulatedRound, simulate, tokens_per_step
from layerskip.replay.trace import Trace, take_trace

SIZES, CHILDREN = (4, 8, 16, 32), (1, 2, 3, 8)
NEW = 40
FLAT = CostTable(0.0, (1.0,))
BESIDE: dict[str, tuple[Any, ...]] = {
    "alone": (),
    "joined by lookups": (),
    "beside lookups": (Lookup(),),
    "beside an exit": (SkipConfig.early_exit(2),),
    "beside both": (Lookup(), SkipConfig.early_exit(2)),
}


CONTROLLERS: dict[str, Any] = {
    "all": lambda _: All(),
    "erratic": lambda _: Erratic(3),
    "fickle": lambda _: Fickle(2),
    "expected-gain": lambda drafts: ExpectedGain([FLAT] * drafts, 32),
}


@functools.cache
def traced(family: str, law: str, ended: bool) -> Trace:
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


def decoded(
    trace: Trace,
    texts: tuple[int, ...],
    drafts: Sequence[Any],
    controller: Controller,
    longest: int = 32,
) -> list[Round]:
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
    return [*Decoder(trace.model, drafts, controller, request, max_draft_length=longest).rounds()][
        1:
    ]


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
    size: int,
    children: int,
    law: str,
    controller: str,
    beside: str,
    family: str,
    texts: tuple[int, ...],
    ended: bool,
) -> None:
    trace = traced(family, law, ended)
    joined = Lookup() if "joined" in beside else None
    source = LookupLaws(None, children, joined, longest=size, beside=False)
    others = BESIDE[beside]
    drafts, made = [source, *others], CONTROLLERS[controller]
    with torch.no_grad():
        real = decoded(trace, texts, drafts, made(len(drafts)))
    known: list[Any] = [Live(trace, source), *(replay(trace, each) for each in others)]
    simulated = list(simulate(known, made(len(drafts)), texts))
    assert_equal(simulated, real)
    if controller == "all" and children > 1:
        assert any(plan.parents for each in simulated for plan in each.drafts.values())


def test_what_is_learnt_beside_the_path_is_seen() -> None:
    """The negative control: a trace does not know it, and decoding that does drafts other trees."""
    trace, source = traced("llama", "coupled", False), LookupLaws(longest=16)
    with torch.no_grad():
        real = decoded(trace, (0,), [source], All())
    simulated = list(simulate(Live(trace, source), All()))
    assert [each.drafted for each in simulated] != [each.drafted for each in real]


def test_a_tree_costs_what_a_pass_over_its_nodes_does() -> None:
    costs = CostTable(0.0, tuple(1.0 + 0.1 * more for more in range(17)))
    live = Live(traced("llama", "greedy", False), LookupLaws(longest=16))
    rounds = list(simulate(live, All()))
    paid = sum(1.0 + 0.1 * each.drafted[0] for each in rounds)
    assert tokens_per_step(rounds, costs) == pytest.approx((NEW - 1) / paid)
    assert tokens_per_step(rounds, FLAT) == pytest.approx((NEW - 1) / len(rounds))


def test_what_cannot_be_simulated_is_refused_by_name() -> None:
    trace = traced("llama", "coupled", False)
    draft = source_of(trace.model, SkipConfig.early_exit(2))
    with pytest.raises(TypeError, match="SublayerDraft drafts by steps of a model; replay it"):
        Live(trace, draft)
    with pytest.raises(ValueError, match="cannot be simulated under the rejection rule"):
        Live(replace(trace, rejection=True), LookupLaws())


# ---------------------------------------------------------------------------------------------
# Second-best tokens of steps

STEPPING: dict[str, Any] = {
    "8 bits": (SkipConfig.low_precision(8),),
    "4 bits, a window": (replace(SkipConfig.low_precision(4), window=5),),
    "an exit": (SkipConfig.early_exit(3),),
    "a prefix": (SkipConfig.layers((3,)),),
    "4 bits, lookups": (Lookup(), SkipConfig.low_precision(4)),
    "an exit, lookups": (Lookup(), SkipConfig.early_exit(2)),
    "4 bits, laws": (LookupLaws(None, 2, longest=8, beside=False), SkipConfig.low_precision(4)),
}
GROWERS: dict[str, Any] = {
    "growing": lambda _: Growing(2),
    "expected-gain": lambda drafts: ExpectedGain([CHEAP] * drafts, 8, branches=True),
}
CHEAP = CostTable(0.1, (1.0, 1.02, 1.04))


def played(trace: Trace, draft: Any) -> Any:
    return Live(trace, draft) if isinstance(draft, LookupLaws) else replay(trace, draft, 8)


@pytest.mark.parametrize(
    ("drafts", "law", "controller", "family", "texts", "ended"),
    covering(
        tuple(STEPPING),
        ("greedy", "coupled"),
        tuple(GROWERS),
        ("llama", "gemma3"),
        ((1,), (2, 0), (0, 1, 2)),
        (False, True),
    ),
)
def test_trees_of_steps_are_those_of_decoding(
    drafts: str, law: str, controller: str, family: str, texts: tuple[int, ...], ended: bool
) -> None:
    trace, sources = traced(family, law, ended), STEPPING[drafts]
    with torch.no_grad():
        real = decoded(trace, texts, sources, GROWERS[controller](len(sources)), 8)
    known = [played(trace, each) for each in sources]
    simulated = list(simulate(known, GROWERS[controller](len(sources)), texts, max_draft_length=8))
    assert_equal(simulated, real)
    costs = [CHEAP] * len(sources)
    assert tokens_per_step(simulated, costs) > 0


@pytest.mark.parametrize("kind", ["exit-block", "feature-block", "heads", "streams", "assistant"])
def test_trees_of_trained_drafts_are_those_of_decoding(kind: str, tmp_path: Path) -> None:
    """Second models and feature blocks take several tokens a step; modules say eight of a place."""
    trace = traced("llama", "coupled", False)
    draft = draft_of(kind, kinds.model_of("llama"), tmp_path)
    with torch.no_grad():
        real = decoded(trace, (0, 1), [draft], GROWERS["expected-gain"](1), 8)
    simulated = list(simulate(replay(trace, draft, 8), GROWERS["expected-gain"](1), (0, 1)))
    assert_equal(simulated, real)
    assert any(any(each.parents) for each in real)


def assert_equal(simulated: Sequence[SimulatedRound], real: Sequence[Round]) -> None:
    assert simulated == [
        SimulatedRound(r.drafted, r.accepted, tuple(map(len, r.tokens)), r.source) for r in real
    ]
    for ours, theirs in zip(simulated, real, strict=True):
        assert (ours.steps, ours.wide) == (theirs.steps, theirs.wide)
        for row, plan in ours.drafts.items():
            assert tuple(plan.tokens or ()) == theirs.drafts[row]
            assert plan.parents == theirs.parents[row]


def test_second_tokens_are_ranked_by_the_noise_of_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: by another place's noise a simulation has other tokens, and rounds."""
    trace, draft = traced("llama", "coupled", False), SkipConfig.low_precision(4)
    with torch.no_grad():
        real = decoded(trace, (0, 1, 2), [draft], GROWERS["expected-gain"](1), 8)
    own = chains.draw

    def elsewhere(law: Law, raw: Tensor, noise: Tensor, *how: Any, best: int) -> Drawn:
        drawn = own(law, raw, noise, *how, best=best)
        places = gumbel_noise([1] * len(raw), range(900, 900 + len(raw)), raw.shape[1])
        other = own(law, raw, places, *how, best=best)
        same = other.tokens == drawn.tokens
        return drawn._replace(others=torch.where(same, other.others[:, 0], other.tokens)[:, None])

    def rounds() -> list[SimulatedRound]:
        return list(simulate(replay(trace, draft, 8), GROWERS["expected-gain"](1), (0, 1, 2)))

    assert_equal(rounds(), real)
    assert sum(each.wide for each in real) > 3
    assert any(any(each.parents) for each in real)
    monkeypatch.setattr(chains, "draw", elsewhere)
    assert [each.accepted for each in rounds()] != [each.accepted for each in real]


def test_what_a_draft_says_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another walk with the same controller runs no model; beside chains nothing ever does."""
    trace, runs = traced("llama", "coupled", False), [0]
    run = chains.Chains.run

    def counted(self: Any, *args: Any) -> Any:
        runs[0] += 1
        return run(self, *args)

    played = [replay(trace, SKIPS[name], 8) for name in ("wide", "an exit")]
    monkeypatch.setattr(chains.Chains, "run", counted)
    counts = []
    for each in (*played, *played):
        assert list(simulate(each, ExpectedGain(CHEAP, 8, branches=True), max_draft_length=8))
        counts.append(runs[0])
    assert counts[0] > 0
    assert {*counts[1:]} == {counts[0]}


SKIPS = {"wide": SkipConfig.low_precision(4), "an exit": SkipConfig.early_exit(3)}


def test_a_wide_step_costs_more_than_one_and_less_than_two() -> None:
    trace, costs = traced("llama", "coupled", False), CostTable(0.2, (1.0, 1.1, 1.2))
    rounds = list(simulate(replay(trace, SKIPS["wide"], 8), GROWERS["growing"](1)))
    paid = sum(
        0.2 * each.steps + 0.02 * each.wide + 1.0 + 0.1 * each.drafted[0]
        if any(each.drafted)
        else 1
        for each in rounds
    )
    assert sum(each.wide for each in rounds) > 0
    assert tokens_per_step(rounds, costs) == pytest.approx((NEW - 1) / paid)
