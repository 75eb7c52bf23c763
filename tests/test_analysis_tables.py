"""The report's numbers against values calculated by hand."""

import math

import numpy as np
import pytest
import run_files as made

from layerskip.analysis import run_tables
from layerskip.analysis.runs import load_runs, rounds_of
from layerskip.analysis.verdict import judge_run
from layerskip.costs.ratios import Totals, measured_speedup
from layerskip.costs.speculation import CostTable


def run_of(tmp_path, lines, head=None):
    [run] = load_runs([made.write(tmp_path / "run.jsonl", [head or made.header(), *lines])])
    return run


def one(table, **where):
    """The only row with these values."""
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1, table
    return table.iloc[0]


def timed(method, prompt, totals, tokens=10, first=0.001, **changes):
    """Records of one prompt, one per repeat."""
    return [
        made.record(method, prompt, repeat=i, new_tokens=[tokens],
                    seconds=made.seconds(total, first), **changes)
        for i, total in enumerate(totals)
    ]  # fmt: skip


def test_speedup_is_all_tokens_over_all_seconds(tmp_path):
    run = run_of(
        tmp_path,
        [
            *timed("plain", "code-1", [0.020, 0.030, 0.900]),  # medians count
            *timed("plain", "text-1", [0.100, 0.100, 0.100], tokens=20),
            *timed("self", "code-1", [0.010, 0.011, 0.001]),
            *timed("self", "text-1", [0.012, 0.060, 0.060], first=0.003, tokens=20),
            *timed("generate", "code-1", [0.060]),
            *timed("generate", "text-1", [0.100]),
        ],
    )
    table = run_tables.speedup(run)
    row = one(table, category="all", method="self", over="plain")
    assert row["prompts"] == 2
    assert row["speedup"] == pytest.approx((30 + 100) / (10 + 60))
    assert row["mean_of_ratios"] == pytest.approx((30 / 10 + 100 / 60) / 2)
    assert row["tokens_per_second"] == pytest.approx(30 / 0.070)
    assert row["first_ms"] == pytest.approx(2)
    assert row["prefill_speedup"] == pytest.approx(2 / 4)
    assert row["decode_speedup"] == pytest.approx((29 + 99) / (9 + 57))
    assert one(table, category="code", method="self", over="plain")["speedup"] == pytest.approx(3)
    row = one(table, category="all", method="self", over="generate")
    assert row["speedup"] == pytest.approx((30 / 0.070) / (20 / 0.160))  # its texts differ
    ends = (10 / 0.010) / (10 / 0.060), (20 / 0.060) / (10 / 0.100)  # one prompt, drawn twice
    assert (row["high"], row["low"]) == pytest.approx(ends)


def test_one_answer_of_one_token_does_not_outweigh_the_others(tmp_path):
    """Averaging seconds per token gave 0.95 for this run, although every longer text gained."""
    lines = [*timed("plain", "text-0", [0.018], tokens=1, first=0.018),
             *timed("self", "text-0", [0.046], tokens=1, first=0.046)]  # fmt: skip
    gains = [1.1 + 0.03 * number for number in range(11)]  # up to 1.4
    for number, gain in enumerate(gains, 1):
        lines += timed("plain", f"text-{number}", [0.960], tokens=96, first=0.010)
        lines += timed("self", f"text-{number}", [0.960 / gain], tokens=96, first=0.010)
    run = run_of(tmp_path, lines)
    row = one(run_tables.speedup(run), method="self", over="plain")
    own = 0.046 + sum(0.960 / gain for gain in gains)
    assert row["speedup"] == pytest.approx((0.018 + 11 * 0.960) / own)
    assert row["low"] > 1.1
    headline = judge_run(run).lines[0]
    assert f"{row['speedup']:.2f} times as fast" in headline
    assert "not distinguishable" not in headline


def test_speedups_compare_only_prompts_that_both_have(tmp_path):
    run = run_of(
        tmp_path,
        [
            *timed("plain", "code-1", [0.030]),
            *timed("plain", "code-2", [0.500]),
            *timed("self", "code-1", [0.010]),
        ],
    )
    row = one(run_tables.speedup(run), method="self", over="plain")
    assert (row["prompts"], row["speedup"]) == (1, pytest.approx(3))
    assert math.isnan(row["low"])  # one prompt has no interval


def test_texts_of_one_token_have_no_decoding(tmp_path):
    run = run_of(
        tmp_path, [r for m in ("plain", "self") for r in timed(m, "code-1", [0.002], tokens=1)]
    )
    row = one(run_tables.speedup(run), method="self", over="plain")
    assert row["speedup"] == pytest.approx(1)
    assert math.isnan(row["decode_speedup"])


