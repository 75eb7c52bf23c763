"""The cost model on made-up machines with simulated clocks. Nothing real is timed."""

import json
import math
import os
import random
import time

import pytest
import torch
from cost_records import analytic, cost_record, cost_table, prices_of, step_seconds
from machines import MACHINES, Machine
from marks import thorough
from models import lively_model, prompt, pure, ragged
from torch import Tensor
from transformers import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from layerskip.config.skips import SINK, LowPrecision, SkipConfig
from layerskip.costs.cost_model import Rates, TimingPoint, Traffic, fitted, interpolated
from layerskip.costs.speculation import keys_read
from layerskip.decoding.engine import Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.sources import source_of
from layerskip.decoding.sources.lookup import Lookup
from layerskip.families import architecture
from layerskip.model.opened_models import Sublayers
from layerskip.timing import cost_tables as timing_tables
from layerskip.timing.cost_tables import cost_tables
from layerskip.timing.sublayer_costs import measure

LAYERS = 6
SKIP = SkipConfig.early_exit(2).resolve(LAYERS)
SKIPS = [
    skip.resolve(LAYERS)
    for skip in (
        SkipConfig.early_exit(1),
        SkipConfig.early_exit(4),
        SkipConfig(attention=(1, 4), mlp=(3,)),
        SkipConfig(attention=(0, 3)),
        SkipConfig(attention=(2, 3), mlp=(2, 3)),
    )
]


NOISES = [*zip(MACHINES, (0.0, 0.05) * 2, strict=True)]
CASES = [*NOISES, *thorough(*((name, 0.05 - noise) for name, noise in NOISES))]


@pytest.fixture(autouse=True)
def as_many_sweeps_as_users_get(sizes):
    sizes(sweeps=12)


def request(lengths=(40,), *, sample=False, processors=(), new_tokens=5):
    ids, mask = ragged(lengths, seed=1)
    return Request(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        law=Law(processors, do_sample=sample, rows=len(lengths)),
        keys=[stream_key(row) for row in range(len(lengths))],
        eos=frozenset(range(97)),
        stop=lambda row, seen: pytest.fail("what is timed is not the request's text"),
    )


def machine(name="Zen 4", noise=0.0, **overrides):
    how = {"num_key_value_heads": 1, "intermediate_size": 2048, "dtype": torch.float32}
    how |= {"max_position_embeddings": 1024} | overrides
    return Machine(lively_model("llama", **how), noise=noise, **MACHINES[name])


@torch.no_grad()
def costs_of(of, drafts, asked=None, seconds=1.0):
    return cost_tables(of.opened, drafts, asked or request(), seconds=seconds, now=of.now)


def tables(of, *drafts, asked=None, seconds=None):
    with torch.no_grad():
        return [each.at(0) for each in costs_of(of, drafts, asked, seconds)]


def spent(of, *drafts, asked=None, seconds=None):
    before = of.now()
    tables(of, *drafts or (SKIP,), asked=asked, seconds=seconds)
    return of.now() - before


# ---- What decoding measures ----


@pytest.fixture(autouse=True)
def long_calls(monkeypatch):
    """Let short calls spend as much time on measuring as long ones may."""
    monkeypatch.setattr(timing_tables, "_SHARE", math.inf)


@pytest.mark.parametrize(("name", "noise"), CASES)
def test_any_number_of_rows_and_tokens_at_any_context_is_priced(name, noise):
    """Passes of one row and of four after a short context are timed, and each source's steps."""
    of = machine(name, noise)
    off = 0.03 + 2 * noise
    for skip in SKIPS:
        looked_up, own = costs_of(of, [Lookup(), skip], request((40, 4, 9, 9)))
        for rows in (1, 2, 4, 8):
            got, free = own.at(0, rows), looked_up.at(0, rows)
            assert free.draft == 0.0
            assert got.source == "measured"
            assert got.draft == pytest.approx(
                of.draft(skip, 32, rows), rel=off + (0.15 if rows == 8 else 0.05)
            )
            for tokens in (2, 4, 8, 12):
                true = of.verify(tokens, SkipConfig(attention=(0,)).resolve(LAYERS), 32, rows)
                sharp = 0.12 if rows * tokens > 2 else 0.0  # the fit misses the sharp bend
                assert free.verify_cost(tokens) == pytest.approx(true, rel=off + sharp)
                true = of.verify(tokens, skip, 32, rows)
                assert got.verify_cost(tokens) == pytest.approx(true, rel=off + sharp)


