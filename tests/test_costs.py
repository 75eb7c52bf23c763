"""Cost tables: measured with a clock of the test's own, remembered, and analytic; never timed."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import test_engine
import torch
from models import lively_model, pure
from torch import Tensor
from transformers import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from layerskip.config import SINK, LowPrecision, SkipConfig
from layerskip.costs.speculation import ContextCosts, CostTable, keys_read
from layerskip.decoding.engine import Request
from layerskip.decoding.passes import Passes, Position
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.lookup import Lookup
from layerskip.model import architecture
from layerskip.model.sublayers import Sublayers
from layerskip.timing import rounds
from layerskip.timing import tables as costs
from layerskip.timing.analytic import Read, analytic
from layerskip.timing.rounds import measure
from layerskip.timing.tables import cost_tables

SKIP = SkipConfig.early_exit(2).resolve(6)
LOOKUP = Lookup()
DRAFT, VERIFY = 3.0, {1: 10.0, 2: 12.0, 3: 14.0, 5: 15.0, 9: 19.0}


def request(lengths: tuple[int, ...] = (40, 4), **how: Any) -> Request:
    return test_engine.request(
        lengths,
        new_tokens=5,
        eos=frozenset(range(97)),
        stop=lambda row, seen: pytest.fail("the probe is not the request's text"),
        **how,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Seconds that passes alone let go by: 3 a draft step, `VERIFY` a verify pass."""
    now = [0.0]
    draft_step, verify = Passes.draft_step, Passes.verify

    def slow_draft(self: Passes, tokens: Tensor, offset: int, draft: int) -> Tensor:
        now[0] += DRAFT
        return draft_step(self, tokens, offset, draft)

    def slow_verify(
        self: Passes, tokens: Tensor, positions: Sequence[Position], *branches: Any
    ) -> Tensor:
        drafted = max(offset for _, offset in positions)
        now[0] += VERIFY[drafted + 1]
        return verify(self, tokens, positions, *branches)

    monkeypatch.setattr(Passes, "draft_step", slow_draft)
    monkeypatch.setattr(Passes, "verify", slow_verify)
    monkeypatch.setattr(rounds, "BUDGET", 1e9)
    return lambda: now[0]


@pytest.fixture(scope="module")
def opened() -> Sublayers:
    return Sublayers(lively_model("llama"))


def _one(times: rounds.Times | None) -> CostTable:
    assert times is not None
    (table,) = times.tables()
    return table


@pytest.mark.parametrize("sample", [False, True])
@torch.no_grad()
def test_measured_costs_are_in_target_steps(
    opened: Sublayers, clock: Callable[[], float], sample: bool
) -> None:
    table = _one(measure(opened, [SKIP], request(sample=sample), now=clock))
    assert table.source == "measured"
    assert table.draft == pytest.approx(DRAFT / VERIFY[1])
    assert len(table.verify) == 9
    for n, seconds in VERIFY.items():
        assert table.verify_cost(n) == pytest.approx(seconds / VERIFY[1])
    # straight lines in between
    assert table.verify_cost(4) == pytest.approx(1.45)
    assert table.verify_cost(7) == pytest.approx(1.7)


