"""Trimmed draft vocabularies: which tokens, which rows, and that no text depends on them."""

import functools
import json
from itertools import product

import pytest
import torch
from cost_records import analytic
from models import (
    FAMILIES,
    FEW_FAMILIES,
    VOCABULARY,
    WINDOW,
    Erratic,
    lively_model,
    prompt,
    pure,
    ragged,
    tiny_model,
)
from torch import nn
from transformers import SuppressTokensLogitsProcessor

import layerskip
from layerskip import DecodingOptions, LayerSkipDecoding, LowPrecision, SkipConfig
from layerskip.bench.checks import check, state_of
from layerskip.bench.methods import Engine, Task
from layerskip.costs.speculation import CostTable
from layerskip.model.opened_models import Sublayers
from layerskip.texts.vocabulary import ranked
from layerskip.timing.cost_tables import place, stored
from layerskip.weights.rounded import TrimmedHead, copies_of

COSTS = CostTable(0.1, (1.0, 1.01, 1.02))  # with these, drafting pays; no test depends on a clock
SKIP = SkipConfig.early_exit(4)
SOME = tuple(torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))[:40].tolist())
model_of = functools.cache(lively_model)
VOCABULARIES = {"one": (SOME[0],), "some": SOME, "all": tuple(range(VOCABULARY))}
# ---- Which tokens ----


def test_tokens_are_ranked_by_ends_then_by_how_often_they_occur_then_by_id():
    texts = [[5, 3, 3, 7], torch.tensor([[7, 7, 1]]), (), torch.tensor([3, 5])]
    assert ranked(texts, 9).tolist() == [3, 7, 5, 1, 0, 2, 4, 6, 8]
    assert ranked([], 4).tolist() == [0, 1, 2, 3]
    assert ranked([[5, 5, 5, 2]], 7, ends=[6, 4]).tolist() == [4, 6, 5, 2, 0, 1, 3]
    assert ranked([[5, 5, 2]], 6, ends={2}).tolist() == [2, 5, 0, 1, 3, 4]


# ---- Which rows ----


