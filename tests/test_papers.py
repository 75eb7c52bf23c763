"""Published systems that enter by the public protocols: Medusa, AMUSD, DISCO, SpecTr."""

import copy
import gc
import json
import math
import random
import threading
from dataclasses import replace

import pytest
import sampling
import torch
from kinds import medusa_folder
from marks import thorough
from models import lively_model, ragged, tiny_model
from run_files import drafting, header, record, rounds, write
from transformers import PretrainedConfig

from layerskip import SkipConfig, generate
from layerskip.bench.lawtest import chi_square, draw_rounds
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import Fixed
from layerskip.model.opened_models import Sublayers
from layerskip.research import spectr
from layerskip.research.disco import Classifier, Disco, Draft, features, learn, main
from layerskip.research.running_ahead import RunningAhead
from layerskip.serving.scheduler import Serving

COSTS = CostTable(0.0, (1.0, 1.1))
HOW = {"lookup": False, "draft_memory": 0, "costs": COSTS, "max_new_tokens": 40}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("sample", [False, True])
def test_medusas_heads_draft_what_the_paper_says(suffix, sample, tmp_path, spied):
    model = tiny_model("llama")
    asked = spied(PretrainedConfig, "get_config_dict", lambda source: source)
    weights = medusa_folder(tmp_path, model, layers=2, suffix=suffix)
    ids, mask = ragged((9, 4), seed=2)
    how = HOW | {"attention_mask": mask, "do_sample": sample, "seed": 1 if sample else None}
    plain = generate(model, ids, enabled=False, **how)
    out = generate(model, ids, assistant=tmp_path, controller=Fixed(3), max_draft_length=3, **how)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.num_draft_tokens > 50
    assert asked == [tmp_path]
    if sample:
        return
    row, text = 0, ids.shape[1]
    for drafted in out.rounds[1:]:
        text += len(out.rounds[drafted.index - 1].tokens[row])
        if not drafted.drafts[row]:
            continue
        known = out.sequences[row : row + 1, :text]
        state = model.model(known[:, :-1], mask[row : row + 1, :1].new_ones(1, text - 1))
        state = state.last_hidden_state[0, -1]  # it has drawn the last known token
        for k, token in enumerate(drafted.drafts[row]):
            hidden = state
            for n in range(2):
                linear = weights[f"{k}.{n}.linear.weight"] @ hidden
                hidden = hidden + torch.nn.functional.silu(linear)
            assert token == int((weights[f"{k}.2.weight"] @ hidden).argmax())


def test_heads_of_other_models_and_damaged_folders_are_refused(tmp_path):
    model = tiny_model("llama")
    wide = {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}
    for name, damage, says in (
        ("wide", None, "belong to another model: they map 40 numbers"),
        ("few", {"medusa_num_heads": 4}, r"not hold the 4 Medusa heads .*3\.0\.linear"),
        ("cut", b"nothing", "not hold the 3 Medusa heads"),
        ("gone", b"", r"there must be medusa_lm_head\.safetensors or"),
    ):
        folder = tmp_path / name
        medusa_folder(folder, tiny_model("llama", **wide) if name == "wide" else model)
        about, file = folder / "config.json", folder / "medusa_lm_head.safetensors"
        if isinstance(damage, dict):
            about.write_text(json.dumps(json.loads(about.read_text()) | damage))
        elif damage is not None:
            file.write_bytes(damage) if damage else file.unlink()
        with pytest.raises(ValueError, match=says):
            generate(model, torch.tensor([[5, 6]]), assistant=folder, max_new_tokens=2)


class Waiting(Fixed):
    """Lets the second model finish before every round, so that a test sees all its drafts."""

    def __init__(self, longest):
        super().__init__(longest)
        self.runners = []

    def begin(self, context, rows):
        for runner in self.runners:
            with runner.changed:
                runner.changed.wait_for(lambda runner=runner: runner.next_row() is None, 10)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 7)])
def test_a_model_that_runs_ahead_leaves_the_text(lengths, sample, monkeypatch):
    model = lively_model("llama", vocab_size=24)
    ids, mask = ragged(lengths, seed=2)
    ids = torch.where(mask.bool(), ids % 22 + 2, 0)  # (B, W)
    how = HOW | {"attention_mask": mask, "do_sample": sample, "seed": 1 if sample else None}
    plain = generate(model, ids, enabled=False, **how)
    source, controller = RunningAhead(Sublayers(copy.deepcopy(model)), longest=5), Waiting(5)
    opened = source.open

    def open_and_wait(batch):
        state = opened(batch)
        controller.runners.append(state.runner)
        return state

    monkeypatch.setattr(source, "open", open_and_wait)
    out = generate(model, ids, sources=[source], controller=controller, **how)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.num_draft_tokens > 20
    if not sample:  # it is the same model, so all that it drafts is right
        assert out.stats.num_accepted_tokens == out.stats.num_draft_tokens
    else:
        assert 0 < out.stats.num_accepted_tokens < out.stats.num_draft_tokens
    runners = controller.runners
    del out
    gc.collect()
    for runner in runners:
        runner.thread.join(10)
        assert not runner.thread.is_alive()