def test_a_long_context_is_measured_where_a_call_gets_near_it():
    """No keys are computed for it. Otherwise keys are assumed to cost as much as weights."""
    of = machine("Intel", max_position_embeddings=6000)
    short, long = (costs_of(of, [SKIP], request((length,)))[0] for length in (4, 1100))
    for context in (800, 3000, 5500):
        assert long.at(context).draft == pytest.approx(of.draft(SKIP, context), rel=0.04)
        true = of.seconds(1, 1, context) / of.seconds(1, 1, 32)
        assert long.at(context).step / long.at(0).step == pytest.approx(true, rel=0.05)
    assert short.at(5500).step < 0.8 * long.at(5500).step


def test_a_call_that_nobody_asked_for_costs_spends_little_on_them():
    """Later calls continue. Until a plain step has been timed, costs follow from bytes."""
    of = machine()
    of.rest = 0.03e9  # a tenth of the budget
    seconds = [spent(of, SKIP) for _ in range(12)]
    assert 0.1 < max(seconds) < 0.3 + 6 * 0.04
    assert not any(seconds[-3:])
    assert tables(of, SKIP)[0].draft == pytest.approx(of.draft(SKIP, 32), rel=0.02)


def test_a_short_call_spends_a_share_of_its_own_time(monkeypatch, tmp_path):
    """Later calls continue measuring, and so do other processes."""
    monkeypatch.setattr(timing_tables, "_SHARE", 0.05)
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path))
    of = machine()
    seconds = [spent(of, SKIP, asked=request(new_tokens=200)) for _ in range(12)]
    assert not seconds[-1]
    assert max(seconds) < 7 * of.seconds(1, 1, 32) / 1e9  # of 200 steps
    assert spent(machine(), SKIP, asked=request(new_tokens=200)) == 0
    assert spent(machine(seed=1), SKIP, asked=request(new_tokens=20)) == 0


def test_passes_longer_than_those_timed_are_not_free():
    traffic = {"own": Traffic((100.0,), {})}
    table = fitted({TimingPoint(1, 4): {(None, 1): 1.0, (None, 2): 1.0}}, traffic)
    assert table.table(traffic["own"], "own", 0, 1).verify_cost(16) == 2.0


def test_before_anything_was_timed_more_tokens_cost_more():
    of = machine(max_position_embeddings=32)  # too short to time rounds
    eight = costs_of(of, [SKIP], request(lengths=(3,) * 8), seconds=None)[0].at(0, 8)
    assert eight.source == "analytic"
    assert eight.verify_cost(9) > 2.5


def test_costs_are_measured_once_for_each_model_and_kind_of_law():
    of = machine()
    warm, repeating = TemperatureLogitsWarper(0.5), RepetitionPenaltyLogitsProcessor(1.5)
    assert spent(of) > 0
    # nothing new: another prompt, an equal config, another temperature, lookups
    assert spent(of, asked=request((9,))) == 0
    assert spent(of, SkipConfig(attention=(2, 3, 4, 5), mlp=(2, 3, 4, 5)).resolve(LAYERS)) == 0
    assert spent(of, asked=request(processors=(warm,))) == 0
    assert spent(of, Lookup(), SKIP) == 0
    for asked in (request(sample=True), request(processors=(repeating,)), request((4, 4))):
        assert spent(of, asked=asked) > 0
    assert spent(of, SkipConfig.early_exit(3)) > 0
    # numbers of rows up to the same power of two share their costs
    assert spent(of, asked=request((4,) * 7)) > 0
    assert spent(of, asked=request((4,) * 8)) == 0


def test_a_users_own_functions_are_not_called_with_the_text_that_is_timed():
    @pure
    def own(ids, scores):
        pytest.fail("called while costs were measured")

    constraint = PrefixConstrainedLogitsProcessor(lambda row, seen: [], 1)
    asked = request(processors=(own, constraint, TemperatureLogitsWarper(0.5)), sample=True)
    assert tables(machine(), SKIP, asked=asked)[0].source == "measured"