@torch.no_grad()
def test_several_drafts_are_measured_together(
    opened: Sublayers, monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]
) -> None:
    """Verify passes of looked-up drafts; of another draft a step, and one length's passes."""
    for tokens, seconds in {4: 14.5, 8: 18.0, 16: 34.0}.items():
        monkeypatch.setitem(VERIFY, tokens, seconds)
    steps: list[int] = []
    draft_step = Passes.draft_step

    def dearer(self: Passes, tokens: Tensor, offset: int, draft: int) -> Tensor:
        steps.append(draft)
        return draft_step(self, tokens, offset, draft)

    monkeypatch.setattr(Passes, "draft_step", dearer)
    found = measure(opened, [LOOKUP, SKIP, LOOKUP], request(), now=clock)
    assert found is not None
    looked_up, own, again = found.tables()
    assert looked_up == again
    assert looked_up.draft == 0.0
    assert len(looked_up.verify) == 16
    for tokens in (1, 2, 4, 8, 16):
        assert looked_up.verify_cost(tokens) == pytest.approx(VERIFY[tokens] / VERIFY[1])
    assert own.draft == pytest.approx(DRAFT / VERIFY[1])
    assert own.verify_cost(5) == pytest.approx(VERIFY[5] / VERIFY[1])  # its own
    part = VERIFY[5] / VERIFY[1] / looked_up.verify_cost(5)
    for tokens in (2, 3, 8, 16):
        want = max(1.0, part * looked_up.verify_cost(tokens))
        assert own.verify_cost(tokens) == pytest.approx(want)
    assert set(steps) == {1}


@torch.no_grad()
def test_the_budget_ends_the_sweeps(
    opened: Sublayers, clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "BUDGET", 1.0)
    table = _one(measure(opened, [SKIP], request(), now=clock))
    assert table.draft == pytest.approx(DRAFT / VERIFY[1])
    one_sweep = VERIFY[1] + sum(VERIFY.values()) + DRAFT * (1 + 2 + 4 + 8)
    assert clock() <= 2 * one_sweep + 1e-6


def test_a_longer_pass_is_never_cheaper_and_one_disturbed_does_not_raise_longer_ones() -> None:
    table = rounds._seconds(3.0, {0: 10.0, 1: 12.0, 2: 18.0, 4: 23.0}).table()
    assert table.draft == pytest.approx(0.3)
    assert table.verify == pytest.approx((1.0, 1.0, 1.15, 1.15, 1.15))  # of 1, .9, 1.2, 1.1
    # 1, 1.6, 1.3, 1.4 and 1.5 for 0, 1, 2, 4 and 8 drafted tokens
    table = rounds._seconds(2.0, {0: 10.0, 1: 18.0, 2: 17.0, 4: 22.0, 8: 31.0}).table()
    level = 43 / 30
    rest = [level + (1.5 - level) * part for part in (0.25, 0.5, 0.75, 1.0)]
    assert table.verify == pytest.approx((1.0, level, level, level, level, *rest))


@torch.no_grad()
def test_a_users_own_functions_are_not_called_with_the_probes_text(opened: Sublayers) -> None:
    @pure
    def own(ids: Tensor, scores: Tensor) -> Tensor:
        pytest.fail("called while costs were measured")

    constraint = PrefixConstrainedLogitsProcessor(lambda row, seen: [], 1)
    asked = request(sample=True, processors=[own, constraint, TemperatureLogitsWarper(0.5)])
    assert measure(opened, [SKIP], asked) is not None


@torch.no_grad()
def test_no_room_to_measure() -> None:
    model = Sublayers(lively_model("llama", max_position_embeddings=48))
    assert measure(model, [SKIP], request((40,))) is None
    tables = [each.at(40) for each in cost_tables(model, [SKIP, LOOKUP], request((40,)))]
    assert [table.source for table in tables] == ["analytic"] * 2


