"""The measuring loop with fake methods and clocks, then with real ones on tiny models."""

import gc
import json
from collections import Counter

import pytest
import run_files
import torch
from models import lively_model, prompt, ragged

import layerskip
from layerskip import LogitLookup, SkipConfig
from layerskip.bench.bandwidth import Sweeps
from layerskip.bench.batches import Encoded, PromptBatch, make_batches
from layerskip.bench.comparison import Judge
from layerskip.bench.methods import Decoded, Engine, Peer, Task
from layerskip.bench.runner import benchmark, interleaved, loops, repeated_share
from layerskip.bench.suite import price
from layerskip.costs.speculation import CostTable
from layerskip.files.records import RunWriter, costs_key, key_of, read_run

SKIP = SkipConfig.early_exit(3)
COSTS = CostTable(0.2, (1.0, 1.1, 1.2, 1.3))


class Clock:
    """A clock that only `advance` moves."""

    now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class Fake:
    """A method that takes a given time, half of it for its first token."""

    one_row = False

    def __init__(self, name, clock, seconds=1.0, kind="plain", tokens=(5, 6, 7)):
        self.name, self.clock, self.seconds, self.kind = name, clock, seconds, kind
        self.tokens = tokens
        self.calls = []
        self.collecting = []

    def describe(self):
        return {"name": self.name, "kind": self.kind}

    def decode(self, batch, repeat, clock, max_new_tokens=None):
        assert (max_new_tokens is not None) == (repeat < 0)  # warm-ups are short
        self.calls.append((batch.names, repeat))
        self.collecting.append(gc.isenabled())
        self.clock.advance(self.seconds / 2)
        first = clock()
        self.clock.advance(self.seconds / 2)
        return Decoded([list(self.tokens)] * batch.rows, first, [1] * batch.rows)


def batches(*lengths, rows=1, seed=0):
    made = []
    for number, length in enumerate(lengths):
        ids, mask = ragged((length,) * rows, seed=seed + number)
        names = tuple(f"{number}-{row}" for row in range(rows))
        numbers = tuple(range(number * rows, number * rows + rows))
        made.append(PromptBatch(names, numbers, "kind", ids, mask))
    return made


# ---- The loop ----


def run_fakes(repeats, warmup, *, names="abc", done=(), count=2):
    clock = Clock()
    fakes = [Fake(name, clock) for name in names]
    loop = interleaved(
        fakes, batches(*[3] * count), repeats=repeats, warmup=warmup, now=clock, done=done
    )
    return fakes, [(t.batch.numbers[0], t.repeat, t.order, t.method.name) for t in loop]


def test_methods_take_turns_on_every_batch():
    _, calls = run_fakes(repeats=3, warmup=1)
    orders = {}
    for number, repeat, order, name in calls:
        orders.setdefault((number, repeat), []).append(name)
        assert order == len(orders[number, repeat]) - 1
    assert list(orders) == [(n, r) for n in range(2) for r in (-1, 0, 1, 2)]
    assert " ".join(map("".join, orders.values())) == "cab abc bca cab abc bca cab abc"


@pytest.mark.parametrize(("until", "repeats"), [(-1, 1), (8.5, 1), (9, 2), (1e9, 9)])
def test_time_over_ends_it_after_a_whole_number_of_repeats(monkeypatch, until, repeats):
    """Three methods take a second each, so a warm-up or a repeat takes three."""
    clock = Clock()
    fakes = [Fake(name, clock) for name in "abc"]
    loop = interleaved(fakes, batches(3, 3, 3), repeats=3, warmup=1, now=clock, until=until)
    with monkeypatch.context() as patch:
        patch.setattr("layerskip.bench.runner.time.monotonic", clock)
        calls = [(t.batch.numbers[0], t.repeat) for t in loop if t.repeat >= 0]
    counted = Counter(calls)
    assert len(counted) == repeats
    assert set(counted.values()) == {3}


def test_what_is_done_is_left_out_and_not_warmed_up():
    key = [(name, (f"{number}-0",), 1, 0) for number in range(2) for name in "abc"]
    _, calls = run_fakes(repeats=1, warmup=1, done={*key[:3], key[4]})
    assert {number for number, *_ in calls} == {1}
    assert [(repeat, name) for _, repeat, _, name in calls] == [
        *zip((-1, -1, 0, 0), "acca", strict=True)
    ]
    fakes, calls = run_fakes(repeats=1, warmup=2, done=set(key))
    assert calls == []
    assert all(fake.calls == [] for fake in fakes)