def test_no_room_to_measure():
    of = machine(max_position_embeddings=48)
    assert [each.source for each in tables(of, SKIP, Lookup())] == ["analytic"] * 2


def test_times_serve_the_next_process(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path))
    asked = tables(machine(), Lookup(), SKIP, seconds=1.0)
    (file,) = (tmp_path / "costs").iterdir()
    again = machine()  # as in another process
    kept = tables(again, Lookup(), SKIP)
    assert [each.draft for each in kept] == pytest.approx([each.draft for each in asked])
    assert again.now() == 0
    # another draft is timed and kept in the same file; other weights have a file of their own
    assert spent(again, SkipConfig.early_exit(3)) > 0
    assert spent(machine()) == 0
    assert spent(machine(seed=1)) > 0
    whole = file.read_text()
    lines = json.loads(whole)
    disturbed = json.dumps([[*each, (1 + i % 2) * t] for i, (*each, t) in enumerate(lines)])
    broken, day = whole.replace("[", "", 1), 86400
    olds = [(whole, 29, False), (whole, 31, True), (disturbed, 0, False), (disturbed, 2, True)]
    for told, age, timed in (("{", 0, True), (broken, 0, True), *olds):
        file.write_text(told)
        os.utime(file, (time.time() - age * day, time.time() - age * day))
        assert (spent(machine(), seconds=1.0) > 0) is timed
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    assert tables(machine(), SKIP, seconds=1.0)


@pytest.mark.parametrize("busy", [0, 60])
def test_sweeps_go_on_while_other_work_shows(busy):
    """Other work slows the first passes by random factors. Two sweeps would measure that work."""
    of = machine()
    run, draws, left = of.run, random.Random(3), [busy]

    def disturbed(hidden, step, blocks):
        before = of.time
        out = run(hidden, step, blocks)
        left[0] -= 1
        of.time += (of.time - before) * (draws.uniform(1, 8) if left[0] >= 0 else 0.0)
        return out

    of.run = disturbed
    (table,) = tables(of, SKIP, seconds=0.3)
    assert table.draft == pytest.approx(of.draft(SKIP, 32), rel=0.25)
    assert left[0] < 0


def test_sources_that_are_timed_at_another_pace_are_priced_alike():
    of = machine()
    tables(of, SKIPS[0], seconds=1.0)
    now = of.now
    of.now = lambda: 1.8 * now()
    for skip in SKIPS[1:3]:
        (table,) = tables(of, skip, seconds=1.0)
        assert table.draft == pytest.approx(of.draft(skip, 32), rel=0.05)


# ---- The numbers of a machine ----


def test_rates_follow_what_was_timed():
    traffic = {"own": Traffic((100.0,), {None: 1.0}, 40.0, {None: 0.5})}
    near = {(None, 1): 1.0, (None, 2): 1.2, (None, 4): 1.1, (None, 8): 1.6, ("own", 0): 0.5}
    four = {(None, 1): 1.75, (None, 4): 3.35}
    far = {(None, 1): 3.0, (None, 2): 3.35}
    rates = fitted(
        {TimingPoint(1, 0): near, TimingPoint(4, 0): four, TimingPoint(1, 50): far}, traffic
    )
    assert rates.byte == pytest.approx(0.01)
    assert rates.growth == pytest.approx({1: 1.0, 2: 1.15, 4: 1.15, 8: 1.6, 16: 2.75})
    assert rates.row == pytest.approx(0.2)
    assert rates.key_byte == pytest.approx(2 / 50)
    assert rates.key_growth == pytest.approx({1: 1.0, 2: 1.075})
    assert rates.steps["own"][1] == pytest.approx(0.5 / 0.4)
    table = rates.table(traffic["own"], "own", 0, 1)
    assert table.draft == pytest.approx(0.5)
    assert table.verify[:4] == pytest.approx((1.0, 1.15, 1.15, 1.15))
    assert rates.table(traffic["own"], "another", 0, 1).draft == pytest.approx(0.4)
    # sublayers that steps have already run cost one token
    rates = Rates(growth={1: 1.0, 16: 4.0})
    for prefix, longest in ((0.0, 4.0), (50.0, 2.5)):
        part = Traffic((100.0,), {}, 50.0, {}, prefix)
        assert rates.table(part, None, 0, 1).verify[-1] == pytest.approx(longest)