def test_bootstrap_is_paired_and_seeded():
    tokens = np.array([10.0, 20.0, 5.0])
    slow = Totals(tokens, np.array([1.0, 5.0, 9.0]))
    fast = Totals(tokens, np.array([0.5, 2.5, 4.5]))
    assert measured_speedup(fast, slow) == pytest.approx((2, 2, 2))  # paired: no spread
    drawn = np.random.default_rng(1).uniform(1, 2, (2, 40))
    own, over = (Totals(np.full(40, 7.0), seconds) for seconds in drawn)
    ratio, low, high = measured_speedup(own, over)
    assert low < ratio < high
    assert measured_speedup(own, over) == (ratio, low, high)
    # the bootstrap's interval is close to the normal interval of a ratio of means
    b, a = drawn
    sd = np.std(a / b.mean() - ratio * b / b.mean()) / np.sqrt(40)
    assert (low, high) == pytest.approx((ratio - 1.96 * sd, ratio + 1.96 * sd), abs=0.3 * sd)
    assert all(map(math.isnan, measured_speedup(*[Totals(np.array([]), np.array([]))] * 2)))


ROUNDS = made.rounds((2, 2, 3), (3, 1, 2), (0, 0, 1), (2, 0, 1), (2, 1, 1))


def test_acceptance(tmp_path):
    # an end cut the last round after one accepted token, so its second token was not judged
    lines = [made.record("plain"), made.record("self", new_tokens=[9], rounds=ROUNDS)]
    row = one(run_tables.acceptance(run_of(tmp_path, lines)), category="all")
    assert (row["rounds"], row["drafts"], row["drafted"]) == (5, 4, 9)
    assert (row["accepted"], row["rejected"]) == (4, 2)
    assert row["alpha"] == pytest.approx(4 / 6)
    assert row["acceptance_rate"] == pytest.approx(4 / 9)
    assert row["mean_acceptance_length"] == pytest.approx(1 + 4 / 4)
    assert row["tokens_per_pass"] == pytest.approx(8 / 5)
    assert row["mean_draft_length"] == pytest.approx(9 / 5)


def test_acceptance_by_position(tmp_path):
    lines = [made.record("plain"), made.record("self", new_tokens=[9], rounds=ROUNDS)]
    table = run_tables.positions(run_of(tmp_path, lines)).set_index("position")
    assert table["tried"].tolist() == [4, 2, 0]
    assert table["accepted"].tolist() == [3, 1, 0]
    assert table["acceptance"].tolist()[:2] == [3 / 4, 1 / 2]
    assert math.isnan(table.loc[3, "acceptance"])
    assert table["chain"].tolist() == [3 / 4, 1 / 4, 0]


def test_positions_of_trees_go_by_depth(tmp_path):
    """The tree of five tokens has depth 2, so it counts as two drafted positions in a row."""
    told = made.rounds((5, 2, 3), (5, 0, 1)) | {"depths": [[2], [5]]}
    lines = [made.record("plain"), made.record("self", new_tokens=[5], rounds=told)]
    table = run_tables.positions(run_of(tmp_path, lines)).set_index("position")
    assert table["reached"].tolist() == [2, 2, 1, 1, 1]
    assert table["tried"].tolist() == [2, 1, 0, 0, 0]


def test_finished_rows_of_a_batch_count_for_nothing(tmp_path):
    rounds = {
        "drafted": [[2, 1], [1, 0]],
        "accepted": [[1, 1], [1, 0]],
        "emitted": [[2, 2], [2, 0]],
        "confidences": [[[0.5] * 2, [0.5]], [[0.5], []]],
        "sources": [0, 0],
        "steps": [2, 1],
    }
    both = {"batch_size": 2, "prompts": ["code-1", "code-2"], "prompt_tokens": [5, 5],
            "first_tokens": [1, 1], "new_tokens": [5, 3], "repeated_4grams": [0.0, 1.0],
            "loops": [False, True], "seconds": made.seconds(0.008)}  # fmt: skip
    lines = [made.record(m, **both) for m in ("plain", "self")]
    lines[1]["rounds"] = rounds
    head = made.header(methods=[{"name": "plain", "kind": "plain"}, made.drafting(
        "self", costs={"2": made.COSTS})], batch_sizes=[2])  # fmt: skip
    run = run_of(tmp_path, lines, head)
    row = one(run_tables.acceptance(run), category="all")
    assert (row["rounds"], row["drafted"], row["accepted"]) == (3, 4, 3)
    assert one(run_tables.speedup(run), method="self")["tokens_per_second"] == pytest.approx(1000)
    row = one(run_tables.repetition(run), method="self")
    assert (row["repeated_4grams"], row["loops"], row["texts"]) == (0.5, 1, 2)
    # rows draft together: rounds of 2 and 1 draft steps replace 4 plain steps
    cost = 2 * 0.15 + 1.35 + 0.15 + 1.2
    assert one(run_tables.predictions(run))["predicted"] == pytest.approx(4 / cost)


