"""Sublayer costs on clocks of the test's own, and cost tables from them; never timed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import lively_model, prompt
from torch import Tensor
from transformers import SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from layerskip.config import LowPrecision, SkipConfig
from layerskip.costs.pricing import LOW_FACTS, cost_table, low_facts, step_seconds
from layerskip.decoding.laws import Law
from layerskip.model.draft_head import TrimmedHead
from layerskip.model.sublayers import Sublayers
from layerskip.model.trained import save_trained
from layerskip.timing import sublayers as cost
from layerskip.timing.sublayers import disturbed, measure

LAYERS = 6
HEAD, REST = 7.0, 2.0
COUNTS = (1, 2, 3, 5)
PROMPTS = [prompt(5)[0], prompt(8)]


class Slow:
    """A temperature of 1 that takes time: once for all places of a pass."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __float__(self) -> float:
        return 1.0

    def __rtruediv__(self, scores: Any) -> Any:
        self.machine.time += REST
        return scores


def slow_warper(machine: Machine) -> TemperatureLogitsWarper:
    warper = TemperatureLogitsWarper(1.5)
    warper.temperature = Slow(machine)
    return warper


class Machine:
    """A model on which time passes in sublayers, heads and processors only, as told."""

    def __init__(self, batch_size: int = 1) -> None:
        self.time = 0.0
        self.rows = batch_size
        self.model = Sublayers(lively_model("llama"))
        self.model.blocks = tuple(
            self._slow(block, index) for index, block in enumerate(self.model.blocks)
        )
        head = self.model.head

        def slow_head(hidden: Tensor, step: Any) -> Tensor:
            count = hidden.shape[:-1].numel() // self.rows
            self.time += HEAD * (1 + 0.1 * (count - 1))
            return head(hidden, step)

        self.model.head = slow_head
        weights = self.model.weights
        weights._exact, weights._head = list(self.model.blocks), slow_head
        exact = weights._changed

        def slow_low(sublayer: int | None, skip: SkipConfig, bits: int | None) -> Any:
            """A third of the exact one's time, of the head a quarter."""
            block = exact(sublayer, skip, bits)

            def slow(hidden: Tensor, step: Any) -> Tensor:
                context = 16 if step.cache.start < 40 else 64
                self.time += (
                    HEAD / 4 if sublayer is None else self.seconds(sublayer, 1, context) / 3
                )
                return block(hidden, step)

            return slow

        weights._changed = slow_low  # type: ignore[method-assign]
        self.law = Law([slow_warper(self)], do_sample=True, rows=1)

    def seconds(self, index: int, count: int, context: float) -> float:
        """Of a sublayer: each its own, attention growing with the context."""
        attention = index % 2 == 0
        return (1 + index) * (1 + 0.2 * (count - 1)) + (0.01 * context if attention else 0.0)

    def _slow(self, block: Any, index: int) -> Any:
        def slow(hidden: Tensor, step: Any) -> Tensor:
            assert hidden.shape[0] == self.rows
            # the context the pass was asked for, not the few tokens it has grown by
            context = 16 if step.cache.start < 40 else 64
            self.time += self.seconds(index, hidden.shape[1], context)
            return block(hidden, step)

        return slow

    def now(self) -> float:
        return self.time

    def measure(self, **settings: Any) -> dict[str, Any]:
        return measure(
            self.model,
            PROMPTS,
            **(
                {"contexts": (16, 64), "counts": COUNTS, "law": self.law, "now": self.now}
                | {"budget": 1e-9, "batch_size": self.rows}
                | settings
            ),
        )


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_parts_are_what_the_clock_says(batch_size: int) -> None:
    machine = Machine(batch_size)
    record = machine.measure()
    assert record["kind"] == "cost"
    assert record["batch_size"] == batch_size
    assert record["contexts"] == [16, 64]
    assert record["counts"] == list(COUNTS)
    for c, context in enumerate((16, 64)):
        for n, count in enumerate(COUNTS):
            sublayers = [machine.seconds(i, count, context) for i in range(2 * LAYERS)]
            assert record["attention"][c][n] == pytest.approx(sublayers[::2])
            assert record["mlp"][c][n] == pytest.approx(sublayers[1::2])
            assert record["head"][c][n] == pytest.approx(HEAD * (1 + 0.1 * (count - 1)))
            assert record["rest"][c][n] == pytest.approx(REST)
            assert record["gap"][c][n] == pytest.approx(0.0)
            parts = sum(sublayers) + HEAD * (1 + 0.1 * (count - 1)) + REST
            assert record["passes"][c][n] == pytest.approx(parts)
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_low_precision_is_compared_with_plain_steps_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine at half its speed while low precision is timed does not make it dearer."""
    machine = Machine()
    quiet = machine.measure(low=SkipConfig.low_precision(8))
    run_low = cost._Sweeps._run_low

    def at_half_speed(self: Any, watch: Any, *, kept: bool) -> None:
        clocks = self, self.probe, watch
        for each in clocks:
            each.now = lambda: 2 * machine.time
        run_low(self, watch, kept=kept)
        for each in clocks:
            each.now = machine.now

    monkeypatch.setattr(cost._Sweeps, "_run_low", at_half_speed)
    busy = machine.measure(low=SkipConfig.low_precision(8))
    for name in ("low_attention", "low_mlp", "low_head", "draft_rest", "passes"):
        for here, there in zip(busy[name], quiet[name], strict=True):
            assert here == pytest.approx(there)


def test_trimmed_heads_are_timed_in_draft_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    views: list[int] = []

    class Slow(TrimmedHead):
        """Takes a twentieth of a second for each row."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            spread = self.spread

            def slow(logits: Tensor) -> Tensor:
                views.append(self.weight.data_ptr())
                machine.time += 0.05 * len(self.tokens)
                return spread(logits)

            self.spread = slow

    monkeypatch.setattr(cost, "TrimmedHead", Slow)
    record = machine.measure()
    assert record["vocabulary"] == 97
    assert record["head_sizes"] == [6, 12, 24, 48]  # a sixteenth to a half
    for c in range(2):
        assert record["trimmed_head"][c] == pytest.approx([0.3, 0.6, 1.2, 2.4])
        assert record["draft_rest"][c] == pytest.approx(REST)  # as without them
        assert record["repeated"][c] == pytest.approx([1.0])
    assert len(set(views)) == 4  # no row is in two of them
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_low_precision_is_timed_in_drafts_of_everything_low() -> None:
    machine = Machine()
    record = machine.measure(low=SkipConfig.low_precision(8))
    assert record["low_bits"] == 8
    for c, context in enumerate((16, 64)):
        sublayers = [machine.seconds(i, 1, context) / 3 for i in range(2 * LAYERS)]
        assert record["low_attention"][c] == pytest.approx(sublayers[::2])
        assert record["low_mlp"][c] == pytest.approx(sublayers[1::2])
        assert record["low_head"][c] == pytest.approx(HEAD / 4)
        assert len(record["low_trimmed_head"][c]) == len(record["head_sizes"])
        assert record["draft_rest"][c] == pytest.approx(REST)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert not any(name.startswith("low_") for name in Machine().measure())