def test_numbers_lie_on_lines_between_and_beyond():
    points = {1: 1.0, 2: 1.5, 4: 2.0}
    want = {0.5: 1, 1: 1, 1.5: 1.25, 2: 1.5, 3: 1.75, 4: 2, 8: 3}
    assert {n: interpolated(points, n) for n in want} == want
    assert interpolated({3: 7.0}, 9) == 7.0


def test_a_pass_reads_the_keys_that_its_layers_see():
    per_token = 2 * 2 * 8 * 8  # keys and values, heads, width, bytes
    llama = Sublayers(lively_model("llama"))
    assert llama.key_bytes() == {None: 6 * per_token}
    assert source_of(llama, SKIP).key_bytes() == {None: 2 * per_token}
    scattered = SkipConfig(attention=(1, 3)).resolve(6)
    assert source_of(llama, scattered).key_bytes() == {None: 4 * per_token}
    near = source_of(llama, SkipConfig(window=16).resolve(6))
    assert near.key_bytes() == {SINK + 16: 6 * per_token}
    assert Lookup().key_bytes() == {}
    assert keys_read({None: 3.0, 8: 5.0}, 6) == 48.0
    assert keys_read({None: 3.0, 8: 5.0}, 100) == 340.0


@pytest.mark.parametrize("bits", [8, 4])
def test_analytic_costs_of_low_precision(bits):
    """Units of 32 columns take 32 bytes and each row has a scale, or 18 bytes. Norms are exact."""
    opened = Sublayers(lively_model("llama", dtype=torch.float32), "modules")
    layer = opened.model.model.layers[0]

    def low(module):
        (weight,) = module.parameters()
        rows, columns = weight.shape
        units = math.ceil(columns / 32)
        return rows * (units * 32 + 2 if bits == 8 else units * (16 + 2))

    norm = opened.model.model.norm.weight.nbytes
    attention, mlp = (
        sum(low(m) for m in block.children() if isinstance(m, torch.nn.Linear)) + norm
        for block in (layer.self_attn, layer.mlp)
    )
    skip = SkipConfig(attention=(1,), mlp=(2, 3), low=LowPrecision(bits=bits, mlp=(), head=True))
    exact = opened.weight_bytes()["sublayers"][1]
    want = (5 * attention + 4 * exact + low(opened.model.lm_head) + norm) / _read(opened.model)
    assert analytic(opened, skip).draft == pytest.approx(want)
    whole = 6 * (attention + mlp) + low(opened.model.lm_head) + norm
    every = analytic(opened, SkipConfig.low_precision(bits))
    assert every.draft == pytest.approx(whole / _read(opened.model))
    assert (every.verify, every.source) == ((1.0,), "analytic")


class Quarter(Tensor):
    """A weight packed into a quarter of its bytes, like those of torchao."""

    def __tensor_flatten__(self):
        return ["packed"], None


def test_analytic_costs_count_bytes_not_numbers():
    """A pass reads 4, 2 or 1 bytes per weight: float32, bfloat16, or packed by a subclass."""
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
    packed.packed = torch.zeros(packed.numel(), dtype=torch.uint8)
    assert architecture._bytes(packed) == packed.numel() == packed.nbytes // 4


def _read(model):
    """Bytes of all sublayers and the head, as read by a step."""
    read = [*model.model.layers, model.model.norm, model.lm_head]
    return sum(p.nbytes for module in read for p in module.parameters())


# ---- The record that prices any skip config ----


def recorded(of, **how):
    settings = {"contexts": (64,), "budget": 1.0, "now": of.now} | how
    record = measure(of.opened, [prompt(5)[0]], **settings)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    return record


@pytest.mark.parametrize(("name", "noise"), CASES)
def test_one_record_prices_every_skip_config(name, noise):
    of = machine(name, noise)
    record = recorded(of)
    off = 0.04 + 2 * noise
    for skip in SKIPS:
        table = cost_table(record, skip, 16)
        assert table.draft == pytest.approx(of.draft(skip, 16), rel=off)
        for tokens in (2, 4, 8):
            rough = off + (0.12 if tokens > 2 else 0.0)
            true = of.verify(tokens, skip, 16)
            assert table.verify_cost(tokens) == pytest.approx(true, rel=rough)
        assert list(table.verify) == sorted(table.verify)
        assert (table.source, table.verify_cost(1)) == ("measured", 1.0)
    assert prices_of(record, SkipConfig())[0].passes.draft == 0
    assert 0 < record["spread"] < 0.05 if noise else record["spread"] < 1e-9
    assert not record["busy"]