def test_phases_add_up(tmp_path):
    parts = {"draft": 0.004, "verify": 0.010, "other": 0.002}
    lines = [
        made.record("plain", seconds=made.seconds(0.02)),
        made.record("self", seconds=made.seconds(0.02, 0.003, **parts)),
    ]
    table = run_tables.phases(run_of(tmp_path, lines))
    row = one(table, method="self")
    assert row[["prefill", "draft", "verify", "other", "rest", "total"]].tolist() == (
        pytest.approx([0.3, 0.4, 1.0, 0.2, 0.1, 2.0])
    )
    row = one(table, method="plain")
    assert math.isnan(row["verify"])
    assert row["rest"] == pytest.approx(1.9)


def test_differences_are_faults_unless_near_ties_explain_them(tmp_path):
    tie = {"row": 0, "position": 5, "margin": 1e-6, "resolution": 1e-5, "near_tie": True}
    fault = tie | {"near_tie": False, "margin": 0.5}
    told = [(True, []), (False, [tie]), (False, [fault]), (False, []), (False, [tie, fault])]
    lines = [made.record("plain")] + [
        made.record("self", repeat=i, equal=[same], differences=differences)
        for i, (same, differences) in enumerate(told)
    ]
    table = run_tables.losslessness(run_of(tmp_path, lines))
    row = one(table, method="self")
    assert row[["compared", "equal", "near_ties", "faults"]].tolist() == [5, 1, 1, 3]
    assert one(table, method="plain")["compared"] == 0