def test_seconds_are_those_of_the_calls_and_methods_of_one_row_sit_out_larger_batches():
    clock = Clock()
    one, any_ = Fake("one", clock, 3.0), Fake("any", clock, 1.0)
    one.one_row = True
    sizes = [*batches(3), *batches(3, rows=2)]
    timed = list(interleaved([one, any_], sizes, repeats=1, warmup=0, now=clock))
    for each in timed:
        assert (each.seconds, each.first) == (each.method.seconds, each.method.seconds / 2)
        assert each.peak_memory is None
    called = sorted((t.method.name, t.batch.rows) for t in timed)
    assert called == [("any", 1), ("any", 2), ("one", 1)]


def test_the_collector_rests_during_calls_only():
    clock = Clock()
    fake = Fake("a", clock)
    assert gc.isenabled()
    for _ in interleaved([fake], batches(3), repeats=2, warmup=0, now=clock):
        assert gc.isenabled()
    assert fake.collecting == [False, False]
    fake.decode = None
    with pytest.raises(TypeError):
        list(interleaved([fake], batches(3), repeats=2, warmup=0, now=clock))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


# ---- What is recorded ----


def recorded(model, task, methods, found_batches, **settings):
    records = []
    settings = {"repeats": 1, "warmup": 0, "write": records.append} | settings
    gc.freeze()  # collecting the modules' garbage would take half a second
    benchmark(model, task, methods, found_batches, **settings)
    return records


def all_methods(model, task, **drafting):
    drafting = {"controller": "fixed", "max_draft_length": 3} | drafting
    return [
        Engine(model, task),
        Engine(model, task, "self", SKIP, **drafting),
        Peer(model, task),
        Peer(model, task, "generate-early-exit", options={"assistant_early_exit": 3}),
        Peer(model, task, "generate-prompt-lookup", options={"prompt_lookup_num_tokens": 10}),
    ]


@pytest.fixture(scope="module")
def model():
    return lively_model("llama")


def test_greedy_texts_of_all_methods_are_the_same(model):
    task = Task(10)
    methods = all_methods(model, task)
    reads = iter(range(1, 100))
    told = {"warmup": 1, "bandwidth": lambda: next(reads)}
    records = recorded(model, task, methods, batches(5, 7), **told)
    assert [record["read_bandwidth"] for record in records] == list(range(1, 11))
    assert Sweeps(torch.device("cpu"), iter([1.0, 1.5]).__next__, size=4096)() == 8192
    assert len({key_of(record) for record in records}) == len(records)
    for record in records:
        assert record["equal"] == [True]
        assert record["differences"] == []
        assert record["new_tokens"] == [10]
        assert record["category"] == "kind"
        assert "texts" not in json.dumps(record)
        assert "prompt_texts" not in record
        assert 0 < record["seconds"]["first"] < record["seconds"]["total"]
        assert 1 <= record["first_tokens"][0] <= 10
    assert {r["prompt_tokens"][0] for r in records} == {5, 7}


def test_records_are_what_readers_take(model, tmp_path):
    task = Task(8, do_sample=True, temperature=0.8, top_k=40, top_p=0.95)
    methods = all_methods(model, task)
    methods_told = [method.describe() for method in methods]
    header = run_files.header(law=task.law, batch_sizes=[1, 2], methods=methods_told)
    path = tmp_path / "run.jsonl"
    with RunWriter(path, header, None) as writer:
        mixed = [*batches(5), *batches(6, rows=2)]
        recorded(model, task, methods, mixed, write=writer.write, text=lambda t: f"{t}")
    records = read_run(path).records
    assert [r["method"] for r in records if r["batch_size"] == 2] == ["self", "generate", "plain"]
    for record in records:
        ours = record["method"] in ("plain", "self")
        assert record["equal"] == ([True] * record["batch_size"] if ours else None)
        assert (record["rounds"] is None) == (not ours)
        assert (record["seconds"]["draft"] is None) == (not ours)
        assert len(record["texts"]) == len(record["prompt_texts"]) == record["batch_size"]