def test_a_record_follows_the_context():
    of = machine("Intel", max_position_embeddings=3000)
    record = recorded(of, contexts=(64, 2000, 10**6))
    assert record["contexts"] == [64, 2000]
    for context in (100, 1000, 4000):
        true = of.seconds(1, 1, context) / of.seconds(1, 1, 4)
        assert step_seconds(record, context) / step_seconds(record, 4) == pytest.approx(true, 0.03)
        assert cost_table(record, SKIP, context).draft == pytest.approx(
            of.draft(SKIP, context), rel=0.05
        )


def test_low_precision_is_priced_by_a_draft_of_everything_low():
    of = machine()
    low = SkipConfig.low_precision(8).resolve(LAYERS)
    record = recorded(of, low=low)
    assert record["low_bits"] == 8
    whole = of.low * len(of.weights) / of.seconds(1, 1, 0)
    assert cost_table(record, low, 4).draft == pytest.approx(whole, rel=0.05)
    some = SkipConfig(attention=(4,), low=LowPrecision(mlp=(), head=False))
    assert whole < cost_table(record, some, 4).draft < cost_table(record, SkipConfig(), 4).draft
    assert not any(name.startswith("low_") for name in recorded(of))


def test_a_rounded_head_costs_less():
    four = LowPrecision(bits=4, head=8)
    record = cost_record() | dict.fromkeys(("low_attention", "low_mlp"), [3e-4] * 6)
    record |= {"low_head": 1e-4, "low_bits": 4}
    low_head = SkipConfig(attention=(2,), low=LowPrecision(bits=4, attention=(), mlp=()))
    assert cost_table(record, low_head).draft < cost_table(record, SkipConfig(attention=(2,))).draft
    with pytest.raises(ValueError, match="are measured on drafts with everything low"):
        measure(lively_model("llama"), [prompt(5)[0]], low=SkipConfig(mlp=(3,), low=four))


def test_a_draft_vocabulary_costs_its_share_of_the_head():
    record = cost_record(head=6e-3) | {"vocabulary": 97}
    whole, step = cost_table(record, SKIP), step_seconds(record)
    for size in (3, 48, 97):
        table = cost_table(record, SKIP, size=size)
        assert whole.draft - table.draft == pytest.approx(6e-3 * (1 - size / 97) / step)
        assert table.verify == whole.verify
    with pytest.raises(ValueError, match="no trimmed head"):
        cost_table(cost_record(), SKIP, size=6)
    assert recorded(machine())["vocabulary"] == 97
    model = lively_model("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    record = measure(model, [prompt(5)[0]], contexts=(16,), budget=0.01)
    assert "vocabulary" not in record


def test_timings_are_repeated_until_their_medians_agree(monkeypatch):
    """Noise takes more repeats; other work that slows the draft in a few of them is outvoted."""
    low, quiet, noisy, busy = SkipConfig.low_precision(8), machine(), machine(noise=0.3), machine()
    low, how = low.resolve(LAYERS), {"budget": 20.0}
    true = cost_table(recorded(quiet, low=low, **how), low).draft
    assert recorded(noisy, low=low, **how)["spread"] > 0.01
    assert quiet.now() < 5.0 < noisy.now() < 22.0
    cost, end = Machine.low.fget, 0.3 * quiet.now()
    slow = property(lambda of: cost(of) * (2.0 if of.now() < end else 1.0))
    monkeypatch.setattr(Machine, "low", slow)
    record = recorded(busy, low=low, **how)
    assert cost_table(record, low).draft == pytest.approx(true, rel=0.03)


def test_a_busy_machine_shows_and_the_model_is_left_as_it_was(monkeypatch):
    opened = Sublayers(lively_model("gemma2"))
    before = dict(opened.__dict__)
    monkeypatch.setattr(Sublayers, "limited", True)
    assert measure(opened, [prompt(5)[0]], contexts=(16,), budget=0.01)["busy"]
    assert opened.__dict__ == before