def test_rounds_are_priced_by_the_cost_table(tmp_path):
    lines = []
    for name, drafts in (("code-1", 1), ("text-1", 4)):
        rounds = made.rounds(*[(drafts, drafts, drafts + 1)] * (10 // (drafts + 1)))
        lines += timed("plain", name, [0.011], tokens=11)
        lines += timed("self", name, [0.006], tokens=11, rounds=rounds)
    lines += timed("self:fixed-4", "code-1", [0.011], tokens=11,
                   rounds=made.rounds(*[(0, 0, 1)] * 10))  # fmt: skip
    table = run_tables.predictions(run_of(tmp_path, lines))
    cost = {"code": 5 * (0.15 + 1.2), "text": 2 * (4 * 0.15 + 1.5)}
    for category, paid in (*cost.items(), ("all", sum(cost.values()))):
        row = one(table, method="self", category=category)
        predicted = (20 if category == "all" else 10) / paid
        assert row["predicted"] == pytest.approx(predicted)
        assert row["measured"] == pytest.approx(2)
        assert row["efficiency"] == pytest.approx(2 / predicted)
        assert row["bound"] == pytest.approx(1 / 0.15)
    # rounds without drafts cost as much as plain steps
    assert one(table, method="self:fixed-4", category="all")["predicted"] == pytest.approx(1)


def test_sweeps_are_priced_by_their_rounds(tmp_path):
    """Four plain steps, one round of one draft and five of two, not ten rounds of 1.1 drafts."""
    swept = made.sweep(20)
    swept["exits"][1]["rounds"] = [[0, 10], [4, 1, 5], [0, 0, 0, 0, 6]]
    run = run_of(tmp_path, [made.record("plain"), swept])
    c = 2 / 20
    row = one(run_tables.sweeps(run), exit=2, draft_length=2)
    assert row["speedup"] == pytest.approx(20 / (4 + (c + 1.2) + 5 * (2 * c + 1.35)))
    assert row["tokens_per_pass"] == pytest.approx(2)
    assert row["acceptance_rate"] == pytest.approx(10 / 11)
    best = one(run_tables.exits(run), exit=2)
    assert best["draft_length"] == 4
    assert best["speedup"] == pytest.approx(20 / (6 * (4 * c + 1.5)))
    assert run_tables.exits(run)["agreement"].tolist() == [0.3, 0.6, 0.8]
    assert not len(run_tables.exits(run_of(tmp_path, [made.record("plain")])))


def test_predictions_find_the_costs_that_made_the_times(tmp_path):
    run = run_of(tmp_path, made.made_up(prompts=20, noise=0.0)[1:], made.header())
    whole = run_tables.predictions(run).query("category == 'all'")
    assert whole["efficiency"].tolist() == pytest.approx([1, 1], abs=0.005)
    alphas = run_tables.acceptance(run).query("category == 'all'")["alpha"].tolist()
    assert alphas == pytest.approx([0.6, 0.6], abs=0.04)


def test_runs_are_told_apart_and_stand_side_by_side(tmp_path):
    lines = [*timed("plain", "code-1", [0.02]), *timed("self", "code-1", [0.01])]
    files = [made.write(tmp_path / f"{name}.jsonl", [made.header(), *lines]) for name in "ab"]
    files.append(made.write(tmp_path / "c.jsonl", [made.header(dtype="bfloat16"), *lines]))
    runs = load_runs(files)
    assert [run.label for run in runs] == [
        "tiny, sampled at T=0.8, float32 on cpu, 1 thread, a",
        "tiny, sampled at T=0.8, float32 on cpu, 1 thread, b",
        "tiny, sampled at T=0.8, bfloat16 on cpu, 1 thread",
    ]
    comparison = run_tables.comparison(runs)
    assert len(comparison) == 6
    assert set(comparison["over"]) == {"plain"}


def test_decoding_is_told_by_context_beside_what_memory_gives(tmp_path):
    """Calls of 9 tokens after the first, in 9, 4.5 and 3 ms; 90 kB read of 20 MB per second."""
    lines = [
        timed("plain", f"{context}-{number}", [0.001 + seconds], context=context,
              category=f"{context} tokens", read_bandwidth=20e6, bytes_read=90e3)[0]
        for context, found in ((8, [0.009, 0.0045]), (64, [0.009, 0.003, 0.0045]))
        for number, seconds in enumerate(found)
    ]  # fmt: skip
    lines += timed("generate", "8-0", [0.01], context=8, category="8 tokens")
    run = run_of(tmp_path, lines)
    assert run.contexts == {"8 tokens": 8, "64 tokens": 64}
    table = run_tables.decoding(run)
    assert len(table) == 3  # one line per method and context, none over all contexts
    plain = one(table, method="plain", context=64)
    assert (plain["low"], plain["tokens_per_second"], plain["high"]) == pytest.approx(
        (1000, 2000, 3000)
    )
    assert (plain["calls"], plain["prefill_seconds"]) == (3, 0.001)
    assert plain["gigabytes_per_second"] == pytest.approx(90e3 / 0.0045 / 1e9)
    assert plain["share"] == pytest.approx(1.0)
    first = one(table, method="plain", context=8)
    assert first["share"] == pytest.approx((0.5 + 1) / 2)
    assert np.isnan(one(table, method="generate")["share"])  # old records lack it
    assert (run_of(tmp_path, timed("plain", "code-1", [0.02])).contexts) == {"all": None}


@pytest.mark.parametrize("first", ["lookup", "laws"])  # earlier versions kept laws in files
def test_rounds_are_counted_by_the_source_of_their_drafts(first, tmp_path):
    """Three looked up, two by sublayers, one without drafts. Looked-up drafts cost no steps."""
    head = made.header()
    own = next(method for method in head["methods"] if method["kind"] == "self")
    own["sources"] = [first, "sublayers"]
    found = made.rounds((2, 2, 3), (2, 0, 1), (2, 1, 2), (1, 1, 2), (1, 0, 1), (0, 0, 1))
    found |= {"sources": [0, 0, 0, 1, 1, None], "steps": [0, 0, 0, 1, 1, 0]}
    lines = [
        made.record("plain", new_tokens=[11]),
        made.record(own["name"], new_tokens=[11], rounds=found),
    ]
    run = run_of(tmp_path, lines, head)
    table = run_tables.sources(run).set_index("source")
    assert table["share"].tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 6])
    assert table.loc[first, "acceptance_rate"] == pytest.approx(3 / 6)
    assert table.loc["sublayers", "acceptance_rate"] == pytest.approx(1 / 2)
    assert table.loc["none", "drafted"] == 0
    costs = CostTable(0.5, (1.0, 1.2, 1.4))
    rounds = run.rounds[run.rounds["method"] == own["name"]]
    assert run_tables.gain(rounds, costs) == pytest.approx(10 / (3 * 1.4 + 2 * (0.5 + 1.2) + 1.0))


def test_a_round_may_have_a_source_for_each_row():
    """It costs the steps of the rows that took them, and a pass over the longest draft."""
    rounds = {
        "drafted": [[2, 1, 0], [1, 0, 0]],
        "accepted": [[2, 0, 0], [1, 0, 0]],
        "emitted": [[3, 1, 1], [2, 1, 0]],
        "sources": [[0, 1, None], 1],
        "steps": [3, 1],  # not the number of tokens: steps of trees differ from it
    }
    record = {"batch_size": 3, "category": None, "method": "self", "rounds": rounds}
    found = list(rounds_of(record, 0))
    assert [each.source for each in found] == [0, 1, None, 1, 1]
    assert [each.drafted for each in found] == [2, 1, 0, 1, 0]
    assert {each.number: each.steps for each in found} == {0: 3, 1: 1}
