"""A search from Python, end to end on live models: what it finds, keeps and refuses."""

import json
import math
import tempfile
import time
from dataclasses import replace

import pytest
import search_files
import torch
from cost_records import MACHINES, cost_record
from marks import thorough
from models import lively_model, prompt

import layerskip
from layerskip.api.drafts import automatic_draft
from layerskip.bench.checks import state_of
from layerskip.bench.methods import Task
from layerskip.config.skips import DecodingOptions, LowPrecision, SkipConfig
from layerskip.files.searches import read_search
from layerskip.model.draft_modules import save_trained
from layerskip.model.opened_models import Sublayers
from layerskip.native import extension
from layerskip.replay.replayed_drafts import replay
from layerskip.research.blocks import ExitBlock
from layerskip.search import fitting, pipeline, search
from layerskip.search.finalists import winner
from layerskip.search.objective import Objective, OutOfTime
from layerskip.search.pipeline import Search
from layerskip.search.space import Space
from layerskip.texts.vocabulary import ranked
from layerskip.timing.cost_tables import stored
from layerskip.timing.kept import machine

COST = MACHINES["reads weights"]
HOPELESS = cost_record(growth=1.0) | {"repeated": [[1.0, 100.0]]}
"""Where a draft step costs many plain ones, and each token that is verified one."""
PROMPTS = [prompt(length, seed=length)[0] for length in (5, 8, 6)]
HELD_OUT = [prompt(7, seed=20)[0]]
TOKENS = 24
SUBLAYERS = "sublayer,lookup,controller"


def tiny(family="llama", **settings):
    return lively_model(family, **{"dtype": torch.float32, **settings})