def test_records_hold_how_deep_trees_were(tmp_path):
    """How deep each row's accepted tokens could have continued in its tree."""
    model, task = lively_model("llama", vocab_size=24), Task(40, do_sample=True, seed=3, top_k=0)
    method = Engine(model, task, "laws", sources=[LogitLookup()], controller="fixed")
    found = [PromptBatch(("1", "2"), (0, 1), "kind", *ragged((6, 4)))]
    found[0].input_ids.remainder_(24)
    methods = [Engine(model, task), method]
    header = run_files.header(
        law=task.law, batch_sizes=[2], methods=[each.describe() for each in methods]
    )
    with RunWriter(tmp_path / "run.jsonl", header, None) as writer:
        recorded(model, task, methods, found, write=writer.write)
    records = read_run(tmp_path / "run.jsonl").records
    (rounds,) = [each["rounds"] for each in records if each["method"] == "laws"]
    counts = [
        place
        for places in zip(
            *(rounds[name] for name in ("accepted", "depths", "drafted")), strict=True
        )
        for place in zip(*places, strict=True)
    ]
    assert any(deep < drafted for _, deep, drafted in counts)
    assert any(accepted < deep for accepted, deep, _ in counts)


def test_steps_of_trees_are_counted_not_their_tokens(tmp_path):
    model, task = lively_model("llama"), Task(40, do_sample=True, seed=3, top_k=0)
    skip = SkipConfig.low_precision(4)
    method = Engine(model, task, "self", skip, max_draft_length=8, branches=True)
    costs = CostTable(0.2, (1.0,) * 20)
    found = batches(6)
    method.prices[costs_key(1, found[0].context)] = costs
    records = recorded(model, task, [Engine(model, task), method], found)
    rounds = next(record for record in records if record["method"] == "self")["rounds"]
    assert [len(row[0]) for row in rounds["confidences"]] == rounds["steps"]
    assert any(
        drafted != [steps]
        for drafted, steps in zip(rounds["drafted"], rounds["steps"], strict=True)
    )


def test_counts_are_those_of_the_engine(model):
    task = Task(12, do_sample=True, temperature=0.9, seed=3)
    (batch,) = batches(6, rows=3)
    method = Engine(model, task, "self", SKIP, controller="fixed", max_draft_length=3)
    plain = Engine(model, task)
    records = recorded(model, task, [plain, method], [batch])
    record = next(record for record in records if record["method"] == "self")
    stats = method.generate(batch).stats
    counts = {
        name: sum(map(sum, record["rounds"][name])) for name in ("drafted", "accepted", "emitted")
    }
    assert counts["drafted"] == stats.num_draft_tokens > counts["accepted"] > 0
    assert counts["accepted"] == stats.num_accepted_tokens
    assert counts["emitted"] + sum(record["first_tokens"]) == stats.num_new_tokens == 36
    assert sum(d > 0 for row in record["rounds"]["drafted"] for d in row) == stats.num_drafts
    alone = {r["method"]: r["rounds"] for r in records}["plain"]
    assert sum(map(sum, alone["drafted"])) == 0
    assert len(alone["emitted"]) == 11


