"""Several skip configs in one decoding: which one drafts, and how they are named.

That texts do not depend on them is tested in `test_random_cases.py`.
"""

import looped
import pytest
from models import lively_model, ragged

from layerskip import LayerSkipDecoding, SkipConfig, generate
from layerskip.bench.methods import Engine, Task
from layerskip.costs.speculation import CostTable
from layerskip.decoding.expected_gain import ExpectedGain
from layerskip.replay.replayed_drafts import replay
from layerskip.replay.simulation import simulate

EXITS = [SkipConfig.early_exit(2), SkipConfig.early_exit(4)]
DEAR, CHEAP = CostTable(0.9, (1.0, 1.05, 1.1)), CostTable(0.1, (1.0, 1.05, 1.1))


@pytest.mark.parametrize("tables", [[DEAR, CHEAP], [CHEAP, DEAR]])
def test_rounds_of_several_sets_are_simulated_and_take_what_gains_most(tables):
    trace = looped.traced(True, False)
    drafts = [skip.resolve(6) for skip in EXITS]
    run = looped.decoded(drafts, ExpectedGain(tables), sample=True, eos=trace.eos)
    real = looped.counted(run.played[1:])
    replays = [replay(trace, draft) for draft in drafts]
    rounds = simulate(replays, ExpectedGain(tables), range(len(trace.texts)))
    assert looped.counted(rounds) == real
    drafted = [each.num_drafts for each in run.stats.sources]
    assert (drafted[0] < drafted[1]) is (tables == [DEAR, CHEAP])


def test_costs_in_skip_configs_are_those_of_each(monkeypatch):
    """Nothing is timed, unless one of the configs has no costs."""
    monkeypatch.setattr("layerskip.timing.cost_tables.time_rounds", None)
    model, (ids, mask) = lively_model("llama"), ragged((9,))
    how = {"attention_mask": mask, "max_new_tokens": 30, "execution": "modules", "lookup": False}
    exits = [
        SkipConfig(exit_layer=layer, costs=table.to_dict())
        for layer, table in zip((2, 4), (DEAR, CHEAP), strict=True)
    ]
    out = generate(model, ids, skip=exits, **how)
    assert out.stats is not None
    dear, cheap = out.stats.sources
    assert dear.num_drafts < cheap.num_drafts
    with pytest.raises(TypeError, match="NoneType"):  # because it would be timed
        generate(model, ids, skip=[exits[0], EXITS[1]], **how)


def test_what_is_told_of_several_sets(tmp_path):
    model = lively_model("llama")
    EXITS[0].save(path := tmp_path / "skip.json")
    decoding = LayerSkipDecoding([path, EXITS[1]], execution="modules")
    assert decoding.skips == tuple(EXITS)
    lines = decoding.explain(model).splitlines()
    for told, cost in (("1: exit 2", 0.37), ("2: exit 4", 0.69)):
        price = f"; by the bytes it reads, drafting a token costs {cost} plain steps"
        assert f"drafts: sublayers {told}{price}" in lines
    assert repr(decoding).startswith("LayerSkipDecoding([SkipConfig(exit_layer=2), Skip")
    told = Engine(model, Task(4), "self", EXITS, draft="both").describe()
    assert told["sources"] == ["sublayers 1", "sublayers 2"]
    assert told["label"].startswith("exit 2 and exit 4, ")
    assert told["skips"] == [each.to_dict() for each in EXITS]