def idle_end():
    """A model whose last three layers do nothing."""
    model = tiny()
    with torch.no_grad():
        for layer in model.model.layers[3:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def find(model, **settings):
    return search(
        model,
        PROMPTS,
        **{"trials": 20, "max_new_tokens": TOKENS, "cost": COST, "space": SUBLAYERS} | settings,
    )


def steps(model, task=None, **settings):
    """A `Search` of the same settings, before its study is opened."""
    return Search(
        model,
        settings.pop("prompts", PROMPTS),
        task=task or Task(TOKENS),
        **{"space": Space(kind="sublayer", num_layers=6), "parts": frozenset()} | settings,
    )


def story(result):
    """What does not depend on the clock."""
    return [
        (t.value, t.params, t.user_attrs["origin"], t.user_attrs["worth"])
        for t in result.study.get_trials(deepcopy=False)
    ]


def drafted(model, skip):
    """The output with a config, after checking that the text is that without one."""
    how = {"do_sample": False, "max_new_tokens": 36, "execution": "modules"}
    ids = prompt(9, seed=40)
    plain = layerskip.generate(model, ids, enabled=False, **how)
    found = layerskip.generate(model, ids, skip=skip, **how)
    assert torch.equal(found.sequences, plain.sequences)
    return found


def checked(result, folder):
    """The record, read back from a file."""
    header = search_files.made_up(layers=6)
    known = json.loads(json.dumps(dict(result.record), allow_nan=False))
    path = search_files.write(folder / "search.json", header | known)
    return read_search(path)


@pytest.fixture(scope="module")
def llama():
    return tiny()


@pytest.fixture(scope="module")
def timed(llama):
    """A search whose finalists are timed on held-out prompts."""
    return find(llama, held_out=HELD_OUT, trials=20, finalists=2, repeats=1)


LOW = {"low_bits": 8, **dict.fromkeys(("low_attention", "low_mlp"), [3e-4] * 6), "low_head": 1.5e-4}


class TestSpaces:
    def test_what_is_low_is_searched_priced_and_written(self, llama, tmp_path):
        result = find(llama, cost=COST | LOW, bits=8, space="sublayer,bits", trials=12)
        assert result.record["space"]["bits"] == 8
        assert result.record["space"]["parts"] == ["bits"]
        low = {t["origin"]: t["speedup"] for t in result.record["trials"]}["first:8-bits"]
        assert result.winner.predicted >= 0.9 * low > 1.0
        assert result.skip.decoding.controller == "expected-gain"
        assert result.skip.decoding.lookup is False  # without the key it would be on
        result.skip.save(tmp_path / "skip.json")
        assert SkipConfig.load(tmp_path / "skip.json") == result.skip
        record = checked(result, tmp_path)
        assert record["finalists"][0]["low"]["bits"] == 8
        assert record["bound"] == pytest.approx(result.skip.notes["bound"])

    def test_what_is_named_is_searched(self, llama):
        opened = {how: Sublayers(llama, how) for how in ("auto", "fused")}

        def space(words, execution="auto", **more):
            return fitting.space_for(opened[execution], words, **more)

        native = opened["auto"].execution == "native"
        assert space("layer").bits == (8 if native else None)
        assert space("layer", "fused").bits is None
        assert space("layer", "fused", bits=4).bits == 4
        assert space("layer,lookup", "fused", bits=4).bits is None
        assert space("layer", bits=None).bits is None
        assert space("exit").vocabularies == (12, 48)
        assert space("exit,bits").vocabularies == ()
        assert space("bits").kind == "sublayer"
        for words, wrong in (("exit,layer", "exit and layer"), ("magic", "'magic'")):
            with pytest.raises(ValueError, match=f"space must be one of exit, .*; got {wrong}"):
                space(words)

    def test_costs_that_do_not_know_it_are_refused(self, llama):
        with pytest.raises(ValueError, match="do not know low precision of 8 bits"):
            find(llama, bits=8, space="sublayer")

    @torch.no_grad()
    def test_influence_is_what_a_sublayer_changes(self):
        """It compares hidden states of the library's own pass; idle layers have none."""
        model, ids = idle_end(), prompt(9, seed=40)[0]
        text = type("Text", (), {"tokens": ids.flatten()})
        found = fitting.influence(Sublayers(model, "modules"), [text], positions=9)
        assert found[6:] == pytest.approx([0.0] * 6, abs=1e-6)
        states = model(ids.view(1, -1), output_hidden_states=True).hidden_states
        whole = torch.cosine_similarity(states[0][0], states[1][0], dim=-1).mean()
        alone = fitting.influence(Sublayers(model, "modules"), [text], positions=1)
        assert alone != found
        assert 0 < 1 - float(whole) < 2 * sum(found[:2]) + 1e-3


def test_trained_modules_are_no_configs_of_a_space(llama, tmp_path):
    block = ExitBlock(Sublayers(llama)).state_dict()
    trained = save_trained(tmp_path / "e.safetensors", block, "exit-block", llama)
    low = LowPrecision(attention=(), mlp=())
    module = SkipConfig(exit_layer=5, trained=trained, low=low)
    with pytest.raises(ValueError, match="skip config a: it is a trained draft of kind exit-block"):
        find(llama, first={"a": module})


class TestResult:
    def test_nothing_is_written_and_the_model_is_as_it_was(self, tmp_path, monkeypatch):
        extension.refusal()  # the native passes are built where the home is now
        for name in ("here", "temporary", "home"):
            (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        model = tiny("gemma2")
        before, threads = state_of(model), torch.get_num_threads()
        torch.manual_seed(3)
        drawn = torch.get_rng_state()
        find(model, held_out=HELD_OUT, trials=4, repeats=1, do_sample=True)
        assert state_of(model) == before
        assert torch.get_num_threads() == threads
        assert torch.equal(torch.get_rng_state(), drawn)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    def test_the_config_loads_and_decodes_the_same_text(self, llama, timed, tmp_path):
        fastest = max(timed.finalists, key=lambda finalist: finalist.predicted)
        for skip in (timed.skip, fastest.skip):
            skip.save(tmp_path / "skip.json")
            assert SkipConfig.load(tmp_path / "skip.json") == skip
            drafted(llama, tmp_path / "skip.json")
        assert drafted(llama, tmp_path / "skip.json").stats.num_drafts > 0

    def test_the_config_says_what_was_measured(self, llama, timed):
        skip = timed.skip
        assert skip.matches(None, layerskip.fingerprint(llama))
        assert skip.notes["trials"] == 20
        assert skip.notes["prompts"] == {"traced": 3, "held_out": 1}
        assert skip.notes["positions"] == 3 * (TOKENS - 1)
        trace = steps(llama).trace
        for finalist in timed.finalists:
            assert finalist.alpha == replay(trace, finalist.skip).survival[0]
        if timed.winner is not None:
            assert skip.notes["confirmed"]["speedup"] > 1
            own = timed.winner.skip.costs
            assert own.items() >= timed.winner.costs.to_dict().items()
            # the default drafts, which a clock may prefer, use costs measured on each machine
            assert skip.costs == (None if skip.notes["keep_default"] else own)

    def test_the_record_is_a_search_file(self, timed, tmp_path):
        document = checked(timed, tmp_path)
        assert len(document["trials"]) == 20
        assert document["space"]["size"] == Space(kind="sublayer", num_layers=6).size
        assert document["plain"]["confirmed_tokens_per_second"] > 0
        for finalist in document["finalists"]:
            assert finalist["confirmed"]["equal"] == finalist["confirmed"]["compared"] == 1

    def test_lookups_join_where_they_pay(self, llama, timed, tmp_path):
        """These texts repeat themselves."""
        best = timed.finalists[0]
        assert best.decoding.lookup is True
        assert timed.record["finalists"][0]["decoding"]["lookup"] is True
        best.skip.save(tmp_path / "skip.json")
        sources = drafted(llama, tmp_path / "skip.json").stats.sources
        assert len(sources) == 2
        assert sources[0].num_draft_tokens > 0

    @pytest.mark.thorough
    def test_a_draft_vocabulary_is_searched_too(self, tmp_path):
        """On a machine where heads are expensive. The config contains the tokens."""
        model = tiny()
        going = {"cost": MACHINES["trimmed heads"], "space": "sublayer,vocabulary"}
        result = find(model, held_out=HELD_OUT, repeats=1, **going)
        best = result.finalists[0]
        tokens = best.skip.draft_vocabulary
        assert tokens is not None
        assert best.skip.costs["draft_vocabulary"] == len(tokens) in (12, 48)
        document = checked(result, tmp_path)
        assert document["finalists"][0]["draft_vocabulary"] == len(tokens)
        sizes = {trial["draft_vocabulary"] for trial in document["trials"]}
        assert len(tokens) in sizes <= {None, 12, 48}
        assert best.confirmed["equal"] == best.confirmed["compared"] == 1
        texts = [text.tokens for text in steps(model).trace.texts]
        assert tokens == tuple(ranked(texts, 97)[: len(tokens)].tolist())
        best.skip.save(tmp_path / "skip.json")
        assert drafted(model, tmp_path / "skip.json").stats.num_drafts > 0

    @pytest.mark.parametrize("cost", [COST, HOPELESS], ids=["pays", "hopeless"])
    def test_the_best_exit_is_among_the_finalists(self, llama, cost):
        result = find(llama, finalists=1, cost=cost, trials=12)
        exits = [f for f in result.finalists if f.name.startswith("exit-")]
        assert result.record["best_exit"] == exits[0].name
        assert len(result.finalists) <= 2
        fastest = max(result.finalists, key=lambda f: f.predicted)
        assert result.finalists[0] is fastest
        assert result.winner in (fastest, None)

    def test_what_gains(self, timed):
        """Decided by the prediction, the timed speedup and the low end of its interval."""
        for predicted, speedup, low, wins in (
            (1.3, 1.1, 0.9, True),  # prediction and clock agree
            (0.93, 1.01, 0.90, False),
            (0.93, 1.2, 1.0, False),  # the interval touches 1
            (0.93, 1.2, 1.001, True),  # the interval is above 1
            (1.3, 1.0, 0.9, False),  # the clock overrules the prediction
            (1.3, 1.1, None, True),  # one prompt gives no interval
            (1.3, None, None, True),  # without held-out prompts, the prediction decides
            (1.0, None, None, False),
        ):
            finalist = replace(
                timed.finalists[0],
                predicted=predicted,
                confirmed=None if speedup is None else {"speedup": speedup, "low": low},
            )
            case = predicted, speedup, low
            assert (winner([finalist]) is finalist) is wins, case

    def test_the_fastest_that_gains_wins(self, timed):
        def seen(predicted, speedup, low):
            block = {"speedup": speedup, "low": low}
            return replace(timed.finalists[0], predicted=predicted, confirmed=block)

        luckiest, slower, sure = seen(0.95, 1.5, 0.9), seen(1.3, 1.1, 0.9), seen(0.9, 1.2, 1.1)
        assert winner([luckiest, slower, sure]) is sure
        assert winner([slower, luckiest]) is slower
        assert winner([luckiest, seen(1.3, 0.99, 0.9)]) is None
        assert winner([]) is None

    @pytest.mark.parametrize("low", [1.0, 1.01])
    def test_what_ties_with_the_default_does_not_replace_it(self, llama, monkeypatch, low):
        def clock(model, task, finalists, prompts, **_):
            for finalist in finalists:
                finalist.confirmed = {"speedup": 1.1, "low": 1.05, "over_default": {"low": low}}
            return 100.0, {"speedup": 1.0}

        monkeypatch.setattr(pipeline.finalists, "confirm", clock)
        result = find(llama, held_out=HELD_OUT, trials=12)
        keeps = low == 1.0
        assert result.winner is not None
        assert result.record["keep_default"] is keeps
        assert result.record["default"] == {"speedup": 1.0}
        usual = automatic_draft(Sublayers(llama)).skip or SkipConfig()
        if keeps:
            assert result.skip.decoding == DecodingOptions(lookup=True)
            assert result.skip.low == usual.resolve(6).low
        else:
            assert result.skip.low is None

    def test_where_nothing_pays_nothing_is_drafted(self, llama, tmp_path):
        result = find(llama, cost=HOPELESS, trials=14)
        assert result.winner is result.record["winner"] is None
        assert result.skip.decoding.enabled is False
        assert result.record["bound"] < 1
        assert all(row["speedup"] < 1.0 for row in result.record["trials"])
        # expected-gain would not draft
        assert all(finalist.predicted == pytest.approx(1.0) for finalist in result.finalists)
        checked(result, tmp_path)
        result.skip.save(tmp_path / "skip.json")
        assert drafted(llama, tmp_path / "skip.json").stats.num_drafts == 0

    @pytest.mark.parametrize("space", [*thorough("sublayer", "layer"), "exit"])
    def test_layers_that_do_nothing_are_left_out(self, space):
        model = idle_end()
        result = find(model, space=f"{space},controller", trials=40)
        assert result.skip.attention == result.skip.mlp == (3, 4, 5)
        assert result.winner.alpha == 1.0
        assert result.winner.name == "exit-3"
        stats = drafted(model, result.skip).stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0

    @pytest.mark.parametrize(
        "law",
        [{}, *thorough({"do_sample": True, "temperature": 0.7, "top_k": 40})],
        ids=["greedy", "sampled"],
    )
    def test_given_costs_it_is_the_same_again(self, llama, law):
        shares = []
        first, again = (
            find(llama, trials=14, seed=5, **law, progress=lambda _, share: shares.append(share))
            for _ in range(2)
        )
        assert len(shares) > 28
        assert all(0 <= share <= 1 for share in shares)
        assert story(first) == story(again)
        assert first.skip == again.skip
        same = [name for name in first.record if name not in ("trials", "seconds")]
        assert {n: first.record[n] for n in same} == {n: again.record[n] for n in same}

    def test_costs_are_measured_where_none_are_given(self, llama, monkeypatch):
        measure = pipeline.sublayer_costs.measure
        monkeypatch.setattr(
            pipeline.sublayer_costs,
            "measure",
            lambda *a, **k: measure(*a, **k | {"budget": 1e-9, "contexts": [16]}),
        )
        result = find(llama, cost=None, trials=2)
        assert result.record["cost"]["contexts"] == [16]
        assert result.record["cost"]["place"] == machine(Sublayers(llama))
        assert result.record["seconds"]["cost"] > 0
        assert 0 < result.record["step_seconds"] < 1

    def test_number_of_trials(self, llama):
        spaces = ("exit", 6), ("layer", 6), ("sublayer", 6), ("sublayer", 30)
        defaults = [pipeline.default_trials(Space(kind=k, num_layers=n)) for k, n in spaces]
        assert defaults == [6, 32, 60, 228]
        assert len(find(llama, space="exit,lookup", trials=None).record["trials"]) == 5

    @pytest.mark.thorough
    def test_the_rejection_rule(self, llama, tmp_path):
        law = {"do_sample": True, "temperature": 0.8, "top_k": 50, "acceptance": "rejection"}
        result = find(llama, trials=3, held_out=HELD_OUT, repeats=1, **law)
        trace = steps(llama, Task(TOKENS, **law)).trace
        assert trace.rejection
        for finalist in result.finalists:
            assert finalist.alpha == replay(trace, finalist.skip).survival[0]
            assert finalist.confirmed["compared"] == 0  # the texts may differ under this rule
        assert result.skip.decoding.acceptance == "rejection"
        checked(result, tmp_path)
        assert result.skip.notes["law"]["acceptance"] == "rejection"


class TestTime:
    """`until`, by which every stage ends, and the cut-off of trials."""

    def test_no_stage_begins_after_the_end(self, llama):
        with pytest.raises(OutOfTime, match="no time was left for this: texts of the target"):
            steps(llama, until=0.0)
        going = steps(llama, held_out=HELD_OUT * 2)
        going.open()
        going.until = 0.0
        with pytest.raises(OutOfTime, match="costs of the sublayers"):
            going.price()
        going.price(COST)
        with pytest.raises(OutOfTime, match="no trial finished in time; give a longer timeout"):
            going.run(3, timeout=1e-9)
        going.run(3)
        with pytest.raises(OutOfTime, match="replaying the best drafts in full"):
            going.judge()

    def test_drafts_are_timed_on_two_prompts_or_not_at_all(self, llama):
        """The texts of one prompt should take 1.5 * 24 steps of 13 ms, of three methods."""
        going = steps(llama, held_out=HELD_OUT * 2)
        going.open()
        going.price(COST)
        going.run(3)
        going.until = time.monotonic() + 2.5
        going.judge(1)
        result = going.result()
        assert result.finalists
        assert result.record["default"] is result.record["seconds"]["confirm"] is None
        assert [each.confirmed for each in result.finalists] == [None] * len(result.finalists)
        going.until = math.inf
        going.judge(1, repeats=1)
        assert going.finalists[0].confirmed["prompts"] == 2

    def test_a_trial_that_is_cut_off_has_not_failed(self, llama, tmp_path, monkeypatch):
        evaluate, path = Objective._evaluate, tmp_path / "study.log"

        def cut(self, mask, losing):
            if len(self._evaluated) == 3:
                self.until = 0.0
            return evaluate(self, mask, losing)

        with monkeypatch.context() as patch:
            patch.setattr(Objective, "_evaluate", cut)
            result = find(llama, trials=9, storage=path)
        assert [trial["state"] for trial in result.record["trials"]] == ["complete"] * 3
        again = find(llama, trials=9, storage=path)
        assert [trial["state"] for trial in again.record["trials"]] == ["complete"] * 9
        sets = [trial["origin"] for trial in find(llama, trials=9).record["trials"]]
        assert {trial["origin"] for trial in again.record["trials"]} == {*sets}


class TestStudy:
    def test_a_study_keeps_its_costs(self, llama, tmp_path):
        path, here = tmp_path / "study.log", COST | {"place": machine(Sublayers(llama))}
        find(llama, trials=2, storage=path, cost=here)
        other = MACHINES["dear heads"]
        with pytest.raises(ValueError, match="priced with other costs than those given"):
            find(llama, trials=3, storage=path, cost=other)
        for cost in (None, here):  # they are not measured again
            resumed = find(llama, trials=3, storage=path, cost=cost)
            assert resumed.record["cost"] == here
            assert resumed.record["seconds"]["cost"] == 0
        assert len(resumed.record["trials"]) == 3
        find(llama, trials=2, storage=path, cost=other, study_name="another")

    @pytest.mark.parametrize(
        ("name", "value"), [("hardware", "another one"), ("threads", 99), ("host", "far")]
    )
    def test_every_place_measures_its_own_costs_once(
        self, llama, tmp_path, monkeypatch, name, value
    ):
        measured = []

        def measure(*_, **__):
            measured.append(len(measured))
            return COST | {"measured": measured[-1], "spread": 0.0, "busy": False}

        monkeypatch.setattr(pipeline.sublayer_costs, "measure", measure)

        def priced():
            going = steps(llama)
            going.open(tmp_path / "study.log")
            going.price()
            return int(going.objective.cost["measured"])

        assert [priced(), priced()] == [0, 0]
        with monkeypatch.context() as there:
            if name == "host":
                there.setattr(pipeline.socket, "gethostname", lambda: value)
            else:
                there.setattr(pipeline, "machine", lambda model: machine(model) | {name: value})
            assert [priced(), priced()] == [1, 1]
        assert priced() == 0

    @pytest.mark.parametrize("shown", [{"busy": True}, {"spread": 0.2}])
    def test_costs_that_other_work_disturbed_are_told(self, llama, monkeypatch, shown):
        record = COST | {"spread": 0.1, "busy": False} | shown
        monkeypatch.setattr(pipeline.sublayer_costs, "measure", lambda *_, **__: record)
        going = steps(llama)
        going.open()
        with pytest.warns(UserWarning, match="other work on this machine disturbed the costs"):
            going.price()

    def test_workers_of_unequal_speed_agree(self, llama, tmp_path, monkeypatch):
        """The slow machine, eight times as slow, is the only one to try the best set."""
        slow = cost_record(attention=8e-3, mlp=8e-3, head=4e-3, rest=4e-3)
        alone = find(llama, trials=12)
        best = max(alone.record["trials"], key=lambda trial: trial["speedup"])
        path = tmp_path / "study.log"
        before, after = best["number"], best["number"] + 1

        def going_on(name, cost, trials):
            monkeypatch.setattr(pipeline.socket, "gethostname", lambda: name)
            return find(llama, trials=trials, cost=cost, storage=path)

        assert before > 0
        fast = [going_on("fast", COST, before)]
        going_on("slow", slow, after)
        fast.append(going_on("fast", COST, 12))
        last = going_on("slow", slow, 12)
        assert story(fast[1]) == story(alone)
        assert len({result.winner.name for result in (alone, fast[1], last)}) == 1
        assert last.winner.predicted == pytest.approx(alone.winner.predicted)

    def test_costs_are_stamped_with_where_they_were_measured(self, llama):
        place = {"hardware": "elsewhere", "dtype": "float32", "execution": "fused", "threads": 64}
        result = find(llama, cost=COST | {"place": place}, trials=12)
        opened = Sublayers(llama)
        for finalist in result.finalists:
            assert finalist.skip.costs.items() >= place.items()
            with pytest.warns(UserWarning, match="for hardware elsewhere, .*threads 64; here it"):
                assert stored(finalist.skip, opened, 1) is None

    @pytest.mark.parametrize(
        ("model", "settings", "words"),
        [
            ({"seed": 1}, {}, "another model"),
            ({"dtype": torch.float64}, {}, "another dtype( and execution)?"),
            ({}, {"prompts": PROMPTS[:2]}, "another prompts"),
            ({}, {"task": Task(TOKENS, do_sample=True)}, "another law"),
            ({}, {"task": Task(TOKENS + 1)}, "another max_new_tokens"),
            ({}, {"space": Space(kind="layer", num_layers=6)}, "another space"),
            ({}, {"task": Task(TOKENS, execution="modules")}, "another execution"),
        ],
    )
    def test_the_study_of_another_search_is_refused(self, llama, tmp_path, model, settings, words):
        path = tmp_path / "study.log"
        steps(llama).open(path)
        other = steps(tiny(**model), **settings)
        with pytest.raises(ValueError, match=f"was made with {words}: "):
            other.open(path)
        other.open(path, "other")
        steps(llama).open(path)  # the first name still fits


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"trials": 0}, "trials must be 1 or more, got 0"),
            ({"timeout": 0.0}, "timeout must be more than 0 seconds"),
            ({"finalists": 0}, "must be 1 or more, got 0 and 2"),
            ({"repeats": 0}, "must be 1 or more, got 3 and 0"),
            ({"space": "magic"}, "space must be one of exit, layer, sublayer"),
            ({"sampler": "magic"}, "sampler must be one of gp, tpe, random, got 'magic'"),
            ({"acceptance": "magic"}, "acceptance must be 'coupled' or 'rejection'"),
            ({"do_sample": True, "temperature": 0.0}, "temperature"),
            ({"do_sample": True, "top_p": -0.5}, "top_p"),
            ({"max_new_tokens": 1}, "max_new_tokens of at least 2"),
            ({"max_new_tokens": 1000}, "must be at most 256 tokens for this model"),
            ({"held_out": [prompt(240)[0]]}, "must be at most 256 tokens for this model"),
            ({"held_out": [torch.zeros(0, dtype=torch.long)]}, "at least one token"),
            ({"first": {"mine": SkipConfig(attention=(0,))}}, "skip config mine is not in the"),
            ({"first": {"mine": SkipConfig(attention=(9,))}}, "config mine: attention indices"),
            ({"execution": "magic"}, "execution"),
            ({"storage": "sqlite:////no/such/folder/x.db"}, "cannot open the study 'layerskip'"),
        ],
    )
    def test_bad_settings(self, llama, monkeypatch, settings, words):
        def evaluated(self, mask, losing):
            raise AssertionError("a trial ran before this was refused")

        monkeypatch.setattr(Objective, "__call__", evaluated)
        with pytest.raises(ValueError, match=words):
            find(llama, **settings)

    def test_a_space_of_another_model(self, llama):
        with pytest.raises(ValueError, match="the space is for 5 layers, the model has 6"):
            steps(llama, space=Space(kind="layer", num_layers=5))