def test_a_table_prices_what_is_low() -> None:
    machine = Machine()
    record = machine.measure(low=SkipConfig.low_precision(8))
    one = [machine.seconds(i, 1, 16) for i in range(2 * LAYERS)]
    step = sum(one) + HEAD + REST
    for low in (LowPrecision(), LowPrecision(head=False), LowPrecision(attention=(1, 3), mlp=())):
        skip = SkipConfig(attention=(4,), mlp=(2, 3), low=low)
        table = cost_table(record, skip, context=16)
        draft = HEAD / 4 if low.head else HEAD
        rounded = skip.rounded(LAYERS)
        draft += sum(one[i] / 3 if i in rounded else one[i] for i in skip.kept(LAYERS))
        assert table.draft == pytest.approx((draft + REST) / step)
        prefix = skip.shared_prefix(LAYERS)
        many = [machine.seconds(i, 3, 16) for i in range(2 * LAYERS)]
        verify = sum(one[:prefix]) + sum(many[prefix:]) + REST + 1.2 * HEAD
        assert table.verify_cost(3) == pytest.approx(verify / step)


def test_what_is_low_is_repeated_as_much_as_where_it_was_timed() -> None:
    """A draft of everything low costs what was measured; a short one is cheaper by its share."""
    record = Machine().measure(low=SkipConfig.low_precision(8))
    step, cheaper = step_seconds(record, 16), record | {"repeated": [[0.5], [0.5]]}
    (share,) = record["repeated_shares"][0]
    every, few = SkipConfig.low_precision(), SkipConfig(exit_layer=1, low=LowPrecision())
    plain, dear = (cost_table(r, every, context=16).draft for r in (record, cheaper))
    assert dear == pytest.approx(plain)
    plain, cheap = (cost_table(r, few, context=16).draft for r in (record, cheaper))
    whole = sum(sum(record[name][0][0]) for name in ("attention", "mlp"))
    there = sum(sum(record[f"low_{name}"][0]) for name in ("attention", "mlp")) / whole
    factor = 0.5 + 0.5 * max(0.0, (there - share) / (1 - share))
    assert cheap == pytest.approx(0.5 / factor * (plain - REST / step) + REST / step)