def test_a_model_that_runs_ahead_reports_its_errors():
    model = lively_model("llama", vocab_size=24)
    other = Sublayers(copy.deepcopy(model))
    source = RunningAhead(other)
    other.feed = lambda *_: 1 / 0
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ZeroDivisionError):
        generate(
            model, ids, sources=[source], controller=Waiting(4), **HOW | {"max_new_tokens": 200}
        )
    assert not [each for each in threading.enumerate() if each.name.startswith("running-ahead")]


def drawn_drafts(count, chance, seed=0):
    """Drafts of eight tokens whose acceptance is `chance(confidence, place)`."""
    draw = random.Random(seed)
    drafts = []
    for _ in range(count):
        sure = [draw.random() for _ in range(8)]
        right = 0
        while right < 8 and draw.random() < chance(sure[right], right):
            right += 1
        drafts.append(Draft(sure, right))
    return drafts


def test_disco_learns_what_stops_drafts():
    def chance(confidence, place):
        weights = (1.0, 2.0, -0.4)
        total = sum(w * x for w, x in zip(weights, features(confidence, place), strict=True))
        return 1 / (1 + math.exp(-total))

    costs = CostTable(0.2, (1.0, 1.1))
    learnt = learn(drawn_drafts(4000, chance), costs, "margin")
    for confidence in (0.1, 0.5, 0.9):
        for place in (0, 2):
            assert learnt.probability(confidence, place) == pytest.approx(
                chance(confidence, place), abs=0.05
            )
    # On other drafts it stops better than any fixed length, and an uninformed one does not.
    drafts = drawn_drafts(4000, chance, seed=1)

    def rate(classifier):
        tokens = cost = 0.0
        for sure, right in drafts:
            controller = Disco(classifier)
            length = min(1, controller.limit(0, 8))
            while length < 8 and controller.keep_drafting(0, sure[length - 1]):
                length += 1
            tokens += 1 + min(right, length)
            cost += costs.round_cost(length)
        return tokens / cost

    fixed = max(
        sum(1 + min(right, n) for _, right in drafts) / (len(drafts) * costs.round_cost(n))
        for n in range(1, 9)
    )
    assert rate(learnt) > 1.02 * fixed
    blind = learnt._replace(weights=(learnt.weights[0], 0.0, 0.0))
    assert rate(blind) <= 1.001 * fixed


def test_disco_decodes_with_a_file_that_it_has_learnt(tmp_path):
    """As a person would: record, learn, decode; the text stays."""
    run_file, file = tmp_path / "run.jsonl", tmp_path / "disco.json"
    one = {"draft": 0.3, "verify": [1.0, 1.1, 1.2], "source": "measured"}
    method = drafting("self", controller="confidence", costs={"1": one})
    drafts = drawn_drafts(60, lambda sure, _: sure)
    told = rounds(*((len(sure), right, right + 1) for sure, right in drafts))
    told["confidences"] = [[sure] for sure, _ in drafts]
    new = 1 + sum(right + 1 for _, right in drafts)
    lines = [header(methods=[method], baseline="self")]
    lines.append(record("self", rounds=told, new_tokens=[new]))
    write(run_file, lines)
    main(run_file, file)
    model, ids = lively_model("llama", vocab_size=24), torch.tensor([[5, 6, 7]])
    how = HOW | {"skip": SkipConfig.early_exit(4)}
    del how["draft_memory"]
    plain = generate(model, ids, enabled=False, **how)
    out = generate(model, ids, controller="disco", classifier=str(file), **how)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.num_accepted_tokens > 0
    with pytest.raises(ValueError, match="disco needs a classifier"):
        generate(model, ids, controller="disco", **how)
    with pytest.warns(UserWarning, match="classifier has no effect"):
        generate(model, ids, controller="fixed", classifier=str(file), **how)


def test_a_second_model_is_taken_over_by_name():
    model = lively_model("llama", vocab_size=24)
    ids, second = torch.tensor([[5, 6, 7]]), copy.deepcopy(model)
    plain = generate(model, ids, enabled=False, **HOW)
    out = generate(model, ids, sources=["running-ahead"], assistant=second, **HOW)
    assert torch.equal(out.sequences, plain.sequences)
    assert [each.name for each in out.stats.sources] == ["running-ahead"]
    with pytest.raises(ValueError, match="needs a second model"):
        generate(model, ids, sources=["running-ahead"], **HOW)
    how = HOW | {"sources": ["running-ahead"], "acceptance": "rejection"}
    with pytest.raises(ValueError, match="drafts of running-ahead depend on timing, and so would"):
        generate(model, ids, assistant=second, do_sample=True, **how)