@pytest.mark.parametrize("execution", ["modules", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_kept_tokens_have_their_logits_and_others_none(family, execution):
    """With soft caps and norms of every family. The target's logits stay whole."""
    model = model_of(family)
    before, names = state_of(model), sorted(vars(model))
    opened = Sublayers(model, execution=execution)
    trimmed = opened.trimmed(SOME)
    hidden = torch.randn(2, 3, 32, dtype=torch.float64)
    whole, few = opened.logits(hidden), trimmed.weights.head()(hidden, None)
    kept = torch.zeros(VOCABULARY, dtype=torch.bool)
    kept[list(SOME)] = True
    torch.testing.assert_close(few[..., kept], whole[..., kept])
    assert torch.equal(few[..., ~kept], torch.full_like(few[..., ~kept], float("-inf")))
    assert torch.equal(trimmed.logits(hidden), whole)
    assert torch.equal(opened.weights.head()(hidden, None), whole)
    assert (opened.weights.vocabulary, trimmed.weights.vocabulary) == (VOCABULARY, 40)
    assert (state_of(model), sorted(vars(model))) == (before, names)


@torch.no_grad()
def test_a_head_with_a_bias():
    head = nn.Linear(8, 11)
    hidden = torch.randn(1, 2, 8)
    trimmed = TrimmedHead(head, (9, 2, 5))
    few = nn.functional.linear(hidden, trimmed.weight, trimmed.bias)
    whole = head(hidden)
    torch.testing.assert_close(few, whole[..., trimmed.tokens], rtol=1e-5, atol=1e-6)
    assert trimmed.spread(few).isfinite().sum() == 2 * len(trimmed.tokens)


def test_rows_are_copied_once_and_again_when_the_weight_has_changed():
    head = nn.Linear(8, 11)
    first = copies_of(head).trimmed(head, (4, 2))
    assert copies_of(head).trimmed(head, (4, 2)) is first
    with torch.no_grad():
        head.weight.mul_(2)
    assert torch.equal(copies_of(head).trimmed(head, (4, 2)).weight, head.weight[[2, 4]])
    head.to(torch.float64)
    assert copies_of(head).trimmed(head, (4, 2)).weight.dtype == torch.float64


def test_copies_of_a_head_take_no_more_room_than_it_does():
    head = nn.Linear(8, 11)
    lists = ((0, 1, 2, 3), (4, 5, 6), (7, 8), (9, 10), (1,))
    first, *others = (copies_of(head).trimmed(head, tokens) for tokens in lists)
    for tokens, copied in zip(lists[1:], others, strict=True):
        assert copies_of(head).trimmed(head, tokens) is copied
    assert copies_of(head).trimmed(head, lists[0]) is not first


# ---- The same texts ----


def decode(family, *, sample, **settings):
    ids, mask = ragged((WINDOW + 5, 3, WINDOW + 2), seed=3)
    settings |= {"temperature": 0.8, "top_k": 20, "seeds": (11, 12, 13)} if sample else {}
    how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": sample}
    out = layerskip.generate(model_of(family), ids, costs=COSTS, **how, **settings)
    return out.sequences[:, ids.shape[1] :].tolist(), out.stats


@functools.cache
def wanted(family, sample):
    """The text of plain decoding."""
    return decode(family, sample=sample, enabled=False)[0]


@pytest.mark.parametrize("tokens", VOCABULARIES)
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_texts_are_the_same_whatever_drafts_can_draw(family, tokens):
    ways = [("expected-gain", "modules"), (Erratic(), "fused")]
    if tokens == "some":  # each way is used with both
        ways.reverse()
    for sample, (controller, execution) in zip((False, True), ways, strict=True):
        text, stats = decode(
            family,
            sample=sample,
            skip=SKIP,
            controller=controller,
            draft_vocabulary=VOCABULARIES[tokens],
            execution=execution,
        )
        assert text == wanted(family, sample)
        assert stats.num_draft_tokens > 0


def test_drafts_draw_from_their_vocabulary_only_and_some_are_accepted():
    """Without this, the test above would prove nothing."""
    for sample in (False, True):
        rates = {}
        for name, tokens in VOCABULARIES.items():
            how = {"skip": SKIP, "lookup": False, "controller": "fixed", "max_draft_length": 3}
            text, stats = decode("llama", sample=sample, draft_vocabulary=tokens, **how)
            inside = sum(token in tokens for row in text for token in row)
            assert stats.num_accepted_tokens <= inside
            rates[name] = stats.acceptance_rate
        _, whole = decode("llama", sample=sample, **how)
        assert rates["one"] < 0.1 < rates["some"] < rates["all"] == whole.acceptance_rate


def test_a_confidence_is_the_softmax_over_what_can_be_drawn():
    model, ids = model_of("gemma2"), prompt(9)
    opened = Sublayers(model)
    how = {"controller": "confidence", "threshold": 0.0, "max_draft_length": 1}
    how |= {"skip": SKIP, "lookup": False, "max_new_tokens": 6}
    for tokens in (SOME, SOME[:3]):
        known = [*ids[0].tolist()]
        for round_ in layerskip.decode(model, ids, draft_vocabulary=tokens, **how):
            if round_.drafted[0]:
                with torch.no_grad():
                    states = model(torch.tensor([known]), output_hidden_states=True).hidden_states
                    logits = opened.logits(states[4])[0, -1][list(tokens)]
                # of the most probable token, because decoding is greedy
                expected = float(torch.softmax(logits.float(), -1).max())
                assert round_.confidences[0][0] == pytest.approx(expected, rel=1e-5)
            known += round_.tokens[0]
    one = layerskip.decode(model, ids, draft_vocabulary=[7], **how)
    assert {c for round_ in one for row in round_.confidences for c in row} == {1.0}


@pytest.mark.parametrize("sample", [False, True])
def test_where_nothing_is_left_to_draw_nothing_is_drafted(sample):
    """If processors forbid the whole vocabulary, the text is that of plain decoding."""
    model, ids = model_of("llama"), prompt(7)
    forbidden = SuppressTokensLogitsProcessor(list(SOME), device="cpu")
    how = {"logits_processor": [forbidden], "do_sample": sample, "seed": 4}
    how |= {"max_new_tokens": 12}
    plain = [r.tokens[0] for r in layerskip.decode(model, ids, enabled=False, **how)]
    how |= {"skip": SKIP, "lookup": False, "draft_vocabulary": SOME}
    for acceptance, controller in product(("coupled", "rejection"), ("fixed", "confidence")):
        how |= {"acceptance": acceptance, "controller": controller}
        rounds = list(layerskip.decode(model, ids, **how))
        assert [r.tokens[0] for r in rounds] == plain
        assert not any(r.drafted[0] for r in rounds)
    assert not {t for tokens in plain for t in tokens} & set(SOME)


def test_processors_may_make_a_draft_leave_its_vocabulary():
    """Draft and target both obey a processor that sets scores, as for forced tokens."""

    @pure
    def forced(ids, scores):
        if ids.shape[1] % 3:
            return scores
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([90]), 0.0)

    model, ids = model_of("llama"), prompt(7)
    assert 90 not in SOME
    how = {"logits_processor": [forced], "max_new_tokens": 12, "do_sample": True}
    how["seed"] = 4
    plain = [t for r in layerskip.decode(model, ids, enabled=False, **how) for t in r.tokens[0]]
    how |= {"skip": SKIP, "lookup": False, "controller": "confidence", "threshold": 0.0}
    how |= {"draft_vocabulary": SOME}
    for acceptance in ("coupled", "rejection"):
        rounds = list(layerskip.decode(model, ids, acceptance=acceptance, **how))
        text = [t for r in rounds for t in r.tokens[0]]
        assert text[2::3] == [90] * 4
        assert acceptance == "rejection" or text == plain
        assert any(c == 0.0 for r in rounds for c in r.confidences[0])  # the head lacks its logit


def test_a_check_drafts_from_the_vocabulary(spied, sizes):
    made = spied(Sublayers, "trimmed", lambda _, tokens: len(tokens))
    options = DecodingOptions(draft_vocabulary=SOME[:9], enabled=False, controller="fixed")
    skip = SkipConfig(exit_layer=4, decoding=options)
    sizes(draws=256)
    report = check(lively_model("llama"), [prompt(5), prompt(8)], skip, max_new_tokens=8)
    assert report.passed
    assert set(made) == {9}


# ---- Where a head cannot be trimmed ----


class Unusual(nn.Linear):
    """A head of another class, such as quantised and adapted ones have."""


def hooked(model):
    model.lm_head.register_forward_hook(lambda *_: None)


def patched(model):
    model.lm_head.forward = functools.partial(nn.Linear.forward, model.lm_head)


def adapted(model):
    head = Unusual(32, VOCABULARY, bias=False, dtype=torch.float64).eval()
    head.weight = model.lm_head.weight
    model.lm_head = head


@pytest.mark.parametrize(
    ("change", "reason"),
    [(hooked, "has forward hooks"), (patched, "patched forward"), (adapted, "is a Unusual")],
)
def test_a_head_that_is_not_plain_stays_whole_with_a_warning(change, reason):
    model = tiny_model("llama")
    ids = prompt(6)
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    change(model)
    how = {"skip": SKIP, "max_new_tokens": 8, "controller": "fixed"}
    whole = layerskip.generate(model, ids, **how)
    with pytest.warns(UserWarning, match=f"draft_vocabulary has no effect: lm_head .*{reason}"):
        out = layerskip.generate(model, ids, draft_vocabulary=SOME, **how)
    assert out.sequences.tolist() == want.tolist()
    assert out.stats == whole.stats


# ---- Settings, files, costs ----


def test_anything_that_holds_integers_will_do_and_goes_before_the_skip_config():
    skip = SkipConfig(exit_layer=4, decoding=DecodingOptions(draft_vocabulary=(1, 2)))
    assert LayerSkipDecoding(skip).draft_vocabulary == (1, 2)
    assert LayerSkipDecoding(SKIP).draft_vocabulary is None
    for tokens in ([3, 1], range(1, 4), torch.tensor([3, 1]), {5, 9}, iter((4, 2))):
        found = LayerSkipDecoding(skip, draft_vocabulary=tokens).draft_vocabulary
        assert found not in (None, (1, 2))
        assert {type(token) for token in found or ()} == {int}
    with pytest.raises(ValueError, match=r"tokens in 0\.\.96 for this model, got 97; rank"):
        list(layerskip.decode(model_of("llama"), prompt(4), skip=SKIP, draft_vocabulary=[3, 97]))


def test_a_file_has_its_tokens_in_one_line(tmp_path):
    tokens = tuple(range(30_000, 0, -1))
    options = DecodingOptions(controller="fixed", draft_vocabulary=tokens)
    notes = {"text": "[\n 1,\n 2]", "prompts": {"names": ["a", "b"], "sizes": [[1, 2], []]}}
    skip = SkipConfig(attention=(1, 4), mlp=(2,), decoding=options, notes=notes)
    skip.save(tmp_path / "skip.json")
    read = SkipConfig.load(tmp_path / "skip.json")
    assert read.decoding == options
    assert read.draft_vocabulary == tokens
    assert (read, read.notes) == (skip, notes)
    lines = (tmp_path / "skip.json").read_text().splitlines()
    assert len(lines) < 30
    assert '  "attention": [1, 4],' in lines
    assert json.loads("\n".join(lines)) == skip.to_dict()
    assert len(repr(skip)) + len(repr(options)) < 300


def test_costs_are_those_of_the_vocabulary():
    opened = Sublayers(model_of("llama"))
    trimmed = opened.trimmed(SOME)
    read = opened.weight_bytes()
    whole, few = (analytic(model, SKIP) for model in (opened, trimmed))
    saved = read["head"] * (1 - 40 / VOCABULARY) / (sum(read["sublayers"]) + read["head"])
    assert whole.draft - few.draft == pytest.approx(saved)


def test_costs_of_another_vocabulary_are_left_aside():
    opened = Sublayers(model_of("llama"))
    trimmed = opened.trimmed(SOME)
    table = COSTS.to_dict()
    for here, there in ((opened, trimmed), (trimmed, opened)):
        skip = SkipConfig(exit_layer=4, costs={**table, **place(here, 1)})
        assert stored(skip, here, 1) == COSTS
        with pytest.warns(UserWarning, match="measured for draft_vocabulary"):
            assert stored(skip, there, 1) is None
    old = SkipConfig(exit_layer=4, costs=table)  # from before draft vocabularies
    assert stored(old, opened, 1) == COSTS
    with pytest.warns(UserWarning, match="measured for draft_vocabulary 97; here it is 40"):
        assert stored(old, trimmed, 1) is None


def test_a_method_says_how_many_tokens():
    model = model_of("llama")
    options = DecodingOptions(draft_vocabulary=SOME)
    entry = Engine(model, Task(8), "self", SkipConfig(exit_layer=4, decoding=options)).describe()
    assert entry["draft_vocabulary"] == 40
    assert entry["label"] == "exit 4, vocabulary 40, expected-gain"
    assert Engine(model, Task(8), "self", SKIP).describe()["draft_vocabulary"] is None


def test_a_benchmark_says_what_is_low():
    model = model_of("llama")
    entry = Engine(model, Task(8), "self", SkipConfig.low_precision()).describe()
    assert entry["label"] == "whole model, in 8 bits, expected-gain"
    every = list(range(6))
    assert entry["low"] == {"bits": 8, "attention": every, "mlp": every, "head": True}
    assert (entry["num_kept"], entry["prefix"]) == (12, 0)
    skip = SkipConfig(exit_layer=4, low=LowPrecision(mlp=(), head=False))
    entry = Engine(model, Task(8), "self", skip).describe()
    assert entry["label"] == "exit 4, 4 of 8 sublayers in 8 bits, head exact, expected-gain"
    assert entry["low"] == {"bits": 8, "attention": every[:4], "mlp": [], "head": False}
    assert Engine(model, Task(8), "self", SKIP).describe()["low"] is None