def test_a_factor_of_which_noise_left_nothing_has_a_price_all_the_same() -> None:
    record = Machine().measure(low=SkipConfig.low_precision(8)) | {"repeated": [[0.0], [0.0]]}
    there = 0.9 * record["repeated_shares"][0][0]
    for name in ("attention", "mlp"):  # what is low was timed where the factor is 0
        whole = [times[0] for times in record[name]]
        record[f"low_{name}"] = [[there * each for each in times] for times in whole]
    record["low_head"] = [0.0, 0.0]
    for skip in (SkipConfig.early_exit(1), SkipConfig(exit_layer=1, low=LowPrecision())):
        assert 0 < cost_table(record, skip, context=16).draft < 1


def test_low_precision_without_a_price_is_told() -> None:
    exact, low = Machine().measure(), Machine().measure(low=SkipConfig.low_precision(4))
    with pytest.raises(ValueError, match="know no low precision, so that 8 bits have no price"):
        cost_table(exact, SkipConfig.low_precision())
    with pytest.raises(ValueError, match="of 4 bits only, so that 8 bits have no price"):
        cost_table(low, SkipConfig.low_precision())
    skip = SkipConfig(exit_layer=2, low=LowPrecision(bits=4, mlp=()))
    assert cost_table(low, skip, draft_vocabulary=24).draft < cost_table(low, skip).draft


def test_what_heals_is_priced_with_what_it_heals(tmp_path: Path) -> None:
    machine = Machine()
    head = LowPrecision(bits=4, head=8)
    trained = save_trained(tmp_path / "draft.safetensors", {}, "healed", machine.model.model)
    whole = SkipConfig(low=head, trained=trained)
    asked: list[Any] = []
    rounded = machine.model.weights._changed

    def noted(sublayer: int | None, skip: SkipConfig, bits: int | None) -> Any:
        asked.append(skip.trained)
        return rounded(sublayer, skip, bits)

    machine.model.weights._changed = noted  # type: ignore[method-assign]
    record = machine.measure(low=whole)
    assert set(asked) == {trained}  # timed as they will run
    facts = {"low_bits": 4, "low_head_bits": 8, "healed": trained.hash}
    assert low_facts(whole) == facts == {name: record[name] for name in LOW_FACTS}
    assert json.loads(json.dumps(record)) == record
    skip = replace(whole, attention=(2,), mlp=(3,))
    unhealed = {name: value for name, value in record.items() if name != "healed"}
    assert cost_table(record, skip) == cost_table(unhealed, replace(skip, trained=None))
    low_head = SkipConfig(attention=(2,), low=LowPrecision(bits=4, attention=(), mlp=(), head=8))
    assert cost_table(record, low_head).draft < cost_table(record, SkipConfig(attention=(2,))).draft
    for wrong, message in (
        (replace(skip, trained=None), "are of drafts that other weights heal, or none"),
        (replace(skip, trained=replace(trained, hash="0" * 64)), "that other weights heal"),
        (replace(skip, low=LowPrecision(bits=4)), "know a head in 8 bits only, so that 4 bits"),
        (replace(skip, trained=replace(trained, kind="heads")), "do not price trained heads; time"),
    ):
        with pytest.raises(ValueError, match=message):
            cost_table(record, wrong)
    with pytest.raises(ValueError, match="are of drafts that other weights heal, or none"):
        cost_table(unhealed, skip)
    with pytest.raises(ValueError, match="read off a draft of everything low"):
        machine.measure(low=skip)