def test_times_of_rounds_add_up(model):
    ticks = iter(range(10_000))
    task = Task(8)
    method = Engine(model, task, "self", SKIP, controller="fixed", max_draft_length=2)
    (batch,) = batches(5)
    rounds = method.generate(batch, lambda: float(next(ticks))).rounds
    assert [time for round_ in rounds for time in round_.times] == list(range(4 * len(rounds)))
    assert all(round_.times is None for round_ in method.generate(batch).rounds)
    given = layerskip.decode(model, batch.input_ids, max_new_tokens=2, clock=lambda: 1.5)
    assert [round_.times for round_ in given] == [(1.5,) * 4] * 2
    seconds = recorded(model, task, [Engine(model, task), method], [batch])[1]["seconds"]
    parts = [seconds[name] for name in ("first", "draft", "verify", "other")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(seconds["total"])


@pytest.mark.usefixtures("built")
def test_nothing_drafts_but_what_is_named():
    own = lively_model("llama", dtype=torch.float32)  # by default, it would draft in 8 bits
    method = Engine(own, Task(12), "self", lookup=True, controller="fixed")
    (batch,) = batches(6)
    assert {round_.source for round_ in method.generate(batch).rounds} <= {None, 0}


def test_the_end_of_a_text_is_counted_and_nothing_behind_it(model):
    (batch,) = batches(6, rows=2)
    texts = Engine(model, Task(12)).decode(batch, 0, Clock()).tokens
    end = next(token for token in texts[0] if token not in texts[1][:4])
    model.generation_config.eos_token_id = end
    try:
        task = Task(12)
        records = recorded(model, task, [Engine(model, task), Peer(model, task)], [batch])
        decoded = Peer(model, task).decode(batch, 0, Clock())
    finally:
        model.generation_config.eos_token_id = None
    length = texts[0].index(end) + 1
    assert decoded.tokens[0] == texts[0][:length]
    assert [record["new_tokens"][0] for record in records] == [length] * 2
    assert all(record["equal"] == [True, True] for record in records)


# ---- Whether texts are as promised ----


def judged(model, task, tokens, batch, kind="self"):
    clock = Clock()
    wrong = Fake("wrong", clock, kind=kind, tokens=tokens)
    records = recorded(model, task, [Engine(model, task), wrong], [batch], now=clock)
    return next(record for record in records if record["method"] == "wrong")


@pytest.mark.parametrize("task", [Task(6), Task(6, do_sample=True, temperature=0.9, seed=2)])
def test_a_wrong_text_is_a_fault(model, task):
    (batch,) = batches(5)
    (text,) = Engine(model, task).decode(batch, 0, Clock()).tokens
    assert judged(model, task, text, batch)["equal"] == [True]
    wrong = [*text[:2], (text[2] + 1) % 90 + 2, *text[3:]]
    record = judged(model, task, wrong, batch)
    assert record["equal"] == [False]
    difference = record["differences"][0]
    assert difference["position"] == 2
    assert difference["margin"] > difference["resolution"] > 0
    assert difference["near_tie"] is False
    for ended in (text[:3], [*text, 5]):  # no score can explain a different end
        difference = judged(model, task, ended, batch)["differences"][-1]
        assert difference["near_tie"] is False
        assert difference["margin"] is None
    peer = judged(model, task, wrong, batch, kind="generate-prompt-lookup")
    assert peer["equal"] == (None if task.do_sample else [False])


def test_a_near_tie_is_none(model):
    twins = lively_model("llama")
    (batch,) = batches(5)
    task = Task(4)
    (text,) = Engine(twins, task).decode(batch, 0, Clock()).tokens
    other = max(text) + 1  # of two equal scores, the lower token is drawn
    head = twins.lm_head.weight.data
    head[other] = head[text[1]] * (1 - 1e-15)
    record = judged(twins, task, [text[0], other, *text[2:]], batch)
    assert record["equal"] == [False]
    difference = record["differences"][0]
    assert difference["near_tie"] is True
    assert 0 <= difference["margin"] <= difference["resolution"] < 1e-3


@pytest.mark.parametrize(
    "task", [Task(8), Task(8, do_sample=True, temperature=0.7, top_k=30, top_p=0.9, seed=5)]
)
def test_the_scores_that_judge_are_those_that_drew(model, task):
    """For each cut text, the scores expect exactly the token that was cut off."""
    batch = PromptBatch(("a", "b"), (4, 9), None, *ragged((3, 6)))
    plain, texts = Engine(model, task), Engine(model, task).decode(batch, 0, Clock()).tokens
    for length in (1, 4, 7):
        short = [(batch, [text[:length] for text in texts])]
        differences = Judge(model, task, [plain]).compare(plain, short).differences
        assert [each.expected for each in differences] == [text[length] for text in texts]


def test_whose_text_a_method_must_give(model):
    methods = [Peer(model, Task(4)), Engine(model, Task(4)), Fake("x", Clock(), kind="self")]
    for judge, expected in (
        (Judge(model, Task(4), methods), ["generate", "generate", "plain"]),
        (Judge(model, Task(4), methods[1:]), ["plain"] * 3),
        (Judge(model, Task(4, do_sample=True), methods), ["plain"] * 3),
    ):
        assert [judge.reference(method).kind for method in methods] == expected
    rejection = Task(4, do_sample=True, acceptance="rejection")
    assert not Judge(model, rejection, methods).promised(methods[1])


# ---- transformers' own ways ----


def test_peers_draw_the_same_for_the_same_repeat_only(model):
    task = Task(8, do_sample=True, temperature=1.0, seed=1)
    before = torch.random.get_rng_state()
    first, second = batches(5, 5)
    peer = Peer(model, task)
    records = []
    methods = [Engine(model, task), peer]
    recorded(model, task, methods, [first], write=records.append, text=str)
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.random.fork_rng():
        texts = [peer.decode(first, repeat, Clock()).tokens for repeat in (0, 1, 0)]
        other = peer.decode(second, 0, Clock()).tokens
    assert texts[0] == texts[2] != texts[1]
    assert other != texts[0]
    assert records[1]["texts"] == [str(texts[0][0])]


def settings_of(model):
    return json.dumps([model.config.to_dict(), model.generation_config.to_dict()], default=str)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_is_left_as_found_whatever_happens(model, monkeypatch, error):
    before = settings_of(model)
    (batch,) = batches(5)
    seen = []
    forward = type(model.model).forward

    def moody(self, *args, **kwargs):
        seen.append(self.config.num_hidden_layers)
        if len(seen) == 2:
            raise error
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", moody)
    peer = Peer(model, Task(6), options={"assistant_early_exit": 2})
    with pytest.raises(error):
        peer.decode(batch, 0, Clock())
    assert 2 in seen  # by the early-exit draft
    assert settings_of(model) == before
    seen[:] = [None, None]
    peer.decode(batch, 0, Clock())
    assert settings_of(model) == before


# ---- Before and between ----


def test_batches_are_of_one_category_and_padded_on_the_left():
    categories = ["a", "b", "a", "a", None]
    prompts = [Encoded(str(n), c, prompt(3 + n, seed=n)) for n, c in enumerate(categories)]
    made, words = make_batches(prompts, [1, 2], pad=0)
    assert [batch.names for batch in made] == [("0",), ("2",), ("3",), ("1",), ("4",), ("0", "2")]
    pair = made[-1]
    assert pair.numbers == (0, 2)
    assert pair.category == "a"
    assert pair.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1] * 5]
    assert pair.input_ids[0].tolist() == [0, 0, *prompts[0].ids[0].tolist()]
    assert words == ["3 prompts left out at batch size 2: too few for a batch"]