def test_disco_needs_both_outcomes_and_a_file_of_its_own(tmp_path):
    with pytest.raises(ValueError, match="accepted and rejected tokens"):
        learn([Draft([0.5, 0.5], 2)], COSTS, "margin")
    file = tmp_path / "disco.json"
    made = Classifier((0.1, 0.2, 0.3), 0.45, "margin")
    made.save(file)
    assert Classifier.load(file) == made
    for text, says in {
        "{}": "kind is missing",
        '{"kind": "exits"}': "kind must be 'disco'",
        "[": "not valid JSON",
        file.read_text().replace("0.45", "2"): "threshold",
        file.read_text().replace("margin", "mood"): "signal",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"the classifier .*: .*{says}"):
            Classifier.load(file)


def two_laws(size=20, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draw, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_k_seq_accepts_nearly_what_the_best_rule_accepts(count):
    for seed in range(20):
        p, q = (each.softmax(-1) for each in two_laws(7, seed))
        inside = torch.tensor([[i >> k & 1 for k in range(7)] for i in range(128)]).double()
        cuts = inside @ p + 1 - (inside @ q) ** count  # of all sets of tokens
        best = spectr.optimal_acceptance(p, q, count)
        assert best == pytest.approx(float(cuts.min()))
        ours = spectr.acceptance(p, q, count)
        assert (1 - 1 / math.e) * best - 1e-9 <= ours <= best + 1e-9
        if count == 1:
            assert ours == pytest.approx(float(torch.minimum(p, q).sum()))
        assert spectr.acceptance(p, p, count) == pytest.approx(1.0)


def test_several_independent_drafts_follow_the_target_and_are_accepted_more_often():
    target, draft = two_laws()
    p, q = target.softmax(-1), draft.softmax(-1)
    first, bonus = draw_rounds(target, draft, acceptance="spectr", draws=4000)
    assert chi_square(first, p) > 0.001
    assert chi_square(bonus, p) > 0.001
    share, expected = len(bonus) / len(first), spectr.acceptance(p, q, spectr.CANDIDATES)
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 4000)
    assert expected > spectr.acceptance(p, q, 1) + 0.1


@pytest.mark.parametrize("wrong", ["each by min(1, p / q)", "the rest by p"])
def test_wrong_rules_for_several_drafts_are_found(wrong, monkeypatch):
    """Negative control."""
    target, draft = two_laws()
    if wrong == "each by min(1, p / q)":
        monkeypatch.setattr(spectr, "divisor", lambda p, q, _: (1.0, float(p.minimum(q).sum())))
    else:
        rule = replace(spectr.SPECTR, choose=lambda p, *rest: (spectr.k_seq(p, *rest)[0], p))
        monkeypatch.setattr(spectr, "SPECTR", rule)
    first, _ = draw_rounds(target, draft, acceptance="spectr", draws=4000)
    assert chi_square(first, target.softmax(-1)) < 1e-6


@pytest.mark.parametrize(
    ("skip", "rows"),
    [
        *((SkipConfig.early_exit(1), 15), (SkipConfig(mlp=(1,)), 50)),
        *thorough((SkipConfig.early_exit(1), 1), (SkipConfig(mlp=(1,)), 1)),
    ],
)
def test_texts_follow_the_targets_law_with_several_drafts(skip, rows):
    counts, tokens = sampling.sample_texts(
        "top-p", drafts=[skip], acceptance="spectr", rows=rows, longest=6
    )
    assert sampling.p_value(counts, "top-p") > sampling.LEVEL
    assert 0 < tokens[0][1] < tokens[0][0]


def test_several_drafts_work_at_every_door():
    model = lively_model("llama", vocab_size=24)
    ids, mask = ragged((9, 4), seed=2)
    ids = torch.where(mask.bool(), ids % 22 + 2, 0)  # (B, W)
    how = {"attention_mask": mask, "max_new_tokens": 20, "skip": SkipConfig.early_exit(4)}
    greedy = generate(model, ids, acceptance="spectr", do_sample=False, **how)
    plain = generate(model, ids, enabled=False, do_sample=False, **how)
    assert torch.equal(greedy.sequences, plain.sequences)
    again = [
        generate(model, ids, acceptance="spectr", controller="fixed", do_sample=True, seed=3, **how)
        for _ in range(2)
    ]
    assert torch.equal(again[0].sequences, again[1].sequences)
    with pytest.raises(ValueError, match="does not support acceptance 'spectr'"):
        Serving(model, acceptance="spectr")
