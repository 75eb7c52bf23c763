"""A second model as the draft: its text, law, cache, costs, vocabulary and replays."""

import copy
import gc
import weakref

import pytest
import torch
from cost_records import analytic
from looped import decoded, model_of, prompts, second_of, traced
from marks import thorough
from models import Fickle, lively_model

from layerskip import LayerSkipDecoding, Lookup, SkipConfig, generate
from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Request
from layerskip.decoding.laws import Law
from layerskip.decoding.sources.assistant import Assistant
from layerskip.model.opened_models import Sublayers
from layerskip.replay.chains import Chains
from layerskip.texts.vocabulary import check_vocabularies, warn_of_vocabularies
from layerskip.timing.cost_tables import cost_tables

COSTS = CostTable(0.15, (1.0, 1.05, 1.1))
EXIT = SkipConfig.early_exit(4).resolve(6)


# ---- Decoding. That the text and its law are the target's is tested in `test_every_kind.py`. ----


@pytest.mark.parametrize("execution", [*thorough("modules"), "fused"])
@pytest.mark.parametrize("family", ["llama", *thorough("gemma2"), "gemma3"])
def test_a_copy_of_the_target_is_always_right(family, execution):
    """The assistant's state stays right after others' rejected drafts, and in windows."""
    model = model_of(family)
    same = Assistant(Sublayers(copy.deepcopy(model), execution))
    wild = Assistant(Sublayers(second_of(family, noise=1.0)))
    how = {"model": model, "new_tokens": 40}
    for seed, sample in ((0, False), (1, True)):
        run = decoded((wild, same, Lookup()), Fickle(seed), sample=sample, **how)
        wrong, right, _ = run.stats.sources
        assert right.num_accepted_tokens == right.num_draft_tokens > 10
        assert wrong.num_accepted_tokens < wrong.num_draft_tokens


@pytest.mark.parametrize(("ours", "theirs"), [(12, 16), *thorough((16, 12))])
def test_heads_may_be_padded_differently(ours, theirs):
    """Tokens that one head lacks are not drafted. This costs acceptance only."""
    model = model_of(vocab_size=ours)
    for sample in (False, True):
        plain = decoded((), Fixed(), model=model, sample=sample)
        second = Assistant(Sublayers(second_of(vocab_size=theirs)))
        run = decoded((second,), Fixed(4), model=model, sample=sample)
        assert run.emitted == plain.emitted
        assert run.stats.num_draft_tokens
        assert ours < theirs or any(token >= 12 for row in run.emitted for token in row)


# ---- Replays. ----


def test_an_assistant_that_has_not_read_the_texts_is_seen():
    """Negative control: a state that does not catch up drafts other tokens."""
    draft = Assistant(Sublayers(second_of()))
    (text, *_), trace = traced(False, False).texts, traced(False, False)
    starts = [(text, text.prompt + i) for i in range(9)]
    chains = Chains(trace, draft, starts, 6)
    want = chains.drafts().tokens
    chains = Chains(trace, draft, starts, 6)
    chains.draft.passes.states[0].missing = lambda: 1
    assert not torch.equal(chains.drafts().tokens, want)


# ---- What it costs. ----


def test_costs_are_measured_and_kept_without_the_model():
    model, other = copy.deepcopy(model_of()), copy.deepcopy(second_of())
    ids, mask = prompts(model)
    request = Request(ids, mask, 8, Law((), do_sample=False, rows=len(ids)))
    opened, drafts = Sublayers(model), [Lookup(), Assistant(Sublayers(other)), EXIT]
    tables = cost_tables(opened, drafts, request, seconds=0.3)  # at least two sweeps
    assert [table.at(4).source for table in tables] == ["measured"] * 3
    assert tables[0].at(4).draft == 0
    second = weakref.ref(other)
    del drafts, other
    gc.collect()
    assert second() is None


def test_analytic_costs_are_those_of_its_bytes():
    model = Sublayers(model_of())
    small = Sublayers(lively_model("llama", vocab_size=12, num_hidden_layers=2))
    bytes_ = small.weight_bytes()
    whole = model.weight_bytes()
    want = (sum(bytes_["sublayers"]) + bytes_["head"]) / (sum(whole["sublayers"]) + whole["head"])
    assert analytic(model, Assistant(small)).draft == pytest.approx(want)
    trimmed = Assistant(small.trimmed([2, 3, 4]))
    assert analytic(model, trimmed).draft < want


# ---- The vocabulary. ----


class Words:
    """A stand-in for a tokenizer."""

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: token for token, word in enumerate(self.words)}


def test_vocabularies_are_compared_token_by_token():
    check_vocabularies(Words("a", "b", "c"), Words("a", "b", "c"))
    check_vocabularies(Words("a", "b", "c"), Words("a", "b", "c", "<pad>"))
    check_vocabularies(Words("a", "b", "c", "<pad>"), Words("a", "b", "c"))
    with pytest.raises(ValueError, match=r"2 of 3 tokens differ, the first is 1, 'b' here and 'c'"):
        check_vocabularies(Words("a", "b", "c"), Words("a", "c", "b", "d"))


def test_tokenizers_that_are_given_are_compared():
    model, (ids, mask) = model_of(), prompts(model_of())
    inputs = {"input_ids": ids, "attention_mask": mask}
    how = {"assistant": second_of(), "max_new_tokens": 2, "costs": COSTS}
    words = Words("a", "b", "c")
    generate(model, inputs, tokenizer=words, assistant_tokenizer=words, **how)
    with pytest.raises(ValueError, match="needs the model's own; pass tokenizer="):
        generate(model, inputs, assistant_tokenizer=words, **how)


def test_models_whose_numbers_tell_of_other_vocabularies_warn():
    model = model_of(vocab_size=300)
    padded, ends = second_of(vocab_size=302), copy.deepcopy(second_of(vocab_size=300))
    warn_of_vocabularies(model, padded)
    ends.generation_config.eos_token_id = [3, 4]
    warn_of_vocabularies(model, ends)  # the model has no end token
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = 4
    warn_of_vocabularies(model, ends)
    model.generation_config.eos_token_id = 2
    with pytest.warns(UserWarning, match="its eos_token_id is 3, not 2; layerskip.check_vocab"):
        warn_of_vocabularies(model, ends)
    other = second_of(vocab_size=320)
    with pytest.warns(UserWarning, match=r"would draft badly: it has 320 tokens, not 300;"):
        generate(model, prompts(model)[0][:1], assistant=other, max_new_tokens=2, costs=COSTS)


def test_an_assistant_that_the_library_drops_is_named():
    model = model_of()
    ids, mask = prompts(model)
    how = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    decoding = LayerSkipDecoding(EXIT, costs=COSTS)
    with pytest.warns(UserWarning, match=r"give the second model to LayerSkipDecoding\(assist"):
        got = model.generate(ids, custom_generate=decoding, assistant_model=second_of(), **how)
    assert got.tolist() == model.generate(ids, **how).tolist()
    with pytest.raises(ValueError, match="give assistant= for a second model"):
        generate(model, ids, assistant_model=second_of(), **how)