def test_prices_are_measured_once_and_used(model, monkeypatch):
    """A skip config keeps its own costs for the controller; prices then serve predictions only."""
    task = Task(6, do_sample=True, temperature=0.8)
    method = Engine(model, task, "self", SKIP)
    sizes = [*batches(5, 7), *batches(5, rows=2)]
    asked = []

    def prepare(self, model, *, rows, **_):
        asked.append(rows)
        return COSTS

    monkeypatch.setattr(layerskip.LayerSkipDecoding, "prepare", prepare)
    price(method, sizes)
    assert method.describe()["costs"] == {"1": COSTS.to_dict(), "2": COSTS.to_dict()}
    recorded(model, task, [Engine(model, task), method], sizes)
    assert asked == [1, 2]
    assert method.generate(sizes[0]).costs == COSTS
    own = SkipConfig(exit_layer=3, costs={"draft": 0.5, "verify": [1.0, 2.0]})
    method = Engine(model, Task(4), "self", own)
    price(method, sizes[:1])
    assert method.prices["1"].draft == 0.2
    assert method.generate(sizes[0]).costs.draft == 0.5


# ---- Texts that favour drafts ----


def test_repeated_share():
    for text, share in (([], 0), ([*range(5)], 0), ([1] * 8, 0.8), ([1, 2, 3, 4] * 2, 0.2)):
        assert repeated_share(text) == pytest.approx(share)


def test_loops():
    for once, times, least in (([1], 24, 24), ([1, 2, 3], 8, 8), ([*range(12)], 3, 3)):
        for before in ([], [9], [*range(20)]):
            assert loops([*before, *once * times])
            assert not loops([*before, *once * (least - 1)])
            assert not loops([*before, *once * times, 99])  # the text left the loop
    assert not loops([])