@torch.no_grad()
def test_tables_are_measured_once_for_each_model_and_kind_of_law(
    opened: Sublayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def count(model: Sublayers, drafts: Any, asked: Request, rows: int, **_: Any) -> rounds.Times:
        calls.append(rows)
        numbers = range(len(drafts))
        return rounds.Times(
            rounds={(draft, length): [10.0, 10.0] for draft in numbers for length in (0, 4)},
            steps={draft: [0.1 * (len(calls) + 1)] for draft in numbers},
            weights=[1.0 for _ in drafts],
            base=0,
        )

    monkeypatch.setattr(costs, "measure", count)
    model = Sublayers(lively_model("llama"))
    first = cost_tables(model, [SKIP], request())
    # reopening the model, another prompt, fewer rows, another temperature and an equal config are
    # the same kind of call
    again = SkipConfig.layers((2, 3, 4, 5))
    assert cost_tables(model, [SKIP], request()) is first
    assert cost_tables(Sublayers(model.model), [again], request((9, 30))) is first
    cost_tables(model, [SKIP], request((4,)))
    cost_tables(model, [SKIP], request(processors=[TemperatureLogitsWarper(0.5)]))
    assert calls == [1, 2]
    others = [
        cost_tables(model, [SKIP], request(sample=True)),
        cost_tables(model, [SKIP], request(processors=[RepetitionPenaltyLogitsProcessor(1.5)])),
        cost_tables(model, [SkipConfig.early_exit(3)], request()),
        cost_tables(Sublayers(lively_model("llama")), [SKIP], request()),
        cost_tables(Sublayers(model.model, execution="modules"), [SKIP], request()),
    ]
    assert calls == [1, 2] * (1 + len(others))
    assert len({each.at(0).draft for (each,) in [first, *others]}) == 6
    assert len(cost_tables(model, [LOOKUP, SKIP], request())) == 2
    assert calls == [1, 2] * (2 + len(others))
    # larger batches are measured for themselves, up to a power of two
    cost_tables(model, [SKIP], request((4,) * 7))
    cost_tables(model, [SKIP], request((4,) * 8))
    assert calls[-1] == 8
    assert len(calls) == 2 * (2 + len(others)) + 1


def _costs_of(times: dict[tuple[int, int], rounds.Seconds], model: Sublayers) -> ContextCosts:
    kinds = {rounds.Kind(*kind): [each] for kind, each in times.items()}
    return costs._measured(kinds, Read.of(model, SKIP), 0)


def test_a_batch_costs_what_as_many_tokens_of_one_row_do(opened: Sublayers) -> None:
    """Where it was not measured; between two sizes that were, each row costs something beside."""
    one = rounds.Seconds(0.6, (2.0, 2.2, 2.4, 2.8))
    of_two = _costs_of({(1, 32): one}, opened).at(0, 2)
    assert of_two.draft == pytest.approx(0.3)
    # 2, 4, 6 and 8 tokens over 2, on the last ones' line beyond 4
    assert of_two.verify == pytest.approx((1.0, 2.8 / 2.2, 3.6 / 2.2, 4.4 / 2.2))
    measured = _costs_of({(1, 32): one, (4, 32): rounds.Seconds(1.2, (5.0, 8.2))}, opened)
    assert measured.at(0, 1).verify == pytest.approx((1.0, 1.1, 1.2, 1.4))
    assert measured.at(0, 4).verify == pytest.approx((1.0, 8.2 / 5))
    # four rows cost 2.2 more than as many tokens of one
    step = 2.2 + 2.2 / 3
    assert measured.at(0, 2).draft == pytest.approx(0.8 / step)
    assert measured.at(0, 2).verify_cost(2) == pytest.approx((2.8 + 2.2 / 3) / step)
    assert measured.at(0, 2).verify_cost(3) == pytest.approx((6.6 - 2.2 * 2 / 3) / step)
    assert measured.at(0, 8).verify_cost(2) == pytest.approx((5 + 3 * 3.2) / 8.2)


def test_disturbed_times_of_few_rows_give_no_negative_costs(opened: Sublayers) -> None:
    few = rounds.Seconds(0.001, [0.001, 0.001, 0.001, 0.02])  # four tokens were disturbed
    many = rounds.Seconds(0.001, [0.002, 0.003])
    table = _costs_of({(1, 4): few, (4, 4): many}, opened).at(0, 3)
    assert table.draft > 0.0
    assert min(table.verify) == 1.0


def test_costs_follow_the_bytes_of_keys(opened: Sublayers) -> None:
    """Between two measured lengths and beyond; layers with windows stop to cost more."""
    near, far = rounds.Seconds(1.0, (2.0, 3.0)), rounds.Seconds(3.0, (6.0, 11.0))
    for model, most in ((opened, None), (Sublayers(lively_model("mistral")), 8)):
        windows = set(model.windows)
        assert windows == {most}
        found = _costs_of({(1, 32): near, (1, 544): far}, model)
        for context, part in ((0, 0.0), (544, 1.0), (1056, 2.0)):
            part = 0.0 if most else part
            table = found.at(context)
            assert table.draft == pytest.approx((1 + 2 * part) / (2 + 4 * part), abs=0.02)
            assert table.verify_cost(2) == pytest.approx((3 + 8 * part) / (2 + 4 * part), abs=0.02)
    # of a length that was not measured: keys cost what weights do
    alone = _costs_of({(1, 32): near}, opened).at(10**6)
    keys = sum(opened.key_bytes().values()) * 10**6 / Read.of(opened, SKIP).step
    assert alone.verify_cost(2) == pytest.approx((3 + 2 * keys) / (2 + 2 * keys), rel=0.05)


def test_a_pass_reads_the_keys_that_its_layers_see() -> None:
    per_token = 2 * 2 * 8 * 8  # keys and values, heads, width, float64
    llama = Sublayers(lively_model("llama"))
    assert llama.key_bytes() == {None: 6 * per_token}
    assert source_of(llama, SKIP).key_bytes() == {None: 2 * per_token}
    assert source_of(llama, SkipConfig(attention=(1, 3)).resolve(6)).key_bytes() == {
        None: 4 * per_token
    }
    near = source_of(llama, SkipConfig(window=16).resolve(6))
    assert near.key_bytes() == {SINK + 16: 6 * per_token}
    assert LOOKUP.key_bytes() == {}
    assert keys_read({None: 3.0, 8: 5.0}, 6) == 48.0
    assert keys_read({None: 3.0, 8: 5.0}, 100) == 340.0


@torch.no_grad()
def test_a_long_context_is_measured_where_a_call_gets_near_it(
    opened: Sublayers, clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without computing it: passes run behind zeros, and no key but the rounds' own is written."""
    passes: list[tuple[int, int]] = []
    verify = Passes.verify

    def longer(
        self: Passes, tokens: Tensor, positions: Sequence[Position], *branches: Any
    ) -> Tensor:
        passes.append((min(self.lengths), tokens.shape[0]))
        out = verify(self, tokens, positions, *branches)
        now[0] += 1.0 if min(self.lengths) >= 300 else 0.0
        assert out.isfinite().all()
        return out

    now = [0.0]
    monkeypatch.setattr(Passes, "verify", longer)
    monkeypatch.setattr(costs, "_FAR", 300)
    monkeypatch.setattr(costs, "measure", partial(measure, now=lambda: clock() + now[0]))
    model = Sublayers(lively_model("llama", max_position_embeddings=600))
    (short,) = cost_tables(model, [SKIP], request((4,)))
    assert max(length for length, _ in passes) < 300
    passes.clear()
    (long,) = cost_tables(model, [SKIP], request((80,)))
    assert min(length for length, _ in passes) >= 296
    # a plain step takes a second more there, and a draft step as long as before
    assert long.at(320).draft == pytest.approx(DRAFT / (VERIFY[1] + 1.0), rel=0.02)
    assert long.at(0) == short.at(0) or long.at(0).draft == pytest.approx(RIGHT, rel=0.02)


@torch.no_grad()
def test_a_call_that_nobody_asked_for_costs_spends_little_on_them(
    opened: Sublayers, clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round; the next calls go on, and until then tables are analytic."""
    longest = DRAFT * 8 + VERIFY[9]
    model = Sublayers(lively_model("llama"))
    monkeypatch.setattr(rounds, "BUDGET", 60.0)
    monkeypatch.setattr(costs, "measure", partial(measure, now=clock))
    found, spent = [], []
    for _ in range(12):
        before = clock()
        found += [each.at(0) for each in cost_tables(model, [SKIP], request((40,)))]
        spent.append(clock() - before)
    assert max(spent) <= 60.0 + longest
    assert found[0].source == "analytic"
    assert found[-1].draft == pytest.approx(RIGHT, rel=0.02)
    assert not any(spent[-2:])


def tables(model: Sublayers, drafts: Sequence[Any], **how: Any) -> list[CostTable]:
    return [each.at(0) for each in cost_tables(model, drafts, request((4,)), **how)]


@torch.no_grad()
def test_times_serve_the_next_process(
    clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for tokens in (4, 8, 16):
        monkeypatch.setitem(VERIFY, tokens, 13.0 + tokens / 2)
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "measure", partial(measure, now=clock))
    model = lively_model("llama")
    asked = tables(Sublayers(model), [LOOKUP, SKIP], seconds=1e9)
    (file,) = (tmp_path / "costs").iterdir()
    again = lively_model("llama")  # as another process loads it
    now = clock()
    assert tables(Sublayers(again), [LOOKUP, SKIP]) == asked
    assert clock() == now
    # other weights, another draft, a broken file, an old one: none of these times
    other = lively_model("llama", seed=1)
    for new, drafts in ((other, [LOOKUP, SKIP]), (lively_model("llama"), [LOOKUP])):
        before = clock()
        cost_tables(Sublayers(new), drafts, request((4,)))
        assert clock() > before
    whole = file.read_text()
    for told, age in (("{", 0), (whole.replace("[", "", 1), 0), (whole, 90 * 86400)):
        file.write_text(told)
        os.utime(file, (time.time() - age, time.time() - age))
        before = clock()
        cost_tables(Sublayers(lively_model("llama")), [LOOKUP, SKIP], request((4,)))
        assert clock() > before
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    cost_tables(Sublayers(lively_model("llama")), [LOOKUP, SKIP], request((4,)))


class Disturbed:
    """A clock's draft steps and verify passes that other work slows down, so many at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, drafts: int, passes: int) -> None:
        self.now = 0.0
        self.factors = random.Random(3)
        self.left = {"draft_step": drafts, "verify": passes}
        for name in self.left:
            monkeypatch.setattr(Passes, name, self._slower(name, getattr(Passes, name)))

    def _slower(self, name: str, whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def slower(passes: Passes, tokens: Tensor, *rest: Any) -> Tensor:
            if name == "verify":
                seconds = VERIFY[1 + max(offset for _, offset in rest[0])]
            else:
                seconds = DRAFT
            self.left[name] -= 1
            # by another factor each time, as other work comes and goes
            self.now += seconds * (self.factors.uniform(2, 9) if self.left[name] >= 0 else 1.0)
            return whole(passes, tokens, *rest)

        return slower


STEPS = 1 + 2 + 4 + 8  # of a sweep
RIGHT = DRAFT / VERIFY[1]


@pytest.mark.parametrize(
    ("drafts", "passes"), [(0, 0), (3 * STEPS, 0), (3 * STEPS, 3 * 6)], ids=["none", "steps", "all"]
)
@torch.no_grad()
def test_sweeps_go_on_while_other_work_shows(
    opened: Sublayers, monkeypatch: pytest.MonkeyPatch, drafts: int, passes: int
) -> None:
    """A table of two disturbed sweeps would turn drafting off; of more it is right."""
    other = Disturbed(monkeypatch, drafts=drafts, passes=passes)
    monkeypatch.setattr(rounds, "BUDGET", 1.0)
    monkeypatch.setattr(rounds, "_PATIENCE", 1.0)
    hasty = measure(opened, [SKIP], request(), now=lambda: other.now)
    monkeypatch.setattr(rounds, "_PATIENCE", 1e9)
    other.left = {"draft_step": drafts, "verify": passes}
    patient = measure(opened, [SKIP], request(), now=lambda: other.now)
    assert hasty is not None
    assert patient is not None
    assert hasty.disturbed() == bool(drafts)
    assert not patient.disturbed()
    # where two of a kind agree, they are right, nearly
    assert _one(patient).draft == pytest.approx(RIGHT, rel=rounds._REPEATED - 1)
    assert (len(patient.steps[0]) > 2) == bool(drafts)
    if drafts and not passes:
        assert _one(hasty).draft > 2 * RIGHT


@torch.no_grad()
def test_the_next_calls_measure_again_what_was_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Disturbed(monkeypatch, drafts=2 * STEPS, passes=0)
    monkeypatch.setattr(rounds, "_PATIENCE", 1.0)
    monkeypatch.setattr(costs, "measure", partial(measure, now=lambda: other.now))
    model = Sublayers(lively_model("llama"))
    asked = partial(cost_tables, drafts=[SKIP], request=request((40,)), seconds=1.0)
    calls = [asked(model) for _ in range(3)]
    assert calls[0][0].at(0).draft > 2 * RIGHT
    assert calls[1][0].at(0).draft == pytest.approx(RIGHT, rel=0.02)
    assert calls[2] is calls[1]
    other.left["draft_step"] = 10**9  # for good: then it is left at that
    model = Sublayers(lively_model("llama"))
    late = [asked(model) for _ in range(6)]
    assert late[-1] is late[-2] is late[costs._CALLS - 1] is not late[costs._CALLS - 2]


@pytest.mark.parametrize("bits", [8, 4])
def test_analytic_costs_of_low_precision(bits: Literal[8, 4]) -> None:
    """A byte a weight and a scale a row, or 16 bytes and a scale for 32 columns; norms whole."""
    opened = Sublayers(lively_model("llama", dtype=torch.float32), "modules")
    layer = opened.model.model.layers[0]

    def low(module: Any) -> int:
        (weight,) = module.parameters()
        rows, columns = weight.shape
        return rows * (columns + 2 if bits == 8 else math.ceil(columns / 32) * (16 + 2))

    norm = opened.model.model.norm.weight.nbytes
    attention, mlp = (
        sum(low(m) for m in block.children() if isinstance(m, torch.nn.Linear)) + norm
        for block in (layer.self_attn, layer.mlp)
    )
    skip = SkipConfig(attention=(1,), mlp=(2, 3), low=LowPrecision(bits=bits, mlp=(), head=True))
    exact = opened.weight_bytes()["sublayers"][1]
    want = (5 * attention + 4 * exact + low(opened.model.lm_head) + norm) / _read(opened.model)
    assert analytic(opened, skip).draft == pytest.approx(want)
    every = SkipConfig.low_precision(bits)
    whole = 6 * (attention + mlp) + low(opened.model.lm_head) + norm
    assert analytic(opened, every).draft == pytest.approx(whole / _read(opened.model))


class Quarter(Tensor):
    """A weight whose numbers are packed into a quarter of their bytes, as torchao packs them."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed"], None


def test_analytic_costs_count_bytes_not_numbers() -> None:
    """Of a weight in two bytes, in one, and packed by a subclass: what a pass reads of it."""
    model = lively_model("llama", dtype=torch.float32)
    skip = SkipConfig(attention=(1, 2), mlp=(4,))
    before = analytic(Sublayers(model, "modules"), skip).draft
    kept = model.model.layers[0].mlp
    draft = before * _read(model)
    saved = sum(each.nbytes for each in kept.parameters()) / 2
    kept.to(torch.bfloat16)
    after = analytic(Sublayers(model, "modules"), skip).draft
    assert after == pytest.approx((draft - saved) / (_read(model)))
    packed = kept.down_proj.weight.detach().float().as_subclass(Quarter)
    packed.packed = torch.zeros(packed.numel(), dtype=torch.uint8)  # type: ignore[attr-defined]
    assert architecture._bytes(packed) == packed.numel() == packed.nbytes // 4


def _read(model: Any) -> int:
    """Bytes of all sublayers and the head, as a step reads them."""
    read = [*model.model.layers, model.model.norm, model.lm_head]
    return sum(p.nbytes for module in read for p in module.parameters())