def test_a_draft_vocabulary_has_a_price() -> None:
    record = Machine().measure() | {"trimmed_head": [[0.3, 0.6, 1.2, 2.4], [0.5, 0.6, 1.2, 2.4]]}
    skip, step = SkipConfig.early_exit(2), step_seconds(record, 16)
    whole = cost_table(record, skip, 16)
    prices = {3: 0.3, 6: 0.3, 18: 0.9, 48: 2.4, 97: HEAD}  # lines in between, flat below
    for size, seconds in prices.items():
        table = cost_table(record, skip, 16, draft_vocabulary=size)
        assert whole.draft - table.draft == pytest.approx((HEAD - seconds) / step)
        assert table.verify == whole.verify
    between = cost_table(record, skip, 40, draft_vocabulary=6)
    assert between.draft < cost_table(record, skip, 40).draft
    del record["trimmed_head"]
    with pytest.raises(ValueError, match="no trimmed head"):
        cost_table(record, skip, 16, draft_vocabulary=6)


def test_a_head_that_cannot_be_trimmed_has_no_such_price() -> None:
    model = lively_model("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    record = measure(model, PROMPTS, contexts=(16,), counts=(1, 3), budget=1e-9)
    assert not record.keys() & {"trimmed_head", "head_sizes", "vocabulary"}


def test_a_law_that_ends_drafts_ends_no_measurement() -> None:
    """It forbids the tokens of the first head: the others are taken for whole ones."""
    forbidden = SuppressTokensLogitsProcessor(list(range(6)), device="cpu")
    law = Law([forbidden], do_sample=False, rows=1)
    how: dict[str, Any] = {"contexts": (16,), "counts": (1, 3), "budget": 1e-9}
    record = measure(lively_model("llama"), PROMPTS, law=law, **how)
    assert record["trimmed_head"][0][1:] == [record["head"][0][0]] * 3


def test_a_table_prices_the_parts_of_a_round() -> None:
    """One draft step, and a verify pass that starts at the end of the shared prefix."""
    machine = Machine()
    record = machine.measure()
    for skip in (
        SkipConfig.early_exit(2),
        SkipConfig(attention=(1, 4), mlp=(3,)),
        SkipConfig(attention=(0, 3)),
    ):
        table = cost_table(record, skip, context=16)
        kept, prefix = skip.kept(LAYERS), skip.shared_prefix(LAYERS)
        one = [machine.seconds(i, 1, 16) for i in range(2 * LAYERS)]
        step = sum(one) + HEAD + REST
        assert step == pytest.approx(step_seconds(record, 16))
        assert table.draft == pytest.approx((sum(one[i] for i in kept) + HEAD + REST) / step)
        for count in (2, 3, 5):
            many = [machine.seconds(i, count, 16) for i in range(2 * LAYERS)]
            verify = sum(one[:prefix]) + sum(many[prefix:]) + REST
            verify += HEAD * (1 + 0.1 * (count - 1))
            assert table.verify_cost(count) == pytest.approx(verify / step)
        between = (table.verify_cost(3) + table.verify_cost(5)) / 2
        assert table.verify_cost(4) == pytest.approx(between)
        assert table.verify_cost(1) == 1.0
        assert table.source == "measured"


def test_contexts_in_between_lie_on_a_line() -> None:
    machine = Machine()
    record = machine.measure()
    steps = {context: step_seconds(record, context) for context in (1, 16, 28, 64, 1000)}
    assert steps[64] - steps[16] == pytest.approx(LAYERS * 0.48)
    assert steps[28] == pytest.approx(steps[16] + 0.25 * (steps[64] - steps[16]))
    assert steps[1] == steps[16]
    assert steps[1000] == steps[64]
    assert step_seconds(record) == pytest.approx((steps[16] + steps[64]) / 2)


def test_a_busy_machine_shows() -> None:
    record = Machine().measure()
    assert not disturbed(record)
    assert not disturbed(record | {"repeated": [[1.1], [0.5]]})
    assert disturbed(record | {"repeated": [[1.0], [1.8]]})  # drafts dearer than what they run
    assert not disturbed(record | {"gap": [[0.0, 0.09], [-0.05, 0.0]]})
    assert disturbed(record | {"gap": [[0.0, 0.0], [0.0, -0.4]]})


def test_what_is_repeated_may_be_cheaper() -> None:
    record = Machine().measure()
    assert [len(shares) for shares in record["repeated_shares"]] == [1, 1]  # exit 3 of 6 layers
    assert record["repeated"][0] == pytest.approx([1.0])
    cheaper = record | {"repeated": [[0.5], [0.5]]}
    three = SkipConfig.early_exit(3)
    step = step_seconds(record, 16)
    dear, cheap = (cost_table(r, three, context=16).draft for r in (record, cheaper))
    assert cheap == pytest.approx((dear + REST / step) / 2)
    # a shorter draft repeats as much; a draft of everything nothing
    for skip, factor in ((SkipConfig.early_exit(1), 0.5), (SkipConfig(), 1.0)):
        dear, cheap = (cost_table(r, skip, context=16).draft for r in (record, cheaper))
        assert cheap == pytest.approx(factor * (dear - REST / step) + REST / step)


def test_other_work_and_notes_that_take_time_are_left_out() -> None:
    """Other work that comes by the clock, and clocks that take time themselves."""
    machine = Machine()
    asked, due = machine.now, [0.0]

    def now() -> float:
        if machine.time > due[0]:
            machine.time += 50.0  # other work
            due[0] = machine.time + 437.0
        machine.time += 0.05  # reading the clock
        return asked()

    record = machine.measure(now=now, budget=20000.0)
    parts = [
        sum(record[name][0][0]) if name in ("attention", "mlp") else record[name][0][0]
        for name in ("attention", "mlp", "head", "rest")
    ]
    assert sum(parts) == pytest.approx(record["passes"][0][0])
    assert record["gap"][0][0] == pytest.approx(0.02, abs=0.02)
    clean = Machine().measure()
    for name in ("attention", "mlp"):
        for noisy, quiet in zip(record[name][0][0], clean[name][0][0], strict=True):
            assert noisy == pytest.approx(quiet, rel=0.05)


def test_a_longer_pass_is_never_cheaper() -> None:
    record = Machine().measure()
    record["rest"][0][2] -= 30.0  # noise at 3 tokens
    table = cost_table(record, SkipConfig.early_exit(2), context=16)
    assert table.verify_cost(3) == table.verify_cost(2)
    assert list(table.verify) == sorted(table.verify)


def test_the_budget_ends_the_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int] = []
    run = cost._Sweeps.run
    monkeypatch.setattr(
        cost._Sweeps, "run", lambda self, number: (sweeps.append(number), run(self, number))
    )
    machine = Machine()
    shares: list[float] = []
    machine.measure(contexts=(16,), progress=lambda words, share: shares.append(share))
    assert sweeps == [0, 1, 2]
    one_sweep = machine.time / 3
    assert all(0 <= share <= 1 for share in shares)
    machine.measure(contexts=(16, 64), budget=11.5 * one_sweep)
    assert 8 <= len(sweeps) - 3 <= 12


def test_the_model_is_left_as_it_was() -> None:
    opened = Sublayers(lively_model("gemma2"))
    before = dict(opened.__dict__)
    measure(opened, PROMPTS, contexts=(16,), counts=(1, 3), budget=1e-9)
    assert opened.__dict__ == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": ()}, "hold 1"),
        ({"counts": (2, 3)}, "hold 1"),
        ({"counts": (0, 1)}, "hold 1"),
        ({"contexts": (400,)}, r"contexts must be in 1\.\."),
        ({"budget": 0.0}, "budget must be more than 0"),
        ({"prompts": []}, "at least one"),
        ({"prompts": [torch.zeros(0, dtype=torch.long)]}, "at least one"),
    ],
)
def test_bad_input_is_told(change: dict[str, Any], message: str) -> None:
    settings = {"prompts": PROMPTS} | change
    with pytest.raises(ValueError, match=message):
        measure(lively_model("llama"), settings.pop("prompts"), **settings)
    with pytest.raises(ValueError, match="6-layer"):
        cost_table(Machine().measure(), SkipConfig.early_exit(9))
